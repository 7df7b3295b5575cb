"""A scripted server, the proxy before it, and an HTTP client, for each test that asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from admin.stage import Client, Proxy, Server, proxy


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def gate(server: Server, tmp_path: Path) -> AsyncIterator[Proxy]:
    """The proxy with the defaults before `server`."""
    async with server.listening() as upstream, proxy(upstream, tmp_path) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


@pytest.fixture
async def client(gate: Proxy, http: aiohttp.ClientSession) -> Client:
    return Client(http, gate.url)
