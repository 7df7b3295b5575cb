"""Streams whose client may go away while the upstream goes on (section 8): the tail that is kept, and who is held."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from epochgate.guard.record import Origin, Session, Stream

if TYPE_CHECKING:
    from epochgate.relay.flow import Flow

TRIM_EVERY = 16 * 1024  # bytes by which a tail may outgrow its room before it is trimmed
DELIVERED_TAIL = 64 * 1024  # bytes kept of what was delivered: a client that vanished may not have got the last of it


class Tail:
    """The last blocks of a stream, byte for byte. `covered`: every block after that position, up to `end`, is here."""

    __slots__ = ("_limit", "_pieces", "_room", "_size", "covered", "end", "waiting")

    def __init__(self, covered: int, limit: int) -> None:
        self.covered = self.end = covered
        self._limit = limit
        self._room = min(limit, DELIVERED_TAIL)  # up to here nothing has to go
        # The position of the last block, or -1 for one that is no event; the bytes; where its blocks end.
        self._pieces: deque[tuple[int, bytes, list[int] | None]] = deque()
        self._size = 0
        self.waiting = 0  # bytes that were not delivered

    def add(self, position: int, raw: bytes, *, delivered: bool) -> bool:
        """Keep a block; False if what was not delivered no longer fits (H2)."""
        if position > self.end:
            if position > self.end + 1:
                self.skip(position - 1)  # what a rival's connection brought in between did not come here
            self.end = position
        self._pieces.append((position, raw, None))
        self._size += len(raw)
        if not delivered:
            self.waiting += len(raw)
        if self._size > self._room + TRIM_EVERY:
            self._trim(DELIVERED_TAIL if delivered else self._limit)
        return self.waiting <= self._limit

    def add_all(self, position: int, data: bytes, stops: list[int]) -> None:
        """Keep blocks of one read that were delivered: the first, at this position, begins with it; where each ends."""
        if position > self.end + 1:
            self.skip(position - 1)
        begin = 0
        while begin < len(stops):
            start = stops[begin - 1] if begin else 0
            end = max(begin + 1, bisect_right(stops, start + self._room))
            raw = data[start : stops[end - 1]]  # no copy where it is all
            self.end = position + end - 1
            self._pieces.append((self.end, raw, [stop - start for stop in stops[begin:end]]))
            self._size += len(raw)
            begin = end
        if self._size > self._room + TRIM_EVERY:
            self._trim(DELIVERED_TAIL)

    def skip(self, position: int) -> None:
        """A block that is not kept, such as one that is too long: nothing before it can be served any more."""
        self._pieces.clear()
        self._size = self.waiting = 0
        self.covered = self.end = position

    def after(self, position: int) -> list[bytes] | None:
        """The blocks after an event, None if some of them are not here."""
        if position < self.covered:
            return None
        found = position == self.covered
        blocks: list[bytes] = []
        for at, raw in self._blocks():
            if found:
                blocks.append(raw)
            found = found or at == position
        return blocks if found else None

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        for last, raw, stops in self._pieces:
            if stops is None:
                yield last, raw
                continue
            begin = 0
            for position, stop in enumerate(stops, last + 1 - len(stops)):
                yield position, raw[begin:stop]
                begin = stop

    def deliver(self) -> None:
        """All of it has been handed to a client."""
        self.waiting = 0
        self._trim(DELIVERED_TAIL)

    def _trim(self, room: int) -> None:
        room = max(min(room, self._limit), self.waiting)
        while self._pieces and self._size - len(self._pieces[0][1]) >= room:
            position, raw, _ = self._pieces.popleft()
            self._size -= len(raw)
            if position >= 0:
                self.covered = position


class Holds:
    """The flows of guarded streams, by stream; those without a client are held, up to `most` at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._flows: dict[Stream, Flow] = {}
        self._held: dict[Flow, None] = {}  # in the order in which their clients left

    def __len__(self) -> int:
        return len(self._held)

    def add(self, flow: Flow) -> None:
        """A flow that can be resumed."""
        self._flows[flow.stream] = flow

    def remove(self, flow: Flow) -> None:
        """It cannot be resumed any more."""
        self._held.pop(flow, None)
        if self._flows.get(flow.stream) is flow:
            del self._flows[flow.stream]

    def hold(self, flow: Flow) -> None:
        """Its client went away. Where too many are held, the one whose client left first is given up (H2)."""
        self._held[flow] = None
        if len(self._held) > self._most:
            next(iter(self._held)).close()

    def release(self, flow: Flow) -> None:
        """It has a client again."""
        self._held.pop(flow, None)

    def get(self, stream: Stream) -> Flow | None:
        """The flow of a stream that can be resumed."""
        return self._flows.get(stream)

    def of(self, session: Session) -> Iterator[Flow]:
        """The flows of a session."""
        for stream in session:
            flow = self._flows.get(stream)
            if flow is not None:
                yield flow

    def make_room(self, session: Session, credentials: bytes) -> None:
        """A standalone stream that is held, or whose client is gone in half, gives way to a new one (H2)."""
        for flow in list(self.of(session)):
            standalone = flow.stream.origin is Origin.STANDALONE and flow.credentials == credentials
            if standalone and (flow.downstream is None or flow.downstream.client.half_closed):
                flow.close()

    def close_held(self, session: Session) -> None:
        """The session ended or is fenced: what is held for it is closed; what is flowing runs to its end (F6)."""
        for flow in [flow for flow in self._held if flow.session is session]:
            flow.close()

    def close_all(self) -> None:
        """The proxy drains."""
        for flow in list(self._held):
            flow.close()
