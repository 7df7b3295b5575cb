"""A server of the Python SDK 1.x: the low-level server behind the SDK's session manager, with an event store."""

from __future__ import annotations

from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from starlette.requests import Request
from world import TOOLS, World, options, serve

args = options()
world = World(stamp=args.stamp)
server: Server[Any, Any] = Server("interop", version="1.0.0")
running: dict[str, dict[str, Any]] = {}  # the calls in flight of each session, as a durable queue would keep them


@server.list_tools()
async def list_tools() -> list[types.Tool]:
    return [types.Tool(**tool) for tool in TOOLS]


@server.call_tool(validate_input=False)
async def call_tool(name: str, arguments: dict[str, Any]) -> types.CallToolResult:
    ctx = server.request_context
    session_id = ctx.request.headers["mcp-session-id"]
    token = ctx.meta.progressToken if ctx.meta else None

    async def report(step: int, message: str, meta: dict[str, Any] | None) -> None:
        params: dict[str, Any] = {"progressToken": token, "progress": step, "total": arguments["steps"]}
        params |= {"message": message} | ({"_meta": meta} if meta else {})
        note = types.ProgressNotification(params=types.ProgressNotificationParams(**params))
        await ctx.session.send_notification(types.ServerNotification(note), related_request_id=ctx.request_id)

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
            await server.run(read, write, server.create_initialization_options(), stateless=True)

    await manager._task_group.start(run)
    if call := running.get(session_id):
        message = types.JSONRPCRequest(jsonrpc="2.0", id=call["id"], method="tools/call", params=call["params"])
        metadata = ServerMessageMetadata(request_context=Request(scope))
        writer = transport._read_stream_writer
        assert writer is not None
        await writer.send(SessionMessage(types.JSONRPCMessage(message), metadata=metadata))


serve(
    world,
    StreamableHTTPSessionManager(server, event_store=world.store, retry_interval=args.retry_ms),
    recreate,
)
