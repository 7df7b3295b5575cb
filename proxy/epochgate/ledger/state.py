"""A record as a store keeps it: a head, a state for each stream, and the events of a stream in blocks.

A block holds the events of `BLOCK` neighbouring positions. It is written anew as a whole while it fills, so that a
write that comes twice does no harm, and that what is kept of an event costs little more than the event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from epochgate.guard.eventids import Learner
from epochgate.guard.mcp import RpcId
from epochgate.guard.record import Event, Limits, Origin, Session, Stream
from epochgate.guard.verdict import Reason

BLOCK = 32  # events
KEYS = 1 << 32  # how many streams each of the processes that share a session can count
NEVER = float("-inf")


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a session apart from its streams and of when it was last active."""

    credentials: bytes
    token: bytes | None
    opened_at: float
    fence: str | None
    fenced_at: float
    shared_ids: bool
    several: bool  # it has had more than one stream
    delivered: bool
    instance: bytes | None
    boundary_at: float
    policy: str
    would_be_fenced: bool


class StreamState(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a stream apart from its events. Those from `first` to `end` are in the blocks."""

    origin: Origin
    credentials: bytes
    owes: bytes  # JSON, whose integers may be of any size
    owes_known: bool
    first: int
    end: int
    last_id: bytes | None
    learner: Learner
    left_at: float | None
    empties: int
    spent: bool
    refused: bool
    told: bool
    torn: bool


@dataclass(frozen=True, slots=True)
class KeptStream:
    """A stream as it is read from a store. `rev` counts its writes."""

    rev: int
    state: bytes
    blocks: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Kept:
    """A session as it is read from a store. Streams that the reader has in this revision come without their state."""

    life: str  # names the epoch of the id: grants of one id sort by it
    active_at: float
    head_rev: int
    head: bytes
    streams: dict[int, KeptStream]
    unchanged: frozenset[int] = field(default=frozenset())
    writers: frozenset[str] = field(default=frozenset())  # the processes that have it at hand
    torn: bool = False  # whoever wrote it died: the last of it may be missing


class StreamChange(msgspec.Struct, frozen=True):
    """What is to be written of a stream that the store has in revision `base`. Blocks before `oldest` are dropped."""

    base: int
    state: bytes
    blocks: dict[int, bytes]
    oldest: int
    end: int


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be written of a session, in one step. `whole`: all of it, so that a record may begin with it."""

    session_id: bytes
    life: str
    whole: bool
    fenced: bool
    active_at: float
    expires_in: float  # s
    head_base: int
    head: bytes | None  # None: as it is there
    streams: dict[int, StreamChange]
    gone: frozenset[int]
    left: frozenset[str]  # processes that were found to have ended, and are asked no more


_REASONS = frozenset(reason.value for reason in Reason)
_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_state = msgspec.msgpack.Decoder(StreamState).decode
_decode_events = msgspec.msgpack.Decoder(list[Event]).decode


def encode_head(session: Session) -> bytes:
    """The head of a session."""
    return _encode(
        Head(
            credentials=session.credentials,
            token=None if session.token is None else session.token.encode("utf-8", "surrogatepass"),
            opened_at=session.opened_at,
            fence=session.fence,
            fenced_at=session.fenced_at,
            shared_ids=session.shared_ids,
            several=session.next_key > 1,
            delivered=session.delivered,
            instance=session.instance,
            boundary_at=session.boundary_at,
            policy=session.policy,
            would_be_fenced=session.would_be_fenced,
        )
    )


def encode_state(stream: Stream) -> bytes:
    """The state of a stream."""
    return _encode(
        StreamState(
            origin=stream.origin,
            credentials=stream.credentials,
            owes=json.dumps(list(stream.owes)).encode() if stream.owes else b"[]",
            owes_known=stream.owes_known,
            first=stream.first,
            end=stream.end,
            last_id=stream.last_id,
            learner=stream.learner,
            left_at=stream.left_at,
            empties=stream.empties,
            spent=stream.spent,
            refused=stream.refused,
            told=stream.told,
            torn=stream.torn,
        )
    )


def encode_blocks(stream: Stream, since: int) -> dict[int, bytes]:
    """The blocks of a stream that hold events from position `since` on."""
    start = max(since, stream.first)
    if start >= stream.end:
        return {}
    last = (stream.end - 1) // BLOCK
    if stream.first // BLOCK == last:
        return {last: _encode(list(stream.events))}
    return {number: _encode(_events(stream, number)) for number in range(start // BLOCK, last + 1)}


def _events(stream: Stream, number: int) -> list[Event]:
    first = max(number * BLOCK, stream.first)
    return [stream.events[at - stream.first] for at in range(first, min((number + 1) * BLOCK, stream.end))]


class _Events:
    """The events of a kept stream. Where a block is missing, what comes before it is forgotten."""

    def __init__(self, state: StreamState, blocks: dict[int, bytes]) -> None:
        self.first = state.end
        self.events: list[Event] = []
        end = state.end
        while end > state.first:
            data = blocks.get((end - 1) // BLOCK)
            kept = [] if data is None else _decode_events(data)
            start = max((end - 1) // BLOCK * BLOCK, state.first)
            if len(kept) < end - start:
                break
            self.events[:0] = kept[len(kept) - (end - start) :]
            self.first = end = start


def restore(session_id: bytes, kept: Kept, limits: Limits) -> Session:
    """The record that a store has kept. Raises msgspec.MsgspecError or ValueError where it is none."""
    head = _decode_head(kept.head)
    session = Session(session_id, head.credentials, None, limits, head.opened_at)
    session.active_at = kept.active_at
    session.policy = head.policy
    take_head(session, head)
    for key, kept_stream in sorted(kept.streams.items(), key=lambda item: item[0] % KEYS):
        state = _decode_state(kept_stream.state)
        stream = Stream(key, state.origin, (), state.credentials)
        _fill(stream, state, _Events(state, kept_stream.blocks))
        session.streams[key] = stream
    session.next_key = max([session.next_key, *(key % KEYS + 1 for key in session.streams)])
    reindex(session)
    if kept.torn:
        tear(session)
    return session


def decode_head(data: bytes) -> Head:
    """The head of a session, to be taken by `take_head`. Raises msgspec.MsgspecError."""
    return _decode_head(data)


def take_head(session: Session, head: Head) -> None:
    """Add what a store knows of a session: what was known first stays, what was seen by anybody counts."""
    if head.token is not None:
        session.token = head.token.decode("utf-8", "surrogatepass")
    if head.fence is not None:
        # Another version may have a reason that is not known here, or the store is damaged: it is a fence all the same.
        session.fence = head.fence if head.fence in _REASONS else Reason.SESSION_LOST.value
        session.fenced_at = head.fenced_at
    session.shared_ids = session.shared_ids or head.shared_ids
    session.delivered = session.delivered or head.delivered
    session.would_be_fenced = session.would_be_fenced or head.would_be_fenced
    session.next_key = max(session.next_key, 2 if head.several else 0)
    if head.instance is not None and session.instance is None:
        session.instance = head.instance
    session.boundary_at = max(session.boundary_at, head.boundary_at)


def tear(session: Session) -> None:
    """The last of what was recorded may be missing: from now on its absence proves nothing."""
    session.delivered = True
    for stream in session:
        stream.torn = True


def add_stream(session: Session, key: int, kept: KeptStream) -> int:
    """A stream that another process has opened; where it ends in the store. `reindex` has to follow."""
    state = _decode_state(kept.state)
    stream = Stream(key, state.origin, (), state.credentials)
    _fill(stream, state, _Events(state, kept.blocks))
    session.streams[key] = stream
    session.next_key += 1
    return state.end


def replace_stream(stream: Stream, kept: KeptStream) -> int:
    """Another process went on with a stream; where it ends in the store. `reindex` has to follow."""
    state = _decode_state(kept.state)
    _fill(stream, state, _Events(state, kept.blocks))
    return state.end


def merge_stream(stream: Stream, kept: KeptStream, written: int) -> int:
    """Two processes went on with a stream from position `written`: none of it is lost. `reindex` has to follow.

    Returns where it ends in the store. What the store has comes first. Where each has events that the other lacks,
    their order is not known: the record is torn.
    """
    state = _decode_state(kept.state)
    theirs = _Events(state, kept.blocks)
    ours = [event for position in range(written, stream.end) if (event := stream.at(position)) is not None]
    since = max(0, written - theirs.first)
    known = {(event.id, event.digest) for event in theirs.events[since:]}
    more = [event for event in ours if (event.id, event.digest) not in known]
    mine = {(event.id, event.digest) for event in ours}
    forked = bool(more) and any((event.id, event.digest) not in mine for event in theirs.events[since:])
    owes, owes_known, learner = stream.owes, stream.owes_known, stream.learner
    told, refused = stream.told, stream.refused
    local_end = stream.end
    _fill(stream, state, theirs)
    stream.owes = {answer: None for answer in stream.owes if answer in owes}
    stream.owes_known = stream.owes_known and owes_known
    stream.told = stream.told or told
    stream.refused = stream.refused or refused
    stream.torn = stream.torn or forked
    if local_end >= state.end:
        stream.learner = learner
    for event in more:
        if event.id is not None:
            stream.positions[event.id] = stream.end
            stream.last_id = event.id
        stream.events.append(event)
    return state.end


def _fill(stream: Stream, state: StreamState, events: _Events) -> None:
    stream.owes = dict.fromkeys(_owes(state.owes))
    stream.owes_known = state.owes_known
    stream.events.clear()
    stream.events.extend(events.events)
    stream.first = events.first
    stream.positions = {event.id: events.first + n for n, event in enumerate(events.events) if event.id is not None}
    stream.last_id = state.last_id
    stream.learner = state.learner
    stream.left_at = state.left_at
    stream.empties = state.empties
    stream.spent = state.spent
    stream.refused = state.refused
    stream.told = state.told
    stream.torn = stream.torn or state.torn


def _owes(data: bytes) -> Iterable[RpcId]:
    found = json.loads(data)
    if not isinstance(found, list) or not all(isinstance(item, int | float | str) for item in found):
        raise ValueError("no list of request ids")
    return found


def reindex(session: Session) -> None:
    """Find out anew which stream had an id last."""
    index: dict[bytes, Stream] = {}
    times: dict[bytes, float] = {}
    for stream in session:
        for event_id, position in stream.positions.items():
            event = stream.at(position)
            at = NEVER if event is None else event.at
            if at >= times.get(event_id, NEVER):
                index[event_id], times[event_id] = stream, at
    session.index = index
