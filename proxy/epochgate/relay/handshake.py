"""The answer to `initialize`: what opens a session in the ledger (L1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from epochgate.guard.mcp import SESSION_ID, RpcId, holds_initialize_result, read_messages, tokens_of
from epochgate.guard.policy import Policy
from epochgate.guard.record import Session
from epochgate.guard.verdict import Reason
from epochgate.relay.context import Context
from epochgate.relay.copies import Copies
from epochgate.relay.downstream import Downstream
from epochgate.relay.headers import Head, is_json
from epochgate.relay.passage import BodyTap, HandshakeTap, Passage, Tap
from epochgate.relay.upstream import UpstreamConnection


class Handshake(Passage):
    """Relays the answer to an `initialize`, and lets the client have its end when other processes know of the session.

    The client's next request may come to any process that shares the ledger. One that does not find the session would
    forward it unguarded, and record nothing of what it answers. So from where the session is granted, the answer waits
    for the ledger: a round trip to the store, and never longer than a request waits for it.
    """

    def __init__(
        self,
        connection: UpstreamConnection,
        head: Head,
        downstream: Downstream,
        context: Context,
        grant: Grant,
        owes: tuple[RpcId, ...],
    ) -> None:
        super().__init__(
            connection, head, downstream, context, _tap(head, grant.policy, owes, self._open, context.copies)
        )
        self._grant = grant
        self._waiting: asyncio.Task[None] | None = None
        self._ended = False

    def _open(self, data: bytes) -> Session:
        session = self._grant.open(data)
        if self._waiting is None and (settled := self._context.ledger.spread(session)) is not None:
            self._waiting = self._context.loop.create_task(self._wait(settled))
        return session

    async def _wait(self, settled: Awaitable[None]) -> None:
        await settled
        self._waiting = None
        if self._ended:
            self._end()
        else:
            self._connection.resume()
            self._downstream.reply.flush()

    def _end(self) -> None:
        if self._waiting is None:
            super()._end()
        self._ended = True

    def _finish(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        super()._finish()

    def received_all(self) -> None:
        """See `Passage`."""
        if self._waiting is None:
            super().received_all()
        elif not self._ended:
            self._connection.pause()


@dataclass(frozen=True, slots=True)
class Grant:
    """How the session is opened that the head of an answer names, for the caller with these credentials."""

    context: Context
    policy: Policy
    head: Head
    credentials: bytes

    def open(self, data: bytes) -> Session:
        """Open it. `data`: the message with the InitializeResult."""
        context, policy, head = self.context, self.policy, self.head
        session_id = head.get(SESSION_ID)
        assert session_id is not None
        tokens = read_messages(data, tokens_of(policy.sources, head.fields)).tokens
        token = next((token for token in tokens if token is not None), None)
        now = time.time()
        former = context.ledger.get(session_id, now)
        session = context.ledger.open(session_id, self.credentials, token, policy.name, now)
        if former is not None:  # void: nothing of it is held, and a resume that is still open is refused
            former.close(Reason.EPOCH_CHANGED, now)
            context.holds.close_held(former)
        if policy.instance_header is not None:
            session.see_instance(head.get(policy.instance_header), now)
        context.telemetry.opened(policy.name, session_id, epoch=token is not None)
        return session


def _tap(
    head: Head, policy: Policy, owes: tuple[RpcId, ...], open_session: Callable[[bytes], Session], copies: Copies
) -> Tap | None:
    """What reads the answer; None for one that can hold no result."""

    def read(body: bytes) -> None:
        if holds_initialize_result(body):
            open_session(body)

    if head.is_stream:
        return HandshakeTap(policy, head, owes, open_session)
    return BodyTap(head.get(b"content-encoding"), read, copies) if is_json(head.get(b"content-type")) else None
