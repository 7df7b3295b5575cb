"""R4 across processes (docs/adr/0009): the stream is held by one proxy, and the resume comes to another one."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from epochgate.guard.policy import Mode
from epochgate.relay.context import Policies
from resume.replicas import at
from resume.story import (
    LAST_CHUNK,
    STREAM,
    began,
    event,
    note,
    notes,
    part,
    reply,
    response,
    until,
)

MINE, OTHER = (b"Authorization: Bearer mine",), (b"Authorization: Bearer other",)


@pytest.mark.parametrize("valkey", ["valkey", "redis"], indirect=True)
async def test_r4_buffered_events_and_the_live_tail(several):
    """Strict defaults, a server without epochs; the other process serves what it never read itself."""
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        await story.server.send(part(notes(4, 5)))
        there = at(b, story)
        client = await there.resume(3)
        await client.until(notes(4, 5))
        assert (client.status, client.get(b"Content-Type")) == (200, b"text/event-stream")
        await story.server.send(part(notes(6)))
        await client.until(notes(6))
        await story.server.send(part(response(5)), LAST_CHUNK)
        assert await client.rest() == notes(4, 5, 6) + response(5)
        assert (client.end, there.verdicts(), story.verdicts()) == ("clean", ["connection"], [])
        assert await a.unasked()
        assert (a.loans(), b.loans()) == ({"lent": 1}, {"served": 1})


async def test_r4_the_same_bytes_as_at_the_owner(several):
    """Head and body, whatever the stream is made of."""
    odd = (
        b": a comment\r\nid: 4\r\ndata: " + note("\u00e9") + b"\r\n\r\nretry: 7\n\n" + notes(5)
        + b"id: 6\rdata: " + note(6) + b"\r\r" + b"event: x\n\n" + notes(7) * 40
    )  # fmt: skip
    seen = []
    async with several() as (a, b):
        for replica in (a, b):
            story = await began(a, head=STREAM.replace(b"Connection", b"X-Own: 1\r\nX-Own: 2\r\nConnection"))
            await story.leave()
            await story.server.send(part(odd[:30]), part(odd[30:]))
            client = await at(replica, story).resume(3)
            await client.until(odd)
            await story.server.send(part(response(5)), LAST_CHUNK)
            await client.rest()
            seen.append((client.start, client.fields, bytes(client.data), client.end))
    assert seen[0] == seen[1]
    assert seen[0][2] == odd + response(5)


async def test_r4_a_half_open_peer_at_the_owner_is_taken_over(several):
    """Its former client still stands there."""
    async with several() as (a, b):
        story = await began(a)
        await story.server.send(part(notes(4)))
        await story.answer.until(notes(4))
        client = await at(b, story).resume(3)
        await client.until(notes(4))
        assert await story.answer.peer.gone()
        await story.server.send(part(notes(5) + response(5)), LAST_CHUNK)
        assert await client.rest() == notes(4, 5) + response(5)
        assert (client.end, b.loans()) == ("clean", {"served": 1})


async def test_r4_from_one_to_another_and_back(several):
    """Resumed elsewhere, cut, resumed at the owner, cut, resumed at a third one, on one upstream connection."""
    async with several(3) as (a, b, c):
        story = await began(a)
        await story.leave()
        delivered = b""
        for number, replica in enumerate((b, a, c, b), 4):
            client = await at(replica, story).resume(number - 1)
            await client.begin()
            await story.server.send(part(notes(number)))
            await client.until(notes(number))
            delivered += bytes(client.data)
            client.peer.reset()
            await until(lambda: story.held == 1)
            assert replica.context.telemetry.decided[-1].reason == "connection"
        assert delivered == notes(4, 5, 6, 7)
        assert await a.unasked()


async def test_h3_a_buffer_of_another_epoch_is_not_lent(several):
    """Whatever `live_change` says, and though a client reads it: the upstream is asked."""
    async with several(epoch={"live_change": "ignore"}) as (a, b):
        story = await began(a, epoch=1)
        await story.server.send(part(notes(4, epoch=2)))
        await story.answer.until(notes(4, epoch=2))
        there = at(b, story)
        client, _, _ = await there.resumed(3, STREAM + part(notes(4, epoch=2)))
        assert (await client.error())["data"] == {"reason": "epoch_changed"}
        assert there.verdicts() == ["epoch_changed"]
        assert (a.loans(), b.loans()) == ({}, {})


async def test_r4_what_flows_at_the_owner_is_not_taken_over_where_streams_share_ids(several):
    """The cursor may well mean another one."""
    async with several() as (a, b):
        story = await began(a, epoch=1)
        other, flowing, _ = await story.ask(story.call(6))
        same = event(1, note("a", 1)) + event(2, note("b", 1)) + event(3, note("c", 1))
        await flowing.send(STREAM + part(same))
        await other.until(same)
        there = at(b, story)
        client, _, _ = await there.resumed(3, STREAM + part(event(9, note("x", 1))))
        await client.until(event(9, note("x", 1)))
        assert a.loans() == {}
        await flowing.send(part(event(4, note("d", 1))))
        await other.until(event(4, note("d", 1)))


async def test_r4_taken_over_by_a_third(several, monkeypatch):
    """At most one reader: the resume at the third takes it from the second, whose client still stands."""
    monkeypatch.setattr("epochgate.relay.flow.CONTEST", 0.0)
    async with several(3) as (a, b, c):
        story = await began(a)
        await story.leave()
        first = await (await at(b, story).resume(3)).begin()
        second = await (await at(c, story).resume(3)).begin()
        assert await first.peer.gone()
        third = await (await at(a, story).resume(3)).begin()
        assert await second.peer.gone()
        await story.server.send(part(notes(4)))
        await third.until(notes(4))


async def test_r4_of_two_at_once_one_gets_it(several):
    """Docs/adr/0003, across processes: the other goes to the upstream, and neither takes anything from the other."""
    async with several(3) as (a, b, c):
        story = await began(a, epoch=1)
        await story.leave()
        first = await (await at(b, story).resume(3)).begin()
        second, server, request = await at(c, story).resumed(3)
        assert request.get(b"Last-Event-ID") == b"3"
        await story.server.send(part(notes(4, epoch=1)))
        await first.until(notes(4, epoch=1))
        await server.send(STREAM + part(notes(4, epoch=1)))
        await second.until(notes(4, epoch=1))
        assert b.context.telemetry.decided[-1].reason == "connection"
        assert c.context.telemetry.decided[-1].reason == "epoch"
        assert not first.end


async def test_r4_a_stranger_does_not_get_it(several):
    """Refused by the upstream, and the stream stays held for its client."""
    async with several() as (a, b):
        story = await began(a, fields=MINE)
        await story.leave()
        await story.server.send(part(notes(4)))
        there = at(b, story)
        stranger, server, _ = await there.ask(there.again(3, fields=OTHER))
        await server.send(reply(403, b"no"))
        assert (await stranger.rest(), stranger.status) == (b"no", 403)
        client = await there.resume(3)
        await client.until(notes(4))
        assert (a.loans(), b.loans()) == ({"lent": 1}, {"served": 1})


async def test_r4_what_is_held_is_closed_when_the_upstream_lets_another_caller_in(several):
    async with several() as (a, b):
        story = await began(a, fields=MINE, epoch=1)
        await story.leave()
        there = at(b, story)
        stranger, server, _ = await there.ask(there.again(3, fields=OTHER))
        assert story.held == 1
        await server.send(STREAM + part(notes(4, epoch=1)))
        await stranger.until(notes(4, epoch=1))
        assert await story.server.gone()


async def test_r4_h2_a_cursor_outside_of_the_buffer(several):
    """The held connection is closed first, and R5 follows."""
    async with several() as (a, b):
        story = await began(a, epoch=1)
        long = b"".join(event(n, note("x" * 20_000, 1)) for n in range(4, 9))
        await story.server.send(part(long))
        await story.answer.until(long)
        await story.leave()
        client, server, request = await at(b, story).resumed(3)
        assert request.get(b"Last-Event-ID") == b"3"
        assert await story.server.gone()
        client.peer.reset()
        assert await server.gone()
        assert a.loans() == {}


async def test_h3_what_ended_while_it_was_held(several):
    """It is served from the buffer, with its end; and again, while `hold.time` has not passed."""
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        await story.server.send(part(notes(4) + response(5)))
        assert await story.server.gone()  # H2: every response is here
        for cursor, body in ((3, notes(4) + response(5)), (4, response(5))):
            client = await at(b, story).resume(cursor)
            assert await client.rest() == body
            assert client.end == "clean"
            await asyncio.sleep(0.55)  # the same client, not a rival


async def test_h3_what_broke_off_while_it_was_held(several):
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        await story.server.send(part(notes(4)))
        await until(lambda: a.flows[0]._tail.waiting)
        story.server.reset()
        client = await at(b, story).resume(3)
        assert await client.rest() == notes(4)
        assert client.end == "aborted"


# -- who is asked, and who is not


async def test_r4_another_stream_with_the_same_ids_is_left_alone(several):
    """Servers that count per stream: the resume is for the stream that this process knows, not for one at the other."""
    async with several() as (a, b):
        story = await began(a, calls=(5,), epoch=1)
        await until(lambda: not a.ledger._queue)
        there = at(b, story)
        there.answer, there.server, _ = await there.ask(there.call(6))
        await there.server.send(STREAM + part(notes(1, 2, 3, epoch=1)))
        await there.answer.until(notes(3, epoch=1))
        there.server.reset()
        await there.answer.rest()
        client, server, request = await there.resumed(3)
        assert request.get(b"Last-Event-ID") == b"3"
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        await story.server.send(part(notes(4, epoch=1)))
        await story.answer.until(notes(4, epoch=1))
        assert not story.answer.end


async def test_r4_in_a_busy_session(several):
    """Events that come all the time do not keep the owner from answering."""
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        ending = asyncio.Event()

        async def talk():
            number = 4
            while not ending.is_set():
                await story.server.send(part(notes(number)))
                number += 1
                await asyncio.sleep(0.001)

        talking = asyncio.create_task(talk())
        began_at = time.monotonic()
        client = await at(b, story).resume(3)
        await client.until(notes(10))
        took = time.monotonic() - began_at
        ending.set()
        await talking
        assert bytes(client.data).startswith(notes(*range(4, 11)))
        assert b.loans() == {"served": 1}
        assert took < 0.4, "it was answered, not given up"


@pytest.mark.parametrize("modes", [("observe", "observe"), ("enforce", "observe"), ("observe", "enforce")])
async def test_observe_nothing_of_this(several, modes):
    """Section 9: neither is anything lent, nor is it borrowed; nor where one of them was reloaded and the other not."""
    async with several() as (a, b):
        for replica, mode in zip((a, b), modes, strict=True):
            replica.context.policies = Policies((dataclasses.replace(*replica.context.policies, mode=Mode(mode)),))
        story = await began(a, epoch=1)
        story.answer.peer.reset()
        if modes[0] == "observe":
            assert await story.server.gone()
        client, server, request = await at(b, story).resumed(3)
        assert await story.server.gone()
        assert request.get(b"Last-Event-ID") == b"3"
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        assert (a.loans(), b.loans()) == ({}, {})


@pytest.mark.parametrize("who", [MINE, OTHER])
async def test_h2_a_new_standalone_stream_elsewhere(several, who):
    """Servers allow one: what the other process holds for the same caller gives way before the server is asked."""
    async with several() as (a, b):
        story = await began(a, calls=(), fields=MINE)
        await story.leave()
        there = at(b, story)
        client, server, _ = await there.ask(there.again(None, fields=who))
        assert story.held == (0 if who is MINE else 1)
        await server.send(STREAM + part(notes(4)))
        await client.until(notes(4))
