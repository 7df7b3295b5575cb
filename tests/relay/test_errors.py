"""T7: upstream trouble is a 502 or a 504 with a JSON-RPC error; what the upstream itself answers passes."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from relay.wire import CHUNKED_OK, Message, get, ok, post, running

GARBAGE = {
    "text": b"HELLO\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "tls alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "http/0.9": b"<html>hello</html>",
    "no version": b"HTTP 200 OK\r\n\r\n",
    "bad version": b"HTTP/3.7 200 OK\r\n\r\n",
    "lower case": b"http/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "status 000": b"HTTP/1.1 000 No\r\nContent-Length: 0\r\n\r\n",
    "status 99": b"HTTP/1.1 099 No\r\nContent-Length: 0\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "space before colon": b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
    "no colon": b"HTTP/1.1 200 OK\r\nContent-Length\r\n\r\n",
    "folded": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "NUL": b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
    "control": b"HTTP/1.1 200 OK\r\nX: a\x01b\r\nContent-Length: 0\r\n\r\n",
    "NUL in the reason": b"HTTP/1.1 200 O\0K\r\nContent-Length: 0\r\n\r\n",
    "escape in the reason": b"HTTP/1.1 200 \x1b[31mOK\r\nContent-Length: 0\r\n\r\n",
    "DEL in an interim reason": b"HTTP/1.1 103 \x7f\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "both framings": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "huge length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "other coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
    "two codings": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding in two fields": CHUNKED_OK[:-2] + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "switched": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
    "switched without saying": b"HTTP/1.1 101 Switching Protocols\r\n\r\nbytes",
    "binary": bytes(range(256)) * 300,
}


def assert_error(answer: Message, status: int) -> None:
    """A JSON-RPC error without an id, and nothing that looks like session loss."""
    assert answer.status == status
    assert answer.get(b"content-type") == b"application/json"
    assert answer.framing == "sized"
    content = json.loads(answer.body)
    assert content["jsonrpc"] == "2.0"
    assert content["error"]["code"] == -32000
    assert content["error"]["message"]
    assert "id" not in content


@pytest.mark.parametrize("kind", GARBAGE)
async def test_t7_garbage_is_a_502(relay, kind):
    """In one piece and byte by byte; the client's connection goes on, the upstream's does not."""
    client = await relay.connect()
    data = GARBAGE[kind]
    for pieces in ((data,), tuple(data[at : at + 1] for at in range(min(len(data), 200)))):
        await client.send(get())
        server = await relay.accept()
        await server.request()
        try:
            await server.send(*pieces)
        except ConnectionError:
            assert len(pieces) > 1  # it did not wait for the end
        assert_error(await client.message(), 502)
        assert await server.gone()
    await client.send(get(b"/next"))
    server = await relay.accept()
    assert (await server.request()).target == b"/next"
    await server.send(ok(b"fine"))
    assert (await client.message()).body == b"fine"


@pytest.mark.parametrize("kind", ["bad chunk size", "bad chunk end", "negative chunk", "huge chunk", "garbage"])
async def test_t7_bad_framing_after_the_head_is_an_abort(relay, kind):
    """What was right before it has been passed on (T4)."""
    client, server, _ = await relay.asked(get())
    bad = {
        "bad chunk size": b"xyz\r\n",
        "bad chunk end": b"1\r\nab\r\n",
        "negative chunk": b"-1\r\na\r\n",
        "huge chunk": b"ffffffffffffffffff\r\n",
        "garbage": bytes(range(256)),
    }[kind]
    await server.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
    await client.head()
    assert await client.chunk() == b"hi"
    await server.send(bad)
    assert not (await client.rest()).endswith(b"0\r\n\r\n")
    assert await server.gone()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("after", [b"", b"H", b"HTTP/1.1 200 OK\r\nX: y", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_t7_no_answer_is_a_502(relay, how, after):
    client, server, _ = await relay.asked(post(b"{}"))
    if after:
        await server.send(after, b"")
    if how == "RST":
        server.reset()
    else:
        server.close()
    answer = await client.message()
    if answer.status == 100:
        answer = await client.message()
    assert_error(answer, 502)


@pytest.mark.parametrize(
    "request_", [get(), post(b"x" * 3_000_000), get(method=b"DELETE")], ids=["GET", "POST", "DELETE"]
)
async def test_t7_a_refused_connection_is_a_502(request_):
    """The body is read first, so that the client's connection stays usable."""
    async with running() as relay:
        relay.listener.close()
        client = await relay.connect()
        for _ in range(2):
            await client.send(request_)
            assert_error(await client.message(), 502)


async def test_t7_a_refused_head_request_has_no_body():
    async with running() as relay:
        relay.listener.close()
        client = await relay.connect()
        await client.send(get(method=b"HEAD") + get())
        assert (await client.message(bodiless=True)).status == 502
        assert_error(await client.message(), 502)


async def test_t7_a_connection_that_takes_too_long_is_a_504():
    """The upstream's queue of connections is full: nothing is refused, nothing is accepted."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        crowd = [socket.socket() for _ in range(3)]
        for sock in crowd:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with running(upstream={"url": url, "connect_timeout": 0.2}) as relay:
            client = await relay.connect()
            await client.send(post(b"{}"))
            assert_error(await client.message(), 504)
            await client.send(post(b"{}"))
            client.reset()  # one that does not wait for it
        for sock in crowd:
            sock.close()


async def test_t7_a_name_without_an_address_is_a_502():
    async with running(upstream={"url": "http://nowhere.invalid:1"}) as relay:
        client = await relay.connect()
        await client.send(get())
        answer = await client.message()
        assert_error(answer, 502)
        assert b"nowhere" not in answer.body


async def test_t7_a_name_with_several_addresses_is_tried_out():
    """The upstream listens on the second address of `localhost` only, whichever that is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        async with running(upstream={"url": f"http://localhost:{listener.getsockname()[1]}"}) as relay:
            relay.listener.close()
            relay.listener = listener
            client, server, request = await relay.asked(get())
            assert request.get(b"host") == b"localhost:%d" % listener.getsockname()[1]
            await server.send(ok(b"here"))
            assert (await client.message()).body == b"here"


async def test_t7_silence_before_the_head_is_a_504_where_a_limit_is_set():
    async with running(upstream={"idle_timeout": 0.1}) as relay:
        client, server, _ = await relay.asked(post(b"{}"))
        assert_error(await client.message(), 504)
        assert await server.gone()


async def test_t7_silence_after_the_head_is_an_abort_where_a_limit_is_set():
    """Each byte begins the time anew."""
    async with running(upstream={"idle_timeout": 0.3}) as relay:
        client, server, _ = await relay.asked(get())
        await server.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await client.head()
        for _ in range(3):
            await asyncio.sleep(0.2)
            await server.send(b"1\r\nx\r\n")
            assert await client.chunk() == b"x"
        assert await client.rest() == b""
        assert await server.gone()


@pytest.mark.parametrize("known", [False, True], ids=["no session", "session"])
async def test_t7_statuses_of_the_upstream_pass(relay, known):
    """With their bodies and fields, and without an effect on the session."""
    await relay.opened()
    client, server = relay.peers[:2]
    fields = (b"Mcp-Session-Id: S1",) if known else ()
    for status in (401, 403, 405, 409, 421, 422, 429, 500, 501, 502, 503, 504, 599):
        for method in (b"POST", b"GET", b"DELETE"):
            await client.send(get(b"/mcp", *fields, method=method))
            await server.request()
            mark = b'WWW-Authenticate: Bearer realm="x", error="invalid_token"'
            await server.send(ok(b"body %d" % status, mark, b"Retry-After: 2").replace(b"200 OK", b"%d Odd" % status))
            answer = await client.message()
            assert (answer.start, answer.body) == (b"HTTP/1.1 %d Odd" % status, b"body %d" % status)
            assert answer.get(b"www-authenticate") == mark.partition(b": ")[2]
    await client.send(post(b"{}", *fields))
    await server.request()
    await server.send(ok(b"alive"))
    assert (await client.message()).body == b"alive"


@pytest.mark.parametrize(
    "place", ["exchange.Exchange._work", "forward.Opening.received_head", "passage.Passage.received_data"]
)
async def test_t7_a_fault_of_ours_is_no_500(relay, monkeypatch, place):
    """The answer breaks off or is a 502, the event loop is told of the fault, and nobody else notices."""

    def fail(*_):
        raise RuntimeError("a fault of ours")

    other, other_server, _ = await relay.asked(get(b"/other"))
    client = await relay.connect()
    with monkeypatch.context() as patch:
        patch.setattr(f"epochgate.relay.{place}", fail)
        await client.send(get())
        if place != "exchange.Exchange._work":
            server = await relay.accept()
            await server.request()
            await server.send(ok(b"x"))
            assert await server.gone()
            assert b"HTTP/1.1 502" in await client.until(b"\r\n") or "Passage" in place
        if "Opening" not in place:
            assert await client.gone()
    await other_server.send(ok(b"fine"))
    assert (await other.message()).body == b"fine"
    faults = [fault["exception"] for fault in relay.faults]
    relay.faults.clear()
    assert "a fault of ours" in str([fault.__context__ or fault for fault in faults])


async def test_t7_a_fault_of_ours_while_a_request_is_read_is_told(relay, monkeypatch):
    """The client gets the refusal of what cannot be read; the event loop hears whose fault it was."""

    def fail(*_):
        raise RuntimeError("a fault of ours")

    client = await relay.connect()
    with monkeypatch.context() as patch:
        patch.setattr("epochgate.relay.client.ClientConnection._body_of", fail)
        await client.send(get())
        assert (await client.message()).status == 400
    assert await client.gone()
    assert await relay.unasked()
    faults = [str(fault["exception"]) for fault in relay.faults]
    relay.faults.clear()
    assert faults == ["a fault of ours"]
