"""The real servers that are probed: those of the interop tests, FastMCP and server-everything."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from interop.environments import UnavailableError, prepare
from interop.stage import end, free_port, process

HERE = pathlib.Path(__file__).parent
CACHE = HERE / ".env"
START_TIMEOUT = 60.0  # s, for a server to say that it is up on a busy machine
STEADY = {"steps": 20, "pause_ms": 100}


@dataclass(frozen=True, slots=True)
class Real:
    """One server as it is probed: its environment, the flags it is started with, and the tool that streams."""

    name: str
    title: str
    environment: str
    arguments: Mapping[str, object]
    tool: str = "count"
    flags: tuple[str, ...] = ()


REAL = (
    Real("python1", "Python SDK {version}", "python1", STEADY | {"label": "a"}),
    Real("python2", "Python SDK {version}", "python2", STEADY | {"label": "a"}),
    Real("fastmcp", "FastMCP {version}", "fastmcp4", STEADY | {"label": "a"}),
    Real("typescript1", "TypeScript SDK {version}", "typescript1", STEADY | {"label": "a"}),
    Real(
        "everything", "server-everything {version}", "everything", {"duration": 3, "steps": 6},
        "trigger-long-running-operation",
    ),
    Real(
        "typescript1-burst", "TypeScript SDK {version}, a burst of events", "typescript1",
        {"label": "a", "steps": 200, "pause_ms": 0},
    ),
    Real(
        "python1-polling", "Python SDK {version}, closing its streams", "python1",
        STEADY | {"label": "a", "close_at": 8}, flags=("--retry-ms", "500"),
    ),
    Real(
        "fastmcp-polling", "FastMCP {version}, closing its streams", "fastmcp4",
        STEADY | {"label": "a", "close_at": 8}, flags=("--retry-ms", "500"),
    ),
)  # fmt: skip


def command(environment: str) -> list[str]:
    """The argument vector of a server, its environment built if need be.

    Raises `UnavailableError` where Node is missing, and `CalledProcessError` where an installation fails.
    """
    if environment not in ("fastmcp4", "everything"):
        return prepare(environment).command("servers")
    CACHE.mkdir(exist_ok=True)
    home = CACHE / environment
    with (CACHE / f"{environment}.lock").open("w") as lock:  # test workers come here at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if environment == "fastmcp4":
            _install_fastmcp(home)
            return [str(home / "bin" / "python"), str(HERE / "servers" / "fastmcp4.py")]
        node = _install_everything(home)
        script = home / "node_modules" / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
        return [node, str(script), "streamableHttp"]


def _install_fastmcp(home: pathlib.Path) -> None:
    pins = HERE / "requirements-fastmcp4.txt"
    if _is_current(home, pins):
        return
    _run([sys.executable, "-m", "venv", str(home)])
    python = str(home / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(pins)])
    _note_current(home, pins)


def _install_everything(home: pathlib.Path) -> str:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise UnavailableError("Node is not installed: install Node 20 or newer, with npm, to run server-everything")
    pins = HERE / "package.json"
    if not _is_current(home, pins):
        home.mkdir()
        shutil.copy(pins, home / pins.name)
        _run(
            [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(home)]
        )
        _note_current(home, pins)
    return node


def _is_current(home: pathlib.Path, pins: pathlib.Path) -> bool:
    """Whether the environment was built for these very pins; if not, it is removed."""
    note = home / ".installed"
    if note.exists() and note.read_text() == pins.read_text():
        return True
    shutil.rmtree(home, ignore_errors=True)
    return False


def _note_current(home: pathlib.Path, pins: pathlib.Path) -> None:
    """Say so once it is whole: a build that was broken off is begun anew."""
    shutil.copy(pins, home / ".installed")


def _run(words: list[str]) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=300)


def version(environment: str) -> str:
    """The pinned version of a server's library."""
    interop = HERE.parent / "interop"
    match environment:
        case "fastmcp4":
            text, wanted = (HERE / "requirements-fastmcp4.txt").read_text(), r"^fastmcp==(\S+)"
        case "everything":
            text, wanted = (HERE / "package.json").read_text(), r'server-everything": "(\S+)"'
        case "typescript1":
            text, wanted = (interop / "package.json").read_text(), r'modelcontextprotocol/sdk": "(\S+)"'
        case _:
            text, wanted = (interop / f"requirements-{environment}.txt").read_text(), r"^mcp==(\S+)"
    found = re.search(wanted, text, re.MULTILINE)
    assert found is not None
    return found[1]


@asynccontextmanager
async def running(real: Real) -> AsyncIterator[int]:
    """The server as a process; its port."""
    words = command(real.environment)
    if real.environment != "everything":
        async with process([*words, *real.flags]) as line:
            yield int(line)
        return
    port = free_port()
    child = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=os.environ | {"PORT": str(port)}
    )
    assert child.stderr is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            while b"listening" not in (line := await child.stderr.readline()):
                assert line, "server-everything ended before it was up"
        drained = asyncio.create_task(child.stderr.read())
        yield port
    finally:
        await end(child)
    await drained


async def probed(real: Real) -> dict[str, Any]:
    """What `epochgate probe --json` says of the server."""
    async with running(real) as port:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "epochgate", "probe", f"http://127.0.0.1:{port}/mcp", "--json",
            "--tool", real.tool, "--arguments", json.dumps(real.arguments),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        output, _ = await child.communicate()
    report: dict[str, Any] = json.loads(output)
    return report
