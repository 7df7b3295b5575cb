"""The upstream of the benchmark: an MCP server in outline, as fast as Python can be. `python -m bench.upstream PORT`.

It answers with what a server would say, not with what it would do: no dispatch, no JSON library, one write per answer.
The path says what is wanted; the session id is echoed, as the SDKs do.

    POST /init /init-plain    a handshake that grants a session, with an epoch token or without
    POST /json                a JSON response with the request's id
    POST /call                the same as an event stream of one event
    GET  /paced               n events of `size` bytes, `rate` a second; each says when it was sent
    GET  /flood               n events of `size` bytes as fast as they are taken; `batch=1`: many in one chunk
    GET  /big                 one event of `size` bytes
    GET  /idle                a head, a first event, and silence
    GET  /resume/...          10 events, then silence (`/resume/held`) or the end; a cursor is obeyed

The last event of /paced, /flood and /big tells the count and the CRC-32 of the data before it: the sink compares.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
import zlib
from collections.abc import Iterator
from typing import cast

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)").search
_SESSION = re.compile(rb"mcp-session-id: *([^\r]+)").search
_CURSOR = re.compile(rb"last-event-id: *(\d+)").search
_ID = re.compile(rb'"id": ?(\d+)').search
_EPOCH = b'"_meta":{"session_epoch":"e-7f3a"},'
_HEADS = b"HTTP/1.1 200 OK\r\nDate: Mon, 01 Dec 2025 09:00:00 GMT\r\nServer: bench\r\nCache-Control: no-store\r\n"
_STREAM = _HEADS + b"Content-Type: text/event-stream\r\nMcp-Session-Id: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
_TEXT = b"The quick brown fox jumps over the lazy dog; the benchmark counts its steps and checks each of them. " * 2
_RESULT = (
    b'{"jsonrpc":"2.0","id":%b,"result":{'
    + _EPOCH
    + b'"content":[{"type":"text","text":"'
    + _TEXT
    + b'"}],"isError":false}}'
)
_JSON = _HEADS + b"Content-Type: application/json\r\nMcp-Session-Id: %b\r\nContent-Length: %d\r\n\r\n%b"
_INITIALIZED = (
    b'{"jsonrpc":"2.0","id":%b,"result":{%b"protocolVersion":"2025-06-18","capabilities":{"tools":{}},'
    b'"serverInfo":{"name":"bench","version":"1"}}}'
)
_LAST = b"0\r\n\r\n"
RESUMED_EVENTS = 10


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def message(size: int, *, epoch: bool, sent: bool) -> tuple[bytes, bytes]:
    """The data of an event in two parts, between which the time of sending goes; `size` bytes with it."""
    start = b'{"jsonrpc":"2.0","method":"notifications/message","params":{' + (_EPOCH if epoch else b"") + b'"sent":'
    middle, end = b',"data":"', b'"}}'
    padding = size - len(start) - len(middle) - len(end) - (15 if sent else 1)
    return start + (b"" if sent else b"0"), middle + (_TEXT * (max(padding, 0) // len(_TEXT) + 1))[
        : max(padding, 0)
    ] + end


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.WriteTransport
        self._buffer = b""
        self._open = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._open.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._open.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._open.clear()

    def resume_writing(self) -> None:
        self._open.set()

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        while (end := data.find(b"\r\n\r\n")) >= 0:
            lower = data[:end].lower()
            found = _LENGTH(lower)
            stop = end + 4 + (int(found[1]) if found else 0)
            if len(data) < stop:
                break
            self._answer(data[:end], lower, data[end + 4 : stop])
            data = data[stop:]
        self._buffer = data

    def _answer(self, head: bytes, lower: bytes, body: bytes) -> None:
        target = head.split(b" ", 2)[1]
        found = _SESSION(lower)
        session = found[1] if found else b""
        if target == b"/json":
            result = _RESULT % _ID(body)[1]  # type: ignore[index]
            self._transport.write(_JSON % (session, len(result), result))
        elif target == b"/call":
            event = chunk(b"event: message\r\nid: 1\r\ndata: " + _RESULT % _ID(body)[1] + b"\r\n\r\n")  # type: ignore[index]
            self._transport.write(_STREAM % session + event + _LAST)
        elif target.startswith(b"/init"):
            body = _INITIALIZED % (_ID(body)[1], b"" if target == b"/init-plain" else _EPOCH)  # type: ignore[index]
            self._transport.write(_JSON % (grant(), len(body), body))
        else:
            path, _, query = target.partition(b"?")
            options = {
                key: int(value) for key, _, value in (part.partition(b"=") for part in query.split(b"&") if part)
            }
            self._stream(path, session, options, _CURSOR(lower))

    def _stream(self, path: bytes, session: bytes, options: dict[bytes, int], cursor: re.Match[bytes] | None) -> None:
        write = self._transport.write
        if path == b"/idle":
            write(_STREAM % session + chunk(b"id: 1\ndata: {}\n\n"))
        elif path.startswith(b"/resume"):
            first = int(cursor[1]) if cursor else 0
            events = b"".join(chunk(event) for event in self._resumable(first))
            write(_STREAM % session + events + (b"" if path.endswith(b"/held") else _LAST))
        else:
            write(_STREAM % session)
            send = {b"/paced": self._send_paced, b"/flood": self._send_flood, b"/big": self._send_big}[path]
            self._task = self._loop.create_task(send(options))

    def _resumable(self, after: int) -> Iterator[bytes]:
        start, end = message(300, epoch=True, sent=False)
        for number in range(after + 1, after + 1 + RESUMED_EVENTS):
            yield b"id: %d\ndata: %b%b\n\n" % (number, start, end)

    async def _send_paced(self, options: dict[bytes, int]) -> None:
        start, end = message(options[b"size"], epoch=bool(options[b"epoch"]), sent=True)
        crc = 0
        interval = 1 / options[b"rate"]
        due = self._loop.time() + (zlib.crc32(repr(id(self)).encode()) % 1000) / 1000 * interval
        for number in range(1, options[b"n"] + 1):
            due += interval
            if (wait := due - self._loop.time()) > 0:
                await asyncio.sleep(wait)
            data = b"%b%015d%b" % (start, time.perf_counter_ns() % 10**15 or 1, end)
            crc = zlib.crc32(data, crc)
            self._transport.write(chunk(b"id: %d\ndata: %b\n\n" % (number, data)))
            if not self._open.is_set():
                await self._open.wait()
        self._end(options[b"n"], crc)

    async def _send_flood(self, options: dict[bytes, int]) -> None:
        start, end = message(options[b"size"], epoch=bool(options[b"epoch"]), sent=False)
        data = start + end
        crc, number, total = 0, 0, options[b"n"]
        at_once = max(1, 65536 // (len(data) + 32))
        while number < total and not self._gone:
            events = []
            for _ in range(min(at_once, total - number)):
                number += 1
                events.append(b"id: %d\ndata: %b\n\n" % (number, data))
                crc = zlib.crc32(data, crc)
            self._transport.write(chunk(b"".join(events)) if options[b"batch"] else b"".join(map(chunk, events)))
            await asyncio.sleep(0)
            await self._open.wait()
        self._end(total, crc)

    async def _send_big(self, options: dict[bytes, int]) -> None:
        start, end = message(options[b"size"], epoch=True, sent=False)
        data = start + end
        event = b"id: 1\ndata: %b\n\n" % data
        for at in range(0, len(event), 65536):
            self._transport.write(chunk(event[at : at + 65536]))
            await asyncio.sleep(0)
            await self._open.wait()
        self._end(1, zlib.crc32(data))

    def _end(self, count: int, crc: int) -> None:
        last = b'id: %d\ndata: {"jsonrpc":"2.0","method":"bench/end","params":{"count":%d,"crc":%d}}\n\n' % (
            count + 1,
            count,
            crc,
        )
        self._transport.write(chunk(last) + _LAST)


_granted = 0


def grant() -> bytes:
    """A new session id."""
    global _granted  # noqa: PLW0603
    _granted += 1
    return b"bench-%08x-4bcb-9e0e-%012x" % (_granted, _granted * 2654435761)


async def main(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(loop), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
