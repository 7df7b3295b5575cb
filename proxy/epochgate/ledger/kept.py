"""A ledger that works in memory and keeps its records in a store as well, behind the traffic and never in its way."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from itertools import islice

import structlog

from epochgate.errors import ConfigurationError, StoreError, told
from epochgate.guard.record import Session
from epochgate.ledger.base import Resume, Store, Written
from epochgate.ledger.lending import Lending
from epochgate.ledger.memory import Records
from epochgate.ledger.mirror import Known, Mirror
from epochgate.ledger.state import NEVER, Kept, restore

GATHER = 0.05  # s that a change waits for others, so that they are written together
BATCH = 256  # sessions written at once
SLICE = 8  # sessions looked through at a stretch
READ_WITHIN = 0.25  # s that a request waits for the store
RESUME_WITHIN = 2.5  # s that a resume waits, which would be refused otherwise; a store that hangs is noticed before
READS_AT_ONCE = 256
MOST_READS = 1024  # under way and waiting; beyond it one goes on with what is at hand, as one that has waited too long
CLOCKS_DIFFER = 5.0  # s by which those of other processes may go wrong
GIVE_UP_AFTER = 1.5  # s without an answer, and the store is taken to be away
OPEN_WITHIN = 5.0  # s that the start waits for the store, too
WRITE_WITHIN = 10.0  # s
FLUSH_WITHIN = 5.0  # s that the end waits for the store
RETRY_AFTER = (0.1, 0.25, 0.5)  # s, the last one again and again
END_WITHIN = 1.0  # s that the end waits for work on the store that was called off
TIDY_EVERY = 60.0  # s

NOTHING: Known = (0, {})
Trouble = (StoreError, ConfigurationError, TimeoutError)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class KeptLedger:
    """See `Ledger`. What is in memory counts here; a store that is away costs nothing but what it does not keep."""

    kept = True

    def __init__(self, records: Records, store: Store) -> None:
        self.key = secrets.token_bytes(32)
        self.on_key: Callable[[bytes], None] | None = None  # is told where the kept key becomes known after the start
        self.on_fenced: Callable[[Session], None] | None = None  # another process has fenced it: what is held is void
        self.lending: Lending | None = None  # held streams that go over to other processes, where there are such
        self.on_outage: Callable[[], None] | None = None  # another process saw one of the upstream
        self.outage_at = NEVER  # the last one that this process or another one saw (s since 1970)
        self.failures = 0  # of the store, for the metrics
        self.problem: str | None = None
        self.records = records
        self._store = store
        self._opened = False
        self._outage_kept = NEVER  # the one that the store has
        self._behind = False  # something failed, and since then not all that was recorded was kept
        self._opening = 0  # counts the times that the store was opened
        self._queue: dict[Mirror, None] = {}
        self._removed: dict[bytes, None] = {}
        self._removing: frozenset[bytes] = frozenset()  # is being removed
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._round: asyncio.Future[None]  # done when another batch is written
        self._timer: asyncio.TimerHandle | None = None
        self._reads: dict[bytes, asyncio.Task[bool]] = {}
        self._unsure_at = NEVER  # when a session was not found, last, since the store did not tell of it
        self._reading = asyncio.Semaphore(READS_AT_ONCE)  # waiting for one's turn says nothing of the store
        self._tasks: list[asyncio.Task[None]] = []
        records.evicted = self._evicted

    # -- what the relay asks for

    def get(self, session_id: bytes, now: float) -> Session | None:
        """See `Ledger`."""
        return self.records.get(session_id, now)

    async def find(self, session_id: bytes, now: float, resume: Resume | None = None) -> Session | None:
        """See `Ledger`."""
        session = self.records.get(session_id, now)
        if session is None:
            answered = await self.read(session_id, within=READ_WITHIN if resume is None else RESUME_WITHIN)
            session = self.records.get(session_id, now)
            self._note_unsure(session, now, answered=answered)
        return session

    def _note_unsure(self, session: Session | None, now: float, *, answered: bool) -> None:
        """Requests of a session that is not found pass unrecorded; where the store did not tell, it may be known later.

        Then it may have delivered ids that are on no record: a cursor that is not known is not a stale one (R3).
        """
        if session is None:
            if not answered:
                self._unsure_at = now
        elif session.opened_at < self._unsure_at + CLOCKS_DIFFER:
            session.mark_delivered()

    def open(self, session_id: bytes, credentials: bytes, token: str | None, policy: str, now: float) -> Session:
        """See `Ledger`."""
        former = self.records.get(session_id, now)
        session = Session(session_id, credentials, token, self.records.limits, now)
        session.policy = policy
        self._removed.pop(session_id, None)
        mirror = self.watch(session, _life(now, None if former is None else mirror_of(former).life))
        if former is not None:
            self._abandon(former)
        self.records.put(session, now)
        self._enqueue(mirror, urgent=True)
        return session

    def spread(self, session: Session) -> Awaitable[None] | None:
        """See `Ledger`. There are no other processes."""
        return None if session.fence is None else self.settle(session)

    def settle(self, session: Session) -> Awaitable[None] | None:
        """Until what was recorded so far of a session is kept, or a moment has passed; None: nobody can keep it."""
        mirror = session.watcher
        return self._settle(mirror) if self.works and isinstance(mirror, Mirror) else None

    async def _settle(self, mirror: Mirror) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_WITHIN):
                await self.written(mirror)

    def sessions(self) -> list[Session]:
        """See `Ledger`."""
        return self.records.all()

    def tell_outage(self, at: float) -> None:
        """The upstream refused or reset a connection here: that has to outlive the process as records do (R8)."""
        if at > self.outage_at:
            self.outage_at = at
            self._idle.clear()
            if at - self._outage_kept > GATHER:
                self._wake.set()
            else:  # it goes on, and is not written each time that it is felt
                self._soon()

    @property
    def works(self) -> bool:
        """Whether the store can be asked."""
        return self._opened

    # -- life

    async def start(self) -> None:
        """See `Ledger`. A store that is away does not keep the proxy from starting."""
        self._round = asyncio.get_running_loop().create_future()
        try:
            await self._open()
        except (StoreError, TimeoutError) as error:
            self._failed(error)
        self._tasks = [asyncio.create_task(self._write_behind()), asyncio.create_task(self._tidy())]

    async def flush(self) -> None:
        """See `Ledger`."""
        if not self._idle.is_set():
            self._wake.set()
            await self._idle.wait()

    async def close(self) -> None:
        """See `Ledger`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_WITHIN):
                await self.flush()
        left = len(self._queue)
        if left:
            log.error("store.lost", sessions=left, message=self.problem)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=END_WITHIN)
        with contextlib.suppress(StoreError):
            await self._store.close(complete=not left)

    # -- write

    def watch(self, session: Session, life: str) -> Mirror:
        """Have the changes of a session written."""
        mirror = session.watcher = Mirror(session, life, self._enqueue)
        return mirror

    def _enqueue(self, mirror: Mirror, *, urgent: bool = False) -> None:
        if not mirror.queued:
            mirror.queued = True
            self._queue[mirror] = None
            self._idle.clear()
        if urgent:
            self._wake.set()
        else:
            self._soon()

    def _abandon(self, session: Session) -> None:
        """What still comes on its streams belongs to nothing, and nothing of it is written any more."""
        self._queue.pop(mirror_of(session), None)
        session.watcher = None

    def _evicted(self, session: Session) -> None:
        """It had to give way in memory: nobody would remember to remove it elsewhere."""
        self._abandon(session)
        self._remove(session.id)
        self._idle.clear()
        self._soon()

    def _remove(self, session_id: bytes) -> None:
        """Have it removed from the store. If that has been away for too long what came first is left to its lifetime.

        Such a record lacks what was delivered since, as that of a session that the store did not tell of.
        """
        self._removed[session_id] = None
        if len(self._removed) > self.records.most:
            del self._removed[next(iter(self._removed))]
            self._unsure_at = time.time()

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER, self._wake.set)

    def _hurry(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def _write_behind(self) -> None:
        failed = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            try:
                if not self._opened:
                    await self._open()
                if self.outage_at > self._outage_kept:
                    await self._keep_outage()
                if self._queue or self._removed:
                    await self._write()
                if self._behind and not self._has_more():
                    await self._store.caught_up()
                    self._behind = False
            except Exception as error:  # noqa: BLE001  # whatever it is, records are to be kept again afterwards
                self._failed(error)
                await asyncio.sleep(RETRY_AFTER[min(failed, len(RETRY_AFTER) - 1)])
                failed += 1
            else:
                failed = 0
                self._recovered()
            self._round.set_result(None)
            self._round = asyncio.get_running_loop().create_future()
            if self._opened and not self._has_more():
                self._idle.set()
            elif len(self._queue) >= BATCH or not self._opened:
                self._wake.set()
            else:
                self._soon()

    def _has_more(self) -> bool:
        """Whether something waits to be kept."""
        return bool(self._queue or self._removed) or self.outage_at > self._outage_kept

    async def _keep_outage(self) -> None:
        at = self.outage_at
        async with asyncio.timeout(WRITE_WITHIN):
            await self._store.keep_outage(at)
        self._outage_kept = at

    async def _write(self) -> None:
        """Write one batch."""
        removed = list(islice(self._removed, BATCH))
        for session_id in removed:
            del self._removed[session_id]
        self._removing = frozenset(removed)
        changes = []
        now = time.time()
        mirrors = []
        for number, mirror in enumerate(list(islice(self._queue, BATCH))):
            if self._queue.pop(mirror, mirror) is not None:
                continue  # abandoned since
            mirrors.append(mirror)
            changes.append(mirror.collect(self._lifetime(mirror.session, now)))
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)  # the traffic has its turn
        try:
            async with asyncio.timeout(WRITE_WITHIN):
                outcomes = await self._store.write(changes, removed)
        except Exception:
            for mirror, change in zip(mirrors, changes, strict=True):
                mirror.give_back(change)
                if mirror.session.watcher is mirror:
                    self._enqueue(mirror)
            for session_id in filter(self._is_gone, removed):
                self._remove(session_id)
            raise
        finally:
            self._removing = frozenset()
        for mirror, change, outcome in zip(mirrors, changes, outcomes, strict=True):
            if outcome is Written.KEPT:
                mirror.confirm(change)
            elif mirror.session.watcher is mirror:
                mirror.give_back(change)
                await self.read(mirror.session.id)
                if mirror.session.watcher is mirror:
                    self._enqueue(mirror)

    async def written(self, mirror: Mirror) -> None:
        """Wait until what was recorded so far of a session is kept; traffic that goes on meanwhile does not count."""
        mark = mirror.mark
        while mirror.session.watcher is mirror and not mirror.has_reached(mark):
            self._wake.set()
            await asyncio.shield(self._round)

    def _is_removed(self, session_id: bytes) -> bool:
        return session_id in self._removed or session_id in self._removing

    def _is_gone(self, session_id: bytes) -> bool:
        return self.records.get(session_id, time.time()) is None

    def _lifetime(self, session: Session, now: float) -> float:
        if session.fence is not None:
            return max(self.records.fence - (now - session.fenced_at), 1.0)
        return self.records.session_idle

    # -- read

    async def read(self, session_id: bytes, *, anew: bool = False, within: float = READ_WITHIN) -> bool:
        """Bring the record of a session up to what the store has; whether it told. One that fails changes nothing.

        Who comes while it is being read shares the reading; `anew`: not one that began before. Who waits longer than
        `within` s goes on with what is at hand.
        """
        task = self._reads.get(session_id)
        if task is not None and anew:
            await asyncio.wait((task,), timeout=within)
            task = self._reads.get(session_id)
        if task is None:
            if len(self._reads) >= MOST_READS:
                return False
            task = self._reads[session_id] = asyncio.create_task(self._read(session_id))
            task.add_done_callback(lambda _: self._reads.pop(session_id, None))
        await asyncio.wait((task,), timeout=within)
        return task.done() and not task.cancelled() and task.result()

    async def _read(self, session_id: bytes) -> bool:
        if self._is_removed(session_id):
            return True
        if not self._opened:
            return False
        now = time.time()
        session = self.records.get(session_id, now)
        life, known = "", NOTHING
        if session is not None:
            mirror = mirror_of(session)
            life, known = mirror.life, mirror.known()
        began = asyncio.get_running_loop().time()
        opening = self._opening
        try:
            async with self._reading, asyncio.timeout(GIVE_UP_AFTER):
                kept = await self._store.read(session_id, life, *known)
            if self.records.get(session_id, now) is session and not self._is_removed(session_id):
                self.take(session_id, session, kept, known, now)
        except Trouble as error:
            self._failed(error, opening)
            return False
        except (ValueError, TypeError) as error:  # those of msgspec are, too
            self._unreadable(session_id, session, error)
        else:
            session = self.records.get(session_id, now)
            if session is not None:
                mirror_of(session).read_at = began
        return True

    def take(self, session_id: bytes, session: Session | None, kept: Kept | None, known: Known, now: float) -> None:
        """Take what the store has of a session."""
        if kept is None:
            if session is not None:
                mirror_of(session).forgotten()
                self._enqueue(mirror_of(session))
            return
        if session is not None:
            mirror = mirror_of(session)
            if kept.life == mirror.life:
                mirror.merge(kept, known)
                return
            if kept.life < mirror.life:
                return
            self._abandon(session)
        restored = restore(session_id, kept, self.records.limits)
        mirror = self.watch(restored, kept.life)
        mirror.adopt(kept)
        self.records.put(restored, now)
        if kept.torn:
            self._enqueue(mirror)

    def _unreadable(self, session_id: bytes, session: Session | None, error: Exception) -> None:
        self.failures += 1
        message = f"what it has of a session cannot be read ({type(error).__name__})"  # its text may quote it (L7)
        log.warning("store.unreadable", message=message, remedy="what the store has of the session is removed")
        self._remove(session_id)
        if session is not None and isinstance(session.watcher, Mirror):
            session.watcher.forgotten()
            self._enqueue(session.watcher)
        self._hurry()

    # -- the store comes and goes

    async def _open(self) -> None:
        async with asyncio.timeout(OPEN_WITHIN):
            key = await self._store.open(self.key)
            outage_at = await self._store.outage_at()
        self._opened = True
        self._opening += 1
        self._outage_kept = outage_at
        self.take_outage(outage_at)
        if key != self.key:
            self.key = key
            if self.on_key is not None:
                self.on_key(key)

    def take_outage(self, kept: float) -> None:
        """Take the outage that the store has."""
        if kept > self.outage_at:
            self.outage_at = self._outage_kept = kept
            if self.on_outage is not None:
                self.on_outage()

    def _failed(self, error: Exception, opening: int | None = None) -> None:
        """Until it was opened anew the store is not asked for anything, so that nobody waits for it.

        `opening`: what failed belongs to it. If the store was opened anew since, it says nothing of the store now.
        """
        if opening is not None and opening != self._opening:
            return
        self._opened = False
        self._behind = True
        self.failures += 1
        message = told(error)
        if self.problem is None:
            log.error("store.failed", message=message, remedy="traffic goes on; what is recorded now waits in memory")
        self.problem = f"store: {message}"
        self._hurry()

    def _recovered(self) -> None:
        if self.problem is not None:
            self.problem = None
            log.info("store.recovered")

    async def _tidy(self) -> None:
        """Sessions with open streams are not idle, and what is past its time is removed."""
        every = min(TIDY_EVERY, self.records.session_idle / 4)
        while True:
            await asyncio.sleep(every)
            now = time.time()
            self.records.sweep(now)
            for session in self.records.all():
                if session.open_flows and isinstance(session.watcher, Mirror):
                    self._enqueue(session.watcher)
            if self.outage_at > NEVER:  # a shared store may have evicted it
                self._outage_kept = NEVER
                self._soon()
            with contextlib.suppress(StoreError):
                await self._store.tidy()


def mirror_of(session: Session) -> Mirror:
    """What writes a session of this ledger."""
    assert isinstance(session.watcher, Mirror)
    return session.watcher


def _life(now: float, former: str | None) -> str:
    """A name for a new epoch of an id that sorts after the former one, even where the clock was set back."""
    micros = int(now * 1_000_000)
    if former is not None:
        micros = max(micros, int(former[:16], 16) + 1)
    return f"{micros:016x}{secrets.token_hex(4)}"
