"""How a session is refused: the 404, the pending calls, who may fence, and losses told badly (F1-F5, N1)."""

import json

import pytest

from epochgate.guard.policy import PendingCalls
from epochgate.guard.record import Stream
from epochgate.guard.refusal import (
    Answer,
    answer_refused_resume,
    is_session_lost,
    may_fence,
    may_tell_in_band,
    not_found_body,
    told_events,
)
from epochgate.guard.sse import Framer
from guard.scene import Scene, notes, policy, result

NOT_FOUND, TELL = Answer.NOT_FOUND, Answer.TELL


def test_the_404_has_one_form() -> None:
    """F1: compact, with the reason, and without an `id` member."""
    assert not_found_body("epoch_changed") == (
        b'{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found","data":{"reason":"epoch_changed"}}}'
    )


def test_each_pending_call_is_told_without_an_event_id() -> None:
    """F4: one error for each owed id, in order, whatever kind of id it is."""
    owed = [1, "b", 12345678901234567890123, 'q"\n']
    told = Framer().feed(told_events(owed, "replay_gap"))
    assert [block.own_id for block in told] == [False] * 4
    messages = [json.loads(block.data or b"") for block in told]
    assert [message["id"] for message in messages] == owed
    for message in messages:
        assert message["error"]["code"] == -32000
        assert message["error"]["data"] == {"reason": "replay_gap"}
    assert told_events([], "replay_gap") == b""


# -- pending calls (F4)


def refusals(pending_calls: PendingCalls, who: str, *, owes: bool = True, spent: bool = False) -> list[Answer]:
    """The answers to a row of refused resumes; `o` is a resume of the owner, `s` one of a stranger."""
    scene = Scene()
    stream = scene.call(*([7, 8] if owes else []))
    stream.spent = spent
    rule = policy(pending_calls=pending_calls)
    callers = {"o": b"owner", "s": b"stranger"}
    return [answer_refused_resume(scene.session, stream, rule, callers[caller]) for caller in who]


@pytest.mark.parametrize(
    ("pending_calls", "who", "spent", "answers"),
    [
        ("on-retry", "oooo", False, [NOT_FOUND, TELL, NOT_FOUND, NOT_FOUND]),
        ("on-retry", "ooo", True, [TELL, NOT_FOUND, NOT_FOUND]),
        ("on-retry", "sssoo", False, [NOT_FOUND, NOT_FOUND, NOT_FOUND, NOT_FOUND, TELL]),
        ("on-retry", "osso", False, [NOT_FOUND, NOT_FOUND, NOT_FOUND, TELL]),
        ("on-retry", "so", True, [NOT_FOUND, TELL]),
        ("at-once", "ooo", False, [TELL, NOT_FOUND, NOT_FOUND]),
        ("at-once", "so", False, [NOT_FOUND, TELL]),
        ("leave", "ooo", True, [NOT_FOUND, NOT_FOUND, NOT_FOUND]),
    ],
)
def test_pending_calls_are_told_once(pending_calls: str, who: str, spent: bool, answers: list[Answer]) -> None:
    """F4: to the caller that opened the stream, on its second try, or on the first where one try is spent already."""
    assert refusals(PendingCalls(pending_calls), who, spent=spent) == answers


@pytest.mark.parametrize("pending_calls", PendingCalls)
def test_nothing_owed_nothing_told(pending_calls: PendingCalls) -> None:
    """F4."""
    assert refusals(pending_calls, "ooo", owes=False, spent=True) == [NOT_FOUND] * 3


def test_each_stream_is_told_for_itself_with_any_of_its_cursors() -> None:
    """F4: per stream."""
    scene = Scene()
    first, second = scene.call(1), scene.call(2)
    rule = policy()

    def ask(stream: Stream) -> Answer:
        return answer_refused_resume(scene.session, stream, rule, b"owner")

    assert [ask(first), ask(second), ask(first), ask(second)] == [NOT_FOUND, NOT_FOUND, TELL, TELL]


def test_a_response_that_came_is_no_longer_owed() -> None:
    """F4: only what is still owed is told."""
    scene = Scene()
    stream = scene.call(1)
    scene.live(stream, *notes(1), ("2", result(1)))
    assert (
        answer_refused_resume(scene.session, stream, policy(pending_calls=PendingCalls.AT_ONCE), b"owner") is NOT_FOUND
    )


# -- in the band (F5)


@pytest.mark.parametrize(("pending_calls", "told"), [("on-retry", True), ("at-once", True), ("leave", False)])
def test_a_divergence_after_the_head_is_told_once(pending_calls: str, told: bool) -> None:
    """F5: and a stream that was told so is not told again by F4."""
    scene = Scene()
    stream = scene.call(1)
    rule = policy(pending_calls=PendingCalls(pending_calls))
    assert may_tell_in_band(stream, rule) is told
    assert not may_tell_in_band(stream, rule)
    assert [answer_refused_resume(scene.session, stream, rule, b"owner") for _ in range(3)] == [NOT_FOUND] * 3


def test_a_stream_that_owes_nothing_is_aborted() -> None:
    """F5: nothing can be told."""
    assert not may_tell_in_band(Scene().standalone(), policy())


def test_what_f4_told_f5_does_not_tell_again() -> None:
    """F5."""
    scene = Scene()
    stream = scene.call(1)
    rule = policy(pending_calls=PendingCalls.AT_ONCE)
    assert answer_refused_resume(scene.session, stream, rule, b"owner") is TELL
    assert not may_tell_in_band(stream, rule)


@pytest.mark.parametrize(
    ("credentials", "granted", "allowed"),
    [(b"owner", False, True), (b"owner", True, True), (b"stranger", False, False), (b"stranger", True, True)],
)
def test_who_may_fence(credentials: bytes, granted: bool, allowed: bool) -> None:
    """F3: whom the upstream let in, or who opened the session."""
    assert may_fence(Scene().session, credentials, granted=granted) is allowed


# -- losses told badly (N1)


def error(code: int, message: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "error": {"code": code, "message": message}, "id": None}).encode()


LOST = [
    error(-32001, "Session not found"),
    error(-32600, "Session not found"),
    error(-32600, "Session terminated"),
    error(-32000, "Bad Request: No valid session ID provided"),
    error(-32000, "Bad Request: Server not initialized"),
    error(-32000, "Bad Request: Mcp-Session-Id header is required"),
    error(-32000, "Server has not been initialized"),
    b'{"error":"no such session"}',
    b'{"error":"session_not_found"}',
    b'{"error":"SessionNotFound"}',
    b'{"error":"invalid_session"}',
    b"session not found\n",
    b"Invalid or missing session ID",
    b"Bad Request: No valid session ID provided",
    b"missing Mcp-Session-Id header",
    b"Session abc does not exist",
    b"Session has expired",
    b"Cannot find session 7",
    b"MCP session is closed",
    b"the server is uninitialised",
    b"Session not found. Events of it are gone.",
    b"Session with ID 7 not found",
    error(-32602, "Bad Request: No valid session ID provided"),
    error(-32000, "Not initialized"),
    b'{"error":"server_not_initialized"}',
]
NO_LOSS = [
    b"",
    b"<html><h1>Bad Request</h1></html>",
    b"Invalid event ID format",
    b"Bad Request: Unsupported protocol version",
    b"the argument session_name is missing",
    b"Unknown parameter: sessionType",
    b"Invalid Request: session already initialized",
    error(-32700, "Parse error"),
    error(-32000, "Bad Request: Unsupported protocol version"),
    error(-32602, "Invalid params"),
    error(-32602, "Invalid params: session_name is required"),
    error(-32602, "missing required parameter: session_id"),
    error(-32700, "Parse error in unknown session"),
    error(-32000, "Database not initialized"),
    error(-32000, "Invalid session type"),
    error(-32000, "Missing argument: browser session"),
    error(-32000, "Your session with GitHub expired, sign in"),
    b'{"error":"this session does not support GET streams"}',
    error(-32601, "Method not found: session/list"),
]
OF_AN_EVENT = [
    error(-32000, "Event not found"),
    error(-32000, "Invalid event ID format"),
    error(-32600, "Event not found"),
    error(-32001, "Event not found"),
    error(-32001, "Event not found in this session"),
    error(-32000, "The event is unknown to the session, or expired"),
    b"failed to replay events: event not found for session",
]


@pytest.mark.parametrize("body", LOST)
@pytest.mark.parametrize("method", [b"POST", b"GET", b"DELETE"])
@pytest.mark.parametrize("status", [400, 404])
def test_a_lost_session_is_known_in_many_forms(method: bytes, status: int, body: bytes) -> None:
    """N1."""
    assert is_session_lost(method, status, body)


@pytest.mark.parametrize("body", NO_LOSS)
def test_another_400_is_no_lost_session(body: bytes) -> None:
    """N1: tool errors with a session among their parameters, versions, syntax."""
    assert not is_session_lost(b"POST", 400, body)
    assert not is_session_lost(b"GET", 400, body)


@pytest.mark.parametrize("body", [*NO_LOSS[:-1], *OF_AN_EVENT, b"Not Found"])
def test_a_404_is_a_lost_session_in_any_other_form_than_an_unknown_method(body: bytes) -> None:
    """N1: except on a GET."""
    assert is_session_lost(b"POST", 404, body)
    assert not is_session_lost(b"POST", 404, NO_LOSS[-1])
    assert not is_session_lost(b"GET", 404, NO_LOSS[-1])


@pytest.mark.parametrize("body", OF_AN_EVENT)
@pytest.mark.parametrize("status", [400, 404])
def test_an_event_that_is_not_found_is_no_lost_session(status: int, body: bytes) -> None:
    """N1, R6: the server has forgotten the event; the session lives."""
    assert not is_session_lost(b"GET", status, body)


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        (b"", False),
        (b"Not Found\n", False),
        (b"<html><h1>HTTP Status 404</h1></html>", False),
        (error(-32000, "Not Found"), False),
        (error(-32001, "gone"), True),
        (error(-32600, "gone"), True),
        (b"a session is what is needed here", True),
        (b"Server not initialized", True),
    ],
)
def test_a_bare_404_to_a_get_means_no_stream_here(body: bytes, lost: bool) -> None:
    """N1: on a GET only if the body speaks of a session or an uninitialized server, or has one of two codes."""
    assert is_session_lost(b"GET", 404, body) is lost


@pytest.mark.parametrize("status", [200, 401, 403, 405, 409, 410, 500, 502, 503])
@pytest.mark.parametrize("body", LOST[:2])
def test_other_statuses_have_no_effect(status: int, body: bytes) -> None:
    """N1, T7."""
    assert not is_session_lost(b"POST", status, body)
    assert not is_session_lost(b"GET", status, body)


@pytest.mark.parametrize(("before", "lost"), [(60_000, True), (70_000, False)])
def test_n1_a_page_is_searched_as_far_as_such_an_answer_is_long(before: int, lost: bool) -> None:
    """A page of a megabyte took more than half a second."""
    assert is_session_lost(b"GET", 404, b'"' * before + b"no such session") is lost
