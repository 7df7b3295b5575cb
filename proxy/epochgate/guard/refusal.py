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

# `session_name` and the like are parameters of some tool; "a session with some service" is another session.
_SESSION = (
    rb"session(?![ _-]?(?:name|type|title|key|kind|label|data|state|count|length|file|path|date|time|mode)s?\b)"
    rb"(?! (?:with|to|at) (?!(?:the |this |that |an? )?(?:given |provided |specified )?(?:mcp[ -]|session[ -])*ids?\b))"
)
# Who is not initialized: the server, or nobody in particular. A database is another matter.
_UNINITIALIZED = (
    rb"(?:(?<![a-z])(?:server|session|transport|client|connection|protocol|mcp)[^.\n]{0,20}"
    rb"|(?:^|[:.,\n\"]) *)(?:not[ _-]?(?:yet )?(?:been )?initiali[sz]ed|uninitiali[sz]ed)|uninitiali[sz]ed server"
)
_SESSION_WORDS = re.compile(rb"session|%b" % _UNINITIALIZED, re.IGNORECASE)
_LOST_SESSION = re.compile(
    rb"(?<![a-z])(?:missing|invalid(?! request)|unknown|expired|valid|no|not find|cannot find)(?![a-z])[^.\n]{0,40}%b"
    rb"|%b[^.\n]{0,40}(?<![a-z])(?:missing|invalid|unknown|expired|no longer|required|terminated|closed|ended"
    rb"|evicted|deleted|timed out|(?:does not|doesn't) exist|not (?:yet )?(?:be |been )?(?:found|valid|known|active"
    rb"|recogni[sz]ed|available|present|provided|given|set|specified|supplied|sent|open))(?![a-z])"
    rb"|not[ _-]?found[^.\n]{0,40}%b|session_?not_?found|%b" % (_SESSION, _SESSION, _SESSION, _UNINITIALIZED),
    re.IGNORECASE,
)
# Wrong parameters may be those of some tool, unless the words are those of the protocol's own header.
_LOST_PARAMETER = re.compile(rb"no valid session id|mcp-session-id", re.IGNORECASE)
_EVENT_WORDS = re.compile(rb"event", re.IGNORECASE)
# What is said of an event, or of an argument of some tool, is not said of the session.
_OTHER_WORDS = re.compile(rb"event|(?<![a-z])arguments?(?![a-z])", re.IGNORECASE)
_SENTENCE_END = re.compile(rb"[.;\n\"]")


_MOST_SAID = 64 * 1024  # bytes of an answer that are searched for words


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
    said = body = body[:_MOST_SAID]
    if _OTHER_WORDS.search(body):
        said = b"\n".join([part for part in _SENTENCE_END.split(body) if not _OTHER_WORDS.search(part)])
    if status == 400:
        lost = _LOST_PARAMETER if code == INVALID_PARAMS else _LOST_SESSION
        return code != PARSE_ERROR and lost.search(said) is not None
    if code in (SESSION_NOT_FOUND, INVALID_REQUEST) and not _EVENT_WORDS.search(body):
        return True
    return _SESSION_WORDS.search(said) is not None
