"""A ledger that several processes share: a resume is judged by what all of them have recorded, whichever gets it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Coroutine
from weakref import WeakValueDictionary

import msgspec

from epochgate.errors import StoreError
from epochgate.guard.record import Session
from epochgate.ledger.base import Resume
from epochgate.ledger.kept import READ_WITHIN, RESUME_WITHIN, RETRY_AFTER, KeptLedger, mirror_of
from epochgate.ledger.memory import Records
from epochgate.ledger.mirror import Mirror
from epochgate.ledger.state import KEYS, NEVER
from epochgate.ledger.valkey import ValkeyStore

ASK_WITHIN = 0.5  # s that a resume waits for what another process still has to write
REACH_AGAIN = 0.05  # s
SILENT_FOR = 60.0  # s for which nobody waits again for a process that could not be reached


class Asked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write what you have of a session, and let go of the stream that is resumed elsewhere."""

    tag: str
    asker: str
    number: int
    cursor: bytes
    credentials: bytes


class Answered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It is written."""

    number: int
    by: str


_decode = msgspec.msgpack.Decoder(Asked | Answered).decode
_encode = msgspec.msgpack.Encoder().encode


class SharedLedger(KeptLedger):
    """See `Ledger`."""

    def __init__(self, records: Records, store: ValkeyStore) -> None:
        super().__init__(records, store)
        self._shared = store
        self._key_base = secrets.randbits(30) * KEYS
        self._mirrors: WeakValueDictionary[str, Mirror] = WeakValueDictionary()
        self._hearing_since = float("inf")  # on the clock of the loop
        self._questions: dict[int, set[str]] = {}  # by number: who has not answered yet
        self._answered = asyncio.Condition()
        self._silent: dict[str, float] = {}  # processes that could not be reached, and until when they count as gone
        self._working: set[asyncio.Task[None]] = set()

    # -- what the relay asks for

    def get(self, session_id: bytes, now: float) -> Session | None:
        """See `Ledger`. What may have been fenced or granted anew elsewhere while nobody told is not at hand."""
        session = super().get(session_id, now)
        if session is not None and self.works and not self._is_fresh(session):
            return None
        return session

    async def find(self, session_id: bytes, now: float, resume: Resume | None = None) -> Session | None:
        """See `Ledger`."""
        session = self.records.get(session_id, now)
        if session is not None and resume is None and self._is_fresh(session):
            return session
        await self.read(session_id, within=READ_WITHIN if resume is None else RESUME_WITHIN)
        session = self.records.get(session_id, now)
        if resume is not None and session is not None and session.fence is None:
            others = mirror_of(session).writers - {self._shared.who}
            if others and self.works:
                await self._ask(session, others, resume)
                session = self.records.get(session_id, now)
        return session

    def spread(self, session: Session) -> Awaitable[None] | None:
        """See `Ledger`."""
        return self._spread(mirror_of(session)) if self.works else None

    async def _spread(self, mirror: Mirror) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_WITHIN):
                await self.written(mirror)

    def _is_fresh(self, session: Session) -> bool:
        return mirror_of(session).read_at >= self._hearing_since

    # -- life

    async def start(self) -> None:
        """See `Ledger`."""
        await super().start()
        self._tasks.append(asyncio.create_task(self._listen()))

    def watch(self, session: Session, life: str) -> Mirror:
        """See `KeptLedger`."""
        mirror = super().watch(session, life)
        session.key_base = self._key_base
        mirror.read_at = asyncio.get_running_loop().time()
        self._mirrors[self._shared.tag(session.id)] = mirror
        return mirror

    # -- what others tell

    async def _listen(self) -> None:
        failed = 0
        while True:
            if self.works:
                opening = self._opening
                try:
                    await self._shared.listen(self._begin_hearing, self._changed, self._told)
                except Exception as error:  # noqa: BLE001  # whatever it is, others are to be heard again afterwards
                    self._hearing_since = float("inf")
                    self._failed(error, opening)
                    failed += 1
            await asyncio.sleep(RETRY_AFTER[min(failed, 1)])

    def _begin_hearing(self) -> None:
        self._hearing_since = asyncio.get_running_loop().time()

    def _changed(self, tag: str) -> None:
        mirror = self._mirrors.get(tag)
        if mirror is not None:
            mirror.read_at = NEVER  # who asks for it meanwhile waits for what is read
            self._work(self._reread(mirror.session))

    async def _reread(self, session: Session) -> None:
        await self.read(session.id, anew=True)
        current = self.records.get(session.id, time.time())
        if (current is not session or current.fence is not None) and self.on_fenced is not None:
            self.on_fenced(session)

    def _told(self, data: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            message = _decode(data)
            if isinstance(message, Asked):
                self._work(self._answer(message))
            else:
                self._silent.pop(message.by, None)
                self._questions.get(message.number, set()).discard(message.by)
                self._work(self._notify())

    async def _notify(self) -> None:
        async with self._answered:
            self._answered.notify_all()

    async def _answer(self, asked: Asked) -> None:
        mirror = self._mirrors.get(asked.tag)
        if mirror is not None:
            if self.on_resumed is not None:
                self.on_resumed(mirror.session, Resume(asked.cursor, asked.credentials))
            await self.written(mirror)
        with contextlib.suppress(StoreError):
            await self._shared.publish(asked.asker, _encode(Answered(asked.number, self._shared.who)))

    def _work(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    # -- what others are asked

    async def _ask(self, session: Session, others: frozenset[str], resume: Resume) -> None:
        """Have the others write what they have of a session, and read it. Who was killed cannot: then it is torn."""
        number = secrets.randbits(62)
        opening = self._opening
        waiting = self._questions[number] = set(others)
        question = _encode(
            Asked(self._shared.tag(session.id), self._shared.who, number, resume.cursor, resume.credentials)
        )
        silent: set[str] = set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_WITHIN):
                    reached = await asyncio.gather(*(self._reach(other, question) for other in others))
                    silent.update(other for other, heard in zip(others, reached, strict=True) if not heard)
                    async with self._answered:
                        await self._answered.wait_for(lambda: waiting <= silent)
            gone = frozenset(waiting)
            self._silent.update((other, asyncio.get_running_loop().time() + SILENT_FOR) for other in gone)
            await self.read(session.id, anew=True, within=RESUME_WITHIN)
            for other in gone:
                ended = await self._shared.ended(other)
                current = self.records.get(session.id, time.time())
                if current is not None and isinstance(current.watcher, Mirror):
                    current.watcher.leave(frozenset({other}), torn=not ended)
        except StoreError as error:
            self._failed(error, opening)
        finally:
            del self._questions[number]

    async def _reach(self, other: str, question: bytes) -> bool:
        """Put a question to a process; again while it does not listen, which may be about to change.

        False for one that was waited for in vain a short time ago: nobody waits again. A cluster does not tell who
        listens; there it is asked all the same.
        """
        while not await self._shared.publish(other, question) or self._shared.in_cluster:
            if self._silent.get(other, 0.0) > asyncio.get_running_loop().time():
                return False
            if self._shared.in_cluster:
                return True
            await asyncio.sleep(REACH_AGAIN)
        return True
