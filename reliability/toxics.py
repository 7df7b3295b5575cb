"""A TCP relay with faults that can be set and taken away while it runs; the vocabulary is Toxiproxy's.

What a toxic does, it does in both directions, to the connections that stand and to those that come. When it is taken
away what it kept back is passed on at once; connections whose bytes it has swallowed are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import cast

MOST_QUEUED = 256 * 1024  # bytes kept back in one direction; then the sender waits
STEP = 0.1  # s of bytes that a limited bandwidth passes at a time

_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Latency:
    """Every byte comes later. Times in s."""

    seconds: float = 0.05
    jitter: float = 0.03


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, of each connection and direction."""

    rate: int = 20_000


@dataclass(frozen=True, slots=True)
class Slicer:
    """Bytes come in pieces of about `size`, with a pause of `delay` s between them."""

    size: int = 64
    delay: float = 0.002


@dataclass(frozen=True, slots=True)
class LimitData:
    """A connection is closed after so many bytes of one direction."""

    size: int = 6000


@dataclass(frozen=True, slots=True)
class ResetPeer:
    """A connection is reset after so many seconds, both ways."""

    seconds: float = 0.7


@dataclass(frozen=True, slots=True)
class Timeout:
    """Nothing passes; a connection is closed after so many seconds."""

    seconds: float = 0.7


@dataclass(frozen=True, slots=True)
class SlowClose:
    """The end of a connection is passed on so many seconds late."""

    seconds: float = 0.5


Toxic = Latency | Bandwidth | Slicer | LimitData | ResetPeer | Timeout | SlowClose
TOXICS: dict[str, Toxic | None] = {
    "none": None,
    "latency": Latency(),
    "bandwidth": Bandwidth(),
    "slicer": Slicer(),
    "limit_data": LimitData(),
    "reset_peer": ResetPeer(),
    "timeout": Timeout(),
    "slow_close": SlowClose(),
}


class FaultRelay:
    """Relays to a port of this machine. `toxic` is the fault in force, None for none."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target = target
        self.port = 0
        self.toxic: Toxic | None = None
        self.chance = random.Random(seed)
        self.pairs: set[_Pair] = set()
        self._changed = asyncio.Event()
        self._server: asyncio.Server

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Pair(self).near, "127.0.0.1", 0, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    def set(self, toxic: Toxic | None) -> None:
        """Another fault, or none."""
        former, self.toxic = self.toxic, toxic
        self._changed.set()
        self._changed = asyncio.Event()
        for pair in list(self.pairs):
            if isinstance(former, Timeout):
                pair.close()
            else:
                pair.begin(toxic)

    async def wait(self, seconds: float) -> None:
        """Sleep, at most until the fault is another one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def close(self) -> None:
        self._server.close()
        for pair in list(self.pairs):
            pair.reset()
        await self._server.wait_closed()
        await asyncio.gather(*(side.work for pair in self.pairs for side in pair.sides if side.work))


class _Pair:
    """A connection that came, and the one that was made for it."""

    def __init__(self, relay: FaultRelay) -> None:
        self.relay = relay
        self.near = _Side(self)
        self.far = _Side(self)
        self.near.other, self.far.other = self.far, self.near
        self.sides = (self.near, self.far)
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None]

    def opened(self) -> None:
        self.relay.pairs.add(self)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())
        self.begin(self.relay.toxic)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self.far, "127.0.0.1", self.relay.target)
        except OSError:
            self.reset()
        else:
            self.near.go_on()

    def begin(self, toxic: Toxic | None) -> None:
        """A fault begins to be in force."""
        for side in self.sides:
            side.passed = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        if isinstance(toxic, ResetPeer):
            self._timer = loop.call_later(toxic.seconds, self.reset)
        elif isinstance(toxic, Timeout):
            self._timer = loop.call_later(toxic.seconds, self.close)

    def close(self) -> None:
        """End both connections in an orderly way, whatever was kept back."""
        for side in self.sides:
            side.queue.clear()
            if side.transport is not None:
                side.transport.close()
        self._forget()

    def reset(self) -> None:
        """End both connections by RST."""
        for side in self.sides:
            side.queue.clear()
            if side.transport is not None:
                with contextlib.suppress(OSError):
                    sock = side.transport.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                side.transport.abort()
        self._forget()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.relay.pairs.discard(self)


class _Side(asyncio.Protocol):
    """One end; what it reads goes to the other one, through the fault that is in force."""

    def __init__(self, pair: _Pair) -> None:
        self.pair = pair
        self.other: _Side
        self.transport: asyncio.Transport | None = None
        self.queue: deque[tuple[float, bytes | None]] = deque()  # when it came, and what; None: the end
        self.queued = 0
        self.passed = 0  # bytes since the fault began
        self.work: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self is self.pair.near:
            self.pair.opened()
        elif self.pair not in self.pair.relay.pairs:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        toxic = self.pair.relay.toxic
        if isinstance(toxic, Timeout):
            return
        if toxic is None and not self.queue and self.other.transport is not None and self.other.writable.is_set():
            self.other.transport.write(data)
            return
        self._put(data)

    def eof_received(self) -> bool:
        if isinstance(self.pair.relay.toxic, Timeout):
            return True  # the timer closes it
        self._put(None)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()
        if exc is not None and self.pair in self.pair.relay.pairs:
            self.pair.reset()
        elif self.other.transport is None or self.other.transport.is_closing():
            self.pair._forget()

    def pause_writing(self) -> None:
        self.writable.clear()
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.writable.set()
        self.other.go_on()

    def _put(self, data: bytes | None) -> None:
        self.queue.append((asyncio.get_running_loop().time(), data))
        self.queued += len(data or b"")
        if self.queued > MOST_QUEUED and self.transport is not None:
            self.transport.pause_reading()
        self.go_on()

    def go_on(self) -> None:
        """Pass on what waits; read more."""
        if self.queue:
            if self.work is None and self.other.transport is not None:
                self.work = asyncio.get_running_loop().create_task(self._pass_on())
        elif self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    async def _pass_on(self) -> None:
        try:
            while self.queue:
                came_at, data = self.queue[0]
                if data is None:
                    await self._pass_end()
                else:
                    await self._pass_data(came_at, data)
                if self.queue:
                    self.queue.popleft()
                    self.queued -= len(data or b"")
        finally:
            self.queued = 0 if not self.queue else self.queued
            self.work = None
        self.go_on()

    async def _pass_data(self, came_at: float, data: bytes) -> None:
        relay, loop = self.pair.relay, asyncio.get_running_loop()
        toxic = relay.toxic
        if isinstance(toxic, Latency):
            due = came_at + toxic.seconds + relay.chance.uniform(-toxic.jitter, toxic.jitter)
            if due > loop.time():
                await relay.wait(due - loop.time())
        elif isinstance(toxic, Bandwidth):
            step = max(1, int(toxic.rate * STEP))
            while len(data) > step and relay.toxic is toxic:
                await relay.wait(STEP)
                await self._write(data[:step])
                data = data[step:]
            await relay.wait(len(data) / toxic.rate)
        elif isinstance(toxic, Slicer):
            while data and relay.toxic is toxic:
                size = relay.chance.randint(1, 2 * toxic.size)
                await self._write(data[:size])
                data = data[size:]
                await relay.wait(toxic.delay)
        elif isinstance(toxic, LimitData):
            room = toxic.size - self.passed
            self.passed += len(data)
            await self._write(data[:room])
            if len(data) >= room:
                self.pair.close()
            return
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        transport = self.other.transport
        if data and transport is not None and not transport.is_closing():
            transport.write(data)
            await self.other.writable.wait()

    async def _pass_end(self) -> None:
        toxic = self.pair.relay.toxic
        if isinstance(toxic, SlowClose):
            await self.pair.relay.wait(toxic.seconds)
        self.ended = True
        transport = self.other.transport
        if transport is not None and not transport.is_closing():
            with contextlib.suppress(OSError):  # the peer has gone meanwhile
                transport.write_eof()
        if self.other.ended:
            self.pair.close()
