"""What hostile clients and servers do to use up what the proxy has; each attack says what became of it.

An attack raises AssertionError where the proxy gave what it should not. `size` scales it: 1.0 is the full form.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from reliability.proxy import Proxy, Valkey, free_port
from reliability.wire import Wire

CALL = b'{"jsonrpc":"2.0","id":%d,"method":"tools/list","params":{}}'
INITIALIZE = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'
PACE = 0.1  # s between two pieces of a body; the network would set one, too
AT_ONCE = 200  # connections that are being made at a time


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of an attack: 1.0 is the full form."""

    size: float

    def __call__(self, full: int, least: int = 1) -> int:
        return max(int(full * self.size), least)


class Target:
    """A proxy before the server that answers anything, and a caller of good will beside the attack."""

    def __init__(self, proxy: Proxy, pulse: subprocess.Popen[str], valkey: Valkey | None) -> None:
        self.proxy = proxy
        self._pulse = pulse
        self._valkey = valkey

    @property
    def port(self) -> int:
        return self.proxy.port

    async def pulse(self) -> dict[str, Any]:
        """What the caller of good will saw since it was last asked."""

        def ask() -> str:
            assert self._pulse.stdin is not None
            assert self._pulse.stdout is not None
            self._pulse.stdin.write("\n")
            self._pulse.stdin.flush()
            return self._pulse.stdout.readline()

        return dict(json.loads(await asyncio.to_thread(ask)))

    async def metric(self, name: str) -> float:
        return (await self.proxy.metrics()).get(name, 0.0)

    def stored(self) -> int:
        """The records in the store, where it has one of its own."""
        return 0 if self._valkey is None else self._valkey.count("*:session:*")

    async def initialize(self, path: str = "/mcp") -> dict[str, str]:
        """The fields of a new session."""
        wire = await Wire.to(self.port)
        try:
            await wire.ask("POST", path, {}, INITIALIZE)
            await wire.read_all()
        finally:
            wire.close()
        return {"Mcp-Session-Id": wire.fields["mcp-session-id"], "Accept": "text/event-stream"}

    async def open_stream(self, path: str, fields: dict[str, str], cursor: int = 0) -> Wire:
        """A stream whose head has come."""
        wire = await Wire.to(self.port)
        await wire.ask("GET", path, {**fields, **({"Last-Event-ID": str(cursor)} if cursor else {})})
        return wire


@contextlib.asynccontextmanager
async def target(directory: pathlib.Path, settings: dict[str, Any]) -> AsyncIterator[Target]:
    port = free_port()
    victim = subprocess.Popen([sys.executable, "-m", "reliability.victim", str(port)])
    pulse: subprocess.Popen[str] | None = None
    base = {"upstream": {"url": f"http://127.0.0.1:{port}"}, "log": {"level": "warning"}}
    proxy = Proxy(directory, {**base, "drain": {"grace": "0s", "window": "1s"}, **settings})
    valkey = Valkey(directory) if "store" in settings else None
    try:
        if valkey is not None:
            await valkey.start()
            proxy.write({**proxy.settings, "store": {"url": f"valkey://127.0.0.1:{valkey.port}/0"}})
        await _until_listening(port)
        await proxy.start()
        pulse = subprocess.Popen(
            [sys.executable, "-m", "reliability.pulse", str(proxy.port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        yield Target(proxy, pulse, valkey)
    finally:
        for process in (pulse, victim):
            if process is not None:
                process.kill()
                process.communicate()
        proxy.kill()
        if valkey is not None:
            valkey.kill()


async def _until_listening(port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            (await Wire.to(port)).close()
            return
        await asyncio.sleep(0.02)


class Crowd:
    """Raw connections of the attacker: what is sent is up to it; how each ended is kept."""

    def __init__(self) -> None:
        self.members: list[Raw] = []

    async def connect(self, port: int, count: int) -> None:
        loop = asyncio.get_running_loop()
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with gate:
                _, raw = await loop.create_connection(Raw, "127.0.0.1", port)
                self.members.append(raw)

        await asyncio.gather(*(one() for _ in range(count)))

    def send(self, data: bytes) -> None:
        for raw in self.members:
            raw.send(data)

    @property
    def alive(self) -> int:
        return sum(not raw.lost for raw in self.members)

    @property
    def answers(self) -> Counter[str]:
        """The status of the first answer of each, `none` where there was none."""
        return Counter(raw.answer[9:12].decode() or "none" for raw in self.members)

    def close(self) -> None:
        for raw in self.members:
            raw.close()


class Raw(asyncio.Protocol):
    """One of them. It keeps the beginning of what it reads, and drops the rest."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.answer = b""
        self.read = 0
        self.answers = 0  # as many as are told in one piece
        self.lost = False
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.read += len(data)
        self.answers += data.count(b"HTTP/1.1 200")
        if len(self.answer) < 64:
            self.answer += data[:64]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.paused = False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def send(self, data: bytes) -> None:
        if not self.lost and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        if not self.lost:
            self.transport.abort()


@contextlib.asynccontextmanager
async def crowd(port: int, count: int) -> AsyncIterator[Crowd]:
    made = Crowd()
    try:
        await made.connect(port, count)
        yield made
    finally:
        made.close()
        await asyncio.sleep(0.05)


Attack = Callable[[Target, Scale], Awaitable[str]]


async def slow_heads(aim: Target, scale: Scale) -> str:
    """Slowloris: a head that comes byte by byte and never ends."""
    count = scale(2000, 50)
    async with crowd(aim.port, count) as many:
        began = time.monotonic()
        many.send(b"GET /mcp HTTP/1.1\r\nHost: x\r\nX: ")
        while many.alive and time.monotonic() - began < 60:
            await asyncio.sleep(0.5)
            many.send(b"y")
        took = time.monotonic() - began
        assert not many.alive, f"{many.alive} of {count} are still there after {took:.0f} s"
    return f"{count:,} connections: all closed within {took:.0f} s"


async def slow_bodies(aim: Target, scale: Scale) -> str:
    """A body of which a byte comes each half second."""
    count = scale(2000, 50)
    async with crowd(aim.port, count) as many:
        began = time.monotonic()
        many.send(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        while many.answers["none"] and time.monotonic() - began < 60:
            await asyncio.sleep(0.5)
            many.send(b"y")
        took = time.monotonic() - began
        assert many.answers == {"408": count}, many.answers
    return f"{count:,} requests: all answered 408 within {took:.0f} s"


async def more_than_there_is_room(aim: Target, scale: Scale) -> str:
    """Twice as many half-sent heads as there may be connections, again and again, beside calls on new connections."""
    room = aim.proxy.settings["limits"]["connections"]
    rounds = scale(10, 2)
    for _ in range(rounds):
        async with crowd(aim.port, 2 * room) as many:
            many.send(b"GET /mcp HTTP/1.1\r\nHost: x\r\nX: ")
            await asyncio.sleep(0.3)
            assert many.alive <= room, f"{many.alive} connections"
    closed = await aim.metric('epochgate_client_connections_closed_total{why="gave_way"}')
    return f"{rounds} times {2 * room:,} connections where there is room for {room:,}: {closed:,.0f} gave way"


async def idle_connections(aim: Target, scale: Scale) -> str:
    """Connections on which nothing is asked."""
    count = scale(10_000, 200)
    before = aim.proxy.memory()
    async with crowd(aim.port, count) as many:
        await asyncio.sleep(max(3.0 * scale.size, 0.5))
        assert many.alive == count, f"{count - many.alive} of {count} were closed"
        each = (aim.proxy.memory() - before) / count
    return f"{count:,} connections stay open, {each / 1024:.1f} KiB each"


async def long_heads(aim: Target, scale: Scale) -> str:
    """Heads of a megabyte; then heads that stop just below the limit."""
    count = scale(500, 20)
    async with crowd(aim.port, count) as many:
        many.send(b"GET /mcp HTTP/1.1\r\nHost: x\r\n")
        for number in range(64):
            many.send(b"X-%d: %b\r\n" % (number, b"y" * 16_000))
            if number % 8 == 0:
                await asyncio.sleep(0.05)
        await _until(lambda: not many.answers["none"], 20)
        refused = many.answers
        assert refused == {"431": count}, refused
    async with crowd(aim.port, count) as many:
        many.send(b"GET /mcp HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 60_000)
        await asyncio.sleep(1.0)
    return f"{count:,} heads of 1 MB answered 431, {count:,} of 60 KB waited for"


async def many_heads(aim: Target, scale: Scale) -> str:
    """Connections that ask with a different long head each time, and then stay."""
    count = scale(1000, 20)
    fields = await aim.initialize()
    named = f"Mcp-Session-Id: {fields['Mcp-Session-Id']}\r\n".encode()
    async with crowd(aim.port, count) as many:
        for number in range(40):
            body = CALL % number
            many.send(
                b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%bX-%d: %b\r\n\r\n%b"
                % (len(body), named, number, b"y" * 3900, body)
            )
            expected = number + 1
            await _until(lambda: all(raw.answers >= expected or raw.lost for raw in many.members), 60)  # noqa: B023
        assert many.alive == count, f"{count - many.alive} were closed"
        await asyncio.sleep(0.5)
    return f"{count:,} connections with 40 different heads of 4 KB each, then idle"


async def body_flood(aim: Target, scale: Scale) -> str:
    """Bodies without end to a server that does not read, and to one that does; some of a session, some of none."""
    count, size = scale(300, 10), 50_000_000
    fields = await aim.initialize()
    named = f"Mcp-Session-Id: {fields['Mcp-Session-Id']}\r\n".encode()
    piece = b"x" * 65536
    async with crowd(aim.port, count) as many:
        for number, raw in enumerate(many.members):
            path = b"/stall" if number % 3 else b"/read"
            framing = b"Transfer-Encoding: chunked\r\n" if number % 2 else b"Content-Length: %d\r\n" % size
            raw.send(b"POST %b HTTP/1.1\r\nHost: x\r\n%b%b\r\n" % (path, framing, named if number % 5 else b""))
        sent = 0
        ends_at = time.monotonic() + max(8 * scale.size, 2.0)
        while time.monotonic() < ends_at:
            for number, raw in enumerate(many.members):
                if not raw.paused and not raw.lost:
                    data = b"%x\r\n%b\r\n" % (len(piece), piece) if number % 2 else piece
                    raw.send(data)
                    sent += len(data)
            await asyncio.sleep(PACE)
    return f"{count:,} bodies, {sent / 1e6:,.0f} MB taken in all"


async def endless_events(aim: Target, scale: Scale) -> str:
    """Events that never end, on live streams and on resumed ones, whose blocks are held until they are whole."""
    count = scale(50, 5)
    live, resumed = [], []
    try:
        for number in range(count):
            wire = await aim.open_stream("/endless", await aim.initialize())
            wire.stop_reading()
            live.append(wire)
            fields = await aim.initialize()
            first = await aim.open_stream("/endless?first=1", fields)
            await first.read()
            first.close()
            resumed.append((f"/endless?{number}", fields))
        wires = await asyncio.gather(
            *(_resume_within(aim, path, fields, 30.0) for path, fields in resumed), *(_drain(wire) for wire in live)
        )
        ends = Counter(end for end in wires if isinstance(end, str))
    finally:
        for wire in live:
            wire.close()
    return f"{count} on live streams, {count} on resumed ones: {_listed(ends)}"


async def gzip_bombs(aim: Target, scale: Scale) -> str:
    """A resume answered by a gzip bomb: a gigabyte in a megabyte."""
    count = scale(20, 3)
    size = scale(1_000_000_000, 200_000_000)
    resumed = []
    for _ in range(count):
        fields = await aim.initialize()
        first = await aim.open_stream("/bomb?first=1", fields)
        await first.read()
        first.close()
        resumed.append(fields)
    path = f"/bomb?size={size}"
    ends = Counter(await asyncio.gather(*(_resume_within(aim, path, fields, 60.0) for fields in resumed)))
    return f"{count} bombs of {size / 1e6:,.0f} MB: {_listed(ends)}"


async def made_up_sessions(aim: Target, scale: Scale) -> str:
    """Requests with session ids that nobody granted."""
    count = scale(100_000, 2000)
    chance = random.Random(1)
    before, stored = await aim.metric("epochgate_sessions"), aim.stored()

    def requests() -> Iterable[tuple[str, str, dict[str, str], bytes]]:
        for number in range(count):
            fields = {"Mcp-Session-Id": f"{chance.getrandbits(128):032x}"}
            if number % 3 == 0:
                yield "GET", "/mcp", {**fields, "Last-Event-ID": str(number), "Accept": "text/event-stream"}, b""
            elif number % 3 == 1:
                yield "POST", "/mcp", fields, CALL % number
            else:
                yield "DELETE", "/mcp", fields, b""

    statuses = await _ask_many(aim.port, requests(), at_once=scale(400, 40))
    grown = await aim.metric("epochgate_sessions") - before
    assert not grown, f"{grown:.0f} records were made"
    kept = aim.stored() - stored
    assert not kept, f"{kept} records were made in the store"
    assert await aim.metric("epochgate_store_available") == 1, "the store is taken to be away"
    return f"{count:,} requests, no record made; answered {_listed(statuses)}"


async def initialize_flood(aim: Target, scale: Scale) -> str:
    """Sessions opened as fast as can be; one that is in use has to outlive them."""
    count, most = scale(100_000, 5000), aim.proxy.settings["limits"]["sessions"]
    fields = await aim.initialize()
    stream = await aim.open_stream("/mcp", fields)
    await stream.read()
    statuses = await _ask_many(aim.port, (("POST", "/mcp", {}, INITIALIZE) for _ in range(count)))
    kept = await aim.metric("epochgate_sessions")
    assert kept <= most, f"{kept:.0f} sessions are on record"
    stream.close()
    again = await aim.open_stream("/mcp", fields, cursor=1)
    assert again.status == 200, f"the session that is in use was forgotten: {again.status}"
    again.close()
    return f"{count:,} sessions opened ({_listed(statuses)}), {kept:,.0f} on record, the one in use among them"


async def many_streams(aim: Target, scale: Scale) -> str:
    """One session that opens stream after stream."""
    count = scale(100_000, 3000)
    fields = await aim.initialize()
    calls = (("POST", "/call", fields, CALL % number) for number in range(count))
    began = time.monotonic()
    statuses = await _ask_many(aim.port, calls)
    rate = count / (time.monotonic() - began)
    assert statuses == {"200": count}, statuses
    return f"{count:,} streams in one session, {rate:,.0f} a second"


async def stalled_readers(aim: Target, scale: Scale) -> str:
    """Clients that ask for 200 MB and do not read: events of 1 KB for half of them, one event for the others."""
    count, size = scale(50, 10), 200_000_000
    wires = []
    try:
        for number in range(count):
            path = f"/{'one' if number % 2 else 'events'}?size={size}"
            wire = await aim.open_stream(path, await aim.initialize())
            wire.stop_reading()
            wires.append(wire)
        await asyncio.sleep(max(8 * scale.size, 2.0))
        wire, began = wires[-1], time.monotonic()
        wire.go_on_reading()
        read = 0
        while data := await wire.read():
            read += len(data)
        assert read >= size // 65536 * 65536, f"only {read} bytes came in the end"
        seconds = time.monotonic() - began
    finally:
        for wire in wires:
            wire.close()
    return f"{count} clients stalled; one then read its {read / 1e6:.0f} MB in {seconds:.1f} s"


# -- what attacks are made of


async def _ask_many(port: int, requests: Iterable[tuple[str, str, dict[str, str], bytes]], at_once: int = 16) -> Any:
    """Ask them all on a few connections; how often each status came."""
    left = iter(requests)
    statuses: Counter[str] = Counter()

    async def work() -> None:
        wire = await Wire.to(port)
        for method, path, fields, body in left:
            if not wire.usable:
                wire.close()
                wire = await Wire.to(port)
            try:
                async with asyncio.timeout(30):
                    statuses[str(await wire.ask(method, path, fields, body))] += 1
                    await wire.read_all()
            except (OSError, TimeoutError) as error:
                statuses[type(error).__name__] += 1
        wire.close()

    await asyncio.gather(*(work() for _ in range(at_once)))
    return statuses


async def _resume_within(aim: Target, path: str, fields: dict[str, str], seconds: float) -> str:
    """How a resume ends."""
    try:
        async with asyncio.timeout(seconds):
            wire = await aim.open_stream(path, fields, cursor=1)
            try:
                status = wire.status
                body = await wire.read_all()
            finally:
                wire.close()
    except ConnectionError:
        return "cut off"
    except TimeoutError:
        return "still open"
    reason = body.partition(b'"reason":"')[2].partition(b'"')[0].decode()
    return f"{status} {reason}".strip()


async def _drain(wire: Wire, seconds: float = 4.0) -> int:
    """Read for a time; the bytes that came."""
    read = 0
    wire.go_on_reading()
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(seconds):
            while data := await wire.read():
                read += len(data)
    return read


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} x {name}" for name, count in counts.most_common())
