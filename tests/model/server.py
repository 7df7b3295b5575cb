"""A server with sessions, streams and buffers, as good or as bad as it is told to be."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from epochgate.guard.mcp import Headers

SESSION_LOST = (
    (404, b'{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"},"id":null}'),
    (404, b"session not found\n"),
    (400, b"Bad Request: No valid session ID provided"),
)
EVENT_NOT_FOUND = (400, b'{"jsonrpc":"2.0","error":{"code":-32000,"message":"Invalid event ID format"},"id":null}')


@dataclass(frozen=True)
class Traits:
    """What a server is like."""

    epochs: str = "emission"  # none | emission | sending | header: where a token is stamped
    ids: str = "session"  # session | stream | prefixed | opaque | process: who counts them
    replay: str = "exclusive"  # exclusive | inclusive | from start
    priming: bool = False
    alike: bool = False  # every call logs the same lines
    handshake_token: bool = True
    same_id_again: bool = False  # a new session gets the id of the lost one


class Receiver(Protocol):
    """The proxy's end of a connection."""

    def receive(self, data: bytes) -> None:
        """Bytes have come."""

    def upstream_ended(self) -> None:
        """No more will come."""


@dataclass
class Connection:
    """An answer that is an event stream."""

    headers: Headers
    receiver: Receiver | None = None
    backlog: list[bytes] = field(default_factory=list)
    open: bool = True
    ends: bool = False  # after what is in the backlog

    def start(self, receiver: Receiver) -> None:
        """Somebody listens from now on."""
        self.receiver = receiver
        for data in self.backlog:
            if self.open:
                receiver.receive(data)
        if self.ends:
            self.end()

    def send(self, data: bytes) -> None:
        if self.receiver is None:
            self.backlog.append(data)
        elif self.open:
            self.receiver.receive(data)

    def end(self) -> None:
        """The server ends it, or it breaks."""
        if self.open:
            self.open = False
            if self.receiver is not None:
                self.receiver.upstream_ended()

    def drop(self) -> None:
        """The proxy ends it."""
        self.open = False


@dataclass(frozen=True)
class Answer:
    """What a request is answered with: a stream, or a status and a body."""

    status: int = 200
    body: bytes = b""
    stream: Connection | None = None


@dataclass(frozen=True)
class Emitted:
    """An event as a handler made it; its bytes are made when it is sent."""

    name: str
    text: str | None  # a notification, else a response or a priming event
    answers: tuple[int, ...]
    execution: int


@dataclass(eq=False)
class Buffer:
    """What a stream keeps for its resumes, and the connection that it writes to."""

    key: int
    owes: tuple[int, ...]
    events: list[Emitted] = field(default_factory=list)
    count: int = 0
    lines: int = 0
    connection: Connection | None = None
    done: bool = False


class Server:
    """One process. `execution` tells the lives of the one session that is alive apart."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.execution = 0
        self.alive: bytes | None = None  # the id of the session
        self.lost_as = SESSION_LOST[0]
        self.buffers: dict[int, Buffer] = {}
        self.names: dict[str, Buffer] = {}
        self.sessions = 0
        self.count = 0
        self.keys = 0
        self.requests = 0
        self.spoil: Callable[[list[Emitted]], list[Emitted]] | None = None  # what becomes of the next replay

    # -- sessions

    def initialize(self) -> tuple[bytes, Headers, bytes]:
        """A new session: its id, the head and the body of the answer."""
        self.execution += 1
        self.forget_buffers()
        if self.alive is None and not (self.traits.same_id_again and self.sessions):
            self.sessions += 1
        self.alive = b"session-%d" % self.sessions
        if self.traits.ids != "process":
            self.count = 0
        result: dict[str, object] = {"protocolVersion": "2025-06-18", "capabilities": {}}
        if self.traits.handshake_token and self.traits.epochs in ("emission", "sending"):
            result["_meta"] = {"session_epoch": self.execution}
        headers = self._headers() if self.traits.handshake_token else ()
        return self.alive, headers, json.dumps({"jsonrpc": "2.0", "id": 0, "result": result}).encode()

    def evict(self) -> None:
        """The session is gone."""
        self.alive = None
        self.cut_all()

    def recreate(self, *, keep_buffers: bool, keep_count: bool) -> None:
        """The session is made anew under its id by whatever comes next; nobody is told."""
        self.execution += 1
        if not keep_count:
            self.count = 0
        if self.traits.epochs in ("none", "header"):  # else a connection would outlive what can be told on it
            self.cut_all()
        if not keep_buffers:
            lost = list(self.buffers.values())
            self.forget_buffers()
            for buffer in lost:  # its handler runs anew, and is about as far
                fresh = self.buffers[buffer.key] = Buffer(buffer.key, buffer.owes)
                for _ in buffer.events:
                    self.note(fresh)

    def cut_all(self) -> None:
        for buffer in self.buffers.values():
            self.cut(buffer)

    def forget_buffers(self) -> None:
        self.cut_all()
        self.buffers.clear()
        self.names.clear()

    # -- requests

    def post(self, session: bytes, owes: tuple[int, ...]) -> Answer:
        """A call; no requests: a notification."""
        self.requests += 1
        if session != self.alive:
            return Answer(*self.lost_as)
        return self._open(owes) if owes else Answer(202)

    def listen(self, session: bytes) -> Answer:
        """A standalone GET."""
        self.requests += 1
        return self._open(()) if session == self.alive else Answer(*self.lost_as)

    def _open(self, owes: tuple[int, ...]) -> Answer:
        self.keys += 1
        buffer = self.buffers[self.keys] = Buffer(self.keys, owes)
        buffer.connection = Connection(self._headers())
        if self.traits.priming:
            self.prime(buffer)
        return Answer(stream=buffer.connection)

    def resume(self, session: bytes, cursor: bytes) -> Answer:
        """A GET with a cursor. A fresh execution knows no old streams, and takes the cursor for one of its own."""
        self.requests += 1
        if session != self.alive:
            return Answer(*self.lost_as)
        buffer = self.names.get(cursor.decode())
        if buffer is None:
            return Answer(*EVENT_NOT_FOUND)
        self.cut(buffer)
        connection = buffer.connection = Connection(self._headers())
        at = max(n for n, event in enumerate(buffer.events) if event.name == cursor.decode())
        begin = {"exclusive": at + 1, "inclusive": at, "from start": 0}[self.traits.replay]
        events = buffer.events[begin:]
        if self.spoil is not None:
            events = self.spoil(events)
            self.spoil = None
        for event in events:
            connection.send(self.block(event))
        connection.ends = buffer.done
        return Answer(stream=connection)

    # -- streams

    def cut(self, buffer: Buffer) -> None:
        """The connection of a stream breaks."""
        connection, buffer.connection = buffer.connection, None
        if connection is not None:
            connection.end()

    def prime(self, buffer: Buffer) -> None:
        self._emit(buffer, None, ())

    def note(self, buffer: Buffer) -> None:
        """A notification of the handler."""
        buffer.lines += 1
        text = f"step {buffer.lines}" if self.traits.alike else f"{buffer.key}.{buffer.lines}"
        self._emit(buffer, text, ())

    def respond(self, buffer: Buffer) -> None:
        """The handler is done: all responses at once where there are several, and the end of the stream."""
        self._emit(buffer, None, buffer.owes)
        buffer.done = True
        self.cut(buffer)

    def _emit(self, buffer: Buffer, text: str | None, answers: tuple[int, ...]) -> None:
        self.count += 1
        buffer.count += 1
        name = {
            "stream": f"{buffer.count}",
            "prefixed": f"s{buffer.key}-{buffer.count}",
            "opaque": f"{(self.execution * 7919 + self.count * 104729) % 1000003:x}-q",
        }.get(self.traits.ids, f"{self.count}")
        event = Emitted(name, text, answers, self.execution)
        buffer.events.append(event)
        self.names[name] = buffer
        if buffer.connection is not None:
            buffer.connection.send(self.block(event))

    def said(self, event: Emitted) -> list[str]:
        """What the messages of an event say, token aside."""
        if event.answers:
            return [f"{n} of {event.execution}" for n in event.answers]
        if event.text is None:
            return []
        return [event.text if self.traits.alike else f"{event.text} of {event.execution}"]

    def block(self, event: Emitted) -> bytes:
        """The bytes of an event, as they are sent now."""
        head = b"id: %b\n" % event.name.encode()
        if event.text is None and not event.answers:
            return head + b"data:\n\n"
        stamp = {"emission": event.execution, "sending": self.execution}.get(self.traits.epochs)
        meta = {} if stamp is None else {"_meta": {"session_epoch": stamp}}
        if event.answers:
            results = [{"data": text} | meta for text in self.said(event)]
            messages = [{"jsonrpc": "2.0", "id": n, "result": r} for n, r in zip(event.answers, results, strict=True)]
            data = json.dumps(messages if len(messages) > 1 else messages[0])
        else:
            params = {"data": self.said(event)[0]} | meta
            data = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": params})
        return head + b"data: %b\n\n" % data.encode()

    def _headers(self) -> Headers:
        return [(b"Mcp-Session-Epoch", b"%d" % self.execution)] if self.traits.epochs == "header" else []
