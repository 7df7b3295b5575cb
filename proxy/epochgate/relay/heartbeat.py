"""A sign of life on a silent stream, for whatever stands before the proxy and closes what is idle (`keepalive`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

COMMENT = b":\n\n"  # nothing to a client: no event, no id


class Heartbeat:
    """Calls `beat` whenever `seconds` have passed without a call of `heard`, until it is stopped."""

    __slots__ = ("_at", "_beat", "_loop", "_seconds", "_timer")

    def __init__(self, seconds: float, beat: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._beat = beat
        self._at = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look)

    def heard(self) -> None:
        """The stream was not silent."""
        self._at = self._loop.time()

    def stop(self) -> None:
        """The stream has ended."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._at + self._seconds:
            self._at = now
            self._beat()
        self._timer = self._loop.call_at(self._at + self._seconds, self._look)
