"""Cookies, redirects and other hosts: nothing is kept, nothing followed, one upstream and no other (T5, S2)."""

from __future__ import annotations

import asyncio
import socket

import pytest

from relay.wire import free_listener, get
from resume.story import JSON, SESSION, STREAM, began, notes, part, reply, result


def trap() -> tuple[socket.socket, bytes]:
    """A host that nothing may be sent to, and its authority."""
    listener = free_listener()
    return listener, b"127.0.0.1:%d" % listener.getsockname()[1]


def is_untouched(listener: socket.socket) -> bool:
    try:
        listener.accept()
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 300, 305])
@pytest.mark.parametrize("method", [b"GET", b"POST", b"HEAD", b"DELETE"])
async def test_t5_a_redirect_goes_to_the_client_and_is_not_followed(guarded, status, method):
    other, authority = trap()
    with other:
        async with guarded() as relay:
            client, server, _ = await relay.asked(get(b"/mcp", SESSION, b"Content-Length: 0", method=method))
            await server.send(reply(status, b"", b"Location: http://%b/mcp" % authority))
            answer = await client.message(bodiless=method == b"HEAD")
            assert (answer.status, answer.get(b"Location")) == (status, b"http://%b/mcp" % authority)
            assert await relay.unasked()
            assert is_untouched(other)


async def test_t5_a_resume_that_is_redirected_is_not_followed(guarded):
    """R6: passed unchanged; what waits at the other place would be judged by nobody."""
    other, authority = trap()
    with other:
        async with guarded() as relay:
            story = await began(relay, epoch=1)
            await story.cut()
            client, _, _ = await story.resumed(3, reply(307, b"", b"Location: http://%b/mcp" % authority))
            await client.begin()
            assert (client.status, client.get(b"Location")) == (307, b"http://%b/mcp" % authority)
            assert is_untouched(other)


@pytest.mark.parametrize("setter", ["initialize", "call", "resume", "error"])
async def test_t5_cookies_of_the_upstream_are_not_kept(guarded, setter):
    """They go to the client that they were sent to, and come back only with its own requests."""
    async with guarded() as relay:
        cookie = b"Set-Cookie: sid=secret; Path=/"
        story = await began(relay, epoch=1)
        if setter == "initialize":
            await story.open(1, cookie)
        elif setter == "call":
            await (await story.other(reply(200, result(99), JSON, cookie))).rest()
        elif setter == "resume":
            await story.cut()
            head = STREAM[:-2] + cookie + b"\r\n\r\n"
            client, _, _ = await story.resumed(3, head + part(notes(4, epoch=1)))
            await client.until(notes(4, epoch=1))
            assert client.get(b"Set-Cookie") == b"sid=secret; Path=/"
        else:
            await (await story.other(reply(401, b"", cookie))).rest()
        client, server, request = await relay.asked(get(b"/mcp", b"Mcp-Session-Id: another"))
        assert request.get(b"Cookie") is None
        await server.send(reply(405))
        answer = await client.message()
        assert answer.get(b"Set-Cookie") is None


async def test_t5_proxies_of_the_environment_are_not_used(guarded, monkeypatch):
    other, authority = trap()
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{authority.decode()}")
    with other:
        async with guarded() as relay:
            client, server, _ = await relay.asked(get())
            await server.send(reply(200))
            await client.message()
            assert is_untouched(other)


HOSTS = {
    "absolute form": lambda a: get(b"http://%b/mcp" % a),
    "absolute form, https": lambda a: get(b"https://%b/mcp" % a),
    "absolute form with a user": lambda a: get(b"http://127.0.0.1@%b/mcp" % a),
    "host field": lambda a: b"GET /mcp HTTP/1.1\r\nHost: %b\r\n\r\n" % a,
    "forwarded host": lambda a: get(b"/mcp", b"X-Forwarded-Host: " + a, b"Forwarded: host=" + a),
    "original URL": lambda a: get(b"/mcp", b"X-Original-URL: http://%b/" % a, b"X-Rewrite-URL: http://%b/" % a),
    "HTTP/1.0": lambda a: b"GET http://%b/mcp HTTP/1.0\r\n\r\n" % a,
    "the path is an authority": lambda a: get(b"//%b/mcp" % a),
    "with a backslash": lambda a: get(b"/\\%b/mcp" % a),
    "a post": lambda a: b"POST /mcp HTTP/1.1\r\nHost: %b\r\nContent-Length: 2\r\n\r\n{}" % a,
    "upgrade to a websocket": lambda a: get(
        b"http://%b/mcp" % a, b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x"
    ),
    "upgrade to HTTP/2": lambda a: get(
        b"http://%b/mcp" % a, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"
    ),
    "trace": lambda a: get(b"http://%b/mcp" % a, b"Max-Forwards: 0", method=b"TRACE"),
    "proxy connection": lambda a: get(b"http://%b/mcp" % a, b"Proxy-Connection: keep-alive", b"Proxy-Authorization: x"),
    "destination": lambda a: get(b"/mcp", b"Destination: http://%b/" % a, method=b"COPY"),
}


@pytest.mark.parametrize("ask", HOSTS.values(), ids=HOSTS)
async def test_s2_no_request_goes_to_another_host(guarded, ask):
    """Whatever names another one, the configured upstream is asked, and told its own name in `Host`."""
    other, authority = trap()
    with other:
        async with guarded() as relay:
            client = await relay.connect()
            await client.send(ask(authority))
            waiting = asyncio.ensure_future(client.receive())
            accepting = asyncio.ensure_future(relay.accept())
            await asyncio.wait({waiting, accepting}, return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                server = accepting.result()
                request = await server.request()
                assert request.all(b"Host") == [b"127.0.0.1:%d" % relay.listener.getsockname()[1]]
                for gone in (b"Upgrade", b"HTTP2-Settings", b"Proxy-Connection", b"Proxy-Authorization"):
                    assert request.get(gone) is None
                await server.send(reply(200))
                assert (await waiting).startswith(b"HTTP/1.1 200")
            else:
                accepting.cancel()
                assert waiting.result().startswith(b"HTTP/1.1 400")
            assert is_untouched(other)


CONNECTS = [b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n", b"CONNECT %b:443 HTTP/1.1\r\nHost: %b\r\n\r\n"]


@pytest.mark.parametrize("request_", CONNECTS, ids=["authority", "twice a port"])
async def test_connect_opens_no_tunnel(guarded, request_):
    other, authority = trap()
    with other:
        async with guarded() as relay:
            client = await relay.connect()
            await client.send(request_ % (authority, authority))
            assert (await client.receive()).split()[1] in (b"400", b"501")
            assert await client.gone()
            assert await relay.unasked()
            assert is_untouched(other)


async def test_a_switch_of_protocols_that_nobody_asked_for_is_a_502(guarded):
    async with guarded() as relay:
        client, server, _ = await relay.asked(get(b"/mcp", b"Connection: Upgrade", b"Upgrade: websocket"))
        await server.send(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x05"
        )
        assert (await client.message()).status == 502
