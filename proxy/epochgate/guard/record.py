"""The records of the ledger: sessions, their streams, the events of a stream; and the questions asked of them.

All of it is bounded (L5): what has to be forgotten is unknown from then on, never wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from epochgate.guard.eventids import Learner, Order
from epochgate.guard.mcp import RpcId


class Origin(StrEnum):
    """How a stream began."""

    CALL = "call"  # a POST: it owes responses
    STANDALONE = "standalone"  # a GET without a cursor: it owes nothing
    INITIALIZE = "initialize"  # the answer to the handshake: its ids are not "delivered" in the sense of R3
    UNKNOWN = "unknown"  # a resume that was let through unproven: what it owes is not known


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An event as it was read: the id that stuck (None: no id), the digest of its data (empty: priming), when (s).

    Of one that came from an instance of the upstream after another one had answered, `at` is when it was asked: the
    session may have gone over to that other one.
    """

    id: bytes | None
    digest: bytes
    at: float

    @property
    def priming(self) -> bool:
        """Whether it has an id only."""
        return not self.digest


class Asked(NamedTuple):
    """When an answer was asked for (s), and the instance of the upstream that gave it (None: it told none)."""

    at: float
    instance: bytes | None


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is remembered of one session."""

    streams: int
    events: int


class Stream:
    """One logical stream. Positions count its events from 0; the first ones may have been forgotten."""

    __slots__ = (
        "credentials", "empties", "events", "first", "key", "last_id", "learner", "left_at", "origin", "owes",
        "owes_known", "positions", "refused", "spent", "told", "torn",
    )  # fmt: skip

    def __init__(self, key: int, origin: Origin, owes: tuple[RpcId, ...], credentials: bytes) -> None:
        self.key = key
        self.origin = origin
        self.owes: dict[RpcId, None] = dict.fromkeys(owes)  # the responses still to come, in order
        self.credentials = credentials
        self.events: deque[Event] = deque()
        self.first = 0  # the position of events[0]
        self.positions: dict[bytes, int] = {}  # id -> the last position that has it
        self.last_id: bytes | None = None
        self.learner = Learner()
        self.owes_known = True  # False: its request, or one of its messages, could not be read
        self.left_at: float | None = None  # when its client went away while the upstream went on (observe mode)
        self.empties = 0  # resumes in a row that ended without a message (R9)
        self.spent = False  # an ask since its connection broke was answered by a 4xx or 5xx (F4)
        self.refused = False
        self.told = False
        self.torn = False  # read from a store whose writer died: its end, and newer streams, may be missing

    @property
    def finished(self) -> bool:
        """Whether it was opened by a call and has brought every response that it owed."""
        return self.origin is Origin.CALL and self.owes_known and not self.owes

    @property
    def end(self) -> int:
        """The position that the next event gets."""
        return self.first + len(self.events)

    @property
    def last_message_id(self) -> bytes | None:
        """The last id that a message had; that of a priming event only where no message had any."""
        return next((e.id for e in reversed(self.events) if e.id is not None and not e.priming), self.last_id)

    def forget_owed(self) -> None:
        """A message could not be read (L3): it may have been any response that was owed."""
        self.owes.clear()
        self.owes_known = False

    def at(self, position: int) -> Event | None:
        """The event at a position, None where it is forgotten or still to come."""
        index = position - self.first
        return self.events[index] if 0 <= index < len(self.events) else None

    def find(self, event_id: bytes | None, digest: bytes, before: int) -> int | None:
        """The last position below `before` that holds exactly this event."""
        position = self.end
        for event in reversed(self.events):  # by number, each look into a deque is a walk from its end
            position -= 1
            if event.digest == digest and event.id == event_id and position < before:
                return position
        return None

    def has_own_id(self, position: int) -> bool:
        """Whether its event surely came with an id of its own: one that did not has none, or that of the one before.

        Servers do not store what they send without an id.
        """
        event, before = self.at(position), self.at(position - 1)
        return event is not None and event.id is not None and (before is None or event.id != before.id)

    def message_from(self, position: int) -> int:
        """The first position from `position` on that is no priming event; `end` if there is none."""
        while (event := self.at(position)) is not None and event.priming:
            position += 1
        return position

    def message_up_to(self, position: int) -> int:
        """The last position up to `position` that is no priming event; one before `first` if there is none."""
        while (event := self.at(position)) is not None and event.priming:
            position -= 1
        return position

    def holds(self, event_id: bytes, digest: bytes) -> bool:
        """Whether one of the events that last had this id is this one: several in a row where the id stuck."""
        position = self.positions.get(event_id, -1)
        while (event := self.at(position)) is not None and event.id == event_id:
            if event.digest == digest:
                return True
            position -= 1
        return False

    def is_like(self, other: Stream) -> bool:
        """Whether some message came on both under the same id, so that one more of these tells nothing."""
        return any(e.id is not None and not e.priming and other.holds(e.id, e.digest) for e in self.events)


class Session:
    """What an `Mcp-Session-Id` names, in one epoch of it."""

    __slots__ = (
        "active_at", "boundary_at", "credentials", "delivered", "fence", "fenced_at", "id", "index",
        "instance", "key_base", "limits", "next_key", "open_flows", "opened_at", "policy", "shared_ids", "streams",
        "token", "watcher", "would_be_fenced",
    )  # fmt: skip

    def __init__(self, session_id: bytes, credentials: bytes, token: str | None, limits: Limits, now: float) -> None:
        self.id = session_id
        self.credentials = credentials
        self.token = token
        self.limits = limits
        self.opened_at = now
        self.active_at = now
        self.fence: str | None = None  # the reason of the refusal that fenced it (F2)
        self.fenced_at = 0.0
        self.streams: dict[int, Stream] = {}
        self.next_key = 0  # how many streams it has had
        self.key_base = 0  # where processes share a session, each counts the keys of its streams from another number
        self.index: dict[bytes, Stream] = {}  # id -> the stream that had it last
        self.shared_ids = False  # some id was seen on two streams: ids alone identify nothing here
        self.delivered = False  # an id was delivered on a stream other than the handshake's (R3)
        self.instance: bytes | None = None
        self.boundary_at = float("-inf")  # the last boundary signal
        self.policy = ""
        self.would_be_fenced = False  # it was counted so, where the policy only observes
        self.open_flows = 0  # streams that are being read from the upstream: they keep the session (L5)
        self.watcher: Watcher | None = None

    # -- streams and events

    def open_stream(self, origin: Origin, owes: tuple[RpcId, ...] = (), credentials: bytes = b"") -> Stream:
        """A new stream. Where there are too many (L5) a finished call is forgotten, or else the oldest stream."""
        if len(self.streams) >= self.limits.streams:
            oldest = next(iter(self.streams.values()))
            if not oldest.finished:
                oldest = next((stream for stream in self if stream.finished), oldest)
            self.forget(oldest)
        stream = Stream(self.key_base + self.next_key, origin, owes, credentials)
        self.next_key += 1
        self.streams[stream.key] = stream
        if self.watcher is not None:
            self.watcher.stream_opened(self, stream)
        return stream

    def add(self, stream: Stream, event: Event, answers: tuple[RpcId, ...] = (), *, learn: bool) -> None:
        """Append an event to a stream (L3). `learn`: it came un-resumed, so the order of ids is learnt from it (E3)."""
        if stream.key not in self.streams:
            return  # forgotten meanwhile: nothing is added to what is unknown
        event_id, events = event.id, stream.events
        if event_id is not None:
            positions, index = stream.positions, self.index
            if learn:
                if event.digest or event_id != stream.last_id:
                    stream.learner.see(event_id, repeated=event_id in positions)
                if event_id in index and index[event_id] is not stream:
                    self.shared_ids = True
            positions[event_id] = stream.first + len(events)
            stream.last_id = event_id
            index[event_id] = stream
            if not self.delivered:
                self.delivered = stream.origin is not Origin.INITIALIZE
        events.append(event)
        if event.digest:
            stream.empties = 0
        for answer in answers:
            stream.owes.pop(answer, None)
        if len(events) > self.limits.events:
            self._forget_first(stream)
        if self.watcher is not None:
            self.watcher.event_added(self, stream, event, answers)

    def locate(self, cursor: bytes) -> tuple[Stream, int] | None:
        """The stream and the position that a cursor names: the last event that has this id (R3)."""
        stream = self.index.get(cursor)
        if stream is None:
            return None
        return stream, stream.positions[cursor]

    def named_by(self, cursor: bytes) -> list[Stream]:
        """All streams that had an event with this id: where ids are common to streams, it names none of them alone."""
        return [stream for stream in self if cursor in stream.positions] if self.shared_ids else []

    def cursor_before(self, stream: Stream, position: int) -> bytes | None:
        """Where to ask from to get the last message up to `position` again (R5), None if there is no such cursor.

        It is the id of an event before that message, and of no later event.
        """
        for earlier in range(stream.message_up_to(position) - 1, stream.first - 1, -1):
            event = stream.at(earlier)
            if event is not None and event.id is not None and self.locate(event.id) == (stream, earlier):
                return event.id
        return None

    def has_elsewhere(self, stream: Stream, event_id: bytes, digest: bytes | None, like: set[int]) -> bool:
        """Whether another stream has an event of this id; given a digest, this very event, which is not common to both.

        Streams that count their ids alike may well say the same; then only what sets them apart tells them apart. What
        an unproven resume brought belongs to a stream that is not known. `like` remembers for the next time which
        streams (keys) have something in common with this one.
        """
        if digest is None:
            other = self.index.get(event_id)
            return other is not None and other is not stream and other.origin is not Origin.UNKNOWN
        for other in self:
            if other is stream or other.origin is Origin.UNKNOWN or other.key in like:
                continue
            if other.holds(event_id, digest):
                if not stream.is_like(other):
                    return True
                like.add(other.key)
        return False

    def knows(self, event_id: bytes) -> bool:
        """Whether an event of this session has this id."""
        return event_id in self.index

    def order_of(self, stream: Stream) -> Order:
        """What `auto` has learnt about the ids of a stream (E3)."""
        return stream.learner.order(several_streams=self.next_key > 1)

    def forget(self, stream: Stream) -> None:
        """A stream has to give way: its events are unknown from now on (L5)."""
        del self.streams[stream.key]
        if self.watcher is not None:
            self.watcher.stream_forgotten(self, stream)
        for event_id in stream.positions:
            if self.index.get(event_id) is stream:
                del self.index[event_id]

    def _forget_first(self, stream: Stream) -> None:
        event = stream.events.popleft()
        position = stream.first
        stream.first += 1
        event_id = event.id
        if event_id is not None and stream.positions.get(event_id) == position:
            del stream.positions[event_id]
            if self.index.get(event_id) is stream:
                del self.index[event_id]

    # -- the life of the session

    def note_gap(self, now: float, ttl: float | None) -> None:
        """A request comes: a gap of more than `ttl` seconds since the last sign of life is a boundary signal."""
        if ttl is not None and now - self.active_at > ttl:
            self.mark_boundary(now)

    def touch(self, now: float) -> None:
        """A sign of life: the upstream granted a request. One that it refuses may be anybody's (F3)."""
        self.active_at = now
        if self.watcher is not None:
            self.watcher.session_touched(self)

    def mark_boundary(self, now: float) -> None:
        """A sign that the session may have ended: an overlap with what came before proves nothing any more."""
        self.boundary_at = now
        if self.watcher is not None:
            self.watcher.session_changed(self)

    def see_instance(self, instance: bytes | None, now: float) -> None:
        """The instance header of a response; another value than before is a boundary signal."""
        if instance is None or instance == self.instance:
            return
        if self.instance is not None:
            self.boundary_at = now
        self.instance = instance
        if self.watcher is not None:
            self.watcher.session_changed(self)

    def came_at(self, asked: Asked, now: float) -> float:
        """When an event that is read now counts as having come; see `Event`."""
        return now if asked.instance in (None, self.instance) else asked.at

    def mark_delivered(self) -> None:
        """Something was delivered whose ids cannot be read (T8): its client may well resume (R3)."""
        if not self.delivered:
            self.delivered = True
            if self.watcher is not None:
                self.watcher.session_changed(self)

    def learn_token(self, token: str) -> None:
        """The first token counts where the handshake had none (L1)."""
        self.token = token
        if self.watcher is not None:
            self.watcher.session_changed(self)

    def close(self, reason: str, now: float) -> None:
        """Fence it: from now on every request with this id is refused with this reason (F2). The first reason stays."""
        if self.fence is None:
            self.fence = reason
            self.fenced_at = now
            if self.watcher is not None:
                self.watcher.session_changed(self)

    def stream_changed(self, stream: Stream) -> None:
        """A refusal has changed what a stream was told; a ledger that keeps it elsewhere hears of it."""
        if self.watcher is not None and stream.key in self.streams:
            self.watcher.stream_changed(self, stream)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self.streams.values())


class Watcher:
    """What a ledger that writes elsewhere is told of a change; the base hears nothing."""

    __slots__ = ()

    def session_changed(self, session: Session) -> None:
        """Token, fence, boundary or instance changed."""

    def session_touched(self, session: Session) -> None:
        """There was traffic."""

    def stream_opened(self, session: Session, stream: Stream) -> None:
        """A stream was opened."""

    def stream_forgotten(self, session: Session, stream: Stream) -> None:
        """A stream had to give way (L5)."""

    def stream_changed(self, session: Session, stream: Stream) -> None:
        """What a stream was told, or how it was refused, changed."""

    def event_added(self, session: Session, stream: Stream, event: Event, answers: tuple[RpcId, ...]) -> None:
        """An event was added, and answered these requests."""
