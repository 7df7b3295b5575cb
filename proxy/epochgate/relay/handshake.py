"""The answer to `initialize`: what opens a session in the ledger (L1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from epochgate.guard.mcp import SESSION_ID, RpcId, holds_initialize_result, read_messages, tokens_of
from epochgate.guard.policy import Policy
from epochgate.guard.record import Session
from epochgate.guard.verdict import Reason
from epochgate.relay.context import Context
from epochgate.relay.copies import Copies
from epochgate.relay.downstream import Downstream
from epochgate.relay.headers import Head, is_json
from epochgate.relay.passage import BodyTap, HandshakeTap, Tap
from epochgate.relay.settling import Settling
from epochgate.relay.upstream import UpstreamConnection


class Handshake(Settling):
    """Relays the answer to an `initialize`, and lets the client have its end when other processes know of the session.

    The client's next request may come to any process that shares the ledger. One that does not find the session would
    forward it unguarded, and record nothing of what it answers. So from where the session is granted, the answer waits.
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

    def _open(self, data: bytes) -> Session:
        session = self._grant.open(data)
        self.settle(session)
        return session


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
        return HandshakeTap(policy, head, owes, open_session, copies)
    return BodyTap(head.get(b"content-encoding"), read, copies) if is_json(head.get(b"content-type")) else None
