"""A ledger that several processes share: a resume is judged by what all of them have recorded, whichever gets it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from weakref import WeakValueDictionary

import msgspec

from epochgate.errors import StoreError
from epochgate.guard.record import Session
from epochgate.ledger.base import Resume
from epochgate.ledger.kept import (
    GIVE_UP_AFTER,
    READ_WITHIN,
    RESUME_WITHIN,
    RETRY_AFTER,
    KeptLedger,
    Trouble,
    mirror_of,
)
from epochgate.ledger.lending import Lending
from epochgate.ledger.memory import Records
from epochgate.ledger.messages import (
    Answered,
    Appended,
    Asked,
    Granted,
    Message,
    Offer,
    Reading,
    Returned,
    TakenBack,
    decode,
    encode,
)
from epochgate.ledger.mirror import Mirror
from epochgate.ledger.state import KEYS, NEVER
from epochgate.ledger.valkey import OUTAGE, ValkeyStore

ASK_WITHIN = 0.5  # s that a resume waits for another process to listen; in a cluster nobody knows whether it does
ANSWER_WITHIN = 2.0  # s that it waits then for what that one still has to write, which may have much to do
REACH_AGAIN = 0.05  # s
CLOSE_WITHIN = 1.0  # s that the end waits for what is lent
SILENT_FOR = 60.0  # s for which nobody waits again for a process that could not be reached


@dataclass(slots=True)
class _Question:
    """What other processes were asked: who has not answered yet, and what those that did offer."""

    waiting: set[str]
    offers: list[Offer]


class SharedLedger(KeptLedger):
    """See `Ledger`."""

    def __init__(self, records: Records, store: ValkeyStore) -> None:
        super().__init__(records, store)
        self.lending = self._lending = Lending(store, self._read_anew, self._failed, self._work)
        self._shared = store
        self._key_base = secrets.randbits(30) * KEYS
        self._mirrors: WeakValueDictionary[str, Mirror] = WeakValueDictionary()
        self._hearing_since = float("inf")  # on the clock of the loop
        self._questions: dict[int, _Question] = {}  # by number
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
        answered = await self.read(session_id, within=READ_WITHIN if resume is None else RESUME_WITHIN)
        session = self.records.get(session_id, now)
        self._note_unsure(session, now, answered=answered)
        if resume is not None and session is not None and session.fence is None:
            others = mirror_of(session).writers - {self._shared.who}
            if others and self.works:
                await self._ask(session, others, resume)
                session = self.records.get(session_id, now)
        return session

    def spread(self, session: Session) -> Awaitable[None] | None:
        """See `Ledger`."""
        return self.settle(session)

    def _is_fresh(self, session: Session) -> bool:
        return mirror_of(session).read_at >= self._hearing_since

    # -- life

    async def start(self) -> None:
        """See `Ledger`."""
        await super().start()
        self._tasks.append(asyncio.create_task(self._listen()))
        self._tasks += self._lending.start()

    async def close(self) -> None:
        """See `Ledger`."""
        await self._lending.close(CLOSE_WITHIN)
        if self._working:
            await asyncio.wait(self._working, timeout=CLOSE_WITHIN)
        await super().close()

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
        self._work(self._read_outage())  # what was announced before was not heard

    async def _read_outage(self) -> None:
        opening = self._opening
        try:
            async with asyncio.timeout(GIVE_UP_AFTER):
                self.take_outage(await self._shared.outage_at())
        except Trouble as error:
            self._failed(error, opening)  # it is read again when the store was opened anew

    def _changed(self, tag: str) -> None:
        if tag == OUTAGE:
            self._work(self._read_outage())
            return
        mirror = self._mirrors.get(tag)
        if mirror is not None:
            mirror.read_at = NEVER  # who asks for it meanwhile waits for what is read
            self._work(self._reread(mirror.session))

    async def _read_anew(self, session_id: bytes) -> None:
        await self.read(session_id, anew=True)

    async def _reread(self, session: Session) -> None:
        await self._read_anew(session.id)
        current = self.records.get(session.id, time.time())
        if (current is not session or current.fence is not None) and self.on_fenced is not None:
            self.on_fenced(session)

    def _told(self, data: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            self._hear(decode(data))

    def _hear(self, message: Message) -> None:
        lending = self._lending
        match message:
            case Asked():
                self._work(self._answer(message))
            case Answered():
                self._take_answer(message)
            case Granted(tag, stream):
                mirror = self._mirrors.get(tag)
                if mirror is not None and lending.on_granted is not None:
                    lending.on_granted(mirror.session, stream)
            case Appended(loan):
                lending.was_appended(loan)
            case Reading(loans):
                lending.were_read(loans)
            case Returned(loan, close):
                lending.was_returned(loan, close=close)
            case TakenBack(loan):
                lending.was_taken_back(loan)

    def _take_answer(self, answered: Answered) -> None:
        self._silent.pop(answered.by, None)
        question = self._questions.get(answered.number)
        if question is not None:
            question.waiting.discard(answered.by)
            if answered.offer is not None:
                question.offers.append(answered.offer)
            self._work(self._notify())
        elif answered.offer is not None:
            self._lending.give_back(answered.offer)  # it comes too late

    async def _notify(self) -> None:
        async with self._answered:
            self._answered.notify_all()

    async def _answer(self, asked: Asked) -> None:
        mirror = self._mirrors.get(asked.tag)
        offer = None
        if mirror is not None:
            if self._lending.on_resumed is not None:
                offer = self._lending.on_resumed(mirror.session, asked)
            await self.written(mirror)
            if offer is not None and not await self._lending.has_begun(offer.loan):
                self._lending.was_returned(offer.loan, close=True)  # the resume goes to the upstream
                offer = None
        with contextlib.suppress(StoreError):
            await self._shared.publish(asked.asker, encode(Answered(asked.number, self._shared.who, offer)))

    def _work(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    # -- what others are asked

    async def _ask(self, session: Session, others: frozenset[str], resume: Resume) -> None:
        """Have the others write what they have of a session, and read it. Who was killed cannot: then it is torn."""
        number = secrets.randbits(62)
        opening = self._opening
        question = self._questions[number] = _Question(set(others), [])
        waiting = question.waiting
        tag, who = self._shared.tag(session.id), self._shared.who
        found = session.locate(resume.cursor)
        stream = -1 if found is None else found[0].key
        asked = encode(Asked(tag, who, number, resume.cursor, resume.credentials, stream, resume.serves))
        try:
            listening: set[str] = set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_WITHIN):
                    await asyncio.gather(*(self._reach(other, asked, listening) for other in others))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_WITHIN if self._shared.in_cluster else ANSWER_WITHIN), self._answered:
                    await self._answered.wait_for(lambda: not waiting & listening)
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
            self._take_offers(session.id, question.offers, resume)

    def _take_offers(self, session_id: bytes, offers: list[Offer], resume: Resume) -> None:
        """Those of the epoch that this process knows; the others go back."""
        session = self.records.get(session_id, time.time())
        life = None if session is None or session.fence is not None else mirror_of(session).life
        for offer in offers:
            if offer.life == life:
                resume.offers.append(offer)
            else:
                self._lending.give_back(offer)

    async def _reach(self, other: str, asked: bytes, listening: set[str]) -> None:
        """Put a question to a process; again while it does not listen, which may be about to change.

        One that was waited for in vain a short time ago is not waited for again. A cluster does not tell who listens;
        there it is asked all the same.
        """
        while not await self._shared.publish(other, asked) or self._shared.in_cluster:
            if self._silent.get(other, 0.0) > asyncio.get_running_loop().time():
                return
            if self._shared.in_cluster:
                break
            await asyncio.sleep(REACH_AGAIN)
        listening.add(other)
