"""What the product must keep to, and what it aims for; each bound is judged from the runs of one benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

Runs = list[dict]
GATE, BYPASS = "epochgate", "epochgate-bypass"


@dataclass(frozen=True, slots=True)
class Bound:
    """`figures` gives one value for each round in which it could be measured; `least`: the bound is a floor."""

    title: str
    figures: Callable[[Runs], list[float]]
    bound: float
    aim: float | None
    unit: str = "x"
    least: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value keeps to the bound."""
        return value >= self.bound if self.least else value <= self.bound


def values(runs: Runs, measure: str, contender: str, figure: str) -> dict[int, float]:
    """The figure in each round."""
    return {
        run["round"]: run["figures"][figure]
        for run in runs
        if run["measure"] == measure and run["contender"] == contender and figure in run["figures"]
    }


def _pairs(ours: dict[int, float], theirs: dict[int, float], join: Callable[[float, float], float]) -> list[float]:
    """Only what was measured in the same round is put together."""
    return [join(ours[number], theirs[number]) for number in ours if number in theirs]


def ratio(
    measure: str, other: str, figure: str = "us", *, inverse: bool = False, ours: str = GATE
) -> Callable[[Runs], list[float]]:
    """Ours by theirs (theirs by ours where `inverse`), round by round."""

    def figures(runs: Runs) -> list[float]:
        mine, theirs = values(runs, measure, ours, figure), values(runs, measure, other, figure)
        return _pairs(mine, theirs, lambda a, b: (b / a if inverse else a / b) if a and b else 0.0)

    return figures


def added(measure: str) -> Callable[[Runs], list[float]]:
    """What the guard adds to the same proxy without it."""

    def figures(runs: Runs) -> list[float]:
        return _pairs(values(runs, measure, GATE, "us"), values(runs, measure, BYPASS, "us"), lambda a, b: a - b)

    return figures


def plain(measure: str, figure: str) -> Callable[[Runs], list[float]]:
    """The figure itself."""
    return lambda runs: list(values(runs, measure, GATE, figure).values())


def growth(runs: Runs) -> list[float]:
    """Four times the size, how many times the work."""
    return _pairs(values(runs, "big-16m", GATE, "us"), values(runs, "big-4m", GATE, "us"), lambda a, b: a / b)


BOUNDS = (
    Bound("CPU of a JSON POST, 16 connections, by plain aiohttp's", ratio("json-16", "aiohttp"), 0.5, 0.35),
    Bound("CPU of a JSON POST, 64 connections, by plain aiohttp's", ratio("json-64", "aiohttp"), 0.5, 0.35),
    Bound("CPU of a JSON POST, 16 connections, by nginx's", ratio("json-16", "nginx"), 5, 3),
    Bound("CPU of a JSON POST, 64 connections, by nginx's", ratio("json-64", "nginx"), 5, 3),
    Bound("CPU of a one-event stream, 16 connections, by plain aiohttp's", ratio("call-16", "aiohttp"), 0.5, 0.32),
    Bound("CPU of a one-event stream, 64 connections, by plain aiohttp's", ratio("call-64", "aiohttp"), 0.5, 0.32),
    Bound("CPU of a one-event stream, 16 connections, by nginx's", ratio("call-16", "nginx"), 4, 2.5),
    Bound("CPU of a one-event stream, 64 connections, by nginx's", ratio("call-64", "nginx"), 4, 2.5),
    Bound("CPU of a checked 1 KB event, token in each, by plain aiohttp's", ratio("paced-epoch", "aiohttp"), 0.8, 0.65),
    Bound("CPU of a checked 1 KB event, token in each, by nginx's", ratio("paced-epoch", "nginx"), 2, 1.5),
    Bound("CPU of a checked 1 KB event, no token, by plain aiohttp's", ratio("paced-plain", "aiohttp"), 0.8, 0.65),
    Bound("CPU of a checked 1 KB event, no token, by nginx's", ratio("paced-plain", "nginx"), 2, 1.5),
    Bound("latency of a checked 1 KB event, p99", plain("paced-epoch", "p99_ms"), 5, None, "ms"),
    Bound("checking adds, 1 KB event (saturated)", added("flood-1k-each"), 3, 1.5, "us"),
    Bound("checking adds, 16 KB event (saturated)", added("flood-16k-each"), 10, 5, "us"),
    Bound("CPU of a 16 MB event by that of a 4 MB one", growth, 6, None),
    Bound("memory of an open quiet stream, 9,500 of them", plain("quiet-9500", "kb"), 20, 16, "KB"),
    Bound("first event while 2,000 streams open, p99", plain("quiet-2000", "ttfb_p99_ms"), 100, None, "ms"),
    Bound("added latency of an unloaded JSON POST, median", plain("latency-json", "ms"), 0.25, 0.18, "ms"),
    Bound("sends of a JSON POST", plain("sends-json", "sends"), 2.05, 2.05, ""),
    Bound("sends of a one-event stream", plain("sends-call", "sends"), 3.05, 2.05, ""),
    Bound("sends of an event", plain("sends-event", "sends"), 1.05, 1.05, ""),
    Bound(
        "tool calls of a FastMCP server, by those without a proxy",
        ratio("tools", "direct", "per_second"),
        0.9,
        None,
        "x",
        least=True,
    ),
    *(
        Bound(
            f"{what} a second with {store} by those with memory alone",
            ratio(measure, "epochgate-memory", "per_second", ours=f"epochgate-{store.lower()}"),
            0.85,
            None,
            "x",
            least=True,
        )
        for store in ("SQLite", "Valkey")
        for what, measure in (
            ("JSON POSTs", "json-16"),
            ("one-event streams", "call-16"),
            ("1 KB events", "flood-1k-each"),
        )
    ),
    Bound(
        "mitmproxy's CPU of a JSON POST by ours", ratio("json-16", "mitmproxy", inverse=True), 10, None, "x", least=True
    ),
    Bound(
        "uvicorn+httpx's CPU of a JSON POST by ours",
        ratio("json-16", "uvicorn-httpx", inverse=True),
        10,
        None,
        "x",
        least=True,
    ),
    Bound(
        "mitmproxy's CPU of a one-event stream by ours",
        ratio("call-16", "mitmproxy", inverse=True),
        10,
        None,
        "x",
        least=True,
    ),
    Bound(
        "uvicorn+httpx's CPU of a one-event stream by ours",
        ratio("call-16", "uvicorn-httpx", inverse=True),
        10,
        None,
        "x",
        least=True,
    ),
    Bound(
        "FastMCP proxy's CPU of a real tool call by ours",
        ratio("tools", "fastmcp-proxy", inverse=True),
        10,
        None,
        "x",
        least=True,
    ),
    Bound(
        "mitmproxy's CPU of a 1 KB event by ours",
        ratio("paced-epoch", "mitmproxy", inverse=True),
        2.5,
        None,
        "x",
        least=True,
    ),
    Bound(
        "uvicorn+httpx's CPU of a 1 KB event by ours",
        ratio("paced-epoch", "uvicorn-httpx", inverse=True),
        2.5,
        None,
        "x",
        least=True,
    ),
    Bound(
        "FastMCP proxy's CPU of a real progress event by ours",
        ratio("steps", "fastmcp-proxy", inverse=True),
        2.5,
        None,
        "x",
        least=True,
    ),
)


def judged(runs: Runs) -> list[tuple[Bound, list[float], bool | None]]:
    """Each bound with the values of its rounds, and whether their median keeps to it; None: not measured."""
    found = []
    for bound in BOUNDS:
        figures = bound.figures(runs)
        found.append((bound, figures, bound.holds(statistics.median(figures)) if figures else None))
    return found
