"""Part `resources`: attacks on what the proxy has, what they get of it, and what others feel of them."""

from __future__ import annotations

import asyncio
import pathlib
from dataclasses import dataclass, field
from typing import Any

import uvloop

from reliability import attacks
from reliability.attacks import Attack, Scale, target
from reliability.faults import some
from reliability.part import Figure, Options, Part

MIB = 1024 * 1024
SLOWEST = 1.5  # s that a call of good will may take meanwhile


@dataclass(frozen=True, slots=True)
class Case:
    """An attack, the settings that it meets, and how much memory (MiB) it may take at full size."""

    name: str
    title: str
    attack: Attack
    memory: int
    settings: dict[str, Any] = field(default_factory=dict)


QUICK = {"limits": {"head_time": "5s", "body_time": "5s"}}
CASES = (
    Case("slow-heads", "slowloris (`head_time: 5s`)", attacks.slow_heads, 40, QUICK),
    Case("slow-bodies", "slow bodies (`body_time: 5s`)", attacks.slow_bodies, 60, QUICK),
    Case("room", "more connections than `connections`", attacks.more_than_there_is_room, 40,
         {"limits": {"connections": 500}}),
    Case("idle", "idle connections", attacks.idle_connections, 120),
    Case("heads", "header flood", attacks.long_heads, 100),
    Case("many-heads", "a different head with each request", attacks.many_heads, 60),
    Case("bodies", "body flood", attacks.body_flood, 220),
    Case("endless", "endless events", attacks.endless_events, 220),
    Case("bombs", "gzip bombs on a resume", attacks.gzip_bombs, 100),
    Case("made-up", "made-up session ids", attacks.made_up_sessions, 20),
    Case("made-up-valkey", "made-up session ids, with Valkey as the store", attacks.made_up_sessions, 60,
         {"store": {"url": "valkey://"}}),
    Case("initialize", "initialize flood (`sessions: 2000`)", attacks.initialize_flood, 30,
         {"limits": {"sessions": 2000}}),
    Case("streams", "one session, stream after stream", attacks.many_streams, 40),
    Case("stalled", "stalled readers, 200 MB each", attacks.stalled_readers, 200),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What an attack did. Memory in bytes; `failure` is why it succeeded, "" where it did not."""

    what: str
    before: int
    peak: int
    after: int
    calls: dict[str, Any]
    failure: str
    complaints: list[str]


async def suffer(case: Case, size: float, directory: pathlib.Path) -> Report:
    """One attack on a new proxy."""
    async with target(directory / case.name, case.settings) as aim:
        await asyncio.sleep(0.5)
        await aim.pulse()
        aim.proxy.forget_peak()
        before, what, failure = aim.proxy.memory(), "", ""
        try:
            async with asyncio.timeout(300):
                what = await case.attack(aim, Scale(size))
        except (AssertionError, TimeoutError, OSError) as error:
            failure = str(error) or type(error).__name__
        calls = await aim.pulse()
        peak = aim.proxy.memory("VmHWM")
        await asyncio.sleep(1.0)
        after = aim.proxy.memory()
        if await aim.proxy.stop() != 0:
            failure += " It did not end well."
        return Report(what, before, peak, after, calls, failure, aim.proxy.complaints())


def figure(case: Case, report: Report) -> Figure:
    grown = (report.peak - report.before) / MIB
    calls = report.calls
    felt = (
        f"{calls['calls']} calls meanwhile: p99 {calls['p99'] * 1000:.0f} ms, slowest {calls['slowest'] * 1000:.0f} ms"
    )
    memory = f"memory {report.before / MIB:.0f}, at most {report.peak / MIB:.0f}, then {report.after / MIB:.0f} MiB"
    wrong = [text for text in (report.failure, *report.complaints) if text]
    if calls["failed"]:
        wrong.append(f"{calls['failed']} calls failed: {calls['why']}")
    holds = not wrong and grown <= case.memory and calls["slowest"] <= SLOWEST
    value = "; ".join([report.what or "it did not end", memory, felt, *([some(wrong)] if wrong else [])])
    return Figure(case.title, value, f"{case.memory} MiB more, no call above {SLOWEST:g} s", holds)


async def suffer_all(size: float, directory: pathlib.Path) -> list[Figure]:
    return [figure(case, await suffer(case, size, directory)) for case in CASES]


def run(options: Options) -> list[Figure]:
    return uvloop.run(suffer_all(1.0 if options.long else 0.1, options.work))


PART = Part(
    name="resources",
    title="Attacks on resources",
    about="""
Each attack meets a proxy of its own, with the limits of the default configuration unless the table says otherwise.
Beside it somebody calls every 20 ms, each fifth time on a new connection. Memory is what is resident of the proxy's
process. The short form is a tenth of the numbers. The limits are settings, see [configuration](configuration.md).
""",
    run=run,
)
