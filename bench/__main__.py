"""Run the benchmark: rounds in rotated order, each round every contender once, figures to a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import sys
import time

from bench.bounds import judged, values
from bench.contenders import CONTENDERS, PEERS, STORES, WORKERS, Contender, Running, earlier, started, upstream
from bench.measures import Measure, WrongError
from bench.report import FOREIGN, spread, write_report
from bench.tools import real_server

from bench import machine, suite


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names of measures, with commas; a prefix counts")
    parser.add_argument("--contenders", default="", help="names, with commas; all that are installed otherwise")
    parser.add_argument("--before", type=pathlib.Path, help="source root of another version of epochgate")
    parser.add_argument("--tries", type=int, default=3, help="at a run that other work on the machine disturbs")
    parser.add_argument("--scale", type=float, default=1.0, help="of the work in each run")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(".bench/results.json"))
    parser.add_argument("--render", action="store_true", help="no new runs: write the report of those in the output")
    parser.add_argument("--report", type=pathlib.Path, help="folder for performance.md and its plots")
    options = parser.parse_args()
    if not options.render and shutil.which("wrk") is None:
        parser.exit(69, "wrk is not installed: on Debian, `apt-get install wrk nginx haproxy strace`\n")
    return options


def choose(options: argparse.Namespace) -> list[Contender | None]:
    """The contenders that are wanted and can run; None is the direct way."""
    wanted = options.contenders.split(",") if options.contenders else []
    chosen: list[Contender | None] = [None] if not wanted or "direct" in wanted else []
    others = [earlier(options.before)] if options.before else []
    for contender in (*CONTENDERS, *STORES, *WORKERS, *others, *PEERS):
        if wanted and contender.name not in wanted:
            continue
        if missing := contender.missing():
            print(f"skipped: {contender.name}: {missing}")
        else:
            chosen.append(contender)
    return chosen


def main() -> int:
    options = parse()
    if options.render:
        results = json.loads(options.output.read_text())
    else:
        results = play(options)
        print(f"\n{options.output}: {len(results['runs'])} runs")
        summarize(results["runs"])
    if options.report:
        write_report(results, suite.measures(), options.report)
    return 0


def play(options: argparse.Namespace) -> dict:
    """All rounds; what was measured is in the output after each."""
    os.sched_setaffinity(0, {machine.LOAD_CPU})
    only = tuple(options.only.split(","))  # the empty prefix fits all
    measures = [measure for measure in suite.measures(options.scale) if measure.name.startswith(only)]
    chosen = choose(options)
    results = {"machine": machine.describe(), "versions": suite.versions(chosen), "rounds": options.rounds, "runs": []}
    for number in range(options.rounds):
        turn = number % len(chosen)
        play_round(number, chosen[turn:] + chosen[:turn], measures, options.tries, results["runs"])
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1))
    return results


def play_round(
    number: int, chosen: list[Contender | None], measures: list[Measure], tries: int, runs: list[dict]
) -> None:
    for measure in measures:
        for contender in chosen:
            name = contender.name if contender else "direct"
            if not suite.takes_part(measure, name):
                continue
            figures: dict[str, float] = {}
            for _ in range(tries):
                try:
                    with (
                        real_server() if measure.real else upstream() as server,
                        started(contender, server.port) as running,
                    ):
                        again = run(measure, running, server)
                except (WrongError, RuntimeError, OSError, ValueError) as error:
                    print(f"round {number + 1} {measure.name} {name}: {error}", file=sys.stderr)
                    break
                if not figures or again["foreign"] < figures["foreign"]:
                    figures = again
                if figures["foreign"] <= FOREIGN:
                    break
            if figures:
                runs.append({"round": number, "measure": measure.name, "contender": name, "figures": figures})
                shown = " ".join(f"{key}={value:.4g}" for key, value in figures.items())
                print(f"round {number + 1} {measure.name:18} {name:18} {shown}", flush=True)


def run(measure: Measure, running: Running, server: Running) -> dict[str, float]:
    while machine.time_wait_sockets() > 20000:  # they would make every connect dear
        time.sleep(1)
    return measure.run(running, server)


def summarize(runs: list[dict]) -> None:
    names = list(dict.fromkeys(run["contender"] for run in runs))
    for measure in suite.measures():
        rows = {name: list(values(runs, measure.name, name, measure.figure).values()) for name in names}
        if any(rows.values()):
            print(f"\n{measure.title} ({measure.unit})")
            for name, figures in rows.items():
                print(f"  {name:18} {spread(figures)}")
    print()
    for bound, figures, holds in judged(runs):
        if holds is not None:
            print(f"{'met    ' if holds else 'NOT MET'} {bound.title}: {spread(figures)} (bound {bound.bound:g})")


if __name__ == "__main__":
    sys.exit(main())
