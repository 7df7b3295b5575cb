"""Tool calls against a real FastMCP server: what a user sees, and where proxies that speak MCP can take part."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from bench.caller import connected
from bench.contenders import HERE, PEER_PYTHON, Running, free_port, stop, wait_for
from bench.measures import Figures, WrongError, load_posts

from bench import machine

STEPS = 400
_STEPS_CALL = (
    b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":'
    b'{"name":"steps","arguments":{"count":%d},"_meta":{"progressToken":%d}}}'
)


@contextmanager
def real_server() -> Iterator[Running]:
    """The FastMCP server, on the CPU of the load. Raises RuntimeError where FastMCP is not installed."""
    port = free_port()
    command = machine.pinned(machine.LOAD_CPU, [PEER_PYTHON, str(HERE / "fastmcp_server.py"), str(port)])
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield Running("fastmcp", port, process.pid, 0.0)
    finally:
        stop(process)


def measure_tools(connections: int, seconds: float):
    """Calls of a tool that returns its argument."""

    def run(contender: Running, upstream: Running) -> Figures:
        sessions = []
        for _ in range(connections):
            with connected(contender.port) as caller:
                sessions.append(caller.initialize(b"/mcp"))
                caller.call(1, b"/mcp")  # a proxy that speaks MCP opens its own session now
        return load_posts(contender, upstream, "mcp", connections, seconds, sessions)

    return run


def measure_steps(times: int):
    """Calls of a tool that reports many steps of progress; CPU for each event."""

    def run(contender: Running, upstream: Running) -> Figures:
        with connected(contender.port) as caller:
            caller.initialize(b"/mcp")
            meter = machine.Meter(contender.pid, upstream.pid or 0)
            for number in range(1, times + 1):
                answer = caller.post(b"/mcp", _STEPS_CALL % (number, STEPS, number))
                if (came := answer.count(b'"notifications/progress"')) != STEPS or b'"id":%d,' % number not in answer:
                    raise WrongError(f"{contender.name}: {came} of {STEPS} steps came")
            sample = meter.stop()
        return {
            "us": sample.proxy / (times * STEPS) * 1e6,
            "per_second": times * STEPS / sample.wall,
            "foreign": sample.foreign,
        }

    return run
