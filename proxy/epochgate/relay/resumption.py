"""One resume of a known session (section 6): from a held stream, or from the upstream, until it is decided."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from epochgate.errors import NoRoomError, UpstreamError
from epochgate.guard.judge import Cursor, Ending, Judge, is_refused
from epochgate.guard.mcp import LAST_EVENT_ID, SESSION_ID, tokens_of
from epochgate.guard.policy import Mode, Policy, Proof
from epochgate.guard.record import Session, Stream
from epochgate.guard.refusal import may_fence
from epochgate.guard.verdict import Reason, Verdict, proven, unproven
from epochgate.relay.downstream import Outcome
from epochgate.relay.flow import Answered, Flow
from epochgate.relay.forward import Choose
from epochgate.relay.headers import Field, Head, without
from epochgate.relay.upstream import Receiver, UpstreamConnection

if TYPE_CHECKING:
    from epochgate.relay.exchange import Exchange

ASK_AGAIN_AFTER = (0.1, 0.3, 0.5)  # s (R9)


class Resumption:
    """Decides what becomes of a GET that names `cursor`."""

    def __init__(self, exchange: Exchange, policy: Policy, session: Session, cursor: bytes) -> None:
        self._exchange = exchange
        self._context = exchange.context
        self._policy = policy
        self._session = session
        self._cursor = cursor
        self._enforced = policy.mode is Mode.ENFORCE
        self._credentials = exchange.credentials(policy)
        self._ambiguous = False  # the cursor names several streams, and nothing tells which is meant
        self._flow: Flow

    async def refuse_fenced(self) -> None:
        """R2: the upstream is not asked. A stream that still owes responses may be told so (F4)."""
        found = self._session.locate(self._cursor) if self._cursor else None
        reason = Reason(self._session.fence or "")
        if found is None:
            await self._context.spread(self._session)
            await self._exchange.answers.not_found(reason)
        else:
            await self._refuse(found[0], reason)

    async def run(self) -> None:
        """Forward, judge and answer."""
        session, exchange = self._session, self._exchange
        fields = exchange.request.end_to_end()
        found = self._locate()
        if found is not None:
            await self._resume_known(Cursor(*found), fields)
            return
        verdict = unproven(Reason.UNKNOWN_CURSOR if session.delivered else Reason.STALE_CURSOR)
        self._report(verdict)
        if not session.delivered:
            if self._enforced:
                await exchange.make_room(self._policy, session)
                fields = without(fields, LAST_EVENT_ID)
            if await exchange.forwarder.send(exchange.choose_known, fields) is Outcome.REFUSED:
                await exchange.tell_loss(self._policy, session)
        elif self._enforced and is_refused(verdict, self._policy):
            if may_fence(session, self._credentials, granted=False):
                self._context.fence(self._policy, session, verdict.reason)
                await self._context.spread(session)
            await exchange.answers.not_found(verdict.reason)
        else:
            outage_at = self._context.upstream.outage_at
            await self._ask(Judge(self._policy, session, None, outage_at=outage_at, verdict=verdict), fields)

    def _locate(self) -> tuple[Stream, int] | None:
        """What the cursor names. Where streams share ids: the one whose client is away, or the only one to go on."""
        named = self._session.named_by(self._cursor)
        if len(named) < 2:
            return self._session.locate(self._cursor)
        flows = [(stream, self._context.holds.get(stream)) for stream in named]
        away = [stream for stream, flow in flows if flow is not None and flow.is_left_by(self._credentials)]
        broken = [stream for stream, flow in flows if flow is None and not stream.finished]
        for meant in (away, broken):
            if len(meant) == 1:
                return meant[0], meant[0].positions[self._cursor]
        self._ambiguous = True
        return self._session.locate(self._cursor)

    async def _resume_known(self, cursor: Cursor, fields: list[Field]) -> None:
        stream, forwarder = cursor.stream, self._exchange.forwarder
        if self._enforced and not self._ambiguous:
            flow = self._context.holds.get(stream)
            if flow is not None and flow.credentials == self._credentials and not flow.is_contested():
                if flow.serves(cursor.position):
                    self._decline()
                    if flow.decided:
                        self._report(proven(Proof.CONNECTION), len(stream.owes))
                    stream.spent = False
                    await forwarder.wait_for(lambda downstream: flow.attach(downstream, cursor.position, self._cursor))
                    return
                flow.close()
            if await self._is_borrowed(cursor):
                return
        outage_at = self._context.upstream.outage_at
        held = not self._enforced and self._would_be_held(cursor)
        await self._ask(Judge(self._policy, self._session, cursor, outage_at=outage_at, held=held), fields)

    async def _is_borrowed(self, cursor: Cursor) -> bool:
        """Whether it was served from a stream that another process holds (R4, docs/adr/0009)."""
        elsewhere, exchange, stream = self._context.elsewhere, self._exchange, cursor.stream
        if elsewhere is None or not exchange.offers:
            return False
        borrowed = await elsewhere.borrow(self._session, cursor, exchange.offers)
        if borrowed is None:
            return False
        if exchange.client.lost:
            borrowed.leave()
            return True
        if borrowed.decided:
            self._report(proven(Proof.CONNECTION), len(stream.owes))
        stream.spent = False
        await exchange.forwarder.wait_for(borrowed.attach)
        return True

    def _decline(self) -> None:
        if self._context.elsewhere is not None:
            self._context.elsewhere.decline(self._exchange.offers)

    def _would_be_held(self, cursor: Cursor) -> bool:
        """Observe mode: whether the stream would probably still have been held; a server that died is not seen."""
        policy, left_at = self._policy, cursor.stream.left_at
        if Proof.CONNECTION not in policy.accept or left_at is None or self._credentials != cursor.stream.credentials:
            return False
        boundary_at = max(self._context.upstream.outage_at, self._session.boundary_at)
        return time.time() - left_at <= policy.hold_time and boundary_at <= left_at

    async def _ask(self, judge: Judge, fields: list[Field]) -> None:
        """Ask the upstream, again where that may help, until the resume is decided (R5, R9)."""
        session, exchange = self._session, self._exchange
        ask_from = self._cursor
        if self._enforced:
            ask_from = judge.rewound or self._cursor
            fields = _with_identity(fields)
            exchange.forwarder.copying = True  # a body, however odd, is sent each time
        asked = 0
        while not self._enforced or session.fence is None:
            self._context.backlog.settle()
            rewound = ask_from != self._cursor
            sent = _with_cursor(fields, ask_from) if rewound else fields
            try:
                outcome = await exchange.forwarder.send(self._judged(judge, rewound=rewound), sent)
            except UpstreamError:
                self._note_spent(judge.stream)
                raise
            if outcome is Outcome.NO_STREAM:
                ask_from = self._cursor
            elif outcome is Outcome.EMPTY and session.fence is None:
                asked += 1
                ending = judge.end_without_message(asked)
                if ending is Ending.ASK_AGAIN:
                    await asyncio.sleep(ASK_AGAIN_AFTER[asked - 1])
                    if exchange.client.lost:
                        return
                    continue
                if judge.verdict is not None and judge.verdict.reason is Reason.NO_EVENT:
                    self._report(judge.verdict, len(judge.stream.owes))
                if ending is Ending.PASS:
                    self._flow.pass_empty(exchange.reply)
                    return
                if may_fence(session, self._credentials, granted=self._flow.head.is_stream):
                    self._context.fence(self._policy, session, Reason.NO_EVENT)
                await self._refuse(judge.stream, Reason.NO_EVENT)
                return
            elif outcome is Outcome.NO_ROOM:
                self._note_spent(judge.stream)
                raise NoRoomError("No room to check the answer; try again")
            elif outcome is Outcome.DONE:
                if exchange.reply.status >= 400:
                    self._note_spent(judge.stream)
                return
            elif exchange.lost:
                if may_fence(session, self._credentials, granted=False):
                    self._context.fence(self._policy, session, Reason.SESSION_LOST)
                await self._refuse(judge.stream, Reason.SESSION_LOST)
                return
            elif session.fence is None and judge.verdict is not None:
                await self._refuse(judge.stream, judge.verdict.reason)  # to this caller alone (F3)
                return
        await self._refuse(judge.stream, Reason(session.fence or ""))

    def _note_spent(self, stream: Stream) -> None:
        """One of the tries that a client has was answered by an error (F4)."""
        if self._credentials == stream.credentials:
            stream.spent = True
            self._session.stream_changed(stream)

    def _judged(self, judge: Judge, *, rewound: bool) -> Choose:
        """Who hears the answer to a resume."""
        exchange, policy, session = self._exchange, self._policy, self._session

        def choose(connection: UpstreamConnection, head: Head) -> Receiver | None:
            asked = exchange.note_answer(policy, session, connection, head)
            if head.may_be_stream:
                judge.tokens = tokens_of(policy.sources, head.fields)
                judge.outage_at = self._context.upstream.outage_at
                if (head.get(SESSION_ID) or session.id) != session.id:
                    judge.outage_at = time.time()  # whose replay is it then? An overlap does not tell
                former = self._context.holds.get(judge.stream)
                if former is not None and self._enforced and not former.is_contested() and not self._ambiguous:
                    former.close()  # of another caller; the upstream has let this one in (R4)
                if self._enforced and self._context.elsewhere is not None and not self._ambiguous:
                    self._context.elsewhere.granted(session, judge.stream)
                judge.open()
                self._flow = Flow(
                    self._context,
                    policy,
                    session,
                    judge.stream,
                    Answered(connection, head, asked),
                    exchange.forwarder.downstream,
                    credentials=self._credentials,
                    cursor=self._cursor,
                    judge=judge,
                )
                return self._flow
            if rewound:
                exchange.forwarder.downstream.finish(Outcome.NO_STREAM)
                return None
            if head.status in (400, 404):
                return exchange.suspect(policy, session, connection, head)
            return exchange.relay(connection, head)

        return choose

    async def _refuse(self, stream: Stream, reason: Reason) -> None:
        self._context.backlog.settle()
        await self._exchange.answers.refuse(self._policy, self._session, stream, reason, self._credentials)

    def _report(self, verdict: Verdict, pending: int = 0) -> None:
        self._context.telemetry.verdict(
            self._policy.name,
            verdict,
            session=self._session.id,
            cursor=self._cursor,
            enforced=self._enforced,
            pending=pending,
        )


def _with_cursor(fields: list[Field], cursor: bytes) -> list[Field]:
    """The fields with another cursor in place of the client's (R5)."""
    return [(name, cursor) if name.lower() == LAST_EVENT_ID else (name, value) for name, value in fields]


def _with_identity(fields: list[Field]) -> list[Field]:
    """What must be read to be checked should come readable (T8)."""
    kept = [field for field in fields if field[0].lower() != b"accept-encoding"]
    kept.append((b"Accept-Encoding", b"identity"))
    return kept
