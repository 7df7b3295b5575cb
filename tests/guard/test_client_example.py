"""docs/examples/guarded_client.py is executed against a small server that cuts its streams."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "guarded_client.py"


@dataclass
class CuttingServer:
    """Cuts the first session's stream after the event 2; what its resume replays is a list of (id, epoch)."""

    replay: list[tuple[int, int]] | None
    epochs: list[int] = field(default_factory=list)
    cursors: list[str] = field(default_factory=list)
    calls: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            self.cursors.append(request.headers["Last-Event-ID"])
            if self.replay is None:
                return web.json_response({}, status=404)
            return await self.stream(request, self.replay)
        assert request.headers["Accept"] == "application/json, text/event-stream"
        message = await request.json()
        if message["method"] == "initialize":
            self.epochs.append(len(self.epochs) + 1)
            result = {"protocolVersion": "2025-11-25", "_meta": {"session_epoch": self.epochs[-1]}}
            answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
            return web.json_response(answer, headers={"Mcp-Session-Id": f"s{self.epochs[-1]}"})
        if message["method"] == "tools/call":
            self.calls += 1
            epoch = self.epochs[-1]
            return await self.stream(request, [(n, epoch) for n in ((1, 2) if self.calls == 1 else (1, 2, 3, 4))])
        return web.Response(status=202)

    async def stream(self, request: web.Request, events: Iterable[tuple[int, int]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"id: 0\ndata: \n\n")
        for number, epoch in events:
            meta = {"session_epoch": epoch}
            message = {"method": "notifications/message", "params": {"n": number, "_meta": meta}}
            if number == 4:
                message = {"id": 2, "result": {"epoch": epoch, "_meta": meta}}
            await response.write(f"id: {number}\ndata: {json.dumps({'jsonrpc': '2.0'} | message)}\n\n".encode())
        return response


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[CuttingServer]:
    served = CuttingServer(request.param)
    runner = web.ServerRunner(web.Server(served.handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    yield served
    await runner.cleanup()


async def run(url: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), url, "count", "{}", "--pause", "0.05",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "proxy")},
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("server", [[(3, 1), (4, 1)]], indirect=True)
async def test_a_healthy_resume_goes_on(server: CuttingServer) -> None:
    """The same epoch and the next ids: one session, one call."""
    output = await run(server.url)
    assert "starting over" not in output
    assert '"epoch": 1' in output
    assert (server.calls, server.cursors) == (1, ["2"])


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ([(3, 2), (4, 2)], "expected session epoch '1' on the first resumed event, got '2'"),
        ([(3, 1), (4, 2)], "expected session epoch '1' on the first resumed event, got '2'"),
        ([(4, 1)], "expected the event id that is '2' plus one, got '4'"),
        (None, "the server refused to resume"),
    ],
    indirect=["server"],
)
async def test_a_spliced_resume_is_started_over(server: CuttingServer, reason: str) -> None:
    """R7, R11, E3: another epoch at once, another epoch later (section 1), a gap, and a refusal."""
    output = await run(server.url)
    assert f"starting over: {reason}" in output
    assert '"epoch": 2' in output.splitlines()[-1]
    assert server.calls == 2
