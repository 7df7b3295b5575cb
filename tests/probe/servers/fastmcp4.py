"""A FastMCP server with the library's own event store, on a free port, which it prints."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastmcp import Context, FastMCP
from fastmcp.server.event_store import EventStore

mcp: FastMCP = FastMCP("probed")


@mcp.tool
async def count(steps: int, pause_ms: int, context: Context) -> str:
    """Reports one progress step after each pause."""
    for step in range(1, steps + 1):
        await asyncio.sleep(pause_ms / 1000)
        await context.report_progress(step, steps)
    return f"{steps} steps"


listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
app = mcp.http_app(path="/mcp", event_store=EventStore())
uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)).run(sockets=[listener])
