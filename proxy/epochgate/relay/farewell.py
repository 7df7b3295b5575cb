"""A DELETE whose client went away before it was answered: whether it ended the session is heard all the same (L6).

The upstream has it, and may delete the session. What is held of it must not be replayed then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochgate.errors import UpstreamError
from epochgate.guard.policy import Policy
from epochgate.guard.record import Session
from epochgate.guard.verdict import Reason
from epochgate.relay.headers import Head
from epochgate.relay.upstream import UpstreamConnection

if TYPE_CHECKING:
    from epochgate.relay.context import Context

FAREWELL_TIME = 10.0  # s that the answer may take
MOST_FAREWELLS = 256  # at once; the oldest gives way


class Farewell:
    """Waits for the head of the answer, and for nothing more."""

    __slots__ = ("_connection", "_context", "_policy", "_session", "_timer")

    def __init__(self, context: Context, policy: Policy, session: Session, connection: UpstreamConnection) -> None:
        self._context = context
        self._policy = policy
        self._session = session
        self._connection = connection
        self._timer = context.loop.call_later(FAREWELL_TIME, self.give_up)
        if len(context.farewells) >= MOST_FAREWELLS:
            next(iter(context.farewells)).give_up()
        context.farewells[self] = None
        connection.hand_over(self)
        connection.resume()

    def give_up(self) -> None:
        """Wait no longer."""
        self._timer.cancel()
        self._context.farewells.pop(self, None)
        self._connection.abort()

    def received_interim(self, head: bytes) -> None:
        """Nobody wants to know."""

    def received_head(self, head: Head) -> None:
        """The answer."""
        self.give_up()
        if 200 <= head.status < 300:
            self._context.fence(self._policy, self._session, Reason.DELETED)

    def received_data(self, data: bytes) -> None:
        """Comes after the head only."""

    def received_end(self) -> None:
        """Comes after the head only."""

    def received_all(self) -> None:
        """There is nobody to write to."""

    def received_error(self, error: UpstreamError) -> None:
        """No answer will come."""
        self.give_up()
        self._context.saw_upstream_error(error)
