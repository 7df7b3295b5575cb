"""The client's side of HTTP/1.1 for these runs: one connection, one request after another, an answer read in pieces."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any, cast

import httptools


class Wire(asyncio.Protocol):
    """One connection. Whatever breaks it is a ConnectionError for who waits."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._pieces: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._headed = False
        self._complete = True
        self.lost = False
        self.status = 0
        self.fields: dict[str, str] = {}

    @classmethod
    async def to(cls, port: int) -> Wire:
        _, wire = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return wire

    async def ask(self, method: str, path: str, fields: dict[str, str], body: bytes = b"") -> int:
        """Send a request; the status of its answer, whose fields are then in `fields`."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        self._parser = httptools.HttpResponseParser(self)
        self._headed = self._complete = False
        self.fields = {}
        self._transport.write(f"{method} {path} HTTP/1.1\r\nHost: proxy\r\n{lines}{length}\r\n".encode() + body)
        while not self._headed:
            await self._more()
        self.status = self._parser.get_status_code()
        return self.status

    async def read(self) -> bytes:
        """The next piece of the body; empty at its clean end."""
        while not self._pieces and not self._complete:
            await self._more()
        return self._pieces.popleft() if self._pieces else b""

    async def read_all(self) -> bytes:
        body = b""
        while data := await self.read():
            body += data
        return body

    async def read_json(self) -> Any:
        return json.loads(await self.read_all())

    @property
    def usable(self) -> bool:
        return self._complete and not self.lost and not self._transport.is_closing()

    def close(self) -> None:
        self._transport.abort()

    async def _more(self) -> None:
        if self.lost:
            raise ConnectionResetError("the connection broke")
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self._transport.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.lost = True
            self._transport.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._wake()

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._complete = True
