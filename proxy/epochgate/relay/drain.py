"""How the proxy ends: first it is not ready, then streams end after whole events, spread over a window (drain)."""

from __future__ import annotations

import asyncio
import random

from epochgate.relay.client import ClientConnection
from epochgate.relay.context import Context
from epochgate.relay.telemetry import log
from epochgate.settings import Drain

_LOOK_EVERY = 0.05  # s


async def drain(context: Context, server: asyncio.Server, connections: set[ClientConnection], settings: Drain) -> None:
    """Serve for `grace` seconds more, then end the streams over `window` seconds, so that their clients spread too."""
    log.info("drain.began", connections=len(connections), grace=settings.grace, window=settings.window)
    await _until_idle(connections, settings.grace)
    server.close()
    context.holds.close_all()
    for connection in list(connections):
        connection.close_when_idle()
    loop = asyncio.get_running_loop()
    for stream in list(context.streams):
        loop.call_later(random.uniform(0, settings.window * 0.8), stream.end_at_boundary)  # noqa: S311
    await _until_idle(connections, settings.window)
    left = [connection for connection in connections if connection.current is not None]
    for connection in list(connections):
        connection.abort()
    log.info("drain.done", aborted=len(left))


async def _until_idle(connections: set[ClientConnection], seconds: float) -> None:
    """Wait until no request is being worked on, at most this long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while loop.time() < deadline and any(connection.current is not None for connection in connections):
        await asyncio.sleep(_LOOK_EVERY)
