"""What is measured. Each function takes a running contender and the upstream, and returns plain figures.

A figure that tells of the work done (`requests`, `events`) is compared with what was asked for; a run that lost or
changed anything raises `WrongError`, and no figure of it counts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench.caller import connected, open_sessions
from bench.contenders import HERE, ROOT, Running
from bench.sink import Job

from bench import machine

Figures = dict[str, float]
SESSIONS = 64


class WrongError(Exception):
    """What arrived is not what was sent."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One row of the table. `figure` is the one that the ratios are made of, `unit` what it is in."""

    name: str
    title: str
    figure: str
    unit: str
    run: Callable[[Running, Running], Figures]
    real: bool = False  # against a real FastMCP server


def load_posts(
    contender: Running, upstream: Running, path: str, connections: int, seconds: float, sessions: list[bytes]
) -> Figures:
    """Have wrk POST small tool calls of these sessions, as many as go, on this many connections."""
    with tempfile.NamedTemporaryFile("wb") as file:
        file.write(b"\n".join(sessions) + b"\n")
        file.flush()
        command = [
            "wrk",
            "-t",
            "1",
            "-c",
            str(connections),
            "-d",
            f"{seconds}s",
            "--timeout",
            "30s",
            "-s",
            str(HERE / "post.lua"),
        ]
        command += [f"http://127.0.0.1:{contender.port}/{path}", "--", file.name]
        meter = machine.Meter(contender.pid, upstream.pid or 0)
        done = subprocess.run(machine.pinned(machine.LOAD_CPU, command), capture_output=True, text=True, check=True)
        sample = meter.stop()
    told = json.loads(next(line[5:] for line in done.stdout.splitlines() if line.startswith("JSON ")))
    count = told["requests"]
    # wrk makes one request up beforehand, and those under way at the end are never answered.
    if told["bad"] or told["again"] or told["errors"] or not count or told["sent"] - told["good"] > connections + 1:
        raise WrongError(f"{contender.name}: {told}")
    return {
        "requests": count,
        "per_second": count / (told["us"] / 1e6),
        "us": sample.proxy / count * 1e6,
        "upstream_cpu": sample.upstream / sample.wall,
        "proxy_cpu": sample.proxy / sample.wall,
        "p50_ms": told["p50"] / 1000,
        "p99_ms": told["p99"] / 1000,
        "foreign": sample.foreign,
    }


def measure_posts(path: str, connections: int, seconds: float) -> Callable[[Running, Running], Figures]:
    """POSTs to the benchmark's own upstream."""

    def run(contender: Running, upstream: Running) -> Figures:
        sessions = open_sessions(contender.port, SESSIONS)
        return load_posts(contender, upstream, path, connections, seconds, sessions)

    return run


def read_streams(contender: Running, upstream: Running, job: Job, expected: int) -> tuple[Figures, machine.Sample]:
    """Run the sink, and see that every event came."""
    meter = machine.Meter(contender.pid, upstream.pid or 0)
    command = machine.pinned(machine.LOAD_CPU, [sys.executable, "-m", "bench.sink", json.dumps(asdict(job))])
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    sample = meter.stop()
    told = json.loads(done.stdout)
    if told["events"] != expected or told["wrong"]:
        raise WrongError(f"{contender.name}: {expected} events were sent; {told}")
    return told, sample


def measure_events(
    target: str, streams: int, each: int, *, init: str = "/init"
) -> Callable[[Running, Running], Figures]:
    """Event streams that run at the same time, `each` with this many events."""

    def run(contender: Running, upstream: Running) -> Figures:
        job = Job(contender.port, f"{target}&n={each}", streams, init)
        told, sample = read_streams(contender, upstream, job, streams * each)
        count = told["events"]
        return {
            "events": count,
            "per_second": count / told["seconds"],
            "us": sample.proxy / count * 1e6,
            "upstream_cpu": sample.upstream / sample.wall,
            "proxy_cpu": sample.proxy / sample.wall,
            "p50_ms": told["p50"] * 1000,
            "p99_ms": told["p99"] * 1000,
            "ttfb_ms": told["ttfb_p50"] * 1000,
            "foreign": sample.foreign,
        }

    return run


def measure_big(size: int) -> Callable[[Running, Running], Figures]:
    """One event of `size` bytes, several times; CPU of the proxy for one."""

    def run(contender: Running, upstream: Running) -> Figures:
        times = 3
        meter = machine.Meter(contender.pid, upstream.pid or 0)
        for _ in range(times):
            job = Job(contender.port, f"/big?size={size}", 1)
            told, _ = read_streams(contender, upstream, job, 1)
        sample = meter.stop()
        return {"us": sample.proxy / times * 1e6, "seconds": told["seconds"], "foreign": sample.foreign}

    return run


def measure_quiet(count: int) -> Callable[[Running, Running], Figures]:
    """Streams that are open and say nothing: memory of each, CPU of all, time to the first event while they open."""

    def run(contender: Running, upstream: Running) -> Figures:
        pids = machine.family(contender.pid) if contender.pid else []
        before = machine.resident_kb(pids)
        meter = machine.Meter(contender.pid, upstream.pid or 0)
        job = Job(contender.port, "/idle", count, opening=16, hold=True)
        command = machine.pinned(machine.LOAD_CPU, [sys.executable, "-m", "bench.sink", json.dumps(asdict(job))])
        sink = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert sink.stdin is not None
        assert sink.stdout is not None
        told = json.loads(sink.stdout.readline() or '{"ttfb_p99": 0}')
        if "open_s" not in told:
            raise WrongError(f"{contender.name}: the {count} streams did not open")
        time.sleep(0.5)
        after = machine.resident_kb(pids)
        opened = machine.cpu_seconds(pids)
        time.sleep(2)
        quiet = machine.cpu_seconds(pids) - opened
        sink.stdin.write("\n")
        sink.stdin.close()
        ended = json.loads(sink.stdout.readline())
        sink.wait()
        sample = meter.stop()
        if ended["broken"]:
            raise WrongError(f"{contender.name}: {ended['broken']} of {count} quiet streams were ended")
        return {
            "kb": (after - before) / count,
            "ttfb_p99_ms": told["ttfb_p99"] * 1000,
            "ttfb_p50_ms": told["ttfb_p50"] * 1000,
            "us": (opened and sample.proxy) / count * 1e6,
            "quiet_cpu": quiet / 2,
            "foreign": sample.foreign,
        }

    return run


def measure_latency(path: bytes, calls: int) -> Callable[[Running, Running], Figures]:
    """One unloaded POST after the other, the proxied and the direct one in turns: the difference of the medians."""

    def run(contender: Running, upstream: Running) -> Figures:
        meter = machine.Meter(contender.pid, upstream.pid or 0)
        with connected(contender.port) as proxied, connected(upstream.port) as direct:
            proxied.initialize()
            direct.initialize()
            took: dict[bool, list[float]] = {True: [], False: []}
            for number in range(1, calls + 1):
                took[True].append(proxied.call(number, path))
                took[False].append(direct.call(number, path))
        sample = meter.stop()
        skip = calls // 10
        median = {way: statistics.median(times[skip:]) * 1000 for way, times in took.items()}
        p99 = {way: statistics.quantiles(times[skip:], n=100)[98] * 1000 for way, times in took.items()}
        return {
            "ms": median[True] - median[False],
            "p99_ms": p99[True] - p99[False],
            "direct_ms": median[False],
            "foreign": sample.foreign,
        }

    return run


def measure_resume(way: str, times: int) -> Callable[[Running, Running], Figures]:
    """A stream is read to its middle, its client goes, and a new connection resumes it; time to its next event."""

    def run(contender: Running, upstream: Running) -> Figures:
        path = f"/resume/{way}".encode()
        meter = machine.Meter(contender.pid, upstream.pid or 0)
        took = []
        for _ in range(times):
            with connected(contender.port) as first:
                session = first.initialize()
                first.resume(path, None, b"id: 10\n")
            with connected(contender.port) as second:
                second.session = session
                took.append(second.resume(path, 5, b"id: 6\n"))
                if b"id: 5\n" in second.last:
                    raise WrongError(f"{contender.name}: an event came twice")
        sample = meter.stop()
        return {"ms": statistics.median(took) * 1000, "max_ms": max(took) * 1000, "foreign": sample.foreign}

    return run


def measure_start(contender: Running, _: Running) -> Figures:
    """From the start of the process until it accepts connections."""
    return {"ms": contender.start_seconds * 1000, "foreign": 0.0}
