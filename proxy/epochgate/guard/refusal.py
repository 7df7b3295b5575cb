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
# `session_name` and the like are parameters of some tool.
_SESSION = rb"session(?![_-]?(?:name|type|title|key|kind|label|data|state|count|length|file|path|date|time|mode)s?\b)"
_LOST_SESSION = re.compile(
    rb"(?<![a-z])(?:missing|invalid(?! request)|unknown|expired|valid|no|not find|cannot find)(?![a-z])[^.\n]{0,40}%b"
    rb"|%b[^.\n]{0,40}(?<![a-z])(?:missing|invalid|unknown|expired|not|no longer|required|terminated|closed|ended"
    rb"|evicted|deleted|timed out)(?![a-z])|not[ _-]?found[^.\n]{0,40}%b|session_?not_?found"
    rb"|not[ _-]?(?:been )?initiali[sz]ed|uninitiali[sz]ed" % (_SESSION, _SESSION, _SESSION),
    re.IGNORECASE,
)
_EVENT_WORDS = re.compile(rb"event", re.IGNORECASE)
_SENTENCE_END = re.compile(rb"[.;\n\"]")


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
    if status not in (400, 404) or code == METHOD_NOT_FOUND:
        return False
    if method != b"GET" and status == 404:
        return True
    said = body
    if method == b"GET":  # what is said of an event is not said of the session
        said = b"\n".join(part for part in _SENTENCE_END.split(body) if not _EVENT_WORDS.search(part))
    if status == 400:  # wrong parameters may be the session parameter of some tool
        return code not in (INVALID_PARAMS, PARSE_ERROR) and _LOST_SESSION.search(said) is not None
    if code in (SESSION_NOT_FOUND, INVALID_REQUEST) and not _EVENT_WORDS.search(body):
        return True
    return _SESSION_WORDS.search(said) is not None
