"""An answer whose end waits for the ledger: what it tells the client is to be kept first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from epochgate.guard.record import Session
from epochgate.relay.context import Context
from epochgate.relay.downstream import Downstream
from epochgate.relay.headers import Head
from epochgate.relay.passage import Passage, Tap
from epochgate.relay.upstream import UpstreamConnection


class Settling(Passage):
    """Relays an answer, and from `settle` on lets the client have its end when the ledger has what was decided.

    That is a round trip to the store, and never longer than a request waits for it.
    """

    def __init__(
        self,
        connection: UpstreamConnection,
        head: Head,
        downstream: Downstream,
        context: Context,
        tap: Tap | None = None,
    ) -> None:
        super().__init__(connection, head, downstream, context, tap)
        self._waiting: asyncio.Task[None] | None = None
        self._ended = False

    def settle(self, session: Session) -> None:
        """Wait for what was recorded so far of a session."""
        if self._waiting is None and (settled := self._context.ledger.spread(session)) is not None:
            self._waiting = self._context.loop.create_task(self._wait(settled))

    async def _wait(self, settled: Awaitable[None]) -> None:
        await settled
        self._waiting = None
        if self._ended:
            self._end()
        else:
            self._connection.resume()
            self._downstream.reply.flush()

    def _end(self) -> None:
        if self._waiting is None:
            super()._end()
        self._ended = True

    def _finish(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        super()._finish()

    def received_all(self) -> None:
        """See `Passage`."""
        if self._waiting is None:
            super().received_all()
        elif not self._ended:
            self._connection.pause()
