"""The comment on a silent stream (`keepalive`)."""

from __future__ import annotations

import asyncio

from aiohttp import web

from admin.stage import Client, Server, event, note, proxy, rpc, vanish

COMMENT = b":\n\n"


class Slow(Server):
    """One event, then a silence in the middle of the next one, then its rest, and silence."""

    def __init__(self) -> None:
        super().__init__()
        self.half = asyncio.Event()
        self.head: dict[str, str] = {}

    async def _handle(self, request):
        if request.method == "POST" and b"tools/call" in await request.read():
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self.head})
            await stream.prepare(request)
            whole = event(2, note(self.epoch))
            await stream.write(event(1, note(self.epoch)) + whole[:30])
            await self.half.wait()
            await stream.write(whole[30:])
            await self.more.wait()
            return stream
        return await super()._handle(request)


async def test_a_comment_comes_between_events_only(tmp_path, http):
    server = Slow()
    policies = [{"name": "mcp", "keepalive": "50ms"}]
    async with server.listening() as upstream, proxy(upstream, tmp_path, policies=policies) as gate:
        client = Client(http, gate.url)
        await client.initialize()
        async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
            data = b""
            asyncio.get_running_loop().call_later(0.3, server.half.set)  # six times the silence that brings a comment
            while data.count(COMMENT) < 3:
                data += await stream.content.readany()
            assert data == event(1, note("1")) + event(2, note("1")) + COMMENT * 3
            vanish(stream)
        async with http.get(client.url, headers={**client.headers, "Last-Event-ID": "1"}) as resumed:
            data = await resumed.content.readuntil(COMMENT)  # a resumed one too; comments are not kept
            assert data == event(2, note("1")) + COMMENT


class Marked(Server):
    """A silent stream, whose first event comes late and with a byte order mark."""

    async def _handle(self, request):
        if request.method == "POST" and b"tools/call" in await request.read():
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            await self.more.wait()
            await stream.write(b"\xef\xbb\xbf" + event(1, note(self.epoch)))
            return stream
        return await super()._handle(request)


async def test_behind_a_comment_a_byte_order_mark_is_none(tmp_path, http):
    """The client would take it for a part of the first line."""
    server = Marked()
    policies = [{"name": "mcp", "keepalive": "50ms"}]
    async with server.listening() as upstream, proxy(upstream, tmp_path, policies=policies) as gate:
        client = Client(http, gate.url)
        await client.initialize()
        async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
            data = await stream.content.readuntil(COMMENT)
            server.more.set()
            data += await stream.content.read()
            assert data.replace(COMMENT, b"") == event(1, note("1"))


async def test_off_by_default_and_in_observe_mode(tmp_path, http):
    for policies in ([{"name": "mcp"}], [{"name": "mcp", "mode": "observe", "keepalive": "50ms"}]):
        server = Slow()
        server.half.set()
        home = tmp_path / policies[0].get("mode", "default")
        home.mkdir()
        async with server.listening() as upstream, proxy(upstream, home, policies=policies) as gate:
            client = Client(http, gate.url)
            await client.initialize()
            async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
                asyncio.get_running_loop().call_later(0.3, server.more.set)
                assert await stream.read() == event(1, note("1")) + event(2, note("1"))


async def test_a_body_of_a_stated_length_stays_as_it_is(tmp_path, http):
    server = Slow()
    server.half.set()
    whole = event(1, note("1")) + event(2, note("1"))
    server.head = {"Content-Length": str(len(whole))}
    policies = [{"name": "mcp", "keepalive": "20ms"}]
    async with server.listening() as upstream, proxy(upstream, tmp_path, policies=policies) as gate:
        client = Client(http, gate.url)
        await client.initialize()
        async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
            asyncio.get_running_loop().call_later(0.2, server.more.set)
            assert await stream.read() == whole
