"""A request as it comes from a client: its head as it was, and its body piece by piece."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from epochgate.relay.headers import Field, Framing, end_to_end
from epochgate.relay.known import KnownRequest

if TYPE_CHECKING:
    from epochgate.relay.client import ClientConnection


class Body:
    """The body of a request as it comes: taken as a whole where it is there, else piece by piece."""

    __slots__ = ("_connection", "_error", "_pieces", "_waiter", "complete", "framing", "length", "size")

    def __init__(self, connection: ClientConnection, framing: Framing, length: int) -> None:
        self._connection = connection
        self._pieces: list[bytes] = []
        self._error: Exception | None = None  # the rest will never come
        self._waiter: asyncio.Future[None] | None = None
        self.framing = framing
        self.length = length  # as announced, where it is sized
        self.size = 0  # bytes waiting to be taken
        self.complete = framing is Framing.NONE

    @classmethod
    def whole(cls, connection: ClientConnection, data: bytes) -> Body:
        """A sized body that is here already."""
        body = cls(connection, Framing.SIZED, len(data))
        if data:
            body._pieces.append(data)
            body.size = len(data)
        body.complete = True
        return body

    def take(self) -> bytes:
        """What has come since the last time."""
        if not self._pieces:
            return b""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self.size = 0
        self._connection.body_taken()
        return data

    def feed(self, data: bytes) -> None:
        """More of it has come."""
        self._pieces.append(data)
        self.size += len(data)
        self._wake()

    def finish(self) -> None:
        """All of it has come."""
        self.complete = True
        self._wake()

    async def wait(self) -> None:
        """Wait until there is more to take, or it is complete.

        Raises ConnectionError if the client has gone, BadRequestError if what it sent cannot be understood.
        """
        if self.complete or self.size:
            return
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error

    def break_off(self, error: Exception) -> None:
        """The rest of it will never come, and what is here is of no use."""
        self._error = error
        self._pieces.clear()
        self.size = 0
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
            self._waiter = None


class Request:
    """A request as it came."""

    __slots__ = (
        "body", "connection", "fields", "first", "http11", "keep_alive", "known", "method", "names", "size", "target",
    )  # fmt: skip

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.method = b""
        self.target = b""
        self.size = 0  # bytes of the fields
        self.fields: list[Field] = []
        self.first: dict[bytes, bytes] = {}  # lower-case name -> first value
        self.names: list[bytes] = []  # lower-case names, repetitions included
        self.http11 = True
        self.keep_alive = True
        self.known: KnownRequest | None = None  # its head came before
        self.body: Body

    def get(self, name: bytes) -> bytes | None:
        """The first value of the field with this lower-case name, without the spaces around it."""
        value = self.first.get(name)
        return None if value is None else value.strip(b" \t")

    def end_to_end(self) -> list[Field]:
        """The fields that go on (T2)."""
        return end_to_end(self.fields, self.names)

    def is_repeated(self, name: bytes) -> bool:
        """Whether the field with this lower-case name came more than once."""
        return name in self.first and self.names.count(name) > 1
