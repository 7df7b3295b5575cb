"""Where a worker answers what the supervisor asks: what the admin side of a single process would tell of it."""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import xxhash

from epochgate.admin.snapshot import take
from epochgate.admin.subject import PolicyGoneError, fence
from epochgate.admin.views import find_session, last_active, session_detail, session_state, session_view
from epochgate.errors import ConfigurationError
from epochgate.guard.record import Session
from epochgate.relay.server import Gate
from epochgate.relay.telemetry import log
from epochgate.settings import Settings
from epochgate.workers.channel import (
    Drain,
    Fence,
    Found,
    Listed,
    ListSessions,
    Question,
    Report,
    Reported,
    ShowSession,
    ShowSessions,
    Use,
    unpack,
)

_AT_ONCE = 500  # sessions that are looked at before others get their turn

_tag = xxhash.xxh3_64_intdigest  # names a session among the workers of one proxy, and nowhere else


class Desk:
    """`drains` gets the seconds that an orderly end may take: grace and window."""

    def __init__(self, gate: Gate, settings: Settings) -> None:
        self.settings = settings  # in force
        self._gate = gate
        self._context = gate.context
        self._told = 0  # verdicts
        self.drains: asyncio.Future[tuple[float, float]] = asyncio.get_running_loop().create_future()

    async def answer(self, question: Question) -> Any:
        """The answer, of the type that the question says."""
        match question:
            case Report():
                return await self._report(question)
            case ListSessions():
                return await self._list_sessions(question)
            case ShowSessions():
                wanted = frozenset(question.tags)
                return {
                    tag: session_view(self._context, session)
                    async for tag, session in self._sessions()
                    if tag in wanted
                }
            case ShowSession():
                session = await find_session(self._context, question.fingerprint)
                return Found(None if session is None else session_detail(self._context, session))
            case Fence():
                try:
                    return Found(await fence(self._context, question.fingerprint))
                except PolicyGoneError as error:
                    return Found(gone=str(error))
            case Use():
                return self._use(question)
            case Drain():
                self._context.draining = True
                if not self.drains.done():
                    self.drains.set_result((question.grace, question.window))
                return None

    async def _report(self, question: Report) -> Reported:
        known, fenced = array("Q"), array("Q")
        if question.sessions:
            async for tag, session in self._sessions():
                known.append(tag)
                if session.fence is not None:
                    fenced.append(tag)
        snapshot = take(self._context)
        total = sum(snapshot.resumes.values())
        decided = list(self._context.telemetry.decided)
        new = min(total - self._told, len(decided))
        self._told = total
        reported = Reported(snapshot, decided[len(decided) - new :])
        if question.sessions:
            reported = msgspec.structs.replace(reported, known=known.tobytes(), fenced=fenced.tobytes())
        return reported

    async def _list_sessions(self, question: ListSessions) -> Listed:
        tags: defaultdict[str, array[int]] = defaultdict(lambda: array("Q"))
        found: list[tuple[float, int]] = []
        async for tag, session in self._sessions():
            if question.policy is not None and session.policy != question.policy:
                continue
            state = "" if question.state is None else session_state(self._context, session)
            tags[state].append(tag)
            if question.state in (None, state):
                found.append((last_active(session), tag))
        return Listed({state: each.tobytes() for state, each in tags.items()}, heapq.nlargest(question.limit, found))

    async def _sessions(self) -> AsyncIterator[tuple[int, Session]]:
        for number, session in enumerate(self._context.ledger.sessions()):
            yield _tag(session.id), session
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)

    def _use(self, question: Use) -> str:
        settings = unpack(question.settings)
        try:
            self._gate.use(settings)
        except ConfigurationError as error:  # a file that the supervisor could still read
            log.error("reload.failed", source="supervisor", message=str(error))
            return str(error)
        self.settings = settings
        return ""
