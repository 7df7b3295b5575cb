"""What of a session still has to be written. The records themselves are the queue: what waits costs no memory."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from epochgate.guard.mcp import RpcId
from epochgate.guard.record import Event, Session, Stream, Watcher
from epochgate.ledger.state import (
    BLOCK,
    NEVER,
    Change,
    Kept,
    StreamChange,
    add_stream,
    decode_head,
    encode_blocks,
    encode_head,
    encode_state,
    merge_stream,
    reindex,
    replace_stream,
    take_head,
    tear,
)

TOUCH_EVERY = 5.0  # s; the time of the last traffic alone is written no more often


Known = tuple[int, dict[int, int]]  # the revisions of the head and of the streams that a store is known to have


class Queue(Protocol):
    """Takes a mirror that has something to write."""

    def __call__(self, mirror: Mirror, *, urgent: bool = False) -> None:
        """`urgent`: it does not wait for others."""


class _Written(NamedTuple):
    """What the store has of a stream."""

    rev: int
    end: int


_NOTHING = _Written(0, 0)


class Mirror(Watcher):
    """Hears of the changes of one session, and calls `queue` when there is something to write."""

    __slots__ = (
        "__weakref__", "_changed", "_collected", "_confirmed", "_gone", "_head", "_head_rev", "_left", "_queue",
        "_under_way", "_whole", "_written", "active_at", "life", "queued", "read_at", "session", "writers",
    )  # fmt: skip

    def __init__(self, session: Session, life: str, queue: Queue) -> None:
        self.session = session
        self.life = life
        self.queued = False
        self.read_at = NEVER  # when it was last compared with the store, on the clock of the loop
        self.writers: frozenset[str] = frozenset()  # the processes that have it at hand, as far as is known
        self.active_at = 0.0  # the time of the last traffic that the store knows
        self._queue = queue
        self._whole = True
        self._head: bytes | None = None
        self._head_rev = 0
        self._written: dict[int, _Written] = {}
        self._changed: dict[int, None] = dict.fromkeys(session.streams)
        self._gone: set[int] = set()
        self._left: set[str] = set()
        self._under_way: frozenset[int] = frozenset()  # streams whose change is being written
        self._collected = 0  # how often changes were collected
        self._confirmed = 0  # the last of these that the store has

    # -- what is heard

    def session_changed(self, session: Session) -> None:
        """See `Watcher`. A fence also changes what its streams were told."""
        if session.fence is not None:
            self._changed.update(dict.fromkeys(session.streams))
        self._queue(self, urgent=session.fence is not None)

    def session_touched(self, session: Session) -> None:
        """See `Watcher`."""
        if abs(session.active_at - self.active_at) > TOUCH_EVERY:
            self._queue(self)

    def stream_opened(self, session: Session, stream: Stream) -> None:  # noqa: ARG002
        """See `Watcher`."""
        self._changed[stream.key] = None
        self._queue(self)

    def stream_forgotten(self, session: Session, stream: Stream) -> None:  # noqa: ARG002
        """See `Watcher`."""
        self._changed.pop(stream.key, None)
        if self._written.pop(stream.key, None) is not None:
            self._gone.add(stream.key)
        self._queue(self)

    def stream_changed(self, session: Session, stream: Stream) -> None:  # noqa: ARG002
        """See `Watcher`."""
        self._changed[stream.key] = None
        self._queue(self)

    def event_added(self, session: Session, stream: Stream, event: Event, answers: tuple[RpcId, ...]) -> None:  # noqa: ARG002
        """See `Watcher`."""
        self._changed[stream.key] = None
        if not self.queued:
            self._queue(self)

    # -- what is written

    @property
    def mark(self) -> int:
        """Stands for all that was heard so far: the store has it when `has_reached` says so."""
        return self._collected + 1 if self.queued else self._collected

    def has_reached(self, mark: int) -> bool:
        """Whether the store has what was heard before this mark was taken."""
        return self._confirmed >= mark

    def collect(self, lifetime: float) -> Change:
        """What has to be written now, to be kept for `lifetime` s. Then `confirm` or `give_back` has to follow."""
        session = self.session
        head = encode_head(session)
        streams: dict[int, StreamChange] = {}
        for key in self._changed:
            stream = session.streams.get(key)
            if stream is not None:
                written = self._written.get(key, _NOTHING)
                streams[key] = StreamChange(
                    written.rev,
                    encode_state(stream),
                    encode_blocks(stream, written.end),
                    stream.first // BLOCK,
                    stream.end,
                )
        self._changed = {}
        self._collected += 1
        self.queued = False
        self._under_way = frozenset(streams)
        return Change(
            session_id=session.id,
            life=self.life,
            whole=self._whole,
            fenced=session.fence is not None,
            active_at=session.active_at,
            expires_in=lifetime,
            head_base=self._head_rev,
            head=None if head == self._head else head,
            streams=streams,
            gone=frozenset(self._gone),
            left=frozenset(self._left),
        )

    def confirm(self, change: Change) -> None:
        """The store has it."""
        self._confirmed = self._collected
        self._under_way = frozenset()
        self._whole = False
        self.active_at = change.active_at
        if change.head is not None and self._head_rev == change.head_base:
            self._head = change.head
            self._head_rev += 1
        for key, stream in change.streams.items():
            if key in self.session.streams:
                if self._written.get(key, _NOTHING).rev <= stream.base:
                    self._written[key] = _Written(stream.base + 1, stream.end)
            else:  # forgotten while it was written
                self._gone.add(key)
                self._queue(self)
        self._gone -= change.gone
        self._left -= change.left

    def give_back(self, change: Change) -> None:
        """The store may have it or not: it has to be written again."""
        self._under_way = frozenset()
        self._changed.update(dict.fromkeys(change.streams))

    # -- what the store says

    def known(self) -> Known:
        """What the store is known to have."""
        return self._head_rev, {key: written.rev for key, written in self._written.items()}

    def adopt(self, kept: Kept) -> None:
        """The record was restored from this."""
        self._whole = False
        self.active_at = kept.active_at
        self._head_rev = kept.head_rev
        self._head = None if kept.torn else kept.head
        self.writers = kept.writers
        for key, stream in kept.streams.items():
            self._written[key] = _Written(stream.rev, self.session.streams[key].end)
        self._changed = dict.fromkeys(self.session.streams) if kept.torn else {}

    def forgotten(self) -> None:
        """The store has lost the session: all of it has to be written again."""
        self._whole = True
        self._head = None
        self._head_rev = 0
        self._written.clear()
        self._gone.clear()
        self._changed = dict.fromkeys(self.session.streams)

    def merge(self, kept: Kept, known: Known) -> None:
        """The store has the same epoch of the session, and what other processes recorded. Nothing of either is lost.

        `known` is what was known when the reading began: what was written since may be in `kept` or not.
        """
        session = self.session
        head_rev, revs = known
        self.writers = kept.writers
        session.active_at = max(session.active_at, kept.active_at)
        if not head_rev <= kept.head_rev <= self._head_rev:
            take_head(session, decode_head(kept.head))
            self._head_rev, self._head = kept.head_rev, kept.head
        for key, kept_stream in kept.streams.items():
            written = self._written.get(key, _NOTHING)
            if key in self._gone or revs.get(key, 0) <= kept_stream.rev <= written.rev:
                continue
            stream = session.streams.get(key)
            if stream is None:
                end = add_stream(session, key, kept_stream)
            elif key in self._changed or key in self._under_way:
                end = merge_stream(stream, kept_stream, written.end)
            else:
                end = replace_stream(stream, kept_stream)
            self._written[key] = _Written(kept_stream.rev, end)
        for key in [key for key in revs if key not in kept.streams and key not in kept.unchanged]:
            self._written.pop(key, None)
            self._gone.discard(key)
            if key not in self._changed and key not in self._under_way and key in session.streams:
                session.forget(session.streams[key])
        reindex(session)

    def leave(self, left: frozenset[str], *, torn: bool) -> None:
        """These processes have ended. `torn`: at least one was killed, and what it recorded last may be missing."""
        self._left |= left
        self.writers -= left
        if torn:
            tear(self.session)
            self._changed = dict.fromkeys(self.session.streams)
        self._queue(self)
