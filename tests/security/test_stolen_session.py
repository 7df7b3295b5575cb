"""A stolen session id without its credentials: no held event, no closed stream, no fence for the owner (R4, F3)."""

from __future__ import annotations

import pytest

from relay.wire import get, post
from resume.story import (
    JSON,
    SESSION,
    STREAM,
    Story,
    began,
    compact,
    note,
    notes,
    part,
    reply,
    result,
    until,
)

MINE = (b"Authorization: Bearer mine", b"Cookie: sid=1")
STRANGERS = {
    "none": (),
    "other token": (b"Authorization: Bearer other", b"Cookie: sid=1"),
    "no cookie": (b"Authorization: Bearer mine",),
    "no token": (b"Cookie: sid=1",),
    "scheme in another case": (b"Authorization: bearer mine", b"Cookie: sid=1"),
    "token twice": (b"Authorization: Bearer mine", b"Authorization: Bearer mine", b"Cookie: sid=1"),
    "both tokens": (b"Authorization: Bearer other", b"Authorization: Bearer mine", b"Cookie: sid=1"),
    "in one field": (b"Authorization: Bearer mine, Cookie: sid=1",),
    "one more key": (*MINE, b"X-API-Key: k"),
    "under other names": (b"X-Authorization: Bearer mine", b"X-Cookie: sid=1"),
    "with underscores": (b"Cookie_: sid=1", b"Authorization: Bearer mine"),
}
LOST = b'{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"}}'


def stolen(fields: tuple[bytes, ...], method: bytes = b"DELETE") -> bytes:
    return get(b"/mcp", SESSION, *fields, method=method)


def stolen_call(fields: tuple[bytes, ...]) -> bytes:
    return post(compact({"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {}}), SESSION, *fields)


@pytest.mark.parametrize("fields", STRANGERS.values(), ids=STRANGERS)
async def test_held_events_go_to_their_owner_alone(guarded, fields):
    """The upstream is asked with the stranger's own credentials, and its no leaves the stream to its owner."""
    async with guarded() as relay:
        story = await began(relay, fields=MINE)
        await story.leave()
        await story.server.send(part(notes(4)))
        stranger, server, request = await story.ask(story.again(3, fields=fields))
        given = {b"%b: %b" % field for field in request.fields}
        assert set(fields) <= given
        assert not (set(MINE) - set(fields)) & given
        await server.send(reply(401, b"who are you"))
        assert (await stranger.rest(), stranger.status) == (b"who are you", 401)
        client = await story.resume(3)
        await client.until(notes(4))
        assert story.verdicts() == ["connection"]


@pytest.mark.parametrize("fields", STRANGERS.values(), ids=STRANGERS)
async def test_a_stream_that_flows_is_not_taken_over(guarded, fields):
    async with guarded() as relay:
        story = await began(relay, fields=MINE)
        stranger, server, _ = await story.ask(story.again(3, fields=fields))
        await server.send(reply(403))
        await stranger.rest()
        await story.server.send(part(notes(4)))
        await story.answer.until(notes(4))


ATTEMPTS = {
    "resume, the upstream knows no such session": (lambda s, f: s.again(3, fields=f), reply(404, LOST, JSON)),
    "resume, it is a bad request": (lambda s, f: s.again(3, fields=f), reply(400, b"Invalid session ID")),
    "resume, no stream here": (lambda s, f: s.again(3, fields=f), reply(405)),
    "new stream, no such session": (lambda s, f: s.again(None, fields=f), reply(404, LOST, JSON)),
    "new stream, invalid session": (lambda s, f: s.again(None, fields=f), reply(400, b"Invalid session ID")),
    "call, no such session": (lambda s, f: stolen_call(f), reply(404, LOST, JSON)),
    "call, server not initialized": (lambda s, f: stolen_call(f), reply(400, b"Server not initialized")),
    "call, forbidden": (lambda s, f: stolen_call(f), reply(403, LOST, JSON)),
    "call, another epoch in the answer": (lambda s, f: stolen_call(f), reply(200, result(9, 2), JSON)),
    "call, another epoch in a field": (
        lambda s, f: stolen_call(f), reply(200, result(9), JSON, b"Mcp-Session-Epoch: 2"),
    ),
    "call, another epoch in an error": (
        lambda s, f: stolen_call(f), reply(401, result(9, 2), JSON, b"Mcp-Session-Epoch: 2"),
    ),
    "delete, forbidden": (lambda s, f: stolen(f), reply(403)),
    "delete, not allowed": (lambda s, f: stolen(f), reply(405)),
    "delete, no such session": (lambda s, f: stolen(f), reply(404, LOST, JSON)),
    "head, no such session": (lambda s, f: stolen(f, b"HEAD"), reply(404)),
    "options, another epoch": (lambda s, f: stolen(f, b"OPTIONS"), reply(204, b"", b"Mcp-Session-Epoch: 2")),
    "initialize, forbidden": (
        lambda s, f: post(b'{"jsonrpc":"2.0","id":0,"method":"initialize"}', SESSION, *f), reply(401),
    ),
    "initialize, another session": (
        lambda s, f: post(b'{"jsonrpc":"2.0","id":0,"method":"initialize"}', SESSION, *f),
        reply(200, result(0), JSON, b"Mcp-Session-Id: S2"),
    ),
    "initialize, no result under this id": (
        lambda s, f: post(b'{"jsonrpc":"2.0","id":0,"method":"initialize"}', SESSION, *f),
        reply(200, LOST, JSON, SESSION),
    ),
}  # fmt: skip


async def is_unharmed(story: Story) -> None:
    """The owner resumes its stream under its epoch, and calls on."""
    story.answer.peer.reset()
    story.server.reset()
    await until(lambda: not story.relay.context.streams)
    client, server, _ = await story.ask(story.again(3))
    await server.send(STREAM + part(notes(4, epoch=1)))
    await client.until(notes(4, epoch=1))
    assert story.verdicts()[-1] == "epoch"
    assert story.session.fence is None
    answered, server, _ = await story.ask(story.call(99))
    await server.send(reply(200, result(99), JSON))
    assert await answered.rest() == result(99)


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
async def test_f3_a_stranger_cannot_fence(guarded, attempt):
    ask, answer = attempt
    async with guarded() as relay:
        story = await began(relay, epoch=1, fields=MINE)
        stranger, server, _ = await story.ask(ask(story, STRANGERS["other token"]))
        await server.send(answer)
        await stranger.begin()
        await is_unharmed(story)


UNASKED = {
    "an unknown cursor": lambda f: get(b"/mcp", SESSION, b"Last-Event-ID: nothing", *f),
    "two session ids": lambda f: get(b"/mcp", SESSION, SESSION, b"Last-Event-ID: 3", *f),
    "two cursors": lambda f: get(b"/mcp", SESSION, b"Last-Event-ID: 3", b"Last-Event-ID: 3", *f),
    "the id as a connection option": lambda f: get(b"/mcp", SESSION, b"Connection: Mcp-Session-Id", *f),
}


@pytest.mark.parametrize("ask", UNASKED.values(), ids=UNASKED)
async def test_f3_what_is_refused_to_a_stranger_is_refused_to_him_alone(guarded, ask):
    async with guarded() as relay:
        story = await began(relay, epoch=1, fields=MINE)
        refused = await story.send(ask(STRANGERS["none"]))
        assert (await refused.begin()).status in (400, 404)
        assert await relay.unasked()
        await is_unharmed(story)


async def test_a_stranger_cannot_use_up_the_owners_errors(guarded):
    """F4: his refused asks are not the owner's first one, and the errors of pending calls do not go to him."""
    async with guarded(policy={"refusal": {"pending_calls": "at-once"}}) as relay:
        story = await began(relay, epoch=1, fields=MINE)
        await story.cut()
        stranger = await story.resume("nothing", fields=STRANGERS["other token"])
        assert await stranger.told() == []
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=2)))
        assert await client.told() == [(5, "epoch_changed")]


async def test_many_strangers_do_not_drive_out_the_record(guarded):
    """L5: made-up ids create no record; the owner's stays."""
    async with guarded(limits={"sessions": 2, "streams_per_session": 2}) as relay:
        story = await began(relay, epoch=1, fields=MINE)
        for number in range(20):
            made_up = b"Mcp-Session-Id: made-up-%d" % number
            client, server, _ = await story.ask(get(b"/mcp", made_up))
            await server.send(STREAM + part(note(1)) + b"0\r\n\r\n")
            await client.begin()
        assert len(relay.context.ledger.sessions()) == 1
        await is_unharmed(story)


async def test_f3_observe_counts_no_fence_that_enforce_would_not_set(guarded):
    async with guarded(policy={"mode": "observe"}) as relay:
        story = await began(relay, fields=MINE)
        for fields, fences in ((STRANGERS["none"], 0), (MINE, 1)):
            client, server, _ = await story.ask(stolen_call(fields))
            await server.send(reply(404, LOST, JSON))
            assert await client.rest() == LOST
            assert sum(story.telemetry.fences.values()) == fences
