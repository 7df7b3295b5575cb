"""Several workers behind one address: sessions that any of them serves, and one admin side for all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from admin.stage import Client, Repeating, free_port, play_divergent, play_proven, rpc
from epochgate.admin.metrics import FAMILIES, WORKER_FAMILIES
from workers.crew import descriptors


async def test_one_line_when_all_accept(crew):
    assert crew.gate.printed.startswith("epochgate ")
    assert f"accepts connections on {crew.gate.config['listen']} for " in crew.gate.printed
    assert [worker["state"] for worker in await crew.workers()] == ["serving", "serving"]
    assert await crew.text("/readyz") == (200, "ok\n")
    assert await crew.text("/livez") == (200, "ok\n")
    assert sorted(line["worker"] for line in crew.gate.lines("worker.serves")) == [1, 2]


async def test_connections_are_spread(crew):
    """SO_REUSEPORT: each worker has a queue of its own, and the kernel fills all of them."""
    one, two = await crew.serving()
    for pid in (one, two):
        async with crew.client(pid) as client:
            await play_proven(client)
    async with asyncio.timeout(5):
        while {line.get("worker") for line in crew.gate.lines("session.opened")} != {1, 2}:
            await asyncio.sleep(0.01)


async def test_a_session_of_one_worker_is_served_by_the_other(crew, server):
    """R7: opened at one, called at the other, resumed at either: each time it is judged by what both recorded."""
    one, two = await crew.serving()
    async with crew.client(one) as first, crew.client(two) as second:
        await first.initialize()
        second.headers = first.headers
        for caller, resumer in ((first, second), (second, first), (second, second)):
            assert (await caller.call()).count(b"id: ") == 3
            status, body = await resumer.resume("3")
            assert (status, body.count(b"id: 4")) == (200, 1)
        verdicts = (await crew.get("/api/verdicts"))["verdicts"]
        assert [(entry["verdict"], entry["reason"]) for entry in verdicts] == [("proven", "epoch")] * 3
        server.epoch = "2"
        assert (await second.resume("3"))[0] == 404
        assert await first.list_tools() == 404  # F2
        server.epoch = "1"
        await second.initialize()
        first.headers = second.headers
        assert await first.list_tools() == 200


async def test_a_fence_holds_at_the_other_worker(crew, server):
    """F2, within 100 ms; the caller that was told finds it there at once."""
    one, two = await crew.serving()
    async with crew.client(one) as first, crew.client(two) as second:
        for _ in range(5):
            await play_divergent(first, server)
            second.headers = first.headers
            first.headers = {"Accept": first.headers["Accept"]}
            asked = len(server.seen)
            assert await second.list_tools() == 404
            assert len(server.seen) == asked


async def test_an_outage_that_one_worker_saw_counts_at_the_other(start):
    """R8: after it an overlap proves nothing, whichever worker gets the resume."""
    policies = [{"name": "mcp", "resume": {"accept": ["overlap"]}}]
    server, port = Repeating(), free_port()
    async with start(f"http://127.0.0.1:{port}", policies=policies) as crew:
        one, two = await crew.serving()
        async with crew.client(one) as first, crew.client(two) as second:
            async with server.listening(port=port):
                await first.initialize()
                second.headers = first.headers
                for _ in range(2):
                    await first.call()
                    assert (await second.resume("3"))[0] == 200
                assert (await crew.get("/api/verdicts"))["verdicts"][0]["reason"] == "overlap"
                await first.call()
            assert await first.list_tools() == 502
            async with asyncio.timeout(5):
                while (await crew.get("/api/status"))["upstream"]["outage_at"] is None:
                    pass
            again = Repeating()
            async with again.listening(port=port):
                assert (await second.resume("3"))[0] == 404
                assert (await crew.get("/api/verdicts"))["verdicts"][0]["reason"] == "boundary"


async def test_what_all_have_counted(crew, server):
    """Counters are added up, sessions are counted once, and verdicts stand in the order of time."""
    one, two = await crew.serving()
    async with crew.client(one) as first, crew.client(two) as second:
        both = await play_proven(first)
        second.headers = first.headers
        assert await second.list_tools() == 200
        for client in (Client(first.http, first.url), Client(second.http, second.url)):
            await play_divergent(client, server)
    assert both
    status = await crew.get("/api/status")
    assert status["sessions"] == {"known": 3, "fenced": 2, "opened": 3}
    assert status["resumes"][0]["count"] == 2
    verdicts = (await crew.get("/api/verdicts"))["verdicts"]
    assert [entry["verdict"] for entry in verdicts] == ["divergent", "divergent", "proven"]
    assert [entry["at"] for entry in verdicts] == sorted((entry["at"] for entry in verdicts), reverse=True)
    assert sum(sum(value for key, value in row.items() if key != "at") for row in status["timeline"]["counts"]) == 3
    sessions = await crew.get("/api/sessions")
    assert (sessions["total"], len(sessions["sessions"])) == (3, 3)
    for state, count in (("fenced", 2), ("idle", 1), ("open", 0), ("held", 0)):
        found = await crew.get("/api/sessions", state=state)
        assert (found["total"], [entry["state"] for entry in found["sessions"]]) == (count, [state] * count)
    samples = await crew.samples()
    assert samples["epochgate_sessions"] == 3
    assert samples["epochgate_sessions_fenced"] == 2
    key = 'epochgate_resumes_total{enforced="true",policy="mcp",reason="epoch_changed",verdict="divergent"}'
    assert samples[key] == 2
    assert samples['epochgate_sessions_opened_total{policy="mcp"}'] == 3


async def test_a_session_that_is_open_at_one_worker_and_idle_at_the_other_is_open(crew, server):
    server.cut = False
    one, two = await crew.serving()
    async with crew.client(one) as first, crew.client(two) as second:
        await first.initialize()
        second.headers = first.headers
        assert await second.list_tools() == 200
        async with first.http.post(first.url, json=rpc("tools/call"), headers=first.headers) as stream:
            await stream.content.readuntil(b"id: 3")
            (entry,) = (await crew.get("/api/sessions", state="open"))["sessions"]
            assert (entry["open"], entry["streams"]) == (1, 1)
            assert (await crew.get("/api/sessions", state="idle"))["total"] == 0
            detail = await crew.get(f"/api/sessions/{entry['fingerprint']}")
            assert [stream["events"] for stream in detail["streams"]] == [3]
            server.more.set()


async def test_an_operator_fences_for_all(crew, http):
    one, two = await crew.serving()
    async with crew.client(one) as first, crew.client(two) as second:
        await first.initialize()
        (entry,) = (await crew.get("/api/sessions"))["sessions"]
        async with http.post(f"{crew.gate.admin}/api/sessions/{entry['fingerprint']}/fence") as answer:
            assert (answer.status, (await answer.json())["fence"]) == (200, "fenced_by_operator")
        second.headers = first.headers
        async with asyncio.timeout(5):
            while await second.list_tools() != 404:
                pass
        assert await first.list_tools() == 404
    async with http.post(crew.gate.admin + "/api/sessions/0123456789ab/fence") as answer:
        assert answer.status == 404
    samples = await crew.samples()
    assert sum(value for name, value in samples.items() if name.startswith("epochgate_fences_total")) == 1


async def test_a_session_that_both_have_at_hand_is_shown_and_fenced(crew, http):
    """Each of them has seen streams that the other has not, and all of them are told."""
    one, two = await crew.serving()
    async with crew.client(one) as first, crew.client(two) as second:
        await first.initialize()
        second.headers = first.headers
        await first.call(1)
        await second.call(2)
        await second.call(3)
        (entry,) = (await crew.get("/api/sessions"))["sessions"]
        at = f"/api/sessions/{entry['fingerprint']}"
        detail = await crew.get(at)
        assert [stream["events"] for stream in detail["streams"]] == [3, 3, 3]
        assert {key: value for key, value in detail.items() if key not in ("streams", "verdicts")} == {
            key: value for key, value in entry.items() if key != "streams"
        }
        async with http.post(f"{crew.gate.admin}{at}/fence") as answer:
            fenced = await answer.json()
        assert (answer.status, fenced["state"], fenced["fence"]) == (200, "fenced", "fenced_by_operator")
        assert [stream["stream"] for stream in fenced["streams"]] == [stream["stream"] for stream in detail["streams"]]
        assert (await first.list_tools(), await second.list_tools()) == (404, 404)


async def test_the_metrics_pass_the_strict_parser(crew):
    _, text = await crew.text("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {family.name for family in (*FAMILIES, *WORKER_FAMILIES)} <= families.keys()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"):
        workers = {sample.labels["worker"]: sample.value for sample in families[name].samples}
        assert workers.keys() == {"supervisor", "1", "2"}
        assert all(workers.values())
    assert [sample.value for sample in families["epochgate_worker_serving"].samples] == [1, 1]


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_worker_inherits_nothing_of_the_others(server, start, tmp_path, kind):
    """What it shares with the supervisor is what both write to, and a Unix socket to listen on."""
    listen = f"127.0.0.1:{free_port()}" if kind == "tcp" else f"unix:{tmp_path}/gate.sock"
    async with server.listening() as upstream, start(upstream, listen=listen) as crew:
        os.kill((await crew.serving())[0], signal.SIGKILL)
        pids = await crew.serving(restarts=1)  # the new one began when the supervisor had everything open
        have = {pid: descriptors(pid) for pid in (crew.gate.process.pid, *pids)}
        common = [set(have[pid]) & set(have[crew.gate.process.pid]) for pid in pids]
        assert common[0] == common[1]
        numbers = sorted(have[pids[0]][name] for name in common[0] if name.startswith(("pipe:", "socket:")))
        assert [number for number in numbers if number not in (1, 2)] == [] or kind == "unix"
        assert len(numbers) == (2 if kind == "tcp" else 3)
        private = [set(have[pid]) - common[0] for pid in pids]
        assert not {name for name in private[0] & private[1] if name.startswith(("pipe:", "socket:"))}


async def test_a_unix_socket_is_shared(server, start, tmp_path):
    path = tmp_path / "gate.sock"
    async with server.listening() as upstream, start(upstream, listen=f"unix:{path}") as crew:
        connector = aiohttp.UnixConnector(str(path), force_close=True)  # who is killed takes its connections along
        async with aiohttp.ClientSession(connector=connector) as http:
            await play_proven(Client(http, "http://gate/mcp"))
            os.kill((await crew.serving())[0], signal.SIGKILL)
            await play_proven(Client(http, "http://gate/mcp"))  # there is always somebody who accepts
            await crew.serving(restarts=1)
            await play_divergent(Client(http, "http://gate/mcp"), server)
        crew.gate.process.send_signal(signal.SIGTERM)
        assert await crew.gate.ended() == 0
        assert not path.exists()


# -- what keeps it from serving


def serve(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EPOCHGATE_UPSTREAM__URL": "http://127.0.0.1:1", "EPOCHGATE_WORKERS": "2", **settings}
    command = [sys.executable, "-m", "epochgate", "serve", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("store", ["memory://", "sqlite:///tmp/x.db"])
def test_a_private_store_is_refused(store):
    done = serve(EPOCHGATE_STORE__URL=store)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.count("\n") == 1
    assert "EPOCHGATE_WORKERS: more than one worker needs a store that all of them see" in done.stderr


@pytest.mark.parametrize("key", ["listen", "admin.listen"])
def test_a_port_in_use_is_told_once(key, valkey):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen, admin = (address, f"127.0.0.1:{free_port()}")[:: 1 if key == "listen" else -1]
        done = serve("--listen", listen, "--admin-listen", admin, EPOCHGATE_STORE__URL=valkey.url)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == (
        f"epochgate: {key}: cannot listen on {address}: it is in use; choose another, or end the process that has it\n"
    )


async def test_a_second_proxy_does_not_share_the_port(crew, valkey):
    """SO_REUSEPORT would let it, and divide the clients between the two."""
    listen = crew.gate.config["listen"]
    done = await asyncio.to_thread(
        serve, "--listen", listen, "--admin-listen", f"127.0.0.1:{free_port()}", EPOCHGATE_STORE__URL=valkey.url
    )
    assert (done.returncode, done.stdout) == (78, "")
    assert f"listen: cannot listen on {listen}: it is in use" in done.stderr


def test_a_file_that_cannot_be_used_is_told_before_a_worker_starts(valkey, tmp_path):
    settings = {"EPOCHGATE_TLS__CERT": f"{tmp_path}/none", "EPOCHGATE_TLS__KEY": f"{tmp_path}/none"}
    done = serve("--listen", f"127.0.0.1:{free_port()}", EPOCHGATE_STORE__URL=valkey.url, **settings)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("epochgate: tls.cert, tls.key: ")
    assert done.stderr.count("\n") == 1


async def test_port_0_is_one_port_for_all(server, start):
    async with server.listening() as upstream, start(upstream, listen="127.0.0.1:0") as crew:
        address = crew.gate.printed.split(" connections on ")[1].split()[0]
        assert not address.endswith(":0")
        crew.gate.config["listen"] = address
        for pid in await crew.serving():
            async with crew.client(pid) as client:
                await client.initialize()
