"""Draws the pictures of the status page for the docs: `PYTHONPATH=tests python -m admin.picture docs/images`.

A proxy that has seen every kind of verdict, in the colours of light and dark, and on a phone.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from admin.browser import page
from admin.stage import Client, Proxy, Server, play_proven, proxy, rpc, vanish

VIEWS = {
    "status": ("light", 1180, 900, False),
    "status-dark": ("dark", 1180, 900, False),
    "status-phone": ("light", 390, 844, True),
}
POLICIES = [
    {"name": "tools", "match": {"path": "/mcp"}, "resume": {"accept": ["connection", "epoch", "overlap"]}},
    {"name": "search", "match": {"path": "/search/*"}, "mode": "observe"},
]


async def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    server = Server()
    async with (
        server.listening() as upstream,
        proxy(upstream, Path(tempfile.mkdtemp()), policies=POLICIES) as gate,
        aiohttp.ClientSession() as http,
        busy(server, gate, http),
        page() as opened,
    ):
        for name, (scheme, width, height, phone) in VIEWS.items():
            await opened.size(width, height, phone=phone)
            await opened.scheme(scheme)
            await opened.goto(gate.admin + "/status")
            await opened.until("document.querySelectorAll('#verdicts tr').length > 6")
            if phone:
                await opened.tell("document.getElementById('t-verdicts').scrollIntoView()")
            await opened.screenshot(target / f"{name}.png", whole=not phone)


@asynccontextmanager
async def busy(server: Server, gate: Proxy, http: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Sessions that are proven, unproven and divergent, and two streams: one that flows and one that is held."""
    for _ in range(4):
        await play_proven(Client(http, gate.url))
    server.epoch = None
    client = Client(http, gate.url)
    await client.initialize()
    await client.call()
    await client.resume("3")
    server.epoch = "1"
    client = Client(http, gate.url)
    await client.initialize()
    await client.call()
    await client.resume("77")
    server.cut = False
    client = Client(http, gate.url)
    await client.initialize()
    stream = await http.post(client.url, json=rpc("tools/call"), headers=client.headers)
    await stream.content.readuntil(b"id: 3")
    vanish(stream)
    stream.close()
    resumed = await http.get(client.url, headers={**client.headers, "Last-Event-ID": "1"})
    client = Client(http, gate.url)
    await client.initialize()
    held = await http.post(client.url, json=rpc("tools/call"), headers=client.headers)
    await held.content.readuntil(b"id: 3")
    vanish(held)
    held.close()
    server.cut = True
    for url in (gate.url.replace("/mcp", "/search/mcp"), gate.url):
        client = Client(http, url)
        await client.initialize()
        await client.call()
        server.epoch = "2"
        await client.resume("3")
        server.epoch = "1"
    try:
        yield
    finally:
        with contextlib.suppress(aiohttp.ClientError):
            resumed.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
