"""The reader of event streams: one process, many streams, every event counted, checked and timed.

`python -m bench.sink '{"port": ..., "target": ..., "streams": ..., ...}'` prints one JSON line when all streams ended.
With `"hold": true` the streams stay open: the line comes when all have had their first event, and a line on standard
input ends it.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import zlib
from dataclasses import dataclass
from typing import cast

import httptools
import uvloop

INITIALIZE = (
    b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},'
    b'"clientInfo":{"name":"bench","version":"1"}}}'
)
_SENT = re.compile(rb'"sent":(\d{15})').search
_END = re.compile(rb'"method":"bench/end","params":\{"count":(\d+),"crc":(\d+)\}').search


@dataclass(frozen=True, slots=True)
class Job:
    """What to read. `opening`: how many connections are being opened at once."""

    port: int
    target: str
    streams: int
    init: str = "/init"
    opening: int = 16
    hold: bool = False


class Reader(asyncio.Protocol):
    """One connection: a handshake, then one event stream of the session that it granted."""

    def __init__(self, job: Job, latencies: list[int]) -> None:
        self._job = job
        self._latencies = latencies
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[float] = loop.create_future()  # s from the request to its first event
        self.ended: asyncio.Future[str] = loop.create_future()  # what was wrong, or ""
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._session = b""
        self._parts: list[bytes] = []  # of the event that is not complete
        self._streaming = False
        self._asked = 0.0
        self.count = 0
        self._crc = 0
        self._told: re.Match[bytes] | None = None
        self._status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        head = f"POST {self._job.init} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        head += f"Accept: application/json, text/event-stream\r\nContent-Length: {len(INITIALIZE)}\r\n\r\n"
        self._transport.write(head.encode() + INITIALIZE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("connection lost")

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"mcp-session-id":
            self._session = value

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if not self._streaming:
            return
        now = time.perf_counter_ns() % 10**15
        if self._parts and b"\n\n" not in self._parts[-1][-1:] + data:
            self._parts.append(data)  # in the middle of a long event
            return
        if self._parts:
            data = b"".join((*self._parts, data))
        start = 0
        while (stop := data.find(b"\n\n", start)) >= 0:
            at = data.find(b"data: ", start, stop)
            if at >= 0:
                self._take(data[at + 6 : stop], now)
            start = stop + 2
        self._parts = [data[start:]] if start < len(data) else []

    def _take(self, data: bytes, now: int) -> None:
        if not self.first.done():
            self.first.set_result(time.perf_counter() - self._asked)
        self._told = _END(data)
        if self._told is None:
            self.count += 1
            self._crc = zlib.crc32(data, self._crc)
            if (sent := _SENT(data, 0, 200)) is not None:
                self._latencies.append(now - int(sent[1]))

    def on_message_complete(self) -> None:
        if self._streaming:
            told = self._told
            wrong = told is None or int(told[1]) != self.count or int(told[2]) != self._crc
            self._end("events are missing or changed" if wrong or self._parts else "")
            self._transport.close()
            return
        if self._status != 200:
            self._end(f"the handshake was answered {self._status}")
            return
        self._streaming = True
        self._parser = httptools.HttpResponseParser(self)
        self._asked = time.perf_counter()
        head = b"GET %b HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\nMCP-Protocol-Version: 2025-06-18\r\n"
        self._transport.write(head % self._job.target.encode() + b"Mcp-Session-Id: %b\r\n\r\n" % self._session)

    def _end(self, wrong: str) -> None:
        if not self.ended.done():
            self.ended.set_result(wrong)
        if not self.first.done():
            self.first.set_exception(ConnectionError(wrong))

    def close(self) -> None:
        self._transport.abort()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


async def main(job: Job) -> None:
    loop = asyncio.get_running_loop()
    latencies: list[int] = []
    gate = asyncio.Semaphore(job.opening)
    readers: list[Reader] = []
    began = time.perf_counter()

    async def open_one() -> float:
        async with gate:
            _, reader = await loop.create_connection(lambda: Reader(job, latencies), "127.0.0.1", job.port)
            readers.append(reader)
            return await reader.first

    firsts = await asyncio.gather(*(open_one() for _ in range(job.streams)))
    result = {
        "ttfb_p50": percentile(firsts, 0.5),
        "ttfb_p99": percentile(firsts, 0.99),
        "open_s": time.perf_counter() - began,
    }
    if job.hold:
        print(json.dumps(result), flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        broken = sum(reader.ended.done() for reader in readers)
        for reader in readers:
            reader.close()
        print(json.dumps({"broken": broken}), flush=True)
        return
    ends = await asyncio.gather(*(reader.ended for reader in readers))
    took = [value / 1e9 for value in latencies]
    print(
        json.dumps(
            result
            | {
                "events": sum(reader.count for reader in readers),
                "wrong": sorted({end for end in ends if end}),
                "seconds": time.perf_counter() - began,
                "p50": percentile(took, 0.5),
                "p99": percentile(took, 0.99),
            }
        )
    )


if __name__ == "__main__":
    uvloop.run(main(Job(**json.loads(sys.argv[1]))))
