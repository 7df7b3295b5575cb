"""What has been passed on and is still to be read and recorded (docs/adr/0012-passed-on-first.md).

A live stream is never stopped for what it says (R12): its bytes go on at once. To read each event between two system
calls costs more than to read fifty in a row, so short reads wait for each other for some milliseconds; and an event
that is cut at the end of a read waits for its rest. Whoever looks at a session, a stream or what is kept of it has to
`settle` first.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

WAIT = 0.005  # s
SHORT = 16 * 1024  # bytes; a longer read does not wait for others
LONGEST_REST = 64 * 1024  # bytes of an event that wait for the rest of it
MOST = 256 * 1024  # bytes that wait in all


class Reader(Protocol):
    """A live stream."""

    def read(self, data: bytes, now: float, *, final: bool) -> bytes:
        """Read and record what was passed on from the time `now` (s) on.

        What is returned is the start of an event of which more is to come, to be given again with the rest of it.
        `final`: all of it is to be read.
        """


class Backlog:
    """What waits of each stream, since when."""

    __slots__ = ("_loop", "_size", "_timed", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Reader, tuple[float, list[bytes]]] = {}
        self._size = 0
        self._timed = False

    def add(self, reader: Reader, data: bytes, now: float) -> None:
        """Have it read soon."""
        waiting = self._waiting.get(reader)
        if waiting is None:
            self._waiting[reader] = now, [data]
        else:
            waiting[1].append(data)
        size = len(data)
        self._size += size
        if size > SHORT:
            self._read_long(reader)
        if self._size > MOST:
            self.settle()
        elif not self._timed:
            self._timed = True
            self._loop.call_later(WAIT, self._time_out)

    def _read_long(self, reader: Reader) -> None:
        now, pieces = self._waiting.pop(reader)
        self._size -= sum(map(len, pieces))
        rest = self._read(reader, now, pieces, final=False)
        if rest:
            self._waiting[reader] = now, [rest]
            self._size += len(rest)

    def _time_out(self) -> None:
        self._timed = False
        self.settle()

    def settle(self) -> None:
        """Read all that waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        self._size = 0
        for reader, (now, pieces) in waiting.items():
            self._read(reader, now, pieces, final=True)

    def _read(self, reader: Reader, now: float, pieces: list[bytes], *, final: bool) -> bytes:
        try:
            return reader.read(pieces[0] if len(pieces) == 1 else b"".join(pieces), now, final=final)
        except Exception as error:  # noqa: BLE001  # a fault of ours: logged, and the other streams go on
            self._loop.call_exception_handler({"message": "a stream could not be read", "exception": error})
            return b""
