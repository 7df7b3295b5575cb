"""R6, R9, R10: resumes that bring nothing, late, or no stream at all."""

from __future__ import annotations

import asyncio
import time

import pytest

from epochgate.relay import forward
from relay.wire import chunked
from resume.story import (
    JSON,
    LAST_CHUNK,
    OVERLAP,
    STREAM,
    Answer,
    Story,
    began,
    notes,
    part,
    priming,
    reply,
    response,
    stream,
)

EMPTY = {"nothing": b"", "comments": b": a\n\n: b\n\n", "priming": priming("p"), "retry": b"retry: 5\n\n"}


@pytest.mark.parametrize("end", ["clean", "aborted"])
@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
async def test_r9_asked_again_while_a_response_is_owed(proxy, empty, end):
    """Three more times, then refused; the client has seen nothing of it."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client = await story.resume(3)
        for _ in range(4):
            server, request = await story.asked()
            assert request.get(b"Last-Event-ID") == b"3"
            await server.send(STREAM + (part(empty) if empty else b""), LAST_CHUNK if end == "clean" else b"5\r\nid")
            server.close()
        assert (await client.error())["data"] == {"reason": "no_event"}
        assert story.verdicts() == ["no_event"]
        await story.fenced("no_event")


@pytest.mark.parametrize("framing", ["sized", "chunked"])
@pytest.mark.parametrize("size", [100, 300])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("why", ["R5", "R9"])
async def test_r5_r9_t5_what_is_sent_again_is_a_whole_request(proxy, monkeypatch, framing, size, early, why):
    """With the body, however odd, or, where that is too long to be kept, without one: the next request is not taken
    for a part of it. `early`: the client has not sent all of it when the first answer comes."""
    monkeypatch.setattr(forward, "FREE", 200)
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        body = b"x" * size
        field = b"Content-Length: %d" % size if framing == "sized" else b"Transfer-Encoding: chunked"
        sent = body if framing == "sized" else chunked(body)
        client = await story.send(story.again(3, field) + sent[: -10 if early else None])
        server = await relay.accept()
        await server.head()
        if early:
            await server.exactly(size - 10)
        refused = reply(503, b"busy", JSON) if why == "R5" else stream()
        await server.send(refused)
        again = await relay.accept()
        if early and size == 100:
            await client.peer.send(sent[-10:])
        request = await again.request()
        assert request.get(b"Last-Event-ID") == (b"3" if why == "R5" else b"2")
        assert (request.body, request.framing) == ((body, framing) if size == 100 else (b"", "none"))
        await again.send(STREAM.replace(b"Connection: close\r\n", b"") + chunked(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        other = await story.send(story.call(6))
        request = await again.request()
        assert request.body == story.call(6).partition(b"\r\n\r\n")[2]
        other.peer.reset()


@pytest.mark.parametrize("asks", [2, 3, 4])
async def test_r9_an_ask_that_is_answered(proxy, asks):
    """The former reader is gone at last: only that answer is seen, and its blocks once."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client = await story.resume(3)
        for _ in range(asks - 1):
            server, _ = await story.asked()
            await server.send(stream(priming("p")))
        server, _ = await story.asked()
        await server.send(stream(priming("p") + notes(4, epoch=1) + response(5, 1)))
        assert await client.rest() == priming("p") + notes(4, epoch=1) + response(5, 1)
        assert (client.end, story.verdicts()) == ("clean", ["epoch"])


async def test_r9_an_ask_that_is_answered_by_an_error(proxy):
    """409 while the former reader is registered: it passes, and the client asks again itself."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, stream())
        server, _ = await story.asked()
        await server.send(reply(409, b"Conflict"))
        assert (await client.rest(), client.status) == (b"Conflict", 409)
        await story.alive()


async def test_r9_an_ask_that_breaks(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, stream())
        server, _ = await story.asked()
        server.reset()
        await client.rest()
        assert client.status == 502
        await story.alive()


async def test_r9_every_ask_is_rewound(proxy):
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        await story.pause()
        client, server, request = await story.resumed(3, stream())
        assert request.get(b"Last-Event-ID") == b"2"
        server, request = await story.asked()
        assert request.get(b"Last-Event-ID") == b"2"
        await server.send(stream(notes(3, 4)))
        assert await client.rest() == notes(4)


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
async def test_r9_three_in_a_row_where_nothing_is_owed(proxy, empty):
    """As they came; a message in between begins the count anew; the fourth in a row is refused."""
    async with proxy() as relay:
        story = await began(relay, epoch=1, calls=())
        await story.cut()
        for body in (empty, empty, notes(4, epoch=1), empty, empty, empty):
            client, server, _ = await story.resumed(3, stream(body))
            assert (await client.rest(), client.status, client.end) == (body, 200, "clean")
        client, server, _ = await story.resumed(3, stream(empty))
        assert (await client.error())["data"] == {"reason": "no_event"}
        assert story.verdicts() == ["epoch", "no_event"]


async def test_r9_an_empty_answer_that_broke_off_is_aborted(proxy):
    """T4: where nothing is owed it passes, and not as a clean end."""
    async with proxy() as relay:
        story = await began(relay, epoch=1, calls=())
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(priming("p")))
        server.reset()
        assert (await client.rest(), client.status, client.end) == (priming("p"), 200, "aborted")


async def test_r9_a_call_that_was_answered_owes_nothing(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1, events=notes(1, epoch=1) + response(5, 1))
        await story.cut()
        client, server, _ = await story.resumed("r5", stream())
        assert (await client.rest(), client.status) == (b"", 200)


async def test_r9_let_through_on_demand(proxy):
    """`unproven: resume`: after its asks the empty answer passes, with what it held."""
    async with proxy(resume={"unproven": "resume"}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client = await story.resume(3)
        for _ in range(4):
            server, _ = await story.asked()
            await server.send(stream(priming("p")))
        assert (await client.rest(), client.status) == (priming("p"), 200)
        assert story.verdicts() == ["no_event"]
        await story.alive()


# -- R10


async def test_r10_released_in_silence_with_what_decides_nothing(proxy):
    async with proxy(resume={"first_event_timeout": 0.2}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        quiet = b": a\n\n" + priming("p") + b"retry: 1\n\n"
        client, server, _ = await story.resumed(3, STREAM + part(quiet + notes(4, epoch=1)[:-1]))
        started = time.monotonic()
        await client.until(quiet)
        assert 0.1 < time.monotonic() - started < 3
        assert bytes(client.data) == quiet  # nothing of the event that is not complete
        await server.send(part(b"\n: b\n\n"))
        await client.until(b": b\n\n")
        assert bytes(client.data) == quiet + notes(4, epoch=1) + b": b\n\n"
        assert story.verdicts() == ["epoch"]


async def test_r10_a_keep_alive_passes_at_once(proxy):
    """Once the head is out, comments do not wait for an event."""
    async with proxy(resume={"first_event_timeout": 0.05}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await client.begin()
        for n in range(3):
            await server.send(part(b": %d\n\n" % n))
            await client.until(b": %d\n\n" % n)
        assert story.verdicts() == []


@pytest.mark.parametrize("owes", [True, False])
async def test_r10_r8_unproven_after_the_release(proxy, owes):
    """Told where a response is owed, else broken off; nothing of the event comes through (F5)."""
    async with proxy(resume={"first_event_timeout": 0.05}) as relay:
        story = await began(relay, calls=(5,) if owes else ())
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await client.begin()
        await server.send(part(notes(4)))
        assert await client.told() == ([(5, "no_epoch")] if owes else [])
        assert client.end == ("clean" if owes else "aborted")
        assert b'"n":4' not in client.data
        await story.fenced("no_epoch")


@pytest.mark.parametrize("end", ["clean", "aborted"])
async def test_r10_the_end_of_a_silent_stream_is_its_own(proxy, end):
    """The head is out: the end passes as it is, and says nothing about the session."""
    async with proxy(resume={"first_event_timeout": 0.05}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await client.begin()
        if end == "clean":
            await server.send(LAST_CHUNK)
        else:
            server.reset()
        assert (await client.rest(), client.end) == (b"", end)
        await story.alive()


async def test_r10_a_swallowed_message_is_a_verdict(proxy):
    """The cursor's own event decides: the head goes out at once, though nothing new has come."""
    async with proxy(resume=OVERLAP | {"first_event_timeout": 30}) as relay:
        story = await began(relay)
        await story.pause()
        client, server, _ = await story.resumed(3, STREAM + part(notes(3)))
        await client.begin()
        assert (client.status, story.verdicts()) == (200, ["overlap"])
        await server.send(part(notes(4)))
        await client.until(notes(4))
        assert bytes(client.data) == notes(4)


# -- R6

OTHERS = {
    "json": (200, b'{"odd":1}', JSON),
    "page": (200, b"<p>log in</p>", b"Content-Type: text/html"),
    "accepted": (202, b"", b"X: y"),
    "stream of another status": (503, notes(4, epoch=2), b"Content-Type: text/event-stream"),
    "challenge": (401, b"", b'WWW-Authenticate: Bearer error="invalid_token"'),
    "no stream here": (405, b"", b"Allow: POST"),
    "conflict": (409, b"one stream", b"Content-Type: text/plain"),
    "busy": (503, b"session trouble", b"Retry-After: 2"),
    "moved": (307, b"", b"Location: /elsewhere"),
}


@pytest.mark.parametrize("answer", OTHERS.values(), ids=OTHERS)
async def test_r6_no_stream_no_verdict(proxy, answer):
    status, body, field = answer
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, reply(status, body, field))
        assert (await client.rest(), client.status) == (body, status)
        assert tuple(field.split(b": ", 1)) in client.fields
        assert story.verdicts() == []
        await story.alive()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))


async def test_r6_interim_answers_pass(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        early = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
        client, server, _ = await story.resumed(3, early)
        assert await client.peer.until(b"\r\n\r\n") == early
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_r7_framed_by_the_end_of_the_connection(proxy, version):
    """An upstream that knows no chunks: judged all the same; its end is a clean one."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3)
        await server.send(b"HTTP/%b 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" % version + notes(4, epoch=1))
        server.close()
        assert (await client.rest(), client.end) == (notes(4, epoch=1), "clean")


async def test_r7_a_client_that_knows_no_chunks(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        data = story.again(3).replace(b"HTTP/1.1", b"HTTP/1.0")
        client, server, _ = await story.ask(data)
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.peer.head()
        await client.peer.until(notes(4, epoch=1))
        await server.send(part(notes(5, epoch=2)))
        rest = await client.peer.rest()
        assert b'"id":5,"error"' in rest
        assert b'"n":5' not in rest


async def test_t6_a_slow_reader_of_a_resume_stops_the_upstream(proxy):
    """32 MB would come: a few stay in buffers, the rest at the upstream."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        slow = Answer(await relay.connect(receive_buffer=4096))
        await slow.peer.send(story.again(3))
        server, _ = await story.asked()
        await server.send(STREAM + part(notes(4, epoch=1)))
        await slow.until(notes(4, epoch=1))
        block = part(b": " + b"x" * 65_000 + b"\n\n")
        with pytest.raises(TimeoutError):
            for _ in range(500):
                await _send_soon(server, block)
        slow.peer.reset()
        assert await server.gone()  # what was on its way is more than a hold takes (H2)


async def test_t6_what_waits_for_the_head_is_bounded(proxy):
    """A megabyte of comments while nothing is decided, and the upstream waits, until the head goes out (R10)."""
    async with proxy(resume={"first_event_timeout": 1.5}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        block = b": " + b"x" * 65_000 + b"\n\n"
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 500:
                await _send_soon(server, part(block))
                sent += 1
        assert not client.start
        assert len(story.flow.pending) < 40
        await client.begin()  # what could not be sent whole is still to be completed
        server.reset()
        assert len(await client.rest()) > 1024 * 1024
        assert client.end == "aborted"


async def test_t6_the_upstream_goes_on_when_the_head_is_out(proxy):
    async with proxy(resume={"first_event_timeout": 0.3}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        block = b": " + b"x" * 65_000 + b"\n\n"
        sending = asyncio.ensure_future(server.send(part(block) * 200 + part(notes(4, epoch=1))))
        await client.until(notes(4, epoch=1))
        await sending
        assert bytes(client.data) == block * 200 + notes(4, epoch=1)
        assert story.verdicts() == ["epoch"]


async def _send_soon(server, data: bytes) -> None:

    async with asyncio.timeout(0.5):
        await asyncio.get_running_loop().sock_sendall(server.sock, data)


async def test_r1_repeated_fields(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        for data in (
            story.again(3, b"Last-Event-ID: 2"),
            story.again(3, b"mcp-session-id: S1"),
            story.again(None, b"MCP-SESSION-ID: S1"),
            story.call(7).replace(b"\r\n\r\n", b"\r\nMcp-Session-Id: S2\r\n\r\n"),
        ):
            client = await story.send(data)
            await client.rest()
            assert client.status == 400
        assert await relay.unasked()
        await story.alive()


async def test_s3_an_empty_cursor_is_none(proxy):
    async with proxy() as relay:
        story: Story = await began(relay, epoch=1)
        client, server, request = await story.ask(story.again(""))
        assert request.get(b"Last-Event-ID") is None  # some servers look at its presence
        await server.send(STREAM + part(notes(11, epoch=1)))
        await client.until(notes(11, epoch=1))
        assert story.verdicts() == []
