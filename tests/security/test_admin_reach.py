"""Who reaches the admin side: not through the data port, not from a page in a browser, and with a token from afar."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from admin.stage import Client, free_port, proxy
from epochgate.settings import Settings
from relay.wire import get
from resume.story import reply

PATHS = ["/livez", "/readyz", "/metrics", "/status", "/config", "/api/status", "/api/sessions", "/api/verdicts"]
CHANGES = ["/-/reload", "/-/drain", "/api/sessions/ffffffffffff/fence"]


@pytest.mark.parametrize("path", [*PATHS, *CHANGES, "/", "/mcp/../metrics", "http://127.0.0.1:9090/metrics"])
async def test_the_data_port_has_no_path_of_its_own(guarded, path):
    """Section 11: it is the upstream's, whatever it is called."""
    async with guarded() as relay:
        client, server, request = await relay.asked(
            get(path.encode(), b"Content-Length: 0", method=b"POST" if path in CHANGES else b"GET")
        )
        assert request.target == path.encode()
        await server.send(reply(418))
        assert (await client.message()).status == 418


def test_by_default_it_listens_on_the_loopback_alone():
    settings = Settings.model_validate({"upstream": {"url": "http://127.0.0.1:1"}})
    assert settings.admin.listen.host == "127.0.0.1"
    assert settings.listen.host == "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Gate:
    """The proxy as a process, for all of these attacks."""

    port: int
    log: Path


async def ask(gate: Gate, data: bytes) -> bytes:
    """What the admin side answers to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(1 << 20), 10)
    finally:
        writer.close()


def request(path: str, *fields: str, method: str = "GET", host: str = "localhost") -> bytes:
    lines = (f"{method} {path} HTTP/1.1", f"Host: {host}", *fields, "Content-Length: 0", "Connection: close", "", "")
    return "\r\n".join(lines).encode("latin-1")


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Iterator[Gate]:
    home = tmp_path_factory.mktemp("gate")
    port, upstream = free_port(), f"http://127.0.0.1:{free_port()}"
    words = ["serve", "--upstream", upstream, "--listen", "127.0.0.1:0", "--admin-listen", f"127.0.0.1:{port}"]
    with (home / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "epochgate", *words], stdout=subprocess.PIPE, stderr=log, cwd=home
        )
        try:
            assert child.stdout is not None
            assert b"accepts connections" in child.stdout.readline()
            yield Gate(port, home / "log")
        finally:
            child.terminate()
            child.communicate(timeout=20)


NAMES = ["evil.example", "evil.example:9090", "127.0.0.1.evil.example", "localhost.evil.example", "xn--localhost", ""]
NAMES += ["127.0.0.1%evil.example", "127.0.0.1%.evil.example:9090"]
OWN = ["localhost", "127.0.0.1:9090", "[::1]:9090", "192.0.2.7:9090"]


@pytest.mark.parametrize("name", NAMES)
async def test_a_page_whose_name_was_led_here_sees_nothing(gate, name):
    """DNS rebinding: it comes by the loopback, under the name of its own site."""
    for path in (*PATHS[3:], "/api/sessions/ffffffffffff"):
        answer = await ask(gate, request(path, host=name))
        assert answer.startswith(b"HTTP/1.1 403 "), path
        assert b"the name it was sent to is not one of this machine's own" in answer
    for path in CHANGES:
        assert (await ask(gate, request(path, method="POST", host=name))).startswith(b"HTTP/1.1 403 "), path


@pytest.mark.parametrize("name", OWN)
async def test_an_operator_sees_what_he_asks_for(gate, name):
    assert (await ask(gate, request("/api/status", host=name))).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", PATHS[:3])
async def test_probes_and_prometheus_come_under_any_name(gate, path):
    assert (await ask(gate, request(path, host="metrics.cluster.local"))).startswith(b"HTTP/1.1 200 ")


FOREIGN = {
    "another origin": ["Origin: https://evil.example"],
    "an opaque origin": ["Origin: null"],
    "another port": ["Origin: http://localhost:1"],
    "a form of another site": ["Sec-Fetch-Site: cross-site"],
    "a sister site": ["Sec-Fetch-Site: same-site"],
    "through a proxy": ["X-Forwarded-For: 127.0.0.1"],
    "through another proxy": ["X-Forwarded-Host: localhost"],
    "a second origin": ["Origin: http://localhost", "Origin: https://evil.example"],
    "through a proxy, said twice": ["Via: 1.1 a", "X-Real-IP: 127.0.0.1"],
    "through a newer proxy": ["Forwarded: for=127.0.0.1"],
    "with a guess": ["Authorization: Bearer guess"],
    "with an empty token": ["Authorization: Bearer"],
    "with another scheme": ["Authorization: Basic Z3Vlc3M6"],
    "with bytes beyond ASCII": ["Authorization: Bearer \xff\xfe"],
    "override of the method": ["X-HTTP-Method-Override: POST"],
}


@pytest.mark.parametrize("fields", FOREIGN.values(), ids=FOREIGN)
async def test_nothing_is_changed_for_a_stranger(gate, fields):
    method = "GET" if "Override" in fields[0] else "POST"
    for path in CHANGES:
        answer = await ask(gate, request(path, *fields, method=method))
        assert answer.split()[1] in (b"401", b"403", b"404", b"405"), path
    assert (await ask(gate, request("/readyz"))).startswith(b"HTTP/1.1 200 ")


TRICKS = {
    "dot segments": "/../../../../etc/passwd",
    "escaped dot segments": "/status/%2e%2e/%2e%2e/etc/passwd",
    "escaped slashes": "/..%2f..%2fetc%2fpasswd",
    "backslashes": "/..\\..\\etc\\passwd",
    "a null byte": "/status%00.html",
    "a file of the package": "/status.html",
    "another name for a session": "/api/sessions/%2e%2e%2fstatus",
    "a very long name": "/api/sessions/" + "f" * 6000,
    "a template": "/api/sessions/{{7*7}}",
    "markup": "/api/sessions/<script>alert(1)</script>",
    "no limit": "/api/sessions?limit=-1",
    "limit zero": "/api/sessions?limit=0",
    "too much": "/api/sessions?limit=1001",
    "far too much": "/api/sessions?limit=" + "9" * 6000,
    "digits of another script": "/api/sessions?limit=%D9%A3",
    "not a number": "/api/verdicts?limit=NaN",
    "twice": "/api/verdicts?limit=1&limit=9999999",
    "another filter": "/api/verdicts?__class__=x",
    "markup in a filter": "/api/verdicts?verdict=<script>",
}  # fmt: skip


@pytest.mark.parametrize("target", TRICKS.values(), ids=TRICKS)
async def test_no_trick_with_a_target_gives_more_or_breaks_it(gate, target):
    answer = await ask(gate, request(target))
    status = int(answer.split()[1])
    assert status in (400, 403, 404) or (status == 200 and "limit=1&" in target)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"root:" not in body
    assert b"text/html" not in head, "an answer that a browser would take for a page"
    assert (await ask(gate, request("/livez"))).startswith(b"HTTP/1.1 200 ")
    log = gate.log.read_text()
    assert "Traceback" not in log
    assert "could not be handled" not in log


async def test_the_admin_side_cannot_be_reached_through_the_proxy_as_upstream_of_itself(server, home, http):
    """Even where somebody makes it so: `Via` tells that it came through a proxy, and nothing is changed."""
    port = free_port()
    admin = {"listen": f"127.0.0.1:{port}"}
    async with proxy(f"http://127.0.0.1:{port}", home, admin=admin) as gate:
        base = f"http://{gate.config['listen']}"
        for path in CHANGES:
            async with http.post(base + path, headers={"Host": "localhost"}) as answer:
                assert answer.status == 403
                assert "through a proxy" in await answer.text()


async def test_a_token_is_asked_for_again_at_each_request(server, home, http):
    """A client with the token changes something; the next request on its connection does not inherit that."""
    token = home / "token"
    token.write_text("correct horse\n")
    async with server.listening() as upstream, proxy(upstream, home) as gate:
        gate.write(admin={**gate.config["admin"], "token_file": str(token)})
        await gate.heard("reload.done")
        far = {"X-Forwarded-For": "192.0.2.1"}
        good = {**far, "Authorization": "Bearer correct horse"}
        for headers, status in ((good, 200), (far, 403), ({**far, "Authorization": "Bearer correct"}, 401)):
            async with http.post(gate.admin + "/-/reload", headers=headers) as answer:
                assert answer.status == status
        async with http.get(gate.admin + "/config", headers={"Host": "gate.internal"}) as answer:
            assert answer.status == 403
        headers = {"Host": "gate.internal", "Authorization": "Bearer correct horse"}
        async with http.get(gate.admin + "/config", headers=headers) as answer:
            assert answer.status == 200
            assert "correct horse" not in yaml.safe_dump(yaml.safe_load(await answer.text()))


async def test_fencing_takes_a_fingerprint_and_no_id(server, home, http):
    """Who knows a session id does not thereby know the name that it has here."""
    async with server.listening() as upstream, proxy(upstream, home) as gate:
        session = await Client(http, gate.url).initialize()
        async with http.post(f"{gate.admin}/api/sessions/{session}/fence") as answer:
            assert answer.status == 404
