"""`limits.copies`: what is kept of requests and events that are not whole yet has a bound, of all together."""

from __future__ import annotations

import json
import random
import time

import pytest

from relay.wire import get, post
from resume.story import (
    JSON,
    LAST_CHUNK,
    SESSION,
    STREAM,
    Answer,
    Story,
    began,
    coded,
    event,
    gzipped,
    note,
    notes,
    part,
    reply,
    response,
    result,
    until,
)

ROOM = 300_000  # bytes
LONG = 200_000
PADDING = b"x" * LONG


def long_event(number: int, epoch: object) -> bytes:
    message = json.loads(note(number, epoch))
    message["params"]["data"] = PADDING.decode()
    return event(number, json.dumps(message).encode())


def fill(relay) -> None:
    """Others take all of it."""
    relay.context.copies.most = ROOM
    relay.context.copies.used = ROOM


def empty(relay) -> None:
    relay.context.copies.used -= ROOM


@pytest.mark.parametrize("crowded", [False, True])
async def test_a_long_event_on_a_live_stream_passes_in_any_case(proxy, crowded):
    """T1, L3: it is digested, and where there is no room not read: it may have been any response that is owed."""
    async with proxy(resume={"hold": {"time": "0s"}}) as relay:
        story = await began(relay, epoch=1)
        if crowded:
            fill(relay)
        long = long_event(4, 1)
        await story.server.send(part(long[:150_000]))
        await story.answer.until(long[:150_000][-1000:])
        kept = relay.context.copies.used - (ROOM if crowded else 0)
        assert (kept == 0) is crowded
        assert kept < 400_000
        await story.server.send(part(long[150_000:]), part(notes(5, epoch=1)))
        await story.answer.until(notes(5, epoch=1))
        assert bytes(story.answer.data) == notes(1, 2, 3, epoch=1) + long + notes(5, epoch=1)
        (stream,) = story.session
        assert [found.id for found in stream.events] == [b"1", b"2", b"3", b"4", b"5"]
        assert stream.owes_known is not crowded
        if crowded:
            empty(relay)
        assert relay.context.copies.used == 0
        await story.server.send(part(response(5, epoch=1)), LAST_CHUNK)
        await story.answer.rest()


@pytest.mark.parametrize("coding", [b"", b"gzip"])
async def test_a_long_event_on_a_resumed_stream_is_put_off_where_there_is_no_room(proxy, coding):
    """R10: what is not checked is not released. It may be strangers who take the room: nothing is fenced."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        fill(relay)
        long = long_event(4, 1)
        answer = STREAM + part(long[:150_000])
        if coding:
            answer = coded(coding) + part(gzipped(random.Random(1).randbytes(150_000)))
        client, server, _ = await story.resumed(3, answer)
        assert await server.gone()
        assert (await client.error())["code"] == -32000
        assert (client.status, client.get(b"Retry-After")) == (503, b"1")
        assert story.verdicts() == []
        empty(relay)
        await story.alive()
        client, server, _ = await story.resumed(3, STREAM + part(long))
        await client.until(long)
        assert story.verdicts() == ["epoch"]


async def test_a_long_event_breaks_a_resumed_stream_off_where_there_is_no_room(proxy):
    """Its head is out already; what comes next can be resumed."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        fill(relay)
        await server.send(part(long_event(5, 1)[:150_000]))
        assert await server.gone()
        assert (await client.rest(), client.end) == (notes(4, epoch=1), "aborted")
        empty(relay)
        await story.alive()


async def test_a_long_event_on_a_held_stream_ends_the_hold_where_there_is_no_room(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        client.peer.reset()
        await until(lambda: story.held == 1)
        fill(relay)
        await server.send(part(long_event(5, 1)[:150_000]))
        assert await server.gone()
        empty(relay)
        await story.alive()


async def test_a_long_event_on_a_resumed_stream_passes_where_there_is_room(proxy):
    async with proxy() as relay:
        relay.context.copies.most = 10 * LONG
        story = await began(relay, epoch=1)
        await story.cut()
        long = long_event(4, 1)
        client, server, _ = await story.resumed(3, STREAM + part(long[:150_000]))
        await until(lambda: relay.context.copies.used)
        await server.send(part(long[150_000:]))
        await client.until(long)
        assert relay.context.copies.used == 0
        await server.send(part(response(5, epoch=1)), LAST_CHUNK)
        await client.rest()


async def test_who_leaves_in_the_middle_of_an_event_takes_nothing_along(proxy):
    async with proxy(resume={"hold": {"time": "0s"}}) as relay:
        story = await began(relay, epoch=1)
        await story.server.send(part(long_event(4, 1)[:150_000]))
        await until(lambda: relay.context.copies.used)
        story.answer.peer.reset()
        assert await story.server.gone()
        assert relay.context.copies.used == 0


async def test_coded_bytes_that_find_no_room(proxy):
    """T8: they cannot be read. `unproven: resume` lets them through all the same."""
    async with proxy(resume={"unproven": "resume"}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        fill(relay)
        data = gzipped(json.dumps(list(range(100_000))).encode())
        assert len(data) > 2 * 65536
        client, server, _ = await story.resumed(3, coded(b"gzip") + part(data[:100_000]))
        await server.send(part(data[100_000:]), LAST_CHUNK)
        assert await client.rest() == data
        assert story.verdicts() == ["unreadable"]
        empty(relay)


async def test_an_event_that_is_too_long_is_refused_before_it_ends(proxy, monkeypatch):
    """One that never ends would be kept for ever."""
    monkeypatch.setattr("epochgate.relay.flow.JUDGED_BLOCK", 100_000)
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(long_event(4, 1)[:150_000]))
        assert (await client.error())["data"] == {"reason": "unreadable"}
        assert await server.gone()


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("stale", [False, True])
async def test_a_long_request_passes_in_any_case(proxy, crowded, stale):
    """T1: where there is no room it is not read, and no session that it may open is recorded."""
    async with proxy() as relay:
        if crowded:
            fill(relay)
        story = await began(relay, epoch=1)
        body = json.dumps(
            {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"x": PADDING.decode()}}
        ).encode()
        request = post(body, *([b"Mcp-Session-Id: old"] if stale else []))
        client = await relay.connect()
        await client.send(request[:150_000])
        if not stale or crowded:
            server = await relay.accept()
            await server.until(b"\r\n\r\n")
            await until(lambda: relay.context.copies.used - ROOM * crowded == 0 or not crowded)
            await client.send(request[150_000:])
            assert await server.exactly(len(body)) == body
        else:
            await client.send(request[150_000:])
            server = await relay.accept()
            assert (await server.request()).body == body
        granted = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
        answer = json.dumps({"jsonrpc": "2.0", "id": 0, "result": granted}).encode()
        await server.send(reply(200, answer, JSON, b"Mcp-Session-Id: S2"))
        assert await Answer(client).rest() == answer
        assert (relay.context.ledger.get(b"S2", time.time()) is None) is crowded
        if crowded:
            empty(relay)
        assert relay.context.copies.used == 0
        story.server.close()


async def test_what_a_call_asked_for_is_not_kept_while_its_stream_flows(proxy):
    async with proxy() as relay:
        story = await began(relay)
        body = json.dumps(
            {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {"x": PADDING.decode()}}
        ).encode()
        client, server, request = await story.ask(post(body, SESSION))
        assert request.body == body
        await server.send(STREAM + part(notes(11)))
        await client.until(notes(11))
        assert relay.context.copies.used == 0
        assert [list(stream.owes) for stream in story.session] == [[5], [9]]
        await server.send(part(response(9)), LAST_CHUNK)
        await client.rest()
        story.server.close()


@pytest.mark.parametrize("crowded", [False, True])
async def test_a_long_answer_passes_in_any_case(proxy, crowded):
    """R12: a token in it counts where it could be read."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        if crowded:
            fill(relay)
        message = json.loads(result(99, 2))
        message["result"]["text"] = PADDING.decode()
        body = json.dumps(message).encode()
        client, server, _ = await story.ask(story.call(99))
        answer = reply(200, body, JSON)
        await server.send(answer[:150_000])
        await client.until(PADDING[:1000])
        await server.send(answer[150_000:])
        assert await client.rest() == body
        assert (story.session.fence is None) is crowded
        if crowded:
            empty(relay)
        story.server.close()


async def test_an_answer_that_breaks_off_takes_nothing_along(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(story.call(99))
        await server.send(b"HTTP/1.1 200 OK\r\n" + JSON + b"\r\nContent-Length: 1000000\r\n\r\n" + PADDING)
        await client.until(PADDING[-1000:])
        await until(lambda: relay.context.copies.used == LONG)
        server.reset()
        await client.rest()
        assert client.end == "aborted"
        assert relay.context.copies.used == 0
        another, server, _ = await story.ask(get(b"/mcp", SESSION))
        del another
        server.close()
        story.server.close()


@pytest.mark.parametrize("end", ["whole", "client gone", "broken off", "too late"])
@pytest.mark.parametrize("crowded", [False, True])
async def test_a_404_that_may_tell_of_a_lost_session(proxy, crowded, end, monkeypatch):
    """N1: it is read where there is room, and passes where there is none."""
    monkeypatch.setattr("epochgate.relay.passage.LOSS_TIME", 0.3 if end == "too late" else 30)
    body = b"Session not found" + PADDING
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        relay.context.copies.most = ROOM
        if crowded:
            fill(relay)
        client, server, _ = await story.ask(story.call(6))
        answer = reply(404, body, b"Content-Type: text/plain")
        await server.send(answer[:-50_000])
        if crowded:
            await client.until(body[:-50_000])
        else:
            await until(lambda: relay.context.copies.used > LONG - 60_000)
        if end == "client gone":
            client.peer.reset()
            assert await server.gone()
        elif end == "broken off":
            server.reset()
            await client.rest()
        elif end == "too late":
            await client.until(body[:-50_000])
        else:
            await server.send(answer[-50_000:])
            assert (await client.rest() == body) is crowded
            assert (story.session.fence == "session_lost") is not crowded
        if crowded:
            empty(relay)
        await until(lambda: relay.context.copies.used == 0)


@pytest.mark.parametrize("end", ["clean", "client gone"])
@pytest.mark.parametrize("crowded", [False, True])
async def test_a_long_event_before_the_result_of_initialize(proxy, crowded, end):
    """L1: where there is no room for what comes before the result, it passes and no session is opened."""
    async with proxy() as relay:
        relay.context.copies.most = 10 * LONG
        if crowded:
            fill(relay)
        story = Story(relay)
        asking, server, _ = await story.ask(post(b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'))
        granted = event("g", b'{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25"}}')
        head = STREAM[:-2] + SESSION + b"\r\n\r\n"
        long = long_event(1, 1)
        await server.send(head, part(long[:150_000]))
        await asking.until(long[:150_000])
        assert relay.context.copies.used > 140_000 + (ROOM if crowded else 0) or crowded
        await server.send(part(long[150_000:]))
        await asking.until(long)
        assert crowded or relay.context.copies.used > LONG, "it is kept until the result is here"
        if end == "clean":
            await server.send(part(granted), LAST_CHUNK)
            assert await asking.rest() == long + granted
            assert (story.session is None) is crowded
        else:
            asking.peer.reset()
            assert await server.gone()
        if crowded:
            empty(relay)
        await until(lambda: relay.context.copies.used == 0)
