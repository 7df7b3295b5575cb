"""A gateway before an unmodified server that loses its sessions in the two ways in which gateways do.

It keeps the events of the long call in a buffer of its own. `recreate` is the incident of design.md section 1: the
session ends at the server, a new one takes its place under the id that the client knows, the call in flight is executed
again in it, and a resume gets the buffer and then the events of the new execution, in one stream. `replace` puts
another server in the place of the first, which knows none of the sessions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from epochgate.guard.sse import Framer
from epochgate.probe.client import Client, Session

STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache, no-transform"}
_PASSED = ("Accept", "Content-Type", "Last-Event-ID", "MCP-Protocol-Version", "Mcp-Session-Id")
_HOP_BY_HOP = ("Transfer-Encoding", "Connection", "Keep-Alive", "Content-Length")


class Buffer:
    """The blocks of one stream, kept for whoever comes back to it, and the event id of each."""

    def __init__(self) -> None:
        self.ended = False
        self._blocks: list[bytes] = []
        self._ids: list[str] = []
        self._grown = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._blocks)

    def after(self, cursor: str | None) -> int | None:
        """How many blocks a client has that sends this cursor; None if the buffer has no such event."""
        if cursor is None:
            return 0
        return self._ids.index(cursor) + 1 if cursor in self._ids else None

    async def fill(self, response: aiohttp.ClientResponse) -> None:
        """Take in what a server sends, to its end."""
        framer = Framer(keep_raw=1 << 20, keep_data=1 << 20)
        async for chunk in response.content.iter_any():
            for block in framer.feed(chunk):
                async with self._grown:
                    self._blocks.append(block.raw or b"")
                    self._ids.append((block.id or b"").decode() if block.own_id else "")
                    self._grown.notify_all()

    async def end(self) -> None:
        async with self._grown:
            self.ended = True
            self._grown.notify_all()

    async def reach(self, number: int) -> None:
        """Wait until so many blocks are there, or no more come."""
        async with self._grown:
            await self._grown.wait_for(lambda: self.ended or len(self._blocks) >= number)

    async def blocks(self, number: int) -> AsyncIterator[bytes]:
        """All blocks but the first `number`, as they come."""
        while True:
            await self.reach(number + 1)
            if number >= len(self._blocks):
                return
            yield self._blocks[number]
            number += 1


@dataclass(slots=True)
class Gateway:
    """`server` is the port behind it, `tool` the one whose streams are buffered."""

    server: int
    tool: str
    port: int = 0
    buffer: Buffer = field(default_factory=Buffer)
    _call: dict[str, object] = field(default_factory=dict)
    _lost: str = ""  # the id under which a session was created anew,
    _anew: str = ""  # and the id that the server knows it by
    _open: set[asyncio.Transport] = field(default_factory=set)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _http: aiohttp.ClientSession = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Gateway]:
        runner = web.ServerRunner(web.Server(self._answer, handler_cancellation=True))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        connector = aiohttp.TCPConnector(force_close=True)
        try:
            async with aiohttp.ClientSession(
                connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
            ) as self._http:
                yield self
                self.cut()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await runner.cleanup()

    def cut(self) -> None:
        """Cut all connections of clients at once."""
        for transport in self._open:
            transport.abort()

    def replace(self, server: int) -> None:
        """Let another server stand behind, and cut what leads to the first."""
        self.server = server
        self.buffer = Buffer()
        self.cut()

    async def recreate(self, session_id: str, *, unseen: int) -> None:
        """Lose the session once its call's stream has `unseen` more blocks than were sent; its next one is begun."""
        self.cut()
        await self.buffer.reach(len(self.buffer) + unseen)
        assert not self.buffer.ended, "the call was over before the session was lost"
        while self._tasks:
            self._tasks.pop().cancel()
        async with Client(f"http://127.0.0.1:{self.server}/mcp") as client:
            async with client.send("DELETE", session=session_id) as deleted:
                assert deleted.status < 300
            session = await client.initialize()
        assert isinstance(session, Session)
        assert session.id is not None
        self._lost, self._anew = session_id, session.id
        fields = {"Accept": "application/json, text/event-stream", "Mcp-Session-Id": session_id}
        self._begin(await self._forward("POST", fields, self._call))

    async def _forward(
        self, method: str, fields: dict[str, str], message: dict[str, object] | None
    ) -> aiohttp.ClientResponse:
        if self._lost and fields.get("Mcp-Session-Id") == self._lost:
            fields = fields | {"Mcp-Session-Id": self._anew}
        return await self._http.request(
            method,
            f"http://127.0.0.1:{self.server}/mcp",
            headers=fields,
            json=message,
            allow_redirects=False,
        )

    def _begin(self, response: aiohttp.ClientResponse) -> None:
        """Let the answer of the long call run into the buffer, whether somebody reads it or not."""
        buffer = self.buffer

        async def run() -> None:
            try:
                await buffer.fill(response)
                await buffer.end()
            finally:
                response.close()

        self._tasks.append(asyncio.create_task(run()))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        self._open.add(transport)
        try:
            return await self._pass(request)
        finally:
            self._open.discard(transport)

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        message = json.loads(body) if body else None
        cursor = request.headers.get("Last-Event-ID")
        seen = self.buffer.after(cursor) if request.method == "GET" and cursor else None
        if seen is not None and request.headers.get("Mcp-Session-Id") == self._lost:
            return await self._send_buffer(request, CIMultiDict(STREAM, **{"Mcp-Session-Id": self._lost}), seen)
        fields = {name: request.headers[name] for name in _PASSED if name in request.headers}
        response = await self._forward(request.method, fields, message)
        head = CIMultiDict((n, v) for n, v in response.headers.items() if n not in _HOP_BY_HOP)
        if message and message.get("method") == "tools/call" and message["params"]["name"] == self.tool:
            self._call, self.buffer = message, Buffer()
            self._begin(response)
            return await self._send_buffer(request, head, 0)
        answer = web.StreamResponse(status=response.status, headers=head)
        await answer.prepare(request)
        try:
            async for chunk in response.content.iter_any():
                await answer.write(chunk)
        finally:
            response.close()
        return answer

    async def _send_buffer(self, request: web.BaseRequest, fields: CIMultiDict[str], seen: int) -> web.StreamResponse:
        answer = web.StreamResponse(headers=fields)
        await answer.prepare(request)
        async for block in self.buffer.blocks(seen):
            await answer.write(block)
        return answer
