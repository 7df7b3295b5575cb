"""A faulty MCP server: its stream buffer is keyed by request and outlives the session that filled it.

The one tool adds up a bank statement and reports every row as an event. Each part by itself does what servers do:
sessions are evicted when they are idle for too long, an unknown session id gets a new session, a resume replays from
the buffer, and an unfinished call is carried on from the row that the buffer has reached. Together they splice two
executions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from aiohttp import web

ROWS = 1000
CUT_AFTER = 900  # the last row that is sent before the connection breaks
STALL_AFTER = 950  # the last row that goes to the buffer before the server is paused
PATH = "/mcp"


def amount(row: int) -> int:
    """The amount of a row (from 1) of the statement, in cents: anything from -90.00 to 110.10."""
    return row * 7919 % 20011 - 9000


def money(cents: int) -> str:
    """For people: `1,234.56`."""
    return f"{cents / 100:,.2f}"


class Stamp(StrEnum):
    """Whose epoch a message carries: the session's that buffered it, or the session's that sends it."""

    BUFFERED = "buffered"
    SENT = "sent"


@dataclass(slots=True)
class Session:
    """What `Mcp-Session-Id` names. `balance` is handler state: the running total in cents, zero at first."""

    epoch: int
    balance: int = 0
    touched: float = field(default_factory=time.monotonic)
    handlers: list[asyncio.Task[None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Event:
    """A message in the buffer, with the epoch of the session that wrote it."""

    id: int
    message: dict[str, Any]
    epoch: int


@dataclass(slots=True)
class Buffer:
    """The events of one tools/call. It belongs to the request: no session owns it."""

    call: int
    token: int
    events: list[Event] = field(default_factory=list)
    finished: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def append(self, event: Event, *, last: bool = False) -> None:
        """Add an event and wake those who follow."""
        async with self.changed:
            self.events.append(event)
            self.finished = last
            self.changed.notify_all()

    async def follow(self, index: int) -> AsyncGenerator[Event, None]:
        """Events from `index` on, those to come included, until the response."""
        while True:
            for event in self.events[index:]:
                index += 1
                yield event
            async with self.changed:
                while index == len(self.events):
                    if self.finished:
                        return
                    await self.changed.wait()


class StatementServer:
    """The server on a free port of 127.0.0.1, as an asynchronous context manager. It breaks down once, when told to."""

    def __init__(self, lifetime: float, stamp: Stamp) -> None:
        """`lifetime` is how long an idle session lives, in seconds."""
        self.lifetime = lifetime
        self.pause = lifetime * 1.3
        self.url = ""
        self._stamp = stamp
        self._sessions: dict[str, Session] = {}
        self._buffers: list[Buffer] = []
        self._epochs = 0
        self._last_id = 0
        self._intact = True
        self._cut = asyncio.Event()
        self._stalled = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._streaming: set[asyncio.Transport] = set()
        app = web.Application()
        app.router.add_post(PATH, self._post)
        app.router.add_get(PATH, self._get)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._awake.set()
        for session in self._sessions.values():
            await self._end(session)
        await self._runner.cleanup()

    async def break_down(self) -> None:
        """The connection breaks, more rows go to the buffer, then the whole server stands still for `pause` seconds."""
        self._awake.clear()
        for transport in self._streaming:
            transport.abort()
        self._cut.set()
        await self._stalled.wait()
        await asyncio.sleep(self.pause)
        self._intact = False
        for name, session in list(self._sessions.items()):
            if time.monotonic() - session.touched > self.lifetime:
                await self._end(self._sessions.pop(name))
        self._awake.set()

    async def _end(self, session: Session) -> None:
        for handler in session.handlers:
            handler.cancel()
        await asyncio.gather(*session.handlers, return_exceptions=True)

    def _create(self, name: str) -> Session:
        self._epochs += 1
        self._sessions[name] = session = Session(epoch=self._epochs)
        return session

    def _find(self, request: web.Request) -> Session:
        """The session of a request. The first mistake: one that is not there any more is created again, in silence."""
        name = request.headers["Mcp-Session-Id"]
        session = self._sessions.get(name) or self._create(name)
        session.touched = time.monotonic()
        return session

    async def _post(self, request: web.Request) -> web.StreamResponse:
        await self._awake.wait()
        message = await request.json()
        match message["method"]:
            case "initialize":
                return self._initialize(message)
            case "tools/call":
                session = self._find(request)
                buffer = Buffer(call=message["id"], token=message["params"]["_meta"]["progressToken"])
                self._buffers.append(buffer)
                session.balance = 0
                self._start(session, buffer)
                return await self._stream(request, session, buffer, 0)
            case _ if "id" not in message:
                return web.Response(status=202)
        error = {"code": -32601, "message": "Method not found"}
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        await self._awake.wait()
        cursor = int(request.headers["Last-Event-ID"])
        for buffer in self._buffers:
            for index, event in enumerate(buffer.events):
                if event.id == cursor:
                    # The second mistake: nobody asks whether this session is the one that filled this buffer.
                    session = self._find(request)
                    if not buffer.finished and not session.handlers:
                        self._start(session, buffer)
                    return await self._stream(request, session, buffer, index + 1)
        return web.Response(status=400, text="unknown event")

    def _initialize(self, message: dict[str, Any]) -> web.Response:
        name = uuid.uuid4().hex
        result = {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "statement", "version": "1"},
            "_meta": {"session_epoch": self._create(name).epoch},
        }
        body = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        return web.json_response(body, headers={"Mcp-Session-Id": name})

    def _start(self, session: Session, buffer: Buffer) -> None:
        session.handlers.append(asyncio.create_task(self._add_up(session, buffer)))

    async def _add_up(self, session: Session, buffer: Buffer) -> None:
        """The tool. The third mistake: the row comes from the buffer, the running total from the session."""
        for row in range(len(buffer.events) + 1, ROWS + 1):
            if self._intact and row == CUT_AFTER + 1:
                await self._cut.wait()
            if self._intact and row == STALL_AFTER + 1:
                self._stalled.set()
                await self._awake.wait()
            session.balance += amount(row)
            session.touched = time.monotonic()
            progress = {
                "progressToken": buffer.token,
                "progress": row,
                "total": ROWS,
                "message": money(session.balance),
            }
            await self._emit(session, buffer, {"method": "notifications/progress", "params": progress})
        text = {"type": "text", "text": f"The balance is {money(session.balance)}."}
        result = {"content": [text], "structuredContent": {"balance": session.balance}}
        await self._emit(session, buffer, {"id": buffer.call, "result": result}, last=True)

    async def _emit(self, session: Session, buffer: Buffer, message: dict[str, Any], *, last: bool = False) -> None:
        self._last_id += 1
        await buffer.append(Event(self._last_id, {"jsonrpc": "2.0", **message}, session.epoch), last=last)

    async def _stream(self, request: web.Request, session: Session, buffer: Buffer, index: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        transport = request.transport
        assert transport is not None  # it was there for the head
        self._streaming.add(transport)
        try:
            async with contextlib.aclosing(buffer.follow(index)) as events:
                async for event in events:
                    await response.write(self._block(event, session))
        except ConnectionError:
            pass  # the peer went away; what it has not read stays in the buffer
        finally:
            self._streaming.discard(transport)
        return response

    def _block(self, event: Event, sender: Session) -> bytes:
        epoch = event.epoch if self._stamp is Stamp.BUFFERED else sender.epoch
        key = "params" if "params" in event.message else "result"
        stamped = event.message | {key: event.message[key] | {"_meta": {"session_epoch": epoch}}}
        return f"id: {event.id}\ndata: {json.dumps(stamped)}\n\n".encode()
