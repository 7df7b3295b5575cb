"""A scripted MCP server that knows the truth: which execution each event comes from, and which sessions it has lost.

Each event says in its data which execution of the handler wrote it (`life`) and its number in the stream. When a
session is lost, it is made anew under its id, while the buffers of its streams survive: the incident of section 1.

    /epoch    the server puts an epoch token on whatever it sends
    /plain    it has none
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast

KEPT = 400  # events of a stream that can be replayed
LENGTH = (40, 160)  # events of a call before its response
TICK = 0.01  # s

_HEADER = re.compile(rb"^(content-length|mcp-session-id|last-event-id): *([^\r\n]*)", re.MULTILINE)
_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LOST = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session not found"}}'
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_LOST),
    _LOST,
)
_PADDING = "The quick brown fox jumps over the lazy dog. " * 4


@dataclass(slots=True, eq=False)
class Stream:
    """One stream: its buffer outlives the execution that wrote it."""

    key: str
    session: Session
    life: int
    owed: int | None  # the id of the request that it will answer after `length` events; None: a standalone stream
    length: int
    last: int = 0
    events: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=KEPT))
    reader: Connection | None = None
    over: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """One session as it really is. `lost_at`: when it was last made anew, None: never."""

    id: str
    epoch: int | None
    lost_at: float | None = None
    ended: bool = False
    streams: dict[str, Stream] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return self.lost_at is None and not self.ended


class TrueServer:
    """The server. `interval`: s between two events of a stream."""

    def __init__(self, seed: int, interval: float = 0.2, padding: int = 60) -> None:
        self.port = 0
        self.sessions: dict[str, Session] = {}
        self.connections: set[Connection] = set()
        self.interval = interval
        self.down = False
        self.events = 0
        self.executions = 0
        self._padding = _PADDING[:padding]
        self._chance = random.Random(seed)
        self._due: list[tuple[float, int, Stream]] = []
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        await self._listen()
        self._task = asyncio.create_task(self._talk())

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.abort()

    # -- what befalls it

    def lose(self, session: Session) -> None:
        """The session is evicted; whoever comes with its id gets a new one, attached to the surviving buffers."""
        session.lost_at = time.time()
        if session.epoch is not None:
            session.epoch += 1
        for stream in session.streams.values():
            stream.life = self._execution()
            if stream.reader is not None:
                stream.reader.abort()

    async def restart(self, seconds: float) -> None:
        """It is away for a time, and all of its sessions are lost."""
        self.down = True
        self._stop_listening()
        for session in self.sessions.values():
            self.lose(session)
        await asyncio.sleep(seconds)
        await self._listen()
        self.down = False

    def retire(self, session_id: str) -> None:
        """Nobody will ask for this session any more."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            for stream in session.streams.values():
                if stream.reader is not None:
                    stream.reader.abort()

    # -- what it says

    def _execution(self) -> int:
        self.executions += 1
        return self.executions

    def open_session(self, *, with_epoch: bool) -> Session:
        session_id = f"{len(self.sessions):x}-{self._chance.getrandbits(80):020x}"
        session = self.sessions[session_id] = Session(session_id, 1 if with_epoch else None)
        return session

    def open_stream(self, session: Session, owed: int | None) -> Stream:
        key = f"{self._chance.getrandbits(48):012x}"
        stream = Stream(key, session, self._execution(), owed, self._chance.randint(*LENGTH))
        session.streams[key] = stream
        first = asyncio.get_running_loop().time() + self._chance.random() * min(self.interval, 0.2)
        heapq.heappush(self._due, (first, stream.life, stream))
        return stream

    async def _talk(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            while self._due and self._due[0][0] <= now:
                at, number, stream = heapq.heappop(self._due)
                if self.sessions.get(stream.session.id) is stream.session and not stream.session.ended:
                    self._say(stream)
                    if not stream.over:
                        heapq.heappush(self._due, (max(at + self.interval, now), number, stream))
            await asyncio.sleep(TICK)

    def _say(self, stream: Stream) -> None:
        stream.last += 1
        epoch = stream.session.epoch
        meta = {} if epoch is None else {"_meta": {"session_epoch": epoch}}
        said = {"life": stream.life, "n": stream.last}
        if stream.owed is not None and stream.last >= stream.length:
            stream.over = True
            message = {"jsonrpc": "2.0", "id": stream.owed, "result": {**said, "content": [], **meta}}
        else:
            params = {**said, "data": self._padding, **meta}
            message = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        text = json.dumps(message, separators=(",", ":"))
        stream.events.append((stream.last, f"id: {stream.key}-{stream.last}\ndata: {text}\n\n".encode()))
        self.events += 1
        if stream.reader is not None:
            stream.reader.go_on()


class Connection(asyncio.Protocol):
    """One connection, on which one request is worked on at a time."""

    def __init__(self, server: TrueServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._buffer = b""
        self._paused = False
        self._stream: Stream | None = None
        self._position = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._leave()

    def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None and stream.reader is self:
            stream.reader = None

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.go_on()

    def abort(self) -> None:
        self._leave()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0 and self._stream is None:
            fields = {name: value.strip() for name, value in _HEADER.findall(self._buffer[: end + 2].lower())}
            stop = end + 4 + int(fields.get(b"content-length", 0))
            if len(self._buffer) < stop:
                return
            head, body = self._buffer[:end], self._buffer[end + 4 : stop]
            self._buffer = self._buffer[stop:]
            self._answer(head, fields, body)

    def _answer(self, head: bytes, fields: dict[bytes, bytes], body: bytes) -> None:
        method, target, _ = head.split(b" ", 2)
        message = json.loads(body) if body else {}
        if message.get("method") == "initialize":
            self._initialize(message["id"], with_epoch=target == b"/epoch")
            return
        session = self._server.sessions.get(fields.get(b"mcp-session-id", b"").decode())
        if session is None or session.ended:
            self._transport.write(_NOT_FOUND)
        elif method == b"DELETE":
            session.ended = True
            self._transport.write(_JSON % (b"", 2, b"{}"))
        elif method == b"POST" and message["method"] == "tools/list":
            meta = {} if session.epoch is None else {"_meta": {"session_epoch": session.epoch}}
            text = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": [], **meta}}).encode()
            self._transport.write(_JSON % (b"", len(text), text))
        elif method == b"POST":
            self._begin(self._server.open_stream(session, message["id"]), 0)
        elif b"last-event-id" in fields:
            key, _, number = fields[b"last-event-id"].decode().partition("-")
            stream = session.streams.get(key)
            if stream is None:
                self._transport.write(_NOT_FOUND)
            else:
                self._begin(stream, int(number))
        else:
            self._begin(self._server.open_stream(session, None), 0)

    def _initialize(self, request_id: int, *, with_epoch: bool) -> None:
        session = self._server.open_session(with_epoch=with_epoch)
        result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "truth", "version": "1"}}
        if with_epoch:
            result["_meta"] = {"session_epoch": session.epoch}
        text = json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result}).encode()
        self._transport.write(_JSON % (b"Mcp-Session-Id: %b\r\n" % session.id.encode(), len(text), text))

    def _begin(self, stream: Stream, position: int) -> None:
        """One reader for each stream: a newer one takes it over."""
        if stream.reader is not None:
            stream.reader.abort()
        stream.reader = self
        self._stream = stream
        self._position = position
        self._transport.write(_STREAM)
        self.go_on()

    def go_on(self) -> None:
        """Send what has not been sent of the stream."""
        stream = self._stream
        if stream is None or self._paused or (self._position >= stream.last and not stream.over):
            return
        new = [block for number, block in stream.events if number > self._position]
        self._position = stream.last
        data = b"".join(b"%x\r\n%b\r\n" % (len(block), block) for block in new)
        if stream.over:
            data += b"0\r\n\r\n"
            self._leave()
        if data:
            self._transport.write(data)
        if stream.over and self._buffer:
            self.data_received(b"")
