"""What the kernel says: CPU time of a process and its children, CPU time of everybody, memory, pinning."""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass

_TICK = os.sysconf("SC_CLK_TCK")
PROXY_CPU, LOAD_CPU = (0, 1) if (os.cpu_count() or 1) > 1 else (0, 0)
ALL_CPUS = f"{PROXY_CPU},{LOAD_CPU}"
_PROC = pathlib.Path("/proc")


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found.extend(children.get(each, ()))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Time on a CPU of all threads of these processes, from the scheduler's own clock (ns, not ticks)."""
    total = 0
    for pid in pids:
        for stat in _PROC.glob(f"{pid}/task/*/schedstat"):
            try:
                total += int(stat.read_text().split()[0])
            except (OSError, IndexError):
                continue
    return total / 1e9


def resident_kb(pids: Iterable[int]) -> int:
    """Proportional set size: memory that is shared among the processes counts once."""
    total = 0
    for pid in pids:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total


def _busy_seconds() -> float:
    fields = [int(value) for value in (_PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICK


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU time used between `Meter` and its `stop`, in s, by role; `foreign` as a share of one CPU."""

    wall: float
    proxy: float
    upstream: float
    foreign: float


class Meter:
    """Measures one run. The load generator and this process are own time, but no figure of the proxy."""

    def __init__(self, proxy: int | None, upstream: int) -> None:
        self._proxy = family(proxy) if proxy else []
        self._upstream = family(upstream)
        self._start = self._read()

    def _read(self) -> tuple[float, float, float, float, float]:
        own = os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        return time.perf_counter(), cpu_seconds(self._proxy), cpu_seconds(self._upstream), _busy_seconds(), mine

    def stop(self) -> Sample:
        """What was used since. The load generator must have been waited for by then."""
        wall, proxy, upstream, busy, mine = (
            after - before for after, before in zip(self._read(), self._start, strict=True)
        )
        foreign = max(0.0, busy - proxy - upstream - mine)
        return Sample(wall, proxy, upstream, foreign / wall)


def pinned(cpu: int | str, command: list[str]) -> list[str]:
    """The command, held on one CPU where that is possible."""
    return ["taskset", "-c", str(cpu), *command] if shutil.which("taskset") else command


def time_wait_sockets() -> int:
    """Sockets in TIME_WAIT: many of them make every connect dear."""
    for line in (_PROC / "net/sockstat").read_text().splitlines():
        words = line.split()
        if words[0] == "TCP:":
            return int(words[words.index("tw") + 1])
    return 0


def describe() -> dict[str, str]:
    """The machine, for the report."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in (_PROC / "cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "pinning": f"proxy on CPU {PROXY_CPU}, upstream and load on CPU {LOAD_CPU}"
        if shutil.which("taskset")
        else "none",
    }
