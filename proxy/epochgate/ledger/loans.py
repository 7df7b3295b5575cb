"""A held stream that one process lends to another (R4, docs/adr/0009): what goes over, and its two ends.

The owner has the upstream connection and appends what is to go to the client to a stream in the store; the reader has
the client, and follows it there. Entries are numbered from 1 without a gap, under a name that is never used twice: what
is late, lost, evicted or foreign shows by its number, and ends the loan.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from epochgate.errors import StoreError
from epochgate.guard.record import Event
from epochgate.ledger.messages import Appended, Offer, encode

LEASE = 3.0  # s without a sign of life after which the other side is taken to be gone
PIECE = 64 * 1024  # bytes of the body in one entry, at most
WINDOW = 256 * 1024  # bytes of a loan that lie in the store at the same time
AHEAD = 64 * 1024  # bytes not read yet from which on the owner has to wait (T6), as it would for a socket
BEHIND = 16 * 1024  # bytes not read yet at which it goes on; and bytes read after which it is told of them
NOT_KNOWN = b"null"


class Head(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The head of the response, as the owner's own client would have got it."""

    status: int
    reason: bytes
    fields: list[tuple[bytes, bytes]]
    framing: Literal["CHUNKED", "CLOSE"]  # how the body would have come


class Data(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A piece of the body, and what the owner has put on record since the last one."""

    raw: bytes
    whole: bool = True  # it ends where a block ends
    position: int = 0  # of the first of these:
    events: tuple[Event, ...] = ()
    owes: bytes = b""  # JSON of the requests that are still owed a response, or `NOT_KNOWN`, where that has changed


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of the body."""

    clean: bool


Entry = Head | Data | End

_decode = msgspec.msgpack.Decoder(Entry).decode


@dataclass(frozen=True, slots=True)
class Append:
    """What is to be appended to a loan in one step, which renews its lease (s) and drops what was `read`."""

    key: str
    lease: float
    read: int
    first: int
    reader: str
    notice: bytes
    entries: Sequence[bytes]


class Lender(Protocol):
    """Fills a loan, and hears what becomes of it."""

    def has_room(self) -> None:
        """The reader has caught up."""

    def is_over(self, *, close: bool) -> None:
        """Nobody reads it any more; `close`: the stream is not to be kept for anybody."""


class Reader(Protocol):
    """Reads a loan."""

    def received(self, entry: Entry) -> None:
        """The next entry."""

    def received_all(self) -> None:
        """There are no more for now."""

    def taken_back(self) -> None:
        """Another resume has the stream now."""

    def lost(self) -> None:
        """Its owner is gone, or a part of it: nothing more can be read."""


class Loan:
    """The owner's end: entries that wait, and those in the store that were not read yet."""

    __slots__ = (
        "_behind", "_next", "_queue", "_read", "_sent", "_under_way", "_wake", "begun", "ended", "full", "heard_at",
        "key", "lender", "name", "notice", "over", "reader", "size",
    )  # fmt: skip

    def __init__(self, name: str, key: str, reader: str, wake: Callable[[Loan], None], now: float) -> None:
        self.name = name
        self.key = key
        self.reader = reader
        self.notice = encode(Appended(name))
        self.heard_at = now  # the last sign of life of the reader, on the clock of the loop
        self.size = 0  # bytes that it has not read, here or there
        self.full = False  # the owner has to wait
        self.ended = False  # the last entry was put
        self.over = False
        self.begun = asyncio.Event()  # its beginning is in the store, or it is over
        self.lender: Lender | None = None
        self._wake = wake
        self._queue: deque[bytes] = deque()
        self._under_way: list[bytes] = []  # is being appended; again after a failure
        self._next = 1  # the number of the first of these
        self._read = 0  # the number of the last entry that was read
        self._sent: deque[int] = deque()  # sizes of the entries after that, as far as they are on their way
        self._behind = 0  # bytes of these

    def put(self, entry: Entry) -> None:
        """One more entry. There is always room for it; `full` says whether to go on."""
        if self.over:
            return
        data = encode(entry)
        self._queue.append(data)
        self.size += len(data)
        self.full = self.full or self.size > AHEAD
        self.ended = isinstance(entry, End)
        self._wake(self)

    @property
    def waits(self) -> bool:
        """Whether there is something to append, and room for it."""
        return bool(self._under_way) or self._fits()

    def collect(self) -> Append:
        """What goes to the store now. Then `appended` has to follow; else it is collected again."""
        if not self._under_way:
            while self._fits():
                data = self._queue.popleft()
                self._under_way.append(data)
                self._sent.append(len(data))
                self._behind += len(data)
        return Append(self.key, LEASE, self._read, self._next, self.reader, self.notice, self._under_way)

    def appended(self) -> None:
        """It is there."""
        self._next += len(self._under_way)
        self._under_way = []
        if self._next > 1:
            self.begun.set()

    def was_read(self, number: int, now: float) -> None:
        """The reader is there, and has read up to this entry."""
        self.heard_at = now
        while self._read < number and self._sent:
            size = self._sent.popleft()
            self._behind -= size
            self.size -= size
            self._read += 1
        if self.full and self.size <= BEHIND:
            self.full = False
            if self.lender is not None:
                self.lender.has_room()

    def end(self) -> None:
        """It is over, wherever it has come to."""
        self.over = True
        self._queue.clear()
        self.begun.set()

    def _fits(self) -> bool:
        return bool(self._queue) and (not self._behind or self._behind + len(self._queue[0]) <= WINDOW)


class Borrowing:
    """The reader's end."""

    __slots__ = ("_due", "_told", "_unread", "heard_at", "key", "next", "offer", "paused", "reader")

    def __init__(self, offer: Offer, key: str, due: Callable[[Borrowing], None], now: float) -> None:
        self.offer = offer
        self.key = key
        self.next = 1  # the number of the entry that has to come next
        self.paused = True
        self.heard_at = now  # the last answer of the store, on the clock of the loop
        self.reader: Reader | None = None
        self._due = due
        self._told = 0  # the entry up to which the owner knows that it was read
        self._unread = 0  # bytes that it does not know of

    def follow(self, reader: Reader, *, paused: bool) -> None:
        """From now on this one hears what comes."""
        self.reader = reader
        self.pause(paused=paused)

    def pause(self, *, paused: bool) -> None:
        """Whether the reader's client does not keep up (T6)."""
        self.paused = paused
        if not paused:
            self._due(self)

    def take(self, entries: Sequence[tuple[int, bytes]] | None) -> list[Entry]:
        """What has come. Raises StoreError where something is missing, ValueError (msgspec) where it is no entry."""
        if entries is None:
            raise StoreError("its lease has ended")
        taken: list[Entry] = []
        for number, data in entries:
            if number != self.next:
                raise StoreError(f"entry {self.next} is missing")
            entry = _decode(data)
            if isinstance(entry, Head) is not (number == 1):
                raise StoreError("there is one head, at the beginning")
            taken.append(entry)
            self.next += 1
            self._unread += len(data)
        return taken

    def note(self, *, now: bool) -> tuple[str, int] | None:
        """What the owner is to be told of it, where much was read or it has to be `now`."""
        if not self.paused and (now or self._unread > BEHIND):
            self._told, self._unread = self.next - 1, 0
        elif not now:
            return None
        return self.offer.loan, self._told
