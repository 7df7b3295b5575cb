"""What becomes of a resume that is still open when something happens to its session (F2, L1, L6), or to its client."""

from __future__ import annotations

import pytest

from epochgate.relay import farewell
from relay.wire import Peer, get
from resume.story import (
    JSON,
    LAST_CHUNK,
    OVERLAP,
    SESSION,
    STREAM,
    Story,
    began,
    note,
    notes,
    part,
    priming,
    reply,
    result,
    stream,
    until,
)


async def delete(story: Story) -> str:
    gone, server, _ = await story.ask(get(b"/mcp", SESSION, method=b"DELETE"))
    await server.send(reply(200))
    await gone.rest()
    return "deleted"


async def lose(story: Story) -> str:
    lost = await story.other(reply(404, b"<h1>Not Found</h1>", b"Content-Type: text/html"))
    assert (await lost.error())["data"] == {"reason": "session_lost"}
    return "session_lost"


async def change(story: Story) -> str:
    changed = await story.other(reply(200, result(99, 2), JSON))
    await changed.rest()
    return "epoch_changed"


async def grant_anew(story: Story) -> str:
    await story.open(1)
    return "epoch_changed"


ENDS = [delete, lose, change, grant_anew]


@pytest.mark.parametrize("end", ENDS)
async def test_f2_ended_while_a_resume_waits_for_its_first_event(proxy, end):
    """Nothing was released and nothing is: the event that comes is no proof that the session lives."""
    async with proxy(resume={"first_event_timeout": 30}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(priming("p")))
        await until(lambda: story.session.knows(b"p"))
        reason = await end(story)
        await server.send(part(notes(4, epoch=1)))
        assert (await client.error())["data"] == {"reason": reason}
        assert client.status == 404
        assert await server.gone()
        assert story.verdicts() == []
        if end is grant_anew:
            await story.alive()


@pytest.mark.parametrize("end", ENDS)
async def test_f2_ended_before_the_head_is_released_in_silence(proxy, end):
    """`first_event_timeout` passes: the answer is the 404, not the head (R10)."""
    async with proxy(resume={"first_event_timeout": 0.3}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await until(lambda: relay.context.telemetry.open_streams == 1)
        reason = await end(story)
        assert (await client.error())["data"] == {"reason": reason}
        assert await server.gone()


@pytest.mark.parametrize("end", ENDS)
async def test_f2_f5_ended_after_the_head_was_released_in_silence(proxy, end):
    """Nothing is proven yet: the first event is not delivered, and the pending call is told."""
    async with proxy(resume={"first_event_timeout": 0.05}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await client.begin()
        reason = await end(story)
        await server.send(part(notes(4, epoch=1)))
        assert await client.told() == [(5, reason)]
        assert b'"n":4' not in client.data


@pytest.mark.parametrize("end", ENDS)
async def test_f6_ended_while_a_proven_resume_flows(proxy, end):
    """It runs to its end; but it is not held any more."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        await end(story)
        await server.send(part(notes(5, epoch=1)))
        await client.until(notes(5, epoch=1))
        client.peer.reset()
        assert await server.gone()


@pytest.mark.parametrize("end", ENDS)
async def test_f2_r9_ended_between_two_asks(proxy, end):
    """An empty answer would be asked for again; a session that ended meanwhile is asked for no more."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.ask(story.again(3))
        ending, asked = await _send(story, end)
        await server.send(STREAM + LAST_CHUNK)
        assert await server.gone()
        reason = await _answer(story, end, ending, asked)
        assert (await client.error())["data"] == {"reason": reason}
        assert await relay.unasked()


async def _send(story: Story, end):
    """The request that ends the session is on its way already; its answer comes later."""
    requests = {delete: get(b"/mcp", SESSION, method=b"DELETE"), lose: story.call(99), change: story.call(99)}
    return (await story.ask(requests[end]))[:2] if end in requests else (None, None)


async def _answer(story: Story, end, client, server) -> str:
    if client is None:
        return await end(story)
    answers = {
        delete: (reply(200), "deleted"),
        lose: (reply(404, b"gone", b"Content-Type: text/plain"), "session_lost"),
        change: (reply(200, result(99, 2), JSON), "epoch_changed"),
    }
    answer, reason = answers[end]
    await server.send(answer)
    await client.rest()
    return reason


async def test_f2_r5_ended_between_the_rewound_ask_and_the_second(proxy):
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        await story.pause()
        client, server, request = await story.resumed(3)
        assert request.get(b"Last-Event-ID") == b"2"
        await delete(story)
        await server.send(reply(400, b"no such event"))
        assert (await client.error())["data"] == {"reason": "deleted"}
        assert await relay.unasked()


async def test_l6_no_late_event_brings_it_back(proxy):
    """A call was answered by a stream after the DELETE: it flows (F6), and nothing of it can be resumed."""
    async with proxy() as relay:
        story = await began(relay)
        late, server, _ = await story.ask(story.call(6))
        await delete(story)
        await server.send(STREAM + part(notes(11)))
        await late.until(notes(11))
        late.peer.reset()
        assert await server.gone()
        client = await story.resume(11)
        assert (await client.error())["data"] == {"reason": "deleted"}
        await story.fenced("deleted")


async def _left_behind(story: Story, how: str = "reset") -> Peer:
    """A stream is held; a DELETE is at the upstream, and its client has gone."""
    await story.leave()
    return await _delete_and_leave(story, how)


async def _delete_and_leave(story: Story, how: str = "reset") -> Peer:
    clients = len(story.relay.context.clients)
    gone, server, _ = await story.ask(get(b"/mcp", SESSION, method=b"DELETE"))
    if how == "reset":
        gone.peer.reset()
        await until(lambda: len(story.relay.context.clients) == clients)
    else:
        gone.peer.close()
    return server


ENDED = {
    "204": b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
    "200": reply(200, b"{}", JSON),
    "202, sent for hours": b"HTTP/1.1 202 Accepted\r\nContent-Length: 1000\r\n\r\nx",
    "200, a stream": STREAM + part(notes(4)),
    "204 after an interim answer": b"HTTP/1.1 103 Early Hints\r\n\r\n" + reply(204),
}


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("answer", ENDED.values(), ids=ENDED)
async def test_l6_a_delete_is_heard_out_though_its_client_has_gone(proxy, how, answer):
    """The buffer outlives neither the session nor the one who ended it."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        server = await _left_behind(story, how)
        await server.send(answer)
        await until(lambda: story.session.fence == "deleted")
        assert story.held == 0
        assert await story.server.gone()
        assert await server.gone()
        client = await story.resume(3)
        assert (await client.error())["data"] == {"reason": "deleted"}
        await story.fenced("deleted")


NOT_ENDED = {
    "401": reply(401),
    "404": reply(404, b"Session not found", b"Content-Type: text/plain"),
    "405": reply(405),
    "503": reply(503),
    "303": reply(303, b"", b"Location: /"),
    "half a head": b"HTTP/1.1 204 No Con",
    "nonsense": b"\0\0\0\r\n\r\n",
}


@pytest.mark.parametrize("answer", NOT_ENDED.values(), ids=NOT_ENDED)
async def test_l6_any_other_answer_that_nobody_hears_changes_nothing(proxy, answer):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        server = await _left_behind(story)
        await server.send(answer)
        if answer.startswith(b"HTTP/1.1 204"):
            server.reset()
        else:
            assert await server.gone()
        await until(lambda: not relay.context.farewells)
        assert (story.session.fence, story.held) == (None, 1)
        await story.server.send(part(notes(4, epoch=1)))
        client = await story.resume(3)
        await client.until(notes(4, epoch=1))


async def test_l6_a_delete_that_is_not_answered_is_given_up(proxy, monkeypatch):
    monkeypatch.setattr(farewell, "FAREWELL_TIME", 0.05)
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        server = await _left_behind(story)
        assert await server.gone()
        assert (story.session.fence, story.held) == (None, 1)


async def test_l5_of_many_such_the_oldest_gives_way(proxy, monkeypatch):
    monkeypatch.setattr(farewell, "MOST_FAREWELLS", 2)
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        servers = []
        for number in range(1, 4):
            servers.append(await _delete_and_leave(story))
            assert len(relay.context.farewells) == min(number, 2)
        assert await servers[0].gone()
        await servers[1].send(reply(204))
        await until(lambda: story.session.fence == "deleted")


@pytest.mark.parametrize("ends", [False, True])
async def test_l6_half_a_delete_may_end_the_session_as_well(proxy, monkeypatch, ends):
    """Its head says all: the upstream need not wait for its body. One that does is given up."""
    monkeypatch.setattr(farewell, "FAREWELL_TIME", 5.0 if ends else 0.05)
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.leave()
        gone = await story.send(get(b"/mcp", SESSION, b"Content-Length: 5", method=b"DELETE") + b"ab")
        server = await relay.accept()
        await server.head()
        gone.peer.reset()
        await until(lambda: relay.context.farewells)
        if ends:
            await server.send(reply(204))
            await until(lambda: story.session.fence == "deleted")
        assert await server.gone()
        assert story.session.fence == ("deleted" if ends else None)
        assert story.held == (0 if ends else 1)


async def test_l6_observed_a_delete_that_nobody_waits_for_is_counted(proxy):
    async with proxy(mode="observe") as relay:
        story = await began(relay, epoch=1)
        gone, server, _ = await story.ask(get(b"/mcp", SESSION, method=b"DELETE"))
        gone.peer.reset()
        await until(lambda: relay.context.farewells)
        await server.send(reply(204))
        await until(lambda: story.session.would_be_fenced)
        assert story.session.fence is None


async def test_r12_of_another_stream_while_a_resume_is_judged_by_overlap(proxy):
    """Another stream of the session shows a new epoch; the faithful replay of this one is worth nothing then."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        other, live, _ = await story.ask(story.call(6))
        await live.send(STREAM + part(notes(11, epoch=1)))
        await other.until(notes(11, epoch=1))
        await story.pause()
        client, server, _ = await story.resumed(3)
        await live.send(part(notes(12, epoch=2)))
        await other.until(notes(12, epoch=2))
        await server.send(STREAM + part(notes(3, 4)))
        assert (await client.error())["data"] == {"reason": "epoch_changed"}


@pytest.mark.parametrize("answered", [False, True])
async def test_h1_a_client_that_leaves_before_the_verdict(proxy, answered):
    """Before the upstream has answered, or while it says nothing: there is nothing to hold, and no verdict."""
    async with proxy(resume={"first_event_timeout": 30}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM if answered else b"")
        if answered:
            await until(lambda: relay.context.telemetry.open_streams == 1)
        client.peer.reset()
        assert await server.gone()
        assert (story.verdicts(), story.held, story.session.fence) == ([], 0, None)
        again, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await again.until(notes(4, epoch=1))


async def test_r9_a_client_that_leaves_between_two_asks(proxy):
    """The upstream is not asked for somebody who has gone; and nobody was refused."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, stream())
        assert await server.gone()
        client.peer.reset()
        await until(lambda: story.telemetry.requests["mcp", "GET", 0])  # its work has ended, without an answer
        assert await relay.unasked()
        assert (story.verdicts(), story.session.fence) == ([], None)


async def test_h1_a_silent_resume_is_held_as_well(proxy):
    """Its head was released; the stream had ids before. What comes while nobody is there is judged and kept (H3)."""
    async with proxy(resume={"first_event_timeout": 0.05}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await client.begin()
        client.peer.reset()
        await until(lambda: story.held == 1)
        await server.send(part(notes(4, epoch=1)))
        await until(lambda: story.verdicts() == ["epoch"])
        again = await story.resume(3)
        await again.until(notes(4, epoch=1))
        assert story.verdicts() == ["epoch", "connection"]


async def test_r8_an_unproven_event_while_nobody_is_there(proxy):
    """The same without an epoch: it is refused, although no one asks (H3)."""
    async with proxy(resume={"first_event_timeout": 0.05}) as relay:
        story = await began(relay)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        await client.begin()
        client.peer.reset()
        await until(lambda: story.held == 1)
        await server.send(part(notes(4)))
        assert await server.gone()
        assert story.verdicts() == ["no_epoch"]
        await story.fenced("no_epoch")


async def test_r1_a_resume_that_is_pipelined_behind_a_call(proxy):
    """On one connection: the resume is judged when the call is done, and by what the call has brought."""
    async with proxy() as relay:
        story = Story(relay)
        await story.open(1)
        client, server, _ = await story.ask(story.call(5) + story.again(2))
        await server.send(stream(notes(1, 2, 3, epoch=1)))
        assert await client.rest() == notes(1, 2, 3, epoch=1)
        successor, request = await story.asked()
        assert request.get(b"Last-Event-ID") == b"2"
        await successor.send(STREAM + part(notes(3, 4, epoch=1)))
        assert (await client.peer.head())[0] == b"HTTP/1.1 200 OK"
        assert note(3, 1) in await client.peer.chunk()
        assert story.verdicts() == ["epoch"]


async def test_t5_a_get_with_a_body_is_asked_again_with_it(proxy):
    """Odd, but legal: each ask is the whole request."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        data = story.again(3, b"Content-Length: 4") + b"body"
        client, server, request = await story.ask(data)
        assert request.body == b"body"
        await server.send(stream())
        server, request = await story.asked()
        assert (request.body, request.get(b"Last-Event-ID")) == (b"body", b"3")
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
