"""A session on a wire of one's own, and the comparison with the figures on record."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import AsyncIterator, Callable

import pytest
import structlog

from bench.wire import Wire
from epochgate.relay import telemetry

FIGURES = pathlib.Path(__file__).with_name("figures.json")
# What counts as a call differs between versions of Python: on another one than the figures are of, more is allowed.
RECORDED_WITH = (3, 11)
ALLOWED = 1.1 if sys.version_info[:2] == RECORDED_WITH else 1.4


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A wire on which a session is open."""
    wire = Wire()
    await wire.initialize()
    yield wire
    wire.client.connection_lost(None)
    wire.to_client.close()
    wire.context.upstream.close()
    assert all(transport.closed for _, transport in wire.upstreams)
    for connection, _ in wire.upstreams:
        connection.connection_lost(None)
    structlog.reset_defaults()
    vars(telemetry.log).pop("bind", None)  # it has kept what was configured here, for tests that come after


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Compares a figure with the one on record; more than 10 % above it fails. `BENCH_RECORD=1` records."""

    def compare(name: str, figure: float) -> None:
        figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        if os.environ.get("BENCH_RECORD") == "1":
            FIGURES.write_text(json.dumps(figures | {name: figure}, indent=2, sort_keys=True) + "\n")
            return
        most = figures[name] * ALLOWED
        assert figure <= most, (
            f"{name}: {figure} calls, {figures[name]} on record; if that is meant, see docs/performance.md"
        )

    return compare
