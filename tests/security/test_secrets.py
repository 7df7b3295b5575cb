"""Secrets in what is shown or left behind: the configuration page, pages, logs, errors, stores, core files (L7)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from admin.stage import Client, free_port, play_divergent, play_proven, proxy
from epochgate.relay.logs import without_contents
from epochgate.settings import Settings
from epochgate.values import parse_store
from ledger.servers import running

STORES = {
    "user and password": ("valkey://me:hunter2@127.0.0.1:1/0", "valkey://me:***@127.0.0.1:1/0"),
    "password alone": ("redis://:hunter2@127.0.0.1:1", "redis://:***@127.0.0.1:1"),
    "one word": ("redis://hunter2@127.0.0.1:1", "redis://***@127.0.0.1:1"),
    "an @ in it": ("rediss://me:hunter2@more@127.0.0.1:1/0", "rediss://me:***@127.0.0.1:1/0"),
    "a colon in it": ("valkeys://me:hunter2:more@127.0.0.1:1/0", "valkeys://me:***@127.0.0.1:1/0"),
    "escapes in it": ("valkey://me:hunter2%3F%2F@127.0.0.1:1/0", "valkey://me:***@127.0.0.1:1/0"),
    "IPv6": ("valkey://me:hunter2@[::1]:1/0", "valkey://me:***@[::1]:1/0"),
}


@pytest.mark.parametrize(("url", "shown"), STORES.values(), ids=STORES)
def test_the_password_of_the_store_is_not_shown(url, shown):
    settings = Settings.model_validate({"upstream": {"url": "http://127.0.0.1:1"}, "store": {"url": url}})
    dumped = yaml.safe_dump(settings.model_dump(mode="json"))
    assert shown in dumped
    for text in (dumped, repr(settings), str(settings), repr(settings.store.url), f"{settings.store}"):
        assert "hunter2" not in text
    assert parse_store(url).text == url, "the client library still gets it"


REFUSED = [
    "valkey://me:hunter2@127.0.0.1:1/0?x=y", "valkey://me:hunter2@127.0.0.1:port/0", "valkey://me:hunter2@127.0.0.1/x",
    "valkey://me:hunter2 @127.0.0.1/0", "mysql://me:hunter2@127.0.0.1/0", "valkey://me:hunter2@/0#f", "me:hunter2@host",
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
@pytest.mark.parametrize("place", ["file", "environment"])
def test_nor_in_the_error_about_it(url, place, tmp_path):
    path = tmp_path / "epochgate.yaml"
    written: dict[str, object] = {"upstream": {"url": "http://127.0.0.1:1"}}
    environment = dict(os.environ)
    if place == "file":
        written["store"] = {"url": url}
    else:
        environment["EPOCHGATE_STORE__URL"] = url
    path.write_text(yaml.safe_dump(written))
    done = subprocess.run(
        [sys.executable, "-m", "epochgate", "check", "--config", str(path)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 78
    assert "hunter2" not in done.stdout + done.stderr


async def test_nor_while_the_store_does_not_answer(server, home, http):
    """Its own errors, the log, readiness and every page."""
    store = {"url": f"valkey://hunter1:hunter2@127.0.0.1:{free_port()}/0"}
    async with server.listening() as upstream, proxy(upstream, home, store=store, log={"level": "debug"}) as gate:
        seen = gate.printed
        for path in ("/config", "/readyz", "/api/status", "/metrics", "/status"):
            async with http.get(gate.admin + path) as answer:
                seen += await answer.text()
        assert "***@" in seen
        gate.process.send_signal(signal.SIGTERM)
        await gate.ended()
        assert "hunter2" not in seen + "".join(gate.said)


async def test_nor_where_the_store_quotes_it(server, home, http):
    """As Redis before 6 does, and one whose commands were renamed: it does not know how the client logs in."""
    asked: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            asked.append(data)
            quoted = data.replace(b"\r\n", b" ")
            writer.write(b"-ERR unknown command, with args beginning with: %b\r\n" % quoted * data.count(b"*"))
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as store:
        port = store.sockets[0].getsockname()[1]
        url = {"url": f"valkey://hunter1:hunter2@127.0.0.1:{port}/0"}
        async with server.listening() as upstream, proxy(upstream, home, store=url, log={"level": "debug"}) as gate:
            async with http.get(gate.admin + "/readyz") as ready:
                seen = await ready.text()
            async with http.get(gate.admin + "/api/status") as status:
                seen += await status.text()
            assert ready.status == 503
            gate.process.send_signal(signal.SIGTERM)
            await gate.ended()
            seen += gate.printed + "".join(gate.said)
    assert any(b"hunter2" in data for data in asked)
    assert "it does not know a command" in seen
    assert "hunter2" not in seen


async def test_a_dead_process_leaves_no_core_file(server, home):
    """Its memory holds ids, credentials in flight and the store's password."""
    async with server.listening() as upstream, proxy(upstream, home) as gate:
        limits = Path(f"/proc/{gate.process.pid}/limits").read_text()
        soft = re.search(r"Max core file size +(\S+)", limits)
        assert soft is not None
        assert soft[1] == "0"
        before = set(Path.cwd().iterdir())
        gate.process.send_signal(signal.SIGABRT)
        assert await gate.ended() == -signal.SIGABRT
        assert set(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("error", [KeyError(b"hunter2"), ValueError("hunter2"), RuntimeError({"id": "hunter2"})])
async def test_a_fault_of_the_data_port_is_told_by_kind_and_place(error, caplog):
    """What an error says may quote what a client sent."""
    logger = logging.getLogger("asyncio")
    logger.addFilter(without_contents)
    try:
        try:
            raise error
        except (KeyError, ValueError, RuntimeError) as caught:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a request could not be handled", "exception": caught, "request": "hunter3"}
            )
    finally:
        logger.removeFilter(without_contents)
    assert f"a request could not be handled: {type(error).__name__} at {__file__}:" in caplog.text
    assert "hunter" not in caplog.text


CREDENTIALS = {"Authorization": "Bearer hunter3", "Cookie": "sid=hunter4", "X-API-Key": "hunter5"}


async def play(server, gate, http) -> None:
    """Sessions whose ids and credentials are secrets, one of them refused."""
    server.session = "hunter2"
    await play_proven(Client(http, gate.url, CREDENTIALS))
    await play_divergent(Client(http, gate.url, CREDENTIALS), server)
    gate.process.send_signal(signal.SIGTERM)
    assert await gate.ended() == 0


async def test_a_file_of_records_holds_no_credential_and_is_its_owners(server, home, http):
    path = home / "ledger.db"
    async with server.listening() as upstream, proxy(upstream, home, store={"url": f"sqlite://{path}"}) as gate:
        await play(server, gate, http)
    files = [file for file in home.iterdir() if file.name.startswith(path.name)]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    kept = b"".join(file.read_bytes() for file in files)
    assert b"hunter2" in kept, "session ids stand in it, as docs/security.md says"
    assert not [secret for secret in (b"hunter3", b"hunter4", b"hunter5") if secret in kept]


async def test_a_shared_store_holds_neither_credentials_nor_session_ids(server, home, http):
    with running("valkey", home) as store, store.client() as client:
        async with server.listening() as upstream, proxy(upstream, home, store={"url": store.url}) as gate:
            await play(server, gate, http)
        names = list(client.scan_iter())
        records = [client.hgetall(name) for name in names if client.type(name) == b"hash"]
        assert records
        kept = repr([names, records])
    assert not [secret for secret in ("hunter2", "hunter3", "hunter4", "hunter5") if secret in kept]


QUOTED = [
    (b"GET /api/sessions HTTP/1.1", b"Authorization: Bearer hunter2\x01", b"400"),
    (b"GET /api/sessions HTTP/1.1", b"Auth orization: Bearer hunter2", b"400"),
    (b"GET /api/sessions HTTP/1.1", b"Authorization: Bearer hunter2" + b"a" * 9000, b"400"),
    (b"GET /api/sessions HTTP/1.1", b"Expect: hunter2", b"417"),
    (b"GET /hunter2 HTTP/1.1", b"Expect: hunter2", b"417"),
    (b"GET /hunter2 HTTP/1.1", b"A: b", b"404"),
    (b"GET /api/verdicts?verdict=hunter2 HTTP/1.1", b"A: b", b"400"),
    (b"GET /api/sessions?limit=hunter2 HTTP/1.1", b"A: b", b"400"),
    (b"HUNTER2 /api/sessions HTTP/1.1", b"A: b", b"400"),
    (b"GET hunter2 HTTP/1.1", b"A: b", b"400"),
    (b"GET / HTTP/hunter2", b"A: b", b"400"),
]


async def test_answers_of_the_admin_side_quote_nothing_that_was_sent(tmp_path):
    """L7: not even of what cannot be read, which whoever shows the answer may take for harmless."""
    async with proxy("http://127.0.0.1:1", tmp_path) as gate:
        host, _, port = gate.config["admin"]["listen"].rpartition(":")
        for line, field, status in QUOTED:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(line + b"\r\nHost: localhost\r\nConnection: close\r\n" + field + b"\r\n\r\n")
            async with asyncio.timeout(5):
                answer = await reader.read()
            writer.close()
            assert b"hunter2" not in answer.lower()
            assert answer.split()[1] == status, (line, field)


async def test_answers_of_the_proxy_quote_nothing_that_was_sent(guarded):
    """F1, T7: neither a refused request nor the next one's client learns what somebody sent."""
    asked = {
        b"GET /hunter2 HTTP/1.1\r\nHost: a\r\nHost: hunter2\r\n\r\n",
        b"HUNTER2 / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nhunter2\r\n\r\n",
        b"GET /mcp HTTP/1.1\r\nHost: a\r\nMcp-Session-Id: hunter2\r\nLast-Event-ID: hunter2\r\n\r\n",
        b"GET /mcp HTTP/1.1\r\nHost: a\r\nMcp-Session-Id: hunter2\r\nMcp-Session-Id: hunter2\r\n\r\n",
        b"POST /hunter2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: hunter2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Authorization\r\nAuthorization: hunter2\r\n\r\n",
        b"GET /" + b"hunter2" * 10000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT hunter2:443 HTTP/1.1\r\nHost: hunter2\r\n\r\n",
    }
    async with guarded() as relay:
        for data in asked:
            client = await relay.connect()
            await client.send(data)
            answer = await client.receive()
            assert answer.split()[1] in (b"400", b"404", b"431", b"501"), answer
            assert b"hunter2" not in answer.lower()
