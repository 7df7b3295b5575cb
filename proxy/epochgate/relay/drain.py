"""How the proxy ends: first it is not ready, then streams end after whole events, spread over a window (drain)."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from epochgate.relay.clients import Clients
from epochgate.relay.context import Context
from epochgate.relay.downstream import Outcome
from epochgate.relay.telemetry import log

_SPREAD = 0.8  # of the window: the rest is for streams that are in the middle of an event


async def drain(context: Context, server: asyncio.Server, *, grace: float, window: float) -> None:
    """Serve for `grace` seconds more, then end the streams over `window` seconds, so that their clients spread too.

    In the window a new request is answered 503 with `Retry-After`. Idle connections stay until the end for that: a
    request can be on its way already.
    """
    connections = context.clients
    log.info("drain.began", connections=len(connections), streams=len(context.streams), grace=grace, window=window)
    await asyncio.sleep(grace)  # even if nobody is here: whoever sends clients here must first learn of it
    context.retry_after = math.ceil(window) + 1
    context.holds.close_all()
    loop = asyncio.get_running_loop()
    for stream in list(context.streams):
        loop.call_later(random.uniform(0, window * _SPREAD), stream.end_at_boundary)  # noqa: S311
    lent = set() if context.elsewhere is None else context.elsewhere.lent
    await _until_idle(connections, lent, window * _SPREAD)
    for stream in list(context.streams):  # those that began since, too
        stream.end_at_boundary()
    await _until_idle(connections, lent, window * (1 - _SPREAD))
    server.close()
    aborted = sum(connection.busy for connection in connections)
    for connection in list(connections):
        connection.abort()
    log.info("drain.done", aborted=aborted)


async def _until_idle(connections: Clients, lent: set[asyncio.Future[Outcome]], seconds: float) -> None:
    """Let busy connections finish and close, and what is lent come to its end, and wait for that, at most so long."""
    busy = [connection for connection in connections if connection.busy]
    for connection in busy:
        connection.close_when_idle()
    awaited: list[asyncio.Future[Any]] = [*(connection.until_lost() for connection in busy), *lent]
    if awaited:
        await asyncio.wait(awaited, timeout=seconds)
