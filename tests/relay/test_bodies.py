"""T1: bodies are the bytes that were sent, in the framing that they were sent in."""

from __future__ import annotations

import asyncio
import hashlib
import random

import pytest

from relay.wire import CHUNKED_OK, Peer, chunked, get, ok, post, settle

EVERY_BYTE = bytes(range(256))

REQUESTS = {
    "sized": (post(b"hello\r\n\r\n"), "sized", b"hello\r\n\r\n"),
    "empty": (post(b""), "sized", b""),
    "chunked": (
        get(b"/mcp", b"Transfer-Encoding: chunked", method=b"POST") + chunked(b"hel", b"lo\r\n"),
        "chunked",
        b"hello\r\n",
    ),
    "chunked and empty": (get(b"/mcp", b"Transfer-Encoding: chunked", method=b"PUT") + chunked(), "chunked", b""),
    "none": (get(), "none", b""),
    "none on DELETE": (get(method=b"DELETE"), "none", b""),
    "sized GET": (get(b"/mcp", b"Content-Length: 2") + b"hi", "sized", b"hi"),
}
ANSWERS = {
    "sized": (ok(b"hello\r\n\r\n"), "sized", b"hello\r\n\r\n"),
    "empty": (ok(), "sized", b""),
    "chunked": (CHUNKED_OK + chunked(b"hel", b"lo\r\n"), "chunked", b"hello\r\n"),
    "chunked and empty": (CHUNKED_OK + chunked(), "chunked", b""),
    "none": (b"HTTP/1.1 204 No Content\r\n\r\n", "none", b""),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_t1_request_split_at_every_byte(relay, kind):
    """The same connections carry it all: a byte too many or too few would show in the next request."""
    data, framing, body = REQUESTS[kind]
    client, server = await relay.connect(), None
    for cut in range(1, len(data)):
        await client.send(data[:cut], data[cut:])
        server = server or await relay.accept()
        request = await server.request()
        assert (request.framing, request.body) == (framing, body), cut
        await server.send(ok(b"%d" % cut))
        assert (await client.message()).body == b"%d" % cut
    assert await relay.unasked()


@pytest.mark.parametrize("kind", ANSWERS)
async def test_t1_answer_split_at_every_byte(relay, kind):
    data, framing, body = ANSWERS[kind]
    client, server = await relay.connect(), None
    for cut in range(1, len(data)):
        await client.send(get())
        server = server or await relay.accept()
        await server.request()
        await server.send(data[:cut], data[cut:])
        answer = await client.message()
        assert (answer.framing, answer.body) == (framing, body), cut
    assert await relay.unasked()


async def test_t1_byte_by_byte(relay):
    data, _, body = REQUESTS["chunked"]
    client = await relay.connect()
    await client.send(*(data[at : at + 1] for at in range(len(data))))
    server = await relay.accept()
    assert (await server.request()).body == body
    answer, _, body = ANSWERS["chunked"]
    await server.send(*(answer[at : at + 1] for at in range(len(answer))))
    assert (await client.message()).body == body


async def test_t1_close_delimited_answer_split_at_every_byte(relay):
    """The end of the upstream's connection ends the body; the client gets it chunked, and its connection stays."""
    data = b"HTTP/1.1 200 OK\r\n\r\nhello"
    client = await relay.connect()
    for cut in range(1, len(data)):
        await client.send(get())
        server = await relay.accept()
        await server.request()
        await server.send(data[:cut], data[cut:])
        server.close()
        answer = await client.message()
        assert (answer.framing, answer.body) == ("chunked", b"hello"), cut


def _pieces(size: int, seed: int) -> list[bytes]:
    """Bytes of every value in pieces of very different sizes."""
    choice = random.Random(seed)
    pieces, left = [], size
    while left:
        length = min(left, choice.choice((1, 2, 100, 4095, 65536, 300_000)))
        start = choice.randrange(256)
        pieces.append((EVERY_BYTE[start:] + EVERY_BYTE * (length // 256 + 1))[:length])
        left -= length
    return pieces


async def _send_in_chunks(peer: Peer, pieces: list[bytes]) -> None:
    for piece in pieces:
        await peer.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    await peer.send(b"0\r\n\r\n")


async def _send_all(peer: Peer, pieces: list[bytes]) -> None:
    for piece in pieces:
        await peer.send(piece)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("framing", ["sized", "chunked"])
async def test_t1_big_request(relay, framing):
    """20 MB pass in any pieces; no limit of a megabyte, no change of framing."""
    size = 20_000_000
    pieces = _pieces(size, seed=1)
    client = await relay.connect()
    if framing == "sized":
        await client.send(get(b"/mcp", b"Content-Length: %d" % size, method=b"POST"))
        sending = asyncio.ensure_future(_send_all(client, pieces))
    else:
        await client.send(get(b"/mcp", b"Transfer-Encoding: chunked", method=b"POST"))
        sending = asyncio.ensure_future(_send_in_chunks(client, pieces))
    server = await relay.accept()
    request = await server.request()
    await sending
    assert request.framing == framing
    assert _digest(request.body) == _digest(b"".join(pieces))
    await server.send(ok(b"done"))
    assert (await client.message()).body == b"done"


@pytest.mark.parametrize("framing", ["sized", "chunked", "close"])
async def test_t1_big_answer(relay, framing):
    size = 20_000_000
    pieces = _pieces(size, seed=2)
    client, server, _ = await relay.asked(get())
    if framing == "chunked":
        await server.send(CHUNKED_OK)
        sending = asyncio.ensure_future(_send_in_chunks(server, pieces))
    else:
        length = b"Content-Length: %d\r\n" % size if framing == "sized" else b""
        await server.send(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")
        sending = asyncio.ensure_future(_send_all(server, pieces))
    sending.add_done_callback(lambda _: server.close() if framing == "close" else None)
    answer = await client.message()
    await sending
    assert answer.framing == ("sized" if framing == "sized" else "chunked")
    assert _digest(answer.body) == _digest(b"".join(pieces))


@pytest.mark.parametrize("seed", range(4))
async def test_t1_chunk_borders_anywhere(relay, seed):
    """Chunks in any sizes, cut anywhere on the wire, with leading zeros and extensions, both ways at once."""
    choice = random.Random(seed)

    def encoded(pieces: list[bytes]) -> list[bytes]:
        lines = (b"000%X;name=value\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        data = b"".join(lines) + b"00\r\nTrailer-Field: x\r\n\r\n"
        cuts = sorted(choice.sample(range(1, len(data)), 40))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    pieces = [bytes([choice.randrange(256)]) * choice.choice((1, 15, 16, 17, 255, 256, 5000)) for _ in range(30)]
    client = await relay.connect()
    await client.send(get(b"/", b"Transfer-Encoding: chunked", method=b"POST"), *encoded(pieces))
    server = await relay.accept()
    assert (await server.request()).body == b"".join(pieces)
    await server.send(CHUNKED_OK, *encoded(pieces))
    answer = await client.message()
    assert answer.body == b"".join(pieces)
    assert answer.get(b"trailer-field") is None


async def test_t1_coded_bodies_are_not_touched(relay):
    """Whatever a content coding says, right or wrong, the bytes and their length stay."""
    junk = b"\x1f\x8b\x08 no gzip at all \xff\xfe"
    client, server, request = await relay.asked(post(junk, b"Content-Encoding: gzip"))
    assert request.body == junk
    assert request.get(b"content-encoding") == b"gzip"
    await server.send(ok(junk, b"Content-Encoding: gzip", b"Content-Type: application/json"))
    answer = await client.message()
    assert (answer.body, answer.framing, answer.get(b"content-encoding")) == (junk, "sized", b"gzip")


async def test_t1_answer_before_the_request_is_complete(relay):
    """Bodies flow both ways at the same time, piece by piece."""
    client = await relay.connect()
    await client.send(get(b"/", b"Transfer-Encoding: chunked", method=b"POST"))
    server = await relay.accept()
    await server.head()
    await server.send(CHUNKED_OK)
    await client.head()
    for number in range(20):
        piece = b"%d" % number
        await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        assert await server.chunk() == piece
        await server.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        assert await client.chunk() == piece
    await client.send(b"0\r\n\r\n")
    assert await server.chunk() == b""
    await server.send(b"0\r\n\r\n")
    assert await client.chunk() == b""
    await settle()
    await client.send(get(b"/next"))
    assert (await server.request()).target == b"/next"
    await server.send(ok())
    assert (await client.message()).status == 200
