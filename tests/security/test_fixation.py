"""Session fixation: nobody else's id is carried into a new session, and no made-up id gets a record (L1, L2)."""

from __future__ import annotations

import json
import time

import pytest

from epochgate.relay.headers import LAST_CHUNK
from relay.wire import chunked, get
from resume.story import JSON, SESSION, STREAM, Story, began, compact, notes, part, reply, result

HELLO = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
ESCAPED = compact(HELLO).replace(b"initialize", b"\\u0069nitialize")
INITIALIZE = {
    "plain": compact(HELLO),
    "with spaces": json.dumps(HELLO, indent=4).encode(),
    "in a batch": compact([{"jsonrpc": "2.0", "method": "notifications/x"}, HELLO]),
    "escaped": ESCAPED,
    "after a byte order mark": b"\xef\xbb\xbf" + compact(HELLO),
    "with a second method": compact(HELLO).replace(b'"id"', b'"method":"ping","id"'),
    "with a bad character": compact(HELLO | {"params": {"x": "?"}}).replace(b"?", b"\xff"),
    "with not a number": compact(HELLO).replace(b'"params":{}', b'"params":{"x":NaN}'),
}
IDS = {
    "made up": b"Mcp-Session-Id: planted",
    "a path": b"Mcp-Session-Id: ../../etc/passwd",
    "with bytes beyond ASCII": b"Mcp-Session-Id: S1\xc3\xa9",
    "fenced": SESSION,
}


def hello(body: bytes, *fields: bytes) -> bytes:
    return get(b"/mcp", JSON, *fields, b"Content-Length: %d" % len(body), method=b"POST") + body


async def fenced(relay) -> Story:
    """A session S1 that has been fenced."""
    story = await began(relay, epoch=1)
    await story.cut()
    client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=2)))
    assert (await client.error())["data"] == {"reason": "epoch_changed"}
    return story


@pytest.mark.parametrize("body", INITIALIZE.values(), ids=INITIALIZE)
@pytest.mark.parametrize("planted", IDS.values(), ids=IDS)
async def test_l2_a_planted_id_is_not_carried_into_initialize(guarded, planted, body):
    async with guarded() as relay:
        story = await fenced(relay)
        client, server, request = await story.ask(hello(body, planted))
        assert request.get(b"Mcp-Session-Id") is None
        assert request.body == body
        await server.send(reply(200, result(1), JSON))
        await client.rest()
        await story.fenced("epoch_changed")


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_l2_in_pieces(guarded, size):
    """However the request is cut up, and in whichever framing."""
    body = INITIALIZE["plain"]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    data = get(b"/mcp", JSON, IDS["made up"], b"Transfer-Encoding: chunked", method=b"POST") + chunked(*pieces)
    async with guarded() as relay:
        client = await relay.connect()
        await client.send(*[data[at : at + 40] for at in range(0, len(data), 40)])
        server = await relay.accept()
        request = await server.request()
        assert request.get(b"Mcp-Session-Id") is None
        assert request.body == body
        await server.send(reply(200, result(1), JSON))
        await client.message()


async def test_r1_two_ids_are_refused(guarded):
    async with guarded() as relay:
        client = await relay.connect()
        await client.send(hello(INITIALIZE["plain"], b"Mcp-Session-Id: mine", b"mcp-session-id: planted"))
        assert (await client.message()).status == 400
        assert await relay.unasked()


GRANTS = {
    "a call": (get(b"/mcp", b"Mcp-Session-Id: made-up"), reply(200, result(1), JSON, b"Mcp-Session-Id: made-up")),
    "a stream": (
        get(b"/mcp", b"Mcp-Session-Id: made-up"),
        STREAM[:-2] + b"Mcp-Session-Id: made-up\r\n\r\n" + part(notes(1)) + LAST_CHUNK,
    ),
    "deletion": (get(b"/mcp", b"Mcp-Session-Id: made-up", method=b"DELETE"), reply(204)),
    "an initialize that failed": (
        hello(INITIALIZE["plain"]), reply(503, result(1), JSON, b"Mcp-Session-Id: made-up"),
    ),
    "an initialize without a result": (
        hello(INITIALIZE["plain"]), reply(200, b'{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":""}}', JSON,
        b"Mcp-Session-Id: made-up"),
    ),
    "another method": (
        hello(compact(HELLO | {"method": "ping"})),
        reply(200, b'{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25"}}', JSON,
              b"Mcp-Session-Id: made-up"),
    ),
    "initialize in the parameters": (
        hello(compact(HELLO | {"method": "ping", "params": {"method": "initialize"}})),
        reply(200, b'{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25"}}', JSON,
              b"Mcp-Session-Id: made-up"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "answer"), GRANTS.values(), ids=GRANTS)
async def test_l1_no_record_without_a_granted_initialize(guarded, asked, answer):
    async with guarded() as relay:
        client, server, _ = await relay.asked(asked)
        await server.send(answer)
        await client.message(bodiless=b"204" in answer)
        assert relay.context.ledger.sessions() == []


SPLITS = [1, 20, 38, 40, 45, 60]


@pytest.mark.parametrize("framing", ["whole", "escaped", *SPLITS])
async def test_l1_a_session_that_is_granted_anew_loses_its_record(guarded, framing):
    """Whatever the shape in which it is asked for, and wherever the body is cut: cursors of before are unknown."""
    body = ESCAPED if framing == "escaped" else INITIALIZE["plain"]
    data = hello(body, SESSION)
    at = len(data) - len(body) + framing if isinstance(framing, int) else len(data)
    granted = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
    async with guarded() as relay:
        story = await began(relay)
        former = story.session
        client = await relay.connect()
        await client.send(data[:at])
        server = await relay.accept()
        await server.head()
        if data[at:]:
            await client.send(data[at:])
        assert await server.exactly(len(body)) == body
        await server.send(reply(200, compact({"jsonrpc": "2.0", "id": 1, "result": granted}), JSON, SESSION))
        await client.message()
        now = relay.context.ledger.get(b"S1", time.time())
        assert now is not former
        assert now.locate(b"3") is None
