"""Part `faults`: toxics before the proxy, its server and its store, in every combination, under load."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import uvloop

from reliability.part import Figure, Options, Part
from reliability.toxics import TOXICS
from reliability.traffic import Tally
from reliability.world import Plan, World, world

PLACES = ("client", "upstream", "store")
RECOVERED_WITHIN = 2.0  # s
UNGUARDED_FOR = 8.0  # s
STORE_CONNECTIONS = 34  # that the proxy keeps open to the store at most, and may not have needed at the start

Combination = tuple[str, str, str]  # at each of PLACES


@dataclass(frozen=True, slots=True)
class Measure:
    """How much of it: `seconds` of each combination, in `worlds` at the same time."""

    combinations: list[Combination]
    seconds: float
    worlds: int
    clients: int
    seed: int
    directory: pathlib.Path


@dataclass(slots=True)
class Outcome:
    """What all worlds saw."""

    tally: Tally = field(default_factory=Tally)
    played: int = 0
    losses: int = 0
    hung: list[str] = field(default_factory=list)
    recoveries: dict[Combination, float] = field(default_factory=dict)  # the slowest client's, in s
    store_back: dict[Combination, float] = field(default_factory=dict)  # s
    left: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def every_combination() -> list[Combination]:
    return list(itertools.product(TOXICS, repeat=3))


def covering_combinations() -> list[Combination]:
    """Every pair of toxics at every pair of places, by a Latin square."""
    names = list(TOXICS)
    return [
        (first, second, names[(a + b) % len(names)]) for a, first in enumerate(names) for b, second in enumerate(names)
    ]


async def play(measure: Measure) -> Outcome:
    outcome = Outcome()
    waiting = list(measure.combinations)
    random.Random(measure.seed).shuffle(waiting)
    await asyncio.gather(*(_play_world(number, measure, waiting, outcome) for number in range(measure.worlds)))
    return outcome


async def _play_world(number: int, measure: Measure, waiting: list[Combination], outcome: Outcome) -> None:
    """One world: combination after combination, as long as there are any."""
    directory = measure.directory / f"world-{number}"
    settings = {"log": {"level": "info"}}
    plan = Plan(measure.clients, measure.seed + number, directory, "valkey", settings=settings)
    async with world(plan) as made:
        made.populate()
        await made.recovery()
        while waiting:
            combination = waiting.pop()
            await _play(made, combination, measure.seconds, outcome)
        await _end(made, outcome)


async def _play(made: World, combination: Combination, seconds: float, outcome: Outcome) -> None:
    """One combination, and the recovery from it."""
    made.set_toxics(**dict(zip(PLACES, combination, strict=True)))
    ends_at = time.time() + seconds
    restarts_at = time.time() + seconds / 2 if made.chance.random() < 0.25 else float("inf")
    while (left := ends_at - time.time()) > 0:
        await asyncio.sleep(min(made.chance.uniform(0.5, 1.5), left))
        made.lose_some()
        outcome.losses += 1
        if time.time() > restarts_at:
            restarts_at = float("inf")
            await made.truth.restart(0.3)
    made.set_toxics(**dict.fromkeys(PLACES, "none"))
    took, back = await asyncio.gather(made.recovery(), _until_store_is_back(made))
    outcome.recoveries[combination] = took[-1]
    outcome.store_back[combination] = back
    outcome.played += 1


async def _until_store_is_back(made: World) -> float:
    began = time.time()
    while (await made.proxy.metrics())["epochgate_store_available"] != 1 and time.time() - began < 10:
        await asyncio.sleep(0.05)
    return time.time() - began


async def _end(made: World, outcome: Outcome) -> None:
    outcome.left += await left_over(made)
    outcome.complaints += made.proxy.complaints()
    outcome.hung += made.hung
    _add(outcome.tally, made.tally)


async def left_over(made: World) -> list[str]:
    """Everybody leaves, and the proxy ends: what of them has stayed until then."""
    await made.leave()
    before = made.before
    after = await made.settle(
        lambda now: not now.streams and not now.held and not now.client_connections and now.tasks <= before.tasks
    )
    counts = {
        "open streams": after.streams,
        "held streams": after.held,
        "connections of clients": after.client_connections,
        "tasks": max(after.tasks - before.tasks, 0),
        "descriptors": max(after.descriptors - after.upstream_connections - before.descriptors - STORE_CONNECTIONS, 0),
        "answers of status 500": after.errors,
    }
    left = [f"{count} {what}" for what, count in counts.items() if count]
    status = await made.proxy.stop()
    if status != 0:
        left.append(f"exit status {status}")
    return left


def _add(total: Tally, more: Tally) -> None:
    for name in Tally.__dataclass_fields__:
        value = getattr(more, name)
        if isinstance(value, Counter):
            getattr(total, name).update(value)
        elif isinstance(value, deque):
            getattr(total, name).extend(value)
        else:
            setattr(total, name, getattr(total, name) + value)


async def play_unguarded(measure: Measure) -> list[str]:
    """The same load while the guard does not look: what the clients find wrong then. They must find something."""
    policies = {"policies": [{"name": "mcp", "mode": "bypass"}]}
    async with world(Plan(measure.clients, measure.seed, measure.directory / "unguarded", settings=policies)) as made:
        made.populate()
        ends_at = time.time() + UNGUARDED_FOR
        while time.time() < ends_at:
            await asyncio.sleep(0.3)
            made.lose_some()
        return [line for line in made.tally.wrong if "SPLICED" in line]


def figures(outcome: Outcome, measure: Measure, spliced: list[str]) -> list[Figure]:
    tally = outcome.tally
    of = len(every_combination())
    return [
        Figure(
            "combinations of toxics at client, server and store",
            f"{outcome.played} of {of}, {measure.seconds:g} s each, {measure.worlds} at a time",
            "all that were planned",
            outcome.played == len(measure.combinations),
        ),
        Figure(
            "events checked; cuts, resumes; sessions lost, sessions refused",
            f"{tally.events:,}; {tally.cuts:,}, {tally.resumes:,}; {outcome.losses:,}, {tally.refusals.total():,}",
            "some of each",
            min(tally.events, tally.cuts, tally.resumes, outcome.losses, tally.refusals.total()) > 0,
        ),
        Figure("wrong verdicts", some(tally.wrong), "none", not tally.wrong),
        Figure(
            f"spliced streams that the same clients find in {UNGUARDED_FOR:g} s without the guard (`mode: bypass`)",
            str(len(spliced)),
            "some: the check can see them",
            bool(spliced),
        ),
        Figure(
            "healthy sessions refused since nothing could prove them: without epochs; cut four times before an event",
            ", ".join(f"{count:,} {reason}" for reason, count in tally.excused.most_common()) or "none",
            "allowed by the policy",
            holds=True,
        ),
        Figure("clients that hung", some(outcome.hung), "none", not outcome.hung),
        _slowest("slowest client to get on after the faults were gone", outcome.recoveries),
        _slowest("the store in use again after the faults were gone", outcome.store_back),
        Figure("left over when all clients had gone", some(outcome.left), "nothing", not outcome.left),
        Figure("faults of its own in the proxy's log", some(outcome.complaints), "none", not outcome.complaints),
    ]


def _slowest(what: str, took: dict[Combination, float]) -> Figure:
    worst = max(took, key=took.__getitem__)
    typical = sorted(took.values())[len(took) // 2]
    value = f"{took[worst]:.2f} s after {' / '.join(worst)}; as a rule {typical:.2f} s"
    return Figure(what, value, f"{RECOVERED_WITHIN:g} s", took[worst] <= RECOVERED_WITHIN)


def some(found: list[str], most: int = 3) -> str:
    """The first few of what was found, as a cell of a table."""
    if not found:
        return "0"
    shown = "; ".join(line.strip().replace("|", "/")[:200] for line in found[:most])
    return f"{len(found)}: {shown}"


def run(options: Options) -> list[Figure]:
    if options.long:
        measure = Measure(every_combination(), 30.0, 8, 16, options.seed, options.work)
    else:
        measure = Measure(covering_combinations(), 2.5, 4, 16, options.seed, options.work)
    return figures(uvloop.run(play(measure)), measure, uvloop.run(play_unguarded(measure)))


PART = Part(
    name="faults",
    title="Faults on every side",
    about="""
A TCP relay with Toxiproxy's vocabulary (latency with jitter, bandwidth, slicer, limit_data, reset_peer, timeout,
slow_close, each in both directions) stands between the clients and the proxy, between the proxy and the server, and
between the proxy and Valkey. Each of the three has one toxic or none: 512 combinations. Meanwhile clients open
sessions, call, read streams, break off and resume; the server loses sessions whose buffers survive, and restarts. Each
event says in its data which execution wrote it, so that a spliced stream shows; a refusal is wrong where the session is
healthy and has epochs, or its stream was still held. The long form plays all combinations, the short one 64 in which
each pair of toxics meets at each pair of places.
""",
    run=run,
)
