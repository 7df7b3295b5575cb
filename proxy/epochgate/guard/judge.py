"""The resume verdict (section 6): a record and the blocks that come, turned into a verdict.

Two rules keep it one thing: a judge never waits and never reads a clock, and it looks at each block exactly once, in
order. `check` says what becomes of the block; `verdict` is what was decided so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from epochgate.guard.eventids import IdFault, Order, successor_fault
from epochgate.guard.mcp import Messages, Tokens, read_messages
from epochgate.guard.policy import EventIds, Policy, Proof, Unproven
from epochgate.guard.record import Event, Origin, Session, Stream
from epochgate.guard.sse import Block
from epochgate.guard.sse import Kind as BlockKind
from epochgate.guard.verdict import Kind, Reason, Verdict, divergent, proven, unproven

EMPTY_RESUMES = 3  # in a row pass on a stream that owes nothing, and are asked again on one that owes (R9)
NEVER = float("-inf")

_ORDERS = {
    EventIds.CONSECUTIVE: Order.CONSECUTIVE,
    EventIds.INCREASING: Order.INCREASING,
    EventIds.OPAQUE: Order.OPAQUE,
}
_ID_FAULTS = {IdFault.ID_GAP: Reason.ID_GAP, IdFault.ID_REWIND: Reason.ID_REWIND}


class Step(Enum):
    """What becomes of a block."""

    RELEASE = "release"
    SWALLOW = "swallow"  # the client has it
    REFUSE = "refuse"


class Ending(Enum):
    """What becomes of a resumed stream that ended before any message (R9)."""

    ASK_AGAIN = "ask again"
    PASS = "pass"  # noqa: S105
    REFUSE = "refuse"


class _Place(Enum):
    """Where the record has an event that contradicts nothing."""

    HAD = "at or before the cursor, or released since"
    REPLAYED = "the next one after the cursor"
    NEW = "nowhere"


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a resume begins: the stream and the position of the cursor's event."""

    stream: Stream
    position: int


class Judge:
    """Judges one resume of `session` after `cursor` (None: not in the ledger, let through unproven; see `open`).

    `tokens` says where the response that is judged has its epoch tokens; `outage_at` is when the upstream last refused
    or reset a new connection (s). `verdict` may be given where it fell before the upstream was asked. `connected`: the
    proof is a held connection; what comes on it is the stream's own un-resumed traffic, so only the token is watched.
    `held`: in observe mode, where nothing is held, enforce would probably have had that proof.
    """

    def __init__(
        self,
        policy: Policy,
        session: Session,
        cursor: Cursor | None,
        *,
        outage_at: float = NEVER,
        verdict: Verdict | None = None,
        connected: bool = False,
        held: bool = False,
    ) -> None:
        self.policy = policy
        self.session = session
        self.tokens = Tokens((), None)
        self.verdict = verdict
        self.connected = connected
        self._held = held
        self.stream = cursor.stream if cursor is not None else Stream(-1, Origin.UNKNOWN, (), b"")
        self.position = cursor.position if cursor is not None else -1
        self.outage_at = outage_at
        self._token: str | None = None  # the first one on this connection
        self._last_id = self.stream.last_message_id  # what a new priming event skips is a gap all the same (E3)
        self._next = self.stream.end if connected else self.position + 1  # the position that must come next
        self.replayed = -1  # where the record has the last block, if it had it already and the client has not
        self._like: set[int] = set()  # see `Session.has_elsewhere`
        self._overlap = False
        self._matched = False  # an event of the record has come on this connection
        self._beyond = False  # an event beyond the ledger has come

    def open(self) -> None:
        """The upstream granted it: an unknown cursor gets a stream on record, which may push out another one (L5)."""
        if self.stream.key < 0:
            self.stream = self.session.open_stream(Origin.UNKNOWN)

    @property
    def refused(self) -> bool:
        """Whether the policy lets nothing more of this stream through."""
        return self.verdict is not None and is_refused(self.verdict, self.policy)

    @property
    def rewound(self) -> bytes | None:
        """Where to ask from so that a faithful server repeats the cursor's own event first (R5), None: the cursor."""
        if Proof.OVERLAP not in self.policy.accept or self.stream.origin is Origin.UNKNOWN:
            return None
        return self.session.cursor_before(self.stream, self.position)

    @property
    def next(self) -> int:
        """The position of the message that has to come next; the end of the record where all of it has come."""
        return self.stream.message_from(self._next)

    def check(self, block: Block, now: float) -> Step:
        """Judge one complete block (R7, R8, R11) at time `now` (s); what is released goes on the record."""
        self.replayed = -1
        if block.kind is BlockKind.OTHER:
            return Step.RELEASE
        if block.kind is BlockKind.PRIMING:
            behind = self.stream.positions.get(block.id or b"", self._next) < self._next - 1
            self._record(block, now, Messages())
            return Step.SWALLOW if behind and not self.connected else Step.RELEASE  # it takes the client's cursor back
        self.stream.empties = 0
        messages = read_messages(block.data, self.tokens)
        if not messages.readable and not (block.data is None and self.connected):
            self.unreadable()
            if self.refused:
                return Step.REFUSE
        found = self._token_fault(messages) or self._place(block, messages)
        if isinstance(found, Verdict):
            self.verdict = self._blamed(found)
            if self.refused:
                return Step.REFUSE
            found = _Place.NEW
        if self.verdict is None:
            self.verdict = self._first_verdict(messages)
            if self.refused:
                return Step.REFUSE
        if found is _Place.NEW:
            self._record(block, now, messages)
            self._beyond = self._beyond or block.own_id
        return Step.SWALLOW if found is _Place.HAD else Step.RELEASE

    def end_without_message(self, asked: int) -> Ending:
        """The answer to the ask number `asked` (from 1) ended before any message (R9)."""
        if self.verdict is not None:
            return Ending.PASS
        if self.stream.owes:
            if asked <= EMPTY_RESUMES:
                return Ending.ASK_AGAIN
        else:
            self.stream.empties += 1
            if self.stream.empties <= EMPTY_RESUMES:
                return Ending.PASS
        self.verdict = proven(Proof.CONNECTION) if self._held else unproven(Reason.NO_EVENT)
        return Ending.REFUSE if self.refused else Ending.PASS

    def unreadable(self) -> None:
        """What comes cannot be read (T8)."""
        self.verdict = unproven(Reason.UNREADABLE)

    def _blamed(self, found: Verdict) -> Verdict:
        """What a contradiction amounts to: little on a record that lacks its end, and so perhaps the cursor's event."""
        if self.stream.torn and found.reason is not Reason.EPOCH_CHANGED:
            return unproven(Reason.UNKNOWN_CURSOR)
        return found

    # -- rule by rule

    def _token_fault(self, messages: Messages) -> Verdict | None:
        for token in messages.tokens:
            known = self.session.token or self._token
            if token is not None and known is None:
                self._token = token
                if self.connected:
                    self.session.learn_token(token)  # un-resumed traffic (L1)
            elif token not in (None, known):
                return divergent(Reason.EPOCH_CHANGED, "the epoch of the session", "another epoch")
        return None

    def _place(self, block: Block, messages: Messages) -> _Place | Verdict:
        """Where the event stands in the record, or what contradicts it; the first rule of R7 that applies."""
        if self.connected:
            return self._own_place(block)
        stream = self.stream
        if stream.origin is Origin.UNKNOWN:
            return self._place_unanchored(block)
        self._next = required = stream.message_from(max(self._next, stream.first))
        while (expected := stream.at(required)) is not None:
            if self._is_expected(block, required):
                self._next = required + 1
                self.replayed = required
                self._matched = True
                return _Place.REPLAYED
            if stream.has_own_id(required):
                break
            required = stream.message_from(required + 1)  # what came without an id may be missing
        repeats = self._order() is Order.UNCHECKED
        known = self._recorded_place(block, repeats=repeats)
        if known is not None:
            return known
        if self._is_forgotten(block, before_record=expected is not None):
            return _Place.HAD
        if expected is not None:
            return divergent(Reason.REPLAY_GAP, f"the recorded event at {required}", "an event that is not on record")
        self._next = required
        return self._foreign(block, messages, repeats=repeats) or self._id_fault(block) or _Place.NEW

    def _own_place(self, block: Block) -> _Place:
        """What comes on the stream's own connection is new, unless a rival's connection has brought it first."""
        required = self.stream.message_from(self._next)
        if not self._is_expected(block, required):
            self._next = self.stream.end
            return _Place.NEW
        self._next = required + 1
        self.replayed = required
        return _Place.REPLAYED

    def _is_expected(self, block: Block, position: int) -> bool:
        """Whether it is the recorded event. One without an id of its own has whichever stuck on its connection (L3)."""
        expected = self.stream.at(position)
        if expected is None or expected.digest != block.digest:
            return False
        return expected.id == block.id or not (block.own_id or self.stream.has_own_id(position))

    def _recorded_place(self, block: Block, *, repeats: bool) -> _Place | Verdict | None:
        """Where this stream's record has the event; None if nowhere."""
        stream = self.stream
        named = block.own_id and block.id is not None
        at = stream.positions.get(block.id) if named and block.id is not None else None
        if at is None and (named or self._beyond):
            return None
        if repeats and self._beyond:
            return None  # ids repeat here: nothing tells a new event from an old one
        if not block.own_id and self._has_stuck(block):
            return _Place.HAD
        if stream.find(block.id, block.digest, self._next) is not None:
            if block.own_id:  # without one it may be a new event that says the same
                self._overlap = self._matched = True
            return _Place.HAD
        later = stream.find(block.id, block.digest, stream.end)
        if later is not None:
            return divergent(Reason.REPLAY_GAP, f"the recorded event at {self._next}", f"the one at {later}")
        if at is None or repeats:
            return None
        if at > self._next:
            return divergent(Reason.REPLAY_GAP, f"the recorded event at {self._next}", f"another one in place of {at}")
        return divergent(Reason.REPLAY_MISMATCH, f"the content of the recorded event at {at}", "another content")

    def _has_stuck(self, block: Block) -> bool:
        """Whether it came after the cursor's own event, without an id, and so stands in the record under the cursor."""
        position = self._next - 1
        while (event := self.stream.at(position)) is not None and not self.stream.has_own_id(position):
            if event.digest == block.digest:
                return True
            position -= 1
        return False

    def _is_forgotten(self, block: Block, *, before_record: bool) -> bool:
        """Whether it may be from before the first event still on record (L5): the client has it, it proves nothing."""
        stream = self.stream
        if not stream.first or self._matched or self._beyond:
            return False
        if block.own_id and block.id is not None and self._order() >= Order.INCREASING:
            oldest = next(iter(stream.positions), b"")
            return successor_fault(Order.INCREASING, block.id, oldest, self.session.knows) is None
        return before_record

    def _place_unanchored(self, block: Block) -> _Place | Verdict:
        """The cursor is not in the ledger: only what the ledger has under the same id can contradict."""
        if block.own_id and block.id is not None and not self.session.shared_ids:
            recorded = self.session.index.get(block.id)
            checked = recorded is not None and self.session.order_of(recorded) is not Order.UNCHECKED
            if recorded is not None and checked and not recorded.holds(block.id, block.digest):
                return divergent(Reason.REPLAY_MISMATCH, "the content of a recorded event", "another content")
        return _Place.NEW

    def _foreign(self, block: Block, messages: Messages, *, repeats: bool) -> Verdict | None:
        if block.own_id and block.id is not None:
            digest = block.digest if repeats or self.session.shared_ids else None  # there an id alone tells nothing
            if self.session.has_elsewhere(self.stream, block.id, digest, self._like):
                return divergent(Reason.FOREIGN_STREAM, "an event of this stream", "an event of another stream")
        if self.stream.owes_known and any(answer not in self.stream.owes for answer in messages.answers):
            owed = len(self.stream.owes)
            return divergent(Reason.FOREIGN_RESPONSE, f"{owed} owed responses", "the response to another request")
        return None

    def _id_fault(self, block: Block) -> Verdict | None:
        if self._beyond or not block.own_id or block.id is None or self.stream.torn:
            return None
        order = self._order()
        fault = successor_fault(order, self._last_id, block.id, self.session.knows)
        return (
            None if fault is None else divergent(_ID_FAULTS[fault], f"ids in {order.name.lower()} order", "another id")
        )

    def _order(self) -> Order:
        return _ORDERS.get(self.policy.event_ids) or self.session.order_of(self.stream)

    def _first_verdict(self, messages: Messages) -> Verdict:
        """R8, at the first event with a message that nothing contradicts."""
        if self._held:
            return proven(Proof.CONNECTION)
        accept = self.policy.accept
        known = self.session.token
        if known is not None and known in messages.tokens and Proof.EPOCH in accept:
            return proven(Proof.EPOCH)
        if self._overlap and Proof.OVERLAP in accept:
            return unproven(Reason.BOUNDARY) if self._has_boundary() else proven(Proof.OVERLAP)
        if known is None:
            return unproven(Reason.NO_EPOCH)
        if known not in messages.tokens:
            return unproven(Reason.EPOCH_MISSING)
        return unproven(Reason.NO_PROOF)

    def _has_boundary(self) -> bool:
        """Whether a sign came since the last message up to the cursor: it is that message which the overlap repeats.

        A priming event may have been the whole answer to a resume, which nothing proved.
        """
        place = self.stream.message_up_to(self.position)
        event = self.stream.at(max(place, 0))  # before the first message: since the stream was opened
        since = event.at if event is not None else NEVER
        return max(self.session.boundary_at, self.outage_at) > since

    def _record(self, block: Block, now: float, messages: Messages) -> None:
        if block.id is None and block.kind is BlockKind.PRIMING:
            return
        if block.kind is BlockKind.PRIMING and block.id is not None and block.id in self.stream.positions:
            return  # it comes again, or repeats the id of an event
        if not messages.readable:
            self.stream.forget_owed()
        learn = self.connected and block.own_id
        self.session.add(self.stream, Event(block.id, block.digest, now), messages.answers, learn=learn)
        if self._next >= self.stream.end - 1:
            self._next = self.stream.end


def is_refused(verdict: Verdict, policy: Policy) -> bool:
    """Whether this policy refuses a resume with this verdict."""
    if verdict.kind is Kind.UNPROVEN:
        return policy.unproven is Unproven.RESTART and verdict.reason is not Reason.STALE_CURSOR
    return verdict.kind is Kind.DIVERGENT
