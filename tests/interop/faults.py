"""Faults injected between a real client and a real server of the same SDK, and what came of each.

`play_all` plays every scenario with every SDK, through the proxy and directly, several at a time: they mostly wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from interop.environments import Sdk
from interop.stage import AT_ONCE, Stage, client, staged

WINDOW = 10.0  # s after the fault in which requests at the upstream are counted
STEPS = 12
RIGHT = f"fault: {STEPS} steps for ada"

Key = tuple[str, str, bool]  # scenario, SDK, through the proxy?
Act = Callable[[Stage], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault. `act` injects it; the back wire's mark tells when it struck, where `act` does nothing."""

    name: str
    title: str
    act: Act
    resume: dict[str, Any] = field(default_factory=dict)  # the policy's `resume` beside its defaults
    flags: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    ends: str = "refused"  # right | refused | seen: what must come of it through the proxy; seen: only nothing spliced
    silent: tuple[str, ...] = ()  # SDKs whose server answers the resume with a stream without any event

    def must_end(self, sdk: str) -> str:
        """What must come of it through the proxy with this SDK."""
        return "seen" if sdk in self.silent else self.ends


class Outcome(msgspec.Struct, frozen=True):
    """What one run came to; times in seconds after the fault."""

    scenario: str
    sdk: str
    proxied: bool
    answer: str  # right | spliced | error | pending | died: what became of the call
    detail: str  # the result's or the error's own words
    code: int | None  # the error's
    after: float
    steps: list[str]  # the progress messages, as they came
    runs: int | None  # executions of the tool
    next_status: int | None  # of the next POST of the session
    fresh: bool  # whether a new session then worked
    upstream: int  # requests of the session at the upstream within WINDOW


def cut_client(place: Any) -> Act:
    async def act(stage: Stage) -> None:
        stage.front.cut_at(b"fault#4 for", place)
        await stage.front.marked.wait()

    return act


async def cut_upstream(stage: Stage) -> None:
    stage.back.cut_at(b"fault#4 for", "after")
    await stage.back.marked.wait()


async def evict(stage: Stage) -> None:
    """The incident: steps 5 and 6 enter the buffer, then the session is evicted; the resume re-creates it lazily."""
    await cut_upstream(stage)
    await asyncio.sleep(0.6)
    await stage.control("evict")


async def forget(stage: Stage) -> None:
    await cut_upstream(stage)
    await stage.control("forget")


def restart(pause: float) -> Act:
    """The server is replaced by one that knows nothing; for `pause` seconds nobody listens."""

    async def act(stage: Stage) -> None:
        successor = await stage.start_server()
        stage.back.cut_at(b"fault#4 for", "after")
        await stage.back.marked.wait()
        stage.back.target = 0
        stage.back.cut_all()
        await asyncio.sleep(pause)
        stage.back.target = successor

    return act


async def closed_by_server(stage: Stage) -> None:
    stage.back.cut_at(b"fault#4 for", "nowhere")
    await stage.back.marked.wait()


async def nothing(stage: Stage) -> None:
    stage.back.marked_at = time.time()


POLL: dict[str, Any] = {"flags": ("--retry-ms", "300"), "plan": {"close_at": 4}}
OVERLAP = {"accept": ["connection", "epoch", "overlap"]}

SCENARIOS = (
    Scenario("cut-before", "Connection to the client cut before an event", cut_client("before"), ends="right"),
    Scenario("cut-in", "Connection to the client cut in an event", cut_client("in"), ends="right"),
    Scenario("cut-after", "Connection to the client cut after an event", cut_client("after"), ends="right"),
    Scenario("upstream-cut", "Connection to the server cut, no epoch, default policy", cut_upstream),
    Scenario(
        "upstream-cut-overlap",
        "Connection to the server cut, no epoch, `accept` with `overlap`",
        cut_upstream,
        resume=OVERLAP,
        ends="right",
    ),
    Scenario(
        "upstream-cut-epoch",
        "Connection to the server cut, epoch in `_meta`",
        cut_upstream,
        flags=("--stamp", "meta"),
        ends="right",
    ),
    Scenario("poll", "Server closes the stream with `retry`, no epoch, default policy", closed_by_server, **POLL),
    Scenario(
        "poll-overlap",
        "Server closes the stream with `retry`, no epoch, `accept` with `overlap`",
        closed_by_server,
        resume=OVERLAP,
        ends="right",
        **POLL,
    ),
    Scenario("evict", "Session evicted and re-created under its id, buffer survives, no epoch", evict),
    Scenario(
        "evict-meta",
        "The same, epoch in `_meta` of each message, stamped as events enter the buffer",
        evict,
        flags=("--stamp", "meta"),
    ),
    Scenario("evict-header", "The same, epoch in a response header", evict, flags=("--stamp", "header")),
    Scenario("restart", "Server replaced, its sessions and events lost", restart(0)),
    Scenario("restart-slow", "The same, and nobody listens for 1.5 s", restart(1.5)),
    Scenario("forget", "Events lost, the session lives", forget, silent=("typescript1",)),
    Scenario(
        "foreign",
        "Cursor of another session of the same event store",
        nothing,
        plan={"foreign": True},
        ends="seen",
    ),
)


async def play(scenario: Scenario, sdk: Sdk, *, proxied: bool) -> Outcome:
    plan = {"steps": STEPS, **scenario.plan}
    if scenario.ends != "right" or not proxied:
        plan["linger"] = WINDOW + 2
    async with (
        staged(sdk, scenario.flags, scenario.resume if proxied else None) as stage,
        client(sdk, "fault", stage.url, plan) as run,
    ):
        act = asyncio.create_task(scenario.act(stage))
        await asyncio.wait({act, run}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({run})
        act.cancel()
        seen = run.result()
        struck = seen["start"] if scenario.act is nothing else max(stage.front.marked_at, stage.back.marked_at)
        upstream = [
            request
            for request in stage.back.requests
            if request.session_id == seen["session"] and struck <= request.at <= struck + WINDOW
        ]
        return Outcome(
            scenario=scenario.name,
            sdk=sdk.name,
            proxied=proxied,
            after=round(seen["call"]["at"] - struck, 2),
            steps=[message for _, _, message in seen.get("progress", ())],
            runs=seen["runs"],
            next_status=seen.get("next", {}).get("status"),
            fresh=seen["fresh"].get("result") == "fresh",
            upstream=len(upstream),
            **judged(seen),
        )


def judged(seen: dict[str, Any]) -> dict[str, Any]:
    """What became of the call."""
    call = seen["call"]
    error = call.get("error") or {}
    words = {"code": error.get("code"), "detail": str(call.get("result", error.get("message", "")))}
    if "died" in seen:
        return words | {"answer": "died"}
    if "pending" in call:
        return words | {"answer": "pending"}
    if error or isinstance(call["result"], dict):
        return words | {"answer": "error"}
    return words | {"answer": "right" if call["result"] == RIGHT else "spliced"}


async def play_all(sdks: Iterable[Sdk], *, direct: bool) -> dict[Key, Outcome | Exception]:
    """Every scenario with each SDK through the proxy, and directly if asked for; a failed run is its exception."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def gated(scenario: Scenario, sdk: Sdk, proxied: bool) -> Outcome | Exception:
        async with gate:
            try:
                return await play(scenario, sdk, proxied=proxied)
            except Exception as error:
                return error

    ways = (True, False) if direct else (True,)
    async with asyncio.TaskGroup() as group:
        tasks = {
            (scenario.name, sdk.name, proxied): group.create_task(gated(scenario, sdk, proxied))
            for scenario in SCENARIOS
            for sdk in sdks
            for proxied in ways
        }
    return {key: task.result() for key, task in tasks.items()}
