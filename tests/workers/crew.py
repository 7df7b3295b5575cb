"""A proxy with several workers, and clients that are known to talk to a certain one of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from admin.stage import START_TIMEOUT, Client, Proxy, get_json


class Crew:
    """`gate` is the process that was started: the supervisor."""

    def __init__(self, gate: Proxy) -> None:
        self.gate = gate

    async def get(self, path: str, **query: str) -> Any:
        async with aiohttp.ClientSession() as http:
            return await get_json(http, self.gate.admin + path, **query)

    async def text(self, path: str, **headers: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as http, http.get(self.gate.admin + path, headers=headers) as answer:
            return answer.status, await answer.text()

    async def samples(self) -> dict[str, float]:
        """Every series of /metrics, as it is written there, and its value."""
        _, text = await self.text("/metrics")
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {series: float(value) for series, _, value in lines}

    async def workers(self) -> list[dict[str, Any]]:
        return (await self.get("/api/status"))["workers"]

    async def serving(self, restarts: int = 0) -> list[int]:
        """The processes of the workers, once all serve and so many were replaced."""
        async with asyncio.timeout(START_TIMEOUT):
            while True:
                workers = await self.workers()
                replaced = sum(worker["restarts"] for worker in workers)
                if {worker["state"] for worker in workers} == {"serving"} and replaced >= restarts:
                    return [worker["pid"] for worker in workers]
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def client(self, pid: int, headers: dict[str, str] | None = None) -> AsyncIterator[Client]:
        """A client that this worker serves."""
        async with aiohttp.ClientSession(
            connector=_To(pid), timeout=aiohttp.ClientTimeout(total=START_TIMEOUT)
        ) as http:
            yield Client(http, self.gate.url, headers)


class _To(aiohttp.TCPConnector):
    """Connects again and again, until the kernel has handed the connection to this process."""

    def __init__(self, pid: int) -> None:
        super().__init__(force_close=True)
        self._pid = pid

    async def connect(self, *args: Any, **options: Any) -> aiohttp.connector.Connection:
        while True:
            connection = await super().connect(*args, **options)
            assert connection.transport is not None
            try:
                here, there = (connection.transport.get_extra_info(name)[1] for name in ("sockname", "peername"))
                if await _is_at(self._pid, there, here):
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()


async def _is_at(pid: int, port: int, client: int) -> bool:
    """Whether the connection to this port from a client's belongs to a process, once somebody has accepted it.

    Nobody may: one that is being killed takes along what waits for it.
    """
    for _ in range(50):
        ss = await asyncio.create_subprocess_exec(
            "ss", "-Htne", "sport", "=", f":{port}", "and", "dport", "=", f":{client}", stdout=asyncio.subprocess.PIPE
        )
        told, _ = await ss.communicate()
        inode = re.search(rb"ino:([1-9]\d*)", told)
        if inode is not None or not told:
            return inode is not None and f"socket:[{inode[1].decode()}]" in descriptors(pid)
        await asyncio.sleep(0.01)
    return False


def descriptors(pid: int) -> dict[str, int]:
    """What a process has open, and under which number."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[str(entry.readlink())] = int(entry.name)
    return found


def exists(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(*pids: int) -> None:
    """Wait until none of them runs."""
    async with asyncio.timeout(START_TIMEOUT):
        while any(exists(pid) for pid in pids):
            await asyncio.sleep(0.02)
