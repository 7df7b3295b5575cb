"""A FastMCP server with the library's own event store, on a free port, which it prints.

Its tools are those of the interop servers that the tests need. With `--retry-ms` its tool closes its stream at a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections import Counter

import uvicorn
from fastmcp import Context, FastMCP
from fastmcp.server.event_store import EventStore

parser = argparse.ArgumentParser()
parser.add_argument("--retry-ms", type=int)
options = parser.parse_args()
mcp: FastMCP = FastMCP("probed")
owners: dict[str, str] = {}
executions: Counter[str] = Counter()


@mcp.tool
async def remember(owner: str, context: Context) -> str:
    """Sets the owner: the state that this session has and a re-created one lacks."""
    owners[context.session_id] = owner
    return "remembered"


@mcp.tool
async def runs(label: str) -> str:
    """How often `count` was executed for a label."""
    return json.dumps({"runs": executions[label]})


@mcp.tool
async def count(label: str, steps: int, pause_ms: int, context: Context, close_at: int = 0) -> str:
    """Reports one progress step after each pause; closes its stream after the step `close_at`."""
    executions[label] += 1
    for step in range(1, steps + 1):
        await asyncio.sleep(pause_ms / 1000)
        owner = owners.get(context.session_id, "nobody")
        await context.report_progress(step, steps, f"{label}#{step} for {owner}")
        if step == close_at:
            await asyncio.sleep(0.05)  # the event is on its way
            await context.close_sse_stream()
    return f"{label}: {steps} steps for {owners.get(context.session_id, 'nobody')}"


listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
app = mcp.http_app(path="/mcp", event_store=EventStore(), retry_interval=options.retry_ms)
uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)).run(sockets=[listener])
