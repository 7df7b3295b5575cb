"""Text of a client or an upstream in places that are read by others: logs, metrics, keys of a store, pages, heads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from admin.browser import page
from admin.stage import Client, get_json, proxy
from ledger.servers import running
from relay.wire import get
from resume.story import JSON, SESSION, STREAM, began, notes, part, reply, result

HOSTILE = {
    "markup": '<img src=x onerror="document.title=1">',
    "a line of a log": '"}{"event":"session.fenced","level":"info"}',
    "a terminal": "\\x1b[2J\\u001b]0;owned",
    "formats": "%s%n{0}{self}${jndi:ldap://x}",
    "a label": '"} 1\\nepochgate_resumes_total{policy="x',
    "a query": "'; DROP TABLE sessions; --",
    "a pattern": "*?[a-z]",
    "a slot of a cluster": "{epochgate}:session:{0}",
    "a path": "../../../../etc/passwd",
    "separators": ":::,,,;;;===",
    "bytes beyond ASCII": "\xe9\xff\x80\xa0",
    "long": "s" * 8000,
}
ESCAPE = "\x1b"


async def play(server, gate, http, session: str) -> None:
    """A session under a hostile id, with hostile event ids; it is resumed, resumed wrongly, and refused."""
    server.session, server.prefix = session, session
    client = Client(http, gate.url)
    await client.initialize()
    await client.call()
    assert (await client.resume(f"{session}3"))[0] == 200
    assert (await client.resume(f"{session}nothing"))[0] == 404
    async with http.request("BADMETHOD" if "label" in session else "PROPFIND", gate.url) as answer:
        await answer.read()
    with contextlib.suppress(Exception):
        async with http.get(gate.url, headers={"User-Agent": session, "Referer": session}) as answer:
            await answer.read()


WAYS = [(name, "json") for name in HOSTILE] + [(name, "console") for name in ("a line of a log", "a terminal")]


@pytest.mark.parametrize(("name", "kind"), WAYS)
async def test_logs_metrics_and_the_api_show_none_of_it(server, home, http, name, kind):
    """Each line of the log is one of the proxy's own, and every page can be parsed."""
    session = HOSTILE[name]
    log = {"format": kind, "level": "debug"}
    async with server.listening() as upstream, proxy(upstream, home, log=log) as gate:
        await play(server, gate, http, session)
        async with http.get(gate.admin + "/metrics") as answer:
            metrics = await answer.text()
        families = {family.name for family in text_string_to_metric_families(metrics)}
        assert "epochgate_resumes" in families
        seen = json.dumps([await get_json(http, gate.admin + "/api/" + name) for name in ("sessions", "verdicts")])
        gate.process.send_signal(signal.SIGTERM)
        assert await gate.ended() == 0
        lines = gate.said
    if kind == "json":
        events = [json.loads(line)["event"] for line in lines if line]
        assert events.count("session.opened") == 1
        assert events.count("session.fenced") == 1
    else:
        assert all(line[:4].isdigit() for line in lines if line), "each begins with its time"
    told = metrics + seen + "\n".join(lines)
    assert session not in told
    assert json.dumps(session)[1:-1] not in told
    assert ESCAPE not in told


@pytest.mark.parametrize("store", ["sqlite", "valkey"])
async def test_no_id_is_a_key_or_a_query_of_the_store(server, home, http, store):
    """All hostile ids side by side; none of them reaches the record of another, before or after a restart."""
    with running("valkey", home) as shared, shared.client() as client:
        url = f"sqlite://{home}/ledger.db" if store == "sqlite" else shared.url
        client.set("epochgate:other", "stays")
        opened = []
        async with server.listening() as upstream:
            async with proxy(upstream, home, store={"url": url}) as gate:
                for session in HOSTILE.values():
                    server.session, server.prefix = session, session
                    opened.append((session, Client(http, gate.url)))
                    await opened[-1][1].initialize()
                    await opened[-1][1].call()
                gate.process.send_signal(signal.SIGTERM)
                assert await gate.ended() == 0
            async with proxy(upstream, home, store={"url": url}) as gate:
                for session, known in opened:
                    again = Client(http, gate.url, known.headers)
                    server.session, server.prefix = session, session
                    assert (await again.resume(f"{session}3"))[0] == 200, session
                for _, known in opened:
                    stolen = Client(http, gate.url, known.headers)
                    assert (await stolen.resume("s3"))[0] == 404
        assert client.get("epochgate:other") == b"stays"
        names = list(client.scan_iter())
        assert all(name.startswith(b"epochgate:") for name in names)
        assert not [name for name in names if any(s.encode("latin-1", "replace") in name for s in HOSTILE.values())]


async def test_the_page_runs_nothing_that_a_server_wrote(server, home, http):
    """In a real browser: ids, event ids and the words of an error are markup."""
    async with server.listening() as upstream, proxy(upstream, home) as gate:
        await play(server, gate, http, HOSTILE["markup"])
        async with page(gate.admin + "/status") as opened:
            await opened.until("document.querySelectorAll('#verdicts tr').length === 2")
            assert await opened.tell("document.images.length + document.scripts.length") == 1
            assert await opened.tell("document.title") == "epochgate: ready"
            assert opened.complaints == []


SPLITTERS = [
    b"Mcp-Session-Id: a\rX-Injected: 1", b"Mcp-Session-Id: a\nX-Injected: 1", b"Last-Event-ID: a\0X-Injected: 1",
    b"Last-Event-ID: a\r\n X-Injected: 1", b"X\rX-Injected: 1", b"X-Injected : 1", b" X-Injected: 1",
]  # fmt: skip


@pytest.mark.parametrize("field", SPLITTERS, ids=range(len(SPLITTERS)))
async def test_a_field_of_a_request_cannot_become_two(guarded, field):
    """Refused, or forwarded as one field; the end of a line alone ends one (RFC 9112 section 2.2)."""
    async with guarded() as relay:
        client = await relay.connect()
        await client.send(get(b"/mcp", field))
        accepting = asyncio.ensure_future(relay.accept())
        waiting = asyncio.ensure_future(client.receive())
        await asyncio.wait({accepting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            request = await accepting.result().request()
            assert request.get(b"X-Injected") is None or b"\n" in field.replace(b"\r\n", b"")
            waiting.cancel()
        else:
            accepting.cancel()
            assert waiting.result().startswith(b"HTTP/1.1 400")


ANSWERS = [
    b"HTTP/1.1 200 OK\r\nMcp-Session-Id: S1\rSet-Cookie: owned=1\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX-A: a\0b\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 O\rSet-Cookie: owned=1\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX-A: a\r\n Set-Cookie: owned=1\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nSet-Cookie : owned=1\r\nContent-Length: 0\r\n\r\n",
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
async def test_a_field_of_an_answer_cannot_become_two(guarded, answer):
    async with guarded() as relay:
        client, server, _ = await relay.asked(get())
        await server.send(answer)
        message = await client.message()
        assert message.get(b"Set-Cookie") is None
        assert message.status in (200, 502)


async def test_a_call_id_cannot_break_out_of_the_error_that_names_it(guarded):
    """F4: what is told of a pending call is one event with one message, whatever the id is that the client chose."""
    identifier = 'x"}\n\ndata: {"jsonrpc":"2.0","id":1,"result":{}}\r\n\r\nid: 9\n\u2028'
    async with guarded(policy={"refusal": {"pending_calls": "at-once"}}) as relay:
        story = await began(relay, epoch=1, calls=(identifier,))
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=2)))
        assert await client.told() == [(identifier, "epoch_changed")]
        assert bytes(client.data).count(b"data: ") == 1 + bytes(client.data).count(b"\\ndata: ")
        assert b"\nid:" not in client.data


async def test_an_event_of_the_upstream_cannot_forge_the_end_of_another(guarded):
    """A block is released as a whole, so that what is refused takes no part of what was proven with it."""
    async with guarded() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        data = notes(4, epoch=1) + b"id: 5\ndata: " + result(77, 1).replace(b"}", b"}\ndata: ", 1) + b"\n\n"
        for byte in data[:-1]:
            await server.send(part(bytes([byte])))
        await client.until(notes(4, epoch=1))
        assert bytes(client.data) == notes(4, epoch=1)
        refused = await story.other(reply(200, b"", JSON, SESSION))
        await refused.begin()
