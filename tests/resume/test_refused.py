"""F1 to F6: how a resume is refused, and what becomes of the calls that are pending."""

from __future__ import annotations

import json

import pytest

from relay.wire import get
from resume.story import (
    JSON,
    LAST_CHUNK,
    SESSION,
    STREAM,
    Story,
    began,
    event,
    note,
    notes,
    part,
    reply,
    response,
    result,
    stream,
)

BOTH_LOOPS = True
MINE, OTHER = (b"Authorization: Bearer mine",), (b"Authorization: Bearer other",)
BODY = b'{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found","data":{"reason":"%b"}}}'


async def changed(relay, **options) -> Story:
    """A session that was created anew meanwhile: the next resume brings another epoch."""
    story = await began(relay, epoch=1, **options)
    await story.cut()
    return story


async def refuse(story: Story, cursor: object = 3, **options) -> None:
    """The first refusal, by another epoch."""
    client, server, _ = await story.ask(story.again(cursor, **options))
    await server.send(STREAM + part(notes(4, epoch=2)))
    assert (await client.error())["data"] == {"reason": "epoch_changed"}


async def tell(story: Story, cursor: object = 3, **options) -> tuple[int, list]:
    client = await story.resume(cursor, **options)
    return (await client.begin()).status, await client.told()


async def test_f1_the_404_to_the_byte(proxy):
    async with proxy() as relay:
        story = await changed(relay)
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=2)))
        data = await client.rest()
        assert data == BODY % b"epoch_changed"
        assert client.start == b"HTTP/1.1 404 Not Found"
        assert client.fields == [
            (b"Content-Type", b"application/json"),
            (b"Cache-Control", b"no-store"),
            (b"Content-Length", b"%d" % len(data)),
        ]


async def test_f1_the_connection_stays_usable(proxy):
    """A resume, a call with a body, a chunked one, a HEAD: all on one connection, all refused, then a new session."""
    async with proxy() as relay:
        story = await changed(relay)
        await refuse(story)
        peer = await relay.connect()
        big = json.dumps({"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {"x": "y" * 300_000}}).encode()
        chunks = b"".join(part(big[at : at + 4096]) for at in range(0, len(big), 4096)) + LAST_CHUNK
        requests = [
            get(b"/mcp", SESSION, b"Last-Event-ID: made-up"),
            get(b"/mcp", SESSION, b"Content-Length: %d" % len(big), method=b"POST") + big,
            get(b"/mcp", SESSION, b"Transfer-Encoding: chunked", method=b"POST") + chunks,
        ]
        for data in requests:
            await peer.send(data)
            message = await peer.message()
            assert (message.status, message.body) == (404, BODY % b"epoch_changed")
        await peer.send(get(b"/mcp", SESSION, method=b"HEAD"))
        message = await peer.message(bodiless=True)
        assert (message.status, message.get(b"Content-Length")) == (404, b"%d" % len(BODY % b"epoch_changed"))
        assert await relay.unasked()


async def test_f4_on_retry(proxy):
    """404 first; the client that comes back is told each owed call, once; then 404 for ever."""
    async with proxy() as relay:
        story = await changed(relay, calls=(5, "six"))
        await refuse(story)
        client = await story.resume(2)  # any cursor of that stream
        assert await client.told() == [(5, "epoch_changed"), ("six", "epoch_changed")]
        assert (client.status, client.end) == (200, "clean")
        assert client.get(b"Content-Type") == b"text/event-stream"
        assert b"id: " not in client.data
        assert client.get(b"Mcp-Session-Id") is None
        for _ in range(2):
            assert (await (await story.resume(3)).error())["data"] == {"reason": "epoch_changed"}
        assert await relay.unasked()
        assert story.telemetry.pending_told == {"mcp": 2}


async def test_f4_another_stream_is_counted_apart(proxy):
    async with proxy() as relay:
        story = await changed(relay)
        other, server, _ = await story.ask(story.call(6))
        await server.send(STREAM + part(event("b1", note(61, 1))))
        await other.until(note(61, 1))
        server.reset()
        await other.rest()
        await refuse(story)
        for cursor, owed in ((3, 5), ("b1", 6)):
            if cursor == "b1":
                assert (await (await story.resume(cursor)).error())["data"] == {"reason": "epoch_changed"}
            assert await tell(story, cursor) == (200, [(owed, "epoch_changed")])


@pytest.mark.parametrize("policy", ["at-once", "leave"])
async def test_f4_at_once_and_never(proxy, policy):
    async with proxy(refusal={"pending_calls": policy}) as relay:
        story = await changed(relay)
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=2)))
        if policy == "at-once":
            assert (await client.told(), client.status) == ([(5, "epoch_changed")], 200)
        else:
            assert (await client.error())["data"] == {"reason": "epoch_changed"}
        for _ in range(2):
            assert (await (await story.resume(3)).error())["data"] == {"reason": "epoch_changed"}


async def test_f4_nothing_to_tell_where_nothing_is_owed(proxy):
    async with proxy(refusal={"pending_calls": "at-once"}) as relay:
        story = await changed(relay, calls=())
        await refuse(story)
        for _ in range(2):
            assert (await (await story.resume(3)).error())["data"] == {"reason": "epoch_changed"}


async def spent_on_502(story: Story) -> None:
    client, server, _ = await story.ask(story.again(3))
    server.reset()
    await client.rest()
    assert client.status == 502


async def spent_on_503(story: Story) -> None:
    client, server, _ = await story.resumed(3, reply(503))
    await client.rest()
    assert client.status == 503


async def spent_on_404(story: Story) -> None:
    """No stream here: it passes, and a try is gone."""
    client, server, _ = await story.resumed(3, reply(404, b"no such event", b"Content-Type: text/plain"))
    await client.rest()
    assert client.status == 404


@pytest.mark.parametrize("spend", [spent_on_502, spent_on_503, spent_on_404])
async def test_f4_a_try_that_was_spent(proxy, spend):
    """The server restarts: the first ask is lost on that. The second is refused, and told at once."""
    async with proxy() as relay:
        story = await changed(relay)
        await spend(story)
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=2)))
        assert (await client.told(), client.status) == ([(5, "epoch_changed")], 200)
        assert (await (await story.resume(3)).error())["data"] == {"reason": "epoch_changed"}


async def test_f4_a_try_before_the_connection_stood_again_does_not_count(proxy):
    """Spent, then resumed, then broken again: the client has both its tries."""
    async with proxy() as relay:
        story = await changed(relay)
        await spent_on_502(story)
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        server.reset()
        await client.rest()
        client, server, _ = await story.resumed(4, STREAM + part(notes(5, epoch=2)))
        assert (await client.error())["data"] == {"reason": "epoch_changed"}


async def test_f4_a_stranger_is_never_told(proxy):
    """Neither does his ask count as the first, nor does he get the errors."""
    async with proxy() as relay:
        story = await changed(relay, fields=MINE)
        await refuse(story, fields=OTHER)  # the upstream let him in: he may fence (F3)
        assert (await (await story.resume(3, fields=OTHER)).error())["data"] == {"reason": "epoch_changed"}
        assert (await (await story.resume(3)).error())["data"] == {"reason": "epoch_changed"}
        assert await tell(story, fields=OTHER) == (404, [])
        assert await tell(story) == (200, [(5, "epoch_changed")])


async def test_f4_refused_by_a_fence_that_was_set_elsewhere(proxy):
    """A JSON answer showed another epoch: the resume finds the fence, then is told."""
    async with proxy() as relay:
        story = await changed(relay)
        other = await story.other(reply(200, result(99, 2), JSON))
        assert (await other.rest(), other.status) == (result(99, 2), 200)  # delivered (R12)
        assert (await (await story.resume(3)).error())["data"] == {"reason": "epoch_changed"}
        assert await tell(story) == (200, [(5, "epoch_changed")])
        assert story.verdicts() == []


async def test_f4_refused_by_a_lost_session(proxy):
    """N1 on the resume itself counts as the first refusal."""
    async with proxy() as relay:
        story = await changed(relay)
        client, server, _ = await story.resumed(3, reply(404, b"session not found", b"Content-Type: text/plain"))
        assert (await client.error())["data"] == {"reason": "session_lost"}
        assert await tell(story) == (200, [(5, "session_lost")])
        await story.fenced("session_lost")


async def test_f4_refused_because_it_was_empty(proxy):
    async with proxy(refusal={"pending_calls": "at-once"}) as relay:
        story = await changed(relay)
        client = await story.resume(3)
        for _ in range(4):
            server, _ = await story.asked()
            await server.send(stream())
        assert (await client.told(), client.status) == ([(5, "no_event")], 200)


async def test_f5_told_once(proxy):
    """In-band on the stream; a later resume of it gets the 404 only."""
    async with proxy() as relay:
        story = await changed(relay)
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        await server.send(part(notes(5, epoch=2)))
        assert await client.told() == [(5, "epoch_changed")]
        for _ in range(2):
            assert await tell(story, 4) == (404, [])


async def test_f5_left_untold_on_demand(proxy):
    async with proxy(refusal={"pending_calls": "leave"}) as relay:
        story = await changed(relay)
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        await server.send(part(notes(5, epoch=2)))
        assert (await client.told(), client.end) == ([], "aborted")
        assert bytes(client.data) == notes(4, epoch=1)


async def test_f6_other_calls_run_to_their_end(proxy):
    """One stream is refused; another that flows, and one whose answer is still to come, end as they would."""
    async with proxy() as relay:
        story = await changed(relay)
        flowing, live, _ = await story.ask(story.call(6))
        await live.send(STREAM + part(event("b1", note(61, 1))))
        await flowing.until(note(61, 1))
        waiting, late, _ = await story.ask(story.call(7))
        await refuse(story)
        await live.send(part(response(6, 1)) + LAST_CHUNK)
        assert (await flowing.rest(), flowing.end) == (event("b1", note(61, 1)) + response(6, 1), "clean")
        await late.send(reply(200, result(7, 1), JSON))
        assert await waiting.rest() == result(7, 1)
        await story.fenced("epoch_changed")


async def test_f6_f2_what_is_held_is_closed(proxy):
    """Another stream of the fenced session that nobody reads: its buffer is not delivered (H2)."""
    async with proxy() as relay:
        story = await changed(relay)
        other, live, _ = await story.ask(story.call(6))
        await live.send(STREAM + part(event("b1", note(61, 1))))
        await other.until(note(61, 1))
        other.peer.reset()
        await refuse(story)
        assert await live.gone()
        assert (await (await story.resume("b1")).error())["data"] == {"reason": "epoch_changed"}


async def test_f3_who_may_fence(proxy):
    """A stranger to whom the upstream gave no stream: the 404 is his alone."""
    async with proxy() as relay:
        story = await changed(relay, fields=MINE)
        client, server, _ = await story.ask(story.again(3, fields=OTHER))
        await server.send(reply(404, b"unknown session", b"Content-Type: text/plain"))
        assert (await client.error())["data"] == {"reason": "session_lost"}
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))


async def test_f2_l1_granted_anew(proxy):
    """The fence is lifted, the record is void: the old cursor is unknown to a session that has delivered nothing."""
    async with proxy() as relay:
        story = await changed(relay)
        await refuse(story)
        await story.open(2)
        await story.alive()
        client, server, request = await story.ask(story.again(3))
        assert request.get(b"Last-Event-ID") is None


async def test_l2_initialize_with_the_fenced_id(proxy):
    async with proxy() as relay:
        story = await changed(relay)
        await refuse(story)
        body = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}'
        data = get(b"/mcp", SESSION, b"Content-Length: %d" % len(body), method=b"POST") + body
        client, server, request = await story.ask(data)
        assert request.get(b"Mcp-Session-Id") is None
        assert request.body == body
        await server.send(reply(503))
        await client.rest()
        await story.fenced("epoch_changed")
