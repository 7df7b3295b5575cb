"""Interim answers, answers without a body, and requests for another protocol."""

from __future__ import annotations

import pytest

from relay.wire import CHUNKED_OK, chunked, get, ok, post, settle

EXPECT = (b"Expect: 100-continue", b"Content-Length: 5")


async def test_interim_100_of_the_upstream_is_passed_on(relay):
    client = await relay.connect()
    await client.send(get(b"/", *EXPECT, method=b"POST"))
    server = await relay.accept()
    _, fields = await server.head()
    assert (b"Expect", b"100-continue") in fields
    await server.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert (await client.message()).start == b"HTTP/1.1 100 Continue"
    await client.send(b"hello")
    assert await server.exactly(5) == b"hello"
    await server.send(ok(b"done"))
    assert (await client.message()).body == b"done"


async def test_interim_100_is_not_invented(relay):
    """The upstream refuses at once; the client sends no body, and its connection ends with the answer."""
    client = await relay.connect()
    await client.send(get(b"/", *EXPECT, method=b"POST"))
    server = await relay.accept()
    await server.head()
    await server.send(ok(b"no").replace(b"200 OK", b"417 No"))
    answer = await client.message()
    assert (answer.status, answer.body) == (417, b"no")
    assert await client.rest() == b""
    assert await server.gone()


async def test_interim_100_may_be_missing(relay):
    """A client that does not wait for ever sends its body; the upstream, an old one, never says 100."""
    client = await relay.connect()
    await client.send(get(b"/", *EXPECT, method=b"POST"), b"hello")
    server = await relay.accept()
    assert (await server.request()).body == b"hello"
    await server.send(ok(b"done"))
    assert (await client.message()).body == b"done"
    await client.send(get(b"/next"))
    assert (await server.request()).target == b"/next"


@pytest.mark.parametrize("split", [False, True])
async def test_interim_answers_come_before_the_final_one(relay, split):
    client, server, _ = await relay.asked(get())
    data = (
        b"HTTP/1.1 102 Processing\r\n\r\n"
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nlink: </b>\r\nConnection: x\r\nX: 1\r\n\r\n" + ok(b"final")
    )
    await server.send(*((data[at : at + 1] for at in range(len(data))) if split else (data,)))
    assert (await client.message()).start == b"HTTP/1.1 102 Processing"
    hints = await client.message()
    assert (hints.status, hints.fields) == (103, [(b"Link", b"</a>"), (b"link", b"</b>")])
    assert (await client.message()).body == b"final"
    await client.send(get(b"/next"))
    assert (await server.request()).target == b"/next"


async def test_interim_answers_are_kept_from_http10_clients(relay):
    client, server, _ = await relay.asked(get().replace(b"HTTP/1.1", b"HTTP/1.0"))
    await server.send(b"HTTP/1.1 103 Early Hints\r\n\r\n" + ok(b"final"))
    assert (await client.message()).body == b"final"


async def test_answers_without_a_body(relay):
    """HEAD with a length, 204, 304, and 202 with or without an empty body: no byte of a body, nothing made up."""
    client = await relay.connect()
    cases = [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n", [(b"Content-Length", b"1234")]),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n", [(b"X", b"y")]),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n", []),
        (b"GET", b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\n\r\n', [(b"ETag", b'"x"')]),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", [(b"Content-Length", b"99")]),
        (b"POST", b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", [(b"Content-Length", b"0")]),
        (b"GET", b"HTTP/1.1 205 Reset\r\nContent-Length: 0\r\n\r\n", [(b"Content-Length", b"0")]),
    ]
    server = None
    for method, data, fields in cases:
        await client.send(get(method=method))
        if server is None or await server_left(server):
            server = await relay.accept()
        await server.request()
        await server.send(data)
        answer = await client.message(bodiless=method == b"HEAD")
        assert (answer.start, answer.fields, answer.body) == (data.partition(b"\r\n")[0], fields, b"")


async def server_left(server) -> bool:
    """Whether the proxy has given this connection up (an answer could have been one that ends with it)."""
    try:
        server.unread = await server.receive()
    except ConnectionResetError:
        return True
    return not server.unread


async def test_a_202_that_ends_with_the_connection(relay):
    client, server, _ = await relay.asked(post(b"{}"))
    await server.send(b"HTTP/1.1 202 Accepted\r\n\r\n")
    server.close()
    answer = await client.message()
    assert (answer.status, answer.body, answer.get(b"content-type")) == (202, b"", None)
    await client.send(get(b"/next"))
    assert (await (await relay.accept()).request()).target == b"/next"


@pytest.mark.parametrize("token", [b"websocket", b"h2c", b"TLS/1.0, foo/2"])
async def test_upgrade_is_not_passed_on(relay, token):
    """The request is an ordinary one for the upstream, and so are those after it."""
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: " + token,
        b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
    )
    client, server, request = await relay.asked(get(b"/1", *upgrade) + get(b"/2", *upgrade) + get(b"/3"))
    assert [name for name, _ in request.fields] == [b"Host", b"Via"]
    for target in (b"/1", b"/2", b"/3"):
        if target != b"/1":
            request = await server.request()
        assert request.target == target
        await server.send(ok(target))
        assert (await client.message()).body == target


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("framing", ["sized", "empty", "chunked"])
async def test_upgrade_of_a_request_with_a_body(relay, framing, split):
    """Java's client asks for h2c with its first POST: the body is read all the same, and the requests after it."""
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA")
    body = {"sized": b"hello", "empty": b"", "chunked": b"hello"}[framing]
    if framing == "chunked":
        data = get(b"/1", *upgrade, b"Transfer-Encoding: chunked", method=b"POST") + chunked(b"he", b"llo")
    else:
        data = post(body, *upgrade)
    data += get(b"/2")
    client = await relay.connect()
    await client.send(*((data[at : at + 1] for at in range(len(data))) if split else (data,)))
    server = await relay.accept()
    request = await server.request()
    assert (request.body, request.framing) == (body, "chunked" if framing == "chunked" else "sized")
    await server.send(ok(b"1"))
    assert (await client.message()).body == b"1"
    assert (await server.request()).target == b"/2"
    await server.send(ok(b"2"))
    assert (await client.message()).body == b"2"


async def test_upgrades_in_great_number(relay):
    """They cannot exhaust the stack."""
    upgrade = get(b"/", b"Connection: Upgrade", b"Upgrade: x")
    count = 2000
    client = await relay.connect()
    await client.send(upgrade * count)
    server = await relay.accept()
    for _ in range(count):
        await server.request()
        await server.send(ok())
        await client.message()


@pytest.mark.parametrize(
    "data", [b"Upgrade: h2,h2c\r\nConnection: Upgrade\r\n", b"Connection: Upgrade\r\nUpgrade: x\r\n"]
)
async def test_an_upstream_may_offer_an_upgrade(relay, data):
    """In a 200 as in a 426: it is dropped, and the answer passes."""
    client = await relay.connect()
    server = None
    for start in (b"HTTP/1.1 200 OK", b"HTTP/1.1 426 Upgrade Required"):
        await client.send(get())
        server = server or await relay.accept()
        await server.request()
        await server.send(start + b"\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 1\r\n\r\na")
        answer = await client.message()
        assert (answer.start, answer.body, answer.get(b"upgrade")) == (start, b"a", None)


@pytest.mark.parametrize("method", [b"TRACE", b"OPTIONS", b"PATCH", b"PROPFIND", b"M-SEARCH", b"QUERY"])
async def test_s2_any_method_of_http_is_forwarded(relay, method):
    client, server, request = await relay.asked(get(b"/mcp", b"Access-Control-Request-Method: POST", method=method))
    assert request.start == method + b" /mcp HTTP/1.1"
    await server.send(b"HTTP/1.1 204 No Content\r\nAccess-Control-Allow-Origin: *\r\n\r\n")
    assert (await client.message()).get(b"access-control-allow-origin") == b"*"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\n\r\nbytes", 501),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\nContent-Length: 5\r\n\r\nbytes", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), 400),
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (b"GET / HTTP/0.9\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"GET / HTTP/3.1\r\n\r\n", 400),
        (b"FOO / HTTP/1.1\r\nHost: h\r\n\r\n", 501),
        (b"get / HTTP/1.1\r\nHost: h\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 501),
        (b"\x05\x01\x00", 501),
        (b"\0" * 100, 501),
    ],
)
async def test_what_is_not_served_is_refused_at_once(relay, data, status):
    """Never a 404, which would look like a lost session, and never silence."""
    client = await relay.connect()
    await client.send(data)
    answer = await client.message()
    assert (answer.status, answer.get(b"content-type")) == (status, b"application/json")
    assert await client.gone()
    assert await relay.unasked()


async def test_a_refusal_waits_for_the_answers_before_it(relay):
    client, server, _ = await relay.asked(get(b"/1") + b"GARBAGE\r\n\r\n")
    await settle()
    await server.send(CHUNKED_OK + chunked(b"one"))
    assert (await client.message()).body == b"one"
    assert (await client.message()).status == 501
    assert await client.gone()
