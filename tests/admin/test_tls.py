"""TLS on the listener and to the upstream, and Unix sockets on both sides."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest

from admin.authority import Authority
from admin.stage import Client, Server, get_json, play_divergent, play_proven, proxy, rpc, vanish


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def trusting(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.root.cert)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def test_the_listener_speaks_tls(server, tmp_path, authority):
    pair = authority.issue("server")
    tls = {"cert": pair.cert, "key": pair.key}
    async with server.listening() as upstream, proxy(upstream, tmp_path, tls=tls) as gate:
        host, _, port = gate.config["listen"].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting(authority))
        tunnel = writer.get_extra_info("ssl_object")
        assert tunnel.selected_alpn_protocol() == "http/1.1"
        body = json.dumps(rpc("tools/list")).encode()
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        for _ in range(2):  # on one connection
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert json.loads(
                await reader.readexactly(int(answer.lower().partition(b"content-length: ")[2].split()[0]))
            )
        writer.close()
        await writer.wait_closed()
        connector = aiohttp.TCPConnector(ssl=trusting(authority))
        async with aiohttp.ClientSession(connector=connector) as http:
            await play_proven(Client(http, gate.url))
            await play_divergent(Client(http, gate.url), server)
        gate.process.send_signal(signal.SIGTERM)
        assert await gate.ended() == 0


async def test_a_client_that_leaves_is_held_over_tls_too(server, tmp_path, authority):
    """H1: a TLS connection that ends counts as gone at once."""
    pair = authority.issue("server")
    server.cut = False
    tls = {"cert": pair.cert, "key": pair.key}
    async with server.listening() as upstream, proxy(upstream, tmp_path, tls=tls) as gate:
        connector = aiohttp.TCPConnector(ssl=trusting(authority))
        async with aiohttp.ClientSession(connector=connector) as http:
            client = Client(http, gate.url)
            await client.initialize()
            async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
                await stream.content.readuntil(b"id: 3")
                vanish(stream)
            async with asyncio.timeout(5):
                while (await get_json(http, gate.admin + "/api/status"))["streams"]["held"] != 1:
                    pass
            async with http.get(client.url, headers={**client.headers, "Last-Event-ID": "1"}) as resumed:
                assert (await resumed.content.readuntil(b"id: 3")).count(b"id: ") == 2
        assert [line["reason"] for line in gate.lines("resume.decided")] == ["connection"]
        assert [line for line in gate.said if not line.startswith("{")] == []


async def test_plain_http_on_the_tls_port_is_closed_and_harms_nothing(server, tmp_path, authority):
    pair = authority.issue("server")
    tls = {"cert": pair.cert, "key": pair.key}
    async with server.listening() as upstream, proxy(upstream, tmp_path, tls=tls) as gate:
        host, _, port = gate.config["listen"].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: gate\r\n\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        connector = aiohttp.TCPConnector(ssl=trusting(authority))
        async with aiohttp.ClientSession(connector=connector) as http:
            assert await Client(http, gate.url).list_tools() == 200
        assert [line for line in gate.said if "error" in line] == []


async def test_a_renewed_certificate_is_used_without_a_restart(server, tmp_path, authority):
    pair = authority.issue("server")
    old = pair.serial()
    tls = {"cert": pair.cert, "key": pair.key}
    async with server.listening() as upstream, proxy(upstream, tmp_path, tls=tls) as gate:
        host, _, port = gate.config["listen"].partition(":")

        async def serial() -> int:
            _, writer = await asyncio.open_connection(host, int(port), ssl=trusting(authority))
            found = int(writer.get_extra_info("peercert")["serialNumber"], 16)
            writer.close()
            await writer.wait_closed()
            return found

        assert await serial() == old
        Path(pair.cert).write_text("no certificate\n")
        assert "cannot be used" in (await gate.heard("reload.failed"))["message"]
        assert await serial() == old
        new = authority.issue("server").serial()
        await gate.heard("reload.done")
        assert await serial() == new != old


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": "other"}, "they must be PEM files that belong together"),
        ({"cert": "none"}, "cannot be used: no such file or directory"),
    ],
)
async def test_files_that_cannot_be_used_are_told_at_the_start(server, tmp_path, authority, change, said):
    pair, other = authority.issue("server"), authority.issue("other")
    paths = {"other": other.key, "none": str(tmp_path / "none.pem")}
    tls = {"cert": pair.cert, "key": pair.key, **{key: paths[name] for key, name in change.items()}}
    async with server.listening() as upstream, proxy(upstream, tmp_path, tls=tls, fails=True) as gate:
        assert await gate.ended() == 78
        assert "tls.cert, tls.key: " in gate.said[-1]
        assert said in gate.said[-1]


async def test_tls_to_the_upstream_with_a_client_certificate(server, tmp_path, authority, http):
    pair, mine = authority.issue("server"), authority.issue("client")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.root.cert)
    context.load_cert_chain(pair.cert, pair.key)
    context.verify_mode = ssl.CERT_REQUIRED
    async with server.listening(tls=context) as url:
        assert url.startswith("https://")
        tls = {"ca": authority.root.cert, "cert": mine.cert, "key": mine.key}
        async with proxy(url, tmp_path, upstream={"url": url, "tls": tls}) as gate:
            await play_proven(Client(http, gate.url))
            await play_divergent(Client(http, gate.url), server)
    assert {dict(field[0] for field in cert["subject"])["commonName"] for cert in server.peer_certs} == {"client"}


async def test_an_upstream_that_cannot_be_trusted_is_a_502(server, tmp_path, authority, http):
    (tmp_path / "other").mkdir()
    pair, stranger = authority.issue("server"), Authority(tmp_path / "other", "stranger")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    async with server.listening(tls=context) as url:
        upstream = {"url": url, "tls": {"ca": stranger.root.cert}}
        async with proxy(url, tmp_path, upstream=upstream) as gate:
            async with http.post(gate.url, json=rpc("ping")) as answer:
                assert answer.status == 502
                told = (await answer.json())["error"]["message"]
            assert told == "No connection to the upstream: its certificate is not valid", (
                "why is the operator's to know"
            )
            gate.process.send_signal(signal.SIGTERM)
            await gate.ended()
            assert f"{told} (" in gate.printed + "".join(gate.said)
    assert server.seen == []


async def test_unix_sockets_on_both_sides(tmp_path):
    server = Server()
    back, front = tmp_path / "back.sock", tmp_path / "front.sock"
    async with server.listening(path=str(back)) as upstream:
        assert upstream == f"unix:{back}"
        async with proxy(upstream, tmp_path, listen=f"unix:{front}") as gate:
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(front))) as http:
                await play_proven(Client(http, "http://gate/mcp"))
                await play_divergent(Client(http, "http://gate/mcp"), server)
            assert {request.headers["Host"] for request in server.seen} == {"localhost"}
            gate.process.send_signal(signal.SIGTERM)
            assert await gate.ended() == 0
            assert not front.exists()


async def test_a_client_that_leaves_a_unix_socket_is_noticed(tmp_path):
    """A Unix socket sends no reset: the kernel tells that it hung up."""
    server = Server()
    server.cut = False
    front = tmp_path / "front.sock"
    async with server.listening() as upstream, proxy(upstream, tmp_path, listen=f"unix:{front}") as gate:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(front))) as http:
            client = Client(http, "http://gate/mcp")
            await client.initialize()
            async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
                await stream.content.readuntil(b"id: 3")
        async with asyncio.timeout(5), aiohttp.ClientSession() as http:
            while (await get_json(http, gate.admin + "/api/status"))["streams"]["held"] != 1:
                pass


async def test_a_client_of_a_unix_socket_that_half_closes_gets_its_answer(server, tmp_path):
    """H1: a FIN after the request is no farewell."""
    front = tmp_path / "front.sock"
    async with server.listening() as upstream, proxy(upstream, tmp_path, listen=f"unix:{front}"):
        reader, writer = await asyncio.open_unix_connection(front)
        writer.write(b"GET /mcp HTTP/1.1\r\nHost: gate\r\n\r\n")
        writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
