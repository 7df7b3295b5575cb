"""Session fixation: nobody else's id is carried into a new session, and no made-up id gets a record (L1, L2)."""

from __future__ import annotations

import gzip
import json
import time
import zlib

import pytest

from epochgate.relay.headers import LAST_CHUNK
from relay.wire import chunked, get, ok
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


TEXT = compact(HELLO).decode()
PING = compact(HELLO | {"method": "ping"})
BOMB = gzip.compress(compact(HELLO | {"params": {"x": "x" * 2_000_000}}))
READABLE = {
    "gzip": (gzip.compress(compact(HELLO)), b"Content-Encoding: gzip"),
    "gzip of two members": (gzip.compress(b" ") + gzip.compress(compact(HELLO)), b"content-encoding: X-GZIP"),
    "deflate": (zlib.compress(compact(HELLO)), b"Content-Encoding: deflate"),
    "gzip of UTF-16": (gzip.compress(TEXT.encode("utf-16")), b"Content-Encoding: gzip"),
    "UTF-16": (TEXT.encode("utf-16"), b"Content-Type: application/json; charset=utf-16"),
    "UTF-16 without a mark": (TEXT.encode("utf-16-be"), b"X: y"),
    "UTF-32": (TEXT.encode("utf-32-le"), b"X: y"),
    "UTF-16 with escapes": (ESCAPED.decode().encode("utf-16-le"), b"X: y"),
}
DOUBTFUL = {
    "a coding that is not known": (b"\x0b\x02\x80", b"Content-Encoding: br"),
    "two codings": (gzip.compress(gzip.compress(compact(HELLO))), b"Content-Encoding: gzip, gzip"),
    "two fields": (gzip.compress(PING), b"Content-Encoding: gzip\r\nContent-Encoding: br"),
    "a coding that some servers do not know": (compact(HELLO), b"Content-Encoding: br"),
    "half a coding": (gzip.compress(compact(HELLO))[:-20], b"Content-Encoding: gzip"),
    "a bomb": (BOMB, b"Content-Encoding: gzip"),
    "another charset": (TEXT.encode("utf-7").replace(b"init", b"+AGk-nit"), JSON + b";charset=utf-7"),
    "an escaped charset": (PING, JSON + b'; Charset = "utf\\-7"'),
    "nested deep": (compact(HELLO)[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"X: y"),
    "no JSON for a strict reader": (b"/* */" + compact(HELLO), b"X: y"),
    "two documents": (PING + b"\n" + compact(HELLO), b"X: y"),
    "a form": (b"json=" + compact(HELLO), b"X: y"),
    "the first of two methods": (compact(HELLO)[:-1] + b',"method":"ping"}', b"X: y"),
    "in capitals": (compact(HELLO).replace(b'"method"', b'"Method"'), b"X: y"),
}


@pytest.mark.parametrize(("body", "field"), [*READABLE.values(), *DOUBTFUL.values()], ids=[*READABLE, *DOUBTFUL])
async def test_l2_not_in_a_form_either_that_only_the_server_reads(guarded, body, field):
    """The body goes on as it came. What it would resume goes with the session that it would take over."""
    async with guarded() as relay:
        last = b"Last-Event-ID: 77"
        data = get(b"/mcp", field, IDS["made up"], last, b"Content-Length: %d" % len(body), method=b"POST") + body
        client, server, request = await relay.asked(data)
        assert request.get(b"Mcp-Session-Id") is None
        assert request.get(b"Last-Event-ID") is None
        assert request.body == body
        for line in field.split(b"\r\n"):
            assert tuple(line.split(b": ", 1)) in request.fields
        await server.send(reply(200, result(1), JSON))
        assert (await client.message()).status == 200


@pytest.mark.parametrize(("body", "field"), READABLE.values(), ids=READABLE)
async def test_l2_l1_the_coded_initialize_of_a_fenced_session_opens_a_new_one(guarded, body, field):
    granted = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
    async with guarded() as relay:
        story = await fenced(relay)
        client, server, request = await story.ask(get(b"/mcp", field, SESSION, b"Content-Length: %d" % len(body),
                                                      method=b"POST") + body)  # fmt: skip
        assert request.get(b"Mcp-Session-Id") is None
        new = b"Mcp-Session-Id: S2"
        await server.send(reply(200, compact({"jsonrpc": "2.0", "id": 1, "result": granted}), JSON, new))
        await client.rest()
        assert relay.context.ledger.get(b"S2", time.time()) is not None
        await story.fenced("epoch_changed")


@pytest.mark.parametrize(("body", "field"), DOUBTFUL.values(), ids=DOUBTFUL)
async def test_f2_what_cannot_be_read_is_refused_to_a_fenced_session(guarded, body, field):
    async with guarded() as relay:
        story = await fenced(relay)
        data = get(b"/mcp", field, SESSION, b"Content-Length: %d" % len(body), method=b"POST") + body
        if field.startswith(b"Content-Encoding: br") and body == compact(HELLO):
            assert (await story.ask(data))[2].get(b"Mcp-Session-Id") is None  # some servers read it as it is
        else:
            client = await story.send(data)
            assert (await client.error())["data"] == {"reason": "epoch_changed"}
            assert await relay.unasked()


CALLS = {
    "plain": (PING, JSON),
    "with a charset": (PING, JSON + b'; Charset="UTF-8"'),
    "gzip": (gzip.compress(PING), b"Content-Encoding: gzip"),
    "UTF-16": (PING.decode().encode("utf-16"), JSON + b"; charset=UTF-16"),
    "that speaks of it": (compact(HELLO | {"method": "ping", "params": {"method": "initialize"}}), JSON),
    "in a batch": (compact([{"method": "ping"}, 1, "initialize", {"method": ["initialize"]}]), JSON),
    "with an odd id": (compact(HELLO | {"method": "ping", "id": {}}), JSON),
    "nothing": (b"", JSON),
    "too long for a handshake": (compact(HELLO | {"params": {"x": "x" * 1_100_000}}) + b"}", JSON),
}


@pytest.mark.parametrize(("body", "field"), CALLS.values(), ids=CALLS)
async def test_l2_other_requests_of_a_session_that_is_not_known_here_keep_its_id(guarded, body, field):
    """A proxy that has just been started, say. More than 1 MiB is not looked through."""
    async with guarded() as relay:
        last = b"Last-Event-ID: 77"
        data = get(b"/mcp", field, SESSION, last, b"Content-Length: %d" % len(body), method=b"POST") + body
        client, server, request = await relay.asked(data)
        assert (request.get(b"Mcp-Session-Id"), request.get(b"Last-Event-ID")) == (b"S1", b"77")
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


@pytest.mark.parametrize("framing", ["whole", "escaped", "gzip", *SPLITS])
async def test_l1_a_session_that_is_granted_anew_loses_its_record(guarded, framing):
    """Whatever the shape in which it is asked for, and wherever the body is cut: cursors of before are unknown."""
    body = ESCAPED if framing == "escaped" else INITIALIZE["plain"]
    body = gzip.compress(body) if framing == "gzip" else body
    data = hello(body, SESSION, *([b"Content-Encoding: gzip"] if framing == "gzip" else []))
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


async def test_t6_what_takes_long_to_read_is_read_beside_the_traffic(guarded):
    """Anybody may send it: small, coded, and of the kind that is read slowly. Others do not wait for it."""
    slow = gzip.compress(b"[NaN," + b'"\\u0041",{"a":0},' * 50_000 + b"1]")
    assert len(slow) < 4000
    async with guarded() as relay:
        one, two = await relay.connect(), await relay.connect()
        await one.send(
            get(b"/slow", IDS["made up"], b"Content-Encoding: gzip", b"Content-Length: %d" % len(slow), method=b"POST")
            + slow
        )
        await two.send(get(b"/quick"))
        for target in (b"/quick", b"/slow"):
            server = await relay.accept()
            assert (await server.request()).target == target
            await server.send(ok(b"", b"Connection: close"))
        for client in (one, two):
            assert (await client.message()).status == 200
