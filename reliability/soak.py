"""Part `soak`: mixed load for a long time, with cuts, resumes, faults and reloads. What grows, leaks."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
import statistics
import time
from dataclasses import dataclass, field

import uvloop

from reliability.faults import PLACES, left_over, some
from reliability.lines import Series, chart
from reliability.part import Figure, Options, Part
from reliability.proxy import Sample
from reliability.toxics import TOXICS
from reliability.traffic import Tally, Ways
from reliability.world import Plan, World, world

MIB = 1024 * 1024
# A third may be above the one before it by this share, and by this much on top. What really grows goes on growing.
GROWTH = 0.03
SLACK = {"memory": 3 * MIB, "descriptors": 40, "tasks": 20, "sessions": 60}
PLOT = "soak.svg"
HOLD = 10.0  # s; a client that is back within 2 s has to be served, however long 2,000 of them have to queue
LATE = 5.0  # s that the look at a fence may take


@dataclass(frozen=True, slots=True)
class Length:
    """How much of it. Times in s; each of `*_every` is a mean or a period."""

    seconds: float
    streams: int
    interval: float  # between two events of a stream
    cut_every: float
    call_every: float
    sample_every: float
    lose_every: float
    fault_every: float
    fault_for: float
    reload_every: float
    restart_every: float
    kept: float  # records of sessions that are idle or fenced


LONG = Length(1800, 2000, 4.0, 60.0, 60.0, 5.0, 0.5, 20.0, 4.0, 30.0, 300.0, 60.0)
SHORT = Length(150, 300, 1.0, 10.0, 8.0, 1.0, 0.5, 10.0, 2.0, 8.0, 25.0, 10.0)
FOR_CI = Length(36, 80, 0.4, 4.0, 4.0, 0.5, 0.5, 4.0, 1.0, 3.0, 6.0, 8.0)


@dataclass(slots=True)
class Log:
    """What was seen: samples by time (s since the start), and how often things happened."""

    samples: list[tuple[float, Sample]] = field(default_factory=list)
    losses: int = 0
    restarts: int = 0
    faults: int = 0
    reloads: int = 0
    tally: Tally = field(default_factory=Tally)
    hung: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    failed_reloads: int = 0

    def thirds(self, name: str) -> tuple[float, float, float]:
        """The median of a figure in each third of the time."""
        values = [getattr(sample, name) for _, sample in self.samples]
        size = len(values) // 3
        return tuple(statistics.median(values[part * size : (part + 1) * size]) for part in range(3))  # type: ignore[return-value]


async def soak(length: Length, seed: int, directory: pathlib.Path) -> Log:
    ways = Ways(length.cut_every, length.call_every, patience=max(4.0, 4 * length.interval))
    settings = {
        "limits": {
            "session_idle": length.kept,
            "fence": length.kept,
            "sessions": 4 * length.streams,
            "held_streams": 2
            * length.streams,  # where a fault cuts off all clients, each of them has to be served (H2)
        },
        "log": {"level": "warning"},
    }
    plan = Plan(
        length.streams, seed, directory, "valkey", interval=length.interval, hold=HOLD, ways=ways,
        hung_after=20.0 + 5 * length.interval, settings=settings, fenced_for=length.kept - LATE,
    )  # fmt: skip
    log = Log()
    async with world(plan) as made:
        made.populate(over=min(length.seconds / 15, 30.0))
        began = time.time()
        troubles = [
            asyncio.create_task(work)
            for work in (
                _lose(made, log, length),
                _fault(made, log, length),
                _reload(made, log, length),
                _restart(made, log, length),
            )
        ]
        while (at := time.time() - began) < length.seconds:
            log.samples.append((at, await made.proxy.sample()))
            await asyncio.sleep(max(length.sample_every - (time.time() - began - at), 0))
        for trouble in troubles:
            trouble.cancel()
        for ended in await asyncio.gather(*troubles, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        made.set_toxics(**dict.fromkeys(PLACES, "none"))
        await made.recovery()
        metrics = await made.proxy.metrics()
        log.failed_reloads = int(metrics['epochgate_config_reloads_total{result="failure"}'])
        log.reloads = int(metrics['epochgate_config_reloads_total{result="success"}'])
        log.left = await left_over(made)
        log.complaints = made.proxy.complaints()
        log.tally, log.hung = made.tally, made.hung
    return log


async def _lose(made: World, log: Log, length: Length) -> None:
    while True:
        await asyncio.sleep(made.chance.expovariate(1 / length.lose_every))
        made.lose_some()
        log.losses += 1


async def _fault(made: World, log: Log, length: Length) -> None:
    names = [name for name in TOXICS if name != "none"]
    while True:
        await asyncio.sleep(made.chance.expovariate(1 / length.fault_every))
        made.set_toxics(**{made.chance.choice(PLACES): made.chance.choice(names)})
        await asyncio.sleep(length.fault_for)
        made.set_toxics(**dict.fromkeys(PLACES, "none"))
        log.faults += 1


async def _reload(made: World, log: Log, length: Length) -> None:
    """Other policies each time."""
    number = 0
    while True:
        await asyncio.sleep(length.reload_every)
        number += 1
        policy = {
            "name": "mcp",
            "keepalive": f"{number % 2 * 10}s",
            "resume": {"hold": {"time": HOLD, "bytes": f"{1 + number % 3}MiB"}, "first_event_timeout": 1 + number % 2},
        }
        more = [{"name": f"other-{number % 5}", "match": {"path": "/nowhere/*"}, "mode": "observe"}]
        made.proxy.write({**made.settings, "policies": [*more[: number % 2], policy]})
        made.proxy.signal(signal.SIGHUP)


async def _restart(made: World, log: Log, length: Length) -> None:
    while True:
        await asyncio.sleep(length.restart_every)
        await made.truth.restart(0.3)
        log.restarts += 1


def figures(log: Log, length: Length) -> list[Figure]:
    tally = log.tally
    streams = statistics.median(sample.streams for _, sample in log.samples)
    return [
        Figure(
            "time; streams that are open",
            f"{log.samples[-1][0] / 60:.1f} min; {streams:,.0f} as a rule, {length.streams:,} clients",
            "as planned",
            log.samples[-1][0] > length.seconds * 0.95 and streams > length.streams * 0.6,
        ),
        Figure(
            "events checked; cuts, resumes; calls; sessions opened, refused",
            f"{tally.events:,}; {tally.cuts:,}, {tally.resumes:,}; {tally.calls:,}; {tally.opened:,}, "
            f"{tally.refusals.total():,}",
            "some of each",
            min(tally.events, tally.cuts, tally.resumes, tally.calls, tally.refusals.total()) > 0,
        ),
        Figure(
            "sessions lost; restarts of the server; faults; reloads",
            f"{log.losses:,}; {log.restarts}; {log.faults}; {log.reloads}",
            "some of each, no reload failed",
            min(log.losses, log.restarts, log.faults, log.reloads) > 0 and not log.failed_reloads,
        ),
        Figure("wrong verdicts", some(tally.wrong), "none", not tally.wrong),
        Figure("clients that hung", some(log.hung), "none", not log.hung),
        *(_flat(log, name) for name in SLACK),
        Figure("left over when all clients had gone", some(log.left), "nothing", not log.left),
        Figure("faults of its own in the proxy's log", some(log.complaints), "none", not log.complaints),
    ]


def _flat(log: Log, name: str) -> Figure:
    """The last third is not above the middle one."""
    _, middle, last = log.thirds(name)
    bound = middle * (1 + GROWTH) + SLACK[name]
    unit, scale = (" MiB", MIB) if name == "memory" else ("", 1)
    slack = f"{SLACK[name] / scale:,.0f}{unit}"
    title = {"sessions": "records of sessions"}.get(name, name)
    return Figure(
        f"{title}, median of the middle and the last third",
        f"{middle / scale:,.0f} and {last / scale:,.0f}{unit}",
        f"the last at most {GROWTH:.0%} and {slack} above",
        last <= bound,
    )


def draw(log: Log) -> str:
    minutes = [at / 60 for at, _ in log.samples]
    names = {
        "memory (MiB)": [sample.memory / MIB for _, sample in log.samples],
        "descriptors": [float(sample.descriptors) for _, sample in log.samples],
        "tasks": [float(sample.tasks) for _, sample in log.samples],
        "sessions": [float(sample.sessions) for _, sample in log.samples],
        "open streams": [float(sample.streams) for _, sample in log.samples],
        "held streams": [float(sample.held) for _, sample in log.samples],
    }
    end = minutes[-1]
    spans = [(end / 3, 2 * end / 3, "middle third"), (2 * end / 3, end, "last third")]
    return chart(
        "The proxy's process under mixed load", minutes, [Series(name, values) for name, values in names.items()], spans
    )


def run(options: Options) -> list[Figure]:
    length = LONG if options.long else SHORT
    log = uvloop.run(soak(length, options.seed, options.work))
    (options.plots / PLOT).write_text(draw(log))
    (options.work / "wrong.txt").write_text("\n".join([*log.tally.wrong, *log.hung]))
    with contextlib.suppress(OSError), (options.work / "samples.csv").open("w") as table:
        names = list(Sample.__dataclass_fields__)
        table.write(",".join(["seconds", *names]) + "\n")
        for at, sample in log.samples:
            table.write(",".join([f"{at:.1f}", *(str(getattr(sample, name)) for name in names)]) + "\n")
    return figures(log, length)


PART = Part(
    name="soak",
    title="Soak",
    about="""
The clients, server, relays and Valkey of the faults above, for half an hour with 2,000 clients, each with a stream open
most of the time. They break off and resume, and call in between; sessions are lost all the time, the server restarts
every five minutes, a fault comes to a random place every 20 s or so for 4 s, and the configuration is reloaded every
30 s with other policies. Records live for a minute, so that they come and go. All streams may be held at once, for 10 s
(`limits.held_streams` is twice the number of clients): a fault before the clients cuts off all of them together, and
with the default of 1,024 the rest of the streams without epochs would be refused, as the policy says. Flat means: the
median of the last third is at most 3 % above that of the middle third, with some slack for what comes in whole numbers.
(The short form is two minutes and a half with 300 clients.)
""",
    run=run,
    plots=(PLOT,),
)
