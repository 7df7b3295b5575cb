"""Asks all questions in order, within a bound of time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from epochgate.probe import sessions, streams
from epochgate.probe.client import Client, NoAnswerError, Session
from epochgate.probe.findings import Check, Facts, Finding
from epochgate.probe.survey import Survey, ToolCall, describe

Question = Callable[[Survey], Awaitable[list[Finding]]]
Progress = Callable[[int, int, Check], None]

# The order matters: streams are recorded by ANSWERS, and what ends sessions or keeps streams open comes late.
_QUESTIONS: tuple[tuple[Check, Question], ...] = (
    (Check.PROTOCOL, sessions.ask_protocol),
    (Check.SESSION, sessions.ask_session_id),
    (Check.MISSING, sessions.ask_missing),
    (Check.UNKNOWN, sessions.ask_unknown),
    (Check.DELETED, sessions.ask_deleted),
    (Check.ANSWERS, sessions.ask_answers),
    (Check.EVENT_IDS, streams.ask_event_ids),
    (Check.PRIMING, streams.ask_priming),
    (Check.EPOCH, sessions.ask_epoch),
    (Check.REPLAY, streams.ask_replay),
    (Check.RECONNECT, streams.ask_reconnect),
    (Check.UNKNOWN_CURSOR, streams.ask_unknown_cursor),
    (Check.FOREIGN_CURSOR, streams.ask_foreign_cursor),
    (Check.AFTER_DELETE, streams.ask_after_delete),
    (Check.SECOND_GET, streams.ask_second_get),
)
_STATELESS = {Check.PROTOCOL, Check.SESSION, Check.ANSWERS}
_LEAVING = 0.1  # share of the time that is kept for ending the sessions, at most two seconds


async def run(
    client: Client, *, tool: ToolCall | None, idle: float, seconds: float, progress: Progress
) -> tuple[list[Finding], Facts]:
    """Probe the server behind `client`; takes at most `seconds`.

    What could not be found out in time, or because the server did not answer, is a finding as well.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    try:
        return await _ask_all(client, tool, idle, end - min(2.0, seconds * _LEAVING), progress)
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                await client.end_sessions()


async def _ask_all(
    client: Client, tool: ToolCall | None, idle: float, deadline: float, progress: Progress
) -> tuple[list[Finding], Facts]:
    total = len(_QUESTIONS) + 1
    progress(0, total, Check.PROTOCOL)
    try:
        async with asyncio.timeout_at(deadline):
            main = await client.initialize()
    except (NoAnswerError, TimeoutError) as error:
        return [Finding(Check.PROTOCOL, "no answer", str(error) or "the time was up")], Facts()
    if not isinstance(main, Session):
        moved = "; it redirects: probe the address that it names" if 300 <= main.status < 400 else ""
        return [Finding(Check.PROTOCOL, "none", f"initialize was answered {describe(main)}{moved}")], Facts()
    survey = Survey(client, tool, idle, main)
    questions = [q for q in _QUESTIONS if main.id is not None or q[0] in _STATELESS]
    waiting = None
    findings: list[Finding] = []
    try:
        for number, (check, question) in enumerate(questions):
            progress(number, len(questions) + 1, check)
            findings += await _ask(check, question(survey), deadline)
            if check is Check.SESSION and main.id is not None:
                waiting = asyncio.create_task(_ask(Check.IDLE, sessions.ask_idle(survey), deadline))
        if waiting is not None:
            progress(len(questions), len(questions) + 1, Check.IDLE)
            findings += await waiting
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    return findings, survey.facts


async def _ask(check: Check, answer: Awaitable[list[Finding]], deadline: float) -> Sequence[Finding]:
    try:
        async with asyncio.timeout_at(deadline):
            return await answer
    except TimeoutError:
        return [Finding(check, "not found out", "the time was up")]
    except NoAnswerError as error:
        return [Finding(check, "not found out", str(error))]
