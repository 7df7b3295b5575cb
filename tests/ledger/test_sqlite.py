"""The file as the store: its rights, its versions, a full or read-only disk, garbage, its size."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import time

import pytest

from epochgate.errors import ConfigurationError, StoreError
from epochgate.guard.record import Origin
from epochgate.ledger import kept
from epochgate.ledger.kept import KeptLedger
from epochgate.ledger.sqlite import SqliteStore
from ledger.places import WHO, Faulty, Sqlite, facts, records, say, story
from ledger.test_contract import reopened


@pytest.fixture
async def place(tmp_path):
    place = Sqlite(tmp_path)
    yield place
    await place.aclose()


async def test_the_file_is_private(place, tmp_path):
    """L7: it holds session ids and event ids."""
    ledger = await place.ledger()
    story(ledger)
    await ledger.flush()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert "ledger.db-wal" in modes


async def test_a_second_process_waits_for_the_first(place, quick):
    """Its traffic flows meanwhile, and readiness says why nothing is kept."""
    first = await place.ledger()
    session = story(first)
    before = facts(session)
    second = await place.ledger()
    assert "another process uses it" in second.problem
    assert await second.find(b"session", time.time()) is None
    await first.close()
    place._ledgers.remove(first)
    await asyncio.wait_for(second.flush(), 5.0)
    assert second.problem is None
    assert facts(await second.find(b"session", time.time())) == before


async def test_a_file_of_a_newer_version_is_refused(place, tmp_path):
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigurationError, match="newer epochgate"):
        await place.ledger()
    place._ledgers.clear()


async def test_a_missing_directory_is_named(tmp_path):
    store = SqliteStore(str(tmp_path / "none" / "ledger.db"), sessions=1)
    with pytest.raises(ConfigurationError, match="is no directory; create it"):
        await store.open(b"k" * 32)


async def test_a_file_that_is_none_degrades(place, tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    ledger = await place.ledger()
    story(ledger)
    assert "no SQLite file" in ledger.problem
    assert (await ledger.find(b"session", time.time())) is not None
    await place.kill(ledger)


async def set_pragma(ledger, pragma):
    """On the writer, also when the file is opened anew. Returns what takes it back."""
    store = ledger._store
    await store._call(store._writes, lambda: store._writer.execute(pragma).fetchall())
    original = store._connect

    def connect():
        connection = original()
        connection.execute(pragma).fetchall()
        return connection

    store._connect = connect

    def take_back():
        store._connect = original

    return take_back


FULL, READ_ONLY = "PRAGMA max_page_count = 1", "PRAGMA query_only = 1"


async def trouble(place, ledger, pragma, words):
    """Writes fail for a while; what is recorded meanwhile is kept afterwards."""
    session = story(ledger)
    await ledger.flush()
    take_back = await set_pragma(ledger, pragma)
    stream = session.locate(b"4")[0]
    for number in range(5, 1000):
        say(session, stream, number)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ledger.flush(), 0.3)
    assert words in ledger.problem
    assert ledger.failures > 0
    assert await ledger.find(b"session", time.time()) is session
    take_back()
    await asyncio.wait_for(ledger.flush(), 5.0)
    assert ledger.problem is None
    before = facts(session)
    again = await reopened(place, ledger)
    assert facts(await again.find(b"session", time.time())) == before


async def test_a_full_disk(place, quick):
    await trouble(place, await place.ledger(), FULL, "full")


async def test_a_read_only_disk(place, quick):
    await trouble(place, await place.ledger(), READ_ONLY, "cannot be written")


@pytest.mark.parametrize("end", ["in order", "killed"])
async def test_a_fence_that_found_no_room(place, quick, monkeypatch, end):
    """L6: after the end no session of the file counts, since nobody knows which were deleted; fences in it do."""
    monkeypatch.setattr(kept, "FLUSH_WITHIN", 0.3)
    ledger = await place.ledger()
    for name in (b"session", b"other"):
        story(ledger, name)
    story(ledger, b"fenced").close("epoch_changed", time.time())
    await ledger.flush()
    await set_pragma(ledger, READ_ONLY)
    ledger.get(b"session", time.time()).close("deleted", time.time())
    await ledger.spread(ledger.get(b"session", time.time()))
    assert ledger.problem
    again = await (reopened(place, ledger) if end == "in order" else killed(place, ledger))
    for _ in range(2):
        assert await again.find(b"session", time.time()) is None
        assert await again.find(b"other", time.time()) is None
        assert (await again.find(b"fenced", time.time())).fence == "epoch_changed"
        session = story(again, b"new")
        again = await reopened(place, again)
        assert facts(await again.find(b"new", time.time())) == facts(session)


async def test_a_fence_that_found_room_later(place, quick):
    """All is in the file again before the end: the sessions count."""
    ledger = await place.ledger()
    story(ledger, b"other")
    session = story(ledger)
    await ledger.flush()
    take_back = await set_pragma(ledger, READ_ONLY)
    session.close("deleted", time.time())
    await ledger.spread(session)
    assert ledger.problem
    take_back()
    await asyncio.wait_for(ledger.flush(), 5.0)
    again = await killed(place, ledger)
    assert (await again.find(b"session", time.time())).fence == "deleted"
    assert (await again.find(b"other", time.time())) is not None


async def test_a_start_without_room(place, quick, monkeypatch):
    """L6: what is deleted while the file cannot be opened is not known to it."""
    monkeypatch.setattr(kept, "FLUSH_WITHIN", 0.3)
    ledger = await place.ledger()
    story(ledger)
    await reopened(place, ledger)
    await place._ledgers[0].close()
    place._ledgers.clear()
    store = place.store()
    original = store._connect

    def connect():
        connection = original()
        connection.execute(READ_ONLY).fetchall()
        return connection

    store._connect = connect
    ledger = KeptLedger(records(), store)
    await ledger.start()
    assert ledger.problem
    await ledger.close()
    assert await (await place.ledger()).find(b"session", time.time()) is None


async def killed(place, ledger):
    """The ledger of the process after one that was killed."""
    await place.kill(ledger)
    return await place.ledger()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sessions SET head = x'c1'",
        "UPDATE sessions SET head = x''",
        "UPDATE streams SET state = x'90'",
        "UPDATE blocks SET events = 'text'",
        "UPDATE blocks SET events = x'ff00'",
    ],
)
async def test_garbage_is_unknown_and_removed(place, damage, tmp_path):
    ledger = await place.ledger()
    story(ledger)
    await ledger.close()
    place._ledgers.remove(ledger)
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute(damage)
    db.close()
    ledger = await place.ledger()
    assert await ledger.find(b"session", time.time()) is None
    assert ledger.failures == 1
    await ledger.flush()
    assert ledger.problem is None
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        assert db.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
    db.close()


async def test_a_fence_is_in_the_file_before_it_is_told(place):
    """F2, L6: what an ordinary request recorded is waited for by nobody."""
    ledger = await place.ledger()
    session = story(ledger)
    assert ledger.spread(session) is None
    session.close("deleted", time.time())
    await ledger.spread(session)
    with sqlite3.connect(place.path) as db:
        assert db.execute("SELECT fenced FROM sessions").fetchall() == [(1,)]
    db.close()


async def test_a_slow_disk_is_waited_for_a_moment(place):
    """T8: and so is one that does not take the fence; one that is known to fail is not waited for at all."""
    ledger = await place.ledger(lambda store: Faulty(store, latency=2.0))
    session = story(ledger)
    session.close("deleted", time.time())
    began = time.monotonic()
    await ledger.spread(session)
    assert 0.2 < time.monotonic() - began < 1.0
    ledger._failed(StoreError("full"))
    assert ledger.spread(session) is None


async def test_missing_blocks_are_forgotten_events(place, tmp_path):
    """L5: what is missing is unknown, and positions stay what they were."""
    ledger = await place.ledger()
    session = ledger.open(b"session", WHO, None, "mcp", time.time())
    say(session, session.open_stream(Origin.STANDALONE, (), WHO), *range(100))
    await ledger.close()
    place._ledgers.remove(ledger)
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute("DELETE FROM blocks WHERE number = 1")
    db.close()
    ledger = await place.ledger()
    (stream,) = await ledger.find(b"session", time.time())
    assert (stream.first, stream.end, len(stream.events)) == (64, 100, 36)
    assert stream.at(64).id == b"64"


async def test_the_file_is_bounded(place, tmp_path):
    """Sessions beyond the limit, and what has expired, give their room back."""
    store = SqliteStore(str(place.path), sessions=50)
    place.store = lambda: store
    ledger = await place.ledger(sessions=50, idle=3.0)
    sizes = []
    for round_ in range(6):
        for number in range(100):
            session = ledger.open(b"session-%d-%d" % (round_, number), WHO, None, "mcp", time.time())
            say(session, session.open_stream(Origin.STANDALONE, (), WHO), *range(100))
        await ledger.flush()
        await store.tidy()
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    (count,) = store._writer.execute("SELECT count(*) FROM sessions").fetchone()
    assert count <= 54
    assert sizes[-1] <= sizes[1] * 2
    await asyncio.sleep(3.1)
    await store.tidy()
    assert store._writer.execute(
        "SELECT (SELECT count(*) FROM sessions), (SELECT count(*) FROM streams), (SELECT count(*) FROM blocks)"
    ).fetchone() == (0, 0, 0)
    assert place.path.stat().st_size < sizes[-1] / 4
    assert (tmp_path / "ledger.db-wal").stat().st_size < sizes[-1]


async def test_a_start_is_fast_whatever_is_kept(place):
    """Sessions are read when they are asked for."""
    ledger = await place.ledger(sessions=10_000)
    for number in range(5000):
        story(ledger, b"session-%d" % number)
        if number % 500 == 0:
            await ledger.flush()
    began = time.perf_counter()
    again = await reopened(place, ledger)
    assert len(again.sessions()) == 0
    assert (await again.find(b"session-4999", time.time())).token == "1"
    assert time.perf_counter() - began < 5.0


async def test_a_failure_is_a_store_error(place):
    ledger = await place.ledger()
    store = ledger._store
    await store._call(store._writes, store._close_writer)
    with pytest.raises(StoreError, match="it is not open"):
        await store.write([], [])
