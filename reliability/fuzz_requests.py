"""Whatever a client sends, through the whole proxy, against a strict reading of the same bytes.

The upstream must be able to read everything that reaches it by the letter, and never more requests than the client
sent; the client gets one answer to each, in order, and then an end; somebody else gets an answer afterwards. The first
byte of an input chooses how the rest is cut, the second how the client leaves, whether the session `s` is known, and
whether it is all sent again: then the proxy knows the heads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from epochgate.relay.headers import HOP_BY_HOP, MAX_HEAD
from reliability.inside import PATIENCE, Inside, LeapingLoop, Pipe, cut, settings
from reliability.strict import Message, options, read_answer, read_requests

DICTIONARY = (
    "GET / HTTP/1.1\\x0d\\x0a", "POST /mcp HTTP/1.1\\x0d\\x0a", "HEAD", "OPTIONS * HTTP/1.0\\x0d\\x0a",
    "Host: a\\x0d\\x0a",
    "Content-Length: 5\\x0d\\x0a", "Transfer-Encoding: chunked\\x0d\\x0a", "chunked", "identity",
    "Connection: close\\x0d\\x0a",
    "Connection: keep-alive\\x0d\\x0a", "Upgrade: h2c\\x0d\\x0a", "Connection: Upgrade\\x0d\\x0a",
    "Expect: 100-continue\\x0d\\x0a",
    "0\\x0d\\x0a\\x0d\\x0a", "5;a=b\\x0d\\x0a", "\\x0d\\x0a", "\\x0d\\x0a ", "\\x0b", "\\x00", "http://a/",
    "Mcp-Session-Id: s\\x0d\\x0a",
    "Last-Event-ID: 1\\x0d\\x0a", "DELETE / HTTP/1.1\\x0d\\x0a", '"method":"initialize"', "CONNECT",
)  # fmt: skip
OURS = {400, 404, 408, 413, 431, 501, 502, 503, 505}  # what the proxy itself may answer; never 500
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Upstream: %d\r\n\r\n"

OPEN = b'POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 30\r\n\r\n{"id":0,"method":"initialize"}'
OPENED = b'{"id":0,"result":{"protocolVersion":"x"}}'
OPENED_HEAD = b"HTTP/1.1 200 OK\r\nMcp-Session-Id: s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
AGAIN = 2  # times more: from the second request of a connection on its head is kept, and known by the third
HONEST = b"GET /honest HTTP/1.1\r\nHost: a\r\n\r\n"
# What the guard may take away from a request or change: L2, R3, T8.
GUARDED = {b"mcp-session-id", b"last-event-id", b"accept-encoding"}

_settings = settings()
_loop = LeapingLoop()


def check(data: bytes) -> None:
    """Raises AssertionError where the proxy does what it must not with this input."""
    if len(data) > 2:
        _loop.run(_exchange(data[2:], data[0], data[1]))


class _Upstream:
    """Answers each request at once, and keeps what it has read."""

    def __init__(self) -> None:
        self.requests: list[Message] = []
        self.answered: dict[Pipe, int] = {}
        self.opening = False  # a session

    def serve(self, pipe: Pipe) -> None:
        """Strict: raises UnclearError, which the loop tells as a fault."""
        found, _, error = read_requests(bytes(pipe.written))
        if error is not None:
            raise error
        if pipe.finished:
            return
        for request in found[self.answered.get(pipe, 0) :]:
            assert len(request.all(b"host")) == 1
            if self.opening:
                pipe.send(OPENED_HEAD % len(OPENED) + OPENED)
                continue
            body = b"" if request.method == b"HEAD" else b"ok"
            pipe.send(ANSWER % len(self.requests) + body)
            self.requests.append(request)
        self.answered[pipe] = len(found)


async def _exchange(sent: bytes, how: int, leaving: int) -> None:
    upstream = _Upstream()
    proxy = Inside(_settings, upstream.serve)
    if leaving & 4:
        await _open_session(proxy, upstream)
    client = proxy.client()
    client.send(*cut(sent, how))
    for _ in range(AGAIN if leaving & 8 else 0):
        await proxy.settle()
        client.send(*cut(sent, how))
    sent += sent * (AGAIN if leaving & 8 else 0)
    if leaving % 4 == 1:
        client.finish()
    await proxy.settle()
    if leaving % 4 == 2:
        client.break_off()
    await _time_passes(proxy)
    if not client.closed:
        client.finish()
        await _time_passes(proxy)
    assert client.closed, "the connection stands for ever"
    for pipe in proxy.upstreams:
        _, rest, _ = read_requests(bytes(pipe.written))
        assert pipe.closed or not rest, "half a request, and nobody ends it"
    if leaving % 4 != 2:
        methods = [request.method for request in proxy.handled]
        answers = read_answers(bytes(client.written), methods)
        _check_answers(answers, len(proxy.handled))
        _check_requests(sent, proxy, upstream, answers)
    client = proxy.client()
    client.send(HONEST)
    await proxy.settle()
    assert client.written.endswith(b"\r\n\r\nok"), bytes(client.written)
    await proxy.end()


async def _open_session(proxy: Inside, upstream: _Upstream) -> None:
    upstream.opening = True
    client = proxy.client()
    client.send(OPEN)
    await proxy.settle()
    assert client.written.endswith(OPENED)
    client.break_off()
    await proxy.settle()
    upstream.opening = False
    proxy.handled.clear()


async def _time_passes(proxy: Inside) -> None:
    await proxy.settle()
    await asyncio.sleep(PATIENCE)
    await proxy.settle()


def read_answers(written: bytes, methods: Sequence[bytes]) -> list[Message]:
    """The final answers to requests with these methods, and what else came; strictly."""
    answers: list[Message] = []
    at = 0
    while at < len(written):
        method = methods[len(answers)] if len(answers) < len(methods) else b"GET"
        found = read_answer(written, at, method=method, ended=True)
        assert found is not None, written[at:][:200]
        message, at = found
        if message.status >= 200:
            answers.append(message)
    return answers


def _check_answers(answers: list[Message], handled: int) -> None:
    assert len(answers) <= handled + 1, "an answer that nobody asked for"
    for answer in answers:
        assert answer.all(b"x-upstream") or answer.status in OURS, answer


def _check_requests(sent: bytes, proxy: Inside, upstream: _Upstream, answers: list[Message]) -> None:
    """What the proxy took for requests is what the letter of the standard takes for them."""
    expected, rest, error = read_requests(sent, tolerant=True)
    forwarded = iter(upstream.requests)
    for number, request in enumerate(proxy.handled):
        seen = next(forwarded, None) if number < len(answers) and answers[number].all(b"x-upstream") else None
        if number >= len(expected):
            assert seen is None, (seen, rest, error)  # it was never whole, or not clear: it is not answered from there
            continue
        wanted = expected[number]
        assert (request.method, request.target) == (wanted.method, wanted.target)
        assert [(name, value.strip(b" \t")) for name, value in request.fields] == list(wanted.fields)
        if seen is not None:
            assert_forwarded(wanted, seen)
    closing = bool(answers) and b"close" in options(answers[-1].fields)
    if not closing and len(sent) < MAX_HEAD:
        assert len(proxy.handled) >= len(expected), (expected, answers)


def assert_forwarded(wanted: Message, seen: Message) -> None:
    """The upstream got this request, but for what belongs to one connection (T1, T2, T3)."""
    assert (seen.method, seen.target, seen.body, seen.framing) == (
        wanted.method,
        wanted.target,
        wanted.body,
        wanted.framing,
    )
    changed = {b"host", b"via", b"transfer-encoding"} | (GUARDED if wanted.all(b"mcp-session-id") else set())
    dropped = HOP_BY_HOP | options(wanted.fields) | changed
    kept = [field for field in wanted.fields if field[0].lower() not in dropped]
    assert [field for field in seen.fields if field[0].lower() not in changed] == kept
