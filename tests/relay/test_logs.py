"""A log that cannot be written disturbs nobody (T6, F1)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from relay.process import PATIENCE, Process, command, free_port, read_request, upstream
from relay.wire import get, ok

MANY = 300  # requests: their log lines are more than any buffer on the way holds


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("log", ["full disk", "closed pipe"])
def test_t6_requests_are_answered_where_the_log_cannot_be_written(log, form):
    def answer(sock: socket.socket) -> None:
        while read_request(sock):
            sock.sendall(ok(b"fine"))

    if log == "full disk":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stderr = os.pipe()
        os.close(reader)
    with upstream(answer) as upstream_port:
        port = free_port()
        words = ["serve", "--upstream", f"http://127.0.0.1:{upstream_port}", "--listen", f"127.0.0.1:{port}"]
        environment = {**os.environ, "EPOCHGATE_LOG__FORMAT": form}
        popen = subprocess.Popen(
            command("uvloop", *words, "--admin-listen", f"127.0.0.1:{free_port()}"),
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
        )  # fmt: skip
        os.close(stderr)
        try:
            assert popen.stdout is not None
            assert "accepts connections" in popen.stdout.readline()
            proxy = Process(popen, port, Path(os.devnull))
            for _ in range(MANY):
                assert proxy.ask(get()).endswith(b"fine")
            popen.send_signal(signal.SIGINT)
            assert popen.wait(PATIENCE) == 0
        finally:
            popen.kill()
            popen.communicate()
