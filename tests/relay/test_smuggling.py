"""Requests that two servers could read differently: refused, or forwarded in the one form that all read alike.

The upstream here reads what it gets with the strictest of readings; what an attacker hides must never reach it as a
request of its own, and the next honest request on the same connection must get its own answer.
"""

from __future__ import annotations

import pytest

from relay.wire import get, ok, settle

EVIL = b"GET /evil HTTP/1.1\r\nHost: evil\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
NONE = b"0\r\n\r\n"

# Refused, and the connection closed: nothing after it is a request.
REFUSED = {
    "CL and TE": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + NONE + EVIL,
    "TE and CL": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + NONE + EVIL,
    "two CL": HEAD + b"Content-Length: 0\r\nContent-Length: 35\r\n\r\n" + EVIL,
    "two equal CL": HEAD + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n" + EVIL,
    "CL list": HEAD + b"Content-Length: 0, 35\r\n\r\n" + EVIL,
    "CL with sign": HEAD + b"Content-Length: +0\r\n\r\n" + EVIL,
    "negative CL": HEAD + b"Content-Length: -1\r\n\r\n" + EVIL,
    "hex CL": HEAD + b"Content-Length: 0x23\r\n\r\n" + EVIL,
    "CL with a gap": HEAD + b"Content-Length: 3 5\r\n\r\n" + EVIL,
    "empty CL": HEAD + b"Content-Length:\r\n\r\n" + EVIL,
    "fractional CL": HEAD + b"Content-Length: 0.0\r\n\r\n" + EVIL,
    "exponential CL": HEAD + b"Content-Length: 1e1\r\n\r\n" + EVIL,
    "huge CL": HEAD + b"Content-Length: 36893488147419103232\r\n\r\n" + EVIL,
    "CL with a tab in front": HEAD + b"Content-Length:\x0b0\r\n\r\n" + EVIL,
    "TE identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n" + EVIL,
    "TE unknown": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + NONE + EVIL,
    "TE chunked and more": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + NONE + EVIL,
    "TE twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + NONE + EVIL,
    "TE twice chunked": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + NONE + EVIL,
    "TE gzip, chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + NONE + EVIL,
    "TE gzip and chunked": HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + NONE + EVIL,
    "TE quoted": HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n' + NONE + EVIL,
    "TE empty": HEAD + b"Transfer-Encoding:\r\n\r\n" + NONE + EVIL,
    "TE with a vertical tab": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + NONE + EVIL,
    "TE on HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + NONE + EVIL,
    "TE with a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + NONE + EVIL,
    "TE folded": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + NONE + EVIL,
    "TE hidden behind a fold": HEAD + b"X: y\r\n Transfer-Encoding: chunked\r\n\r\n" + NONE + EVIL,
    "TE hidden behind a bare CR": HEAD + b"X: y\rTransfer-Encoding: chunked\r\n\r\n" + NONE + EVIL,
    "TE hidden behind a bare LF": HEAD + b"X: y\nTransfer-Encoding: chunked\r\n\r\n" + NONE + EVIL,
    "TE hidden behind a NUL": HEAD + b"X: y\0\r\nTransfer-Encoding: chunked\r\n\r\n" + NONE + EVIL,
    "NUL in a name": HEAD + b"Transfer\0-Encoding: chunked\r\n\r\n" + NONE + EVIL,
    "no name": HEAD + b": chunked\r\n\r\n" + EVIL,
    "no colon": HEAD + b"Transfer-Encoding\r\n\r\n" + EVIL,
    "space in a name": HEAD + b"X Y: z\r\n\r\n" + EVIL,
    "space before the first field": b"POST / HTTP/1.1\r\n Host: a\r\n\r\n" + EVIL,
    "bare LF everywhere": b"POST / HTTP/1.1\nHost: a\nContent-Length: 0\n\n" + EVIL,
    "bare LF at the end": HEAD + b"\n" + EVIL,
    "CR in the end of the head": HEAD + b"\r\r\n" + EVIL,
    "target with a space": b"POST / x HTTP/1.1\r\nHost: a\r\n\r\n" + EVIL,
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + EVIL,
    "lower-case version": b"POST / http/1.1\r\nHost: a\r\n\r\n" + EVIL,
}

# The head is right, the body is not: what is in front of the fault may have been forwarded, the rest never is.
BROKEN_BODIES = {
    "negative chunk": b"-1\r\na\r\n" + NONE,
    "chunk with a sign": b"+1\r\na\r\n" + NONE,
    "chunk in 0x": b"0x1\r\na\r\n" + NONE,
    "chunk with a space in front": b" 1\r\na\r\n" + NONE,
    "chunk with a space behind": b"1 \r\na\r\n" + NONE,
    "chunk without a size": b"\r\na\r\n" + NONE,
    "chunk of letters": b"xyz\r\na\r\n" + NONE,
    "chunk size of 65 bits": b"10000000000000001\r\na\r\n" + NONE,
    "chunk too long": b"1\r\nab\r\n" + NONE,
    "chunk too short": b"3\r\na\r\n" + NONE,
    "chunk with a bare LF": b"1\na\n0\n\n",
    "extension with a bare LF": b"1;x\ny\r\na\r\n" + NONE,
    "extension with a bare CR": b"1;x\ry\r\na\r\n" + NONE,
    "extension with a NUL": b"1;x\0y\r\na\r\n" + NONE,
    "trailer that frames": b"1\r\na\r\n0\r\nContent-Length: 35\r\n\r\n",
    "trailer with a bare LF": b"1\r\na\r\n0\r\nX: y\nZ: z\r\n\r\n",
    "trailer folded": b"1\r\na\r\n0\r\nX: y\r\n z\r\n\r\n",
}

# Odd, and yet read in one way only: forwarded in the plain form.
PLAIN = {
    "extensions": (CHUNKED + b'1;a="b;c";d\r\nx\r\n0;last\r\n\r\n', b"x"),
    "leading zeros": (CHUNKED + b"00000000000000000000000001\r\nx\r\n000\r\n\r\n", b"x"),
    "upper-case hex": (CHUNKED + b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
    "body that looks like a request": (HEAD + b"Content-Length: %d\r\n\r\n" % len(EVIL) + EVIL, EVIL),
    "chunk that looks like a request": (CHUNKED + b"%x\r\n%b\r\n" % (len(EVIL), EVIL) + NONE, EVIL),
    "leading zeros in CL": (HEAD + b"Content-Length: 0001\r\n\r\nx", b"x"),
    "odd case": (HEAD + b"tRaNsFeR-eNcOdInG:\tCHUNKED\r\n\r\n1\r\nx\r\n0\r\n\r\n", b"x"),
    "empty lines in front": (b"\r\n\r\n" + HEAD + b"Content-Length: 1\r\n\r\nx", b"x"),
    "an underscore": (HEAD + b"Content_Length: 5\r\nContent-Length: 1\r\n\r\nx", b"x"),
    "X-prefixed": (HEAD + b"X-Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\nx", b"x"),
}


async def assert_not_disturbed(relay, server=None) -> None:
    """Somebody else's request gets its own answer."""
    other = await relay.connect()
    await other.send(get(b"/honest"))
    server = server or await relay.accept()
    assert (await server.request()).target == b"/honest"
    await server.send(ok(b"honest"))
    assert (await other.message()).body == b"honest"
    assert await relay.unasked()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("kind", REFUSED)
async def test_refused(relay, kind, split):
    client = await relay.connect()
    data = REFUSED[kind]
    try:
        await client.send(*((data[at : at + 1] for at in range(len(data))) if split else (data,)))
    except ConnectionError:
        assert split
    answer = await client.message()
    assert answer.status in (400, 501), answer
    assert await client.rest() == b""
    assert await relay.unasked()
    await assert_not_disturbed(relay)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("kind", BROKEN_BODIES)
async def test_broken_off(relay, kind, split):
    """The client gets a 400; the upstream sees half a request at most, and then the end of its connection."""
    client = await relay.connect()
    body = BROKEN_BODIES[kind] + EVIL
    await client.send(CHUNKED)
    server = await relay.accept()
    await server.head()
    await client.send(*((body[at : at + 1] for at in range(len(body))) if split else (body,)))
    answer = await client.message()
    assert answer.status == 400
    assert await client.rest() == b""
    forwarded = await server.rest()
    assert b"evil" not in forwarded
    assert NONE not in forwarded
    await assert_not_disturbed(relay)


@pytest.mark.parametrize("kind", BROKEN_BODIES)
async def test_broken_off_in_one_piece(relay, kind):
    """Head and body come together: the request is refused before it is forwarded, or its connection ends."""
    client = await relay.connect()
    await client.send(CHUNKED + BROKEN_BODIES[kind] + EVIL)
    answer = await client.message()
    assert answer.status == 400
    assert await client.rest() == b""
    await settle()
    assert await relay.unasked()
    await assert_not_disturbed(relay)


async def test_broken_off_after_the_answer_began(relay):
    """Too late for a 400: the answer breaks off (T4)."""
    client = await relay.connect()
    await client.send(CHUNKED)
    server = await relay.accept()
    await server.head()
    await server.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
    await client.head()
    assert await client.chunk() == b"hi"
    await client.send(b"xyz\r\n")
    assert await client.rest() == b""
    assert await server.gone()
    await assert_not_disturbed(relay)


@pytest.mark.parametrize("kind", PLAIN)
async def test_forwarded_in_the_plain_form(relay, kind):
    data, body = PLAIN[kind]
    client = await relay.connect()
    await client.send(data + get(b"/after"))
    server = await relay.accept()
    request = await server.request()
    assert request.body == body
    assert len(request.all(b"content-length")) + len(request.all(b"transfer-encoding")) == 1
    await server.send(ok(b"1"))
    assert (await client.message()).body == b"1"
    assert (await server.request()).target == b"/after"
    await server.send(ok(b"2"))
    assert (await client.message()).body == b"2"
    await assert_not_disturbed(relay, server)


async def test_an_absolute_target_and_a_host_that_disagree(relay):
    """The upstream sees its own authority in `Host`, whatever the target says."""
    client, server, request = await relay.asked(get(b"http://evil.test/mcp"))
    assert request.all(b"host") == [b"127.0.0.1:%d" % relay.listener.getsockname()[1]]
    await server.send(ok())
    assert (await client.message()).status == 200
