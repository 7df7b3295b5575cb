"""What is done with is freed at once: a cycle would wait for the collector, which looks at old objects very rarely.

Memory would grow by all of it meanwhile, which looks like a leak and, in a container, ends like one.
"""

from __future__ import annotations

import gc

import pytest

from relay.wire import get, ok, post, settle
from resume.story import JSON, LAST_CHUNK, Story, began, notes, part, reply, response, result, until

BOTH_LOOPS = True


@pytest.fixture
def garbage():
    """Gives what only the collector would have freed of the product's own since the test began."""
    gc.collect()
    gc.disable()

    def find() -> set[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            return {type(found).__name__ for found in gc.garbage if type(found).__module__.startswith("epochgate")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    yield find
    gc.enable()


async def gone(relay) -> None:
    """All connections are."""
    relay.context.upstream.close()
    await until(lambda: not relay.context.clients and not relay.context.upstream.connections)
    await settle()


async def test_calls_on_a_connection(proxy, garbage):
    """Those that are read by the parser, those whose head came before, and one with a body in pieces."""
    async with proxy() as relay:
        client, server = await relay.opened()
        for number in range(4):
            await client.send(post(b"%d" % number, b"Mcp-Session-Id: S1"))
            await server.request()
            await server.send(ok(b"fine", JSON))
            assert (await client.message()).body == b"fine"
        await client.send(get(b"/mcp", b"Content-Length: 6", method=b"POST") + b"abc")
        await server.until(b"abc")
        await client.send(b"def")
        await server.exactly(3)
        await server.send(ok(b"fine"))
        assert (await client.message()).body == b"fine"
        for peer in relay.peers:
            peer.close()
        await gone(relay)
        assert not garbage()


@pytest.mark.parametrize("how", ["answered", "left", "cut", "lost"])
async def test_streams(proxy, garbage, how):
    """One that ends, one that is held and resumed, one that is resumed from the upstream, one that is refused."""
    async with proxy(keepalive="10s") as relay:
        story = await began(relay, epoch=1)
        await play(story, how)
        for peer in relay.peers:
            peer.close()
        del story
        await gone(relay)
        assert not garbage()


async def play(story: Story, how: str) -> None:
    if how == "left":
        await story.leave()
        await story.server.send(part(notes(4, epoch=1)))
        client = await story.resume(3)
        await client.until(notes(4, epoch=1))
        await story.server.send(part(response(5, epoch=1)), LAST_CHUNK)
        await client.rest()
    elif how == "cut":
        await story.cut()
        client, server, _ = await story.resumed(3)
        await server.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + notes(4, epoch=1))
        await client.until(notes(4, epoch=1))
        server.reset()
        await client.rest()
    elif how == "lost":
        await story.cut()
        client, server, _ = await story.resumed(3)
        await server.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + notes(4, epoch=2))
        assert (await client.error())["data"] == {"reason": "epoch_changed"}
        await story.fenced("epoch_changed")
    else:
        await story.server.send(part(response(5, epoch=1)), LAST_CHUNK)
        await story.answer.rest()
        await (await story.other(reply(200, result(99, 1), JSON))).rest()


@pytest.mark.parametrize(
    "how", ["no request", "client gone", "upstream gone", "no answer", "half a body", "half an answer"]
)
async def test_requests_that_come_to_nothing(proxy, garbage, how):
    async with proxy() as relay:
        if how == "no request":
            client = await relay.connect()
            await client.send(b"GARBAGE\r\n\r\n")
            await client.rest()
        elif how == "half a body":
            client = await relay.connect()
            await client.send(get(b"/mcp", b"Content-Length: 6", method=b"POST") + b"abc")
            server = await relay.accept()
            await server.until(b"abc")
            client.reset()
            assert await server.gone()
        else:
            client, server, _ = await relay.asked(get())
            if how == "client gone":
                client.reset()
                assert await server.gone()
            elif how == "upstream gone":
                server.reset()
                assert (await client.message()).status == 502
            elif how == "no answer":
                await server.send(b"nonsense\r\n\r\n")
                assert (await client.message()).status == 502
            else:
                await server.send(ok(b"abc")[:-1])
                server.reset()
                assert await client.gone()
        for peer in relay.peers:
            peer.close()
        await gone(relay)
        assert not garbage()
