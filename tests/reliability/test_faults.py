"""Faults on every side, for seconds: the whole of it is `make reliability ONLY=faults`."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from reliability import faults
from reliability.toxics import (
    TOXICS,
    Bandwidth,
    FaultRelay,
    Latency,
    LimitData,
    ResetPeer,
    Slicer,
    SlowClose,
    Timeout,
)


async def test_no_verdict_is_wrong_and_nothing_stays_behind(tmp_path):
    """R4, R7, R8: each toxic once at each place, three at a time."""
    names = list(TOXICS)
    combinations = [(names[n], names[(3 * n + 1) % 8], names[(5 * n + 2) % 8]) for n in range(8)]
    measure = faults.Measure(combinations, seconds=0.5, worlds=2, clients=8, seed=7, directory=tmp_path)
    outcome = await faults.play(measure)
    assert outcome.played == len(combinations)
    assert outcome.tally.resumes > 20
    assert outcome.tally.refusals
    assert not outcome.tally.wrong
    assert not outcome.hung
    assert not outcome.left
    assert not outcome.complaints
    assert max(outcome.recoveries.values()) < 8  # on a busy machine; the figure is that of the page
    assert max(outcome.store_back.values()) < 8


async def test_the_clients_would_see_a_splice(tmp_path, monkeypatch):
    """Without the guard they do: the check is not blind."""
    monkeypatch.setattr(faults, "UNGUARDED_FOR", 5.0)
    assert await faults.play_unguarded(faults.Measure([], 0.0, 1, 10, 7, tmp_path))


# -- the relay does what its toxics are called


class Echo:
    """A server that sends back what it gets, behind a relay."""

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._echo, "127.0.0.1", 0)
        self.relay = FaultRelay(self.server.sockets[0].getsockname()[1])
        await self.relay.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.relay.close()
        self.server.close()
        await self.server.wait_closed()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.relay.port)


async def exchange(echo: Echo, data: bytes) -> float:
    """Send and read back on a connection; s that it took."""
    reader, writer = await echo.connect()
    began = time.monotonic()
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    took = time.monotonic() - began
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    return took


@pytest.mark.parametrize(
    ("toxic", "size", "least"),
    [
        (None, 1_000_000, 0.0),
        (Latency(0.1, 0.0), 1000, 0.2),
        (Bandwidth(20_000), 10_000, 0.45),
        (Slicer(50, 0.001), 5000, 0.05),
        (SlowClose(0.1), 1000, 0.0),
    ],
)
async def test_a_slow_relay_passes_every_byte(toxic, size, least):
    async with Echo() as echo:
        echo.relay.set(toxic)
        assert await exchange(echo, bytes(range(256)) * (size // 256)) >= least


async def test_a_toxic_that_is_taken_away_delays_no_longer():
    async with Echo() as echo:
        echo.relay.set(Latency(60.0, 0.0))
        exchanged = asyncio.create_task(exchange(echo, b"x" * 1000))
        await asyncio.sleep(0.1)
        echo.relay.set(None)
        assert await exchanged < 5


@pytest.mark.parametrize("toxic", [LimitData(1000), Timeout(0.1), ResetPeer(0.1)])
async def test_a_relay_that_cuts(toxic):
    async with Echo() as echo:
        echo.relay.set(toxic)
        reader, writer = await echo.connect()
        if isinstance(toxic, LimitData):
            writer.write(b"x" * 800)
            assert await reader.readexactly(800) == b"x" * 800
            writer.write(b"x" * 800)
        if isinstance(toxic, ResetPeer):
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            assert len(await reader.read()) <= 200
        writer.close()


async def test_a_relay_whose_target_is_away_resets():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    relay = FaultRelay(port)
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    await relay.close()


def test_the_covering_set_holds_every_pair():
    for one in range(3):
        for two in range(one):
            pairs = {(combination[one], combination[two]) for combination in faults.covering_combinations()}
            assert len(pairs) == len(TOXICS) ** 2
    assert len(set(faults.every_combination())) == len(TOXICS) ** 3
