"""Where the ledgers of a test keep their records, and stores that fail on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from epochgate.errors import StoreError
from epochgate.guard.record import Event, Limits, Origin, Session, Stream
from epochgate.ledger.base import Store, Written
from epochgate.ledger.kept import KeptLedger
from epochgate.ledger.memory import MemoryLedger, Records
from epochgate.ledger.shared import SharedLedger
from epochgate.ledger.sqlite import SqliteStore
from epochgate.ledger.state import Change, Kept
from epochgate.ledger.valkey import ValkeyStore
from ledger.servers import Server

DAY = 86400.0
WHO = b"fingerprint of Alice"


class Place:
    """Gives ledgers that stand for processes which share a place to keep their records."""

    durable = True
    shared = False

    def __init__(self) -> None:
        self._ledgers: list[KeptLedger | MemoryLedger] = []

    def store(self) -> Store:
        raise NotImplementedError

    async def ledger(self, wrap: Callable[[Store], Store] | None = None, **limits: float) -> KeptLedger:
        store = self.store()
        ledger = self._ledger(records(**limits), store if wrap is None else wrap(store))
        await ledger.start()
        self._ledgers.append(ledger)
        return ledger

    def _ledger(self, kept: Records, store: Store) -> KeptLedger:
        return KeptLedger(kept, store)

    async def kill(self, ledger: KeptLedger) -> None:
        """As if its process were killed: what is not written now never will be."""
        self._ledgers.remove(ledger)
        for task in [*ledger._tasks, *getattr(ledger, "_working", ())]:
            task.cancel()
        _, left = await asyncio.wait(ledger._tasks, timeout=5.0)
        assert not left
        store = ledger._store
        while isinstance(store, Faulty):
            store = store._store
        if isinstance(store, SqliteStore):
            await store._call(store._reads, store._close_reader)
            await store._call(store._writes, lambda: store._close(complete=False))
            store._writes.shutdown()
            store._reads.shutdown()
        else:
            await store._disconnect()

    async def aclose(self) -> None:
        for ledger in self._ledgers:
            await ledger.close()


class Memory(Place):
    durable = False

    async def ledger(self, wrap=None, **limits: float):
        assert wrap is None
        return MemoryLedger(records(**limits))


class Sqlite(Place):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.path = directory / "ledger.db"

    def store(self) -> SqliteStore:
        return SqliteStore(str(self.path), sessions=1000)


class Valkey(Place):
    shared = True

    def __init__(self, server: Server, url: str | None = None) -> None:
        super().__init__()
        self.server = server
        self._url = url or server.url

    def store(self) -> ValkeyStore:
        return ValkeyStore(self._url, prefix="test", lifetime=DAY)

    def _ledger(self, kept: Records, store: Store) -> KeptLedger:
        return SharedLedger(kept, store)

    async def ledger(self, wrap=None, **limits: float) -> KeptLedger:
        ledger = await super().ledger(wrap, **limits)
        while ledger.works and ledger._hearing_since == float("inf"):
            await asyncio.sleep(0.005)
        return ledger


def records(
    sessions: int = 1000, streams: int = 256, events: int = 1024, idle: float = DAY, fence: float = DAY
) -> Records:
    return Records(sessions=sessions, limits=Limits(streams, events), session_idle=idle, fence=fence)


class Faulty:
    """A store whose n-th call fails. `late`: it does its work all the same, so that it is done twice in the end."""

    def __init__(self, store: Store, fail: int = 0, *, late: bool = False, latency: float = 0.0) -> None:
        self._store = store
        self.fail = fail
        self.late = late
        self.latency = latency
        self.calls = 0

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    async def _call(self, work):
        self.calls += 1
        failing = self.calls == self.fail
        await asyncio.sleep(self.latency / 2)
        if failing and not self.late:
            work.close()
            raise StoreError("it fails on demand")
        answer = await work
        await asyncio.sleep(self.latency / 2)
        if failing:
            raise StoreError("it fails on demand, too late")
        return answer

    async def open(self, key: bytes) -> bytes:
        return await self._call(self._store.open(key))

    async def write(self, changes: Sequence[Change], removed: Sequence[bytes]) -> list[Written]:
        return await self._call(self._store.write(changes, removed))

    async def keep_outage(self, at: float) -> None:
        await self._call(self._store.keep_outage(at))

    async def read(self, *known) -> Kept | None:
        return await self._call(self._store.read(*known))


def facts(session: Session | None):
    """All that a record says, to be compared."""
    if session is None:
        return None
    return {
        "token": session.token,
        "credentials": session.credentials,
        "fence": session.fence,
        "shared_ids": session.shared_ids,
        "delivered": session.delivered,
        "several": session.next_key > 1,
        "instance": session.instance,
        "boundary_at": session.boundary_at,
        "policy": session.policy,
        "index": {event_id: stream.key for event_id, stream in session.index.items()},
        "streams": {stream.key: facts_of(stream) for stream in session},
    }


def facts_of(stream: Stream):
    return (
        stream.origin,
        stream.credentials,
        list(stream.owes),
        stream.owes_known,
        stream.first,
        [(event.id, event.digest, event.at) for event in stream.events],
        dict(stream.positions),
        stream.last_id,
        stream.learner,
        (stream.spent, stream.refused, stream.told, stream.torn),
    )


def note(number: int, prefix: bytes = b"") -> Event:
    return Event(prefix + b"%d" % number, b"digest %d" % number, 1000.0 + number)


def say(session: Session, stream: Stream, *numbers: int, prefix: bytes = b"", answers=()) -> None:
    for number in numbers:
        session.add(stream, note(number, prefix), answers, learn=True)


def story(ledger, session_id: bytes = b"session", token: str | None = "1", now: float | None = None) -> Session:
    """A session with a call that owes one of two responses, and a standalone stream."""
    now = time.time() if now is None else now
    session = ledger.open(session_id, WHO, token, "mcp", now)
    call = session.open_stream(Origin.CALL, (7, "eight"), WHO)
    say(session, call, 1, 2, 3)
    say(session, call, 4, answers=(7,))
    alone = session.open_stream(Origin.STANDALONE, (), WHO)
    say(session, alone, 1, 2, prefix=b"b-")
    return session
