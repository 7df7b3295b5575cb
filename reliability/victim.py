"""The server of the attacks: it answers whatever is asked of it, however much. `python -m reliability.victim PORT`.

The path says what is wanted; `size` in the query is in bytes.

    POST initialize           grants a session; its answers have an epoch token
    POST any other            a JSON response
    POST /call                the response as a stream of one event
    POST /read                reads the whole body, then answers; /stall never reads it
    GET  /one                 a stream of one event of `size` bytes, after a first small one
    GET  /events              a stream of events of 1 KB, `size` bytes in all
    GET  /endless             an event without an end
    DELETE                    a JSON response
    GET  /bomb                a stream with `Content-Encoding: gzip`: an event of `size` bytes, a thousandth on the wire
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import zlib
from typing import cast

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)").search
_SESSION = re.compile(rb"mcp-session-id: *([^\r]+)").search
_CURSOR = re.compile(rb"last-event-id: *(\d+)").search
_SIZE = re.compile(rb"size=(\d+)").search
_ID = re.compile(rb'"id": ?(\d+)').search
_META = b'"_meta":{"session_epoch":"e1"}'
_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n%bTransfer-Encoding: chunked\r\n\r\n"
_EVENT = b'id: %d\ndata: {"jsonrpc":"2.0","method":"notifications/message","params":{' + _META + b',"data":"%b"}}\n\n'
_PIECE = b"x" * 65536
_LAST = b"0\r\n\r\n"
PACE = 0.02  # s between two pieces of an event without an end

_granted = itertools.count()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._body = -1  # bytes of a body that are still to be read and dropped
        self._open = asyncio.Event()
        self._open.set()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._open.clear()

    def resume_writing(self) -> None:
        self._open.set()

    def data_received(self, data: bytes) -> None:
        if self._body >= 0:
            self._body -= len(data)
            if self._body < 0:
                self._transport.write(_JSON % (b"", 2, b"{}"))
            return
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            lower = head.lower()
            target = head.split(b" ", 2)[1]
            if target.startswith((b"/read", b"/stall")):
                if target.startswith(b"/stall"):
                    self._transport.pause_reading()
                    return
                found = _LENGTH(lower)
                self._body = int(found[1]) - (len(self._buffer) - end - 4) - 1 if found else 1 << 62
                self._buffer.clear()
                return
            found = _LENGTH(lower)
            stop = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < stop:
                return
            body = bytes(self._buffer[end + 4 : stop])
            del self._buffer[:stop]
            self._answer(not head.startswith(b"GET"), target, lower, body)

    def _answer(self, is_post: bool, target: bytes, lower: bytes, body: bytes) -> None:
        found = _ID(body)
        number = found[1] if found else b"0"
        if b'"initialize"' in body:
            granted = b"Mcp-Session-Id: %08x-%08x\r\n" % (next(_granted), id(self) & 0xFFFFFFFF)
            info = b'"protocolVersion":"2025-06-18","capabilities":{},"serverInfo":{"name":"v","version":"1"},'
            text = b'{"jsonrpc":"2.0","id":%b,"result":{%b%b}}' % (number, info, _META)
            self._transport.write(_JSON % (granted, len(text), text))
        elif is_post and target.startswith(b"/call"):
            data = b'id: 1\ndata: {"jsonrpc":"2.0","id":%b,"result":{"content":[],%b}}\n\n' % (number, _META)
            self._transport.write(_STREAM % b"" + chunk(data) + _LAST)
        elif is_post:
            text = b'{"jsonrpc":"2.0","id":%b,"result":{"content":[],%b}}' % (number, _META)
            self._transport.write(_JSON % (b"", len(text), text))
        elif target.startswith((b"/one", b"/events", b"/endless", b"/bomb")):
            found = _SIZE(target)
            cursor = _CURSOR(lower)
            after = int(cursor[1]) if cursor else 0
            self._task = asyncio.get_running_loop().create_task(
                self._stream(target, int(found[1]) if found else 0, after)
            )
        else:
            self._transport.write(_STREAM % b"" + chunk(_EVENT % (1, b"first")))

    async def _stream(self, target: bytes, size: int, after: int) -> None:
        write = self._transport.write
        if after and target.startswith(b"/bomb"):
            await self._bomb(size, after + 1)
            return
        write(_STREAM % b"")
        if not after:
            write(chunk(_EVENT % (1, b"first")))
            if b"first=1" in target:
                write(_LAST)  # the rest is for who resumes
                return
        if target.startswith(b"/events"):
            block = b"".join(chunk(_EVENT % (number, b"x" * 900)) for number in range(2, 66))
            numbers = itertools.count(after + 2)
            for _ in range(size // len(block)):
                write(b"".join(chunk(_EVENT % (number, b"x" * 900)) for number in itertools.islice(numbers, 64)))
                await self._open.wait()
                await asyncio.sleep(0)
        else:
            write(chunk(b"id: %d\ndata: " % (after + 2)))
            endless = target.startswith(b"/endless")
            for _ in itertools.count() if endless else range(size // len(_PIECE)):
                write(chunk(_PIECE))
                await self._open.wait()
                await asyncio.sleep(PACE if endless else 0)
            write(chunk(b"\n\n"))
        write(_LAST)

    async def _bomb(self, size: int, number: int) -> None:
        """An event whose data is one letter, again and again."""
        self._transport.write(_STREAM % b"Content-Encoding: gzip\r\n")
        packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        self._transport.write(chunk(packer.compress(b"id: %d\ndata: " % number) + packer.flush(zlib.Z_SYNC_FLUSH)))
        for _ in range(size // (16 * len(_PIECE))):
            packed = packer.compress(_PIECE * 16)
            if packed:
                self._transport.write(chunk(packed))
            await self._open.wait()
            await asyncio.sleep(0)
        self._transport.write(chunk(packer.compress(b"\n\n") + packer.flush()) + _LAST)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
