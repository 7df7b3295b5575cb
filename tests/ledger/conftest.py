from __future__ import annotations

import pytest

from epochgate.ledger import kept, shared
from ledger.places import Memory, Sqlite, Valkey
from ledger.servers import running


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """Starts each kind of server when it is first asked for."""
    started = {}

    def get(kind: str):
        if kind not in started:
            context = running(kind, tmp_path_factory.mktemp(kind))
            started[kind] = (context, context.__enter__())
        return started[kind][1]

    yield get
    for context, _ in started.values():
        context.__exit__(None, None, None)


@pytest.fixture
def quick(monkeypatch):
    """A store that failed is tried again at once."""
    for module in (kept, shared):
        monkeypatch.setattr(module, "RETRY_AFTER", (0.01, 0.02))


async def _place(kind, servers, tmp_path):
    if kind == "memory":
        return Memory()
    if kind == "sqlite":
        return Sqlite(tmp_path)
    server = servers(kind)
    with server.client() as client:
        client.flushall()
    return Valkey(server)


@pytest.fixture(params=["memory", "sqlite", "valkey", "redis"])
async def place(request, servers, tmp_path):
    place = await _place(request.param, servers, tmp_path)
    yield place
    await place.aclose()


@pytest.fixture(params=["sqlite", "valkey", "redis"])
async def durable(request, servers, tmp_path):
    place = await _place(request.param, servers, tmp_path)
    yield place
    await place.aclose()


@pytest.fixture(params=["valkey", "redis"])
async def common(request, servers, tmp_path):
    place = await _place(request.param, servers, tmp_path)
    yield place
    await place.aclose()
