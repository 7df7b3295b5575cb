"""What has been passed on and is still to be read and recorded (docs/adr/0012-passed-on-first.md).

A live stream is never stopped for what it says (R12): its bytes go on at once. To read each event between two system
calls costs three times what it costs to read fifty in a row, so short reads wait for each other for some milliseconds.
Whoever looks at a session, a stream or what is kept of it has to `settle` first.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

WAIT = 0.005  # s
LONGEST = 16 * 1024  # bytes of a read that may wait
MOST = 256 * 1024  # bytes that wait in all


class Reader(Protocol):
    """A live stream."""

    def read(self, data: bytes, now: float) -> None:
        """Read and record what was passed on at the time `now` (s)."""


class Backlog:
    """The reads of all streams that wait, in order."""

    __slots__ = ("_loop", "_size", "_timed", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiting: list[tuple[Reader, bytes, float]] = []
        self._size = 0
        self._timed = False

    def add(self, reader: Reader, data: bytes, now: float) -> None:
        """Have it read soon."""
        self.waiting.append((reader, data, now))
        self._size += len(data)
        if self._size > MOST:
            self.settle()
        elif not self._timed:
            self._timed = True
            self._loop.call_later(WAIT, self._time_out)

    def _time_out(self) -> None:
        self._timed = False
        self.settle()

    def settle(self) -> None:
        """Read all that waits."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        self._size = 0
        for reader, data, now in waiting:
            try:
                reader.read(data, now)
            except Exception as error:  # noqa: BLE001  # a fault of ours: logged, and the other streams go on
                self._loop.call_exception_handler({"message": "a stream could not be read", "exception": error})
