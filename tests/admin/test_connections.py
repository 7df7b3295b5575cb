"""The gauges that show whether anything is left behind: connections, tasks and copies (section 11)."""

from __future__ import annotations

import asyncio

from admin.stage import proxy


async def test_connections_and_tasks_are_counted(server, tmp_path, http):
    async def metrics(gate) -> dict[str, float]:
        async with http.get(gate.admin + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    async with server.listening() as upstream, proxy(upstream, tmp_path) as gate:
        before = await metrics(gate)
        assert before["epochgate_client_connections"] == 0
        assert before["epochgate_copies_bytes"] == 0
        assert before["epochgate_tasks"] > 0
        assert before['epochgate_client_connections_closed_total{why="refused"}'] == 0
        host, port = gate.url.removeprefix("http://").partition("/")[0].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        while (await metrics(gate))["epochgate_client_connections"] == 0:
            await asyncio.sleep(0.01)
        writer.close()
        while (await metrics(gate))["epochgate_client_connections"] == 1:
            await asyncio.sleep(0.01)
