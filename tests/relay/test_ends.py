"""T4: a clean end stays clean, and a truncated body is passed on as an aborted one."""

from __future__ import annotations

import pytest

from relay.wire import CHUNKED_OK, STREAM_OK, Peer, get, post, settle

HEADS = {
    "sized": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n",
    "chunked": CHUNKED_OK,
    "close": b"HTTP/1.1 200 OK\r\n\r\n",
    "1.0 close": b"HTTP/1.0 200 OK\r\n\r\n",
}
STREAM = b"Content-Type: text/event-stream\r\n\r\n"


def begun(framing: str, body: bytes, *, stream: bool) -> bytes:
    head = HEADS[framing]
    if stream:
        head = head[:-2] + STREAM
    return head + (b"%x\r\n%b\r\n" % (len(body), body) if framing == "chunked" else body)


def old(target: bytes = b"/mcp", *fields: bytes) -> bytes:
    return get(target, *fields).replace(b"HTTP/1.1", b"HTTP/1.0")


def end(server: Peer, how: str) -> None:
    if how == "RST":
        server.reset()
    else:
        server.close()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("framing", "how"),
    [
        ("sized", "FIN"),
        ("sized", "RST"),
        ("chunked", "FIN"),
        ("chunked", "RST"),
        ("close", "RST"),
        ("1.0 close", "RST"),
    ],
)
async def test_t4_truncated_is_aborted(relay, framing, how, stream):
    """What came is passed on, and nothing that makes it look complete."""
    client, server, _ = await relay.asked(get())
    await server.send(begun(framing, b"12345", stream=stream))
    _, fields = await client.head()
    length = dict(fields).get(b"Content-Length")
    if length is None:
        assert await client.chunk() == b"12345"
    else:
        assert (length, await client.exactly(5)) == (b"10", b"12345")
    end(server, how)
    assert await client.rest() == b""  # no last chunk, no further byte


@pytest.mark.parametrize("framing", ["sized", "chunked"])
async def test_t4_truncated_at_once_is_aborted(relay, framing):
    """All of it comes in one read: head, half a body, the end."""
    client, server, _ = await relay.asked(get())
    await server.send(begun(framing, b"12345", stream=False))
    server.close()
    data = await client.rest()
    assert data.startswith(b"HTTP/1.1 200 OK")
    assert b"12345" in data
    assert not data.endswith(b"0\r\n\r\n")


async def test_t4_a_break_after_probes_looks_like_no_end(relay):
    """A client that half-closed is probed by a leading zero; zeros alone at the end are the last chunk to some."""
    client = await relay.connect()
    await client.send(post(b"{}"))
    client.finish()
    server = await relay.accept()
    await server.request()
    await server.send(STREAM_OK)
    await client.head()
    assert await client.exactly(1) == b"0"
    server.close()
    assert await client.rest() == b"1\r\n", "of a chunk of 1 byte, which is missing"


async def test_t4_half_a_chunk_is_aborted(relay):
    client, server, _ = await relay.asked(get())
    await server.send(CHUNKED_OK, b"40\r\nid: 2\nda")
    server.close()
    await client.head()
    data = await client.rest()
    assert b"id: 2" in data
    assert b"0\r\n\r\n" not in data


@pytest.mark.parametrize("framing", ["sized", "chunked"])
async def test_t4_truncated_is_aborted_for_an_http10_client(relay, framing):
    """Where only the end of the connection ends a body, an abort is a RST."""
    client, server, _ = await relay.asked(old())
    await server.send(begun(framing, b"12345", stream=False))
    await client.head()
    assert await client.exactly(5) == b"12345"
    server.close()
    if framing == "sized":
        assert await client.rest() == b""
    else:
        with pytest.raises(ConnectionResetError):
            await client.rest()


@pytest.mark.parametrize("framing", ["sized", "chunked", "close", "1.0 close"])
async def test_t4_clean_stays_clean(relay, framing):
    client, server, _ = await relay.asked(get())
    await server.send(begun(framing, b"1234567890", stream=False))
    if framing == "chunked":
        await server.send(b"0\r\n\r\n")
    elif "close" in framing:
        server.close()
    answer = await client.message()
    assert answer.body == b"1234567890"
    await client.send(get(b"/next"))
    server = await relay.accept() if "close" in framing else server
    assert (await server.request()).target == b"/next"


@pytest.mark.parametrize("framing", ["sized", "chunked", "close", "1.0 close"])
async def test_t4_http10_client_gets_no_chunks(relay, framing):
    """It reads to the end of the connection, or the length that it was told."""
    client, server, request = await relay.asked(old())
    assert request.start.endswith(b"HTTP/1.1")
    await server.send(begun(framing, b"1234567890", stream=False))
    if framing == "chunked":
        await server.send(b"0\r\n\r\n")
    elif "close" in framing:
        server.close()
    answer = await client.message()
    assert (answer.body, answer.get(b"transfer-encoding")) == (b"1234567890", None)
    assert await client.rest() == b""


async def test_t4_http10_client_may_keep_its_connection(relay):
    client, server, _ = await relay.asked(old(b"/1", b"Connection: keep-alive"))
    await server.send(begun("sized", b"1234567890", stream=False))
    answer = await client.message()
    assert (answer.body, answer.get(b"connection")) == (b"1234567890", b"keep-alive")
    await client.send(old(b"/2"))
    assert (await server.request()).target == b"/2"
    await server.send(begun("sized", b"1234567890", stream=False))
    assert (await client.message()).get(b"connection") == b"close"
    assert await client.rest() == b""


async def test_t4_http10_upstream_may_keep_its_connection(relay):
    client, server, _ = await relay.asked(get(b"/1"))
    await server.send(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na")
    assert (await client.message()).body == b"a"
    await client.send(get(b"/2"))
    assert (await server.request()).target == b"/2"
    await server.send(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nb")
    assert (await client.message()).body == b"b"
    assert await server.gone()  # not kept: it did not say so


async def test_t4_close_delimited_events_flow_at_once(relay):
    """HTTP/1.0 upstreams stream too; their connection is not used again."""
    client, server, _ = await relay.asked(get())
    await server.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    await client.head()
    for number in range(3):
        await server.send(b"data: %d\n\n" % number)
        assert await client.chunk() == b"data: %d\n\n" % number
    server.finish()
    assert await client.chunk() == b""
    await settle()
    await client.send(get(b"/next"))
    assert (await (await relay.accept()).request()).target == b"/next"


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_t4_a_truncated_request_is_aborted_upstream(relay, how):
    """Half a request is never completed for the upstream."""
    for head, half in (
        (get(b"/", b"Content-Length: 10", method=b"POST"), b"12345"),
        (get(b"/", b"Transfer-Encoding: chunked", method=b"POST"), b"5\r\n12345\r\n"),
    ):
        client = await relay.connect()
        await client.send(head, half)
        server = await relay.accept()
        await server.head()
        assert await server.exactly(len(half)) == half
        end(client, how)
        assert await server.rest() == b""


@pytest.mark.parametrize("status", [b"404 Not Found", b"400 Bad"])
@pytest.mark.parametrize("size", [0, 10, 65_536, 300_000])
async def test_t4_an_answer_that_could_tell_of_a_lost_session_ends_as_it_ends(relay, status, size):
    """Its body is read first (N1); what tells of no loss passes unchanged, and truncated where it was."""
    await relay.opened()
    client, server = relay.peers
    ask = get(b"/mcp", b"Mcp-Session-Id: S1")
    whole = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, size) + b"x" * size
    await client.send(ask)
    await server.request()
    await server.send(whole)
    answer = await client.message()
    assert (answer.start, len(answer.body)) == (b"HTTP/1.1 " + status, size)
    await client.send(ask)
    await server.request()
    await server.send(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, size + 1) + b"x" * size)
    server.close()
    data = await client.rest()
    assert data.startswith(b"HTTP/1.1 " + status)
    assert data.count(b"x") == size
