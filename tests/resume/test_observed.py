"""Section 9: `observe` changes no byte and no field of any story, and counts what `enforce` would have decided."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from epochgate.relay.context import Policies
from epochgate.settings import Settings
from relay.wire import get, running
from resume.story import (
    JSON,
    LAST_CHUNK,
    OVERLAP,
    SESSION,
    STREAM,
    Answer,
    Story,
    began,
    coded,
    event,
    gzipped,
    note,
    notes,
    part,
    priming,
    reply,
    response,
    result,
    stream,
)

Tale = Callable[[Story], Awaitable[None]]
Seen = list[object]


class Told(Story):
    """A story that writes down what both ends saw."""

    def __init__(self, story: Story) -> None:
        super().__init__(story.relay, story.fields)
        self.answer, self.server = story.answer, story.server
        self.seen: Seen = []

    async def get(self, cursor: object, *pieces: bytes, ends: bool = True, more: tuple[bytes, ...] = ()) -> Answer:
        """A resume that the upstream answers with these pieces, each read before the next; it ends, or is broken."""
        client, server, request = await self.ask(self.again(cursor, *more))
        self.seen.append((request.start, request.fields, request.body))
        for number, piece in enumerate(pieces):
            await server.send(STREAM * (number == 0) + part(piece))
            await client.until(piece)
        if ends:
            await server.send(LAST_CHUNK if pieces else stream())
        else:
            server.reset()
        await self.write_down(client)
        return client

    async def answered(self, data: bytes, answer: bytes) -> None:
        """Any request, and the upstream's whole answer."""
        client, server, request = await self.ask(data)
        self.seen.append((request.start, request.fields, request.body))
        await server.send(answer)
        await self.write_down(client)

    async def write_down(self, client: Answer) -> None:
        await client.rest()
        self.seen.append((client.start, client.fields, bytes(client.data), client.end))


async def healthy(story: Told) -> None:
    await story.get(3, notes(4, epoch=1), response(5, 1))


async def inclusive(story: Told) -> None:
    await story.get(3, notes(2, 3, epoch=1), notes(4, epoch=1))


async def another_epoch(story: Told) -> None:
    await story.get(3, notes(4, epoch=2), notes(5, epoch=2))
    await story.answered(story.call(9), reply(200, result(9, 2), JSON))
    await story.get(5, notes(6, epoch=2))


async def another_epoch_later(story: Told) -> None:
    await story.get(3, notes(4, epoch=1), notes(5, epoch=2), response(5, 2), ends=False)


async def lost_events(story: Told) -> None:
    await story.get(1, notes(3, epoch=1), notes(5, epoch=1))


async def altered_events(story: Told) -> None:
    await story.get(1, event(2, note(22, 1)), notes(3, epoch=1))


async def unknown_cursor(story: Told) -> None:
    await story.get("made-up", notes(900))


async def unknown_session(story: Told) -> None:
    await story.answered(story.again(3).replace(b"S1", b"S2"), stream(notes(4)))


async def nothing_comes(story: Told) -> None:
    await story.get(3)
    await story.get(3, b": hello\n\n", priming("p"))
    await story.get(3, b"retry: 5\n\n", ends=False)


async def no_epoch_in_it(story: Told) -> None:
    await story.get(3, notes(4), notes(5))


async def in_a_coding(story: Told) -> None:
    body = gzipped(notes(4, epoch=2))
    field = b"Accept-Encoding: gzip, deflate"
    await story.answered(story.again(3, field), coded(b"gzip") + part(body) + LAST_CHUNK)
    await story.answered(story.again(3, field), coded(b"br") + part(b"\x0b\x02") + LAST_CHUNK)


async def sized(story: Told) -> None:
    body = notes(3, 4, epoch=1)
    await story.answered(story.again(3), reply(200, body, b"Content-Type: text/event-stream"))


async def no_stream(story: Told) -> None:
    for status in (202, 401, 404, 405, 409, 502, 503):
        await story.answered(story.again(3), reply(status, b"no valid session", b"Content-Type: text/plain"))


async def lost_session(story: Told) -> None:
    for data in (story.call(9), story.again(3), get(b"/mcp", SESSION, method=b"DELETE")):
        await story.answered(data, reply(404, b"Session not found", b"Content-Type: text/plain"))
        await story.answered(data, reply(400, b"No valid session ID", b"Content-Type: text/plain"))
    await story.get(3, notes(4, epoch=1))


async def deleted(story: Told) -> None:
    await story.answered(
        get(b"/mcp", SESSION, method=b"DELETE"), reply(204)[: -len(b"Content-Length: 0\r\n\r\n")] + b"\r\n"
    )
    await story.answered(story.call(9), reply(200, result(9, 1), JSON))
    await story.get(3, notes(4, epoch=1))


async def repeated_fields(story: Told) -> None:
    await story.answered(story.again(3, b"Last-Event-ID: 2", b"mcp-session-id: S2"), stream(notes(4)))


async def stale_initialize(story: Told) -> None:
    await another_epoch(story)
    data = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'
    request = get(b"/mcp", SESSION, b"Content-Length: %d" % len(data), method=b"POST") + data
    await story.answered(request, reply(503))


async def leaves_and_comes_back(story: Told) -> None:
    """The client dies; the upstream hears of it at once, and of the resume."""
    client, server, _ = await story.ask(story.call(6))
    await server.send(STREAM + part(event("b1", note(61, 1))))
    await client.until(note(61, 1))
    client.peer.reset()
    story.seen.append(await server.gone())
    await story.get("b1", event("b2", note(62, 1)), response(6, 1))


# A tale, and the verdicts of `accept: [connection, epoch, overlap]` in it.
TALES: dict[Tale, list[str]] = {
    healthy: ["epoch"],
    inclusive: ["epoch"],
    another_epoch: ["epoch_changed"] * 2,
    another_epoch_later: ["epoch", "epoch_changed"],
    lost_events: ["replay_gap"],
    altered_events: ["replay_mismatch"],
    unknown_cursor: ["unknown_cursor"],
    unknown_session: ["unknown_session"],
    nothing_comes: ["no_event"] * 3,
    no_epoch_in_it: ["epoch_missing"],
    in_a_coding: ["epoch_changed", "unreadable"],
    sized: ["epoch"],
    no_stream: [],
    lost_session: ["epoch"],
    deleted: ["epoch"],
    repeated_fields: ["epoch_missing"],
    stale_initialize: ["epoch_changed"] * 2,
    leaves_and_comes_back: ["connection"],
}


async def told(tale: Tale, mode: str) -> tuple[Seen, Story]:
    policy = {"name": "p", "mode": mode, "resume": OVERLAP | {"first_event_timeout": 30}}
    async with running(policies=[policy], upstream={"host": "client"}) as relay:
        begun = await began(relay, epoch=1)
        await begun.cut()
        story = Told(begun)
        await tale(story)
        assert not relay.context.holds._flows
        return story.seen, story


@pytest.mark.parametrize("tale", TALES, ids=[tale.__name__ for tale in TALES])
async def test_modes_observe_is_bypass_that_counts(tale):
    bypassed, _ = await told(tale, "bypass")
    observed, story = await told(tale, "observe")
    assert observed == bypassed
    assert len(observed) > 1
    assert story.verdicts() == TALES[tale]
    assert all(not decided.enforced for decided in story.telemetry.decided)
    assert {key[3] for key in story.telemetry.resumes} <= {"false"}
    assert {key[2] for key in story.telemetry.fences} <= {"false"}
    assert story.session.fence is None


@pytest.mark.parametrize("mode", ["observe", "bypass"])
async def test_modes_a_bypassed_proxy_counts_nothing(mode):
    _, story = await told(another_epoch, mode)
    assert bool(story.verdicts()) == (mode == "observe")


@pytest.mark.parametrize("came_back", ["after a hold", "after a cut"])
async def test_modes_observe_knows_what_would_have_been_held(proxy, came_back):
    """Only where the client was the one that left. It left once, came back, and then the upstream cut the stream."""
    async with proxy(mode="observe") as relay:
        story = await began(relay)
        story.answer.peer.reset()
        assert await story.server.gone()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4)))
        await client.until(notes(4))
        assert story.verdicts() == ["connection"]
        if came_back == "after a hold":
            client.peer.reset()
            assert await server.gone()
        else:
            server.reset()
            await client.rest()
        client, server, _ = await story.resumed(4, STREAM + part(notes(5)))
        await client.until(notes(5))
        assert story.verdicts()[1:] == (["connection"] if came_back == "after a hold" else ["no_epoch"])


async def test_modes_a_stream_keeps_the_policy_that_it_started_with(proxy):
    """A reload turns observing into enforcing: the stream that flows is not touched, the next resume is judged."""
    async with proxy(mode="observe") as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        enforcing = Settings.model_validate({"upstream": {"url": "http://127.0.0.1:1"}})
        relay.context.policies = Policies(enforcing.compiled())
        await server.send(part(notes(5, epoch=2)))
        await client.until(notes(5, epoch=2))
        server.reset()
        await client.rest()
        client, server, _ = await story.resumed(5, STREAM + part(notes(6, epoch=2)))
        assert (await client.error())["data"] == {"reason": "epoch_changed"}


async def test_modes_who_observes_cuts_no_stream_that_runs_under_enforce(proxy):
    """A reload turns enforcing into observing: a resume of a stream that still flows is forwarded, no more."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        observing = {"upstream": {"url": "http://127.0.0.1:1"}, "policies": [{"name": "mcp", "mode": "observe"}]}
        relay.context.policies = Policies(Settings.model_validate(observing).compiled())
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        await story.server.send(part(notes(5, epoch=1)))
        await story.answer.until(notes(5, epoch=1))
