"""The side of a client, as those who deal with an answer see it: where it goes, and how the work on it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from epochgate.errors import UpstreamError
from epochgate.relay.headers import Field, Framing, Head


class Outcome(Enum):
    """How the work on one request ended."""

    DONE = "the reply is finished, or the client has gone"
    REFUSED = "refused before the head was released"
    EMPTY = "ended before any message, and before the head was released"
    NO_ROOM = "given up before the head was released: what has to be checked could not be kept"
    NO_STREAM = "answered by no event stream, where another cursor is to be tried"


class Watcher(Protocol):
    """Whoever works on a request hears what becomes of the client."""

    def client_gone(self) -> None:
        """The connection is lost; nothing can be written any more."""

    def client_paused(self) -> None:
        """The client does not keep up (T6)."""

    def client_resumed(self) -> None:
        """It does again."""


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

    def interim(self, head: bytes) -> None:
        """A 1xx answer."""

    def start(self, status: int, reason: bytes, fields: list[Field], framing: Framing) -> None:
        """The head."""

    def pass_on(self, head: Head) -> None:
        """The head of the upstream's answer, as it came."""

    def write(self, data: bytes) -> None:
        """A piece of the body; sent by `flush`."""

    def flush(self) -> None:
        """Send what was written."""

    def end(self) -> None:
        """A clean end."""

    def break_off(self) -> None:
        """An end that does not look complete (T4)."""


Tell = Callable[[Outcome | UpstreamError], None]


class Downstream:
    """The client that an answer goes to; `tell` hears, once, how the work on the request ended."""

    __slots__ = ("_tell", "client", "reply")

    def __init__(self, client: Client, reply: Response, tell: Tell) -> None:
        self.client = client
        self.reply = reply
        self._tell: Tell | None = tell

    def finish(self, outcome: Outcome | UpstreamError) -> None:
        """The work on this request is over, as far as its answer is concerned."""
        self.client.watcher = None
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(outcome)

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._tell is None


def telling(ended: asyncio.Future[Outcome]) -> Tell:
    """What tells a future how the work on a request ended."""

    def tell(outcome: Outcome | UpstreamError) -> None:
        if ended.done():
            return
        if isinstance(outcome, UpstreamError):
            ended.set_exception(outcome)
        else:
            ended.set_result(outcome)

    return tell
