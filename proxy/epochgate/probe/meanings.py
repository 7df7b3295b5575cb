"""What each outcome means to an operator, and what follows from it: the words of the report."""

from __future__ import annotations

from epochgate.probe.findings import Check, Level, Meaning

MEANINGS: dict[tuple[Check, str], Meaning] = {
    (Check.PROTOCOL, "sessions"): Meaning(
        Level.GOOD,
        "The server speaks a protocol version that has sessions and resumable streams.",
    ),
    (Check.PROTOCOL, "none"): Meaning(
        Level.UNKNOWN,
        "The server did not accept `initialize`, so nothing could be found out about its sessions.",
        "Check the URL and the credentials (`--header`). A server that speaks only 2026-07-28 has no sessions and "
        "needs no guard.",
    ),
    (Check.PROTOCOL, "no answer"): Meaning(
        Level.UNKNOWN,
        "Nothing usable answers at this address, so nothing could be found out.",
        "Check the address, and whether the server is up.",
    ),
    (Check.SESSION, "unique"): Meaning(
        Level.GOOD,
        "Each session gets an id of its own.",
    ),
    (Check.SESSION, "stateless"): Meaning(
        Level.GOOD,
        "The server issues no session ids. There is no session that a stream could lose.",
        "No guard is needed.",
    ),
    (Check.SESSION, "repeated"): Meaning(
        Level.RISK,
        "Two sessions were given the same id, so the id does not say whose state a request meets.",
        "Each `initialize` voids the record of the former session. Make the server draw random ids.",
    ),
    (Check.MISSING, "refused"): Meaning(
        Level.GOOD,
        "A request without a session id is refused.",
    ),
    (Check.MISSING, "accepted"): Meaning(
        Level.NOTE,
        "Requests are answered outside of any session as well.",
        "Such requests pass unguarded; there is nothing to lose in them.",
    ),
    (Check.ANSWERS, "stream"): Meaning(
        Level.NOTE,
        "Requests are answered by event streams, which clients resume when they are cut.",
    ),
    (Check.ANSWERS, "json"): Meaning(
        Level.NOTE,
        "All that was asked was answered by plain JSON: there was no stream to resume.",
    ),
    (Check.ANSWERS, "mixed"): Meaning(
        Level.NOTE,
        "Some requests are answered by event streams, some by plain JSON.",
    ),
    (Check.ANSWERS, "failed"): Meaning(
        Level.UNKNOWN,
        "A healthy request was not answered.",
        "Probe again when the server is well.",
    ),
    (Check.EVENT_IDS, "consecutive"): Meaning(
        Level.GOOD,
        "Ids count up by one in each stream: a lost event shows.",
        "`event_ids: auto` learns this and refuses a gap.",
    ),
    (Check.EVENT_IDS, "increasing"): Meaning(
        Level.GOOD,
        "Ids grow within a stream: going back shows, a lost event does not.",
        "`event_ids: auto` learns this.",
    ),
    (Check.EVENT_IDS, "shared counter"): Meaning(
        Level.NOTE,
        "One counter numbers the events of all sessions, so a stream's ids grow with gaps that mean nothing, and "
        "the counter starts over with the server.",
        "Set `event_ids: increasing`.",
    ),
    (Check.EVENT_IDS, "opaque"): Meaning(
        Level.NOTE,
        "Ids have no order: from the ids alone neither loss nor rewinding shows.",
        "The record of what was delivered is what replays are compared with.",
    ),
    (Check.EVENT_IDS, "repeated"): Meaning(
        Level.RISK,
        "Different events carry the same id, which the specification forbids: a cursor does not name one event.",
        "Ids are not checked for this server; epoch and held connections are what proves a resume.",
    ),
    (Check.EVENT_IDS, "none"): Meaning(
        Level.GOOD,
        "No event carries an id, so clients have no cursor and never resume.",
        "There is nothing to guard: leave it at `mode: observe`.",
    ),
    (Check.EVENT_IDS, "none seen"): Meaning(
        Level.UNKNOWN,
        "The answers to ping and tools/list carry no event ids; those of tools may.",
        "Probe again with `--tool NAME --arguments JSON`.",
    ),
    (Check.PRIMING, "primed"): Meaning(
        Level.NOTE,
        "Streams begin with a cursor, so clients resume even before the first message.",
    ),
    (Check.PRIMING, "polling"): Meaning(
        Level.NOTE,
        "The server closes streams before their response and lets clients reconnect: each long call is resumed on a "
        "new connection.",
        "Held connections prove nothing for this server: a resume needs an epoch token or `overlap`.",
    ),
    (Check.PRIMING, "retry"): Meaning(
        Level.NOTE,
        "The server tells clients when to reconnect (`retry`), so it may close streams before their response.",
        "If it does, held connections prove nothing, and it takes an epoch token or `overlap`. Probe with "
        "`--tool` to see.",
    ),
    (Check.PRIMING, "plain"): Meaning(
        Level.NOTE,
        "The streams that were seen have neither priming events nor `retry`.",
    ),
    (Check.EPOCH, "present"): Meaning(
        Level.GOOD,
        "The server marks its sessions with an epoch token: a re-created session shows.",
    ),
    (Check.EPOCH, "partial"): Meaning(
        Level.NOTE,
        "There is an epoch token, but not on every message of a stream: a resume whose first message has none is "
        "unproven.",
        "Mark every message, or let resumes rest on held connections.",
    ),
    (Check.EPOCH, "unstable"): Meaning(
        Level.RISK,
        "What looks like an epoch token changes within one living session, so it does not mark the session.",
        "It is left out of the policy.",
    ),
    (Check.EPOCH, "none"): Meaning(
        Level.NOTE,
        "Nothing in the traffic tells a re-created session from the old one.",
        "A resume can be proven only by a held connection, or by `overlap` where the buffer ends with the "
        "session. Add `_meta.session_epoch` to be sure.",
    ),
    (Check.REPLAY, "faithful"): Meaning(
        Level.GOOD,
        "After a cursor exactly the missed events come, in order and unchanged.",
    ),
    (Check.REPLAY, "inclusive"): Meaning(
        Level.NOTE,
        "The replay repeats the cursor's own event or earlier ones first, then is complete: clients see events twice.",
        "epochgate swallows the repeated ones.",
    ),
    (Check.REPLAY, "lossy"): Meaning(
        Level.RISK,
        "Events that were sent after the cursor are missing from the replay, and nothing tells the client.",
        "epochgate refuses such a replay (`replay_gap`) where it has seen those events.",
    ),
    (Check.REPLAY, "shuffled"): Meaning(
        Level.RISK,
        "The replay has the missed events in another order.",
        "epochgate refuses such a replay (`replay_gap`).",
    ),
    (Check.REPLAY, "altered"): Meaning(
        Level.RISK,
        "An event came again under its id with other content.",
        "epochgate refuses such a replay (`replay_mismatch`).",
    ),
    (Check.REPLAY, "rewritten"): Meaning(
        Level.NOTE,
        "The replay has the missed messages, but written with other bytes (such as another order of members) than "
        "at first.",
        "epochgate compares bytes, so it takes such a replay of events that it has seen for a contradiction "
        "(`replay_mismatch`). Held connections pass; `overlap` would refuse every resume.",
    ),
    (Check.REPLAY, "silent"): Meaning(
        Level.RISK,
        "The resume is granted but what was missed never comes. A call that was cut hangs until the client's "
        "time-out, if it has one.",
        "Only a held connection (`hold.time`) saves a cut call on this server.",
    ),
    (Check.REPLAY, "empty"): Meaning(
        Level.RISK,
        "The resume is granted and closed at once, without the missed events: some clients ask again once a second "
        "for ever.",
        "epochgate ends that loop (`no_event`). Only a held connection saves a cut call on this server.",
    ),
    (Check.REPLAY, "refused"): Meaning(
        Level.GOOD,
        "Streams that have ended are not replayed; the client is told.",
        "Only a held connection (`hold.time`) saves a cut call on this server.",
    ),
    (Check.REPLAY, "nothing to replay"): Meaning(
        Level.GOOD,
        "There are no event ids, so nothing can be replayed.",
    ),
    (Check.RECONNECT, "continued"): Meaning(
        Level.GOOD,
        "A call that was cut goes on after the reconnect, and its response comes.",
    ),
    (Check.RECONNECT, "lossy"): Meaning(
        Level.RISK,
        "After a reconnect in a call, events are missing although the response comes.",
        "Hold connections as long as clients need to come back (`hold.time`).",
    ),
    (Check.RECONNECT, "repeated"): Meaning(
        Level.NOTE,
        "After a reconnect in a call, events come twice.",
        "epochgate swallows the repeated ones.",
    ),
    (Check.RECONNECT, "hangs"): Meaning(
        Level.RISK,
        "The resume is granted but what was missed never comes. A call that was cut hangs until the client's "
        "time-out, if it has one.",
        "Only a held connection (`hold.time`) saves a cut call on this server.",
    ),
    (Check.RECONNECT, "refused"): Meaning(
        Level.NOTE,
        "A call that was cut cannot be resumed; the client is told.",
        "Only a held connection (`hold.time`) saves a cut call on this server.",
    ),
    (Check.RECONNECT, "too short"): Meaning(
        Level.UNKNOWN,
        "The named tool answered before its stream could be cut.",
        "Name a tool that streams for a second or more.",
    ),
    (Check.UNKNOWN_CURSOR, "refused"): Meaning(
        Level.GOOD,
        "A cursor that the server does not know is refused.",
    ),
    (Check.UNKNOWN_CURSOR, "silent"): Meaning(
        Level.RISK,
        "A resume from a cursor that the server no longer knows is granted, and stays silent for ever. Clients "
        "cannot tell it from a quiet stream.",
        "epochgate refuses cursors that it has not seen (`unproven: restart`).",
    ),
    (Check.UNKNOWN_CURSOR, "empty"): Meaning(
        Level.RISK,
        "A resume from a cursor that the server no longer knows is granted and ends at once: some clients ask again "
        "once a second for ever.",
        "epochgate refuses cursors that it has not seen (`unproven: restart`).",
    ),
    (Check.UNKNOWN_CURSOR, "replayed"): Meaning(
        Level.RISK,
        "A cursor that never existed is answered with recorded events: the server does not check what it resumes from.",
        "Keep `unproven: restart`, and never accept `overlap`.",
    ),
    (Check.FOREIGN_CURSOR, "refused"): Meaning(
        Level.GOOD,
        "A cursor of another session is refused.",
    ),
    (Check.FOREIGN_CURSOR, "nothing"): Meaning(
        Level.GOOD,
        "A cursor of another session shows none of its events.",
    ),
    (Check.FOREIGN_CURSOR, "leak"): Meaning(
        Level.RISK,
        "A session that sends another session's cursor is given the other session's events, results included. This "
        "is a leak.",
        "epochgate does not forward cursors that the session was not given (`unproven: restart`). Scope the "
        "server's event store to the session.",
    ),
    (Check.AFTER_DELETE, "refused"): Meaning(
        Level.GOOD,
        "After DELETE none of the session's events could be had, neither under its own id nor under another's.",
    ),
    (Check.AFTER_DELETE, "outlives"): Meaning(
        Level.RISK,
        "The event buffer outlives its session: events of a deleted session are still replayed. With a session that "
        "is created anew this gives spliced streams.",
        "epochgate fences deleted sessions and refuses cursors from before. Make the server drop the buffer with "
        "the session.",
    ),
    (Check.AFTER_DELETE, "granted"): Meaning(
        Level.RISK,
        "A resume under the id of a deleted session is granted, although none of its events came: the server carries "
        "on under an id that is not a live session, and the client is not told.",
        "Nothing but an epoch token shows such a change on a new connection. Never accept `overlap` here.",
    ),
    (Check.AFTER_DELETE, "not deletable"): Meaning(
        Level.NOTE,
        "Sessions cannot be ended by DELETE, so the life of their buffers is not known.",
    ),
    (Check.SECOND_GET, "none"): Meaning(
        Level.NOTE,
        "The server offers no standalone stream.",
    ),
    (Check.SECOND_GET, "one"): Meaning(
        Level.NOTE,
        "One standalone stream is allowed; a second is refused while the first is open.",
        "epochgate closes a held one when a new one is asked for.",
    ),
    (Check.SECOND_GET, "takeover"): Meaning(
        Level.NOTE,
        "A second standalone stream ends the first.",
    ),
    (Check.SECOND_GET, "several"): Meaning(
        Level.NOTE,
        "Several standalone streams may be open at a time.",
    ),
    (Check.IDLE, "alive"): Meaning(
        Level.NOTE,
        "An idle session was still alive at the end of the probe; how long it lives is not known.",
        "Probe with a longer `--idle` to find out, and set `epoch.session_ttl` if you know it.",
    ),
    (Check.IDLE, "lost"): Meaning(
        Level.RISK,
        "An idle session was gone within the probe: each pause of a client costs its session.",
        "Set `epoch.session_ttl` to the server's limit.",
    ),
}
for _check in (Check.UNKNOWN, Check.DELETED):
    MEANINGS |= {
        (_check, "404"): Meaning(
            Level.GOOD,
            "The loss is told as the specification says; clients can start over.",
        ),
        (_check, "400"): Meaning(
            Level.RISK,
            "Clients start over only at a 404. At this answer they keep the dead session and fail until somebody "
            "reconnects them.",
            "epochgate turns this answer into the 404 that clients understand (`normalize_loss: true`).",
        ),
        (_check, "other"): Meaning(
            Level.RISK,
            "Clients start over only at a 404. At this answer they keep the dead session and fail until somebody "
            "reconnects them.",
            "epochgate passes it on unchanged, because it may mean something else. Make the server answer 404.",
        ),
        (_check, "accepted"): Meaning(
            Level.RISK,
            "The server carries on under an id that is not a live session: state is created anew behind the same "
            "id, and the client is not told.",
            "Nothing but an epoch token shows such a change on a new connection. Never accept `overlap` here.",
        ),
        (_check, "forbidden"): Meaning(
            Level.UNKNOWN,
            "The credentials were refused, which says nothing about the session.",
            "Give credentials with `--header`.",
        ),
        (_check, "not deletable"): Meaning(
            Level.NOTE,
            "Sessions cannot be ended by DELETE; they live until the server drops them.",
        ),
    }
for _check in Check:
    MEANINGS |= {
        (_check, "not found out"): Meaning(
            Level.UNKNOWN,
            "This could not be found out.",
            "Probe again, with a longer `--timeout`.",
        ),
        (_check, "not looked at"): Meaning(
            Level.NOTE,
            "This shows only in a tool's stream, and none was called.",
            "Probe with `--tool NAME --arguments JSON` to see it.",
        ),
        (_check, "does not apply"): Meaning(
            Level.GOOD,
            "This server gives no occasion for it.",
        ),
    }
