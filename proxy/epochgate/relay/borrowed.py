"""A stream that another process reads from the upstream and lends to this one, which has its client (docs/adr/0009)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from epochgate.guard.record import Session, Stream
from epochgate.ledger.loans import Borrowing, Data, End, Entry, Head
from epochgate.relay.downstream import Downstream, Outcome
from epochgate.relay.headers import Framing

if TYPE_CHECKING:
    from epochgate.ledger.lending import Lending
    from epochgate.relay.context import Context

WRITTEN_AFTER = 2.0  # s after which the owner has surely written what it recorded, or the store does not work at all


class Borrowed:
    """Passes on what the owner has checked and recorded. See `Reader`, `Watcher` and `EventStream`."""

    def __init__(
        self,
        context: Context,
        lending: Lending,
        session: Session,
        stream: Stream,
        loan: Borrowing,
        beginning: Sequence[Entry],
    ) -> None:
        self.decided = loan.offer.decided
        self._context = context
        self._lending = lending
        self._session = session
        self._stream = stream
        self._loan = loan
        self._beginning = beginning
        self._downstream: Downstream
        self._delivered: deque[tuple[float, Data]] = deque()  # what was recorded with it, and when it came
        self._whole = True  # what was written ends where a block ends
        self._ending = False

    def attach(self, downstream: Downstream) -> None:
        """Give a client the head, what is there already, and what comes."""
        self._context.telemetry.loans["served"] += 1
        self._downstream = downstream
        downstream.client.watcher = self
        self._context.streams.add(self)
        self._session.open_flows += 1
        self._loan.follow(self, paused=downstream.client.paused)
        self._lending.pass_on(self._loan, self._beginning)

    def leave(self) -> None:
        """Nobody reads it here: the owner holds it again (H1)."""
        self._lending.give_back(self._loan.offer)

    def received(self, entry: Entry) -> None:
        """See `Reader`."""
        reply = self._downstream.reply
        match entry:
            case Head(status, reason, fields, framing):
                reply.start(status, reason, fields, Framing[framing])
            case Data(raw, whole):
                reply.write(raw)
                self._whole = whole
                self._remember(entry)
            case End(clean):
                if clean:
                    reply.end()
                else:
                    reply.break_off()
                self._finish()

    def received_all(self) -> None:
        """See `Reader`."""
        if not self._downstream.reply.finished:
            self._downstream.reply.flush()
            if self._ending:
                self.end_at_boundary()

    def taken_back(self) -> None:
        """See `Reader`."""
        self._finish()
        self._downstream.client.abort()

    def lost(self) -> None:
        """See `Reader`. The next resume is an ordinary one (R5)."""
        self._context.telemetry.loans["lost"] += 1
        self._downstream.reply.break_off()
        self._finish()
        self._lending.make_up(self._session, self._stream, [data for _, data in self._delivered])

    def client_gone(self) -> None:
        """See `Watcher`."""
        self.leave()
        self._finish()

    def client_paused(self) -> None:
        """See `Watcher`."""
        self._loan.pause(paused=True)

    def client_resumed(self) -> None:
        """See `Watcher`."""
        self._loan.pause(paused=False)

    def end_at_boundary(self) -> None:
        """See `EventStream`."""
        self._ending = True
        if self._whole:
            self._downstream.reply.end()
            self.leave()
            self._finish()

    def _remember(self, data: Data) -> None:
        now = self._context.loop.time()
        while self._delivered and now - self._delivered[0][0] > WRITTEN_AFTER:
            self._delivered.popleft()
        if data.events or data.owes:
            self._delivered.append((now, Data(b"", position=data.position, events=data.events, owes=data.owes)))

    def _finish(self) -> None:
        self._context.streams.discard(self)
        self._session.open_flows -= 1
        self._downstream.finish(Outcome.DONE)
