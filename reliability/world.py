"""Clients, a proxy, a server that knows the truth and a Valkey, with a fault relay before each of the three."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from reliability.proxy import Proxy, Sample, Valkey
from reliability.toxics import TOXICS, FaultRelay
from reliability.traffic import Agent, Refusal, Tally, Ways, excuse_unproven
from reliability.truth import TrueServer

CUTTING = ("limit_data", "reset_peer", "timeout")  # a resumed stream may end before its first event, again and again
GENTLE = ("none", "latency", "bandwidth", "slicer", "slow_close")  # everybody gets on, if slowly
QUIET_FOR = 5.0  # s without a fault, after which a stream that is held has to be served
CUT_LATELY = 4.0  # s
SETTLE_WITHIN = 15.0  # s in which all is let go of after the clients have left


@dataclass(frozen=True, slots=True)
class Plan:
    """What a world is made of. Times in s."""

    clients: int
    seed: int
    directory: pathlib.Path
    store: str = "memory"  # memory, sqlite or valkey
    interval: float = 0.2  # between two events of a stream
    hold: float = 3.0
    ways: Ways = field(default_factory=Ways)
    hung_after: float = 10.0  # without progress of a client while nothing is wrong
    excuse: Callable[[Refusal], bool] | None = (
        None  # whether a healthy session may have been refused, where that differs
    )
    in_doubt: Callable[[float], bool] = lambda _: False  # whether what was recorded at that time may be lost
    fenced_for: float = float("inf")  # a fence surely lives as long
    settings: dict[str, Any] = field(default_factory=dict)
    relays: bool = True


class World:
    """All of it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tally = Tally()
        self.truth = TrueServer(plan.seed, plan.interval)
        self.agents: list[Agent] = []
        self.chance = random.Random(plan.seed)
        self.quiet_since = time.time()  # since when no fault is in force; infinite while one is
        self.cut_at = float("-inf")  # when the server's connections were last being cut; infinite while they are
        self.hung: list[str] = []
        self.relays: dict[str, FaultRelay] = {}
        self.valkey: Valkey | None = None
        self.proxy: Proxy
        self.before: Sample
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    # -- its parts

    async def start(self) -> None:
        plan = self.plan
        await self.truth.start()
        upstream = await self._relay("upstream", self.truth.port)
        self.proxy = Proxy(plan.directory, {})
        self.settings = {
            "upstream": {"url": f"http://127.0.0.1:{upstream}"},
            "store": {"url": await self._store()},
            "policies": [{"name": "mcp", "resume": {"hold": {"time": plan.hold}}}],
            "drain": {"grace": "0s", "window": "1s"},
            **plan.settings,
        }
        self.proxy.write(self.settings)
        await self.proxy.start()
        self.entrance = await self._relay("client", self.proxy.port)
        await asyncio.sleep(0.3)
        self.before = await self.proxy.sample()

    async def _relay(self, place: str, port: int) -> int:
        if not self.plan.relays:
            return port
        relay = self.relays[place] = FaultRelay(port, self.plan.seed)
        await relay.start()
        return relay.port

    async def _store(self) -> str:
        if self.plan.store == "valkey":
            self.valkey = Valkey(self.plan.directory)
            await self.valkey.start()
            return f"valkey://127.0.0.1:{await self._relay('store', self.valkey.port)}/0"
        if self.plan.store == "sqlite":
            path = (self.plan.directory / "ledger.db").absolute()
            for old in path.parent.glob("ledger.db*"):
                old.unlink()
            return f"sqlite://{path}"
        return "memory://"

    async def close(self) -> None:
        await self.leave()
        if hasattr(self, "proxy"):
            self.proxy.kill()
        for relay in self.relays.values():
            await relay.close()
        await self.truth.close()
        if self.valkey is not None:
            self.valkey.kill()

    # -- its clients

    def populate(self, over: float = 0.0) -> None:
        """Clients begin to come, over so many s."""
        for number in range(self.plan.clients):
            agent = Agent(
                self._find_entrance, self.truth, self.tally, self.plan.ways,
                seed=self.plan.seed * 100_003 + number, excuse=self.excuse,
                in_doubt=self.plan.in_doubt, fenced_for=self.plan.fenced_for,
            )  # fmt: skip
            self.agents.append(agent)
            self._tasks.append(asyncio.create_task(agent.run(after=over * number / self.plan.clients)))
        self._watching = asyncio.create_task(self._watch())

    def _find_entrance(self) -> int:
        return self.entrance

    async def leave(self) -> None:
        """All clients go, wherever they are."""
        tasks = [*self._tasks, *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                self.tally.wrong.append(f"a client or the run itself failed: {ended!r}")
        self._tasks.clear()
        self._watching = None
        self.agents.clear()

    async def _watch(self) -> None:
        """Nobody may hang while nothing is wrong."""
        while True:
            await asyncio.sleep(1.0)
            now = time.time()
            for agent in self.agents:
                if now - max(agent.progress_at, self.quiet_since) > self.plan.hung_after and not self.truth.down:
                    self.hung.append(f"{now:.3f} {agent.path} {agent.session_id}")
                    agent.progress_at = now

    # -- what befalls them

    def set_toxics(self, **names: str) -> None:
        """Another fault at these places."""
        for place, name in names.items():
            self.relays[place].set(TOXICS[name])
        now = time.time()
        toxics = [relay.toxic for relay in self.relays.values()]
        if any(toxic not in [TOXICS[name] for name in GENTLE] for toxic in toxics):
            self.quiet_since = float("inf")
        elif names:
            self.quiet_since = now
        if self.relays["upstream"].toxic in [TOXICS[name] for name in CUTTING]:
            self.cut_at = float("inf")
        elif self.cut_at == float("inf"):
            self.cut_at = now

    def excuse(self, refusal: Refusal) -> bool:
        """Whether a healthy session may have been refused."""
        if self.plan.excuse is not None:
            return self.plan.excuse(refusal)
        now = time.time()
        if refusal.session.epoch is not None:
            return refusal.reason == "no_event" and now - self.cut_at < CUT_LATELY
        # A fault before the server hides from it for a while that the proxy has closed a stream.
        quiet = now - self.quiet_since > QUIET_FOR and self.relays["upstream"].toxic is None
        return excuse_unproven(refusal) or (not quiet and refusal.reason in ("no_epoch", "no_event", "boundary"))

    def lose_some(self) -> None:
        """A session is lost: one on which a stream has begun."""
        begun = [session for session in self.truth.sessions.values() if session.healthy and session.streams]
        if begun:
            self.truth.lose(self.chance.choice(begun))

    async def recovery(self, within: float = 10.0) -> list[float]:
        """How long each client takes from now to its next progress, in s; `within` for those that make none."""
        began = time.time()
        self.quiet_since = began
        took: dict[Agent, float] = {}
        while len(took) < len(self.agents) and time.time() - began < within:
            await asyncio.sleep(0.02)
            for agent in self.agents:
                if agent not in took and agent.progress_at > began:
                    took[agent] = agent.progress_at - began
        return sorted([*took.values(), *[within] * (len(self.agents) - len(took))])

    async def settle(self, ready: Callable[[Sample], bool]) -> Sample:
        """Wait until the proxy holds no more than it should; what it holds then, or at last."""
        deadline = time.time() + SETTLE_WITHIN
        while not ready(sample := await self.proxy.sample()) and time.time() < deadline:
            await asyncio.sleep(0.2)
        return sample


@contextlib.asynccontextmanager
async def world(plan: Plan) -> AsyncIterator[World]:
    made = World(plan)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
