"""Any sequence of what happens to records, a kill, and a reload: what is loaded is a state that there was, whole."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epochgate.guard.eventids import Order
from epochgate.guard.record import Event, Origin
from epochgate.ledger.base import Resume
from ledger.places import WHO, Sqlite, Valkey, facts

NAMES = (b"a", b"b")
IDS = (b"1", b"2", b"3", b"4", b"x-9", b"x-10", b"", None)

names = st.sampled_from(NAMES)
step = st.one_of(
    st.tuples(st.just("open"), names, st.sampled_from((None, "1", "2"))),
    st.tuples(st.just("stream"), names, st.lists(st.integers(0, 5), max_size=3)),
    st.tuples(st.just("event"), names, st.integers(0, 4), st.sampled_from(IDS), st.sampled_from((b"", b"d", b"e"))),
    st.tuples(st.just("answer"), names, st.integers(0, 4), st.integers(0, 5)),
    st.tuples(st.just("refuse"), names, st.integers(0, 4)),
    st.tuples(st.just("boundary"), names, st.floats(0, 1e9)),
    st.tuples(st.just("fence"), names),
    st.tuples(st.just("write")),
)


def take(ledger, session, now: float, kind: str, *more) -> None:
    """One thing that happens to a session."""
    if kind == "stream":
        session.open_stream(Origin.CALL if more[0] else Origin.STANDALONE, tuple(more[0]), WHO)
    elif kind == "boundary":
        session.mark_boundary(more[0])
    elif kind == "fence":
        session.close("deleted", now)
    elif session.streams:
        streams = list(session)
        stream = streams[more[0] % len(streams)]
        if kind == "event":
            session.add(stream, Event(more[1], more[2], now), (), learn=True)
        elif kind == "answer":
            session.add(stream, Event(None, b"answer", now), (more[1],), learn=True)
        elif kind == "refuse":
            stream.refused = True
            session.stream_changed(stream)


def untorn(state):
    """A state without what a kill adds to it."""
    if state is None:
        return None
    streams = {
        key: (*stream[:-2], stream[-2].order(several_streams=False) is not Order.UNCHECKED, stream[-1][:-1])
        for key, stream in state["streams"].items()
    }
    return {**state, "streams": streams, "delivered": None}


async def run(directory: Path, steps, *, killed: bool) -> None:
    place = Sqlite(directory)
    ledger = await place.ledger(events=5, streams=3)
    states = {name: [None] for name in NAMES}  # since the last write, that one included
    now = time.time()
    for kind, *more in steps:
        now += 0.001
        if kind == "write":
            await ledger.flush()
            states = {name: states[name][-1:] for name in NAMES}
            continue
        name, *rest = more
        if kind == "open":
            ledger.open(name, WHO, rest[0], "mcp", now)
        elif (session := ledger.get(name, now)) is not None:
            take(ledger, session, now, kind, *rest)
        states[name].append(untorn(facts(ledger.get(name, now))))
    if killed:
        await place.kill(ledger)
    else:
        await ledger.close()
        place._ledgers.clear()
        states = {name: states[name][-1:] for name in NAMES}
    again = await place.ledger(events=5, streams=3)
    for name in NAMES:
        found = await again.find(name, now)
        assert untorn(facts(found)) in states[name]
        if found is not None:
            assert all(stream.torn == killed for stream in found)
    await place.aclose()


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(step, max_size=40))
def test_what_is_loaded_is_a_state_that_there_was(killed, steps):
    """After an orderly end it is the last state; after a kill one of those since the last write."""
    with TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory), steps, killed=killed))


pairs = st.tuples(st.sampled_from((0, 1)), st.integers(0, 3), st.booleans())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(pairs, max_size=40))
def test_two_processes_lose_nothing_of_each_other(servers, steps):
    """Whatever the order of recording and writing: each stream has all its events in their order, and none twice."""

    async def run() -> None:
        place = Valkey(servers("valkey"))
        with place.server.client() as client:
            client.flushall()
        ledgers = [await place.ledger(), await place.ledger()]
        mine = [ledgers[0].open(b"s", WHO, "1", "mcp", time.time())]
        await ledgers[0].flush()
        mine.append(await ledgers[1].find(b"s", time.time(), Resume(b"", b"")))
        streams = [[session.open_stream(Origin.CALL, (n,), WHO) for n in range(4)] for session in mine]
        count = [[0] * 4 for _ in mine]
        for who, which, write in steps:
            count[who][which] += 1
            name = b"%d-%d-%d" % (who, which, count[who][which])
            mine[who].add(streams[who][which], Event(name, b"d", time.time()), (), learn=True)
            if write:
                await ledgers[who].flush()
        for ledger in ledgers:
            await ledger.flush()
        for ledger in (*ledgers, await place.ledger()):
            found = await ledger.find(b"s", time.time(), Resume(b"", b""))
            assert len(found.streams) == 8
            for who in (0, 1):
                for which in range(4):
                    stream = found.streams[streams[who][which].key]
                    names = [b"%d-%d-%d" % (who, which, n + 1) for n in range(count[who][which])]
                    assert [event.id for event in stream.events] == names
                    assert not stream.torn
        await place.aclose()

    asyncio.run(run())
