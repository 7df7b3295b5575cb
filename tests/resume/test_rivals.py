"""R4, docs/adr/0003: who gets a stream when several want it."""

from __future__ import annotations

import asyncio

import pytest

from epochgate.relay.flow import CONTEST
from resume.story import LAST_CHUNK, STREAM, began, note, notes, part, reply, response, until

BOTH_LOOPS = True
MINE, OTHER = (b"Authorization: Bearer mine",), (b"Authorization: Bearer other",)


async def test_r4_a_half_open_peer_is_taken_over(proxy):
    """The former client never said that it has gone; what was written to it since may be lost, and comes again."""
    async with proxy() as relay:
        story = await began(relay)
        await story.server.send(part(notes(4)))
        await story.answer.until(notes(4))
        client = await story.resume(3)
        await client.until(notes(4))
        assert await story.answer.peer.gone()
        await story.server.send(part(notes(5) + response(5)), LAST_CHUNK)
        assert await client.rest() == notes(4, 5) + response(5)
        assert (client.end, story.verdicts(), story.held) == ("clean", ["connection"], 0)


async def test_r4_h1_a_peer_that_closed_its_side_is_taken_over(proxy):
    """FIN after the request: it may still read, but a resume says that it does not."""
    async with proxy() as relay:
        story = await began(relay)
        story.answer.peer.finish()
        await story.server.send(part(notes(4)))
        await story.answer.until(notes(4))  # it gets its answer
        client = await story.resume(4)
        assert await story.answer.peer.gone()
        again = await story.resume(3)  # at once: but the former one is an ordinary client
        server, request = await story.asked()
        assert request.get(b"Last-Event-ID") == b"3"
        await story.server.send(part(notes(5)))
        await client.until(notes(5))
        again.peer.reset()
        assert await server.gone()


async def test_r4_of_two_at_once_one_gets_it(proxy):
    """The other goes to the upstream, and neither takes anything from the other."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        first = await (await story.resume(3)).begin()
        second, server, request = await story.resumed(3)
        assert request.get(b"Last-Event-ID") == b"3"
        await story.server.send(part(notes(4, epoch=1)))
        await first.until(notes(4, epoch=1))
        await server.send(STREAM + part(notes(4, epoch=1)))
        await second.until(notes(4, epoch=1))
        assert story.verdicts() == ["connection", "epoch"]
        assert bytes(first.data) == bytes(second.data) == notes(4, epoch=1)


async def test_r4_of_two_at_once_the_first_may_leave(proxy):
    """Its connection has lost its place to the other's: it is closed, and not held for nobody."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        first = await (await story.resume(3)).begin()
        second, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await second.until(notes(4, epoch=1))
        first.peer.reset()
        assert await story.server.gone()
        second.peer.reset()
        await until(lambda: story.held == 1)
        await server.send(part(notes(5, epoch=1)))
        third = await story.resume(4)
        await third.until(notes(5, epoch=1))
        assert story.verdicts() == ["connection", "epoch", "connection"]


async def test_r4_later_it_is_the_same_client_again(proxy):
    """A moment after (`CONTEST`) a further resume is no rival: it takes the stream over."""
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        first = await (await story.resume(3)).begin()
        await asyncio.sleep(CONTEST + 0.05)
        second = await story.resume(3)
        assert await first.peer.gone()
        await story.server.send(part(notes(4)))
        await second.until(notes(4))
        assert story.verdicts() == ["connection"] * 2


async def test_r5_of_two_resumes_that_are_judged_the_last_one_stays(proxy):
    """The upstream has let both in; whoever was answered last has the stream, the former one is cut off."""
    async with proxy(resume={"first_event_timeout": 30}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        first, server, _ = await story.resumed(3, STREAM)
        await until(lambda: relay.context.telemetry.open_streams == 1)
        second, successor, _ = await story.resumed(3, STREAM)
        assert await first.peer.gone()
        assert await server.gone()
        await successor.send(part(notes(4, epoch=1)))
        await second.until(notes(4, epoch=1))
        assert story.verdicts() == ["epoch"]


@pytest.mark.parametrize("status", [401, 403, 409, 503])
async def test_r4_a_stranger_is_judged_by_the_upstream(proxy, status):
    """Not let in: the stream stays held for its owner."""
    async with proxy() as relay:
        story = await began(relay, fields=MINE)
        await story.leave()
        await story.server.send(part(notes(4)))
        stranger, server, request = await story.ask(story.again(3, fields=OTHER))
        assert request.get(b"Authorization") == b"Bearer other"
        await server.send(reply(status, b"no"))
        assert (await stranger.rest(), stranger.status) == (b"no", status)
        client = await story.resume(3)
        await client.until(notes(4))
        assert story.verdicts() == ["connection"]


async def test_r4_credentials_that_changed(proxy):
    """A client whose token was renewed: the upstream lets it in, the old hold ends, and its own connection is held for
    whoever has the new token, no longer for the old one."""
    async with proxy() as relay:
        story = await began(relay, epoch=1, fields=MINE)
        await story.leave()
        client, server, _ = await story.ask(story.again(3, fields=OTHER))
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        assert await story.server.gone()
        client.peer.reset()
        await until(lambda: story.held == 1)
        await server.send(part(notes(5, epoch=1)))
        old, asked, _ = await story.ask(story.again(4, fields=MINE))
        await asked.send(reply(401))
        assert await old.rest() == b""
        again = await story.resume(4, fields=OTHER)
        await again.until(notes(5, epoch=1))
        assert story.verdicts() == ["epoch", "connection"]


async def test_r4_every_credential_field_counts(proxy):
    async with proxy(credentials=["X-Tenant"]) as relay:
        story = await began(relay, fields=(b"X-Tenant: a", b"Authorization: Bearer 1"))
        await story.leave()
        await story.server.send(part(notes(4)))
        stranger, server, _ = await story.ask(story.again(3, fields=(b"X-Tenant: b",)))
        await server.send(reply(403))
        await stranger.rest()
        client = await story.resume(3, fields=(b"X-Tenant: a", b"Authorization: Bearer 2"))
        await client.until(notes(4))


async def test_r4_a_resume_of_another_stream_takes_nothing(proxy):
    """Two held calls of one session: each resume gets its own."""
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        other, server, _ = await story.ask(story.call(6))
        first = notes(101)
        await server.send(STREAM + part(first))
        await other.until(first)
        other.peer.reset()
        await until(lambda: story.held == 2)
        await server.send(part(notes(102)))
        await story.server.send(part(notes(4)))
        six, five = await story.resume(101), await story.resume(3)
        await six.until(notes(102))
        await five.until(notes(4))
        assert (bytes(six.data), bytes(five.data)) == (notes(102), notes(4))
        assert note(4) not in six.data
