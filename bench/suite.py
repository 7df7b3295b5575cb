"""The suite: every measure with its size, and who takes part in it."""

from __future__ import annotations

import re
import subprocess
import sys

from bench.contenders import STORES, WORKERS, Contender
from bench.measures import (
    Measure,
    measure_big,
    measure_events,
    measure_latency,
    measure_posts,
    measure_quiet,
    measure_resume,
    measure_start,
)
from bench.sends import measure_call_sends, measure_event_sends
from bench.tools import measure_steps, measure_tools

SIZES = {"100b": (100, 60_000), "1k": (1024, 30_000), "16k": (16384, 2_500)}

SPEAK_MCP = ("fastmcp-proxy", "mcp-proxy")
WITH_WORKERS = tuple(contender.name for contender in WORKERS)
WITH_STORE = tuple(contender.name for contender in STORES)
OF_STORES = ("json-16", "call-16", "flood-1k-each")
SLOW = ("mitmproxy", "uvicorn-httpx")


def measures(scale: float = 1.0) -> list[Measure]:
    """All measures, the work in each run times `scale`."""
    seconds = max(1, round(3 * scale))
    paced = max(50, int(400 * scale))

    def of(count: int) -> int:
        return max(1, int(count * scale))

    found = [
        Measure(
            f"json-{n}", f"JSON POST, {n} connections", "us", "us CPU per request", measure_posts("json", n, seconds)
        )
        for n in (1, 16, 64)
    ]
    found += [
        Measure(
            f"call-{n}",
            f"POST answered by a one-event stream, {n} connections",
            "us",
            "us CPU per request",
            measure_posts("call", n, seconds),
        )
        for n in (1, 16, 64)
    ]
    found += [
        Measure(
            "paced-epoch",
            "100 streams x 100 events/s of 1 KB, epoch token in each",
            "us",
            "us CPU per event",
            measure_events("/paced?size=1024&rate=100&epoch=1", 100, paced),
        ),
        Measure(
            "paced-plain",
            "100 streams x 100 events/s of 1 KB, no epoch token",
            "us",
            "us CPU per event",
            measure_events("/paced?size=1024&rate=100&epoch=0", 100, paced, init="/init-plain"),
        ),
    ]
    for name, (size, count) in SIZES.items():
        for batch, how in ((0, "one per chunk"), (1, "batched")):
            target = f"/flood?size={size}&epoch=1&batch={batch}"
            found.append(
                Measure(
                    f"flood-{name}-{'batch' if batch else 'each'}",
                    f"saturated, events of {size} B, {how}",
                    "us",
                    "us CPU per event",
                    measure_events(target, 4, of(count)),
                )
            )
    found += [
        Measure("big-4m", "one event of 4 MB", "us", "us CPU per event", measure_big(4 << 20)),
        Measure("big-16m", "one event of 16 MB", "us", "us CPU per event", measure_big(16 << 20)),
        Measure(
            "latency-json",
            "added latency of one unloaded JSON POST, median",
            "ms",
            "ms",
            measure_latency(b"/json", of(2000)),
        ),
        Measure(
            "latency-call",
            "added latency of one unloaded one-event stream, median",
            "ms",
            "ms",
            measure_latency(b"/call", of(2000)),
        ),
        Measure(
            "resume-epoch",
            "resume proven by the epoch token",
            "ms",
            "ms to the next event",
            measure_resume("epoch", of(50)),
        ),
        Measure(
            "resume-overlap",
            "resume proven by overlap",
            "ms",
            "ms to the next event",
            measure_resume("overlap", of(50)),
        ),
        Measure("resume-held", "resume of a held stream", "ms", "ms to the next event", measure_resume("held", of(50))),
        Measure("quiet-2000", "2,000 open quiet streams", "kb", "KB each", measure_quiet(2000)),
        Measure("quiet-9500", "9,500 open quiet streams", "kb", "KB each", measure_quiet(9500)),
        Measure(
            "sends-json",
            "system calls that send, JSON POST",
            "sends",
            "sends per request",
            measure_call_sends(b"/json", 200),
        ),
        Measure(
            "sends-call",
            "system calls that send, one-event stream",
            "sends",
            "sends per request",
            measure_call_sends(b"/call", 200),
        ),
        Measure(
            "sends-event", "system calls that send, 1 KB events", "sends", "sends per event", measure_event_sends(5, 50)
        ),
        Measure(
            "tools",
            "tool calls of a real FastMCP server, 16 connections",
            "per_second",
            "calls per second",
            measure_tools(16, 2 * seconds),
            real=True,
        ),
        Measure(
            "steps",
            "progress events of a real FastMCP server",
            "us",
            "us CPU per event",
            measure_steps(of(5)),
            real=True,
        ),
        Measure(
            "workers-json-64",
            "JSON POST, 64 connections, a Valkey as the store, on both CPUs",
            "per_second",
            "requests per second",
            measure_posts("json", 64, seconds),
        ),
        Measure(
            "workers-call-64",
            "POST answered by a one-event stream, 64 connections, a Valkey as the store, on both CPUs",
            "per_second",
            "requests per second",
            measure_posts("call", 64, seconds),
        ),
        Measure("start", "start-up", "ms", "ms until it accepts connections", measure_start),
    ]
    return found


def takes_part(measure: Measure, contender: str) -> bool:
    """Whether this measure says anything of this contender."""
    name = measure.name
    if name.startswith("workers") or contender in WITH_WORKERS:
        return name.startswith("workers") and contender in WITH_WORKERS
    if contender in WITH_STORE:
        return name in OF_STORES
    if contender in SPEAK_MCP:
        return measure.real and not (contender == "mcp-proxy" and name == "steps")  # it drops progress
    if contender == "direct":
        return not name.startswith(("latency", "start", "sends", "steps", "quiet", "big"))
    if name.startswith(("resume", "quiet-9500")):
        return contender not in SLOW
    return True


def versions(chosen: list[Contender | None]) -> dict[str, str]:
    """The version of each contender, and of what measures."""
    commands = {contender.name: contender.version for contender in chosen if contender is not None}
    commands |= {"wrk": ["wrk", "-v"], "uvloop": [sys.executable, "-c", "import uvloop; print(uvloop.__version__)"]}
    return {name: version_of(command) for name, command in commands.items()}


def version_of(command: list[str]) -> str:
    """The first number with dots in what a command says; some say it with a path before it, some fail in saying it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+(?:\.\w+)*", done.stdout + done.stderr)
    return found[0] if found else "?"
