"""Whole sessions of real clients and servers: all of the protocol, and a connection that is cut in mid-call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

from interop.environments import Sdk
from interop.stage import AT_ONCE, client, staged

PAIRS = (  # client, server
    ("python1", "python1"),
    ("python2", "python2"),
    ("typescript1", "typescript1"),
    ("python1", "typescript1"),
    ("typescript1", "python2"),
    ("python2", "python1"),
)

Key = tuple[str, str, bool]  # client, server, through the proxy?
Document = dict[str, Any]  # everything that the client saw


async def play(client_sdk: Sdk, server_sdk: Sdk, *, proxied: bool) -> Document:
    async with staged(server_sdk, resume={} if proxied else None) as stage:
        stage.front.cut_at(b"resume#4 for", "after")
        async with client(client_sdk, "session", stage.url, {}) as run:
            seen = await run
        assert stage.front.marked.is_set(), "the connection was never cut"
        return seen


async def play_all(sdks: Iterable[Sdk]) -> dict[Key, Document | Exception]:
    """Every pair whose SDKs are there, through the proxy and directly; a failed run is its exception."""
    gate = asyncio.Semaphore(AT_ONCE)
    found = {sdk.name: sdk for sdk in sdks}

    async def gated(client_name: str, server_name: str, proxied: bool) -> Document | Exception:
        async with gate:
            try:
                return await play(found[client_name], found[server_name], proxied=proxied)
            except Exception as error:
                return error

    pairs = [pair for pair in PAIRS if set(pair) <= set(found)]
    async with asyncio.TaskGroup() as group:
        tasks = {
            (*pair, proxied): group.create_task(gated(*pair, proxied))
            for pair, proxied in itertools.product(pairs, (True, False))
        }
    return {key: task.result() for key, task in tasks.items()}
