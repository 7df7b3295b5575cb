"""Raw sockets: a client and a scripted upstream, byte for byte, and the proxy between them in the same event loop.

The messages are read by a parser of its own, so that nothing here agrees with the proxy by sharing its code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from epochgate.relay.client import ClientConnection
from epochgate.relay.exchange import work_on
from epochgate.relay.server import build_context, build_ledger
from epochgate.settings import Settings

PATIENCE = 5.0  # s that anything may take here before the test fails

Field = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer as it was on the wire; `framing` says how the body came."""

    start: bytes
    fields: list[Field]
    body: bytes
    framing: str  # none | sized | chunked | close

    @property
    def status(self) -> int:
        return int(self.start.split(b" ")[1])

    @property
    def target(self) -> bytes:
        return self.start.split(b" ")[1]

    def all(self, name: bytes) -> list[bytes]:
        return [value for field, value in self.fields if field.lower() == name.lower()]

    def get(self, name: bytes) -> bytes | None:
        return next(iter(self.all(name)), None)


class Peer:
    """One end of a TCP connection. What it does not expect fails the test after `PATIENCE`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.unread = b""
        self.all_read = bytearray()  # the beginning of what came, for the checks at the end

    async def send(self, *pieces: bytes) -> None:
        """Each piece arrives by itself: it is on its way when the next one is sent."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE):
            for piece in pieces:
                await loop.sock_sendall(self.sock, piece)
                if len(pieces) > 1:
                    await settle()

    async def receive(self, patience: float = PATIENCE) -> bytes:
        """What has come; empty at the peer's FIN. Raises ConnectionResetError at its RST."""
        if self.unread:
            data, self.unread = self.unread, b""
            return data
        async with asyncio.timeout(patience):
            data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 18)
        if len(self.all_read) < 1 << 16:
            self.all_read += data
        return data

    async def until(self, mark: bytes) -> bytes:
        """What comes up to this mark, which is part of it."""
        data = b""
        while mark not in data:
            more = await self.receive()
            if not more:
                raise AssertionError(f"the connection ended after {data[-200:]!r}")
            data += more
        found, _, rest = data.partition(mark)
        self.unread = rest
        return found + mark

    async def exactly(self, size: int) -> bytes:
        pieces: list[bytes] = []
        missing = size
        while missing:
            more = await self.receive()
            if not more:
                raise AssertionError(f"the connection ended {missing} bytes early")
            pieces.append(more[:missing])
            self.unread = more[missing:]
            missing -= len(pieces[-1])
        return b"".join(pieces)

    async def rest(self) -> bytes:
        """Everything up to the FIN. Raises ConnectionResetError at a RST."""
        pieces = []
        while data := await self.receive():
            pieces.append(data)
        return b"".join(pieces)

    async def gone(self, patience: float = PATIENCE) -> bool:
        """Wait for the end of the connection, clean or not; False if it still stands after that time."""
        try:
            while await self.receive(patience):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    async def message(self, *, bodiless: bool = False, is_request: bool = False) -> Message:
        """The next whole message."""
        start, fields = await self.head()
        named = {name.lower(): value for name, value in fields}
        code = 0 if is_request else int(start.split(b" ")[1])
        if bodiless or 100 <= code < 200 or code in (204, 304):
            return Message(start, fields, b"", "none")
        if b"transfer-encoding" in named:
            assert b"content-length" not in named
            return Message(start, fields, await self._chunks(), "chunked")
        if b"content-length" in named:
            return Message(start, fields, await self.exactly(int(named[b"content-length"])), "sized")
        if is_request:
            return Message(start, fields, b"", "none")
        return Message(start, fields, await self.rest(), "close")

    async def head(self) -> tuple[bytes, list[Field]]:
        """The next head alone."""
        start, *lines = (await self.until(b"\r\n\r\n"))[:-4].split(b"\r\n")
        pairs = [line.partition(b":") for line in lines]
        return start, [(name, value.strip(b" \t")) for name, _, value in pairs]

    async def request(self) -> Message:
        """The next request."""
        return await self.message(is_request=True)

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty for the last."""
        size = int((await self.until(b"\r\n"))[:-2], 16)
        data = await self.exactly(size)
        assert await self.exactly(2) == b"\r\n"
        return data

    async def _chunks(self) -> bytes:
        pieces = []
        while piece := await self.chunk():
            pieces.append(piece)
        return b"".join(pieces)

    def finish(self) -> None:
        """FIN: nothing more is sent, but read."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


class Relay:
    """The proxy, its clients and its upstream. `faults`: what the event loop's exception handler was told."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.faults: list[dict[str, Any]] = []
        self.peers: list[Peer] = []
        self.address: tuple[str, int]
        self.context: Any

    async def connect(self, *, receive_buffer: int = 0) -> Peer:
        """A client's connection to the proxy."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        return self._keep(Peer(sock))

    async def accept(self, patience: float = PATIENCE) -> Peer:
        """The next connection of the proxy to the upstream."""
        async with asyncio.timeout(patience):
            sock, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        return self._keep(Peer(sock))

    async def asked(self, *pieces: bytes) -> tuple[Peer, Peer, Message]:
        """A new client sends this; its connection, the upstream's, and the request that arrived there."""
        client = await self.connect()
        await client.send(*pieces)
        server = await self.accept()
        return client, server, await server.request()

    async def opened(self, session: bytes = b"S1") -> tuple[Peer, Peer]:
        """A client that has opened a session, and the upstream connection that it was opened on."""
        body = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'
        client, server, _ = await self.asked(post(body))
        result = b'{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-06-18","capabilities":{},"serverInfo":{}}}'
        await server.send(ok(result, b"Content-Type: application/json", b"Mcp-Session-Id: " + session))
        assert (await client.message()).status == 200
        return client, server

    async def unasked(self) -> bool:
        """Whether no connection to the upstream waits to be accepted."""
        await settle()
        with contextlib.suppress(OSError):  # nothing is there, or the test has closed the listener
            self._keep(Peer(self.listener.accept()[0]))
            return False
        return True

    def _keep(self, peer: Peer) -> Peer:
        self.peers.append(peer)
        return peer


async def settle() -> None:
    """Let everybody read what is on the wire: on the loopback, what was sent has arrived."""
    for _ in range(4):
        await asyncio.sleep(0)


def free_listener() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    listener.setblocking(False)
    return listener


@contextlib.asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[Relay]:
    """A proxy with these sections of the configuration changed; at the end nothing of it may be left over."""
    loop = asyncio.get_running_loop()
    gc.freeze()  # the collection at the end need not look at what was there before
    with free_listener() as listener:
        relay = Relay(listener)
        loop.set_exception_handler(lambda _, fault: relay.faults.append(fault))
        upstream = {"url": f"http://127.0.0.1:{listener.getsockname()[1]}"} | changes.pop("upstream", {})
        settings = Settings.model_validate({"upstream": upstream, **changes})
        ledger = build_ledger(settings)
        await ledger.start()
        relay.context = build_context(settings, ledger)

        handle = partial(work_on, relay.context)
        server = await loop.create_server(lambda: ClientConnection(handle, relay.context.clients), "127.0.0.1", 0)
        relay.address = server.sockets[0].getsockname()
        try:
            yield relay
        finally:
            server.close()
            while not await relay.unasked():
                pass  # a connection that the test did not want to hear of
            for peer in relay.peers:
                peer.close()
            await _end(relay)
            await ledger.close()
        for peer in relay.peers:
            assert not peer.all_read.startswith(b"HTTP/1.1 500"), "an error of ours became a 500"
        assert not relay.faults, relay.faults


async def _end(relay: Relay) -> None:
    """All clients and the upstream have gone: what is left over then was forgotten."""
    upstream = relay.context.upstream
    relay.context.holds.close_all()
    try:
        async with asyncio.timeout(PATIENCE):
            while relay.context.clients or upstream.connections or len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.002)
        relay.context.holds.close_all()  # those whose upstream ended them while their client was going (H3)
    finally:
        for connection in list(relay.context.clients):
            connection.abort()  # a test that fails here must not leave its event loop with open connections
        upstream.close()
        await settle()
        gc.collect()  # a fault that nobody looked at is told when its task or future is collected
        gc.unfreeze()


def get(target: bytes = b"/mcp", *fields: bytes, method: bytes = b"GET") -> bytes:
    """A request without a body."""
    return b"\r\n".join((b"%b %b HTTP/1.1" % (method, target), b"Host: proxy.test", *fields, b"", b""))


def post(body: bytes = b"", *fields: bytes) -> bytes:
    """A request with a sized body."""
    return get(b"/mcp", *fields, b"Content-Length: %d" % len(body), method=b"POST") + body


def chunked(*pieces: bytes) -> bytes:
    """A body in these chunks."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def ok(body: bytes = b"", *fields: bytes) -> bytes:
    """A sized answer."""
    return b"\r\n".join((b"HTTP/1.1 200 OK", *fields, b"Content-Length: %d" % len(body), b"", b"")) + body


CHUNKED_OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
