"""Every test of the relay runs on both event loops that the product runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from relay.wire import Relay, running


def pytest_asyncio_loop_factories(config, item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    async with running() as relay:
        yield relay
