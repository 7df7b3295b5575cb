"""The proxy in this process, between two transports that only count: no socket, no clock, no other process.

What is counted is therefore the same on every machine: writes to a transport (each is one system call), and calls of
functions of the package, and from it into C.
"""

from __future__ import annotations

import asyncio
import pathlib
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import epochgate
from epochgate.relay.client import ClientConnection
from epochgate.relay.exchange import work_on
from epochgate.relay.logs import set_up_logs
from epochgate.relay.server import build_context, build_ledger
from epochgate.relay.upstream import UpstreamConnection
from epochgate.settings import Settings

PACKAGE = str(pathlib.Path(epochgate.__file__).parent)
SESSION = b"bench-session"
INITIALIZED = (
    b'{"jsonrpc":"2.0","id":1,"result":{"_meta":{"session_epoch":"e-1"},'
    b'"protocolVersion":"2025-06-18","capabilities":{}}}'
)
RESULT = (
    b'{"jsonrpc":"2.0","id":%d,"result":{"_meta":{"session_epoch":"e-1"},"content":[{"type":"text","text":"hello"}]}}'
)


class CountingTransport(asyncio.Transport):
    """Keeps what is written to it. Its socket is a real one, on which nothing happens."""

    def __init__(self) -> None:
        self._pair = socket.socketpair()
        super().__init__({"socket": self._pair[0]})
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: object) -> None:
        self.writes.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True
        for sock in self._pair:
            sock.close()

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        raise AssertionError("nothing here is slow")

    def resume_reading(self) -> None:
        raise AssertionError("nothing here was paused")

    def get_write_buffer_size(self) -> int:
        return 0

    def take(self) -> list[bytes]:
        writes, self.writes = self.writes, []
        return writes


class Wire:
    """A client's connection to the proxy, and the proxy's connections to the upstream."""

    def __init__(self) -> None:
        settings = Settings.model_validate({"upstream": {"url": "http://127.0.0.1:9"}, "log": {"level": "warning"}})
        set_up_logs(settings.log)
        self.context = build_context(settings, build_ledger(settings))
        self.context.upstream.connect = self._connect
        self.upstreams: list[tuple[UpstreamConnection, CountingTransport]] = []
        self.client = ClientConnection(partial(work_on, self.context), self.context.clients)
        self.to_client = CountingTransport()
        self.client.connection_made(self.to_client)

    async def _connect(self) -> UpstreamConnection:
        connection = UpstreamConnection(self.context.upstream)
        transport = CountingTransport()
        connection.connection_made(transport)
        self.upstreams.append((connection, transport))
        return connection

    async def ask(self, method: str, body: bytes = b"", **fields: str) -> tuple[UpstreamConnection, CountingTransport]:
        """Send a request; the upstream connection that it came out of."""
        fields = {"Host": "bench", "Accept": "application/json, text/event-stream"} | fields
        if body:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        self.client.data_received(f"{method} /mcp HTTP/1.1\r\n{lines}\r\n".encode() + body)
        for _ in range(10):
            await asyncio.sleep(0)
            for connection, transport in self.upstreams:
                if transport.writes:
                    return connection, transport
        raise AssertionError("the request was not forwarded")

    async def answer(self, connection: UpstreamConnection, *reads: bytes) -> None:
        """The upstream's answer, read by read."""
        for read in reads:
            connection.data_received(read)
            self.context.backlog.settle()
            await self.settle()

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def initialize(self) -> None:
        body = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18"}}'
        connection, transport = await self.ask("POST", body)
        await self.answer(connection, json_answer(INITIALIZED))
        transport.take()
        self.to_client.take()

    async def call(self, number: int, answer: bytes) -> tuple[list[bytes], list[bytes]]:
        """One tool call of the session; what was written to the upstream, and to the client."""
        body = (
            b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hello"}}}'
            % number
        )
        connection, transport = await self.ask("POST", body, **session_fields())
        await self.answer(connection, answer)
        return transport.take(), self.to_client.take()

    async def open_stream(self) -> UpstreamConnection:
        connection, transport = await self.ask("GET", **session_fields())
        await self.answer(connection, stream_head())
        transport.take()
        self.to_client.take()
        return connection


def session_fields() -> dict[str, str]:
    return {"Mcp_Session_Id": SESSION.decode(), "MCP_Protocol_Version": "2025-06-18"}


def json_answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nServer: bench\r\nContent-Type: application/json\r\nMcp-Session-Id: %b\r\n"
    return (head + b"Content-Length: %d\r\n\r\n") % (SESSION, len(body)) + body


def stream_head() -> bytes:
    head = b"HTTP/1.1 200 OK\r\nServer: bench\r\nContent-Type: text/event-stream\r\nMcp-Session-Id: %b\r\n"
    return head % SESSION + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def one_event(number: int) -> bytes:
    """A whole answer: head, the event with the result, the end."""
    return (
        stream_head()
        + chunk(b"event: message\r\nid: %d\r\ndata: " % number + RESULT % number + b"\r\n\r\n")
        + b"0\r\n\r\n"
    )


def event(number: int, size: int, *, token: bool) -> bytes:
    """A notification of `size` bytes in a chunk of its own."""
    meta = b'"_meta":{"session_epoch":"e-1"},' if token else b""
    start = b'{"jsonrpc":"2.0","method":"notifications/message","params":{' + meta + b'"data":"'
    return chunk(b"id: %d\ndata: %b%b\n\n" % (number, start.ljust(size - 3, b"x"), b'"}}'))


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Calls of the package's functions, and of C functions from them, by name."""
    calls: Counter[str] = Counter()

    def see(frame: FrameType, what: str, argument: object) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if what == "call":
            calls[frame.f_code.co_qualname] += 1
        elif what == "c_call":
            calls[f"C {getattr(argument, '__qualname__', argument)}"] += 1

    sys.setprofile(see)
    try:
        yield calls
    finally:
        sys.setprofile(None)
