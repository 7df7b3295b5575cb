"""What clients leave behind: 3 s after they went, every descriptor has gone too (H1, with a shorter `hold.time`)."""

from __future__ import annotations

import asyncio
import os
import pathlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from bench.wire import INITIALIZED, SESSION, chunk, json_answer, session_fields, stream_head
from epochgate.relay.client import ClientConnection
from epochgate.relay.context import Context
from epochgate.relay.exchange import work_on
from epochgate.relay.server import build_context, build_ledger
from epochgate.settings import Settings

STREAMS = 50
GONE_WITHIN = 3.0  # s
RESET = struct.pack("ii", 1, 0)


def descriptors() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


class QuietServer(asyncio.Protocol):
    """An upstream: a POST opens a session, a GET a stream of one event that stays open; `/bare` gives it no id."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST"):
            self.transport.write(json_answer(INITIALIZED).replace(SESSION, os.urandom(6).hex().encode() + b"0"))
        elif data.startswith(b"GET"):
            event = b"data: {}\n\n" if b" /bare " in data else b"id: 1\ndata: {}\n\n"
            self.transport.write(stream_head() + chunk(event))


@asynccontextmanager
async def proxy() -> AsyncIterator[tuple[Context, int]]:
    """The proxy in this process before such a server, and its port."""
    loop = asyncio.get_running_loop()
    upstream = await loop.create_server(QuietServer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
    policy = {"resume": {"hold": {"time": "1s"}}}
    settings = Settings.model_validate({"upstream": {"url": url}, "policies": [policy], "log": {"level": "warning"}})
    context = build_context(settings, build_ledger(settings))
    server = await loop.create_server(
        lambda: ClientConnection(partial(work_on, context), context.clients), "127.0.0.1", 0
    )
    try:
        yield context, server.sockets[0].getsockname()[1]
    finally:
        context.upstream.close()
        for connection in list(context.clients):
            connection.abort()
        server.close()
        upstream.close()


async def open_stream(port: int, path: str) -> asyncio.StreamWriter:
    """A client that has read the first event of its session's stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}'
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    session = head.partition(b"Mcp-Session-Id: ")[2].partition(b"\r\n")[0].decode()
    await reader.readexactly(len(INITIALIZED))
    names = session_fields() | {"Mcp_Session_Id": session}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in names.items())
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
    await reader.readuntil(b"data: {}\n\n")
    return writer


def leave(writer: asyncio.StreamWriter) -> None:
    """An ordinary end of the connection: a FIN."""
    writer.close()


def vanish(writer: asyncio.StreamWriter) -> None:
    """A process that was killed with bytes unread: a RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


@pytest.mark.parametrize("go", [leave, vanish])
@pytest.mark.parametrize("path", ["/held", "/bare"])
async def test_descriptors_are_back_after_the_clients_left(
    path: str, go: Callable[[asyncio.StreamWriter], None]
) -> None:
    async with proxy() as (context, port):
        before = descriptors()
        writers = [await open_stream(port, path) for _ in range(STREAMS)]
        assert descriptors() >= before + 4 * STREAMS  # client, proxy twice, upstream: all ends are in this process
        for writer in writers:
            go(writer)
        async with asyncio.timeout(GONE_WITHIN):
            while descriptors() > before:
                await asyncio.sleep(0.02)
        assert context.telemetry.open_streams == 0
        assert len(context.holds) == 0
