"""R4, docs/adr/0003: who gets a stream when several want it."""

from __future__ import annotations

import asyncio

import pytest

from epochgate.relay.flow import CONTEST
from relay.wire import Peer
from resume.story import (
    LAST_CHUNK,
    STREAM,
    Answer,
    Story,
    began,
    event,
    note,
    notes,
    part,
    reply,
    response,
    result,
    until,
)

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


async def rivals(story: Story) -> tuple[Answer, Answer, Peer]:
    """Two clients that came back at once, and the connection of the second at the upstream; both have got event 4."""
    await story.leave()
    first = await (await story.resume(3)).begin()
    second, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
    await second.until(notes(4, epoch=1))
    await story.server.send(part(notes(4, epoch=1)))
    await first.until(notes(4, epoch=1))
    return first, second, server


@pytest.mark.parametrize("ahead", ["first", "second"])
async def test_r4_neither_of_two_lacks_what_the_other_was_given_first(proxy, ahead):
    """What comes on both connections is kept for a resume of either, whichever brought it first to the record."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        first, second, server = await rivals(story)
        ways = [(story.server, first), (server, second)]
        for live, client in ways if ahead == "first" else ways[::-1]:
            await live.send(part(notes(5, 6, epoch=1)))
            await client.until(notes(5, 6, epoch=1))
        second.peer.reset()
        await until(lambda: story.held == 1)
        third = await story.resume(4)
        await third.until(notes(5, 6, epoch=1))
        assert bytes(third.data) == notes(5, 6, epoch=1)
        await server.send(part(notes(7, epoch=1)))
        await third.until(notes(7, epoch=1))
        assert bytes(third.data) == notes(5, 6, 7, epoch=1)


async def test_r4_what_only_the_first_of_two_was_given_is_no_gap_in_the_buffer_of_the_second(proxy):
    """Its buffer cannot serve a cursor from before: the upstream is asked."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        first, second, server = await rivals(story)
        await story.server.send(part(notes(5, epoch=1)))
        await first.until(notes(5, epoch=1))
        await server.send(part(notes(6, epoch=1)))  # a server that gives each event to one reader
        with pytest.raises(AssertionError):
            await second.until(notes(6, epoch=1))  # R7: the recorded event 5 must come first
        assert "replay_gap" in story.verdicts()


async def test_r7_two_that_were_served_at_once_leave_one_record(proxy):
    """Each event once, so that a faithful replay of it is no `replay_gap`."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        first, second, server = await rivals(story)
        await server.send(part(notes(5, 6, epoch=1)))
        await second.until(notes(5, 6, epoch=1))
        await story.server.send(part(notes(5, 6, 7, epoch=1)))
        await first.until(notes(7, epoch=1))
        server.reset()
        story.server.reset()
        await until(lambda: not relay.context.streams)
        third, _, _ = await story.resumed(3, STREAM + part(notes(4, 5, 6, 7, 8, epoch=1)))
        await third.until(notes(8, epoch=1))
        assert bytes(third.data) == notes(4, 5, 6, 7, 8, epoch=1)


async def test_r4_a_connection_that_still_repeats_what_the_client_has_is_not_its_own(proxy):
    """It was asked for from an earlier event: who has more of the stream would get that again."""
    async with proxy() as relay:
        story = await began(relay, events=notes(1, 2, 3, 4, 5, epoch=1), epoch=1)
        await story.cut()
        earlier, server, _ = await story.resumed(1, STREAM + part(notes(2, epoch=1)))
        await earlier.until(notes(2, epoch=1))
        earlier.peer.reset()
        await until(lambda: story.held == 1)
        later, other, request = await story.resumed(5, STREAM + part(notes(6, epoch=1)))
        assert request.get(b"Last-Event-ID") == b"5"
        assert await server.gone()
        await later.until(notes(6, epoch=1))
        assert story.verdicts() == ["epoch", "epoch"]


@pytest.mark.parametrize("comment", [b"", b": here\n\n"])
async def test_h2_a_buffer_is_whole_when_it_has_the_response_not_when_the_record_has(proxy, comment):
    """T4: what the first of two was given is not in the buffer of the second, which must not end as if it were."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        first, second, server = await rivals(story)
        await story.server.send(part(notes(5, 6, epoch=1) + event(7, result(5, 1))))
        await first.until(event(7, result(5, 1)))
        second.peer.reset()
        await until(lambda: story.held == 1)
        await server.send(part(notes(5, epoch=1) + comment))
        third = await story.resume(4)
        await third.until(notes(5, epoch=1))
        await server.send(part(notes(6, epoch=1) + event(7, result(5, 1))), LAST_CHUNK)
        await third.rest()
        assert third.data.endswith(event(7, result(5, 1)))


async def test_r4_a_comment_alone_is_nothing_to_serve(proxy):
    """A stream that ended is asked for again at the upstream, if all that is left of it is a comment."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.server.send(part(notes(4, epoch=1) + b": here\n\n"))
        story.server.reset()
        await until(lambda: not relay.context.streams)
        first = await story.resume(3)
        await first.until(notes(4, epoch=1))
        second, _, _ = await story.resumed(4, STREAM + part(notes(5, epoch=1)))
        await second.until(notes(5, epoch=1))


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
