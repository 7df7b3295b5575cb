"""How a session is refused: the 404, the errors for pending calls, which comes when; and what is a lost session."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

import msgspec

from epochgate.guard.mcp import RpcId, error_code
from epochgate.guard.policy import PendingCalls, Policy
from epochgate.guard.record import Session, Stream

SESSION_NOT_FOUND = -32001
PENDING_CALL_FAILED = -32000
METHOD_NOT_FOUND = -32601
INVALID_REQUEST = -32600

INVALID_PARAMS = -32602
PARSE_ERROR = -32700

_SESSION_WORDS = re.compile(rb"session|initiali[sz]ed", re.IGNORECASE)
_LOST_SESSION = re.compile(
    rb"\b(missing|invalid|unknown|expired|valid|no such|not found|no)\b[^.\n]{0,40}session"
    rb"|session[^.\n]{0,40}\b(missing|invalid|unknown|expired|required|not|no longer|terminated|closed)\b"
    rb"|not[ _-]?(been )?initiali[sz]ed|uninitiali[sz]ed",
    re.IGNORECASE,
)
_EVENT_WORDS = re.compile(rb"event", re.IGNORECASE)


class Answer(Enum):
    """What a refused request is answered with."""

    NOT_FOUND = "the 404"  # F1
    TELL = "an error for each pending call"  # F4


def not_found_body(reason: str) -> bytes:
    """The body of the 404 (F1): no `id` member, since one keeps a dead session alive or crashes a client."""
    return msgspec.json.encode(
        {
            "jsonrpc": "2.0",
            "error": {"code": SESSION_NOT_FOUND, "message": "Session not found", "data": {"reason": reason}},
        }
    )


def told_events(owed: Iterable[RpcId], reason: str) -> bytes:
    """One SSE event for each pending call, without an `id:` field, which would make one SDK resume for ever (F4)."""
    return b"".join(b"event: message\ndata: " + _call_error(identifier, reason) + b"\n\n" for identifier in owed)


def _call_error(identifier: RpcId, reason: str) -> bytes:
    message = "The session was lost and the stream cannot be resumed; start a new session and call again"
    error = {"code": PENDING_CALL_FAILED, "message": message, "data": {"reason": reason}}
    return msgspec.json.encode({"jsonrpc": "2.0", "id": identifier, "error": error})


def answer_refused_resume(session: Session, stream: Stream, policy: Policy, credentials: bytes) -> Answer:
    """Which answer a refused resume of `stream` gets (F4); notes on the stream that it was given."""
    again = stream.refused or stream.spent
    tell = (
        stream.owes
        and not stream.told
        and credentials == stream.credentials
        and (policy.pending_calls is PendingCalls.AT_ONCE or (policy.pending_calls is PendingCalls.ON_RETRY and again))
    )
    if tell:
        stream.told = True
    elif credentials == stream.credentials:
        stream.refused = True
    session.stream_changed(stream)
    return Answer.TELL if tell else Answer.NOT_FOUND


def may_tell_in_band(stream: Stream, policy: Policy) -> bool:
    """Whether a divergence after the head was released can be told on the stream (F5); notes that it was."""
    if policy.pending_calls is PendingCalls.LEAVE or not stream.owes or stream.told:
        return False
    stream.told = True
    return True


def may_fence(session: Session, credentials: bytes, *, granted: bool) -> bool:
    """Whether this caller may fence the session (F3): the upstream let it in, or it is the one that opened it."""
    return granted or credentials == session.credentials


def is_session_lost(method: bytes, status: int, body: bytes) -> bool:
    """Whether this answer to a request of a known session says that the session is lost (N1)."""
    code = error_code(body)
    if code in (METHOD_NOT_FOUND, INVALID_PARAMS, PARSE_ERROR):
        return False
    if status == 404 and method != b"GET":
        return True
    speaks_of_loss = _LOST_SESSION.search(body) is not None
    if status == 400:
        return speaks_of_loss
    if status != 404 or speaks_of_loss:
        return speaks_of_loss
    if _EVENT_WORDS.search(body):
        return False
    return code in (SESSION_NOT_FOUND, INVALID_REQUEST) or _SESSION_WORDS.search(body) is not None
