"""Run the parts, keep each one's figures in .reliability/results.json, write the page from them."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import platform
import sys
import time
import traceback
from dataclasses import asdict

from reliability.page import render
from reliability.part import Figure, Options, Part

PARTS: tuple[str, ...] = (  # modules of this package with a PART, in the order of the page
    "fuzzing",
    "transparency",
    "smuggling",
    "faults",
    "resources",
    "soak",
    "crash",
    "access",
    "supply",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reliability", description=__doc__)
    parser.add_argument("--long", action="store_true", help="the full figures: hours; otherwise minutes")
    parser.add_argument("--only", default="", help="names of parts, with commas")
    parser.add_argument("--seed", type=int, default=20261201)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(".reliability"), help="for results and logs")
    parser.add_argument("--report", type=pathlib.Path, help="folder for reliability.md and its plots")
    parser.add_argument("--render", action="store_true", help="no new runs: write the page from the results")
    return parser.parse_args()


def parts() -> list[Part]:
    return [importlib.import_module(f"reliability.{name}").PART for name in PARTS]


def main() -> int:
    options = parse()
    store = options.work / "results.json"
    results = json.loads(store.read_text()) if store.exists() else {}
    known = parts()
    wanted = [] if options.render else options.only.split(",") if options.only else [part.name for part in known]
    if strange := set(wanted) - {part.name for part in known}:
        sys.exit(f"no such part: {', '.join(sorted(strange))}; there are: {', '.join(part.name for part in known)}")
    failed = False
    for part in known:
        if part.name not in wanted:
            continue
        figures, took = play(part, options)
        failed |= not all(figure.holds or figure.unreachable for figure in figures)
        results[part.name] = {
            "figures": [asdict(figure) for figure in figures],
            "seconds": round(took, 1),
            "long": options.long,
            "seed": options.seed,
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
        }
        options.work.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(results, indent=1))
    if options.report:
        (options.report / "reliability.md").write_text(render(known, results))
    return int(failed)


def play(part: Part, options: argparse.Namespace) -> tuple[list[Figure], float]:
    """The figures of one part and its seconds; what it raised is a figure that does not hold."""
    print(f"{part.name}: {part.title}", flush=True)
    work = options.work / part.name
    plots = (options.report or options.work) / "reliability"
    for folder in (work, plots):
        folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        figures = part.run(Options(long=options.long, seed=options.seed, plots=plots, work=work))
    except Exception as error:
        traceback.print_exc()
        figures = [Figure("ran to its end", repr(error), "no exception", holds=False)]
    for figure in figures:
        mark = "holds" if figure.holds else "not known" if figure.unreachable else "FAILS"
        print(f"  {mark}  {figure.what}: {figure.value} ({figure.bound})", flush=True)
    return figures, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
