"""N1: a lost session, told badly, in every shape and framing."""

from __future__ import annotations

import asyncio
import functools
import gzip
import zlib

import pytest

from relay.wire import get
from resume.story import JSON, LAST_CHUNK, SESSION, STREAM, Story, began, notes, part, reply

TEXT, HTML = b"Content-Type: text/plain", b"Content-Type: text/html"
compress = functools.partial(gzip.compress, mtime=0)  # the same bytes in every process
LOST = b'{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"},"id":"server-error"}'
UNKNOWN_METHOD = b'{"jsonrpc":"2.0","id":8,"error":{"code":-32601,"message":"Method not found"}}'


def framed(status: int, body: bytes, field: bytes, framing: str) -> bytes:
    if framing == "sized":
        return reply(status, body, field)
    head = b"HTTP/1.1 %d Whatever\r\n%b\r\nConnection: close\r\n" % (status, field)
    if framing == "close":
        return head + b"\r\n" + body
    pieces = b"".join(part(body[at : at + 7]) for at in range(0, len(body), 7))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + LAST_CHUNK


REQUESTS = {
    "call": lambda story: story.call(8),
    "resume": lambda story: story.again(3),
    "stream": lambda story: story.again(None),
    "delete": lambda story: get(b"/mcp", SESSION, method=b"DELETE"),
}


@pytest.mark.parametrize("framing", ["sized", "chunked", "close"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize(
    ("status", "body", "field"),
    [
        (404, LOST, JSON),
        (404, b"Session expired", TEXT),
        (400, b"Bad Request: No valid session ID provided", TEXT),
        (400, b'{"jsonrpc":"2.0","error":{"code":-32000,"message":"Server not initialized"},"id":null}', JSON),
    ],
)
async def test_n1_told_anew(proxy, status, body, field, request_, framing):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.ask(request_(story))
        await server.send(framed(status, body, field, framing))
        server.close()
        assert (await client.error())["data"] == {"reason": "session_lost"}
        assert client.status == 404
        await story.fenced("session_lost")


CODED = {
    b"gzip": compress(LOST),
    b"x-gzip": compress(LOST[:20]) + compress(LOST[20:]),
    b"deflate": zlib.compress(LOST),
}


@pytest.mark.parametrize("coding", CODED)
async def test_n1_t8_in_a_content_coding(proxy, coding):
    """400 and coded: only what is decoded tells."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(story.call(8))
        await server.send(reply(400, CODED[coding], JSON, b"Content-Encoding: " + coding))
        assert (await client.error())["data"] == {"reason": "session_lost"}


async def test_n1_t8_in_an_unknown_coding(proxy):
    """400 and unreadable: it passes as it came."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(story.call(8))
        await server.send(reply(400, b"\x0b\x05\x80session", JSON, b"Content-Encoding: br"))
        await client.rest()
        assert client.status in (400, 404)


PASSES = {
    "unknown method": ("call", 404, UNKNOWN_METHOD, JSON),
    "unknown method on a delete": ("delete", 404, UNKNOWN_METHOD, JSON),
    "wrong parameter": (
        "call",
        400,
        b'{"jsonrpc":"2.0","id":8,"error":{"code":-32602,"message":"invalid session"}}',
        JSON,
    ),
    "another 400": ("call", 400, b"Bad Request: Unsupported protocol version", TEXT),
    "no stream here": ("stream", 404, b"<h1>Not Found</h1>", HTML),
    "no stream to resume here": ("resume", 404, b"", TEXT),
    "no such event": ("resume", 404, b'{"jsonrpc":"2.0","error":{"code":-32001,"message":"Event not found"}}', JSON),
    "no such event of the session": ("resume", 400, b"Unknown event id in session", TEXT),
    "another 400 on a resume": ("resume", 400, b"Invalid Last-Event-ID", TEXT),
    "server trouble": ("call", 503, b"no valid session", TEXT),
    "unauthorized": ("resume", 401, b"session expired", TEXT),
}


@pytest.mark.parametrize("framing", ["sized", "chunked"])
@pytest.mark.parametrize(("request_", "status", "body", "field"), PASSES.values(), ids=PASSES)
async def test_n1_other_answers_pass(proxy, request_, status, body, field, framing):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.ask(REQUESTS[request_](story))
        await server.send(framed(status, body, field, framing))
        assert (await client.rest(), client.status) == (body, status)
        assert tuple(field.split(b": ")) in client.fields
        await story.alive()


async def test_n1_a_head_says_nothing(proxy):
    """Its answer has no body: a bare 404 there is no lost session."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(get(b"/mcp", SESSION, method=b"HEAD"))
        await server.send(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 9\r\n\r\n")
        assert (await client.begin()).status == 404
        await story.alive()


@pytest.mark.parametrize("size", [60_000, 300_000])
async def test_n1_a_long_page(proxy, size):
    """A 404 of any form and length to a call."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(story.call(8))
        await server.send(reply(404, b"<p>" + b"x" * size, HTML))
        assert (await client.error())["data"] == {"reason": "session_lost"}


async def test_n1_an_endless_400_passes(proxy):
    """It is not kept to be read: what is no short answer is no answer of this kind."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(story.call(8))
        await server.send(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        block = b"no valid session " * 4000
        for _ in range(30):
            await server.send(part(block))
        await client.until(block)
        assert client.status == 400
        await server.send(LAST_CHUNK)
        assert len(await client.rest()) == 30 * len(block)
        await story.alive()


async def test_n1_t4_a_loss_that_broke_off(proxy):
    """Half a 404 is passed as half a 404."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(story.call(8))
        await server.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 100\r\n\r\nSession not")
        server.close()
        await client.rest()
        assert (client.status, bytes(client.data), client.end) == (404, b"Session not", "aborted")
        await story.alive()


async def test_n1_a_resume_that_was_rewound_is_asked_again_first(proxy):
    """The loss is told to the second ask; it is the answer, once."""
    async with proxy(resume={"accept": ["connection", "epoch", "overlap"]}) as relay:
        story = await began(relay)
        await story.pause()
        client, server, _ = await story.resumed(3, reply(404, LOST, JSON))
        server, request = await story.asked()
        assert request.get(b"Last-Event-ID") == b"3"
        await server.send(reply(404, LOST, JSON))
        assert (await client.error())["data"] == {"reason": "session_lost"}


async def test_n1_on_demand_it_passes_and_still_voids_an_overlap(proxy):
    policy = {"resume": {"accept": ["overlap"]}, "refusal": {"normalize_loss": False}}
    async with proxy(**policy) as relay:
        story = await began(relay)
        await story.pause()
        lost = await story.other(reply(404, LOST, JSON))
        assert (await lost.rest(), lost.status) == (LOST, 404)
        client, server, _ = await story.resumed(3, STREAM + part(notes(3, 4)))
        assert (await client.error())["data"] == {"reason": "boundary"}


async def test_n1_a_held_stream_ends_with_its_session(proxy):
    async with proxy() as relay:
        story: Story = await began(relay, epoch=1)
        await story.leave()
        lost = await story.other(reply(404, LOST, JSON))
        await lost.rest()
        assert await story.server.gone()
        client = await story.resume(3)
        assert (await client.error())["data"] == {"reason": "session_lost"}


@pytest.mark.parametrize("status", [400, 404])
async def test_n1_t6_a_body_that_does_not_end_passes_as_it_is(proxy, status, monkeypatch):
    """Who tells a loss tells it at once."""
    monkeypatch.setattr("epochgate.relay.passage.LOSS_TIME", 0.05)
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(story.call(8))
        start = b"HTTP/1.1 %d Whatever\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" % status
        await server.send(start + part(b"Session not"))
        await client.until(b"Session not")
        await server.send(part(b" found") + LAST_CHUNK)
        assert (await client.rest(), client.status, client.end) == (b"Session not found", status, "clean")
        await story.alive()


async def test_n1_a_client_that_leaves_before_the_loss_is_told(proxy, monkeypatch):
    """Nothing is written to it when the time is over."""
    monkeypatch.setattr("epochgate.relay.passage.LOSS_TIME", 0.05)
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(story.call(8))
        await server.send(b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n" + part(b"Ses"))
        client.peer.reset()
        assert await server.gone()
        await asyncio.sleep(0.1)
        await story.alive()
