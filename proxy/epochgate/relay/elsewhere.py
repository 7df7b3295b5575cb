"""Held streams across processes that share a store (R4, docs/adr/0009): which are lent, and which are borrowed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from epochgate.guard.judge import Cursor
from epochgate.guard.record import Session, Stream
from epochgate.ledger.kept import mirror_of
from epochgate.ledger.lending import Lending
from epochgate.ledger.messages import Asked, Offer
from epochgate.relay.borrowed import Borrowed
from epochgate.relay.downstream import Downstream, Outcome, telling
from epochgate.relay.lent import Lent

if TYPE_CHECKING:
    from epochgate.relay.context import Context


class Elsewhere:
    """The other processes, for those who work on a resume."""

    def __init__(self, context: Context, lending: Lending) -> None:
        self.lent: set[asyncio.Future[Outcome]] = set()  # each is done when the stream has no reader elsewhere any more
        self._context = context
        self._lending = lending
        lending.on_resumed = self._resumed
        lending.on_granted = self._granted

    # -- at the owner

    def _resumed(self, session: Session, asked: Asked) -> Offer | None:
        """Another process got a resume: lend it the stream that it asks for, or else let go of that stream (R4)."""
        self._context.backlog.settle()
        if not asked.cursor:  # a new standalone stream
            self._context.holds.make_room(session, asked.credentials)
            return None
        stream, position = _find(session, asked)
        flow = None if stream is None else self._context.holds.get(stream)
        if stream is None or flow is None or flow.credentials != asked.credentials or flow.is_contested():
            return None
        if flow.downstream is not None and len(session.named_by(asked.cursor)) > 1:
            return None  # it may well be another stream that is meant
        if not asked.serves or not flow.serves(position):
            flow.close()
            return None
        decided = flow.decided
        loan = self._lending.lend(session.id, asked.asker)
        lent = Lent(self._lending, loan, flow)
        stream.spent = False
        outcome: asyncio.Future[Outcome] = self._context.loop.create_future()
        self.lent.add(outcome)
        outcome.add_done_callback(self.lent.discard)
        flow.attach(Downstream(lent, lent, telling(outcome)), position, asked.cursor)
        self._context.telemetry.loans["lent"] += 1
        return Offer(loan.name, self._lending.who, mirror_of(session).life, stream.key, position, decided)

    def _granted(self, session: Session, key: int) -> None:
        """The upstream has let somebody in at another process (R4)."""
        self._context.backlog.settle()
        stream = session.streams.get(key)
        flow = None if stream is None else self._context.holds.get(stream)
        if flow is not None and not flow.is_contested():
            flow.close()

    # -- where the resume is

    def granted(self, session: Session, stream: Stream) -> None:
        """The upstream has granted a resume here: what others hold of that stream is superseded (R4)."""
        if stream.key >= 0:
            session.stream_changed(stream)  # which makes this process one that is asked, even if nothing new comes
            self._lending.granted(session, stream)

    def decline(self, offers: list[Offer]) -> None:
        """The stream is served otherwise: nobody is to hold it."""
        while offers:
            self._lending.give_back(offers.pop(), close=True)

    async def borrow(self, session: Session, cursor: Cursor, offers: list[Offer]) -> Borrowed | None:
        """What is offered of this stream after this cursor. In any doubt None: the resume goes to the upstream."""
        stream = cursor.stream
        while offers:
            offer = offers.pop()
            if (offer.stream, offer.position) != (stream.key, cursor.position):
                self._lending.give_back(offer, close=offer.stream == stream.key)
                continue
            began = await self._lending.borrow(session.id, offer)
            if began is None:
                self._context.telemetry.loans["failed"] += 1
                continue
            borrowed = Borrowed(self._context, self._lending, session, stream, *began)
            known = session.watcher is not None and session.streams.get(stream.key) is stream
            if known and session.fence is None:
                self.decline(offers)
                return borrowed
            borrowed.leave()
        return None


def _find(session: Session, asked: Asked) -> tuple[Stream | None, int]:
    """The stream that is resumed, and the position of the cursor. Ids may be common to streams: its key tells which."""
    if asked.stream < 0:
        return session.locate(asked.cursor) or (None, -1)
    stream = session.streams.get(asked.stream)
    position = None if stream is None else stream.positions.get(asked.cursor)
    return (None, -1) if position is None else (stream, position)
