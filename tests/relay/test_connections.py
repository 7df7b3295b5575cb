"""T5: connections are used again on both sides, nothing is sent twice, and no answer meets another's request."""

from __future__ import annotations

import asyncio

import pytest

from relay.wire import CHUNKED_OK, STREAM_OK, chunked, get, ok, post, settle


async def test_t5_connections_are_used_again(relay):
    client, server, _ = await relay.asked(get(b"/0"))
    for number in range(1, 20):
        await server.send(ok(b"%d" % number))
        assert (await client.message()).body == b"%d" % number
        await client.send(get(b"/%d" % number))
        assert (await server.request()).target == b"/%d" % number
    assert await relay.unasked()


async def test_t5_clients_share_upstream_connections_one_after_the_other(relay):
    """Two at the same time need two; a third one after them needs no more."""
    first, server1, _ = await relay.asked(get(b"/1"))
    second, server2, _ = await relay.asked(get(b"/2"))
    await server2.send(ok(b"2"))
    await server1.send(ok(b"1"))
    assert [(await peer.message()).body for peer in (first, second)] == [b"1", b"2"]
    third = await relay.connect()
    await third.send(get(b"/3"))
    await settle()
    assert await relay.unasked()


@pytest.mark.parametrize("method", [b"GET", b"POST", b"DELETE"])
@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
async def test_t5_nothing_is_sent_twice(relay, method, kept):
    """The upstream reads the request and goes away: 502, and the request was there once."""
    client = await relay.connect()
    if kept:
        await client.send(get(b"/before"))
        server = await relay.accept()
        await server.request()
        await server.send(ok())
        await client.message()
    await client.send(get(b"/pay", method=method) if method != b"POST" else post(b"{}"))
    server = server if kept else await relay.accept()
    await server.request()
    server.reset()
    answer = await client.message()
    assert answer.status == 502
    assert await relay.unasked()


async def test_t5_half_a_status_line_is_no_reason_to_try_again(relay):
    client, server, _ = await relay.asked(post(b"{}"))
    await server.send(b"HTTP/1.1 20")
    server.close()
    assert (await client.message()).status == 502
    assert await relay.unasked()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_t5_an_idle_connection_that_the_upstream_closed_is_not_used(relay, how):
    """Also where the request and the upstream's FIN arrive at the same moment."""
    for _ in range(10):
        client, server, _ = await relay.asked(get())
        await server.send(ok())
        await client.message()
        getattr(server, how)()
        await client.send(post(b"once"))
        server = await relay.accept()
        assert (await server.request()).body == b"once"
        await server.send(ok(b"", b"Connection: close"))
        assert (await client.message()).status == 200


async def test_t5_a_connection_with_unasked_bytes_is_not_used(relay):
    """What an upstream sends beyond its answer never becomes the answer to somebody else's request."""
    for extra in (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", b"garbage", b"\r\n"):
        for pieces in ((ok(b"1") + extra,), (ok(b"1"), extra)):
            client, server, _ = await relay.asked(get(b"/1"))
            await server.send(*pieces)
            assert (await client.message()).body == b"1"
            other = await relay.connect()
            await other.send(get(b"/2"))
            if extra == b"\r\n" and len(pieces) == 1:  # empty lines between messages are nothing
                assert (await server.request()).target == b"/2"
                server.close()
                continue
            fresh = await relay.accept()
            assert (await fresh.request()).target == b"/2"
            await fresh.send(ok(b"2", b"Connection: close"))
            assert (await other.message()).body == b"2"


async def test_t5_answers_without_a_body_that_have_one_poison_nothing(relay):
    """A body after HEAD, 204 or 304 is dropped, and its connection with it."""
    cases = [
        (b"HEAD", ok(b"HTTP/1.1 200 OK\r\n\r\n")),
        (b"HEAD", b"HTTP/1.1 200 OK\r\n\r\nevil"),
        (b"HEAD", CHUNKED_OK + chunked(b"evil")),
        (b"GET", b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nevil"),
        (
            b"GET",
            b"HTTP/1.1 304 Not Modified\r\nContent-Length: 38\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        ),
    ]
    client = await relay.connect()
    for method, data in cases:
        await client.send(get(b"/1", method=method))
        server = await relay.accept()
        await server.request()
        await server.send(data)
        assert (await client.message(bodiless=True)).status in (200, 204, 304)
        assert await server.gone()
        await client.send(get(b"/2"))
        server = await relay.accept()
        assert (await server.request()).target == b"/2"
        await server.send(ok(b"2", b"Connection: close"))
        assert (await client.message()).body == b"2"


async def test_t5_an_answer_that_was_not_read_poisons_nothing(relay):
    """A client leaves in the middle of a big answer: its upstream connection is not used again."""
    client, server, _ = await relay.asked(get())
    await server.send(b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n" + b"x" * 100_000)
    await client.head()
    client.reset()
    assert await server.gone()
    other, server, request = await relay.asked(get(b"/other"))
    await server.send(ok(b"mine"))
    assert (await other.message()).body == b"mine"


async def test_t5_many_requests_sent_ahead_are_answered_in_order(relay):
    client = await relay.connect()
    targets = [b"/%d" % number for number in range(100)]
    await client.send(b"".join(get(target) for target in targets))
    server = await relay.accept()
    for target in targets:
        assert (await server.request()).target == target
        await server.send(ok(target))
        assert (await client.message()).body == target
    assert await relay.unasked()


async def test_t5_requests_sent_ahead_with_bodies(relay):
    """Sized, chunked and none by turns, cut at odd places."""
    client = await relay.connect()
    bodies = [b"%d" % number * 3001 for number in range(30)]
    data = b""
    for number, body in enumerate(bodies):
        if number % 3 == 0:
            data += post(body)
        elif number % 3 == 1:
            coded = chunked(body[:1000], body[1000:])
            data += get(b"/", b"Transfer-Encoding: chunked", method=b"POST") + coded
        else:
            data += get(b"/%d" % number)
    sending = asyncio.ensure_future(client.send(*(data[at : at + 777] for at in range(0, len(data), 777))))
    server = await relay.accept()
    for number, body in enumerate(bodies):
        assert (await server.request()).body == (b"" if number % 3 == 2 else body)
        await server.send(CHUNKED_OK + chunked(b"%d" % number))
        assert (await client.message()).body == b"%d" % number
    await sending


async def test_t5_a_request_after_a_streamed_answer(relay):
    """One that was sent ahead waits for the end of the stream, and is not lost."""
    client, server, _ = await relay.asked(get() + post(b"later"))
    await server.send(STREAM_OK + b"9\r\ndata: 1\n\n\r\n")
    await client.head()
    assert await client.chunk() == b"data: 1\n\n"
    assert await relay.unasked()
    await server.send(b"0\r\n\r\n")
    assert await client.chunk() == b""
    assert (await server.request()).body == b"later"
    await server.send(ok(b"then"))
    assert (await client.message()).body == b"then"


async def test_t5_a_flood_of_requests_sent_ahead_is_not_read(relay):
    """While one is answered only a few more are read: the rest stays with the client."""
    client, server, _ = await relay.asked(get(b"/first"))
    flood = asyncio.ensure_future(client.send(get(b"/ahead") * 500_000))
    done, _ = await asyncio.wait((flood,), timeout=0.3)
    assert not done
    connection = next(iter(relay.context.clients))
    assert len(connection._queue) < 10_000  # what one read can bring
    flood.cancel()
    await asyncio.wait((flood,))
    await server.send(ok(b"1", b"Connection: close"))
    assert (await client.message()).body == b"1"
    client.reset()


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_t5_connection_close_of_a_client_is_obeyed(relay, version):
    """The body may come later than the head; what comes after the request is dropped."""
    client = await relay.connect()
    head = get(b"/mcp", b"Connection: close", b"Content-Length: 5", method=b"POST").replace(b"HTTP/1.1", version)
    await client.send(head, b"he", b"llo", get(b"/evil"))
    server = await relay.accept()
    assert (await server.request()).body == b"hello"
    await server.send(ok(b"bye"))
    answer = await client.message()
    assert (answer.body, answer.get(b"connection")) == (b"bye", b"close")
    assert await client.rest() == b""
    await settle()
    other = await relay.connect()
    await other.send(get(b"/next"))
    assert (await server.request()).target == b"/next"  # the upstream's connection is another matter


async def test_t5_connection_close_of_the_upstream_stays_with_it(relay):
    client, server, _ = await relay.asked(get(b"/1"))
    await server.send(ok(b"1", b"Connection: close"))
    answer = await client.message()
    assert (answer.body, answer.get(b"connection")) == (b"1", None)
    assert await server.gone()
    await client.send(get(b"/2"))
    assert (await (await relay.accept()).request()).target == b"/2"


async def test_t5_nothing_follows_an_early_answer(relay):
    """The upstream answers and does not wait for the body: its connection, with half a request on it, is done."""
    client = await relay.connect()
    await client.send(get(b"/", b"Content-Length: 3000000", method=b"POST") + b"x" * 1000)
    server = await relay.accept()
    await server.head()
    await server.send(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 4\r\n\r\nlong")
    assert await server.gone()
    await client.send(b"x" * 2_999_000)
    answer = await client.message()  # although more was sent than anybody read
    assert (answer.status, answer.body) == (413, b"long")
    assert await client.rest() == b""
    assert await relay.unasked()


async def test_t5_idle_connections_of_the_upstream_are_given_up(relay, monkeypatch):
    """Those that have not been used for a while are closed, and not kept for ever."""
    monkeypatch.setattr("epochgate.relay.upstream.IDLE_SECONDS", 0.05)
    pairs = [await relay.asked(get()) for _ in range(3)]
    for client, server, _ in pairs:
        await server.send(ok())
        await client.message()
    await asyncio.sleep(0.06)
    client, server, _ = await relay.asked(get(b"/later"))
    for _, old, _ in pairs[-1:]:
        assert await old.gone()
    await server.send(ok())
    await client.message()
    upstream = relay.context.upstream
    assert len(upstream._idle) < 4


CONTRADICTION = (b"keep-alive, close", b"close, keep-alive", b"close\r\nConnection: keep-alive")


@pytest.mark.parametrize("options", CONTRADICTION)
async def test_t5_close_counts_whatever_else_an_http10_client_says(relay, options):
    """RFC 9112 section 9.3."""
    client, server, _ = await relay.asked(get(b"/", b"Connection: " + options).replace(b"HTTP/1.1", b"HTTP/1.0"))
    await server.send(ok(b"last"))
    answer = await client.message()
    assert (answer.body, answer.get(b"connection")) == (b"last", b"close")
    assert await client.rest() == b""


@pytest.mark.parametrize("options", CONTRADICTION)
async def test_t5_close_counts_whatever_else_an_http10_upstream_says(relay, options):
    client, server, _ = await relay.asked(get())
    await server.send(ok(b"last", b"Connection: " + options).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (await client.message()).body == b"last"
    assert await server.gone()
    await client.send(get(b"/next"))
    server = await relay.accept()
    assert (await server.request()).target == b"/next"
    await server.send(ok())
    assert (await client.message()).status == 200
