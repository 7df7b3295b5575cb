"""Resumes run on the product's first loop, uvloop; a module with `BOTH_LOOPS = True` runs on asyncio's own as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import uvloop

from epochgate.ledger import lending, loans
from ledger.servers import Server
from ledger.servers import running as running_server
from relay.wire import Relay, running
from resume.replicas import Replica, replicas


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
    assert not context.farewells
    assert context.copies.used == 0
    assert all(session.open_flows == 0 for session in context.ledger.sessions())


@pytest.fixture
def proxy() -> Callable[..., AbstractAsyncContextManager[Relay]]:
    """A proxy with this policy; when it ends, nothing may be left of any stream."""
    return _proxy


@pytest.fixture(scope="session")
def valkey(request, tmp_path_factory) -> Iterator[Server]:
    """A store that processes share; a test may ask for `redis` in its place."""
    kind = getattr(request, "param", "valkey")
    with running_server(kind, tmp_path_factory.mktemp(kind)) as server:
        yield server


@pytest.fixture
def several(valkey) -> Callable[..., AbstractAsyncContextManager[list[Replica]]]:
    """That many proxies with one store and this policy; when they end, nothing may be left of any stream."""
    with valkey.client() as client:
        client.flushall()
    return lambda number=2, **policy: replicas(valkey, number, **policy)


@pytest.fixture
def quick(monkeypatch) -> None:
    """Whoever says nothing for 0.6 s is taken to be gone."""
    for module in (lending, loans):
        monkeypatch.setattr(module, "LEASE", 0.6)
    monkeypatch.setattr(lending, "BEAT", 0.1)
