"""Each test is one attack, on the product's first loop; `reliability/access.py` counts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from admin.stage import Server
from relay.wire import Relay, running


def pytest_asyncio_loop_factories(config, item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@asynccontextmanager
async def _guarded(**changes: Any) -> AsyncIterator[Relay]:
    policy = changes.pop("policy", {})
    async with running(policies=[policy], **changes) as relay:
        yield relay


@pytest.fixture
def guarded() -> Callable[..., AbstractAsyncContextManager[Relay]]:
    """The proxy between raw sockets, with these sections of its configuration; `policy` is its only one."""
    return _guarded


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path
