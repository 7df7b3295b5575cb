"""A server with many sessions and the clients of all of them, for tests that kill proxies in mid-traffic."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import aiohttp
from aiohttp import web

from ledger.servers import free_port

EVERY = 0.2  # s between two events of a stream
PATIENCE = 15.0  # s that a client tries to reach a proxy


class Upstream:
    """A faithful server: each session has an epoch and one call, whose events it stores and replays."""

    def __init__(self) -> None:
        self.port = free_port()
        self.epochs: dict[str, int] = {}
        self.stored: dict[str, list[bytes]] = {}
        self.news: dict[str, asyncio.Event] = {}
        self.ending = False
        application = web.Application()
        application.router.add_route("*", "/mcp", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def close(self) -> None:
        self.ending = True
        await self._runner.cleanup()

    def recreate(self, session: str) -> None:
        """The session is lost and made anew under its id; the buffer of its stream survives (section 1)."""
        self.epochs[session] += 1

    def say(self, session: str) -> None:
        """One more event."""
        number = len(self.stored[session]) + 1
        params = {"n": number, "_meta": {"session_epoch": self.epochs[session]}}
        message = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": params})
        self.stored[session].append(f"id: {session}-{number}\ndata: {message}\n\n".encode())
        news, self.news[session] = self.news[session], asyncio.Event()
        news.set()  # for all that wait: a stream and the one that takes its place may be there at once

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get("Mcp-Session-Id", "")
        if request.method == "DELETE":
            return web.Response()
        if request.method == "POST":
            call = await request.json()
            if call["method"] == "initialize":
                session = f"s{len(self.epochs)}"
                self.epochs[session] = 1
                self.stored[session] = []
                self.news[session] = asyncio.Event()
                result = {
                    "protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"},
                    "_meta": {"session_epoch": 1},
                }  # fmt: skip
                answer = {"jsonrpc": "2.0", "id": call["id"], "result": result}
                return web.json_response(answer, headers={"Mcp-Session-Id": session})
            return await self._stream(request, session, 0)
        cursor = int(request.headers["Last-Event-ID"].rpartition("-")[2])
        return await self._stream(request, session, cursor)

    async def _stream(self, request: web.Request, session: str, position: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while not self.ending:
                news = self.news[session]
                for block in self.stored[session][position:]:
                    await response.write(block)
                    position += 1
                await news.wait()
        return response


class Client:
    """Reads the stream of its session, resumes it whenever it breaks, and starts over at a 404."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self.session = ""
        self.last = 0
        self.got: list[tuple[int, int]] = []  # number and epoch of each event
        self.resumes = 0
        self.refused: str | None = None
        self.begun = asyncio.Event()
        self._answer: aiohttp.ClientResponse | None = None

    def leave(self) -> None:
        """Drop the connection that the stream comes on, as by a lost network."""
        if self._answer is not None and self._answer.connection is not None:
            self._answer.connection.transport.abort()

    async def open(self) -> None:
        body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
        async with self._crowd.http.post(self._crowd.url(), json=body) as answer:
            self.session = answer.headers["Mcp-Session-Id"]
            await answer.read()

    @property
    def _headers(self) -> dict[str, str]:
        return {"Mcp-Session-Id": self.session, "MCP-Protocol-Version": "2025-06-18", "Accept": "text/event-stream"}

    async def post(self) -> tuple[int, str]:
        """Status and reason of a plain request."""
        body = {"jsonrpc": "2.0", "id": 9, "method": "tools/call"}
        async with self._crowd.http.post(self._crowd.url(), json=body, headers=self._headers) as answer:
            return answer.status, await _reason(answer) if answer.status == 404 else ""

    async def delete(self) -> None:
        async with self._crowd.http.delete(self._crowd.url(), headers=self._headers) as answer:
            assert answer.status == 200

    async def read(self) -> None:
        """Until it is refused or cancelled."""
        body = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {}}
        request = self._crowd.http.post(self._crowd.url(), json=body, headers=self._headers)
        while True:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                async with request as answer:
                    if answer.status == 404:
                        self.refused = await _reason(answer)
                        return
                    if answer.status == 200:
                        await self._take(answer)
            if self.refused is not None:
                return
            await asyncio.sleep(random.uniform(0.02, 0.1))
            self.resumes += 1
            headers = {**self._headers, "Last-Event-ID": f"{self.session}-{self.last}"}
            request = self._crowd.http.get(self._crowd.url(), headers=headers)

    async def _take(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        async for line in answer.content:
            if line.startswith(b"data: "):
                message = json.loads(line[6:])
                if "error" in message:  # its call was told (F4)
                    self.refused = message["error"]["data"]["reason"]
                    return
                params = message["params"]
                self.last = params["n"]
                self.got.append((params["n"], params["_meta"]["session_epoch"]))
                self.begun.set()


async def _reason(answer: aiohttp.ClientResponse) -> str:
    return json.loads(await answer.read())["error"]["data"]["reason"]


class Proxy:
    """A proxy process."""

    def __init__(self, directory: Path, upstream: Upstream, store: str, hold: str, workers: int) -> None:
        self.port, self.admin = free_port(), free_port()
        directory.mkdir()
        self._config = directory / "epochgate.yaml"
        self._log = directory / "log"
        settings = {
            "listen": f"127.0.0.1:{self.port}",
            "admin": {"listen": f"127.0.0.1:{self.admin}"},
            "upstream": {"url": f"http://127.0.0.1:{upstream.port}"},
            "store": {"url": store},
            "workers": workers,
            "policies": [{"name": "mcp", "resume": {"accept": ["connection", "epoch"], "hold": {"time": hold}}}],
        }
        self._config.write_text(json.dumps(settings))
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "epochgate", "serve", "--config", str(self._config)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(400):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            assert self._process.poll() is None, self._log.read_text()[-500:]
            await asyncio.sleep(0.05)
        raise AssertionError("the proxy did not start")

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(sig)
            self._process.wait()
            self._process = None

    async def kill_worker(self) -> None:
        """One of its workers; the others go on."""
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{self.admin}/api/status") as answer:
            os.kill((await answer.json())["workers"][0]["pid"], signal.SIGKILL)

    def verdicts(self) -> Counter[tuple[str, str]]:
        """Verdict and reason of every resume that this proxy decided."""
        found: Counter[tuple[str, str]] = Counter()
        for line in self._log.read_text().splitlines():
            if line.startswith("{") and (entry := json.loads(line))["event"] == "resume.decided":
                found[entry["verdict"], entry["reason"]] += 1
        return found


class Crowd:
    """All of it."""

    def __init__(self, http: aiohttp.ClientSession, upstream: Upstream, proxies: list[Proxy]) -> None:
        self.http = http
        self.upstream = upstream
        self.alive = proxies
        self._turn = 0

    def url(self) -> str:
        """Of a proxy that lives, in turn: the balancer is not sticky."""
        self._turn += 1
        return f"http://127.0.0.1:{self.alive[self._turn % len(self.alive)].port}/mcp"

    async def talk(self) -> None:
        """Events on all streams, spread over time."""
        sessions: list[str] = []
        while True:
            if not sessions:
                sessions = list(self.upstream.stored)
                random.shuffle(sessions)
            due = max(1, round(len(self.upstream.stored) * 0.01 / EVERY))
            for session in sessions[:due]:
                self.upstream.say(session)
            del sessions[:due]
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def crowd(directory: Path, store: str, proxies: int, hold: str = "0s", workers: int = 1):
    upstream = Upstream()
    await upstream.start()
    started = [Proxy(directory / f"proxy-{n}", upstream, store, hold, workers) for n in range(proxies)]
    try:
        await asyncio.gather(*(proxy.start() for proxy in started))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            yield Crowd(http, upstream, started)
    finally:
        for proxy in started:
            proxy.kill()
        await upstream.close()
