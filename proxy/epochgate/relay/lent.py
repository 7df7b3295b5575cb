"""A reader in another process, as a flow sees it: in the place of a client (R4, docs/adr/0009).

All that holds for a client holds for it: it may be slow, it may go away (then the stream is held again), another resume
may take its place. So a flow that is lent is checked, recorded and ended like any other.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from epochgate.guard.record import Event
from epochgate.ledger.loans import NOT_KNOWN, PIECE, Data, End, Head, Loan
from epochgate.relay.headers import Field, Framing
from epochgate.relay.headers import Head as AnswerHead

if TYPE_CHECKING:
    from epochgate.ledger.lending import Lending
    from epochgate.relay.downstream import Watcher
    from epochgate.relay.flow import Flow


class Lent:
    """Both the client of a flow and the reply to it: what is written goes into a loan. See `Lender`, too."""

    half_closed = False

    def __init__(self, lending: Lending, loan: Loan, flow: Flow) -> None:
        loan.lender = self
        self.watcher: Watcher | None = None
        self.started = False
        self.finished = False
        self._lending = lending
        self._loan = loan
        self._flow = flow
        self._pending: list[bytes] = []
        self._recorded = flow.stream.end  # what is on record up to here is in the store before the reader begins
        self._owed = len(flow.stream.owes)

    # -- the client

    @property
    def paused(self) -> bool:
        """Whether the reader does not keep up."""
        return self._loan.full

    def abort(self) -> None:
        """Another resume has taken the stream over."""
        self.finished = True
        self._lending.take_back(self._loan)

    # -- the reply

    def start(self, status: int, reason: bytes, fields: list[Field], framing: Framing) -> None:
        """The head."""
        self.started = True
        self._loan.put(Head(status, reason, fields, "CLOSE" if framing is Framing.CLOSE else "CHUNKED"))

    def pass_on(self, head: AnswerHead) -> None:
        """The head of the upstream's answer."""
        self.start(head.status, head.reason, head.fields, head.framing)

    def interim(self, head: bytes) -> None:
        """None comes after the head."""

    def write(self, data: bytes) -> None:
        """Whole blocks; sent by `flush`."""
        self._pending.append(data)

    def flush(self) -> None:
        """Send what was written, and what was recorded with it."""
        data = b"".join(self._pending)
        self._pending.clear()
        if not data:
            return
        was_full = self._loan.full
        last = (len(data) - 1) // PIECE * PIECE
        for start in range(0, last, PIECE):
            self._loan.put(Data(data[start : start + PIECE], whole=False))
        position, events = self._events()
        self._loan.put(Data(data[last:], position=position, events=events, owes=self._owes()))
        if self._loan.full and not was_full and self.watcher is not None:
            self.watcher.client_paused()

    def end(self) -> None:
        """A clean end."""
        self._end(clean=True)

    def break_off(self) -> None:
        """An end that does not look complete (T4)."""
        self._end(clean=False)

    def _end(self, *, clean: bool) -> None:
        self.flush()
        self.finished = True
        self._loan.put(End(clean))

    def _events(self) -> tuple[int, tuple[Event, ...]]:
        stream = self._flow.stream
        first = max(self._recorded, stream.first)
        self._recorded = stream.end
        return first, tuple(stream.events[position - stream.first] for position in range(first, stream.end))

    def _owes(self) -> bytes:
        stream = self._flow.stream
        if not stream.owes_known:
            return NOT_KNOWN
        if len(stream.owes) == self._owed:
            return b""
        self._owed = len(stream.owes)
        return json.dumps(list(stream.owes)).encode()

    # -- what becomes of the loan

    def has_room(self) -> None:
        """See `Lender`."""
        if self.watcher is not None:
            self.watcher.client_resumed()

    def is_over(self, *, close: bool) -> None:
        """See `Lender`."""
        if self.watcher is None:
            return  # somebody else has the stream, or it has ended
        if close:
            self._flow.close()
        else:
            self.watcher.client_gone()
