"""A worker dies, the supervisor dies, all end: what goes on, what is replaced, what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from admin.stage import Client, play_proven, proxy, rpc
from workers.crew import gone

WINDOW = {"grace": "0s", "window": "2s"}


async def written(valkey, prefix: str, sessions: int) -> None:
    """Wait until the store has events of so many sessions."""
    async with asyncio.timeout(10):
        with valkey.client() as client:
            while True:
                fields = [client.hkeys(name) for name in client.keys(f"{prefix}:session:*")]
                if sum(any(field.startswith(b"events:") for field in each) for each in fields) == sessions:
                    return
                await asyncio.sleep(0.02)


async def test_a_killed_worker_is_replaced_and_its_streams_go_on_at_another(crew, server, valkey, shared):
    """Its streams break, and resume elsewhere, proven by the epoch; nobody else notices."""
    server.cut = False
    one, two = await crew.serving()
    async with crew.client(one) as first, crew.client(two) as second:
        for client in (first, second):
            await client.initialize()
        moved = Client(second.http, second.url, first.headers)
        async with (
            first.http.post(first.url, json=rpc("tools/call"), headers=first.headers) as broken,
            second.http.post(second.url, json=rpc("tools/call"), headers=second.headers) as other,
        ):
            await broken.content.readuntil(b"id: 3")
            await other.content.readuntil(b"id: 3")
            await written(valkey, shared["store"]["prefix"], 2)
            os.kill(one, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(aiohttp.ClientError):
                await broken.content.read()
            assert (await moved.resume("3"))[0] == 200
            assert await moved.list_tools() == 200
            assert await crew.serving(restarts=1) != [one, two]
            assert time.monotonic() - killed < 10
            server.more.set()
            assert (await other.content.read()).endswith(b"\n\n")
    (line,) = crew.gate.lines("worker.ended")
    assert (line["worker"], line["end"], line["restart_in"], line["level"]) == (1, "SIGKILL", 0, "error")
    async with crew.client((await crew.serving())[0]) as third:
        third.headers = moved.headers
        assert await third.list_tools() == 200


async def test_what_a_dead_worker_had_counted_stays_counted(crew, server):
    """No counter goes backwards; verdicts of the dead are still shown."""
    one, two = await crew.serving()
    for pid in (one, two):
        async with crew.client(pid) as client:
            await play_proven(client)
    before = await crew.samples()
    verdicts = await crew.get("/api/verdicts")
    timeline = (await crew.get("/api/status"))["timeline"]
    for number, pid in enumerate((one, two)):
        os.kill(pid, signal.SIGKILL)
        await crew.serving(restarts=number + 1)
        after = await crew.samples()
        totals = {name for name in before if "_total" in name and name.startswith("epochgate_")}
        assert {name for name in totals if after[name] < before[name]} == set()
        assert await crew.get("/api/verdicts") == verdicts
        assert (await crew.get("/api/status"))["timeline"] == timeline
        assert after[f'epochgate_worker_restarts_total{{worker="{number + 1}"}}'] == 1
        assert after["epochgate_sessions"] <= 1  # gauges are those of the living


async def test_one_dead_worker_does_not_make_it_unready(crew):
    """Ready while a worker serves; what is amiss is told all the same."""
    pids = await crew.serving()
    os.kill(pids[1], signal.SIGKILL)
    async with asyncio.timeout(5):
        while (found := await crew.text("/readyz"))[1] == "ok\n":
            pass
    status, text = found
    first, note = text.splitlines()
    assert (status, first) == (200, "ok")
    assert note.startswith("worker: worker 2: ")
    assert "SIGKILL" in note
    assert (await crew.serving(restarts=1))[0] == pids[0]
    assert await crew.text("/readyz") == (200, "ok\n")


async def test_no_worker_at_all_is_not_ready(crew):
    for pid in await crew.serving():
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        while (found := await crew.text("/readyz"))[0] == 200:
            pass
    assert "worker 1, 2: does not accept connections yet" in found[1] or "worker 1: " in found[1]
    await crew.serving(restarts=2)
    assert await crew.text("/readyz") == (200, "ok\n")


async def test_a_worker_that_hangs_is_told_of(crew):
    one, _ = await crew.serving()
    os.kill(one, signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            while "does not answer" not in (await crew.text("/readyz"))[1]:
                await asyncio.sleep(0.1)
        assert await crew.text("/readyz") == (200, "ok\nworker: worker 1: does not answer\n")
        assert (await crew.samples())["epochgate_ready"] == 1  # and the others are not waited for in vain for long
    finally:
        os.kill(one, signal.SIGCONT)
    async with asyncio.timeout(20):
        while await crew.text("/readyz") != (200, "ok\n"):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "group", "request"])
async def test_all_drain(server, start, http, how):
    """Streams of all workers end after whole events, spread over the window; then it is gone, with status 0."""
    server.cut = False
    async with server.listening() as upstream, start(upstream, drain=WINDOW) as crew:
        pids = await crew.serving()
        async with crew.client(pids[0]) as first, crew.client(pids[1]) as second:
            streams = []
            for client in (first, second):
                await client.initialize()
                stream = await client.http.post(client.url, json=rpc("tools/call"), headers=client.headers)
                await stream.content.readuntil(b"id: 3")
                streams.append(stream)
            match how:
                case "request":
                    async with http.post(crew.gate.admin + "/-/drain") as answer:
                        assert answer.status == 202
                case "group":  # as systemd does
                    for pid in (crew.gate.process.pid, *pids):
                        os.kill(pid, signal.SIGTERM)
                case _:
                    crew.gate.process.send_signal(how)
            for stream in streams:
                assert (await stream.content.read()).endswith(b"\n\n")
                stream.close()
        assert await crew.gate.ended() == 0
        await gone(*pids)
    assert {line["worker"] for line in crew.gate.lines("drain.done")} == {1, 2}
    assert {line["aborted"] for line in crew.gate.lines("drain.done")} == {0}
    assert [line for line in crew.gate.said if '"level":"error"' in line or "Traceback" in line] == []


async def test_the_grace_time_is_for_all(server, start, http):
    """Not ready at once, and every worker serves on."""
    async with server.listening() as upstream, start(upstream, drain={"grace": "2s", "window": "1s"}) as crew:
        pids = await crew.serving()
        for pid in (crew.gate.process.pid, *pids):  # a worker that gets the signal too waits for what it means
            os.kill(pid, signal.SIGTERM)
        await crew.gate.heard("drain.began", 2)
        assert (await crew.text("/readyz"))[0] == 503
        for pid in pids:
            async with crew.client(pid) as client:
                await client.initialize()
        assert await crew.gate.ended() == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_all_at_once(server, start, first):
    server.cut = False
    async with server.listening() as upstream, start(upstream, drain={"grace": "30s", "window": "30s"}) as crew:
        pids = await crew.serving()
        async with crew.client(pids[0]) as client:
            await client.initialize()
            async with client.http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
                await stream.content.readuntil(b"id: 3")
                crew.gate.process.send_signal(first)
                await crew.gate.heard("drain.began", 2)
                crew.gate.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(5):
                    assert await crew.gate.ended() == 1
        async with asyncio.timeout(5):
            await gone(*pids)


async def test_a_signal_before_it_serves(server, shared, tmp_path):
    """Whatever has begun by then ends."""
    async with server.listening() as upstream, proxy(upstream, tmp_path, fails=True, **shared) as gate:
        pass
    process = await asyncio.create_subprocess_exec(
        *gate.command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(20):
        while not (children := _children(process.pid)):
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        printed, said = await process.communicate()
    assert (process.returncode, printed) == (0, b"")
    assert b"Traceback" not in said
    await gone(*children)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


async def test_a_killed_supervisor_leaves_no_orphans(server, start, shared, tmp_path, http):
    """Its workers end their streams in an orderly way and are gone; they make way for a new proxy at once."""
    server.cut = False
    (tmp_path / "again").mkdir()
    async with server.listening() as upstream, start(upstream, drain={"grace": "20s", "window": "3s"}) as crew:
        pids = await crew.serving()
        async with crew.client(pids[0]) as client:
            await client.initialize()
            async with client.http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
                await stream.content.readuntil(b"id: 3")
                crew.gate.process.kill()
                await crew.gate.heard("worker.leaves", 2)
                listen, admin = crew.gate.config["listen"], crew.gate.config["admin"]
                async with proxy(upstream, tmp_path / "again", listen=listen, admin=admin, **shared) as gate:
                    assert (await stream.content.read()).endswith(b"\n\n")
                    again = Client(http, gate.url, client.headers)
                    assert await again.list_tools() == 200
                    await gone(*pids)


async def test_one_worker_that_is_told_to_end_makes_way(crew, server):
    """SIGTERM for one of them: its streams end after whole events, others accept what comes, and it is replaced."""
    server.cut = False
    one, two = await crew.serving()
    async with crew.client(one) as client, aiohttp.ClientSession() as http:
        await client.initialize()
        async with client.http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
            await stream.content.readuntil(b"id: 3")
            os.kill(one, signal.SIGTERM)
            await crew.gate.heard("worker.leaves")
            other = Client(http, client.url, client.headers)
            assert {await other.list_tools() for _ in range(20)} == {200}
            assert (await stream.content.read()).endswith(b"\n\n")
    assert (await crew.serving(restarts=1))[1] == two
    assert crew.gate.lines("worker.ended")[0]["end"] == "exit status 0"
