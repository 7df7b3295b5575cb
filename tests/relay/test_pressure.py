"""T6: heads and bytes at once, back-pressure both ways, and clients that go, in half or wholly."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time

import pytest

from relay.wire import CHUNKED_OK, STREAM_OK, Peer, Relay, get, ok, post, running, settle

NOTICE = 0.5  # s in which a vanished client must be noticed
BUFFERED = 1024 * 1024  # bytes that may wait inside the proxy for one connection
SIZES = [
    pytest.param(60_000_000, id="60 MB"),  # more than the buffers of the kernel hold
    pytest.param(200_000_000, id="200 MB", marks=pytest.mark.slow),
]
BLOCK = bytes(range(256)) * 1024
BLOCKS = BLOCK * 2

GUARDED = (b"Mcp-Session-Id: S1", b"Accept: text/event-stream")


async def noticed(server: Peer) -> float:
    """How long it takes until the upstream's connection is closed, in s."""
    began = time.perf_counter()
    assert await server.gone(NOTICE)
    return time.perf_counter() - began


async def test_t6_the_head_comes_at_once(relay):
    for head in (STREAM_OK, CHUNKED_OK, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"):
        client, server, _ = await relay.asked(get())
        await server.send(head)
        start, _ = await client.head()
        assert start == b"HTTP/1.1 200 OK"
        client.reset()
        assert await server.gone()


@pytest.mark.parametrize("guarded", [False, True])
async def test_t6_bytes_come_as_they_are_written(relay, guarded):
    """Pieces of an event are not kept until it is whole."""
    await relay.opened()
    client = await relay.connect()
    await client.send(get(b"/mcp", *(GUARDED if guarded else ())))
    server = relay.peers[1]
    await server.request()
    await server.send(STREAM_OK)
    await client.head()
    for piece in (b"id: 1\nda", b"ta: a", b"\n", b"\n", b": keep-alive\n\n"):
        await server.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        assert await client.chunk() == piece


def inside(relay: Relay) -> int:
    """Bytes that wait inside the proxy, for clients and for the upstream."""
    connections = [*relay.context.clients, *relay.context.upstream.connections]
    waiting = sum(connection._transport.get_write_buffer_size() for connection in connections)
    incoming = [connection._incoming for connection in relay.context.clients if not connection._in_head]
    return waiting + sum(request.body.size for request in incoming if request is not None)


async def stalled(sent: list[int]) -> None:
    """Wait until no more can be sent."""
    before = -1
    while sent[0] != before:
        before = sent[0]
        await asyncio.sleep(0.1)


async def send_big(peer: Peer, sent: list[int], size: int) -> None:
    loop = asyncio.get_running_loop()
    while sent[0] < size:
        await loop.sock_sendall(peer.sock, BLOCK[: size - sent[0]])
        sent[0] += len(BLOCK)


async def receive_big(peer: Peer, size: int) -> None:
    """Read it all, and compare it."""
    at = 0
    while at < size:
        data = await peer.receive()
        assert data
        assert data == BLOCKS[at % 256 :][: len(data)]
        at += len(data)
    assert at == size


OWN = {
    "404": get(b"/mcp", b"Mcp-Session-Id: made-up", b"Last-Event-ID: 1"),
    "400": get(b"/mcp", b"Mcp-Session-Id: a", b"Mcp-Session-Id: b"),
    "of the upstream": get(b"/mcp"),
}


@pytest.mark.parametrize("kind", OWN)
async def test_t6_who_takes_no_answers_is_asked_for_no_more_requests(relay, kind):
    """Of requests that were sent ahead, one is worked on when the answers before it have gone out."""
    client = await relay.connect(receive_buffer=4096)
    answered = asyncio.ensure_future(answer_all(relay, ok(b"x" * 1000))) if kind == "of the upstream" else None
    request = OWN[kind] * 100
    loop, sent = asyncio.get_running_loop(), 0
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.3):
                await loop.sock_sendall(client.sock, request)
            sent += 100
            assert sent < 200_000, "the proxy reads on and on"
            assert inside(relay) < BUFFERED
    for _ in range(min(sent, 500)):
        answer = await client.message()
        assert answer.status == (200 if kind == "of the upstream" else int(kind))
    if answered is not None:
        answered.cancel()


async def answer_all(relay: Relay, answer: bytes) -> None:
    """Answer each request, on one connection after the other."""
    while True:
        server = await relay.accept(math.inf)
        with contextlib.suppress(AssertionError, ConnectionError, TimeoutError):
            while True:
                await server.request()
                await server.send(answer)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["plain", "stream", "guarded stream"])
async def test_t6_a_slow_reader_stops_the_upstream(relay, kind, size):
    """A big answer for a client that does not read: its bytes stay at the upstream, and all arrive when it does."""
    await relay.opened()
    server = relay.peers[1]
    client = await relay.connect(receive_buffer=65_536)
    await client.send(get(b"/mcp", *(GUARDED if kind == "guarded stream" else ())))
    await server.request()
    content_type = b"text/event-stream" if "stream" in kind else b"application/octet-stream"
    await server.send(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (content_type, size))
    await client.head()
    sent = [0]
    sending = asyncio.ensure_future(send_big(server, sent, size))
    await stalled(sent)
    assert sent[0] < 40_000_000  # the kernel's buffers
    assert inside(relay) < BUFFERED
    await receive_big(client, size)
    await sending


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("framing", ["sized", "chunked"])
async def test_t6_a_slow_upstream_stops_the_client(relay, framing, size):
    """A big body for an upstream that does not read: its bytes stay at the client, and all arrive when it does."""
    client = await relay.connect()
    sent = [0]
    if framing == "sized":
        await client.send(get(b"/", b"Content-Length: %d" % size, method=b"POST"))
    else:
        await client.send(get(b"/", b"Transfer-Encoding: chunked", method=b"POST") + b"%x\r\n" % size)
    sending = asyncio.ensure_future(send_big(client, sent, size))
    server = await relay.accept()
    await stalled(sent)
    assert sent[0] < 40_000_000
    assert inside(relay) < BUFFERED
    await server.head()
    if framing == "sized":
        await receive_big(server, size)
    else:
        left = size
        while left:
            left -= len(await server.chunk())
        await client.send(b"\r\n0\r\n\r\n")
        assert await server.chunk() == b""
    await sending
    await server.send(ok(b"done"))
    assert (await client.message()).body == b"done"


async def test_t6_interim_answers_obey_back_pressure(relay):
    client, server, _ = await relay.asked(get())
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 10_000 + b"\r\n\r\n"
    flood = asyncio.ensure_future(server.send(hint * 5000))
    await asyncio.wait((flood,), timeout=0.4)
    assert inside(relay) < BUFFERED
    client.close()
    await asyncio.wait((flood,))
    flood.exception()


@pytest.mark.parametrize("how", ["RST", "FIN and RST"])
@pytest.mark.parametrize("when", ["no head yet", "idle stream", "idle guarded stream", "half a body"])
async def test_t6_a_vanished_client_is_noticed(relay, when, how):
    """The upstream's connection is closed within 500 ms, nothing else is sent to it."""
    await relay.opened()
    server = relay.peers[1]
    client = await relay.connect()
    await client.send(get(b"/mcp", *(GUARDED if when == "idle guarded stream" else ())))
    await server.request()
    if when == "half a body":
        await server.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        await client.head()
    elif when != "no head yet":
        await server.send(STREAM_OK + b"3\r\n:\n\n\r\n")
        await client.head()
    if how == "FIN and RST":
        client.finish()
        await settle()
    client.reset()
    assert await noticed(server) < NOTICE


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_t6_a_client_that_vanishes_in_the_middle_of_its_request_is_noticed(relay, how):
    client = await relay.connect()
    await client.send(get(b"/", b"Content-Length: 100", method=b"POST") + b"half")
    server = await relay.accept()
    await server.head()
    if how == "RST":
        client.reset()
    else:
        client.finish()
    assert await noticed(server) < NOTICE
    if how == "FIN":
        assert await client.gone()


async def test_t6_a_client_that_vanishes_while_it_is_not_read_is_noticed(relay):
    """The upstream does not take the body, so nothing is read from the client: only the kernel knows that it left."""
    client = await relay.connect()
    await client.send(get(b"/", b"Content-Length: 99999999", method=b"POST"))
    sent = [0]
    sending = asyncio.ensure_future(send_big(client, sent, 99_999_999))
    await relay.accept()
    await stalled(sent)
    sending.cancel()
    await asyncio.wait((sending,))
    assert relay.context.upstream.connections
    client.reset()
    began = time.perf_counter()
    while relay.context.clients or relay.context.upstream.connections:
        assert time.perf_counter() - began < NOTICE
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("pipelined", [1, 20])
async def test_t6_a_client_that_vanishes_behind_a_queue_is_noticed(relay, pipelined):
    client, server, _ = await relay.asked(get() * (1 + pipelined))
    client.reset()
    assert await noticed(server) < NOTICE
    assert await relay.unasked()


async def test_t6_a_vanished_client_during_the_connect_leaves_nothing(relay):
    """And none that vanishes while its request is refused, or read ahead."""
    await relay.opened()
    dead = b"Mcp-Session-Id: unknown"
    for data in (
        get(),
        get(b"/", b"Connection: authorization", b"Content-Length: 100", method=b"POST") + b"half",
        get(b"/", dead, b"Content-Length: 100", method=b"POST") + b"half",
    ):
        client = await relay.connect()
        await client.send(data)
        client.reset()
        client = await relay.connect()
        await client.send(data)
        await settle()
        client.reset()


@pytest.mark.parametrize("stream", [False, True])
async def test_t6_a_client_that_half_closes_gets_its_answer(relay, stream):
    """FIN after the request; the answer comes long after, in pieces."""
    client = await relay.connect()
    await client.send(post(b"{}"))
    client.finish()
    server = await relay.accept()
    await server.request()
    await asyncio.sleep(0.7)
    await server.send(STREAM_OK if stream else CHUNKED_OK)
    await client.head()
    await asyncio.sleep(0.7 if stream else 0.0)
    await server.send(b"9\r\ndata: 1\n\n\r\n")
    assert await client.chunk() == b"data: 1\n\n"
    await server.send(b"0\r\n\r\n")
    assert await client.chunk() == b""
    assert await client.rest() == b""


async def test_t6_a_client_that_half_closes_gets_all_its_answers(relay):
    """Those to requests that it sent ahead too; half a request at the end is dropped."""
    client, server, _ = await relay.asked(
        get(b"/1") + get(b"/2") + b"POST /3 HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf"
    )
    client.finish()
    await settle()
    await server.send(ok(b"1"))
    assert (await client.message()).body == b"1"
    assert (await server.request()).target == b"/2"
    await server.send(ok(b"2"))
    assert (await client.message()).body == b"2"
    assert await client.rest() == b""
    assert await relay.unasked()


def limit(relay, **limits: float) -> None:
    """Other limits for connections to come and the timers to come."""
    clients = relay.context.clients
    clients.limits = clients.limits.model_copy(update=limits)


async def test_t6_a_slow_client_is_not_cut(relay, monkeypatch):
    """Not while it sends its request, and not while it reads the last of an answer that ends its connection."""
    limit(relay, connection_idle=0.2, head_time=0.5, body_time=0.5)
    monkeypatch.setattr("epochgate.relay.client.LINGER", 0.2)
    client = await relay.connect()
    for piece in (b"POST / HT", b"TP/1.1\r\nContent-", b"Length: 6\r\nConnection: close\r\n\r\n", b"ab", b"cd", b"ef"):
        await client.send(piece)
        await asyncio.sleep(0.12)
    server = await relay.accept()
    assert (await server.request()).body == b"abcdef"
    size = 30_000_000
    sending = asyncio.ensure_future(server.send(ok(b"x" * size)))
    read = 0
    await client.head()
    while read < size:
        await asyncio.sleep(0.1)
        read += len(await client.exactly(min(size // 8, size - read)))
    assert await client.rest() == b""
    await sending


async def test_t6_a_silent_client_is_let_go(relay):
    """One that never asks, or does not finish its head, holds a connection for a limited time."""
    limit(relay, connection_idle=0.1, head_time=0.1)
    for data in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n"):
        client = await relay.connect()
        if data:
            await client.send(data)
        assert await client.gone(1.0)


@pytest.mark.parametrize(("start", "byte"), [(b"GET / HTTP/1.1\r\nX: ", b"y"), (b"\r\n", b"\r\n")])
async def test_t6_a_head_byte_by_byte_gains_no_time(relay, start, byte):
    """The time for a head is for the whole of it; empty lines before it count as waiting."""
    limit(relay, connection_idle=0.3, head_time=0.3)
    client = await relay.connect()
    await client.send(start)
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(3):
            while True:
                await asyncio.sleep(0.02)
                await client.send(byte)


async def test_f1_the_body_of_a_refused_request_is_not_waited_for_for_ever(relay, monkeypatch):
    """One that stalls gets its answer all the same, on a connection that then ends."""
    monkeypatch.setattr("epochgate.relay.answers.DRAIN_TIME", 0.1)
    client = await relay.connect()
    await client.send(get(b"/mcp", b"Connection: host", b"Content-Length: 100", method=b"POST") + b"x")
    assert (await client.message()).status == 400
    assert await client.rest() == b""
    assert await relay.unasked()


async def test_l2_the_body_of_a_post_that_may_initialize_is_not_waited_for_for_ever(relay, monkeypatch):
    """The session is not known: it is forwarded as it comes, however slowly."""
    monkeypatch.setattr("epochgate.relay.forward.HANDSHAKE_TIME", 0.1)
    client = await relay.connect()
    await client.send(get(b"/mcp", b"Mcp-Session-Id: old", b"Content-Length: 3", method=b"POST") + b"a")
    server = await relay.accept()
    await server.until(b"\r\n\r\na")
    await client.send(b"bc")
    assert await server.exactly(2) == b"bc"
    await server.send(ok(b"done"))
    assert (await client.message()).body == b"done"


async def test_t6_idle_timeout_is_that_of_the_upstream_only():
    """A client that is slow to send or slow to read is no silence of the upstream."""
    async with running(upstream={"idle_timeout": 0.2}) as relay:
        client = await relay.connect()
        await client.send(get(b"/", b"Content-Length: 6", method=b"POST"))
        for _ in range(3):
            await asyncio.sleep(0.15)
            await client.send(b"ab")
        server = await relay.accept()
        assert (await server.request()).body == b"ababab"
        await server.send(b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n")
        sending = asyncio.ensure_future(server.send(b"x" * 20_000_000))
        await client.head()
        await asyncio.sleep(0.5)
        assert len(await client.exactly(20_000_000)) == 20_000_000
        await sending


async def test_t6_one_stalled_client_disturbs_nobody(relay):
    client, server, _ = await relay.asked(get())
    sending = asyncio.ensure_future(server.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + BLOCK * 300))
    await asyncio.sleep(0.2)
    for _ in range(5):
        other, fresh, _ = await relay.asked(get(b"/other", b"Connection: close"))
        await fresh.send(ok(b"fine", b"Connection: close"))
        assert (await other.message()).body == b"fine"
    client.reset()
    assert await server.gone()
    await asyncio.wait((sending,))
    sending.exception()


async def test_t6_hundreds_of_streams_leave_room_for_more(relay):
    streams = []
    for number in range(300):
        client, server, _ = await relay.asked(get(b"/%d" % number))
        await server.send(STREAM_OK)
        await client.head()
        streams.append((client, server))
    began = time.perf_counter()
    client, server, _ = await relay.asked(post(b"{}"))
    await server.send(ok())
    assert (await client.message()).status == 200
    assert time.perf_counter() - began < 0.2


async def test_t6_a_handshake_without_end_is_not_kept(relay):
    """L5: an `initialize` that is answered by anything but its result takes no memory, and opens no session."""
    client, server, _ = await relay.asked(post(b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'))
    await server.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nMcp-Session-Id: S1\r\n\r\n")
    await client.head()
    event = b"data: " + b"x" * 1_000_000 + b"\n\n"
    sending = asyncio.ensure_future(send_events(server, event, 20))
    received = 0
    while received < 20 * len(event):
        received += len(await client.chunk())
    await sending
    tap = next(iter(relay.context.streams))._tap
    assert sum(len(block.data) for block in tap._before) < 5_000_000


async def send_events(server: Peer, event: bytes, count: int) -> None:
    for _ in range(count):
        await server.send(event)


@pytest.mark.parametrize("guarded", [False, True])
async def test_t6_a_client_that_closed_an_idle_stream_is_noticed(relay, guarded):
    """Its FIN alone could mean that it still reads (H1): a byte that changes nothing asks its kernel."""
    await relay.opened()
    client, server = relay.peers
    await client.send(get(b"/mcp", *(GUARDED if guarded else ())))
    await server.request()
    await server.send(STREAM_OK)
    await client.head()
    client.close()
    assert await noticed(server) < NOTICE
