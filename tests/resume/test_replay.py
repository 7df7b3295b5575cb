"""R3, R5, R7, R8, E3: what the upstream replays, and what is proof of what."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from relay.wire import post
from resume.story import (
    JSON,
    LAST_CHUNK,
    OVERLAP,
    SESSION,
    STREAM,
    Story,
    began,
    compact,
    event,
    note,
    notes,
    part,
    priming,
    reply,
    response,
    result,
    stream,
    until,
)


async def judged(story: Story, cursor: object, answer: bytes, asked: object = None) -> tuple[int, bytes]:
    """Resume, have the upstream answer a whole stream; what the client got in the end. `asked`: the cursor there."""
    client, server, request = await story.resumed(cursor)
    assert request.get(b"Last-Event-ID") == str(cursor if asked is None else asked).encode()
    await server.send(stream(answer))
    data = await client.rest()
    return client.status, data


REPLAYS = {
    # what the ledger has after the cursor 1 is 2 and 3
    "faithful": (notes(2, 3, 4, epoch=1), notes(2, 3, 4, epoch=1), "epoch"),
    "inclusive": (notes(1, 2, 3, 4, epoch=1), notes(2, 3, 4, epoch=1), "epoch"),
    "primed": (priming("p") + notes(2, 3, 4, epoch=1), priming("p") + notes(2, 3, 4, epoch=1), "epoch"),
    "commented": (b": x\n\n" + notes(2, 3, 4, epoch=1), b": x\n\n" + notes(2, 3, 4, epoch=1), "epoch"),
    "lost one": (notes(3, 4, epoch=1), None, "replay_gap"),
    "lost all": (notes(4, epoch=1), None, "replay_gap"),
    "shuffled": (notes(3, 2, 4, epoch=1), None, "replay_gap"),
    "altered": (event(2, note(22, 1)) + notes(3, epoch=1), None, "replay_mismatch"),
    "altered before the cursor": (event(1, note(11, 1)) + notes(2, 3, epoch=1), None, "replay_mismatch"),
    "another epoch first": (event(2, note(22, 2)), None, "epoch_changed"),
    "another epoch on a recorded id": (notes(2, epoch=2), None, "epoch_changed"),
}


@pytest.mark.parametrize(("answer", "want", "reason"), REPLAYS.values(), ids=REPLAYS)
async def test_r7_replays(proxy, answer, want, reason):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        status, data = await judged(story, 1, answer)
        assert story.verdicts() == [reason]
        if want is None:
            assert status == 404
            await story.fenced(reason)
        else:
            assert (status, data) == (200, want)


LATER = {
    "then a lost one": (notes(2, epoch=1), notes(4, epoch=1), "replay_gap"),
    "then an altered one": (notes(2, epoch=1), event(3, note(33, 1)), "replay_mismatch"),
    "then another epoch": (notes(2, 3, 4, epoch=1), notes(5, epoch=2), "epoch_changed"),
    "then a foreign response": (notes(2, 3, epoch=1), response(6, 1), "foreign_response"),
    "then an old one altered": (notes(2, 3, 4, epoch=1), event(2, note(22, 1)), "replay_mismatch"),
}


@pytest.mark.parametrize(("good", "bad", "reason"), LATER.values(), ids=LATER)
async def test_r11_checked_to_the_end(proxy, good, bad, reason):
    """The head is out and good events were released: the divergence is told on the stream (F5)."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(1, STREAM + part(good))
        await client.until(good)
        await server.send(part(bad))
        assert await client.told() == [(5, reason)]
        assert client.end == "clean"
        assert client.data.startswith(good)
        assert bad[:30] not in client.data[len(good) :]
        assert story.verdicts() == ["epoch", reason]
        await story.fenced(reason)


async def test_r7_exactly_once_after_everything_is_replayed(proxy):
    """A server that replays its whole stream, whatever it is asked for: cut after cut the client gets what is new."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        for last in range(4, 9):
            everything = notes(*range(1, last + 1), epoch=1)
            client, server, _ = await story.resumed(last - 1, STREAM + part(everything))
            await client.until(notes(last, epoch=1))
            server.reset()
            assert await client.rest() == notes(last, epoch=1)
        assert story.verdicts() == ["epoch"] * 5


async def test_r7_foreign_stream(proxy):
    """The replay brings an event that the ledger has on another stream of the session."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        other, server, _ = await story.ask(story.call(6))
        await server.send(stream(event("b1", note(61, 1)) + response(6, 1)))
        await other.rest()
        await story.cut()
        status, _ = await judged(story, 3, event("b1", note(61, 1)))
        assert (status, story.verdicts()) == (404, ["foreign_stream"])


async def test_r7_foreign_response_in_a_batch(proxy):
    """A batch that answers one call of this stream and one of another; after an event without fault."""
    async with proxy() as relay:
        story = await began(relay, epoch=1, calls=(5, 6))
        await story.cut()
        batch = b"[" + result(5, 1) + b"," + result(7, 1) + b"]"
        status, _ = await judged(story, 3, event("r", batch))
        assert (status, story.verdicts()) == (404, ["foreign_response"])


async def test_r7_any_token_of_a_batch_may_change(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1, calls=(5, 6))
        await story.cut()
        status, _ = await judged(story, 3, event("r", b"[" + result(5, 1) + b"," + result(6, 2) + b"]"))
        assert (status, story.verdicts()) == (404, ["epoch_changed"])


async def test_l3_a_batch_is_answered_in_parts(proxy):
    """Three calls: one answered live, one on the resume; the third is still owed, and told (F5)."""
    async with proxy() as relay:
        story = await began(relay, epoch=1, calls=(5, "six", 7), events=response(5, 1))
        await story.cut()
        client, server, _ = await story.resumed("r5", STREAM + part(response("six", 1)))
        await client.until(response("six", 1))
        await server.send(part(notes(8, epoch=2)))
        assert await client.told() == [(7, "epoch_changed")]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (notes(2, 3, 4), "overlap"),
        (notes(3, 4), "overlap"),
        (notes(1, 2, 3, 4), "overlap"),
        (b": hi\n\n" + priming("p") + notes(3, 4), "overlap"),
        (notes(4), "no_epoch"),
        (event(3, note(33)), "replay_mismatch"),
        (event(3, note(33)) + notes(4), "replay_mismatch"),
        (notes(2, 4), "overlap"),  # 3 is the client's own; nothing after it is missing
    ],
)
async def test_r5_rewound_by_one_event(proxy, answer, reason):
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        await story.pause()
        status, data = await judged(story, 3, answer, asked=2)
        assert story.verdicts() == [reason]
        if reason == "overlap":
            assert (status, data[-len(notes(4)) :]) == (200, notes(4))
            assert note(3) not in data
        else:
            await story.fenced(reason)


async def test_r5_the_first_event_has_none_before_it(proxy):
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay, events=notes(1))
        await story.pause()
        status, _ = await judged(story, 1, notes(2), asked=1)
        assert (status, story.verdicts()) == (404, ["no_epoch"])


async def test_r5_a_priming_event_is_an_event_before(proxy):
    """Servers that prime their streams make the very first message provable."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay, events=priming("p") + notes(1))
        await story.pause()
        status, data = await judged(story, 1, notes(1, 2), asked="p")
        assert (status, data, story.verdicts()) == (200, notes(2), ["overlap"])


async def test_r5_nothing_but_a_priming_event(proxy):
    """There is no event to repeat: only the cursor itself can be asked for."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay, events=priming("p"))
        await story.pause()
        status, _ = await judged(story, "p", notes(1))
        assert (status, story.verdicts()) == (404, ["no_epoch"])


async def test_r5_ids_that_stick(proxy):
    """Three messages under one id: the cursor means the last of them, and asking goes before the first."""
    async with proxy(resume=OVERLAP) as relay:
        sticky = event(2, note(21)) + event(None, note(22)) + event(None, note(23))
        story = await began(relay, events=notes(1) + sticky)
        await story.pause()
        status, data = await judged(story, 2, sticky + notes(3), asked=1)
        assert (status, data, story.verdicts()) == (200, notes(3), ["overlap"])


@pytest.mark.parametrize("status", [400, 401, 404, 405, 409, 500 + 3])
async def test_r5_asked_once_more_with_the_clients_own_cursor(proxy, status):
    """Whatever the rewound ask was refused with; and nobody but the proxy hears of that."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay, epoch=1)
        await story.pause()
        client, server, request = await story.resumed(3, reply(status, b'{"error":"invalid session"}', JSON))
        assert request.get(b"Last-Event-ID") == b"2"
        server, request = await story.asked()
        assert request.get(b"Last-Event-ID") == b"3"
        await server.send(stream(notes(4, epoch=1)))
        assert (await client.rest(), client.status) == (notes(4, epoch=1), 200)


async def test_l5_r5_evicted_events_are_unknown(proxy):
    """The ledger keeps four events: what it has forgotten is unknown, never divergent."""
    async with proxy(resume=OVERLAP) as relay:
        relay.context.ledger._records.limits = type(relay.context.ledger._records.limits)(streams=8, events=4)
        story = await began(relay, events=notes(*range(1, 10)))
        await story.pause()
        status, data = await judged(story, 9, notes(*range(7, 11)), asked=8)
        assert (status, data, story.verdicts()) == (200, notes(10), ["overlap"])
        refused = await story.resume(2)
        assert (await refused.error())["data"] == {"reason": "unknown_cursor"}
        assert await relay.unasked()


async def test_r7_a_store_that_loses_and_shuffles_events_of_one_millisecond(proxy):
    """The example store of one SDK sorts `<stream>_<time>_<random>` as text: of events of the same millisecond a replay
    loses those that sort before the cursor, and the rest comes in another order."""
    rng = random.Random(5)
    ids = [f"s_1700000000000_{rng.randrange(36**8):08x}" for _ in range(21)]
    blocks = {event_id: event(event_id, note(n, 1)) for n, event_id in enumerate(ids)}
    async with proxy() as relay:
        for at in range(20):
            story = await began(relay, epoch=1, events=b"".join(blocks.values()))
            await story.cut()
            replay = [event_id for event_id in sorted(ids) if event_id > ids[at]]
            assert replay != ids[at + 1 :]
            client, server, _ = await story.resumed(ids[at])
            await server.send(stream(b"".join(map(blocks.get, replay)) + response(5, 1)))
            data = await client.rest()
            released = data.count(b"id: ")
            assert story.verdicts()[-1] == "replay_gap", at
            assert data.startswith(b"".join(map(blocks.get, ids[at + 1 : at + 1 + released]))), at
            assert (client.status, released) == (404, 0) or await client.told() == [(5, "replay_gap")], at


@pytest.mark.parametrize(
    ("ids", "new", "reason"),
    [
        ("1 2 3", "5", "id_gap"),
        ("1 2 3", "2.5", "id_gap"),
        ("a-1 a-2 a-3", "a-4", None),
        ("a-1 a-2 a-3", "a-5", "id_gap"),
        ("a-1 a-2 a-3", "b-4", "id_gap"),
        ("1 5 9", "20", None),
        ("1 5 9", "7", "id_rewind"),
        ("x 7 q", "r", None),
        ("1 2", "9", None),
        ("008 009 010", "011", None),
        ("1 2 2 3", "2", None),
    ],
)
async def test_e3_order_of_ids(proxy, ids, new, reason):
    """Learnt live, checked on the first event beyond the ledger; an epoch that fits does not excuse it."""
    async with proxy() as relay:
        live = b"".join(event(event_id, note(n, 1)) for n, event_id in enumerate(ids.split()))
        story = await began(relay, epoch=1, events=live)
        await story.cut()
        status, _ = await judged(story, ids.split()[-1], event(new, note("new", 1)))
        assert (status, story.verdicts()) == ((200, ["epoch"]) if reason is None else (404, [reason]))


async def test_e3_ids_of_other_streams_fill_a_gap(proxy):
    """One counter for the session: 4 and 5 went to another call."""
    async with proxy(resume={"event_ids": "consecutive"}) as relay:
        story = await began(relay, epoch=1)
        other, server, _ = await story.ask(story.call(6))
        await server.send(stream(notes(4, 5, epoch=1)))
        await other.rest()
        await story.cut()
        status, _ = await judged(story, 3, notes(6, epoch=1))
        assert (status, story.verdicts()) == (200, ["epoch"])


async def test_l4_every_delivered_id_is_a_cursor(proxy):
    async with proxy() as relay:
        for cursor in (1, 2, 3):
            story = await began(relay, epoch=1)
            await story.cut()
            want = notes(*range(cursor + 1, 5), epoch=1)
            assert await judged(story, cursor, want) == (200, want)


async def test_l4_an_id_that_was_read_but_not_delivered(proxy):
    """The client left in the middle; the proxy read more than it could deliver, and gave the hold up."""
    async with proxy(resume={"hold": {"bytes": 400}}) as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.server.send(part(notes(4, 5, 6, 7, 8, epoch=1)))
        assert await story.server.gone()
        client, server, _ = await story.resumed(5, STREAM + part(notes(6, 7, 8, 9, epoch=1)))
        await client.until(notes(9, epoch=1))
        assert bytes(client.data) == notes(6, 7, 8, 9, epoch=1)


# -- R3


async def test_r3_unknown_session_and_cursor(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        unknown = await story.send(story.again(3).replace(b"S1", b"S2"))
        assert (await unknown.error())["data"] == {"reason": "unknown_session"}
        cursor = await story.resume("made-up")
        assert (await cursor.error())["data"] == {"reason": "unknown_cursor"}
        assert await relay.unasked()
        await story.fenced("unknown_cursor")


async def test_r3_f3_a_strangers_made_up_cursor_fences_nobody(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1, fields=(b"Authorization: Bearer mine",))
        cursor = await story.resume("made-up", fields=(b"Authorization: Bearer other",))
        assert (await cursor.error())["data"] == {"reason": "unknown_cursor"}
        await story.alive()


async def test_r3_nothing_delivered_yet(proxy):
    """A cursor from the former session, brought along by the client: it becomes a new stream, recorded as such."""
    async with proxy() as relay:
        story = Story(relay)
        await story.open(1)
        client, server, request = await story.ask(story.again("old"))
        assert request.get(b"Last-Event-ID") is None
        await server.send(STREAM + part(notes(1, epoch=1)))
        await client.until(notes(1, epoch=1))
        client.peer.reset()
        await until(lambda: story.held == 1)
        again = await story.resume(1)
        await server.send(part(notes(2, epoch=1)))
        await again.until(notes(2, epoch=1))
        refused = await story.resume("old")
        assert (await refused.error())["data"] == {"reason": "unknown_cursor"}
        assert story.verdicts() == ["stale_cursor", "connection", "unknown_cursor"]


@pytest.mark.parametrize("cursor", ["p0", "i1"])
async def test_r3_l4_the_handshake_was_a_stream_with_ids(proxy, cursor):
    """Its ids are cursors, and yet do not count as delivered for other cursors."""
    async with proxy() as relay:
        story = Story(relay)
        granted = {"protocolVersion": "2025-11-25", "capabilities": {}, "_meta": {"session_epoch": 1}}
        opened = compact({"jsonrpc": "2.0", "id": 0, "result": granted})
        body = compact({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {}})
        asking, server, _ = await story.ask(post(body))
        head = STREAM[:-2] + b"Mcp-Session-Id: S1\r\n\r\n"
        await server.send(head + part(priming("p0") + event("i1", opened)) + LAST_CHUNK)
        await asking.rest()
        stale, server, request = await story.ask(story.again("old"))
        assert request.get(b"Last-Event-ID") is None
        await server.send(stream())
        await stale.rest()
        client, server, request = await story.ask(story.again(cursor))
        assert request.get(b"Last-Event-ID") == cursor.encode()
        await server.send(stream(b"" if cursor == "i1" else event("i1", opened)))
        assert await client.rest() == (b"" if cursor == "i1" else event("i1", opened))
        assert client.status == 200
        assert story.verdicts() == (["stale_cursor"] if cursor == "i1" else ["stale_cursor", "epoch"])


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("method", [b"initialize", b"initializ\\u0065"], ids=["plain", "escaped"])
async def test_l1_the_same_id_granted_again_is_a_new_epoch(proxy, method, split):
    """However the request came, and however its method is written: the answer is no change of a live session (R12)."""
    async with proxy() as relay:
        await began(relay, epoch=1)
        body = b'{"jsonrpc":"2.0","id":7,"method":"%b","params":{}}' % method
        head, at = post(body, SESSION)[: -len(body)], body.index(b"init") + 4
        asking = await relay.connect()
        await asking.send(*((head, body[:at], body[at:]) if split else (head + body,)))
        server = await relay.accept()
        await server.request()
        granted = compact(
            {"jsonrpc": "2.0", "id": 7, "result": {"protocolVersion": "x", "_meta": {"session_epoch": 2}}}
        )
        await server.send(reply(200, granted, JSON, SESSION))
        assert (await asking.message()).status == 200
        session = relay.context.ledger.get(b"S1", time.time())
        assert (session.token, session.fence) == ("2", None)


async def test_r3_spaces_around_a_cursor_are_no_part_of_it(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.server.send(part(notes(4, epoch=1)))
        data = story.again(3).replace(b"Last-Event-ID: 3", b"last-event-id:\t 3 \t")
        client = await story.send(data)
        await client.until(notes(4, epoch=1))


async def test_l1_spaces_around_a_session_id_are_no_part_of_it(proxy):
    async with proxy() as relay:
        story = Story(relay)
        await story.open(1, session=SESSION + b" ")
        await story.alive()
        client, server, _ = await story.ask(story.call(5).replace(SESSION, SESSION + b"\t"))
        await server.send(reply(404, b"gone", b"Content-Type: text/plain"))
        assert (await client.error())["data"] == {"reason": "session_lost"}


async def test_l3_a_session_with_streams_and_json(proxy):
    """Calls are answered by a stream, by JSON, by a stream: the JSON opens no stream and disturbs none."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.alive()
        other, server, _ = await story.ask(story.call(6))
        await server.send(stream(event("b1", note(61, 1)) + response(6, 1)))
        await other.rest()
        await story.server.send(part(notes(4, epoch=1)))
        client = await story.resume(3)
        await client.until(notes(4, epoch=1))
        assert story.verdicts() == ["connection"]


# -- R8


UNPROVEN = {
    "no_epoch": (OVERLAP, None, notes(4)),
    "epoch_missing": ({}, 1, notes(4)),
    "no_proof": ({"accept": ["connection"]}, 1, notes(4, epoch=1)),
    "boundary": (OVERLAP, None, notes(3, 4)),
}


@pytest.mark.parametrize("reason", UNPROVEN)
@pytest.mark.parametrize("unproven", ["restart", "resume"])
async def test_r8_unproven(proxy, reason, unproven):
    resume, epoch, answer = UNPROVEN[reason]
    async with proxy(resume=resume | {"unproven": unproven}) as relay:
        story = await began(relay, epoch=epoch)
        await story.pause()
        if reason == "boundary":
            await outage(story)
        client, server, _ = await story.resumed(3, stream(answer))
        data = await client.rest()
        assert story.verdicts() == [reason]
        if unproven == "resume":
            assert (client.status, data) == (200, answer.replace(notes(3), b""))
            await story.alive()
        else:
            assert client.status == 404
            await story.fenced(reason)


async def test_r8_let_through_and_still_checked(proxy):
    """`unproven: resume` lets pass what nothing proves, never what contradicts the record."""
    async with proxy(resume={"unproven": "resume"}) as relay:
        story = await began(relay, epoch=1)
        await story.pause()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4)))
        await client.until(notes(4))
        await server.send(part(notes(5, epoch=2)))
        assert await client.told() == [(5, "epoch_changed")]
        assert story.verdicts() == ["epoch_missing", "epoch_changed"]


async def test_r3_r8_an_unknown_cursor_is_let_through_and_held(proxy):
    """`unproven: resume`: the stream is a new one in the ledger, and can be resumed in turn."""
    async with proxy(resume={"unproven": "resume"}) as relay:
        story = await began(relay, epoch=1)
        client, server, request = await story.resumed("made-up", STREAM + part(event("n1", note(1, 1))))
        assert request.get(b"Last-Event-ID") == b"made-up"
        await client.until(note(1, 1))
        client.peer.reset()
        await until(lambda: story.held == 1)
        await server.send(part(event("n2", note(2, 1))))
        again = await story.resume("n1")
        await again.until(event("n2", note(2, 1)))
        assert story.verdicts() == ["unknown_cursor", "connection"]


async def outage(story: Story) -> None:
    """A new connection to the upstream is reset before anything was answered."""
    client, server, _ = await story.ask(story.call(50))
    server.reset()
    await client.rest()
    assert client.status == 502


async def evicted(story: Story) -> None:
    """The upstream has told a stranger, who may not fence, that the session is unknown."""
    client, server, _ = await story.ask(story.call(50, fields=(b"Authorization: Bearer other",)))
    await server.send(reply(404, b"Session not found", b"Content-Type: text/plain"))
    await client.rest()
    assert client.status == 404


async def another_instance(story: Story) -> None:
    client, server, _ = await story.ask(story.call(50))
    await server.send(reply(200, result(50), JSON, b"X-Instance: two"))
    await client.rest()


async def idle(story: Story) -> None:
    await asyncio.sleep(0.25)


async def nothing(story: Story) -> None:
    await story.alive()


SIGNALS = {"outage": outage, "evicted": evicted, "another instance": another_instance, "idle": idle, "nothing": nothing}
EPOCH = {"instance_header": "X-Instance", "session_ttl": 0.2}


@pytest.mark.parametrize("signal", SIGNALS)
async def test_r8_a_boundary_since_the_cursor(proxy, signal):
    async with proxy(resume=OVERLAP, epoch=EPOCH) as relay:
        story = await began(relay, head=STREAM[:-2] + b"X-Instance: one\r\n\r\n")
        await story.pause()
        await SIGNALS[signal](story)
        status, _ = await judged(story, 3, notes(3, 4), asked=2)
        want = (200, ["overlap"]) if signal == "nothing" else (404, ["boundary"])
        assert (status, story.verdicts()) == want


@pytest.mark.parametrize("signal", ["outage", "evicted", "another instance"])
async def test_r8_a_boundary_before_the_cursor(proxy, signal):
    """The cursor's event came after the sign, from the session itself: it is no hint any more."""
    async with proxy(resume=OVERLAP, epoch=EPOCH) as relay:
        story = await began(relay)
        await SIGNALS[signal](story)
        await story.server.send(part(notes(4)))
        await story.answer.until(notes(4))
        await story.pause()
        status, _ = await judged(story, 4, notes(4, 5), asked=3)
        assert (status, story.verdicts()) == (200, ["overlap"])


@pytest.mark.parametrize("resumed", [False, True])
async def test_r8_what_an_instance_that_is_going_still_says(proxy, resumed):
    """A deployment: another instance has answered, and gets the resume; the old one brings the last of its stream."""
    one = STREAM[:-2] + b"X-Instance: one\r\n\r\n"
    async with proxy(resume=OVERLAP, epoch=EPOCH) as relay:
        story = await began(relay, head=one)
        if resumed:
            await story.cut()
            story.answer, story.server, _ = await story.resumed(3, one + part(notes(3, 4)))
            await story.answer.until(notes(4))
        await another_instance(story)
        await story.server.send(part(notes(5) if resumed else notes(4, 5)))
        await story.answer.until(notes(5))
        await story.pause()
        status, _ = await judged(story, 5, notes(5, 6), asked=4)
        assert (status, story.verdicts()[-1]) == (404, "boundary")


async def test_r8_the_resume_itself_comes_from_another_instance(proxy):
    async with proxy(resume=OVERLAP, epoch=EPOCH) as relay:
        story = await began(relay, head=STREAM[:-2] + b"X-Instance: one\r\n\r\n")
        await story.pause()
        client, server, _ = await story.resumed(3)
        await server.send(STREAM[:-2] + b"X-Instance: two\r\n\r\n" + part(notes(3, 4)))
        assert (await client.error())["data"] == {"reason": "boundary"}


@pytest.mark.parametrize("named", [b"another", None, "its own"])
async def test_r8_the_replay_names_another_session(proxy, named):
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        await story.pause()
        client, server, request = await story.resumed(3)
        named = request.get(b"Mcp-Session-Id") if named == "its own" else named
        field = b"" if named is None else b"Mcp-Session-Id: " + named + b"\r\n"
        await server.send(STREAM[:-2] + field + b"\r\n" + part(notes(3, 4)) + LAST_CHUNK)
        if named == b"another":
            assert (await client.error())["data"] == {"reason": "boundary"}
        else:
            await client.until(notes(4))
            assert story.verdicts() == ["overlap"]


async def test_r8_r9_an_outage_between_two_asks(proxy):
    """The first ask was answered by nothing; before the second the upstream refused another request."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        await story.pause()
        other = await story.ask(story.call(50))
        client, server, _ = await story.resumed(3, stream())
        assert await server.gone()
        other[1].reset()
        await other[0].rest()
        server, request = await story.asked()
        await server.send(stream(notes(3, 4)))
        assert (await client.error())["data"] == {"reason": "boundary"}


async def test_r8_a_priming_event_is_no_sign_of_life(proxy):
    """It was all that a server had to say to a resume, which proved nothing; the sign before it still counts."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay, calls=())
        await story.pause()
        await outage(story)
        client, _, _ = await story.resumed(3, stream(priming("p")))
        assert await client.rest() == priming("p")
        client, _, request = await story.resumed("p", STREAM + part(notes(3, 4)))
        assert request.get(b"Last-Event-ID") == b"2"
        assert (await client.error())["data"] == {"reason": "boundary"}


@pytest.mark.parametrize("when", ["cut", "paused"])
async def test_r8_the_end_of_the_stream_itself_is_no_boundary(proxy, when):
    """A connection that had begun to answer was not refused (section 2)."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        await (story.cut() if when == "cut" else story.pause())
        assert (await judged(story, 3, notes(3, 4), asked=2))[0] == 200


async def test_r8_an_overlap_that_is_not_accepted_is_swallowed_all_the_same(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.pause()
        assert await judged(story, 3, notes(2, 3, 4, epoch=1)) == (200, notes(4, epoch=1))


async def test_e1_tokens_from_the_response_header(proxy):
    """A header counts for every message of its response."""
    async with proxy() as relay:
        story = Story(relay)
        await story.open(None, b"Mcp-Session-Epoch: e1")
        for number, (token, reason) in enumerate([(b"e1", "epoch"), (b"e2", "epoch_changed")]):
            head = STREAM[:-2] + b"Mcp-Session-Epoch: e1\r\n\r\n"
            story.answer, story.server, _ = await story.ask(story.call(5))
            first = event(f"s{number}", note(1))
            await story.server.send(head + part(first))
            await story.answer.until(first)
            await story.cut()
            client, server, _ = await story.resumed(f"s{number}")
            await server.send(
                head.replace(b"e1\r\n", token + b"\r\n") + part(event(f"t{number}", note(2))) + LAST_CHUNK
            )
            await client.rest()
            assert story.verdicts()[-1] == reason


@pytest.mark.parametrize("token", [1, "1"])
async def test_e1_tokens_compare_as_text(proxy, token):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        assert (await judged(story, 3, notes(4, epoch=token)))[0] == 200


STRANGER = (b"Authorization: Bearer other",)


async def refused_stranger(story: Story, *fields: bytes) -> None:
    """A gateway refuses somebody else's request with this session id."""
    client, server, _ = await story.ask(story.call(50, fields=STRANGER))
    await server.send(reply(401, b"", *fields))
    await client.rest()
    assert client.status == 401


async def test_f3_r8_a_refused_strangers_answer_tells_of_no_instance(proxy):
    async with proxy(resume=OVERLAP, epoch=EPOCH) as relay:
        story = await began(relay, head=STREAM[:-2] + b"X-Instance: one\r\n\r\n")
        await story.pause()
        await refused_stranger(story, b"X-Instance: gateway")
        status, _ = await judged(story, 3, notes(3, 4), asked=2)
        assert (status, story.verdicts()) == (200, ["overlap"])


async def test_r8_l5_a_refused_strangers_requests_hide_no_gap(proxy):
    async with proxy(resume=OVERLAP, epoch=EPOCH) as relay:
        story = await began(relay)
        await story.pause()
        active_at = story.session.active_at
        for _ in range(3):
            await asyncio.sleep(0.1)
            await refused_stranger(story)
        assert story.session.active_at == active_at
        status, _ = await judged(story, 3, notes(3, 4), asked=2)
        assert (status, story.verdicts()) == (404, ["boundary"])


async def test_l5_a_refused_resume_of_an_unknown_cursor_opens_no_stream(proxy):
    """`unproven: resume`: else made-up cursors would push what is known out of the record."""
    async with proxy(resume={"unproven": "resume"}) as relay:
        story = await began(relay, epoch=1)
        before = list(story.session)
        client, server, _ = await story.ask(story.again("made-up", fields=STRANGER))
        await server.send(reply(401))
        await client.rest()
        assert (client.status, list(story.session)) == (401, before)


ERAS = {
    "empty": ([b""], True),
    "blank": ([b" "], True),
    "with a blank": ([b"2025-11-25 "], True),
    "with a tab": ([b"2025-11-25\t"], True),
    "twice": ([b"2025-11-25, 2025-11-25"], True),
    "of both eras": ([b"2026-07-28, 2025-11-25"], True),
    "of both eras, in two fields": ([b"2026-07-28", b"2025-03-26"], True),
    "empty members": ([b",", b""], True),
    "of the era without sessions": ([b"2026-07-28 "], False),
    "twice of that": ([b"2026-07-28,2026-07-28", b"2026-07-28"], False),
}


@pytest.mark.parametrize(("versions", "guarded"), ERAS.values(), ids=ERAS)
async def test_s1_any_version_of_the_session_era_is_guarded(proxy, versions, guarded):
    """Nobody knows which of them the server takes."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        fields = tuple(b"MCP-Protocol-Version: " + version for version in versions)
        client, server, request = await story.resumed(3, b"", *fields)
        assert request.all(b"MCP-Protocol-Version") == [version.strip() for version in versions]
        await server.send(stream(notes(4, epoch=2)))
        await client.rest()
        assert client.status == (404 if guarded else 200)
