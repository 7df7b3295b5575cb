"""A Valkey, a scripted server, and a proxy with two workers before it, for each test that asks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from admin.stage import Proxy, Server, proxy
from ledger import servers
from workers.crew import Crew


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.running("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


_names = itertools.count()


@pytest.fixture
def shared(valkey: servers.Server) -> dict[str, Any]:
    """Settings of a proxy with two workers, and records of its own."""
    return {"workers": 2, "store": {"url": valkey.url, "prefix": f"test-{next(_names)}"}}


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
def start(shared: dict[str, Any], tmp_path: Path):
    """Starts a proxy before a server."""

    @asynccontextmanager
    async def run(url: str, **changes: Any) -> AsyncIterator[Crew]:
        async with proxy(url, tmp_path, **{**shared, **changes}) as gate:
            yield Crew(gate)

    return run


@pytest.fixture
async def crew(server: Server, start) -> AsyncIterator[Crew]:
    async with server.listening() as upstream, start(upstream) as crew:
        yield crew


@pytest.fixture
def gate(crew: Crew) -> Proxy:
    return crew.gate


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
