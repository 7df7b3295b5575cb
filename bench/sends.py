"""System calls that send, counted by strace: the figure that no tuning of a library can hide."""

from __future__ import annotations

import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.caller import connected
from bench.contenders import Running
from bench.measures import Figures, WrongError, read_streams
from bench.sink import Job

from bench import machine

SENDING = ("write", "writev", "send", "sendto", "sendmsg", "sendmmsg")


@contextmanager
def traced(contender: Running) -> Iterator[Callable[[], int]]:
    """Trace the contender's processes; the callable ends that and tells how often they sent."""
    if shutil.which("strace") is None:
        raise WrongError("strace is not installed")
    pids = machine.family(contender.pid or 0)
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "counts"
        command = [
            "strace",
            "-f",
            "-c",
            "-e",
            f"trace={','.join(SENDING[:2])},{','.join(SENDING[3:])}",
            "-o",
            str(output),
        ]
        for pid in pids:
            command += ["-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        for _ in pids:
            tracer.stderr.readline()  # "Process ... attached"

        def count() -> int:
            tracer.send_signal(signal.SIGINT)
            tracer.wait(10)
            rows = [line.split() for line in output.read_text().splitlines()]
            return sum(int(row[3]) for row in rows if row and row[-1] in SENDING)

        try:
            yield count
        finally:
            if tracer.poll() is None:
                tracer.kill()
                tracer.wait()


def measure_call_sends(path: bytes, calls: int) -> Callable[[Running, Running], Figures]:
    """Sends of one POST."""

    def run(contender: Running, upstream: Running) -> Figures:
        with connected(contender.port) as caller:
            caller.initialize()
            for number in range(1, 11):
                caller.call(number, path)
            with traced(contender) as count:
                for number in range(11, 11 + calls):
                    caller.call(number, path)
                return {"sends": count() / calls, "foreign": 0.0}

    return run


def measure_event_sends(streams: int, each: int) -> Callable[[Running, Running], Figures]:
    """Sends of one event: a long run less a short one, so that what opens the streams does not count."""

    def run(contender: Running, upstream: Running) -> Figures:
        sent = []
        for count in (each, 3 * each):
            with traced(contender) as counted:
                job = Job(contender.port, f"/paced?size=1024&rate=50&epoch=1&n={count}", streams)
                read_streams(contender, upstream, job, streams * count)
                sent.append(counted())
        return {"sends": (sent[1] - sent[0]) / (2 * each * streams), "foreign": 0.0}

    return run
