"""A real FastMCP server: `python fastmcp_server.py PORT`. Its tools do next to nothing: the protocol is what costs."""

from __future__ import annotations

import sys

from fastmcp import Context, FastMCP

server: FastMCP = FastMCP("bench")


@server.tool
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool
async def steps(count: int, context: Context) -> str:
    """Report so many steps of progress."""
    for number in range(1, count + 1):
        await context.report_progress(number, count, "x" * 200)
    return f"{count} steps"


if __name__ == "__main__":
    options = {"log_level": "error", "access_log": False}
    server.run("http", show_banner=False, port=int(sys.argv[1]), log_level="error", uvicorn_config=options)
