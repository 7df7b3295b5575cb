"""One play: a server of one SDK, the proxy or nothing before it, a client of one SDK, and a wire on each side."""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import yaml

from interop.environments import Sdk
from interop.wire import Wire

AT_ONCE = 8  # runs: they mostly wait
START_TIMEOUT = 60.0  # s, for a process to say that it is up on a busy machine
CLIENT_TIMEOUT = 60.0  # s, for a client's whole program


@asynccontextmanager
async def process(command: list[str]) -> AsyncIterator[str]:
    """A running process: the first line that it printed. It is ended at the end, by its id."""
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            line = (await child.stdout.readline()).decode()
        if not line:
            raise RuntimeError(f"{command[:3]} ended before it was up, status {await child.wait()}")
        drained = asyncio.create_task(child.stdout.read())
        yield line
    finally:
        await end(child)
    await drained


async def end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), 5)
    except TimeoutError:
        child.kill()
        await child.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def proxy(upstream_port: int, resume: dict[str, Any]) -> AsyncIterator[int]:
    """`epochgate serve` before the upstream; its port. `resume` is merged into the policy."""
    port = free_port()
    settings = {
        "version": 1,
        "listen": f"127.0.0.1:{port}",
        "upstream": {"url": f"http://127.0.0.1:{upstream_port}"},
        "admin": {"listen": f"127.0.0.1:{free_port()}"},
        "log": {"level": "warning"},
        "drain": {"grace": "0s", "window": "0s"},
        "policies": [{"name": "mcp", "match": {"path": "/mcp"}, "resume": resume}],
    }
    with tempfile.TemporaryDirectory() as home:
        path = pathlib.Path(home, "epochgate.yaml")
        path.write_text(yaml.safe_dump(settings))
        async with process([sys.executable, "-m", "epochgate", "serve", "--config", str(path)]):
            yield port


@dataclass(slots=True)
class Stage:
    """What a run may act on: the wires before and behind the proxy, and the server."""

    front: Wire
    back: Wire
    server_sdk: Sdk
    server_flags: tuple[str, ...]
    server_port: int
    url: str
    exits: AsyncExitStack

    async def control(self, action: str) -> None:
        """Posts to one of the server's control paths."""
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://127.0.0.1:{self.server_port}/control/{action}") as answer,
        ):
            assert answer.status == 204

    async def start_server(self) -> int:
        """One more server of this kind, with nothing in its memory; its port."""
        line = await self.exits.enter_async_context(process(self.server_sdk.command("servers", *self.server_flags)))
        return int(line)


@asynccontextmanager
async def staged(
    server_sdk: Sdk, server_flags: tuple[str, ...] = (), resume: dict[str, Any] | None = None
) -> AsyncIterator[Stage]:
    """A server behind two wires, and between them the proxy, unless `resume` is None: then the wires are joined."""
    async with AsyncExitStack() as exits:
        back = await exits.enter_async_context(Wire(0).listening())
        front = await exits.enter_async_context(Wire(back.port).listening())
        stage = Stage(front, back, server_sdk, server_flags, 0, f"http://127.0.0.1:{front.port}/mcp", exits)
        stage.server_port = back.target = await stage.start_server()
        if resume is not None:
            front.target = await exits.enter_async_context(proxy(back.port, resume))
        yield stage


@asynccontextmanager
async def client(sdk: Sdk, program: str, url: str, plan: dict[str, Any]) -> AsyncIterator[asyncio.Task[dict[str, Any]]]:
    """A client's run: the task ends with the document that it printed."""
    child = await asyncio.create_subprocess_exec(
        *sdk.command("clients", program, url, json.dumps(plan)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    async def read() -> dict[str, Any]:
        async with asyncio.timeout(CLIENT_TIMEOUT):
            out, err = await child.communicate()
        if child.returncode:
            raise RuntimeError(f"the client {sdk.name} failed:\n{err.decode()}")
        found: dict[str, Any] = json.loads(out)
        return found

    task = asyncio.create_task(read())
    try:
        yield task
    finally:
        await end(child)
