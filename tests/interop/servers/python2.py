"""A server of the Python SDK 2.x: the low-level server behind the SDK's session manager, with an event store."""

from __future__ import annotations

import warnings
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPDeprecationWarning
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from starlette.requests import Request
from world import TOOLS, World, options, serve

warnings.simplefilter("ignore", MCPDeprecationWarning)
args = options()
world = World(stamp=args.stamp)
running: dict[str, dict[str, Any]] = {}  # the calls in flight of each session, as a durable queue would keep them


async def list_tools(ctx: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in TOOLS])


async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    session_id = ctx.request.headers["mcp-session-id"]
    name, arguments = params.name, params.arguments or {}
    token = (ctx.meta or {}).get("progress_token")

    async def report(step: int, message: str, meta: dict[str, Any] | None) -> None:
        note: dict[str, Any] = {"progressToken": token, "progress": step, "total": arguments["steps"]}
        note |= {"message": message} | ({"_meta": meta} if meta else {})
        await ctx.session.send_notification(
            types.ProgressNotification(params=types.ProgressNotificationParams.model_validate(note)),
            related_request_id=ctx.request_id,
        )

    async def close() -> None:
        if ctx.close_sse_stream:
            await ctx.close_sse_stream()

    if name == "ask":
        return await ask(ctx)
    if name == "announce":
        await ctx.session.send_tool_list_changed()
        return text("announced")
    if name == "count":
        call = {"name": name, "arguments": arguments, "_meta": {"progressToken": token}}
        running[session_id] = {"id": ctx.request_id, "params": call}
    return text(*await world.call(session_id, name, arguments, report, close))


async def ask(ctx: Any) -> types.CallToolResult:
    sample = await ctx.session.create_message(
        messages=[types.SamplingMessage(role="user", content=types.TextContent(type="text", text="complete me"))],
        max_tokens=7,
        related_request_id=ctx.request_id,
    )
    schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    answer = await ctx.session.elicit("which word?", schema, related_request_id=ctx.request_id)
    return text(f"{sample.content.text}, {answer.action}: {answer.content}")


def text(value: str, meta: dict[str, Any] | None = None) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=value)], _meta=meta)


async def recreate(manager: StreamableHTTPSessionManager, scope: Any, session_id: str) -> None:
    """A new transport and server session under the old id; the call in flight is dispatched to it again."""
    transport = StreamableHTTPServerTransport(session_id, event_store=world.store)
    manager._server_instances[session_id] = transport

    async def run(*, task_status: Any) -> None:
        async with transport.connect() as (read, write):
            task_status.started()
            await server.run(read, write, server.create_initialization_options())

    assert manager._task_group is not None
    await manager._task_group.start(run)
    metadata = ServerMessageMetadata(request_context=Request(scope))
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "re-created", "version": "0"}}
    messages: list[Any] = [
        types.JSONRPCRequest(jsonrpc="2.0", id="re-created", method="initialize", params=hello),
        types.JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized"),
    ]
    if call := running.get(session_id):
        messages.append(types.JSONRPCRequest(jsonrpc="2.0", id=call["id"], method="tools/call", params=call["params"]))
    writer = transport._read_stream_writer
    assert writer is not None
    for message in messages:
        await writer.send(SessionMessage(message, metadata=metadata))


server: Server[Any] = Server("interop", version="1.0.0", on_list_tools=list_tools, on_call_tool=call_tool)
serve(
    world,
    StreamableHTTPSessionManager(server, event_store=world.store, retry_interval=args.retry_ms),
    recreate,
)
