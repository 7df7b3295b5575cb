"""What was passed on and is still to be read; and what is kept of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import epochgate.relay.backlog
from epochgate.relay.backlog import MOST, SHORT, WAIT, Backlog
from epochgate.relay.hold import DELIVERED_TAIL, TRIM_EVERY, Tail
from resume.story import began, notes, part


class Reader:
    def __init__(self) -> None:
        self.read_: list[bytes] = []
        self.at = 0.0

    def read(self, data: bytes, now: float, *, final: bool) -> bytes:
        """What comes after a `|` is the start of something."""
        if data == b"fault":
            raise ValueError("a fault of ours")
        whole, _, rest = (data, b"", b"") if final else data.partition(b"|")
        self.read_.append(whole)
        self.at = now
        return rest


@pytest.mark.filterwarnings("default")
async def test_reads_wait_in_order_and_a_fault_of_one_stops_no_other() -> None:
    loop = asyncio.get_running_loop()
    told: list[Any] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    backlog, reader, faulty = Backlog(loop, kept=False), Reader(), Reader()
    began_at = time.time()
    backlog.add(reader, b"1")
    first_at = time.time()
    backlog.add(faulty, b"fault")
    backlog.add(reader, b"2")
    assert reader.read_ == []
    backlog.settle()
    assert reader.read_ == [b"12"]
    assert began_at <= reader.at <= first_at, "when the first of it was passed on"
    assert [str(error) for error in told] == ["a fault of ours"]


async def test_a_long_read_does_not_wait_but_what_is_cut_at_its_end_does() -> None:
    backlog, reader, long = Backlog(asyncio.get_running_loop(), kept=False), Reader(), b"x" * SHORT
    backlog.add(reader, b"1")
    backlog.add(reader, long + b"|2")
    backlog.add(reader, b"3")
    assert reader.read_ == [b"1" + long]
    backlog.settle()
    assert reader.read_ == [b"1" + long, b"23"]


async def test_they_wait_for_a_moment_only_and_are_bounded() -> None:
    backlog, reader = Backlog(asyncio.get_running_loop(), kept=False), Reader()
    for _ in range(MOST // SHORT):
        backlog.add(reader, b"x" * SHORT)
    assert reader.read_ == []
    backlog.add(reader, b"x")
    assert [len(data) for data in reader.read_] == [MOST + 1]
    backlog.add(reader, b"late")
    async with asyncio.timeout(WAIT * 200):
        while reader.read_[-1] != b"late":
            await asyncio.sleep(WAIT / 5)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is not read by itself: who needs it has to ask for it."""
    monkeypatch.setattr(epochgate.relay.backlog, "WAIT", 3600.0)


@pytest.mark.usefixtures("unhurried")
async def test_l4_an_event_is_a_cursor_at_once(proxy) -> None:
    """R4: a client that was given an event may resume from it before the proxy has read it."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.server.send(part(notes(4, 5, epoch=1)))
        await story.answer.until(b"id: 5")
        answer = await story.resume(4)
        await answer.until(b"id: 5")
        assert story.verdicts() == ["connection"]


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("request_is", ["a resume", "a call"])
async def test_r12_a_live_event_of_another_epoch_fences_before_the_next_request(proxy, request_is: str) -> None:
    """However soon that comes."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.server.send(part(notes(4, epoch=2)))
        await story.answer.until(b"id: 4")
        answer = await story.resume(4) if request_is == "a resume" else await story.send(story.call(6))
        await answer.until(b"epoch_changed")


@pytest.mark.usefixtures("unhurried")
async def test_a_keepalive_comment_never_stands_in_the_middle_of_an_event(proxy) -> None:
    """T1: an event that is cut in the middle may not have been read yet."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        event = notes(4, epoch=1)
        await story.server.send(part(event[:20]))
        await story.answer.until(event[:20])
        story.flow._beat()
        await story.server.send(part(event[20:]))
        await story.answer.until(event)


sizes = st.one_of(st.integers(1, 40), st.integers(1000, 3000), st.integers(15_000, 90_000))


@given(
    st.lists(st.tuples(st.booleans(), st.lists(sizes, min_size=1, max_size=8)), max_size=25),
    st.sampled_from([1 << 20, 5000]),
)
def test_h1_a_tail_gives_back_what_came_after_each_position(reads: list[tuple[bool, list[int]]], limit: int) -> None:
    """And never less than what it promises to keep, nor much more; less than that where `hold.bytes` is less."""
    tail, blocks, room = Tail(-1, limit), [], min(limit, DELIVERED_TAIL)
    for together, lengths in reads:
        came = [bytes([(len(blocks) + n) % 251]) * length for n, length in enumerate(lengths)]
        if together:
            stops = [sum(lengths[: n + 1]) for n in range(len(lengths))]
            tail.add_all(len(blocks), b"".join(came) + b"the rest", stops)
        else:
            for n, block in enumerate(came):
                assert tail.add(len(blocks) + n, block, delivered=True)
        blocks += came
        assert tail.end == len(blocks) - 1
        kept = [position for position in range(-1, len(blocks)) if tail.after(position) is not None]
        assert kept == list(range(tail.covered, len(blocks)))
        for position in kept:
            assert tail.after(position) == blocks[position + 1 :]
        size = sum(map(len, blocks[tail.covered + 1 :]))
        assert size >= min(room, sum(map(len, blocks)))
        assert size <= room + TRIM_EVERY + max(room, *map(len, blocks))
