"""`epochgate serve` as a process of its own, in front of one server, on free ports of 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 10.0
STOP_SECONDS = 3.0
LINES_KEPT = 5

CONFIG = """\
version: 1
listen: {listen}
upstream: {{url: "{upstream}"}}
admin: {{listen: {admin}}}
drain: {{grace: 0s, window: 0s}}  # nobody waits for the demo's streams
policies:
  - {{name: demo, mode: {mode}}}  # the mode apart, all defaults
"""


class StageError(Exception):
    """The proxy did not start. The message has the end of what it said."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy, and the last lines of what it said."""

    url: str
    pid: int
    said: deque[str]


@contextlib.asynccontextmanager
async def proxy_before(upstream: str, mode: str) -> AsyncIterator[Proxy]:
    """Run the proxy before `upstream` until the block is left.

    Raises StageError when it does not accept connections in time.
    """
    listen, admin = free_addresses(2)
    environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("EPOCHGATE_")}
    with tempfile.TemporaryDirectory(prefix="epochgate-demo-") as directory:
        file = Path(directory) / "epochgate.yaml"
        file.write_text(CONFIG.format(listen=listen, admin=admin, upstream=upstream, mode=mode), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "epochgate",
            "serve",
            "--config",
            str(file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends the proxy
        )
        assert process.stdout is not None
        assert process.stderr is not None
        said: deque[str] = deque(maxlen=LINES_KEPT)
        readers = [asyncio.create_task(_collect(process.stderr, said))]
        try:
            await _started(process, process.stdout, said)
            readers.append(asyncio.create_task(_collect(process.stdout, said)))
            yield Proxy(f"http://{listen}", process.pid, said)
        finally:
            await _stop(process)
            await asyncio.gather(*readers)


def free_addresses(count: int) -> list[str]:
    """Addresses of 127.0.0.1 on which nobody listens at this moment, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


async def _started(process: asyncio.subprocess.Process, stdout: asyncio.StreamReader, said: deque[str]) -> None:
    """Wait for the one line that the proxy prints when it accepts connections."""
    try:
        async with asyncio.timeout(START_SECONDS):
            if await stdout.readline():
                return
            await process.wait()
    except TimeoutError:
        pass
    ended = process.returncode is not None
    state = f"ended with status {process.returncode}" if ended else f"did not accept connections in {START_SECONDS:g} s"
    raise StageError("\n".join([f"`epochgate serve` {state}. The end of what it said:", *said]))


async def _collect(stream: asyncio.StreamReader, said: deque[str]) -> None:
    async for line in stream:
        said.append(line.decode(errors="replace").rstrip())


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End exactly this process: politely, then not."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
