"""Whatever the upstream answers, through the whole proxy: one clear answer to the client, and nothing of it to others.

The first byte of an input chooses how the rest, the answer to the first request, is cut; the second which request that
is, how the upstream ends, and whether somebody has got the same answer before (or what stands in front of a mark): then
the proxy knows its head. A second request of the same client and one of another client get an answer of their own.
"""

from __future__ import annotations

import asyncio

from epochgate.relay.headers import HOP_BY_HOP, MAX_HEAD
from reliability.fuzz_requests import OURS
from reliability.inside import PATIENCE, Inside, LeapingLoop, Pipe, cut, settings
from reliability.strict import Message, UnclearError, options, read_answer, read_requests

DICTIONARY = (
    "HTTP/1.1 200 OK\\x0d\\x0a", "HTTP/1.0 200 OK\\x0d\\x0a", "HTTP/1.1 100 Continue\\x0d\\x0a\\x0d\\x0a",
    "HTTP/1.1 103 x\\x0d\\x0a",
    "HTTP/1.1 204 No Content\\x0d\\x0a", "HTTP/1.1 304 x\\x0d\\x0a", "HTTP/1.1 404 Not Found\\x0d\\x0a",
    "HTTP/1.1 101 x\\x0d\\x0a",
    "Content-Length: 5\\x0d\\x0a", "Transfer-Encoding: chunked\\x0d\\x0a", "chunked", "Connection: close\\x0d\\x0a",
    "Connection: keep-alive\\x0d\\x0a", "Connection: Content-Length\\x0d\\x0a", "Upgrade: h2c\\x0d\\x0a",
    "0\\x0d\\x0a\\x0d\\x0a", "5;a=b\\x0d\\x0a", "\\x0d\\x0a", "\\x0d\\x0a ",
    "Content-Type: text/event-stream\\x0d\\x0a", "Content-Type: application/json\\x0d\\x0a",
    "Content-Encoding: gzip\\x0d\\x0a",
    "id: 1\\x0adata: {}\\x0a\\x0a", "Session not found", "\\xff\\xfe\\xfd", "\\x0b", "\\x00",
)  # fmt: skip
REQUESTS = (
    b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD /first HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /first HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"POST /first HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /first HTTP/1.1\r\nHost: a\r\nMcp-Session-Id: S\r\n\r\n",
    (
        b"POST /first HTTP/1.1\r\nHost: a\r\nMcp-Session-Id: S\r\nContent-Length: 36\r\n\r\n"
        b'{"jsonrpc":"2.0","id":1,"method":""}'
    ),
    b"DELETE /first HTTP/1.1\r\nHost: a\r\nMcp-Session-Id: S\r\n\r\n",
    b'POST /first HTTP/1.1\r\nHost: a\r\nContent-Length: 30\r\n\r\n{"id":1,"method":"initialize"}',
)
MARK = b"\xff\xfe\xfd"
BEFORE = b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n"
SECOND = b"GET /second HTTP/1.1\r\nHost: a\r\n\r\n"
THIRD = b"GET /third HTTP/1.1\r\nHost: a\r\n\r\n"
OPEN = b'POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 30\r\n\r\n{"id":0,"method":"initialize"}'
OPENED = (
    b"HTTP/1.1 200 OK\r\nMcp-Session-Id: S\r\nContent-Type: application/json\r\nContent-Length: 45\r\n\r\n"
    b'{"id":0,"result":{"protocolVersion":"x"}}    '
)

_settings = settings(policies=[{"name": "mcp", "keepalive": "0s"}])
_loop = LeapingLoop()


def check(data: bytes) -> None:
    """Raises AssertionError where the proxy does what it must not with this input."""
    if len(data) > 2:
        _loop.run(_exchange(data[2:], data[0], REQUESTS[data[1] % 8], data[1] // 8))


class _Upstream:
    """Answers the first request with `first`, all others with their target."""

    def __init__(self, first: list[bytes]) -> None:
        self.first = first
        self.pipe: Pipe | None = None  # where the first request came
        self._read: dict[Pipe, int] = {}

    def serve(self, pipe: Pipe) -> None:
        found, _, error = read_requests(bytes(pipe.written))
        if error is not None:
            raise error
        for request in found[self._read.get(pipe, 0) :]:
            if request.target == b"/":
                pipe.send(OPENED)
            elif request.target == b"/first":
                self.pipe = pipe
                pipe.send(*self.first)
            else:
                pipe.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(request.target), request.target))
        self._read[pipe] = len(found)


async def _exchange(answer: bytes, how: int, request: bytes, ending: int) -> None:
    before, mark, after = answer.partition(MARK)
    answer = after if mark else before
    upstream = _Upstream([before])
    proxy = Inside(_settings, upstream.serve)
    if ending & 4:
        await _learn(proxy, upstream)
    upstream.first = cut(answer, how)
    guarded = b"Mcp-Session-Id" in request
    client = proxy.client()
    if guarded:
        client.send(OPEN)
        await proxy.settle()
        assert client.written.endswith(OPENED[-45:])
        client.written.clear()
        proxy.handled.clear()
    client.send(request + SECOND if ending % 2 else request)
    await proxy.settle()
    if not ending % 2:
        client.send(SECOND)
    await _time_passes(proxy)
    third = proxy.client()
    third.send(THIRD)  # while the first answer may still be on its way
    await proxy.settle()
    assert third.written.endswith(b"/third"), bytes(third.written)
    assert upstream.pipe is not None
    if not upstream.pipe.closed:
        upstream.pipe.finish() if ending & 2 else upstream.pipe.break_off()
    await _time_passes(proxy)
    client.finish()
    await _time_passes(proxy)
    assert client.closed
    _check(bytes(client.written), answer, request, guarded=guarded, fin=bool(ending & 2))
    await proxy.end()


async def _learn(proxy: Inside, upstream: _Upstream) -> None:
    """Somebody asks first."""
    client = proxy.client()
    client.send(BEFORE)
    await proxy.settle()
    client.break_off()
    await proxy.settle()
    upstream.pipe = None
    proxy.handled.clear()


async def _time_passes(proxy: Inside) -> None:
    await proxy.settle()
    await asyncio.sleep(PATIENCE / 60)
    await proxy.settle()


def _check(written: bytes, sent: bytes, request: bytes, *, guarded: bool, fin: bool) -> None:
    method = request.split(b" ")[0]
    interims, first, at = _final(written, method)
    assert first is not None, (written, sent)
    if at < len(written):
        _, second, at = _final(written, b"GET", at)
        assert second is not None
        assert second.complete
        assert (second.body, at) == (b"/second", len(written))
    try:
        sent_interims, expected, end = _final(sent, method)
    except UnclearError:
        assert first.status != 500 or b" 500" in sent
        return
    if expected is None or expected.status == 101:
        assert first.status in OURS, first
        return
    if end > MAX_HEAD or (guarded and expected.status in (400, 404)):
        return
    assert (first.status, first.reason) == (expected.status, expected.reason)
    assert interims == (sent_interims if b"HTTP/1.1" in request else 0)
    dropped = HOP_BY_HOP | (options(expected.fields) - {b"content-length"})  # by which the end is told
    fields = [field for field in expected.fields if field[0].lower() not in dropped]
    assert [field for field in first.fields if field[0].lower() not in HOP_BY_HOP] == fields, (first, expected)
    assert first.body == expected.body, (first, expected)
    if first.framing != "close":  # there only a RST tells it (T4), which has no bytes
        assert first.complete == (fin if expected.framing == "close" else expected.complete)


def _final(data: bytes, method: bytes, at: int = 0) -> tuple[int, Message | None, int]:
    """How many interim answers come first, the final one, and where it ends."""
    interims = 0
    while (found := read_answer(data, at, method=method, ended=True)) is not None:
        message, at = found
        if message.status >= 200 or message.status == 101:
            return interims, message, at
        interims += 1
    return interims, None, at
