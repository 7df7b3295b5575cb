"""Session ids, event ids, tokens and credentials are in no output (L7)."""

from __future__ import annotations

import asyncio
import logging
import signal

from aiohttp.http_exceptions import BadHttpMessage

from admin.stage import Client, play_divergent, play_proven, proxy
from epochgate.admin.server import only_own_faults

SESSIONS = 100
SECRETS = ("hunter2", "hunter3", "hunter4", "hunter5", "hunter6", "hunter7")
PAGES = (
    "/livez", "/readyz", "/metrics", "/status", "/config", "/api/status", "/api/sessions?limit=1000",
    "/api/verdicts?limit=500", "/nothing/hunter2",
)  # fmt: skip


async def test_no_secret_is_in_any_output_of_a_run_with_100_sessions(server, tmp_path, http):
    session, event, bearer, cookie, key, epoch = SECRETS
    token = tmp_path / "token"
    token.write_text("hunter8\n")
    server.session = session
    server.prefix = f"{event}-"
    credentials = {"Authorization": f"Bearer {bearer}", "Cookie": f"sid={cookie}", "X-API-Key": key}
    log = {"level": "debug"}
    async with server.listening() as upstream, proxy(upstream, tmp_path, log=log) as gate:
        gate.write(admin={**gate.config["admin"], "token_file": str(token)})
        await gate.heard("reload.done")
        for number in range(SESSIONS):
            client = Client(http, gate.url, credentials)
            server.epoch = f"{epoch}-{number}"
            await client.initialize()
            await client.call()
            if number % 3 == 0:
                server.epoch = f"{epoch}-other"
            await client.resume(f"{event}-3")
            if number % 3 == 2:
                await client.resume(f"{event}-unknown")
            if number % 3 == 1:
                async with http.delete(client.url, headers=client.headers) as answer:
                    assert answer.status == 204
            if number % 10 == 0:  # a request that cannot be understood, and one that the upstream fails
                headers = [*client.headers.items(), ("Mcp-Session-Id", f"{session}-twice")]
                async with http.get(client.url, headers=headers) as answer:
                    assert answer.status == 400
        seen = gate.printed
        async with http.get(gate.admin + "/api/sessions?limit=1000") as answer:
            listed = (await answer.json())["sessions"]
        assert len(listed) == SESSIONS
        for path in (*PAGES, *(f"/api/sessions/{entry['fingerprint']}" for entry in listed)):
            async with http.get(gate.admin + path) as answer:
                seen += await answer.text()
        for name in ("hunter8", "guess"):
            headers = {"Authorization": f"Bearer {name}"}
            async with http.post(f"{gate.admin}/api/sessions/{session}-1/fence", headers=headers) as answer:
                seen += await answer.text()
        async with http.post(client.url, data=b"no json", headers=client.headers) as answer:
            assert answer.status in (404, 500)
        gate.process.send_signal(signal.SIGTERM)
        assert await gate.ended() == 0
        lines = gate.lines("resume.decided")
        assert len(lines) >= SESSIONS
        assert {line["verdict"] for line in lines} >= {"divergent", "unproven", "proven"}
        seen += "\n".join(gate.said)
    assert [secret for secret in (*SECRETS, "hunter8") if secret in seen] == []
    assert "resume.decided" in seen


async def test_two_runs_have_other_fingerprints(server, tmp_path, http):
    """A fingerprint is keyed: nobody can look an id up by it."""
    async with server.listening() as upstream:
        seen = []
        for _ in range(2):
            server.opened = 0
            async with proxy(upstream, tmp_path) as gate:
                await play_proven(Client(http, gate.url))
                await play_divergent(Client(http, gate.url), server)
                await gate.heard("resume.decided", 2)
                seen.append({line["session"] for line in gate.lines("resume.decided")})
    assert len(seen[0] | seen[1]) == 4


GARBAGE = {
    "token": b"POST /-/reload HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer hunter2\x01\r\n\r\n",
    "id": "GET /api/sessions/hunter2\u00e9 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
    "twice": b"GET /livez HTTP/1.1\r\nHost: hunter2\r\nHost: hunter2\r\n\r\n",
    "no request": b"hunter2\r\n\r\n",
    "long": b"GET /" + b"hunter2" * 3000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


async def test_l7_what_the_admin_side_cannot_understand_is_not_logged(server, tmp_path):
    async with server.listening() as upstream, proxy(upstream, tmp_path, log={"level": "debug"}) as gate:
        host, _, port = gate.config["admin"]["listen"].rpartition(":")
        for data in GARBAGE.values():
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            assert b" 400 " in await reader.readline()
            writer.close()
        gate.process.send_signal(signal.SIGTERM)
        assert await gate.ended() == 0
        said = "\n".join(gate.said)
    assert "hunter2" not in said
    assert "Traceback" not in said


def test_l7_of_a_fault_of_the_admin_side_only_kind_and_place_are_logged(caplog):
    logger = logging.getLogger("test.faults")
    logger.addFilter(only_own_faults)

    def fail(error: Exception) -> None:
        raise error

    for error in (ValueError("hunter2"), BadHttpMessage("hunter2")):
        try:
            fail(error)
        except (ValueError, BadHttpMessage):
            logger.exception("Unhandled exception for %s", "hunter3")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"a request could not be handled: ValueError at {__file__}:")
    assert "hunter" not in caplog.text
