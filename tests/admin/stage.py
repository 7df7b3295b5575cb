"""The proxy as a process before a scripted MCP server, and what a test does with the two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

START_TIMEOUT = 20.0  # s, for the proxy to listen on a busy machine
END_TIMEOUT = 20.0  # s, for the proxy to end
SSE = {"Content-Type": "text/event-stream"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def event(number: int | str, message: dict[str, Any]) -> bytes:
    return f"id: {number}\ndata: {json.dumps(message)}\n\n".encode()


def note(epoch: str | None, text: str = "working") -> dict[str, Any]:
    params: dict[str, Any] = {"level": "info", "data": text}
    if epoch is not None:
        params["_meta"] = {"session_epoch": epoch}
    return {"jsonrpc": "2.0", "method": "notifications/message", "params": params}


class Server:
    """A legacy MCP server. Each call is answered by a stream of three events that then breaks off; the resume brings
    one more, with the epoch of that moment. With `cut` unset the streams stay open, until `more` is set."""

    def __init__(self) -> None:
        self.epoch: str | None = "1"
        self.cut = True
        self.prefix = ""  # of event ids
        self.session = "session"
        self.seen: list[web.Request] = []
        self.more = asyncio.Event()
        self.opened = 0
        self.peer_certs: list[Any] = []
        application = web.Application()
        application.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.2)

    @asynccontextmanager
    async def listening(
        self, *, path: str | None = None, tls: ssl.SSLContext | None = None, port: int | None = None
    ) -> AsyncIterator[str]:
        """Its URL as the proxy takes it."""
        await self._runner.setup()
        port = port or free_port()
        site: web.BaseSite = (
            web.UnixSite(self._runner, path) if path else web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        )
        await site.start()
        try:
            yield f"unix:{path}" if path else f"http{'s' if tls else ''}://127.0.0.1:{port}"
        finally:
            self.more.set()
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        if request.transport is not None and request.transport.get_extra_info("peercert"):
            self.peer_certs.append(request.transport.get_extra_info("peercert"))
        if request.method == "DELETE":
            return web.Response(status=204)
        if request.method == "POST":
            body = await request.json()
            if body.get("method") == "initialize":
                self.opened += 1
                result: dict[str, Any] = {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "serverInfo": {"name": "s", "version": "1"},
                }
                if self.epoch is not None:
                    result["_meta"] = {"session_epoch": self.epoch}
                return web.json_response(
                    {"jsonrpc": "2.0", "id": body["id"], "result": result},
                    headers={"Mcp-Session-Id": f"{self.session}-{self.opened}"},
                )
            if body.get("method") == "tools/list":
                return web.json_response({"jsonrpc": "2.0", "id": body["id"], "result": {"tools": []}})
        stream = web.StreamResponse(headers=SSE)
        await stream.prepare(request)
        if "Last-Event-ID" in request.headers:
            await stream.write(event(f"{self.prefix}4", note(self.epoch)))
            return stream
        if request.method == "POST" or not self.cut:
            for number in (1, 2, 3):
                await stream.write(event(f"{self.prefix}{number}", note(self.epoch)))
            if not self.cut:
                await self.more.wait()
            else:
                assert request.transport is not None
                request.transport.abort()
        return stream


class Repeating(Server):
    """Repeats what follows a cursor, as servers do whose sessions outlive them."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if "Last-Event-ID" not in request.headers:
            return await super()._handle(request)
        stream = web.StreamResponse(headers=SSE)
        await stream.prepare(request)
        for number in range(int(request.headers["Last-Event-ID"]) + 1, 5):
            await stream.write(event(number, note(self.epoch)))
        return stream


class Proxy:
    """`epochgate serve` as a process; `said` are the lines of its log so far."""

    def __init__(self, config: dict[str, Any], home: Path) -> None:
        self.config = config
        self.file = home / "epochgate.yaml"
        self.said: list[str] = []
        self.printed = ""
        self.process: asyncio.subprocess.Process
        self._said_more = asyncio.Condition()
        self._readers: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        listen: str = self.config["listen"]
        return f"http{'s' if 'tls' in self.config else ''}://{listen}/mcp"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "epochgate", "serve", "--config", str(self.file)]

    @property
    def admin(self) -> str:
        return f"http://{self.config['admin']['listen']}"

    def write(self, **changes: Any) -> None:
        """The file with changes; the process is not told."""
        self.config = {**self.config, **changes}
        self.file.write_text(yaml.safe_dump(self.config))

    async def start(self, environment: dict[str, str] | None = None) -> None:
        self.write()
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        assert self.process.stdout is not None
        self._readers = [asyncio.create_task(self._read())]
        async with asyncio.timeout(START_TIMEOUT):
            self.printed = (await self.process.stdout.readline()).decode()
        if not self.printed:
            await self.process.wait()
            await asyncio.gather(*self._readers)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._said_more:
                self.said.append(line.decode(errors="replace").rstrip())
                self._said_more.notify_all()

    def lines(self, event: str) -> list[dict[str, Any]]:
        parsed = [json.loads(line) for line in self.said if line.startswith("{")]
        return [line for line in parsed if line.get("event") == event]

    async def heard(self, event: str, count: int = 1) -> dict[str, Any]:
        """The `count`-th line with this event, once it has come."""
        async with asyncio.timeout(START_TIMEOUT), self._said_more:
            await self._said_more.wait_for(lambda: len(self.lines(event)) >= count)
        return self.lines(event)[count - 1]

    async def ended(self) -> int:
        """Its exit status, once it has ended by itself."""
        async with asyncio.timeout(END_TIMEOUT):
            code = await self.process.wait()
            await asyncio.gather(*self._readers)
        return code

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await asyncio.gather(*self._readers)


@asynccontextmanager
async def proxy(
    url: str, home: Path, environment: dict[str, str] | None = None, *, fails: bool = False, **changes: Any
) -> AsyncIterator[Proxy]:
    """The proxy before the server at `url`, with `changes` of its top keys, until the block is left.

    `fails`: it is to end before it accepts connections.
    """
    config = {
        "version": 1,
        "listen": f"127.0.0.1:{free_port()}",
        "upstream": {"url": url},
        "admin": {"listen": f"127.0.0.1:{free_port()}"},
        "drain": {"grace": "0s", "window": "1s"},
        **changes,
    }
    running = Proxy(config, home)
    await running.start(environment)
    try:
        assert running.printed or fails, running.said
        yield running
    finally:
        await running.kill()


def rpc(method: str, number: int = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


class Client:
    """One session of a client."""

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: dict[str, str] | None = None) -> None:
        self.http = http
        self.url = url
        self.headers = {"Accept": "application/json, text/event-stream", **(headers or {})}

    async def initialize(self) -> str:
        params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        async with self.http.post(self.url, json=rpc("initialize", 0, **params), headers=self.headers) as answer:
            assert answer.status == 200, await answer.text()
            session = answer.headers["Mcp-Session-Id"]
        self.headers = {**self.headers, "Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-06-18"}
        return session

    async def call(self, number: int = 1) -> bytes:
        """A call whose stream is read until it breaks off."""
        data = b""
        async with self.http.post(self.url, json=rpc("tools/call", number, name="t"), headers=self.headers) as answer:
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async for piece in answer.content.iter_any():
                    data += piece
        return data

    async def resume(self, cursor: str) -> tuple[int, bytes]:
        """The status and the body of a resume."""
        async with self.http.get(self.url, headers={**self.headers, "Last-Event-ID": cursor}) as answer:
            return answer.status, await answer.read()

    async def list_tools(self) -> int:
        """The status of a plain call."""
        async with self.http.post(self.url, json=rpc("tools/list", 9), headers=self.headers) as answer:
            await answer.read()
            return answer.status


def vanish(answer: aiohttp.ClientResponse) -> None:
    """Reset the connection: a mere end of it would be a client that half-closes."""
    assert answer.connection is not None
    transport = answer.connection.transport
    assert transport is not None
    linger = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


async def play_proven(client: Client) -> str:
    """A session whose stream breaks and is resumed with its own epoch; its id."""
    session = await client.initialize()
    await client.call()
    status, _ = await client.resume("3")
    assert status == 200
    return session


async def play_divergent(client: Client, server: Server) -> str:
    """The incident: the session is made anew while the client is away; its id."""
    session = await client.initialize()
    await client.call()
    server.epoch = "2"
    status, _ = await client.resume("3")
    server.epoch = "1"
    assert status == 404
    return session


async def get_json(http: aiohttp.ClientSession, url: str, **query: str) -> Any:
    async with http.get(url, params=query) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def walk(item: Any) -> Iterator[Any]:
    """Every value in a JSON document."""
    if isinstance(item, dict):
        for inner in item.values():
            yield from walk(inner)
    elif isinstance(item, list):
        for inner in item:
            yield from walk(inner)
    else:
        yield item
