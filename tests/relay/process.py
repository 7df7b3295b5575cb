"""The proxy as a process of its own, and blocking sockets around it: for what a process costs or says."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE = 10.0  # s

# How `epochgate` is started on each event loop; it takes uvloop where it is installed.
PROGRAMS = {
    "asyncio": "import sys; sys.modules['uvloop'] = None; from epochgate.cli import main; sys.exit(main())",
    "uvloop": "import sys, uvloop; from epochgate.cli import main; sys.exit(main())",
}

Handler = Callable[[socket.socket], None]


@dataclass
class Process:
    """`errors` is the file that its stderr goes to."""

    popen: subprocess.Popen[str]
    port: int
    errors: Path
    at_start: int = field(init=False)

    def __post_init__(self) -> None:
        self.at_start = self.memory()

    def memory(self, key: str = "VmRSS") -> int:
        """Resident bytes now, or with `VmHWM` the most there ever were."""
        for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"no {key}")

    def growth(self) -> int:
        """Bytes that its memory ever grew by since it began to serve."""
        return self.memory("VmHWM") - self.at_start

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.popen.pid}/fd").iterdir()))

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def ask(self, request: bytes) -> bytes:
        """One request on a connection of its own; the whole answer."""
        with self.connect() as sock:
            sock.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            answer = b""
            while data := sock.recv(65536):
                answer += data
            return answer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def command(loop: str, *words: str) -> list[str]:
    return [sys.executable, "-c", PROGRAMS[loop], *words]


@contextlib.contextmanager
def serving(loop: str, upstream_port: int, directory: Path) -> Iterator[Process]:
    """A proxy that accepts connections; it must end by itself when told so."""
    port = free_port()
    words = ["serve", "--upstream", f"http://127.0.0.1:{upstream_port}", "--listen", f"127.0.0.1:{port}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EPOCHGATE_")}
    errors = directory / "stderr"
    with errors.open("w") as stderr:
        popen = subprocess.Popen(
            command(loop, *words, "--admin-listen", f"127.0.0.1:{free_port()}"),
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
        )  # fmt: skip
    try:
        assert popen.stdout is not None
        assert "accepts connections" in popen.stdout.readline()
        yield Process(popen, port, errors)
        popen.send_signal(signal.SIGINT)
        assert popen.wait(PATIENCE) == 0
    finally:
        popen.kill()
        popen.communicate()
    text = errors.read_text()
    for word in ("Traceback", "never retrieved", "Unclosed", "exception"):
        assert word not in text, text[-3000:]


@contextlib.contextmanager
def upstream(handle: Handler, port: int = 0) -> Iterator[int]:
    """An upstream with a thread for each connection; its port."""
    with socket.create_server(("127.0.0.1", port), backlog=512) as listener:

        def work(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                sock.settimeout(60)
                handle(sock)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    threading.Thread(target=work, args=(sock,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def read_head(sock: socket.socket) -> bytes:
    """A head and nothing more; empty at the end of the connection."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        if not byte:
            return b""
        data += byte
    return data


def read_request(sock: socket.socket) -> bytes:
    """A request with a sized body or none; empty at the end of the connection."""
    data = read_head(sock)
    for line in data.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            left = int(line.partition(b":")[2])
            while left:
                more = sock.recv(min(left, 65536))
                if not more:
                    return b""
                left -= len(more)
                data += more
    return data
