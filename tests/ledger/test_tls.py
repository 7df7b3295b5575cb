"""A store by TLS: the certificate is checked, password and database come with the URL. (Valkey's wheel has no TLS.)"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time

import pytest
import redis

from admin.authority import Authority
from admin.stage import Client, Server, free_port, play_proven, proxy
from epochgate.ledger.base import Resume
from epochgate.ledger.shared import SharedLedger
from epochgate.ledger.valkey import ValkeyStore
from ledger import servers
from ledger.places import DAY, WHO, Valkey, facts, records, story


class TlsServer(servers.Server):
    """A Redis that speaks TLS alone, on its port."""

    def __init__(self, directory, authority: Authority, *options: str) -> None:
        self.authority = authority
        self.pair = authority.issue("store")
        files = ("--tls-cert-file", self.pair.cert, "--tls-key-file", self.pair.key)
        more = (*files, "--tls-ca-cert-file", authority.root.cert, "--tls-auth-clients", "no", *options)
        super().__init__("redis", directory, *more)
        at = self._command.index("--port")
        self._command[at : at + 2] = ["--port", "0", "--tls-port", str(self.port)]

    def client(self) -> redis.Redis:
        pair = self.pair
        return redis.Redis(
            host="127.0.0.1",
            port=self.port,
            ssl=True,
            ssl_ca_certs=self.authority.root.cert,
            ssl_certfile=pair.cert,
            ssl_keyfile=pair.key,
        )


@contextlib.contextmanager
def running(directory, *options: str):
    server = TlsServer(directory, Authority(directory), *options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Place(Valkey):
    def __init__(self, server: TlsServer, url: str, **files: str) -> None:
        super().__init__(server, url)
        self._files = files

    def store(self) -> ValkeyStore:
        return ValkeyStore(self._url, prefix="test", lifetime=DAY, tls=self._files)


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
async def test_what_one_writes_the_other_reads(scheme, tmp_path):
    with running(tmp_path) as server:
        with server.client() as client:
            client.config_set("requirepass", "p@ss:w/rd")
        url = f"{scheme}://:p%40ss%3Aw%2Frd@127.0.0.1:{server.port}/3"
        place = Place(server, url, ca=server.authority.root.cert)
        one, two = await place.ledger(), await place.ledger()
        session = story(one)
        await one.flush()
        assert facts(await two.find(b"session", time.time(), Resume(b"4", WHO))) == facts(session)
        session.close("deleted", time.time())  # and they tell each other
        async with asyncio.timeout(2):
            while (found := two.get(b"session", time.time())) is None or found.fence is None:
                await asyncio.sleep(0.005)
        assert (one.problem, two.problem) == (None, None)
        await place.aclose()


async def test_a_certificate_of_somebody_else_is_refused(tmp_path):
    """The store counts as away; nothing was sent, not even the password."""
    (tmp_path / "other").mkdir()
    with running(tmp_path) as server:
        for ca in (None, Authority(tmp_path / "other").root.cert):
            place = Place(server, f"valkeys://:hunter2@127.0.0.1:{server.port}/0", **({} if ca is None else {"ca": ca}))
            ledger = SharedLedger(records(), place.store())
            await ledger.start()
            assert "certificate" in ledger.problem.lower()
            assert "hunter2" not in ledger.problem
            await place_end(ledger)
        with server.client() as client:
            assert client.info("stats")["total_connections_received"] >= 1
            assert client.dbsize() == 0


async def place_end(ledger) -> None:
    for task in ledger._tasks:
        task.cancel()
    await asyncio.gather(*ledger._tasks, return_exceptions=True)
    await ledger._store._disconnect()


async def test_a_name_that_is_not_in_the_certificate_is_refused(tmp_path):
    with running(tmp_path) as server:
        place = Place(server, f"rediss://localhost:{server.port}/0", ca=server.authority.root.cert)
        ledger = SharedLedger(records(), place.store())
        await ledger.start()
        assert "certificate" in ledger.problem.lower()
        await place_end(ledger)


async def test_a_client_certificate(tmp_path):
    with running(tmp_path, "--tls-auth-clients", "yes") as server:
        pair = server.authority.issue("gate")
        url = f"valkeys://127.0.0.1:{server.port}/0"
        place = Place(server, url, ca=server.authority.root.cert, cert=pair.cert, key=pair.key)
        ledger = await place.ledger()
        story(ledger)
        await ledger.flush()
        assert ledger.problem is None
        await place.aclose()
        bare = SharedLedger(records(), Place(server, url, ca=server.authority.root.cert).store())
        await bare.start()
        assert bare.problem is not None
        await place_end(bare)


async def test_the_whole_proxy(tmp_path):
    """By the configuration; a file that is none ends the start with 78, place and remedy."""
    scripted = Server()
    with running(tmp_path) as server:
        url, ca = f"valkeys://127.0.0.1:{server.port}/0", server.authority.root.cert
        store = {"url": url, "tls": {"ca": ca}}
        async with scripted.listening() as upstream, proxy(upstream, tmp_path, store=store) as gate:
            import aiohttp

            async with aiohttp.ClientSession() as http:
                await play_proven(Client(http, gate.url))
                async with http.get(gate.admin + "/readyz") as answer:
                    assert answer.status == 200
        with server.client() as client:
            assert [name for name in client.keys("*") if b":session:" in name]
    words = ["serve", "--upstream", "http://a", "--listen", f"127.0.0.1:{free_port()}"]
    environment = {"EPOCHGATE_STORE__URL": url, "EPOCHGATE_STORE__TLS__CA": f"{tmp_path}/none.pem"}
    done = subprocess.run(
        [sys.executable, "-m", "epochgate", *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith(f"epochgate: store.tls.ca: {tmp_path}/none.pem cannot be used: no such file")
