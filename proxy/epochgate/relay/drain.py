"""How the proxy ends: first it is not ready, then streams end after whole events, spread over a window (drain)."""

from __future__ import annotations

import asyncio
import math
import random

from epochgate.relay.client import ClientConnection
from epochgate.relay.context import Context
from epochgate.relay.telemetry import log

_SPREAD = 0.8  # of the window: the rest is for streams that are in the middle of an event


async def drain(
    context: Context, server: asyncio.Server, connections: set[ClientConnection], *, grace: float, window: float
) -> None:
    """Serve for `grace` seconds more, then end the streams over `window` seconds, so that their clients spread too.

    In the window a new request is answered 503 with `Retry-After`; the connections without one are closed.
    """
    log.info("drain.began", connections=len(connections), streams=len(context.streams), grace=grace, window=window)
    await asyncio.sleep(grace)  # even if nobody is here: whoever sends clients here must first learn of it
    context.retry_after = math.ceil(window) + 1
    context.holds.close_all()
    for connection in list(connections):
        connection.close_when_idle()
    loop = asyncio.get_running_loop()
    for stream in list(context.streams):
        loop.call_later(random.uniform(0, window * _SPREAD), stream.end_at_boundary)  # noqa: S311
    await _until_gone(connections, window * _SPREAD)
    for stream in list(context.streams):  # those that began since, too
        stream.end_at_boundary()
    await _until_gone(connections, window * (1 - _SPREAD))
    server.close()
    for connection in list(connections):
        connection.abort()
    log.info("drain.done", aborted=len(connections))


async def _until_gone(connections: set[ClientConnection], seconds: float) -> None:
    """Wait until these connections are no more, at most this long: an answer has gone out only when they are."""
    if connections:
        await asyncio.wait([connection.until_lost() for connection in connections], timeout=seconds)
