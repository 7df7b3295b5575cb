"""The answer to `initialize`: what opens a session in the ledger (L1)."""

from __future__ import annotations

import time

from epochgate.guard.mcp import SESSION_ID, RpcId, holds_initialize_result, read_messages, tokens_of
from epochgate.guard.policy import Policy
from epochgate.guard.record import Session
from epochgate.guard.verdict import Reason
from epochgate.relay.context import Context
from epochgate.relay.headers import Head, is_event_stream, is_json
from epochgate.relay.passage import BodyTap, HandshakeTap, Tap


def open_handshake(
    context: Context, policy: Policy, head: Head, owes: tuple[RpcId, ...], credentials: bytes
) -> Tap | None:
    """What reads the answer to an `initialize` and opens its session; None for an answer that can hold no result."""
    session_id = head.get(SESSION_ID)
    assert session_id is not None

    def grant(data: bytes) -> Session:
        tokens = read_messages(data, tokens_of(policy.sources, head.fields)).tokens
        token = next((token for token in tokens if token is not None), None)
        now = time.time()
        former = context.ledger.get(session_id, now)
        session = context.ledger.open(session_id, credentials, token, policy.name, now)
        if former is not None:  # void: nothing of it is held, and a resume that is still open is refused
            former.close(Reason.EPOCH_CHANGED, now)
            context.holds.close_held(former)
        if policy.instance_header is not None:
            session.see_instance(head.get(policy.instance_header), now)
        context.telemetry.opened(policy.name, session_id, epoch=token is not None)
        return session

    def read(body: bytes) -> None:
        if holds_initialize_result(body):
            grant(body)

    content_type = head.get(b"content-type")
    if is_event_stream(content_type):
        return HandshakeTap(policy, head, owes, grant)
    return BodyTap(head.get(b"content-encoding"), read) if is_json(content_type) else None
