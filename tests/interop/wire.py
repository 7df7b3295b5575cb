"""A TCP relay between two parties of a test: it notes each request, and cuts connections at an event or on command."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

_HEAD = re.compile(rb"(GET|POST|DELETE) \S+ HTTP/1\.1\r\n(.*?)\r\n\r\n", re.DOTALL)
_SESSION = re.compile(rb"^mcp-session-id: *(\S+)", re.IGNORECASE | re.MULTILINE)

Place = Literal["before", "in", "after", "nowhere"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request head that passed."""

    at: float
    method: str
    session_id: str | None


class Wire:
    """One listening port that leads to `target`, a port on this machine, which may change."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.requests: list[Request] = []
        self.marked = asyncio.Event()  # the awaited event has come
        self.marked_at = 0.0
        self._marker: bytes | None = None
        self._place: Place = "nowhere"
        self._writers: set[asyncio.StreamWriter] = set()

    def cut_at(self, marker: bytes, place: Place) -> None:
        """Cuts the connection that brings the SSE event with `marker`: before, in or after that event."""
        self._marker, self._place = marker, place

    def cut_all(self) -> None:
        """Cuts every connection, in both directions, at once."""
        for writer in list(self._writers):
            writer.transport.abort()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry_requests(reader, far_writer))
                group.create_task(self._carry_answers(far_reader, writer, both))
        except* OSError:
            pass
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _carry_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pending = b""
        while data := await reader.read(65536):
            pending += data
            for head in _HEAD.finditer(pending):
                session = _SESSION.search(head[2])
                method = head[1].decode()
                self.requests.append(Request(time.time(), method, session[1].decode() if session else None))
                pending = pending[head.end() :]
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # ends the other direction too

    async def _carry_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, both: set[asyncio.StreamWriter]
    ) -> None:
        while data := await reader.read(65536):
            if self._marker is not None and self._marker in data:
                at = self._cutting_point(data, self._marker)
                self._marker = None
                self.marked_at = time.time()
                self.marked.set()
                if at is not None:
                    writer.write(data[:at])
                    await writer.drain()
                    # Bytes in the socket's buffer still arrive: close() of a drained transport loses nothing.
                    for each in both:
                        each.close()
                    return
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    def _cutting_point(self, data: bytes, marker: bytes) -> int | None:
        """Where to cut, in bytes. Servers and the proxy write an event at once, so that it comes in one piece."""
        found = data.index(marker)
        match self._place:
            case "before":
                blank = max(data.rfind(b"\n\n", 0, found), data.rfind(b"\n\r\n", 0, found))
                return 0 if blank < 0 else data.index(b"\n", blank + 1) + 1
            case "in":
                return found
            case "after":
                return next(m.end() for m in re.finditer(rb"\r?\n\r?\n", data) if m.start() > found)
            case _:
                return None
