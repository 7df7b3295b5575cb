"""`epochgate serve` as a process of its own, with a configuration of one's own."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 20.0  # s to begin, and to end


@dataclass(frozen=True, slots=True)
class Served:
    """A proxy that accepts connections; `log` is the file that it writes to."""

    address: tuple[str, int]
    log: Path
    process: subprocess.Popen[str]

    def complaints(self) -> list[str]:
        """Lines that tell of something that should not have happened."""
        signs = ('"level": "error"', '"level":"error"', "Traceback", "never retrieved", "Unclosed", "Exception")
        return [
            line for line in self.log.read_text(errors="replace").splitlines() if any(sign in line for sign in signs)
        ]


@contextlib.contextmanager
def serving(upstream: tuple[str, int], work: Path, name: str, **changes: Any) -> Iterator[Served]:
    """A proxy in front of `upstream` with these sections of the configuration; it must end by itself when told so."""
    port, admin = _free_port(), _free_port()
    configuration = {
        "listen": f"127.0.0.1:{port}",
        "admin": {"listen": f"127.0.0.1:{admin}"},
        "upstream": {"url": f"http://{upstream[0]}:{upstream[1]}"},
        "log": {"level": "warning"},
        "drain": {"grace": "0s", "window": "1s"},
        **changes,
    }
    file, log = work / f"{name}.yaml", work / f"{name}.log"
    file.write_text(json.dumps(configuration))  # JSON is YAML
    with log.open("w") as output:
        command = [sys.executable, "-m", "epochgate", "serve", "--config", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "accepts connections" not in line:
            raise RuntimeError(f"the proxy did not start: {log.read_text()}")
        yield Served(("127.0.0.1", port), log, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()
    if process.returncode != 0:
        raise RuntimeError(f"the proxy ended with {process.returncode}: {log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
