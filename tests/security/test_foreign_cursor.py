"""The cursor of another user's session: never forwarded, never served, in any disguise (R3); old servers leak."""

from __future__ import annotations

import asyncio

import pytest

from relay.wire import get
from resume.story import JSON, OVERLAP, STREAM, compact, notes, part, priming, reply, result, until

ALICE, BOB = (b"Authorization: Bearer alice",), (b"Authorization: Bearer bob",)
A, B = b"Mcp-Session-Id: SA", b"Mcp-Session-Id: SB"
GRANT = compact({"jsonrpc": "2.0", "id": 0, "result": {"protocolVersion": "2025-11-25"}})
HELLO = compact({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {}})
CALL = compact({"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": {}})

DISGUISES = {
    "as it is": b"a-2",
    "the last": b"a-3",
    "a priming one": b"a-0",
    "one to come": b"a-4",
    "behind a tab": b"\ta-2\t",
    "in a list with an own one": b"b-1, a-2",
    "in quotes": b'"a-2"',
    "with a byte beyond ASCII": b"a-2\xa0",
    "with UTF-8": "a-2\u200b".encode(),
    "escaped": b"a%2d2",
    "in capitals": b"A-2",
    "very long": b"a-2" + b" " * 4096 + b"a-2" * 1024,
    "8 KB of separators": b"a-2;" * 2048,
    "a path": b"../SA/a-2",
    "a key of the store": b"epochgate:SA:a-2",
    "a question": b"a-2' OR '1'='1",
    "a format": b"%(cursor)s{cursor}${cursor}",
    "a number": b"18446744073709551616",
    "nothing but a minus": b"-",
}


async def opened(relay, session: bytes, credentials: tuple[bytes, ...]) -> None:
    client, server, _ = await relay.asked(
        get(b"/mcp", JSON, *credentials, b"Content-Length: %d" % len(HELLO), method=b"POST") + HELLO
    )
    await server.send(reply(200, GRANT, JSON, session))
    await client.message()


async def called(relay, session: bytes, credentials: tuple[bytes, ...], events: bytes):
    """A call of the session whose stream has brought these events and stays open."""
    client, server, _ = await relay.asked(
        get(b"/mcp", JSON, session, *credentials, b"Content-Length: %d" % len(CALL), method=b"POST") + CALL
    )
    await server.send(STREAM + part(events))
    await client.until(events[-20:])
    return client, server


def numbered(letter: str) -> bytes:
    return priming(f"{letter}-0") + b"".join(
        notes(n).replace(b"id: %d" % n, b"id: %b-%d" % (letter.encode(), n)) for n in (1, 2, 3)
    )


async def both(relay) -> None:
    """Alice and Bob, each with a session and a stream; Alice's is held, so that its events wait in the proxy."""
    await opened(relay, A, ALICE)
    await opened(relay, B, BOB)
    alice, _ = await called(relay, A, ALICE, numbered("a"))
    await called(relay, B, BOB, numbered("b"))
    alice.reset()
    await until(lambda: len(relay.context.holds) == 1)


@pytest.mark.parametrize("accept", [["connection", "epoch"], OVERLAP["accept"]], ids=["strict", "overlap"])
@pytest.mark.parametrize("cursor", DISGUISES.values(), ids=DISGUISES)
async def test_r3_it_is_refused_and_nobody_is_asked(guarded, cursor, accept):
    async with guarded(policy={"resume": {"accept": accept}}) as relay:
        await both(relay)
        bob = await relay.connect()
        await bob.send(get(b"/mcp", B, b"Last-Event-ID: " + cursor, *BOB))
        answer = await bob.message()
        assert (answer.status, answer.body.count(b"unknown_cursor")) == (404, 1)
        assert await relay.unasked()


async def test_r3_credentials_of_the_other_user_do_not_help_in_the_own_session(guarded):
    async with guarded() as relay:
        await both(relay)
        bob = await relay.connect()
        await bob.send(get(b"/mcp", B, b"Last-Event-ID: a-2", *ALICE))
        assert b"unknown_cursor" in (await bob.message()).body
        assert await relay.unasked()


@pytest.mark.parametrize("cursor", DISGUISES.values(), ids=DISGUISES)
async def test_r3_a_new_session_is_asked_for_without_it(guarded, cursor):
    """A session that has delivered nothing resumes nothing: a new stream, and the cursor stays here."""
    async with guarded() as relay:
        await both(relay)
        await opened(relay, b"Mcp-Session-Id: SC", BOB)
        client, server, request = await relay.asked(
            get(b"/mcp", b"Mcp-Session-Id: SC", b"Last-Event-ID: " + cursor, *BOB)
        )
        assert request.get(b"Last-Event-ID") is None
        await server.send(reply(405))
        await client.message()


@pytest.mark.parametrize("value", [b"", b" \t "])
@pytest.mark.parametrize("session", [A, b"Mcp-Session-Id: made-up"])
async def test_r3_an_empty_field_is_no_cursor_and_stays_here(guarded, session, value):
    """Some servers look at its presence, and replay all that they have."""
    async with guarded() as relay:
        await both(relay)
        client, server, request = await relay.asked(get(b"/mcp", session, b"Last-Event-ID:" + value, *ALICE))
        assert (request.get(b"Last-Event-ID"), request.get(b"Mcp-Session-Id")) == (None, session.partition(b": ")[2])
        await server.send(reply(405))
        await client.message()


@pytest.mark.parametrize("session", [b"Mcp-Session-Id: made-up", b"Mcp-Session-Id: sa", b"Mcp-Session-Id: SA\xa0"])
async def test_r3_a_session_that_nobody_was_granted_is_refused(guarded, session):
    async with guarded() as relay:
        await both(relay)
        client = await relay.connect()
        await client.send(get(b"/mcp", session, b"Last-Event-ID: a-2", *BOB))
        assert b"unknown_session" in (await client.message()).body
        assert await relay.unasked()


VERSIONS = [
    (b"MCP-Protocol-Version: 2025-06-18",),
    (b"MCP-Protocol-Version:",),
    (b"MCP-Protocol-Version: 2026-07-28, 2025-06-18",),
    (b"MCP-Protocol-Version: 2026-07-28", b"MCP-Protocol-Version: 2025-11-25"),
    (b"mcp-protocol-version: \t2025-03-26 ",),
]


@pytest.mark.parametrize("version", VERSIONS, ids=range(len(VERSIONS)))
async def test_s1_a_version_that_some_server_may_take_for_one_with_sessions_is_guarded(guarded, version):
    async with guarded() as relay:
        await both(relay)
        bob = await relay.connect()
        await bob.send(get(b"/mcp", B, b"Last-Event-ID: a-2", *BOB, *version))
        assert b"unknown_cursor" in (await bob.message()).body
        assert await relay.unasked()


TARGETS = [
    b"/mcp", b"//mcp", b"/./mcp", b"/x/../mcp", b"/%6dcp", b"/m%63p?x=1", b"http://elsewhere.test/mcp", b"/mcp?/other",
    b"HTTP://proxy.test:80//x/..//mcp", b"/x%2f..%2fmcp",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
async def test_section_10_another_spelling_of_the_path_is_guarded_too(guarded, target):
    async with guarded(policy={"match": {"path": "/mcp"}}) as relay:
        await both(relay)
        bob = await relay.connect()
        await bob.send(get(target, B, b"Last-Event-ID: a-2", *BOB))
        assert b"unknown_cursor" in (await bob.message()).body
        assert await relay.unasked()


async def test_r7_a_server_that_leaks_of_itself_is_stopped(guarded):
    """The own cursor is answered by the events of Alice's session, her result included: `foreign_response`."""
    async with guarded(policy={"resume": OVERLAP}) as relay:
        await both(relay)
        for flow in list(relay.context.streams):
            flow.close()
        asked = [get(b"/mcp", B, b"Last-Event-ID: b-2", *BOB)]
        client, server, request = await relay.asked(*asked)
        assert request.get(b"Last-Event-ID") == b"b-1"
        await server.send(STREAM + part(b"id: b-2\n" + notes(2).partition(b"\n")[2]))
        await server.send(part(b"id: b-3\n" + notes(3).partition(b"\n")[2] + b"id: a-9\ndata: " + result(77) + b"\n\n"))
        data = await asyncio.wait_for(client.until(b"}}}\n\n"), 5)
        assert b"foreign_response" in data
        assert b'"id":77' not in data
