"""FastMCP's own proxy: an MCP server that is an MCP client of another. `python relay_fastmcp.py PORT UPSTREAM`."""

from __future__ import annotations

import sys

from fastmcp.server import create_proxy

if __name__ == "__main__":
    proxy = create_proxy(f"http://127.0.0.1:{sys.argv[2]}/mcp")
    options = {"log_level": "error", "access_log": False}
    proxy.run("http", show_banner=False, port=int(sys.argv[1]), log_level="error", uvicorn_config=options)
