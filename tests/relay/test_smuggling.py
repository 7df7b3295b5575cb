"""Requests that two servers could read differently: refused, or forwarded in the one form that all read alike.

The cases are in reliability/smuggling.yaml. The upstream here reads what it gets with the strictest of readings; what
an attacker hides must never reach it as a request of its own, and the next honest request on the same connection must
get its own answer.
"""

from __future__ import annotations

import pytest

from relay.wire import get, ok, settle
from reliability.smuggling import CHUNKED, OURS, load

TABLE = load()
REFUSED = {kind: data for kind, (data,) in TABLE["refused"].items()}
BROKEN_BODIES = {kind: data for kind, (data,) in TABLE["broken bodies"].items()}
PLAIN = TABLE["plain"]
NONE = b"0\r\n\r\n"
EVIL = b"GET /evil HTTP/1.1\r\nHost: evil\r\n\r\n"


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
    assert answer.status in OURS, answer
    assert await client.rest() == b""
    assert await relay.unasked()
    await assert_not_disturbed(relay)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("kind", BROKEN_BODIES)
async def test_broken_off(relay, kind, split):
    """The client gets a 400; the upstream sees half a request at most, and then the end of its connection."""
    client = await relay.connect()
    body = BROKEN_BODIES[kind]
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
    await client.send(CHUNKED + BROKEN_BODIES[kind])
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
    answer = b"" if data.startswith(b"HEAD ") else b"1"
    await server.send(ok(answer))
    assert (await client.message()).body == answer
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


async def test_a_chunked_answer_of_http10_is_the_last_on_its_connection(relay):
    """RFC 9112 section 6.1: its framing is faulty, though it can be read."""
    client, server, _ = await relay.asked(get())
    fields = b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n"
    await server.send(b"HTTP/1.0 200 OK\r\n" + fields + b"2\r\nok\r\n0\r\n\r\n")
    assert (await client.message()).body == b"ok"
    assert await server.gone()
    await assert_not_disturbed(relay)
