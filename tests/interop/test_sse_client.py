"""aiohttp-sse-client, an independent reader, sees through the proxy exactly what it sees directly (T1, T4, T6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp_sse_client.client import EventSource, MessageEvent

from interop.stage import proxy

BODY = (
    b": a comment\n\n",
    b"id: 1\nevent: message\ndata: first\n\n",
    b"id: 2\r\ndata: two\r\ndata: lines\r\n\r\n",
    b"data: an id sticks\n\n",
    "id: 3\ndata: grüße, 世界\n\n".encode(),
    b"retry: 200\nevent: other\ndata: {}\n\n",
    b"id: 4\ndata: " + b"x" * 100_000 + b"\n\n",
    b"id: 5\ndata: cut " + b"into",
    b" pieces\n",
    b"\nid: 6\ndata: last\n\n",
)


async def serve_events(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    for piece in BODY:
        await response.write(piece)
        await asyncio.sleep(0.01)  # so that the pieces travel apart
    return response


@asynccontextmanager
async def event_server() -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{path:.*}", serve_events)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def read_all(url: str) -> list[MessageEvent]:
    seen: list[MessageEvent] = []
    async with (
        aiohttp.ClientSession(read_bufsize=1 << 20) as http,
        EventSource(url, session=http, max_connect_retry=0) as source,
    ):
        async for event in source:
            seen.append(event)
            if event.data == "last":  # the reader would connect again at the end
                return seen
    raise AssertionError("the stream ended before its last event")


@pytest.mark.parametrize("path", ["/mcp", "/elsewhere"], ids=["guarded", "unguarded"])
async def test_the_reader_sees_the_same_events(path: str) -> None:
    async with event_server() as upstream, proxy(upstream, {}) as port:
        direct, proxied = await asyncio.gather(
            *(read_all(f"http://127.0.0.1:{each}{path}") for each in (upstream, port))
        )
    assert [event.data for event in direct][-1] == "last"
    assert [(e.type, e.message, e.data, e.last_event_id) for e in proxied] == [
        (e.type, e.message, e.data, e.last_event_id) for e in direct
    ]
