"""The loans of one process, to others and from others: what is appended and read, behind the traffic and in batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

import structlog

from epochgate.errors import StoreError, told
from epochgate.guard.record import Session, Stream
from epochgate.ledger.loans import LEASE, NOT_KNOWN, Borrowing, Data, End, Entry, Head, Loan
from epochgate.ledger.messages import Asked, Granted, Message, Offer, Reading, Returned, TakenBack, encode
from epochgate.ledger.mirror import Mirror

if TYPE_CHECKING:
    from epochgate.ledger.valkey import ValkeyStore

BEAT = 1.0  # s between two signs of life
READ_AT_ONCE = 64  # entries
AGAIN_AFTER = 0.25  # s after the store has failed
BEGIN_WITHIN = 1.0  # s for the beginning of a loan to get into the store, and out of it

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Lending:
    """Keeps the loans.

    `read` brings the record of a session up to date, `failed` is told where the store fails, `work` sees to what nobody
    waits for.
    """

    def __init__(
        self,
        store: ValkeyStore,
        read: Callable[[bytes], Coroutine[object, object, None]],
        failed: Callable[[Exception], None],
        work: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        self.who = store.who
        self.on_resumed: Callable[[Session, Asked], Offer | None] | None = None  # by another process
        self.on_granted: Callable[[Session, int], None] | None = None  # a resume of this stream, to another process
        self._store = store
        self._update = read
        self._failed = failed
        self._work = work
        self._lent: dict[str, Loan] = {}
        self._borrowed: dict[str, Borrowing] = {}
        self._to_append: dict[Loan, None] = {}
        self._to_read: dict[Borrowing, None] = {}
        self._append_now = asyncio.Event()
        self._read_now = asyncio.Event()
        self._idle = asyncio.Event()  # nothing is to be appended
        self._idle.set()

    def start(self) -> list[asyncio.Task[None]]:
        """The tasks that do the work, to be cancelled after `close`."""
        return [asyncio.create_task(self._repeat(work)) for work in (self._append, self._read, self._beat)]

    async def _repeat(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  # whatever it is, the other loans are to go on
                self._failed(error)
                await asyncio.sleep(AGAIN_AFTER)

    async def close(self, within: float) -> None:
        """What is borrowed goes back; what is lent is appended, as far as there is room for it."""
        for borrowing in list(self._borrowed.values()):
            self._lose(borrowing, "the proxy ends")
            self.give_back(borrowing.offer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._idle.wait()

    def tell(self, who: str, message: Message) -> None:
        """Tell another process something; whether it hears it is not known."""
        self._work(self._tell(who, encode(message)))

    async def _tell(self, who: str, data: bytes) -> None:
        with contextlib.suppress(StoreError):
            await self._store.publish(who, data)

    def granted(self, session: Session, stream: Stream) -> None:
        """The upstream has let somebody resume a stream here: who holds it hears of that (R4)."""
        if isinstance(session.watcher, Mirror):
            message = Granted(self._store.tag(session.id), stream.key)
            for other in session.watcher.writers - {self.who}:
                self.tell(other, message)

    # -- at the owner

    def lend(self, session_id: bytes, reader: str) -> Loan:
        """A new loan of a stream of this session to a process."""
        name = secrets.token_hex(16)
        key = self._store.loan_key(self._store.tag(session_id), name)
        loan = self._lent[name] = Loan(name, key, reader, self._wake, _now())
        return loan

    async def has_begun(self, name: str) -> bool:
        """Wait a moment for the beginning of a loan to be in the store; whether it is."""
        loan = self._lent.get(name)
        if loan is None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_WITHIN):
                await loan.begun.wait()
        return loan.begun.is_set() and not loan.over

    def take_back(self, loan: Loan) -> None:
        """The stream goes to somebody else."""
        if not loan.over:
            self._end(loan)
            self.tell(loan.reader, TakenBack(loan.name))

    def were_read(self, loans: Sequence[tuple[str, int]]) -> None:
        """A reader says how far it is."""
        for name, number in loans:
            loan = self._lent.get(name)
            if loan is None:
                continue
            loan.was_read(number, _now())
            if loan.ended and not loan.size:
                self._end(loan)
            elif loan.waits:
                self._wake(loan)

    def was_returned(self, name: str, *, close: bool) -> None:
        """A reader has no use for it any more."""
        loan = self._lent.get(name)
        if loan is not None:
            self._give_up(loan, close=close)

    def _wake(self, loan: Loan) -> None:
        self._to_append[loan] = None
        self._idle.clear()
        self._append_now.set()

    def _give_up(self, loan: Loan, *, close: bool = False) -> None:
        self._end(loan)
        if loan.lender is not None:
            loan.lender.is_over(close=close)

    def _end(self, loan: Loan) -> None:
        loan.end()
        self._lent.pop(loan.name, None)
        self._work(self._unlink(loan.key))

    async def _unlink(self, key: str) -> None:
        with contextlib.suppress(StoreError):  # its lease ends
            await self._store.unlink(key)

    async def _append(self) -> None:
        await self._append_now.wait()
        self._append_now.clear()
        loans = [loan for loan in self._to_append if not loan.over]
        self._to_append.clear()
        try:
            outcomes = await self._store.append([loan.collect() for loan in loans])
        except StoreError:
            for loan in loans:
                self._wake(loan)
            raise
        for loan, done in zip(loans, outcomes, strict=True):
            if loan.over:
                self._work(self._unlink(loan.key))  # it may have come there after it was removed
            elif not done:
                self._give_up(loan)
            else:
                loan.appended()
                if loan.waits:
                    self._wake(loan)
        if not self._to_append:
            self._idle.set()

    # -- at the reader

    async def borrow(self, session_id: bytes, offer: Offer) -> tuple[Borrowing, list[Entry]] | None:
        """Take an offer: the loan, and its beginning from the head on. Where it cannot be had, None: it goes back."""
        key = self._store.loan_key(self._store.tag(session_id), offer.loan)
        borrowing = self._borrowed[offer.loan] = Borrowing(offer, key, self._read_on, _now())
        taken: list[Entry] = []
        try:
            async with asyncio.timeout(BEGIN_WITHIN):
                (entries,) = await self._store.follow([(key, 1)], READ_AT_ONCE)
            taken = borrowing.take(entries)
        except (StoreError, TimeoutError, ValueError) as error:
            log.warning("loan.failed", message=told(error))
        if taken and isinstance(taken[0], Head) and self._has(borrowing):
            return borrowing, taken
        self.give_back(offer, close=True)
        return None

    def give_back(self, offer: Offer, *, close: bool = False) -> None:
        """There is no use for it here (any more). `close`: the resume goes to the upstream."""
        self._borrowed.pop(offer.loan, None)
        self.tell(offer.owner, Returned(offer.loan, close))

    def make_up(self, session: Session, stream: Stream, delivered: Sequence[Data]) -> None:
        """What was delivered here of a stream goes on record, as far as its owner did not live to write it (L4)."""
        self._work(self._make_up(session, stream, delivered))

    async def _make_up(self, session: Session, stream: Stream, delivered: Sequence[Data]) -> None:
        await self._update(session.id)
        if session.watcher is None or session.streams.get(stream.key) is not stream:
            return
        for data in delivered:
            for position, event in enumerate(data.events, data.position):
                if position == stream.end:
                    session.add(stream, event, learn=True)
            if data.owes == NOT_KNOWN:
                stream.forget_owed()
            elif data.owes:
                owes = json.loads(data.owes)
                stream.owes = {answer: None for answer in stream.owes if answer in owes}
        session.stream_changed(stream)

    def was_taken_back(self, name: str) -> None:
        """Another resume has the stream."""
        borrowing = self._borrowed.pop(name, None)
        if borrowing is not None and borrowing.reader is not None:
            borrowing.reader.taken_back()

    def was_appended(self, name: str) -> None:
        """There is more of it."""
        borrowing = self._borrowed.get(name)
        if borrowing is not None:
            self._read_on(borrowing)

    def _read_on(self, borrowing: Borrowing) -> None:
        if not borrowing.paused:
            self._to_read[borrowing] = None
            self._read_now.set()

    def _has(self, borrowing: Borrowing) -> bool:
        return self._borrowed.get(borrowing.offer.loan) is borrowing

    def _lose(self, borrowing: Borrowing, why: str) -> None:
        log.warning("loan.lost", message=why, remedy="its client is cut off and resumes; look after the other process")
        del self._borrowed[borrowing.offer.loan]
        if borrowing.reader is not None:
            borrowing.reader.lost()

    async def _read(self) -> None:
        await self._read_now.wait()
        self._read_now.clear()
        due = [borrowing for borrowing in self._to_read if self._has(borrowing)]
        self._to_read.clear()
        try:
            answers = await self._store.follow([(each.key, each.next) for each in due], READ_AT_ONCE)
        except StoreError:
            for borrowing in filter(self._has, due):
                if _now() - borrowing.heard_at > LEASE:
                    self._lose(borrowing, "the store does not answer")
                else:
                    self._read_on(borrowing)
            raise
        for borrowing, entries in zip(due, answers, strict=True):
            if self._has(borrowing):
                self._take(borrowing, entries)

    def _take(self, borrowing: Borrowing, entries: list[tuple[int, bytes]] | None) -> None:
        borrowing.heard_at = _now()
        try:
            taken = borrowing.take(entries)
        except (StoreError, ValueError) as error:
            self._lose(borrowing, told(error))
            return
        self.pass_on(borrowing, taken)
        if self._has(borrowing):
            note = borrowing.note(now=False)
            if note is not None:
                self.tell(borrowing.offer.owner, Reading([note]))
            if len(taken) == READ_AT_ONCE:
                self._read_on(borrowing)

    def pass_on(self, borrowing: Borrowing, entries: Sequence[Entry]) -> None:
        """Give entries to the reader."""
        reader = borrowing.reader
        assert reader is not None
        for entry in entries:
            reader.received(entry)
            if isinstance(entry, End):
                del self._borrowed[borrowing.offer.loan]
                self.tell(borrowing.offer.owner, Reading([(borrowing.offer.loan, borrowing.next - 1)]))
                return
        reader.received_all()

    # -- both

    async def _beat(self) -> None:
        """Say what is alive, and give up what is not."""
        await asyncio.sleep(BEAT)
        now = _now()
        for loan in list(self._lent.values()):
            if now - loan.heard_at > LEASE:
                self._give_up(loan)
            else:
                self._wake(loan)  # which renews its lease
        reading: dict[str, list[tuple[str, int]]] = {}
        for borrowing in self._borrowed.values():
            note = borrowing.note(now=True)
            if note is not None:
                reading.setdefault(borrowing.offer.owner, []).append(note)
            self._read_on(borrowing)
        for owner, loans in reading.items():
            self.tell(owner, Reading(loans))


def _now() -> float:
    return asyncio.get_running_loop().time()
