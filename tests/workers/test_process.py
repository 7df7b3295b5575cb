"""A worker whose processes die, hang or cannot be started: when the next one begins, and what is told."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog.testing

from epochgate import __version__
from epochgate.relay.listener import Reserved
from epochgate.settings import Settings
from epochgate.values import Address
from epochgate.workers import process
from epochgate.workers.channel import Answered, Begin, Drain, Report, pack
from epochgate.workers.process import Crew, UnansweredError, WorkerProcess

SETTINGS = Settings.model_validate(
    {"upstream": {"url": "http://a"}, "workers": 2, "store": {"url": "valkey://:hunter2@a"}}
)


class Heard:
    def __init__(self, version: str = __version__) -> None:
        self.failed: list[str] = []
        self.crew = Crew(
            Reserved(Address("127.0.0.1", 0), ()),
            lambda: Begin(version, pack(SETTINGS), 0),
            decided=lambda decided: None,
            failed=self.failed.append,
            serving=lambda: None,
        )


@asynccontextmanager
async def kept(heard: Heard):
    worker = WorkerProcess(1, heard.crew)
    with structlog.testing.capture_logs() as lines:
        keeping = asyncio.create_task(worker.keep())
        try:
            async with asyncio.timeout(20):
                yield worker, lines
        finally:
            worker.kill()
            await keeping
    assert worker.state == "ended"


def ends(lines):
    return [(line["end"], line["restart_in"]) for line in lines if line["event"] == "worker.ended"]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(process, "RESTART_AFTER", (0.0, 0.01, 0.02, 0.05))


async def test_who_dies_young_again_and_again_is_restarted_later_and_later(monkeypatch, quick):
    """A crash loop costs no processor: the waits grow up to the last one, which repeats."""
    monkeypatch.setattr(process, "_PROGRAM", "import sys; sys.exit(3)")
    async with kept(Heard()) as (worker, lines):
        await until(lambda: worker.restarts == 6)
        assert "exit status 3" in worker.trouble().message
    assert ends(lines) == [("exit status 3", wait) for wait in (0.0, 0.01, 0.02, 0.05, 0.05, 0.05)]


async def test_who_died_of_old_age_is_replaced_at_once(monkeypatch, quick):
    monkeypatch.setattr(process, "_PROGRAM", "import os; os.kill(os.getpid(), 11)")
    monkeypatch.setattr(process, "YOUNG", 0.0)
    async with kept(Heard()) as (worker, lines):
        await until(lambda: worker.restarts == 4)
    assert ends(lines) == [("SIGSEGV", 0.0)] * 4


def test_the_waits_of_a_crash_loop():
    waits = process.RESTART_AFTER
    assert waits[0] == 0.0
    assert list(waits) == sorted(waits)
    assert waits[-1] >= 10


async def test_one_that_hangs_is_killed_and_replaced(monkeypatch, quick):
    """Whether it never begins to serve or does not answer any more: the supervisor counts its looks, not the time."""
    monkeypatch.setattr(process, "_PROGRAM", "import time; time.sleep(60)")
    async with kept(Heard()) as (worker, lines):
        await until(lambda: worker.view()["pid"])
        for _ in range(process.START_WITHIN):
            worker.look()
        assert "worker.hangs" not in [line["event"] for line in lines]
        worker.look()
        await until(lambda: worker.restarts == 1)
    assert ends(lines) == [("SIGKILL", 0.0)]


async def test_one_that_speaks_nonsense_is_replaced(monkeypatch, quick):
    """What it says is read in its own time, and nothing that it says ends the supervision."""
    say = "import os, sys, time; os.write(int(sys.argv[2]), {0!r}); time.sleep(60)"
    answer = msgspec.msgpack.encode(Answered(7, msgspec.Raw(b"\xc0")))  # to what nobody asked
    for nonsense in (b"\x00\x00\x00\x01\xc1", len(answer).to_bytes(4, "big") + answer):
        monkeypatch.setattr(process, "_PROGRAM", say.format(nonsense))
        async with kept(Heard()) as (worker, lines):
            await until(lambda worker=worker: worker.restarts == 1)
        assert "worker.garbled" in [line["event"] for line in lines]
        assert ends(lines)[0] == ("SIGKILL", 0.0)


async def test_one_that_cannot_be_started_is_tried_again(monkeypatch, quick):
    def refuse(*_, **__):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(process.subprocess, "Popen", refuse)
    async with kept(Heard()) as (worker, lines):
        await until(lambda: worker.restarts == 2)
        with pytest.raises(UnansweredError):
            await worker.ask(Report(sessions=False), object)
        worker.look()
    assert ends(lines) == [(f"no start at all ({os.strerror(errno.EAGAIN).lower()})", wait) for wait in (0.0, 0.01)]


async def test_a_package_that_was_replaced_under_a_running_supervisor(quick):
    """The new process does not speak with the old one, and says what to do."""
    heard = Heard("0.0.0")
    async with kept(heard) as (worker, lines):
        await until(lambda: worker.restarts == 1)
    assert heard.failed[0] == f"this is version {__version__}, the supervisor is 0.0.0; restart epochgate"
    assert ends(lines)[0] == ("exit status 78", 0.0)


async def test_one_that_is_told_to_end_before_it_serves_ends_at_once(monkeypatch):
    monkeypatch.setattr(process, "_PROGRAM", "import time; time.sleep(60)")
    worker = WorkerProcess(1, Heard().crew)
    keeping = asyncio.create_task(worker.keep())
    async with asyncio.timeout(20):
        await until(lambda: worker.view()["pid"])
        worker.end(Drain(30.0, 30.0))
        await keeping
    assert (worker.state, worker.restarts) == ("ended", 0)


def test_settings_arrive_as_they_are():
    """The password of the store included, which no dump of the settings shows."""
    from epochgate.workers.channel import unpack

    arrived = unpack(pack(SETTINGS))
    assert arrived == SETTINGS
    assert arrived.store.url.text == "valkey://:hunter2@a"
