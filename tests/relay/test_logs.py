"""A log that cannot be written disturbs nobody (T6, F1)."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
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


def test_t6_a_log_that_nobody_reads_stops_nothing():
    """Lines are dropped, those that are kept stay in order, and when it is read again it says how many were lost."""

    def answer(sock: socket.socket) -> None:
        while read_request(sock):
            sock.sendall(ok(b"fine"))

    reader, stderr = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    with upstream(answer) as upstream_port, os.fdopen(reader, "rb") as log:
        port = free_port()
        words = ["serve", "--upstream", f"http://127.0.0.1:{upstream_port}", "--listen", f"127.0.0.1:{port}"]
        code = "from epochgate.relay import logs; logs.BACKLOG = 8192; from epochgate.cli import main; main()"
        popen = subprocess.Popen(
            [sys.executable, "-c", code, *words, "--admin-listen", f"127.0.0.1:{free_port()}"],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        os.close(stderr)
        try:
            assert popen.stdout is not None
            assert "accepts connections" in popen.stdout.readline()
            proxy = Process(popen, port, Path(os.devnull))
            for _ in range(MANY):
                assert proxy.ask(get()).endswith(b"fine")
            lines = []
            while not lines or lines[-1]["event"] != "log.lost":
                lines.append(json.loads(log.readline()))
            assert proxy.ask(get()).endswith(b"fine")
            popen.send_signal(signal.SIGINT)
            lines += [json.loads(line) for line in log]
            assert popen.wait(PATIENCE) == 0
        finally:
            popen.kill()
            popen.communicate()
    (lost,) = [line["lines"] for line in lines if line["event"] == "log.lost"]
    assert lost > 0
    done = [line for line in lines if line["event"] == "request.done"]
    assert len(done) + lost == MANY + 1
    times = [line["timestamp"] for line in lines]
    assert times == sorted(times)
    assert lines[-1]["event"] == "drain.done", "the end is not lost"


def test_what_libraries_log_is_a_line_of_json():
    """`grep '^{'` leaves all of the log; of objects that are shown nothing is told (L7)."""
    code = (
        "import logging, warnings; from epochgate.relay.logs import set_up_logs; from epochgate.settings import Log\n"
        "set_up_logs(Log())\n"
        "try: raise ValueError('hunter2')\n"
        "except ValueError: logging.getLogger('asyncio').exception('a request could not be handled')\n"
        "logging.getLogger('asyncio').error('Task was destroyed\\ntask: hunter2')\n"
        "logging.getLogger('redis.asyncio').error('hunter2')\n"
        "warnings.warn('late')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"], line["source"], line["level"]) for line in lines] == [
        ("fault", "asyncio", "error"), ("fault", "asyncio", "error"), ("fault", "py.warnings", "warning"),
    ]  # fmt: skip
    assert lines[0]["message"].startswith("a request could not be handled: ValueError at <string>:")
    assert lines[1]["message"] == "Task was destroyed"
    assert b"hunter2" not in done.stderr


def test_there_may_be_no_stderr():
    code = (
        "import os, structlog; from epochgate.relay.logs import set_up_logs; from epochgate.settings import Log\n"
        "set_up_logs(Log()); structlog.get_logger().error('x')\n"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], timeout=PATIENCE, check=False)
    assert done.returncode == 0
