"""What has been passed on and is still to be read and recorded (docs/adr/0012-passed-on-first.md).

A live stream is never stopped for what it says (R12): its bytes go on at once. To read each event between two system
calls costs more than to read fifty in a row, so short reads wait for each other for a moment; and an event
that is cut at the end of a read waits for its rest. Whoever looks at a session, a stream or what is kept of it has to
`settle` first.
"""

from __future__ import annotations

import asyncio
import time
from itertools import takewhile
from typing import NamedTuple, Protocol

WAIT = 0.05  # s
KEPT_WAIT = 0.005  # s; where records outlive the process, what it has not read when it is killed would be lost
SHORT = 64 * 1024  # bytes; a longer read does not wait for others
LONGEST_REST = 64 * 1024  # bytes of an event that wait for the rest of it
MOST = 1024 * 1024  # bytes that wait in all


class Reader(Protocol):
    """A live stream."""

    def read(self, data: bytes, now: float, *, final: bool) -> bytes:
        """Read and record what was passed on from the time `now` (s) on.

        What is returned is the start of an event of which more is to come, to be given again with the rest of it.
        `final`: all of it is to be read.
        """


class Waiting(NamedTuple):
    """What was passed on of one stream."""

    since: float  # s, the time of the first of it
    due: float  # s of the loop's clock
    pieces: list[bytes]


class Backlog:
    """What waits of each stream, in the order in which it is due."""

    __slots__ = ("_loop", "_size", "_timed", "_wait", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, kept: bool) -> None:
        """`kept`: what is recorded outlives the process."""
        self._loop = loop
        self._wait = KEPT_WAIT if kept else WAIT
        self._waiting: dict[Reader, Waiting] = {}
        self._size = 0
        self._timed = False

    def add(self, reader: Reader, data: bytes) -> None:
        """Have it read soon."""
        waiting = self._waiting.get(reader)
        if waiting is None:
            self._waiting[reader] = Waiting(time.time(), self._loop.time() + self._wait, [data])
        else:
            waiting.pieces.append(data)
        size = len(data)
        self._size += size
        if size > SHORT:
            waiting = self._waiting.pop(reader)
            rest = self._read(reader, waiting, final=False)
            if rest:
                self._waiting[reader] = waiting._replace(pieces=[rest])
                self._size += len(rest)
        if self._size > MOST:
            self.settle()
        elif not self._timed:
            self._timed = True
            self._loop.call_later(self._wait, self._look)

    def _look(self) -> None:
        """Read what is due."""
        now = self._loop.time()
        for reader in [reader for reader, _ in takewhile(lambda item: item[1].due <= now, self._waiting.items())]:
            waiting = self._waiting.pop(reader, None)
            if waiting is not None:
                self._read(reader, waiting, final=True)
        self._timed = bool(self._waiting)
        if self._timed:
            self._loop.call_later(self._wait / 2, self._look)  # all at once would stop the loop for too long

    def settle(self) -> None:
        """Read all that waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for reader, of_it in waiting.items():
            self._read(reader, of_it, final=True)

    def _read(self, reader: Reader, waiting: Waiting, *, final: bool) -> bytes:
        data = b"".join(waiting.pieces)
        self._size -= len(data)
        try:
            return reader.read(data, waiting.since, final=final)
        except Exception as error:  # noqa: BLE001  # a fault of ours: logged, and the other streams go on
            self._loop.call_exception_handler({"message": "a stream could not be read", "exception": error})
            return b""
