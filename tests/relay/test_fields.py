"""T2: fields keep their case, order and repetition; only hop-by-hop ones are dropped, and nothing is invented."""

from __future__ import annotations

import contextlib

import pytest

from relay.wire import get, ok, post, running

HOP_BY_HOP = [
    b"Keep-Alive: timeout=5", b"Proxy-Connection: keep-alive", b"Proxy-Authenticate: Basic", b"TE: trailers",
    b"Proxy-Authorization: Basic eA==", b"Trailer: X-Sum", b"Upgrade: foo/2", b"X-Bar: 1", b"x-BAR: 2",
    b"HTTP2-Settings: AA",
]  # fmt: skip
CONNECTION = [b"Connection: keep-alive, x-bar", b"connection:  HTTP2-SETTINGS ,,"]
ODD = [
    b"mcp-session-ID: abc", b"X-Twice: 1", b"x-twice: 2", b"X-TWICE: 1", b"Cookie: a=1", b"Cookie: b=2", b"X-Empty:",
    b"X-Latin: caf\xe9", b"X-Utf8: caf\xc3\xa9", b"X-Comma: a, b,,c", b"X_Under_Score!#$%&'*+-.^`|~: ok",
    b'X-Quote: "a\\"b"',
    b"X-Inner: a \t b", b"Via: 1.0 fred, 1.1 p.example", b'Warning: 199 - "x"', b"1: one",
]  # fmt: skip


def pairs(*lines: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]


async def test_t2_request_fields_arrive_as_they_were(relay):
    _, server, request = await relay.asked(get(b"/", *ODD))
    host = b"Host: 127.0.0.1:%d" % relay.listener.getsockname()[1]
    assert request.fields == pairs(host, *ODD, b"Via: 1.1 epochgate")
    await server.send(ok())


async def test_t2_answer_fields_arrive_as_they_were(relay):
    client, server, _ = await relay.asked(get())
    fields = [
        *ODD,
        b"Set-Cookie: a=1",
        b"Set-Cookie: b=2",
        b"set-cookie: a=1",
        b'WWW-Authenticate: Basic, Digest x="y"',
    ]
    await server.send(ok(b"", *fields))
    assert (await client.message()).fields == pairs(*fields, b"Content-Length: 0")


async def test_t2_hop_by_hop_fields_are_dropped_from_requests(relay):
    """With those that `Connection` names, in any case and repetition."""
    client, server, request = await relay.asked(get(b"/", b"X-A: 1", *CONNECTION, *HOP_BY_HOP, b"X-B: 2"))
    assert [name for name, _ in request.fields] == [b"Host", b"X-A", b"X-B", b"Via"]
    await server.send(ok())
    assert (await client.message()).status == 200


async def test_t2_hop_by_hop_fields_are_dropped_from_answers(relay):
    client, server, _ = await relay.asked(get())
    await server.send(ok(b"x", b"X-A: 1", *CONNECTION, *HOP_BY_HOP, b"X-B: 2"))
    answer = await client.message()
    assert [name for name, _ in answer.fields] == [b"X-A", b"X-B", b"Content-Length"]


@pytest.mark.parametrize("name", [b"Content-Length", b"CONTENT-LENGTH ,,"])
async def test_t2_connection_cannot_take_the_length_of_an_answer_away(relay, name):
    """Without it the client would read the next answer as a part of this one."""
    client, server, _ = await relay.asked(get() + get(b"/next"))
    await server.send(ok(b"one", b"Connection: x-bar, " + name, b"X-Bar: 1"))
    answer = await client.message()
    assert (answer.body, answer.fields) == (b"one", [(b"Content-Length", b"3")])
    assert (await server.request()).target == b"/next"
    await server.send(ok(b"two"))
    assert (await client.message()).body == b"two"


JUDGED_BY = (
    b"Mcp-Session-Id", b"mcp-protocol-version", b"LAST-EVENT-ID", b"Authorization", b"content-length", b"Host",
    b"Content-Type", b"content-encoding", b"Cookie", b"x-api-key",
)  # fmt: skip


@pytest.mark.parametrize("name", JUDGED_BY)
async def test_t2_connection_cannot_take_away_what_a_request_is_judged_by(relay, name):
    """400, the upstream is not asked, and the connection stays usable."""
    client = await relay.connect()
    await client.send(post(b"body", b"Connection: keep-alive, " + name, b"Mcp-Session-Id: S1"))
    answer = await client.message()
    assert answer.status == 400
    assert answer.get(b"content-type") == b"application/json"
    assert b'"id"' not in answer.body
    assert await relay.unasked()
    await client.send(get())
    server = await relay.accept()
    await server.request()
    await server.send(ok(b"fine"))
    assert (await client.message()).body == b"fine"


@pytest.mark.parametrize(("mode", "status"), [("enforce", 400), ("observe", 400), ("bypass", 200)])
async def test_t2_nor_the_credentials_of_a_policy(mode, status):
    """They are those of whoever asks; where nobody looks, any field may be one of the connection."""
    async with running(policies=[{"mode": mode, "credentials": ["X-User"]}]) as relay:
        client = await relay.connect()
        await client.send(get(b"/mcp", b"X-User: bob", b"Connection: close, x-user"))
        if status == 200:
            server = await relay.accept()
            assert (await server.request()).get(b"x-user") is None
            await server.send(ok())
        assert (await client.message()).status == status
        assert await relay.unasked()


async def test_t2_nothing_is_invented(relay):
    client, server, request = await relay.asked(b"DELETE /x HTTP/1.1\r\n\r\n")
    host = b"127.0.0.1:%d" % relay.listener.getsockname()[1]
    assert request.fields == [(b"Host", host), (b"Via", b"1.1 epochgate")]
    await server.send(ok(b"x"))
    answer = await client.message()
    assert (answer.start, answer.fields) == (b"HTTP/1.1 200 OK", [(b"Content-Length", b"1")])


async def test_t2_nothing_is_invented_for_a_body(relay):
    _, server, request = await relay.asked(post(b"{}"))
    assert [name for name, _ in request.fields] == [b"Host", b"Content-Length", b"Via"]
    await server.send(ok())


async def test_t2_host_of_the_client_is_kept_where_asked():
    async with running(upstream={"host": "client"}) as relay:
        _, server, request = await relay.asked(get())
        assert request.get(b"host") == b"proxy.test"
        await server.send(ok())


async def test_t2_reason_phrases_pass(relay):
    client = await relay.connect()
    server = None
    for reason in (b"", b" ", b" Fine  and dandy", b" caf\xe9"):
        await client.send(get())
        server = server or await relay.accept()
        await server.request()
        await server.send(b"HTTP/1.1 299" + reason + b"\r\nContent-Length: 0\r\n\r\n")
        assert (await client.message()).start.rstrip() == b"HTTP/1.1 299" + reason.rstrip()


@pytest.mark.parametrize("count", [1, 1500], ids=["one field", "many fields"])
async def test_t2_heads_of_64_kib_pass_both_ways(relay, count):
    value = b"v" * (63 * 1024 // count - 12)
    fields = [b"X-%04d: %b" % (number, value) for number in range(count)]
    client, server, request = await relay.asked(get(b"/", *fields))
    assert request.fields[1:-1] == pairs(*fields)
    await server.send(ok(b"x", *fields))
    assert (await client.message()).fields[:-1] == pairs(*fields)


async def test_t2_long_targets_pass(relay):
    target = b"/" + b"a%20" * 15_000
    _, server, request = await relay.asked(get(target))
    assert request.target == target
    await server.send(ok())


@pytest.mark.parametrize(
    "data",
    [
        get(b"/", b"X-Secret: " + b"s" * 66_000),
        get(b"/" + b"s" * 66_000),
        get(b"/", *(b"X-%d: secret" % number for number in range(5000))),
        get(b"/", b"X-Secret: " + b"s" * 5_000_000),
        get(b"/" + b"s" * 5_000_000),
        b"GET / HTTP/1.1\r\nHost: a\r\nX-Secret: " + b"s" * 200_000,
    ],
    ids=["field", "target", "many fields", "huge field", "huge target", "unfinished"],
)
async def test_t2_larger_heads_of_requests_get_431(relay, data):
    """The whole answer arrives although the client is still sending, and says nothing of what was sent."""
    client = await relay.connect()
    await client.send(data)
    answer = await client.message()
    assert answer.status == 431
    assert b"sss" not in answer.body
    assert b"secret" not in answer.body
    assert await client.gone()
    assert await relay.unasked()


@pytest.mark.parametrize("start", [b"0\r\nX: ", b"1;name="], ids=["trailer", "chunk extension"])
async def test_t2_what_has_no_end_in_a_body_gets_431(relay, start):
    """A trailer or a chunk extension is not kept without a limit; the upstream's half of the request is aborted."""
    client = await relay.connect()
    await client.send(get(b"/", b"Transfer-Encoding: chunked", method=b"POST") + start)
    server = await relay.accept()
    await server.head()
    await client.send(b"x" * 5_000_000)
    assert (await client.message()).status == 431
    assert await client.gone()
    assert await server.rest() == b""


async def test_t2_trailers_end_here(relay):
    head = get(b"/", b"Transfer-Encoding: chunked", method=b"POST")
    client, server, request = await relay.asked(head + b"1\r\na\r\n0\r\nAuthorization: x\r\n\r\n")
    assert request.body == b"a"
    assert request.get(b"authorization") is None
    await server.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\nSet-Cookie: x\r\n\r\n")
    answer = await client.message()
    assert (answer.body, answer.get(b"set-cookie")) == (b"b", None)
    await client.send(get(b"/next"))
    assert (await server.request()).target == b"/next"
    await server.send(ok())
    assert (await client.message()).status == 200


@pytest.mark.parametrize("kind", ["field", "many", "unfinished", "trailer"])
async def test_t2_larger_heads_of_answers_become_502(relay, kind):
    client, server, _ = await relay.asked(get())
    data = {
        "field": ok(b"x", b"Set-Cookie: " + b"s" * 66_000),
        "many": ok(b"x", *(b"X-%d: secret" % number for number in range(5000))),
        "unfinished": b"HTTP/1.1 200 OK\r\nX: " + b"s" * 2_000_000,
        "trailer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"s" * 8_000_000,
    }[kind]
    await attempt(server, data)
    if kind == "trailer":  # the head is out: the answer breaks off
        await client.head()
        assert await client.rest() == b""
        return
    answer = await client.message()
    assert answer.status == 502
    assert b"sss" not in answer.body
    assert b"secret" not in answer.body


async def attempt(server, data):
    """Send to somebody who may cut it off."""
    with contextlib.suppress(ConnectionError):
        await server.send(data)


@pytest.mark.parametrize("name", [b"host", b"Mcp-Session-Id", b"x, HOST"])
async def test_t2_a_field_that_judges_is_no_connection_option(relay, name):
    client = await relay.connect()
    await client.send(get(b"/", b"Connection: " + name))
    assert (await client.message()).status == 400
    assert await relay.unasked()
