"""H1 to H3, R4: the client vanishes, and the upstream connection stays for it."""

from __future__ import annotations

import asyncio

import pytest

from relay.wire import get, settle
from resume.story import (
    LAST_CHUNK,
    OVERLAP,
    SESSION,
    STREAM,
    Answer,
    Story,
    began,
    event,
    note,
    notes,
    part,
    priming,
    reply,
    response,
    result,
    until,
)

BOTH_LOOPS = True
BIG = 3 * 1024 * 1024


def huge(n: int, size: int) -> bytes:
    return event(n, note("x" * size))


async def test_r4_served_from_the_buffer_and_live(proxy):
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        await story.server.send(part(notes(4, 5)))
        client = await story.resume(3)
        await client.until(notes(4, 5))
        assert (client.status, client.get(b"Content-Type")) == (200, b"text/event-stream")
        await story.server.send(part(notes(6)), part(response(5)), LAST_CHUNK)
        assert await client.rest() == notes(4, 5, 6) + response(5)
        assert (client.end, story.verdicts()) == ("clean", ["connection"])
        assert await relay.unasked()


async def test_r4_what_was_no_mark_is_none_in_what_the_buffer_holds(proxy):
    """The live client ignored the line, and so does the one that gets it first."""
    hidden = b"\xef\xbb\xbfdata: hidden\n\n"
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        await story.server.send(part(hidden + notes(4)))
        client = await story.resume(3)
        await client.until(notes(4))
        assert client.data == b"\n" + hidden + notes(4)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("then", [b"", notes(7)], ids=["no more", "another id"])
async def test_r4_r3_events_without_an_id_that_came_while_the_client_was_away(proxy, ended, then):
    """The id that sticks to them names them too; but the client, who sends it, cannot have got them."""
    async with proxy() as relay:
        story = await began(relay, events=notes(1) + event(None, note(2)))
        await story.leave()
        late = event(None, note(3)) + event(None, result(5)) + then
        await story.server.send(part(late), *([LAST_CHUNK] if ended else []))
        await until(lambda: len(story.session.streams[0].events) > 3)
        for _ in range(2):
            client = await story.resume(1)
            await client.until(late)
            assert client.data == late
            if not ended:
                client.peer.reset()
                await until(lambda: story.held == 1 or not relay.context.holds._flows)
                break
        assert story.verdicts() == ["connection"] * (2 if ended else 1)


@pytest.mark.parametrize("held", [True, False])
async def test_r4_where_streams_share_ids_a_resume_takes_the_one_that_was_left(proxy, held):
    """A server that counts the ids of each stream from 1: what a client reads is not taken from it."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        other, flowing, _ = await story.ask(story.call(6))
        same = event(1, note("a")) + event(2, note("b")) + event(3, note("c"))
        await flowing.send(STREAM + part(same))
        await other.until(same)
        await (story.leave() if held else story.cut())
        if held:
            client = await story.resume(3)
            await story.server.send(part(notes(4)))
        else:
            client, _, _ = await story.resumed(3, STREAM + part(notes(3, 4)))
        await client.until(notes(4))
        assert client.data == notes(4)
        assert story.verdicts() == ["connection" if held else "overlap"]
        await flowing.send(part(event(4, note("d"))))
        await other.until(event(4, note("d")))


async def test_r4_where_streams_share_ids_and_all_flow_none_is_taken_over(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        other, flowing, _ = await story.ask(story.call(6))
        same = event(1, note("a", 1)) + event(2, note("b", 1))
        await flowing.send(STREAM + part(same))
        await other.until(same)
        client, _, request = await story.resumed(2, STREAM + part(event(4, note("x", 1))))
        assert request.get(b"Last-Event-ID") == b"2"
        await client.until(event(4, note("x", 1)))
        assert story.verdicts() == ["epoch"]
        await flowing.send(part(event(3, note("c", 1))))
        await other.until(event(3, note("c", 1)))
        await story.server.send(part(notes(5, epoch=1)))
        await story.answer.until(notes(5, epoch=1))


async def test_r4_head_of_a_sized_stream_has_no_length_when_it_is_resumed(proxy):
    async with proxy() as relay:
        head = STREAM.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d\r\nX-Own: 1" % len(notes(1, 2)))
        story = await began(relay, events=b"", head=head)
        await story.server.send(notes(1))
        await story.answer.until(notes(1))
        await story.leave()
        client = await story.resume(1)
        await client.begin()
        assert (client.get(b"Content-Length"), client.get(b"X-Own")) == (None, b"1")
        await story.server.send(notes(2))
        assert await client.rest() == notes(2)
        assert client.end == "clean"


@pytest.mark.parametrize("cursor", [1, 2, 3])
async def test_r4_l4_any_cursor_inside_the_delivered_tail(proxy, cursor):
    """The last bytes that were written may never have arrived (docs/adr/0002)."""
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        client = await story.resume(cursor)
        await story.server.send(part(notes(4)))
        await client.until(notes(4))
        assert bytes(client.data) == notes(*range(cursor + 1, 5))
        assert story.verdicts() == ["connection"]


async def test_r4_h2_a_cursor_before_the_tail_closes_the_hold_first(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        long = [event(n, note("x" * 20_000, 1)) for n in range(4, 9)]
        await story.server.send(part(b"".join(long)))
        await story.answer.until(long[-1])
        await story.leave()
        client, server, request = await story.resumed(3)
        assert request.get(b"Last-Event-ID") == b"3"
        assert await story.server.gone()
        await server.send(STREAM + part(b"".join(long)))
        await client.until(long[-1])
        assert story.verdicts() == ["epoch"]


@pytest.mark.parametrize("when", ["before an id", "before the head"])
async def test_h1_nothing_to_resume_is_closed_at_once(proxy, when):
    async with proxy() as relay:
        story = await began(relay, events=b"")
        client, server, _ = await story.ask(story.call(6))
        if when == "before an id":
            await server.send(STREAM + part(event(None, note(1)) + b": hello\n\nid: 1\nda"))
            await client.until(b"id: 1\nda")
        client.peer.reset()
        assert await server.gone()


async def test_h1_a_stream_that_only_had_a_priming_event_is_held(proxy):
    async with proxy() as relay:
        story = await began(relay, events=priming("p"))
        await story.leave()
        await story.server.send(part(notes(1)))
        client = await story.resume("p")
        await client.until(notes(1))
        assert story.verdicts() == ["connection"]


async def test_h1_half_an_event_when_the_client_leaves(proxy):
    """What the former client got of it counts for nothing: the next one gets the whole."""
    async with proxy() as relay:
        story = await began(relay)
        half, rest = notes(4)[:20], notes(4)[20:]
        await story.server.send(part(half))
        await story.answer.until(half)
        await story.leave()
        client = await story.resume(3)
        await client.begin()
        await story.server.send(part(rest))
        await client.until(notes(4))
        assert bytes(client.data) == notes(4)


@pytest.mark.parametrize("attached", [False, True])
async def test_h2_an_unfinished_event_longer_than_the_buffer(proxy, attached):
    """It cannot be kept, whether its end comes while somebody is there or not; the session is not to blame (R5)."""
    async with proxy(resume={"hold": {"bytes": 1000}}) as relay:
        story = await began(relay, epoch=1)
        long = event(4, note("x" * 5000, 1))
        await story.server.send(part(long[:3000]))
        await story.answer.until(long[:3000])
        story.answer.peer.reset()
        if not attached:
            assert await story.server.gone()
        client, server, request = await story.resumed(3)
        assert request.get(b"Last-Event-ID") == b"3"
        await server.send(STREAM + part(long))
        await client.until(long)
        assert story.session.fence is None
        assert story.verdicts() == ["epoch"]


async def test_h2_closed_when_the_buffer_is_full(proxy):
    async with proxy(resume={"hold": {"bytes": 1000}}) as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.server.send(part(notes(4, epoch=1)), part(event(5, note("x" * 1000, 1))))
        assert await story.server.gone()
        assert story.held == 0
        client, server, _ = await story.resumed(3)
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))


async def test_h2_only_waiting_bytes_fill_the_buffer(proxy):
    """Ten times `hold.bytes` pass while the client is there; it is held all the same."""
    async with proxy(resume={"hold": {"bytes": 1000}}) as relay:
        story = await began(relay, events=b"")
        for n in range(1, 11):
            await story.server.send(part(huge(n, 900)))
            await story.answer.until(huge(n, 900))
        await story.leave()
        await story.server.send(part(huge(11, 700)))
        client = await story.resume(10)
        await client.until(huge(11, 700))
        assert story.verdicts() == ["connection"]


@pytest.mark.parametrize("seconds", [0, 0.2])
async def test_h1_closed_when_its_time_is_over(proxy, seconds):
    async with proxy(resume={"hold": {"time": seconds}}) as relay:
        story = await began(relay, epoch=1)
        story.answer.peer.reset()
        assert await story.server.gone()
        client, server, _ = await story.resumed(3)
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        assert story.verdicts() == ["epoch"]


async def test_h1_no_holding_where_a_connection_proves_nothing(proxy):
    async with proxy(resume={"accept": ["epoch"]}) as relay:
        story = await began(relay, epoch=1)
        story.answer.peer.reset()
        assert await story.server.gone()
        client, server, _ = await story.resumed(3)
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        client.peer.reset()
        assert await server.gone()  # a resumed one neither
        assert story.verdicts() == ["epoch"]


async def test_h3_the_buffered_end_stays_resumable(proxy):
    """The client loses its connection again before it has read the response that ended the call."""
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        await story.server.send(part(notes(4) + response(5)), LAST_CHUNK)
        for _ in range(3):
            client = await story.resume(3)
            assert await client.rest() == notes(4) + response(5)
            assert client.end == "clean"
        late = await story.resume(4)
        assert await late.rest() == response(5)
        assert story.verdicts() == ["connection"] * 4
        assert await relay.unasked()


async def test_h3_the_end_that_a_client_that_was_leaving_may_have_missed(proxy):
    """It had closed its side, as one that goes does, when the response came and the stream ended."""
    async with proxy() as relay:
        story = await began(relay)
        story.answer.peer.finish()
        await settle()
        await story.server.send(part(notes(4) + response(5)), LAST_CHUNK)
        await until(lambda: story.held == 1)
        story.answer.peer.reset()
        client = await story.resume(3)
        assert (await client.rest(), client.end) == (notes(4) + response(5), "clean")
        assert story.verdicts() == ["connection"]
        assert await relay.unasked()


async def test_h3_not_beyond_its_time(proxy):
    async with proxy(resume={"hold": {"time": 0.3}}) as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.server.send(part(notes(4) + response(5)), LAST_CHUNK)
        client = await story.resume(3)
        await client.rest()
        await until(lambda: not relay.context.holds._flows)
        _, _, request = await story.resumed(3)
        assert request.get(b"Last-Event-ID") == b"3"


async def test_h2_given_up_when_all_is_there(proxy):
    """The response is buffered: the upstream connection is of no more use, whether the upstream ends it or not."""
    async with proxy() as relay:
        story = await began(relay, calls=(5, 6))
        await story.leave()
        await story.server.send(part(response(6)))
        await story.server.send(part(response(5)))
        assert await story.server.gone()
        client = await story.resume(3)
        assert await client.rest() == response(6) + response(5)
        assert client.end == "clean"


async def test_t4_broken_off_while_nobody_is_there(proxy):
    """What is buffered is delivered, and the end is no clean one; the next resume asks the upstream."""
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        await story.server.send(part(notes(4)) + b"5\r\nid:")
        await until(lambda: len(story.session.index) == 4)
        story.server.reset()
        await until(lambda: relay.context.telemetry.open_streams == 0)
        client = await story.resume(3)
        assert await client.rest() == notes(4)
        assert client.end == "aborted"
        refused, _, request = await story.resumed(4, STREAM + part(notes(5)))
        assert request.get(b"Last-Event-ID") == b"4"
        assert (await refused.error())["data"] == {"reason": "boundary"} or story.verdicts()[-1] == "no_epoch"


@pytest.mark.parametrize("end", ["clean", "aborted"])
async def test_h3_ended_with_nothing_in_the_buffer_asks_the_upstream(proxy, end):
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        await story.leave()
        if end == "clean":
            await story.server.send(LAST_CHUNK)
        else:
            story.server.reset()
        await until(lambda: story.held == 0)
        client, server, request = await story.resumed(3)
        assert request.get(b"Last-Event-ID") == b"2"
        await server.send(STREAM + part(notes(3, 4)))
        await client.until(notes(4))
        assert bytes(client.data) == notes(4)


async def test_h3_an_ended_buffer_has_nothing_after_its_last_event(proxy):
    """The client has it all: whether there is more only the upstream knows."""
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        await story.server.send(part(notes(4)), LAST_CHUNK)
        await until(lambda: relay.context.telemetry.open_streams == 0)
        _, _, request = await story.resumed(4)
        assert request.get(b"Last-Event-ID") == b"4"


async def test_r12_another_epoch_while_nobody_is_there(proxy):
    """The held buffer is not delivered, not even what came before the change."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.server.send(part(notes(4, epoch=1) + notes(5, epoch=2)))
        assert await story.server.gone()
        assert story.session.fence == "epoch_changed"
        client = await story.resume(3)
        assert (await client.error())["data"] == {"reason": "epoch_changed"}
        await story.fenced("epoch_changed")


async def test_r12_h3_a_buffer_of_another_epoch_is_not_delivered_even_where_changes_are_ignored(proxy):
    """Nothing is fenced, but what is held is given up: the upstream is asked, and a resume is judged as ever."""
    async with proxy(epoch={"live_change": "ignore"}) as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.server.send(part(notes(4, epoch=2)))
        assert await story.server.gone()
        await story.alive()


@pytest.mark.parametrize("shown_by", ["an event", "the head"])
@pytest.mark.parametrize("half_open", [False, True])
async def test_r12_h3_nor_one_whose_client_saw_the_change(proxy, shown_by, half_open):
    """The client is gone, or will be: what is kept of the stream proves nothing, and the upstream is asked."""
    sources = [{"meta": "session_epoch"}] if shown_by == "an event" else [{"header": "Epoch"}]
    head = STREAM if shown_by == "an event" else STREAM[:-2] + b"Epoch: 2\r\n\r\n"
    async with proxy(epoch={"live_change": "ignore", "sources": sources}) as relay:
        story = Story(relay)
        await story.open(1, b"Epoch: 1")
        story.answer, story.server, _ = await story.ask(story.call(5))
        await story.server.send(head + part(notes(1, epoch=1) + notes(2, epoch=2)))
        await story.answer.until(notes(2, epoch=2))
        if not half_open:
            story.answer.peer.reset()
            assert await story.server.gone()
        client, _, request = await story.resumed(1, head + part(notes(2, epoch=2)))
        assert request.get(b"Last-Event-ID") == b"1"
        assert (await client.error())["data"] == {"reason": "epoch_changed"}
        assert story.verdicts() == ["epoch_changed"]


async def test_r11_another_epoch_after_it_was_attached_again(proxy):
    """From then on it is a resumed stream: the wrong event is not delivered, and the pending call is told (F5)."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        client = await story.resume(3)
        await story.server.send(part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        await story.server.send(part(notes(5, epoch=2)))
        assert await client.told() == [(5, "epoch_changed")]
        assert client.data.startswith(notes(4, epoch=1))
        assert b'"n":5' not in client.data
        await story.fenced("epoch_changed")


async def test_h3_r11_held_after_a_resume_is_judged_on(proxy):
    """A resumed stream is held, and the wrong event comes while nobody is there."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        client.peer.reset()
        await until(lambda: story.held == 1)
        await server.send(part(notes(5, epoch=2)))
        assert await server.gone()
        late = await story.resume(4)
        assert (await late.error())["data"] == {"reason": "epoch_changed"}
        assert story.verdicts() == ["epoch", "epoch_changed"]


async def test_h2_a_new_standalone_stream_takes_the_place_of_the_held_one(proxy):
    async with proxy() as relay:
        story = await began(relay, calls=())
        await story.leave()
        _, server, _ = await story.resumed(None)
        assert await story.server.gone()
        await server.send(STREAM)


async def test_h2_a_held_call_stays_when_a_standalone_stream_comes(proxy):
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        _, server, _ = await story.resumed(None)
        await server.send(STREAM)
        assert story.held == 1


async def test_h2_somebody_elses_standalone_stream_changes_nothing(proxy):
    async with proxy() as relay:
        story = await began(relay, calls=(), fields=(b"Authorization: Bearer mine",))
        await story.leave()
        await story.ask(story.again(None, fields=(b"Authorization: Bearer other",)))
        assert story.held == 1


async def test_h2_the_oldest_gives_way(proxy):
    async with proxy() as relay:
        relay.context.holds._most = 2
        story = await began(relay)
        await story.leave()
        servers = [story.server]
        for call in (6, 7):
            client, server, _ = await story.ask(story.call(call))
            first = event(f"c{call}-1", note(1))
            await server.send(STREAM + part(first))
            await client.until(first)
            client.peer.reset()
            servers.append(server)
            await until(lambda: relay.context.telemetry.requests["mcp", "POST", 200] == len(servers))
        assert await servers[0].gone()
        assert story.held == 2
        client = await story.resume("c6-1")
        await servers[1].send(part(event("c6-2", note(2))))
        await client.until(event("c6-2", note(2)))


async def test_l6_a_session_that_is_deleted_holds_nothing(proxy):
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        gone, server, _ = await story.ask(get(b"/mcp", SESSION, method=b"DELETE"))
        await server.send(reply(200))
        await gone.rest()
        assert await story.server.gone()
        client = await story.resume(3)
        assert (await client.error())["data"] == {"reason": "deleted"}


@pytest.mark.parametrize("status", [401, 403, 405, 502, 503])
async def test_l6_a_session_that_is_not_deleted_holds_on(proxy, status):
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        gone, server, _ = await story.ask(get(b"/mcp", SESSION, method=b"DELETE"))
        await server.send(reply(status))
        await gone.rest()
        assert gone.status == status
        await story.server.send(part(notes(4)))
        client = await story.resume(3)
        await client.until(notes(4))


async def test_l1_granted_anew_while_a_stream_is_held(proxy):
    """The record is void: the stream of the former session is no longer kept, and its cursor is not known."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.open(2)
        assert await story.server.gone()
        client, _, request = await story.ask(story.again(3))  # no id was delivered yet: a new stream (R3)
        assert request.get(b"Last-Event-ID") is None
        assert story.verdicts() == ["stale_cursor"]


async def test_l1_granted_anew_while_a_stream_flows(proxy):
    """It runs to its end, but nobody holds it: it could not be resumed."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.open(2)
        await story.server.send(part(notes(4, epoch=1)))
        await story.answer.until(notes(4, epoch=1))
        story.answer.peer.reset()
        assert await story.server.gone()
        assert story.session.fence is None
        await story.alive()


async def test_h2_draining_ends_what_is_held(proxy):
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        relay.context.draining = True
        client = await story.resume(3)  # there is still time for it
        await story.server.send(part(notes(4)))
        await client.until(notes(4))
        client.peer.reset()
        assert await story.server.gone()


async def test_h3_l5_a_huge_event_is_checked_and_served(proxy):
    """3 MB while nobody is there, and as many on the live tail."""
    async with proxy(resume={"hold": {"bytes": 2 * BIG}}) as relay:
        story = await began(relay)
        await story.leave()
        client = await _huge(story, await _buffered(story, huge(4, BIG)), huge(5, BIG))
        assert bytes(client.data) == huge(4, BIG) + huge(5, BIG)


async def _buffered(story, data: bytes) -> bytes:
    await story.server.send(part(data))
    return data


async def _huge(story, waiting: bytes, more: bytes) -> Answer:
    client = await story.resume(3)
    await client.until(waiting[-200:])
    sending = asyncio.create_task(story.server.send(part(more)))
    while len(client.data) < len(waiting) + len(more):
        await client._more()
    await sending
    return client


async def test_r4_a_client_that_leaves_while_the_buffer_is_flushed_to_it(proxy):
    """8 MB wait; the client takes little of it and vanishes. It has lost nothing (docs/adr/0002)."""
    async with proxy(resume={"hold": {"bytes": 16 * 1024 * 1024}}) as relay:
        story = await began(relay)
        await story.leave()
        waiting = [event(n, note("x" * 500_000)) for n in range(4, 20)]
        for block in waiting:
            await story.server.send(part(block))
        await until(lambda: len(story.session.index) == 19)
        slow = Answer(await relay.connect(receive_buffer=4096))
        await slow.peer.send(story.again(3))
        await slow.begin()
        await until(lambda: story.verdicts() == ["connection"])
        slow.peer.reset()
        await until(lambda: story.held == 1)
        client = await (await story.resume(3)).begin()
        sent = b"".join(waiting)
        while len(client.data) < len(sent):
            await client._more()
        assert bytes(client.data) == sent
        assert story.verdicts() == ["connection"] * 2


async def test_h1_undecided_means_not_proven(proxy):
    """R10 released the head of a silent resume; its client leaves and comes back. That connection proves nothing."""
    async with proxy(resume={"first_event_timeout": 0.05}) as relay:
        story = await began(relay)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await client.begin()
        client.peer.reset()
        again = await story.resume(3)
        if await server.gone(0.2):
            server, _ = await story.asked()
            await server.send(STREAM)
        await again.begin()
        await server.send(part(notes(4)))
        assert await again.told() == [(5, "no_epoch")]
        assert story.verdicts() == ["no_epoch"]
        assert b'"n":4' not in again.data


async def test_h1_a_client_that_leaves_before_its_head_is_released(proxy):
    """Nothing was answered, so nothing is held; not even where a priming event has come."""
    async with proxy(resume={"first_event_timeout": 30}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(priming("p")))
        await until(lambda: story.session.knows(b"p"))
        client.peer.reset()
        assert await server.gone()
        assert story.held == 0
        assert story.verdicts() == []
        again, server, _ = await story.resumed(3, STREAM + part(priming("p") + notes(4, epoch=1)))
        await again.until(notes(4, epoch=1))
        assert story.verdicts() == ["epoch"]


async def test_drain_ends_a_resumed_stream_after_a_whole_event(proxy):
    """It is in the middle of an event: what is whole was released, so that it can end at once, cleanly."""
    async with proxy() as relay:
        story = await began(relay)
        await story.leave()
        client = await story.resume(3)
        await story.server.send(part(notes(4) + notes(5)[:20]))
        await client.until(notes(4))
        for flow in list(relay.context.streams):
            flow.end_at_boundary()
        assert (await client.rest(), client.end) == (notes(4), "clean")
        assert await story.server.gone()


async def test_drain_ends_a_live_stream_after_its_event(proxy):
    """Bytes that came are out already: the rest of the event is waited for."""
    async with proxy() as relay:
        story = await began(relay)
        half, rest = notes(4)[:20], notes(4)[20:]
        await story.server.send(part(half))
        await story.answer.until(half)
        for flow in list(relay.context.streams):
            flow.end_at_boundary()
        await story.server.send(part(rest + notes(5)[:9]), part(notes(5)[9:] + notes(6)))
        await story.answer.rest()
        assert story.answer.end == "clean"
        assert bytes(story.answer.data) in (notes(1, 2, 3, 4), notes(*range(1, 7)))


async def test_drain_a_resume_that_is_judged_gets_its_answer(proxy):
    """Its head is not out: the drain waits for the verdict, and ends the stream after it."""
    async with proxy(resume={"first_event_timeout": 30}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await until(lambda: relay.context.streams)
        for flow in list(relay.context.streams):
            flow.end_at_boundary()
        await server.send(part(notes(4, epoch=1)))
        assert (await client.rest(), client.end) == (notes(4, epoch=1), "clean")
        assert story.verdicts() == ["epoch"]


async def test_l5_a_stream_that_was_forgotten_is_not_held(proxy):
    """More streams than are remembered: the oldest gave way, and cannot be resumed."""
    async with proxy() as relay:
        relay.context.ledger._records.limits = type(relay.context.ledger._records.limits)(streams=1, events=8)
        story = await began(relay)
        other, server, _ = await story.ask(story.call(6))
        await server.send(STREAM + part(notes(11)))
        await other.until(notes(11))
        story.answer.peer.reset()
        assert await story.server.gone()
        assert story.held == 0


@pytest.mark.parametrize("size", [BIG, 5 * 1024 * 1024])
async def test_r11_a_long_event_after_a_take_over_is_checked(proxy, size):
    """Longer than what is read of a live one: it is a resumed stream from there on."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        client = await story.resume(3)
        await client.begin()
        await story.server.send(part(event(4, note("x" * size, 1))))
        await client.until(b"\n\n")
        await story.server.send(part(event(5, note("y" * size, 2))))
        assert await client.told() == [(5, "epoch_changed")]
        assert b"yyy" not in client.data
        await story.fenced("epoch_changed")


async def test_h3_a_long_event_in_the_buffer_is_checked(proxy):
    async with proxy(resume={"hold": {"bytes": 16 * 1024 * 1024}}) as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        await story.server.send(part(event(4, note("x" * 5 * 1024 * 1024, 2))))
        await until(lambda: story.session.fence)
        client = await story.resume(3)
        assert (await client.error())["data"] == {"reason": "epoch_changed"}
