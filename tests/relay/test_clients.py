"""Limits of clients' connections: a flood drives out its own, and a request that does not come in time is given up."""

from __future__ import annotations

import asyncio

import pytest

from epochgate.relay.clients import SPARE_FILES, Clients
from epochgate.settings import Limits
from relay.wire import CHUNKED_OK, Peer, Relay, get, ok, post, running, settle

HEAD = b"GET /mcp HTTP/1.1\r\nX: "
BODY = b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"


def bound(relay: Relay, **limits: float) -> Clients:
    clients = relay.context.clients
    clients.limits = clients.limits.model_copy(update=limits)
    return clients


async def connected(relay: Relay, data: bytes = b"") -> Peer:
    """A client whose connection the proxy has taken, and whose bytes it has read."""
    clients = relay.context.clients
    before = len(clients) + clients.closed["gave_way"]
    client = await relay.connect()
    while len(clients) + clients.closed["gave_way"] == before:
        await settle()
    await client.send(data)
    await settle()
    return client


async def alive(client: Peer) -> bool:
    return not await client.gone(0.1)


# -- how many


@pytest.mark.parametrize("data", [b"", HEAD, BODY], ids=["silent", "half a head", "half a body"])
async def test_who_has_waited_longest_gives_way(relay, data):
    """Two who work on a request stay, however long they have been there."""
    clients = bound(relay, connections=4)
    busy = [(await relay.asked(get()))[:2] for _ in range(2)]
    waiting = [await connected(relay, data) for _ in range(2)]
    newest = await relay.connect()
    assert await waiting[0].gone()
    assert await alive(waiting[1])
    assert await alive(newest)
    assert (len(clients), clients.closed["gave_way"], clients.closed["refused"]) == (4, 1, 0)
    for client, server in busy:
        await server.send(ok(b"fine"))
        assert (await client.message()).body == b"fine"


async def test_after_its_answer_a_connection_waits_again(relay):
    """It begins to wait then: who was there before it gives way first."""
    bound(relay, connections=2)
    client, server, _ = await relay.asked(get())
    silent = await connected(relay)
    await server.send(ok(b"1"))
    await client.message()
    third = await relay.connect()
    assert await silent.gone()
    fourth = await relay.connect()
    assert await client.gone()
    assert await alive(third)
    assert await alive(fourth)


@pytest.mark.parametrize("rest", ["complete", "answered", "one byte more"])
async def test_a_request_counts_when_it_is_complete_or_answered(relay, rest):
    """A body that dribbles gains its connection no place."""
    bound(relay, connections=2)
    client = await connected(relay, BODY)
    silent = await connected(relay)
    server = await relay.accept()
    await server.until(b"{")
    if rest == "answered":
        await server.send(CHUNKED_OK + b"1\r\n.\r\n")
        await client.until(b".")
    else:
        await client.send(b" " * (999 if rest == "complete" else 1))
        await server.until(b" " * (999 if rest == "complete" else 1))
    await relay.connect()
    first, second = (client, silent) if rest == "one byte more" else (silent, client)
    assert await first.gone()
    assert await alive(second)


async def test_a_new_one_is_refused_where_all_are_at_work(relay):
    clients = bound(relay, connections=2)
    busy = [(await relay.asked(get()))[:2] for _ in range(2)]
    assert await (await relay.connect()).gone()
    assert (len(clients), clients.closed["refused"]) == (2, 1)
    for client, server in busy:
        await server.send(CHUNKED_OK + b"0\r\n\r\n")
        assert (await client.message()).status == 200


async def test_a_flood_drives_out_its_own(relay):
    """Hundreds who never finish a head beside one who works all the time."""
    bound(relay, connections=20)
    client, server, _ = await relay.asked(get())
    for number in range(300):
        await connected(relay, HEAD)
        if number % 10 == 0:
            await server.send(ok(b"fine"))
            assert (await client.message()).body == b"fine"
            await client.send(get())
            await server.request()
    await server.send(ok(b"fine"))
    assert (await client.message()).body == b"fine"


def test_connections_to_the_upstream_need_descriptors_too():
    upstream = [object()] * 30
    clients = Clients(Limits(connections=1000), upstream, files=SPARE_FILES + 100)
    assert clients.most == 70
    upstream.clear()
    assert clients.most == 100
    assert Clients(Limits(connections=50), upstream, files=SPARE_FILES + 100).most == 50


async def test_a_connection_to_the_upstream_finds_a_descriptor(relay):
    """Those who wait give way to a request that needs one."""
    clients = bound(relay)
    waiting = [await connected(relay) for _ in range(3)]
    client = await connected(relay)
    clients._files = SPARE_FILES + 4
    relay.context.upstream.connections.add(object())
    await client.send(get())
    server = await relay.accept()
    assert await waiting[0].gone()
    relay.context.upstream.connections.clear()
    await server.request()
    await server.send(ok(b"fine"))
    assert (await client.message()).body == b"fine"


# -- how long


@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
async def test_a_body_that_stalls_is_answered_408(relay, framing):
    """The upstream's connection is given up, and so is the client's."""
    clients = bound(relay, body_time=0.2)
    client, server = await relay.opened()
    del client, server
    client = await relay.connect()
    await client.send(get(b"/mcp", framing, method=b"POST") + b"1\r\n")
    server = relay.peers[1]
    await server.until(b"\r\n\r\n")
    answer = await client.message()
    assert answer.status == 408
    assert b"did not come in time" in answer.body
    assert await client.rest() == b""
    assert await server.gone()
    assert clients.closed["slow_body"] == 1


async def test_a_body_byte_by_byte_gains_next_to_no_time(relay):
    bound(relay, body_time=0.3)
    client = await relay.connect()
    await client.send(get(b"/mcp", b"Content-Length: 100000", method=b"POST"))
    answer = asyncio.ensure_future(client.message())
    while not answer.done():
        await asyncio.sleep(0.02)
        await client.send(b"y")
    assert (await answer).status == 408


async def test_a_body_at_a_fair_rate_may_take_its_time(relay):
    """1 KB each 20 ms, for longer than `body_time`."""
    bound(relay, body_time=0.3)
    size = 50 * 1024
    client = await relay.connect()
    await client.send(get(b"/mcp", b"Content-Length: %d" % size, method=b"POST"))
    for _ in range(50):
        await client.send(b"x" * 1024)
        await asyncio.sleep(0.02)
    server = await relay.accept()
    assert len((await server.request()).body) == size
    await server.send(ok(b"fine"))
    assert (await client.message()).body == b"fine"


async def test_a_client_is_not_blamed_for_an_upstream_that_stalls(relay):
    bound(relay, body_time=0.2)
    size = 20_000_000
    client = await relay.connect()
    sending = asyncio.ensure_future(
        client.send(get(b"/mcp", b"Content-Length: %d" % size, method=b"POST") + b"x" * size)
    )
    server = await relay.accept()
    await asyncio.sleep(0.8)
    assert not sending.done()
    assert len((await server.request()).body) == size
    await sending
    await server.send(ok(b"fine"))
    assert (await client.message()).body == b"fine"


async def test_an_answer_that_has_begun_is_not_ended_for_the_sake_of_a_body(relay):
    bound(relay, body_time=0.1)
    client = await relay.connect()
    await client.send(get(b"/other", b"Content-Length: 4", method=b"POST") + b"ab")
    server = await relay.accept()
    await server.until(b"\r\n\r\nab")
    await server.send(CHUNKED_OK + b"1\r\na\r\n")
    await client.head()
    assert await client.chunk() == b"a"
    await asyncio.sleep(0.4)
    await server.send(b"1\r\nb\r\n0\r\n\r\n")
    assert await client.chunk() == b"b"
    assert await client.chunk() == b""


async def test_the_limits_are_those_of_the_configuration():
    async with running(
        limits={"connections": 7, "connection_idle": "1s", "head_time": "2s", "body_time": "3s"}
    ) as relay:
        limits = relay.context.clients.limits
        assert relay.context.clients.most == 7
        assert (limits.connection_idle, limits.head_time, limits.body_time) == (1.0, 2.0, 3.0)
        client, server, _ = await relay.asked(post(b"{}"))
        await server.send(ok(b"fine"))
        assert (await client.message()).body == b"fine"
