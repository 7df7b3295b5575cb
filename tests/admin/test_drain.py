"""How the proxy ends: not ready, then streams end after whole events, and it is gone in time (section 10)."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import AsyncExitStack

import aiohttp
import pytest

from admin.stage import Client, Server, event, get_json, note, proxy, rpc, vanish

STREAMS = 500
WINDOW = 3.0  # s


class Talking(Server):
    """Its streams never end by themselves: an event every 20 ms or so, written in two halves."""

    async def _handle(self, request):
        if request.method != "GET":
            return await super()._handle(request)
        stream = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        number = 0
        while not self.more.is_set():
            number += 1
            whole = event(f"{id(request)}-{number}", note(self.epoch, "x" * 200))
            await stream.write(whole[:150])
            await asyncio.sleep(0.05)  # the pace of the events, not a wait for something
            await stream.write(whole[150:])
            await asyncio.sleep(0.3)
        return stream


def whole_events(data: bytes) -> int:
    """The number of events in `data`. Fails where one of them is cut."""
    assert data.endswith(b"\n\n")
    blocks = data.split(b"\n\n")[:-1]
    for block in blocks:
        text = next(line for line in block.split(b"\n") if line.startswith(b"data: "))
        assert json.loads(text.removeprefix(b"data: "))["method"] == "notifications/message"
    return len(blocks)


async def test_500_streams_end_after_whole_events_within_the_window(tmp_path):
    server = Talking()
    drain = {"grace": "0s", "window": f"{WINDOW:g}s"}
    policies = [{"name": "mcp", "match": {"path": "/mcp"}}]
    began = asyncio.Event()
    flowing = 0

    async def read(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> tuple[float, int]:
        """When the stream ended, cleanly, and how many events it brought."""
        nonlocal flowing
        data = b""
        async with http.get(url, headers=headers) as answer:
            assert answer.status == 200
            async for piece in answer.content.iter_any():
                if not data:
                    flowing += 1
                    if flowing == STREAMS:
                        began.set()
                data += piece
        return time.monotonic(), whole_events(data)

    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(server.listening())
        gate = await stack.enter_async_context(proxy(upstream, tmp_path, drain=drain, policies=policies))
        timeout = aiohttp.ClientTimeout(total=60)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        )
        clients = [Client(http, gate.url) for _ in range(STREAMS)]
        for client in clients[: STREAMS // 2]:  # the others are not guarded: they have no session
            await client.initialize()
        readers = [asyncio.create_task(read(http, client.url, client.headers)) for client in clients]
        async with asyncio.timeout(30):
            await began.wait()
        told = time.monotonic()
        gate.process.send_signal(signal.SIGTERM)
        assert await gate.ended() == 0
        lasted = time.monotonic() - told
        assert lasted < WINDOW + 1
        ends = await asyncio.gather(*readers)
    assert all(count for _, count in ends)
    times = sorted(end - told for end, _ in ends)
    assert times[STREAMS * 3 // 4] - times[STREAMS // 4] > WINDOW * 0.2  # spread, not all at once
    assert [line for line in gate.said if '"level":"error"' in line or "Traceback" in line] == []
    assert gate.lines("drain.began")[0]["streams"] == STREAMS
    assert gate.lines("drain.done")[0]["aborted"] == 0


async def test_in_the_grace_time_all_is_served_then_new_requests_are_told_to_come_back(server, tmp_path, http):
    server.cut = False
    drain = {"grace": "1s", "window": "4s"}
    async with server.listening() as upstream, proxy(upstream, tmp_path, drain=drain) as gate:
        client = Client(http, gate.url)
        await client.initialize()
        async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
            await stream.content.readuntil(b"id: 3")
            gate.process.send_signal(signal.SIGTERM)
            await gate.heard("drain.began")
            async with http.get(gate.admin + "/readyz") as answer:
                assert answer.status == 503
            async with http.post(client.url, json=rpc("tools/list"), headers=client.headers) as answer:
                assert (answer.status, answer.headers["Connection"]) == (200, "close")  # the next one may go elsewhere
            async with http.get(client.url, headers=client.headers) as late:
                assert late.status == 200  # a stream that begins in the grace time is served
                statuses = []
                async with asyncio.timeout(5):
                    while True:
                        async with http.post(client.url, json=rpc("tools/list"), headers=client.headers) as answer:
                            statuses.append(answer.status)
                            told = await answer.json()
                            if answer.status != 200:
                                break
                assert set(statuses) == {200, 503}
                assert answer.headers["Retry-After"] == "5"
                assert told["error"]["message"] == "The proxy is about to end; try again"
                async with http.get(client.url, headers=client.headers) as refused:
                    assert (refused.status, refused.headers["Connection"]) == (503, "close")
                assert await late.content.read()  # ends cleanly
            await stream.content.read()
        assert await gate.ended() == 0  # as soon as all streams have ended
        assert gate.lines("drain.done")[0]["aborted"] == 0


async def test_a_held_stream_does_not_keep_the_proxy(server, tmp_path, http):
    server.cut = False
    drain = {"grace": "0s", "window": "20s"}
    async with server.listening() as upstream, proxy(upstream, tmp_path, drain=drain) as gate:
        client = Client(http, gate.url)
        await client.initialize()
        async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
            await stream.content.readuntil(b"id: 3")
            vanish(stream)
        async with asyncio.timeout(5):
            while (await get_json(http, gate.admin + "/api/status"))["streams"]["held"] != 1:
                pass
        gate.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await gate.ended() == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_at_once(server, tmp_path, http, first):
    server.cut = False
    drain = {"grace": "30s", "window": "30s"}
    async with server.listening() as upstream, proxy(upstream, tmp_path, drain=drain) as gate:
        client = Client(http, gate.url)
        await client.initialize()
        async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
            await stream.content.readuntil(b"id: 3")
            gate.process.send_signal(first)
            await gate.heard("drain.began")
            gate.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                assert await gate.ended() == 1


async def test_a_drain_that_was_asked_for_is_not_hurried_by_the_signal(server, tmp_path, http):
    """Kubernetes: the preStop hook asks for the drain, then comes SIGTERM."""
    drain = {"grace": "1s", "window": "5s"}
    async with server.listening() as upstream, proxy(upstream, tmp_path, drain=drain) as gate:
        async with http.post(gate.admin + "/-/drain") as answer:
            assert answer.status == 202
        gate.process.send_signal(signal.SIGTERM)
        assert await gate.ended() == 0


async def test_ctrl_c_has_no_grace_time(server, tmp_path):
    drain = {"grace": "1m", "window": "1m"}
    async with server.listening() as upstream, proxy(upstream, tmp_path, drain=drain) as gate:
        gate.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(5):
            assert await gate.ended() == 0
