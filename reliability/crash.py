"""Part `crash`: kill -9 at random points, with SQLite and with Valkey; the store opens, and no verdict is wrong."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
import shutil
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import uvloop

from reliability.faults import some
from reliability.part import Figure, Options, Part
from reliability.traffic import Refusal, Tally, excuse_unproven
from reliability.wire import Wire
from reliability.world import Plan, World, world

WRITTEN_AFTER = 1.0  # s; what was recorded longer before a kill has to be there again
KILLED_AGAIN = 0.2  # of the starts are killed as well
STORE_KILLED = 0.15  # of the kills are of Valkey, which loses all it had
REWRITTEN_AFTER = 2.0  # s in which the proxy writes all of it again that is in use
# What the log may not say of the store after a proxy was killed. Whether it was away is another question.
STORE_TROUBLE = ("store.unreadable", "store.lost", "malformed", "corrupt")


@dataclass(frozen=True, slots=True)
class Measure:
    kills: int
    clients: int
    store: str
    seed: int
    directory: pathlib.Path


@dataclass(slots=True)
class Outcome:
    """What was seen. `starts`: s from a start to the first accepted connection."""

    store: str
    kills: int = 0
    kills_at_start: int = 0
    store_kills: int = 0
    checks: int = 0
    fences: int = 0
    fences_gone: int = 0
    missing: list[float] = field(default_factory=list)  # s before a kill that what is missing was recorded
    losses: int = 0
    starts: list[float] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    hung: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)


class Crashes:
    """Kills a proxy, again and again."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._chance = random.Random(measure.seed)
        self._killed: list[float] = []
        self.outcome = Outcome(measure.store)

    async def play(self) -> Outcome:
        measure, outcome = self._measure, self.outcome
        plan = Plan(
            measure.clients, measure.seed, measure.directory / measure.store, measure.store,
            relays=False, excuse=self._excuse, in_doubt=self._in_doubt,
        )  # fmt: skip
        async with world(plan) as made:
            made.populate()
            await made.recovery()
            while outcome.kills < measure.kills:
                await asyncio.sleep(self._chance.uniform(0.2, 1.5))
                self._lose(made)
                if made.valkey is not None and self._chance.random() < STORE_KILLED:
                    await self._kill_store(made)
                else:
                    await self._kill(made)
            outcome.tally, outcome.hung = made.tally, made.hung
            outcome.complaints = made.proxy.complaints()
            self._read_log(made.proxy.log)
            await made.leave()
            if await made.proxy.stop() != 0:
                outcome.broken.append("the proxy did not end well")
            self._check_file(plan.directory)
        return outcome

    def _lose(self, made: World) -> None:
        made.lose_some()
        self.outcome.losses += 1

    # -- kills

    async def _kill(self, made: World) -> None:
        outcome = self.outcome
        made.quiet_since = float("inf")
        made.proxy.kill()
        self._killed.append(time.time())
        outcome.kills += 1
        self._check_file(made.plan.directory)
        if self._chance.random() < 0.5:
            self._lose(made)
        if self._chance.random() < KILLED_AGAIN:
            made.proxy.spawn()
            await asyncio.sleep(self._chance.uniform(0.0, 1.0))
            made.proxy.kill()
            self._killed.append(time.time())
            outcome.kills_at_start += 1
        began = time.time()
        try:
            await made.proxy.start()
        except RuntimeError as error:
            outcome.broken.append(str(error))
            raise
        outcome.starts.append(time.time() - began)
        made.quiet_since = time.time()
        await self._check_fences(made)
        outcome.recoveries.append((await made.recovery())[-1])

    async def _kill_store(self, made: World) -> None:
        assert made.valkey is not None
        made.valkey.kill()
        await asyncio.sleep(self._chance.uniform(0.0, 0.5))
        await made.valkey.start()
        self.outcome.store_kills += 1
        while (await made.proxy.metrics())["epochgate_store_available"] != 1:
            await asyncio.sleep(0.05)
        await asyncio.sleep(REWRITTEN_AFTER)
        made.tally.fenced.clear()  # those whose clients have gone are not in use, and so are not written again

    # -- what has to hold

    def _check_file(self, directory: pathlib.Path) -> None:
        """What the kill left on the disk is a whole database, looked at in a copy."""
        if self._measure.store != "sqlite":
            return
        copy = directory / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for file in directory.glob("ledger.db*"):
            shutil.copy(file, copy / file.name)
        with sqlite3.connect(copy / "ledger.db") as database:
            (found,) = database.execute("PRAGMA integrity_check").fetchone()
        database.close()
        self.outcome.checks += 1
        if found != "ok":
            self.outcome.broken.append(f"integrity_check: {found}")

    async def _check_fences(self, made: World) -> None:
        """F2: what was refused before the kill is refused now, for the same reason."""
        last = self._killed[-1]
        known = [entry for entry in made.tally.fenced if not self._in_doubt(entry[0]) and entry[0] < last]
        for _, path, session_id, reason in self._chance.sample(known, min(3, len(known))):
            body = b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}'
            wire = await Wire.to(made.proxy.port)
            try:
                status = await wire.ask("POST", path, {"Mcp-Session-Id": session_id}, body)
                said = await wire.read_all()
            finally:
                wire.close()
            self.outcome.fences += 1
            told = {} if status != 404 else json.loads(said)["error"].get("data") or {}
            self.outcome.fences_gone += told.get("reason") != reason and reason not in NOT_FENCED
            if told.get("reason") != reason and reason not in NOT_FENCED:
                made.tally.wrong.append(f"{path} {session_id}: the fence {reason} is gone: {status} {said[:100]!r}")

    def _in_doubt(self, at: float) -> bool:
        """Whether what was recorded then may not have been written: a kill followed too soon."""
        return any(at <= killed + 0.05 and killed - at < WRITTEN_AFTER for killed in self._killed)

    def _excuse(self, refusal: Refusal) -> bool:
        """A healthy session may be refused where what was recorded last is missing."""
        if excuse_unproven(refusal):
            return True
        if refusal.session.epoch is None and refusal.reason in ("no_epoch", "no_event"):  # what was held is gone
            return bool(self._killed) and time.time() - self._killed[-1] < WRITTEN_AFTER
        if refusal.reason == "unknown_session":
            return self._is_missing(refusal.agent.opened_at)
        if refusal.reason == "unknown_cursor" and refusal.voyage is not None:
            return self._is_missing(refusal.voyage.got_at)
        return False

    def _is_missing(self, at: float) -> bool:
        """What was recorded then is not there any more."""
        before = [killed - at for killed in self._killed if killed > at - 0.05]
        self.outcome.missing.append(before[0] if before else float("inf"))
        return self._in_doubt(at)

    def _read_log(self, log: pathlib.Path) -> None:
        with log.open(errors="replace") as lines:
            for line in lines:
                if any(word in line for word in STORE_TROUBLE):
                    self.outcome.broken.append(line[:200])
                if '"resume.decided"' in line:
                    entry: dict[str, Any] = json.loads(line)
                    self.outcome.verdicts[f"{entry['verdict']} {entry['reason']}"] += 1


MISSING = ("unknown_cursor", "unknown_session")
NOT_FENCED = (*MISSING, "cut off")  # refused alone, or not told why


def figures(outcome: Outcome) -> list[Figure]:
    tally, name = outcome.tally, {"sqlite": "SQLite", "valkey": "Valkey"}[outcome.store]
    refused = sum(tally.excused[reason] for reason in MISSING)
    divergent = {verdict for verdict in outcome.verdicts if verdict.startswith("divergent")}
    starts, recoveries = sorted(outcome.starts), sorted(outcome.recoveries)
    also = f", {outcome.store_kills} of Valkey itself" if outcome.store_kills else ""
    return [
        Figure(
            f"{name}: kills of the proxy; while it starts; sessions lost",
            f"{outcome.kills}{also}; {outcome.kills_at_start}; {outcome.losses}",
            "as planned",
            bool(outcome.kills and outcome.losses),
        ),
        Figure(
            f"{name}: the store opens",
            f"{len(starts)} of {outcome.kills} starts, {starts[len(starts) // 2]:.1f} s as a rule"
            + (f"; {outcome.checks} copies pass `integrity_check`" if outcome.checks else "")
            + (f"; {some(outcome.broken)}" if outcome.broken else ""),
            "each time",
            not outcome.broken and len(starts) == outcome.kills,
        ),
        Figure(
            f"{name}: events checked; resumes; refused",
            f"{tally.events:,}; {tally.resumes:,}; {tally.refusals.total():,}, {refused} for what was not yet written",
            "some of each",
            tally.events > 0 and tally.resumes > 0,
        ),
        Figure(
            f"{name}: the oldest record that was missing after a kill",
            f"{max(outcome.missing, default=0.0):.2f} s",
            f"{WRITTEN_AFTER:g} s",
            max(outcome.missing, default=0.0) <= WRITTEN_AFTER,
        ),
        Figure(f"{name}: wrong verdicts", some(tally.wrong), "none", not tally.wrong),
        Figure(
            f"{name}: contradictions that the proxy saw",
            ", ".join(f"{outcome.verdicts[verdict]} {verdict}" for verdict in sorted(divergent)) or "none",
            "another epoch only",
            divergent <= {"divergent epoch_changed"},
        ),
        Figure(
            f"{name}: fences looked at after a restart, and still in force",
            f"{outcome.fences}, {outcome.fences - outcome.fences_gone}",
            "all",
            outcome.fences > 0 and not outcome.fences_gone,
        ),
        Figure(
            f"{name}: slowest client to get on after a restart",
            f"{recoveries[-1]:.1f} s, as a rule {recoveries[len(recoveries) // 2]:.1f} s",
            "none hangs",
            not outcome.hung,
        ),
        Figure(f"{name}: faults of its own in the log", some(outcome.complaints), "none", not outcome.complaints),
    ]


async def crash_all(kills: int, clients: int, seed: int, directory: pathlib.Path) -> list[Outcome]:
    measures = [Measure(kills, clients, store, seed, directory) for store in ("sqlite", "valkey")]
    return list(await asyncio.gather(*(Crashes(measure).play() for measure in measures)))


def run(options: Options) -> list[Figure]:
    outcomes = uvloop.run(crash_all(200 if options.long else 20, 30, options.seed, options.work))
    return [figure for outcome in outcomes for figure in figures(outcome)]


PART = Part(
    name="crash",
    title="Crash safety",
    about="""
The proxy is killed by SIGKILL at random moments under load, and started again; one start in five is killed, too, at any
point. It keeps its records in SQLite, or in a Valkey without persistence that is killed in between as well (the proxy
then writes anew what is in use). Sessions are lost by the server meanwhile, also while no proxy is there. What was
recorded in the last moment may be missing, and who stands there is told to start over; whatever was recorded a second
before a kill has to be known again, fences included, and nobody may be accused. (A kill at once after
a client was told of a fence has a test of its own in `tests/ledger/test_proxy.py`, as has an outage of the server
before the restart; a full disk has them in `tests/ledger/test_sqlite.py`.)
""",
    run=run,
)
