"""Attacks on resources, small and all at once: the whole of it is `make reliability ONLY=resources`."""

from __future__ import annotations

import asyncio

import pytest

from reliability import resources
from reliability.attacks import Scale, crowd, target
from reliability.resources import CASES, MIB, Case, Report, suffer

SIZE = 0.02  # of the full form
AT_ONCE = 4
SLOW = {"slow-heads", "slow-bodies", "endless"}


@pytest.mark.parametrize("slow", [False, True])
async def test_no_attack_succeeds(tmp_path, slow):
    """L5, T6: each has its own proxy; what it may take is bounded, and others are served meanwhile."""
    cases = [case for case in CASES if (case.name in SLOW) is slow]
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> Report:
        async with gate:
            return await suffer(case, SIZE, tmp_path)

    reports = await asyncio.gather(*map(one, cases))
    for case, report in zip(cases, reports, strict=True):
        assert not report.failure, f"{case.name}: {report.failure}"
        assert not report.complaints, f"{case.name}: {report.complaints}"
        assert report.what
        assert report.peak - report.before < case.memory * MIB, case.name
        assert report.calls["calls"], case.name
        assert not report.calls["failed"], f"{case.name}: {report.calls}"


async def test_an_attack_that_succeeds_is_seen(tmp_path):
    """The check is not blind: with limits that are too wide, slowloris holds its connections."""

    async def hold(aim, scale: Scale) -> str:
        async with crowd(aim.port, scale(100)) as many:
            many.send(b"GET / HTTP/1.1\r\nX: ")
            await asyncio.sleep(0.5)
            assert not many.alive, f"{many.alive} are still there"
        return "all gone"

    report = await suffer(Case("hold", "held", hold, 40), 1.0, tmp_path)
    assert report.failure.startswith("100 are still there")
    assert not resources.figure(Case("hold", "held", hold, 40), report).holds


async def test_what_an_attack_takes_is_seen(tmp_path):
    """The memory that a proxy uses for sessions shows in the figure."""
    async with target(tmp_path, {}) as aim:
        aim.proxy.forget_peak()
        before = aim.proxy.memory("VmHWM")
        for _ in range(30):
            await aim.initialize()
        async with crowd(aim.port, 300) as many:
            many.send(b"GET / HTTP/1.1\r\nX: " + b"y" * 60_000)
            await asyncio.sleep(0.5)
        assert aim.proxy.memory("VmHWM") - before > 4 * MIB
