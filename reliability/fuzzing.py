"""The part of the run that feeds the proxy what nobody would send: atheris on each target, then mutated exchanges."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from reliability.fuzz import CORPUS, TARGETS
from reliability.mutation import mutate
from reliability.part import Figure, Options, Part

SHORT = 20  # s for each target
LONG = 3600  # s for all of them together
SLOWEST = 60  # s that one input may take, on a machine that is busy with other work
MEMORY = 1024  # MiB of the process that runs the target

# What each target is, for the page.
ABOUT = {
    "sse": "SSE framer",
    "heads": "fields and targets",
    "requests": "bytes of a client, whole proxy",
    "answers": "bytes of the upstream, whole proxy",
    "resume": "replays on a resume, whole proxy",
    "peek": "JSON peek",
    "ids": "order of event ids",
}
_LAST = re.compile(r"cov: (\d+) ft: \d+ corp: (\d+)/(\S+) ")


def run(options: Options) -> list[Figure]:
    """One row for each target, and one for each side of the mutated exchanges."""
    figures: list[Figure] = []
    if importlib.util.find_spec("atheris") is None:
        figures.append(Figure("atheris", "not installed: it has no wheel for this Python", "runs", holds=False))
    else:
        seconds = LONG // len(TARGETS) if options.long else SHORT
        with ThreadPoolExecutor(1 if options.long else 2) as pool:
            figures += pool.map(lambda target: fuzz(target, seconds, options), TARGETS)
    figures += mutate(5_000 if options.long else 400, options.seed)
    return figures


def fuzz(target: str, seconds: int, options: Options) -> Figure:
    """One target for this long; what broke it is left in the part's folder."""
    found, log = options.work / target, options.work / f"{target}.log"
    found.mkdir(parents=True, exist_ok=True)
    for former in options.work.glob(f"{target}-*"):
        former.unlink()
    command = [
        sys.executable, "-m", "reliability.fuzz", target, f"-max_total_time={seconds}", f"-timeout={SLOWEST}",
        f"-report_slow_units={SLOWEST}",
        f"-rss_limit_mb={MEMORY}", f"-seed={options.seed}", "-print_final_stats=1",
        f"-artifact_prefix={options.work}/{target}-", str(found), str(CORPUS / target),
    ]  # fmt: skip
    with log.open("wb") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    text = log.read_text(errors="replace")
    coverage = _LAST.findall(text)
    edges, inputs, size = coverage[-1] if coverage else ("0", "0", "0b")
    runs = int(_stat(text, "number_of_executed_units"))
    broken = [file.name for file in sorted(options.work.glob(f"{target}-*"))]
    value = f"{runs:,} inputs in {seconds} s, {edges} edges, corpus {inputs} ({size}), {len(broken)} findings"
    holds = ended.returncode == 0 and not broken and runs > 0
    return Figure(f"{target}: {ABOUT[target]}", value, "nothing found", holds=holds)


def _stat(text: str, name: str) -> str:
    found = re.search(rf"stat::{name}:\s*(\d+)", text)
    return found[1] if found else "0"


PART = Part(
    name="fuzzing",
    title="Fuzzing",
    about="""
[atheris](https://github.com/google/atheris) (libFuzzer for Python) on seven targets, each guided by the coverage of
the proxy's own code and each with a second opinion: the framer against a reader written from the WHATWG text, and
against itself fed in other pieces; the JSON peek against the standard library's reading; the order of ids against the
whole list looked at once; and the whole proxy, in one process with a clock that leaps, against a strict reader of
HTTP/1.1 (`reliability/strict.py`): whatever a client sends, the upstream reads it by the letter and never sees more
requests than were sent; whatever the upstream answers, the client reads one clear answer, and nobody else gets any of
it; whatever is replayed on a resume, no unchecked event is released. No hang, no exception that nobody handled, no
500. Inputs that are worth keeping are in `reliability/corpus` and run with the tests. Then
[hypothesis](https://hypothesis.readthedocs.io) mutates whole exchanges (bytes cut out, doubled, exchanged, put in) on
either side, and the same must hold.
""",
    run=run,
)
