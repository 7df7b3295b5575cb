"""Questions about streams: what their ids are like, and what a server does with a cursor."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from epochgate.guard.eventids import Learner, Order
from epochgate.probe.client import Event, Exchange, Session, is_response
from epochgate.probe.findings import Check, Finding
from epochgate.probe.sessions import tool_call
from epochgate.probe.survey import GRACE, SETTLE, Recorded, Survey, describe, form, lookalike

_TRIED = 8  # streams of a session that are resumed from another one
_PATIENCE = 3.0  # seconds that a resumed call may take longer than an undisturbed one
_NO_IDS = "no event carries an id"
# What is told about several replays of one server: the first of these that one of them showed.
_WORST_FIRST = ("altered", "lossy", "shuffled", "silent", "empty", "rewritten", "inclusive", "faithful", "refused")


async def ask_event_ids(survey: Survey) -> list[Finding]:
    """The form of event ids, their order, and whether one counter serves all sessions (E3)."""
    streams = [stream for stream in survey.streams if stream.ids]
    if not streams:
        outcome = "none seen" if survey.tool is None else "none"
        return [Finding(Check.EVENT_IDS, outcome, f"{len(survey.streams)} streams without ids")]
    forms = Counter(form(i) for stream in streams for i in stream.ids)
    survey.facts.id_form = forms.most_common(1)[0][0]
    seen = f"form {survey.facts.id_form}, {sum(forms.values())} ids on {len(streams)} streams"
    if _repeats(streams):
        return [Finding(Check.EVENT_IDS, "repeated", seen)]
    if len({s.session.id for s in streams}) > 1 and _order([i for s in streams for i in s.ids]) >= Order.INCREASING:
        return [Finding(Check.EVENT_IDS, "shared counter", seen)]
    order = min(_order(stream.ids) for stream in streams if len(stream.ids) > 1 or len(streams) == 1)
    return [Finding(Check.EVENT_IDS, order.name.lower(), seen)]


def _without_ids(survey: Survey, check: Check, outcome: str = "does not apply") -> Finding:
    """There is no cursor to ask with; whether a tool's stream would have one is not known where none was named."""
    if survey.tool is None:
        return Finding(check, "not looked at", f"{_NO_IDS}, and no tool was named")
    return Finding(check, outcome, _NO_IDS)


def _order(ids: Sequence[str]) -> Order:
    """The strictest order that these ids follow."""
    learner = Learner()
    for event_id in ids:
        learner.see(event_id.encode(), repeated=False)
    return learner.held


def _repeats(streams: Sequence[Recorded]) -> bool:
    """Whether one id names different messages of one session."""
    data: dict[tuple[str | None, str], bytes] = {}
    return any(
        data.setdefault((stream.session.id, event.id), event.data) != event.data
        for stream in streams
        for event in stream.events
        if event.id and not event.priming
    )


async def ask_priming(survey: Survey) -> list[Finding]:
    """Whether streams are primed, and whether the server makes clients reconnect."""
    streams = [exchange for _, exchange in survey.traffic if exchange.streaming]
    primed = sum(1 for exchange in streams if exchange.events and exchange.events[0].priming)
    retry = sum(exchange.retry for exchange in streams)
    seen = f"of {len(streams)} streams {primed} were primed and {retry} had `retry`"
    if survey.facts.polling:
        return [Finding(Check.PRIMING, "polling", seen + "; the call's stream was closed before its response")]
    return [Finding(Check.PRIMING, "retry" if retry else "primed" if primed else "plain", seen)]


async def ask_replay(survey: Survey) -> list[Finding]:
    """What comes after a cursor of a stream that has ended: from its first event, and from its middle."""
    stream = survey.longest()
    if stream is None:
        return [_without_ids(survey, Check.REPLAY, "nothing to replay")]
    found: dict[str, str] = {}
    for at in dict.fromkeys((0, (len(stream.events) - 1) // 2)):
        if not stream.events[at].id:
            continue
        outcome, seen = await _replay(survey, stream, at)
        found.setdefault(outcome, f"from event {at + 1} of {len(stream.events)}: {seen}")
    worst = next(outcome for outcome in _WORST_FIRST if outcome in found)
    return [Finding(Check.REPLAY, worst, found[worst])]


def _resume(survey: Survey, session: Session, cursor: str) -> AbstractAsyncContextManager[Exchange]:
    return survey.client.send("GET", session=session.id, version=session.version, cursor=cursor)


async def _replay(survey: Survey, stream: Recorded, at: int) -> tuple[str, str]:
    expected = [e for e in stream.events[at + 1 :] if not e.priming]
    before = [e for e in stream.events[: at + 1] if not e.priming]
    async with _resume(survey, stream.session, stream.events[at].id) as answer:
        if answer.streaming:
            await answer.read(GRACE, lambda _: len(answer.messages) >= len(expected) + (before != []))
            await answer.read(SETTLE)
    if not answer.streaming:
        return "refused", describe(answer)
    return compare(before, expected, answer.messages, ended=answer.ended)


def compare(
    before: Sequence[Event], expected: Sequence[Event], got: Sequence[Event], *, ended: bool
) -> tuple[str, str]:
    """How a replay relates to what was sent: the outcome, and the numbers."""
    sent = [(event.id, event.message or event.data) for event in expected]
    passed = [(event.id, event.message or event.data) for event in before]
    came = [(event.id, event.message or event.data) for event in got]
    fresh = [one for one in came if one not in passed]
    lost = [one for one in sent if one not in came]
    names = {event.id for event in [*before, *expected]}
    seen = f"{len(sent) - len(lost)} of {len(sent)} events came"
    if any(one[0] in names and one not in sent and one not in passed for one in came):
        return "altered", seen
    if lost and len(lost) == len(sent):
        return ("empty", f"{seen}, then it ended") if ended else ("silent", f"{seen}, and it stayed open")
    if lost:
        return "lossy", seen
    if [one for one in fresh if one in sent] != sent:
        return "shuffled", seen + ", in another order or more than once"
    written = {event.data for event in [*before, *expected]}
    if any(event.id in names and event.data not in written for event in got):
        return "rewritten", seen + ", with other bytes"
    if len(fresh) < len(came):
        return "inclusive", f"{seen}, after {len(came) - len(fresh)} from before the cursor"
    return "faithful", seen


async def ask_reconnect(survey: Survey) -> list[Finding]:
    """What a client sees that loses its connection in the middle of the named tool's stream and comes back."""
    if survey.tool is None:
        return [Finding(Check.RECONNECT, "not looked at", "no tool was named")]
    if survey.longest() is None:
        return [_without_ids(survey, Check.RECONNECT)]
    message = tool_call(survey, survey.tool)
    session = survey.main
    async with survey.client.send("POST", message, session=session.id, version=session.version) as first:
        await first.read(survey.call_seconds, lambda _: len(first.messages) >= 2)
    before = [event for event in first.events if event.id]
    if not before or any(is_response(event.message, message["id"]) for event in first.events):
        return [Finding(Check.RECONNECT, "too short", "the response came before the cut, or no id did")]
    return [await _come_back(survey, message["id"], before)]


async def _come_back(survey: Survey, request_id: object, before: Sequence[Event]) -> Finding:
    """Reconnect as clients do, up to four times, until the response comes."""
    events = list(before)
    answered = False
    for _ in range(4):
        await asyncio.sleep(GRACE)  # clients wait a second before they come back
        async with _resume(survey, survey.main, events[-1].id) as answer:
            answered = await answer.read(
                survey.call_seconds + _PATIENCE, lambda event: is_response(event.message, request_id)
            )
        events += [event for event in answer.events if event.id]
        if answered or not ((answer.streaming and answer.ended) or answer.status == 409):
            break
    if not answered:
        if not answer.streaming:
            return Finding(Check.RECONNECT, "refused", describe(answer))
        return Finding(Check.RECONNECT, "hangs", f"{len(events) - len(before)} events, and no response")
    messages = [event for event in events if not event.priming]
    whole = len(_messages(survey.call)) if survey.call and survey.call.answered else 0
    seen = f"{len(messages)} messages with reconnects" + (f", {whole} without" if whole else "")
    if len({event.id for event in messages}) < len(messages):
        return Finding(Check.RECONNECT, "repeated", seen)
    return Finding(Check.RECONNECT, "lossy" if len(messages) < whole else "continued", seen)


def _messages(stream: Recorded) -> list[Event]:
    return [event for event in stream.events if not event.priming]


async def ask_unknown_cursor(survey: Survey) -> list[Finding]:
    """What a cursor is answered that the server never gave."""
    stream = survey.longest()
    if stream is None:
        return [_without_ids(survey, Check.UNKNOWN_CURSOR)]
    known = {event.data for s in survey.streams for event in s.events if not event.priming}
    async with _resume(survey, survey.main, lookalike(stream.ids[-1])) as answer:
        shown = answer.streaming and await answer.read(GRACE, lambda event: event.data in known)
    if not answer.streaming:
        return [Finding(Check.UNKNOWN_CURSOR, "refused", describe(answer))]
    outcome = "replayed" if shown else "empty" if answer.ended else "silent"
    return [Finding(Check.UNKNOWN_CURSOR, outcome, describe(answer))]


async def ask_foreign_cursor(survey: Survey) -> list[Finding]:
    """Whether a session is given the events of another one when it sends that one's cursor."""
    if survey.other is None or not survey.cursors(survey.main):
        return [_without_ids(survey, Check.FOREIGN_CURSOR)]
    answer, leaked = await _steal(survey, survey.other, survey.main)
    outcome = "leak" if leaked else "nothing" if answer.streaming else "refused"
    return [Finding(Check.FOREIGN_CURSOR, outcome, f"{describe(answer)}; {leaked} events of the other session")]


async def _steal(survey: Survey, session: Session, victim: Session) -> tuple[Exchange, int]:
    """Resume in one session from cursors of another; returns an answer, and how many of its events came.

    Several streams are tried at once: some stores sort events of the same millisecond at random and then miss them.
    """
    streams = survey.cursors(victim)[-_TRIED:]
    return max(
        await asyncio.gather(*(_steal_one(survey, session, stream) for stream in streams)), key=lambda got: got[1]
    )


async def _steal_one(survey: Survey, session: Session, stream: Recorded) -> tuple[Exchange, int]:
    secret = {event.data for event in _messages(stream)}
    async with _resume(survey, session, stream.ids[0]) as answer:
        if answer.streaming and await answer.read(GRACE, lambda event: event.data in secret):
            await answer.read(SETTLE)
    return answer, sum(event.data in secret for event in answer.events)


async def ask_after_delete(survey: Survey) -> list[Finding]:
    """Whether the events of a deleted session can still be had, under its own id or under another's."""
    session = await survey.client.initialize()
    if not isinstance(session, Session):
        return [Finding(Check.AFTER_DELETE, "not found out", "no further session was granted")]
    for _ in range(_TRIED):
        await survey.ask(session, survey.client.request("tools/list"))
    if survey.tool is not None and not survey.cursors(session):
        await survey.ask(session, tool_call(survey, survey.tool))  # on some servers only a tool is answered by a stream
    if survey.other is None or not survey.cursors(session):
        return [_without_ids(survey, Check.AFTER_DELETE)]
    status = await survey.client.delete(session)
    if status >= 300:
        return [Finding(Check.AFTER_DELETE, "not deletable", f"DELETE: HTTP {status}")]
    own, leaked = await _steal(survey, session, session)
    seen = f"under its own id: {describe(own)}"
    if not leaked:
        foreign, leaked = await _steal(survey, survey.other, session)
        seen += f"; under another session's id: {describe(foreign)}"
    outcome = "outlives" if leaked else "granted" if own.streaming else "refused"
    return [Finding(Check.AFTER_DELETE, outcome, f"{seen}; {leaked} of its events")]


async def ask_second_get(survey: Survey) -> list[Finding]:
    """What a second standalone stream does."""
    session = survey.main
    async with survey.client.send("GET", session=session.id, version=session.version) as first:
        if not first.streaming:
            await first.read(GRACE)
            return [Finding(Check.SECOND_GET, "none", describe(first))]
        async with survey.client.send("GET", session=session.id, version=session.version) as second:
            await second.read(SETTLE)
        await first.read(SETTLE)
    outcome = "one" if not second.streaming else "takeover" if first.ended else "several"
    return [Finding(Check.SECOND_GET, outcome, f"the second was answered {describe(second)}")]
