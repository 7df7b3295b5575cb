"""Heads that came before: the same bytes mean the same again, and whatever differs is the parser's (T1, T2)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epochgate.relay.exchange import Exchange
from epochgate.relay.headers import Framing, Head
from epochgate.relay.known import MOST_ANSWERS, MOST_IN_ALL, MOST_REQUESTS, KnownAnswers
from relay.wire import ok, post

HEAD = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: %d\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"


def known_sized() -> KnownAnswers:
    known = KnownAnswers()
    fields = [(b"X-A", b"1"), (b"Content-Length", b"3")]
    head = Head(200, b"OK", fields, {b"x-a": b"1", b"content-length": b"3"}, Framing.SIZED)
    known.keep(HEAD % 3 + b"abc", head, 2)
    return known


def known_chunked() -> KnownAnswers:
    known = KnownAnswers()
    known.keep(CHUNKED_HEAD, Head(200, b"OK", [(b"X-A", b"1")], {b"x-a": b"1"}, Framing.CHUNKED), 2)
    return known


def test_a_known_answer_has_its_own_length():
    head, body = known_sized().split(HEAD % 12 + b"x" * 12)
    assert body == b"x" * 12
    assert head.fields == [(b"X-A", b"1"), (b"Content-Length", b"12")]
    assert head.get(b"content-length") == b"12"
    assert head.lines == b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: 12\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD % 3 + b"ab",  # not all of it
        HEAD % 3 + b"abcd",  # and something more
        (HEAD % 3).replace(b"X-A", b"x-a") + b"abc",
        (HEAD % 3).replace(b"200", b"201") + b"abc",
        HEAD.replace(b"%d", b"") + b"abc",
        HEAD.replace(b"%d", b"+3") + b"abc",
        HEAD.replace(b"%d", b"3, 3") + b"abc",
        HEAD.replace(b"%d", b"0x3") + b"abc",
        HEAD.replace(b"%d", b"3\r\nContent-Length: 3") + b"abc",
        HEAD.replace(b"%d", b"3\r\nTransfer-Encoding: chunked") + b"abc",
        b"\r\n" + HEAD % 3 + b"abc",
    ],
)
def test_an_answer_that_differs_is_not_known(data: bytes):
    assert known_sized().split(data) is None


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"3\r\nabc\r\n0A\r\n0123456789\r\n0\r\n\r\n", b"abc0123456789"),
        (b"00000003\r\nabc\r\n000\r\n\r\n", b"abc"),
        (b"7\r\n0\r\n\r\nab\r\n0\r\n\r\n", b"0\r\n\r\nab"),
        (b"0\r\n\r\n", b""),
        (b"3\r\nabc\r\n", None),  # more is to come
        (b"3\r\nabc\r\n0\r\n", None),
        (b"3\r\nabc\r\n0\r\n\r\nHTTP/1.1", None),
        (b"3\r\nabcd\r\n0\r\n\r\n", None),
        (b"4\r\nabc\r\n0\r\n\r\n", None),
        (b"3;x=y\r\nabc\r\n0\r\n\r\n", None),  # an extension
        (b"3\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n", None),
        (b"0x3\r\nabc\r\n0\r\n\r\n", None),
        (b"-3\r\nabc\r\n0\r\n\r\n", None),
        (b" 3\r\nabc\r\n0\r\n\r\n", None),
        (b"3\nabc\n0\n\n", None),
        (b"ffffffff\r\nabc\r\n0\r\n\r\n", None),
        (b"", None),
    ],
)
def test_a_chunked_body_is_known_only_as_a_whole(body: bytes, read: bytes | None):
    split = known_chunked().split(CHUNKED_HEAD + body)
    assert (None if split is None else split[1]) == read


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (b"HTTP/1.1 200 OK\nX-A: 1\r\nContent-Length: 3\r\n\r\nabc", 2),
        (b"HTTP/1.1 200 OK\r\nX-A: 1\r\n Y\r\nContent-Length: 3\r\n\r\nabc", 2),
        (b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: 3\r\n", 2),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" + HEAD % 3, 2),
        (b"HTTP/1.1 200 OK\r\nX-A: " + b"1" * 5000 + b"\r\nContent-Length: 3\r\n\r\nabc", 2),
    ],
)
def test_an_odd_head_is_not_kept(data: bytes, fields: int):
    known = KnownAnswers()
    first = {b"x-a": b"1", b"content-length": b"3"}
    known.keep(data, Head(200, b"OK", [(b"X-A", b"1"), (b"Content-Length", b"3")], first, Framing.SIZED), fields)
    assert known.split(data) is None


def test_what_is_kept_is_bounded():
    """L5."""
    known = KnownAnswers()
    for number in range(3 * MOST_ANSWERS):
        head = Head(200, b"OK", [(b"X-N", b"%d" % number)], {b"x-n": b"%d" % number}, Framing.CHUNKED)
        known.keep(b"HTTP/1.1 200 OK\r\nX-N: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % number, head, 2)
        assert len(known._heads) <= MOST_ANSWERS


@given(st.binary(max_size=60))
@example(b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: \r\n\r\n")
def test_no_bytes_are_too_strange(data: bytes):
    assert known_sized().split(data) is None
    assert known_chunked().split(data) is None


async def test_a_request_is_forwarded_again_as_the_first_time(relay):
    """T2: the same bytes, but for the length, whichever way the head was read."""
    client = await relay.connect()
    server = None
    seen = []
    for number, body in enumerate([b"1", b"22", b"", b"22", b"x" * 5000]):
        await client.send(post(body, b"X-Odd:  a  b ", b"Authorization: Bearer t"))
        server = server or await relay.accept()
        request = await server.request()
        assert request.body == body
        assert request.all(b"content-length") == [b"%d" % len(body)]
        seen.append([field for field in request.fields if field[0].lower() != b"content-length"])
        await server.send(ok(b"%d" % number * number))
        answer = await client.message()
        assert answer.body == b"%d" % number * number
        assert answer.all(b"content-length") == [b"%d" % len(answer.body)]
    assert seen.count(seen[0]) == len(seen)
    connection = next(iter(relay.context.clients))
    assert len(connection._known) == 1


async def test_a_known_head_in_pieces_or_with_another_request_behind_it(relay):
    client = await relay.connect()
    request = post(b"abc")
    server = None
    for _ in range(3):
        await client.send(request)
        server = server or await relay.accept()
        assert (await server.request()).body == b"abc"
        await server.send(ok(b"1"))
        assert (await client.message()).body == b"1"
    await client.send(request[:30], request[30:-2], request[-2:] + request)
    for _ in range(2):
        assert (await server.request()).body == b"abc"
        await server.send(ok(b"2"))
        assert (await client.message()).body == b"2"


async def test_what_a_connection_sent_is_forgotten_with_it_and_bounded(relay):
    """L5, L7: no credentials are kept beyond the connection that brought them."""
    client = await relay.connect()
    server = None
    for number in range(MOST_REQUESTS + 10):
        await client.send(post(b"abc", b"Authorization: Bearer %d" % number))
        server = server or await relay.accept()
        await server.request()
        await server.send(ok(b"1"))
        await client.message()
        (connection,) = relay.context.clients
        assert len(connection._known) == relay.context.clients.heads.taken <= MOST_REQUESTS
    assert len(connection._known) > 1
    client.sock.close()
    while relay.context.clients:
        await relay.unasked()
    assert not connection._known
    assert not relay.context.clients.heads.taken


async def test_a_request_that_is_not_plain_is_always_parsed(relay):
    client = await relay.connect()
    server = None
    for _ in range(4):
        await client.send(post(b"abc", b"Connection: X-Hop", b"X-Hop: 1"))
        server = server or await relay.accept()
        assert not (await server.request()).all(b"x-hop")
        await server.send(ok(b"1"))
        await client.message()
    assert not next(iter(relay.context.clients))._known


async def test_the_credentials_of_a_known_head_are_those_of_its_fields(relay):
    """F3, L7: the caller of a session is told from another one whichever way its head was read."""
    client, server = await relay.opened()
    stranger = await relay.connect()
    seen = []
    for number in range(4):
        for peer, fields in ((client, []), (stranger, [b"Authorization: Bearer other"])):
            await peer.send(post(b'{"jsonrpc":"2.0","id":%d,"method":"x"}' % number, b"Mcp-Session-Id: S1", *fields))
            await server.request()
            (working,) = [connection for connection in relay.context.clients if connection.current is not None]
            request = working.current
            exchange = Exchange(relay.context, request)
            (policy,) = relay.context.policies
            seen.append((fields, exchange.credentials(policy)))
            assert seen[-1][1] == relay.context.fingerprints.credentials(request.fields, policy.credentials)
            await server.send(ok(b"{}", b"Content-Type: application/json"))
            await peer.message()
    assert len({credentials for _, credentials in seen}) == 2


async def test_what_all_connections_keep_is_bounded(relay):
    """L5."""
    relay.context.clients.heads.taken = MOST_IN_ALL
    client = await relay.connect()
    server = None
    for _ in range(3):
        await client.send(post(b"abc"))
        server = server or await relay.accept()
        await server.request()
        await server.send(ok(b"1"))
        assert (await client.message()).body == b"1"
    assert not next(iter(relay.context.clients))._known
