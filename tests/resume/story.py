"""The usual beginning of a resume, told with raw sockets: a session, a call, the events that its client has read.

Every request reaches the upstream on a connection of its own: all answers here say `Connection: close`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from relay.wire import PATIENCE, Field, Message, Peer, Relay, chunked, get, post

OVERLAP = {"accept": ["connection", "epoch", "overlap"]}
SESSION = b"Mcp-Session-Id: S1"
JSON = b"Content-Type: application/json"
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def note(n: object, epoch: object = None) -> bytes:
    """A notification that says `n`, under this epoch token."""
    params: dict[str, object] = {"n": n}
    if epoch is not None:
        params["_meta"] = {"session_epoch": epoch}
    return compact({"jsonrpc": "2.0", "method": "notifications/message", "params": params})


def result(call: object, epoch: object = None) -> bytes:
    """The response to a call."""
    body = {} if epoch is None else {"_meta": {"session_epoch": epoch}}
    return compact({"jsonrpc": "2.0", "id": call, "result": body})


def event(event_id: object, data: bytes, eol: bytes = b"\n") -> bytes:
    """One block; `event_id` None: without an id."""
    lines = ([] if event_id is None else [b"id: " + str(event_id).encode()]) + [b"data: " + data, b"", b""]
    return eol.join(lines)


def notes(*numbers: int, epoch: object = None) -> bytes:
    """Notifications whose ids are their numbers."""
    return b"".join(event(n, note(n, epoch)) for n in numbers)


def response(call: object, epoch: object = None) -> bytes:
    """The event that answers a call."""
    return event(f"r{call}", result(call, epoch))


def priming(event_id: object) -> bytes:
    return event(event_id, b"")


def part(data: bytes) -> bytes:
    """A chunk, and more may come."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def reply(status: int, body: bytes = b"", *fields: bytes) -> bytes:
    """A sized answer that ends its connection."""
    start = b"HTTP/1.1 %d Whatever" % status
    lines = (start, *fields, b"Connection: close", b"Content-Length: %d" % len(body), b"", b"")
    return b"\r\n".join(lines) + body


def coded(coding: bytes) -> bytes:
    """The head of an event stream in this content coding."""
    return STREAM[:-2] + b"Content-Encoding: " + coding + b"\r\n\r\n"


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


class Answer:
    """What a client gets on its connection, as it comes; `data` is the body so far."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.start = b""
        self.fields: list[Field] = []
        self.data = bytearray()
        self.end = ""  # clean | aborted, once it is known
        self._left = -1  # of a sized body; -1: chunked

    @property
    def status(self) -> int:
        return int(self.start.split(b" ")[1])

    def get(self, name: bytes) -> bytes | None:
        return next((value for field, value in self.fields if field.lower() == name.lower()), None)

    async def begin(self) -> Answer:
        """Wait for the head."""
        if not self.start:
            self.start, self.fields = await self.peer.head()
            length = self.get(b"Content-Length")
            self._left = 0 if self.status == 204 else -1 if length is None else int(length)
        return self

    async def until(self, mark: bytes) -> Answer:
        """Wait until this has come in the body."""
        await self.begin()
        while mark not in self.data:
            await self._more()
            assert not self.end or mark in self.data, f"{self.start!r} ended {self.end}: {bytes(self.data[-300:])!r}"
        return self

    async def rest(self) -> bytes:
        """Wait for the end; the whole body."""
        await self.begin()
        while not self.end:
            await self._more()
        return bytes(self.data)

    async def _more(self) -> None:
        try:
            if self._left > 0:
                piece = await self.peer.receive()
                self.data += piece
                self._left -= len(piece)
                self.end = "" if piece else "aborted"
            elif self._left == 0:
                self.end = "clean"
            elif piece := await self.peer.chunk():
                self.data += piece
            else:
                self.end = "clean"
        except (AssertionError, ConnectionError):  # the connection ended within the body
            self.end = "aborted"

    async def error(self) -> dict[str, Any]:
        """The whole answer is a JSON-RPC error: its `error` member."""
        return dict(json.loads(await self.rest())["error"])

    async def told(self) -> list[tuple[object, str]]:
        """The pending calls that the end of the stream fails, each with its reason (F4, F5)."""
        await self.rest()
        lines = [line[6:] for line in bytes(self.data).split(b"\n") if line.startswith(b'data: {"jsonrpc"')]
        messages = [json.loads(line) for line in lines]
        return [(m["id"], m["error"]["data"]["reason"]) for m in messages if "error" in m]


class Story:
    """A session with a stream that has brought some events; both ends in hand."""

    def __init__(self, relay: Relay, fields: tuple[bytes, ...] = ()) -> None:
        self.relay = relay
        self.fields = fields  # of every request of the client
        self.answer: Answer
        self.server: Peer

    @property
    def telemetry(self) -> Any:
        return self.relay.context.telemetry

    @property
    def session(self) -> Any:
        self.relay.context.backlog.settle()
        return self.relay.context.ledger.get(b"S1", time.time())

    @property
    def flow(self) -> Any:
        """The only stream that flows."""
        (flow,) = self.relay.context.streams
        return flow

    @property
    def held(self) -> int:
        return len(self.relay.context.holds)

    def verdicts(self) -> list[str]:
        """The reason of each verdict so far."""
        return [decided.reason for decided in self.telemetry.decided]

    # -- requests

    async def open(self, epoch: object = None, *more: bytes, session: bytes = SESSION) -> Answer:
        """The client initializes, and is granted the session."""
        body = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'
        asking, server, _ = await self.ask(post(body, *self.fields))
        granted = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
        if epoch is not None:
            granted["_meta"] = {"session_epoch": epoch}
        await server.send(reply(200, compact({"jsonrpc": "2.0", "id": 0, "result": granted}), JSON, session, *more))
        await asking.rest()
        return asking

    async def ask(self, data: bytes) -> tuple[Answer, Peer, Message]:
        """A new client sends this; what it will get, the connection at the upstream, the request that came there."""
        client = await self.send(data)
        server, request = await self.asked()
        return client, server, request

    async def send(self, data: bytes) -> Answer:
        """A new client sends this."""
        client = await self.relay.connect()
        await client.send(data)
        return Answer(client)

    async def asked(self) -> tuple[Peer, Message]:
        """The next request at the upstream."""
        server = await self.relay.accept()
        return server, await server.request()

    def call(self, *calls: object, fields: tuple[bytes, ...] = ()) -> bytes:
        """A POST with these requests; one alone is no batch."""
        asked = [{"jsonrpc": "2.0", "id": call, "method": "tools/call", "params": {}} for call in calls]
        return post(compact(asked if len(asked) > 1 else asked[0]), SESSION, *(fields or self.fields))

    def again(self, cursor: object, *more: bytes, fields: tuple[bytes, ...] | None = None) -> bytes:
        """The GET that resumes after `cursor`; None: a new standalone stream."""
        last = () if cursor is None else (b"Last-Event-ID: " + str(cursor).encode(),)
        return get(b"/mcp", SESSION, *last, *(self.fields if fields is None else fields), *more)

    async def resume(self, cursor: object, *more: bytes, fields: tuple[bytes, ...] | None = None) -> Answer:
        """A new client resumes; whether the upstream hears of it is another question."""
        return await self.send(self.again(cursor, *more, fields=fields))

    async def resumed(self, cursor: object, answer: bytes = b"", *more: bytes) -> tuple[Answer, Peer, Message]:
        """A new client resumes, and the upstream answers this."""
        client, server, request = await self.ask(self.again(cursor, *more))
        if answer:
            await server.send(answer)
        return client, server, request

    async def other(self, answer: bytes) -> Answer:
        """Another call of the session, answered like this."""
        client, server, _ = await self.ask(self.call(99))
        await server.send(answer)
        return client

    async def fenced(self, reason: str) -> None:
        """New requests get the 404 without reaching the upstream (F1, F2)."""
        for data in (self.call(77), get(b"/mcp", SESSION, method=b"DELETE")):
            answer = await self.send(data)
            assert (await answer.error())["data"] == {"reason": reason}
            assert answer.status == 404
        assert await self.relay.unasked()

    async def alive(self) -> None:
        """The session is used like any other."""
        assert self.session.fence is None
        answer = await self.other(reply(200, result(99), JSON))
        assert (await answer.rest(), answer.status) == (result(99), 200)

    # -- what becomes of the stream

    async def leave(self) -> None:
        """The client vanishes, and the stream is held."""
        self.answer.peer.reset()
        await until(lambda: self.held == 1)

    async def cut(self) -> None:
        """The upstream breaks the stream off, and the client knows."""
        self.server.reset()
        await self.answer.rest()
        assert self.answer.end == "aborted"

    async def pause(self) -> None:
        """The upstream ends the stream cleanly, though it is not done."""
        await self.server.send(LAST_CHUNK)
        await self.answer.rest()
        assert self.answer.end == "clean"


async def began(
    relay: Relay,
    *,
    epoch: object = None,
    calls: Iterable[object] = (5,),
    events: bytes | None = None,
    fields: tuple[bytes, ...] = (),
    head: bytes = STREAM,
) -> Story:
    """A session under this epoch, one stream, and its first events (1 to 3), which the client has read.

    Without `calls` it is a standalone stream.
    """
    story = Story(relay, fields)
    await story.open(epoch)
    calls = tuple(calls)
    story.answer, story.server, _ = await story.ask(story.call(*calls) if calls else story.again(None))
    events = notes(1, 2, 3, epoch=epoch) if events is None else events
    await story.server.send(head + (part(events) if events else b""))
    await story.answer.until(events)
    return story


async def until(condition: Callable[[], object]) -> None:
    """Wait for it."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def stream(*pieces: bytes) -> bytes:
    """A whole event stream, ended cleanly."""
    return STREAM + chunked(*pieces)
