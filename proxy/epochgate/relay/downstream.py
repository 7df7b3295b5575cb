"""What a flow needs of its client: one of this process (`client`, `reply`), or one of another process (`lent`)."""

from __future__ import annotations

from typing import Protocol

from epochgate.relay.client import Watcher
from epochgate.relay.headers import Field, Framing


class Client(Protocol):
    """The connection of a client; or what stands for one in another process."""

    watcher: Watcher | None

    @property
    def half_closed(self) -> bool:
        """It sends nothing more (H1)."""

    @property
    def paused(self) -> bool:
        """It does not keep up (T6)."""

    def abort(self) -> None:
        """Drop it at once."""


class Response(Protocol):
    """The reply to a client. See `Reply`."""

    @property
    def started(self) -> bool:
        """The head was written."""

    @property
    def finished(self) -> bool:
        """The end was written."""

    def start(self, status: int, reason: bytes, fields: list[Field], framing: Framing) -> None:
        """The head."""

    def write(self, data: bytes) -> None:
        """A piece of the body; sent by `flush`."""

    def flush(self) -> None:
        """Send what was written."""

    def end(self) -> None:
        """A clean end."""

    def break_off(self) -> None:
        """An end that does not look complete (T4)."""
