"""Resumes run on the product's first loop, uvloop; a module with `BOTH_LOOPS = True` runs on asyncio's own as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import uvloop

from relay.wire import Relay, running


def pytest_asyncio_loop_factories(config, item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if getattr(item.module, "BOTH_LOOPS", False):
        factories["asyncio"] = asyncio.new_event_loop
    return factories


@asynccontextmanager
async def _proxy(**policy: Any) -> AsyncIterator[Relay]:
    async with running(policies=[policy]) as relay:
        yield relay
    context = relay.context
    assert not context.streams, "a stream that nobody has any more"
    assert context.telemetry.open_streams == 0
    assert not context.holds._flows
    assert context.copies.used == 0
    assert all(session.open_flows == 0 for session in context.ledger.sessions())


@pytest.fixture
def proxy() -> Callable[..., AbstractAsyncContextManager[Relay]]:
    """A proxy with this policy; when it ends, nothing may be left of any stream."""
    return _proxy
