"""The client of the Python SDK 2.x, in the session era of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.message import ClientMessageMetadata
from script import Sight, main, plain


class Client:
    def __init__(self, session: ClientSession, sight: Sight) -> None:
        self._session, self.sight = session, sight
        self.hello: dict[str, Any] = {}

    async def list_tools(self) -> list[Any]:
        return [plain(tool) for tool in (await self._session.list_tools()).tools]

    async def call(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        progress: Any = None,
        token: str | None = None,
        on_token: Any = None,
    ) -> Any:
        result = await self._session.send_request(
            types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=arguments or {})),
            types.CallToolResult,
            progress_callback=progress,
            metadata=ClientMessageMetadata(resumption_token=token, on_resumption_token_update=on_token),
        )
        content = result.content[0]
        assert isinstance(content, types.TextContent)
        return {"error": content.text} if result.is_error else content.text

    async def ping(self) -> Any:
        return plain(await self._session.send_ping())

    async def cancel(self, call: asyncio.Task[Any]) -> None:
        """Abandoning the call makes this SDK send the notification."""
        call.cancel()


@asynccontextmanager
async def open_client(url: str) -> AsyncIterator[Client]:
    sight = Sight()

    async def sample(_: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        sight.requests.append(["sampling", [plain(m) for m in params.messages], params.max_tokens])
        content = types.TextContent(type="text", text="completed")
        return types.CreateMessageResult(role="assistant", content=content, model="none")

    async def elicit(_: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        sight.requests.append(["elicitation", params.message])
        return types.ElicitResult(action="accept", content={"word": "yes"})

    async def read(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            sight.announced.set()

    async with create_mcp_http_client() as http:
        http.event_hooks = {"response": [sight.read_head]}
        async with (
            streamable_http_client(url, http_client=http) as (reader, writer),
            ClientSession(
                reader, writer, sampling_callback=sample, elicitation_callback=elicit, message_handler=read
            ) as session,
        ):
            client = Client(session, sight)
            client.hello = plain(await session.initialize())
            yield client


main(open_client)
