"""The results as a page: docs/performance.md, with its plots in docs/performance/."""

from __future__ import annotations

import pathlib
import statistics

from bench.bounds import judged, values
from bench.measures import Measure
from bench.plots import bars, short

FOREIGN = 0.10  # of one CPU: a run beside more work of others is repeated
PLOTTED = (
    "json-16",
    "call-16",
    "paced-epoch",
    "flood-1k-each",
    "latency-json",
    "quiet-2000",
    "tools",
    "steps",
)

PAGE = pathlib.Path(__file__).with_name("page.md")


def write_report(results: dict, measures: list[Measure], folder: pathlib.Path) -> None:
    """Write the page and its plots into `folder`."""
    runs = results["runs"]
    names = list(dict.fromkeys(run["contender"] for run in runs))
    plots = folder / "performance"
    plots.mkdir(parents=True, exist_ok=True)
    shown = []
    for measure in measures:
        rows = {name: list(values(runs, measure.name, name, measure.figure).values()) for name in names}
        rows = {name: figures for name, figures in rows.items() if figures and (name != "direct" or measure.real)}
        if measure.name in PLOTTED and rows:
            (plots / f"{measure.name}.svg").write_text(bars(measure.title, measure.unit, rows))
            shown.append(f"![{measure.title}](performance/{measure.name}.svg)\n")
    disturbed = sum(run["figures"]["foreign"] > FOREIGN for run in runs)
    note = f" {disturbed} of {len(runs)} runs stayed disturbed by other work on the machine." if disturbed else ""
    versions = ", ".join(f"{name} {told}" for name, told in results["versions"].items())
    page = PAGE.read_text().format(
        machine="\n".join(f"- {key}: {value}" for key, value in results["machine"].items()),
        versions=versions,
        rounds=results["rounds"],
        disturbed=note,
        bounds="\n".join(_bound_rows(runs)),
        tables="\n".join(_tables(runs, measures, names)),
        plots="\n".join(shown),
        foreign=FOREIGN,
    )
    (folder / "performance.md").write_text(page)


def _bound_rows(runs: list[dict]) -> list[str]:
    rows = []
    for bound, figures, holds in judged(runs):
        unit = f" {bound.unit}" if bound.unit else ""
        sign = "\u2265" if bound.least else "\u2264"
        aim = f"{bound.aim:g}{unit}" if bound.aim is not None else ""
        word = {True: "met", False: "**not met**", None: "not measured"}[holds]
        rows.append(f"| {bound.title} | {spread(figures)}{unit} | {sign} {bound.bound:g}{unit} | {aim} | {word} |")
    return rows


def _tables(runs: list[dict], measures: list[Measure], names: list[str]) -> list[str]:
    lines = []
    for title, prefixes, figure in (
        ("CPU in us per request or event", ("json", "call", "paced", "flood", "big", "steps"), "us"),
        ("Requests or events per second", ("json", "call", "flood", "tools"), "per_second"),
        ("Latency under load, p99 in ms", ("json", "call", "paced", "tools"), "p99_ms"),
        ("Single calls and resumes, start-up, in ms", ("latency", "resume", "start"), "ms"),
        ("Memory of an open quiet stream in KB", ("quiet",), "kb"),
        ("Time to the first event while streams open, p99 in ms", ("quiet",), "ttfb_p99_ms"),
        ("System calls that send", ("sends",), "sends"),
    ):
        rows = [measure for measure in measures if measure.name.startswith(prefixes)]
        taking = [name for name in names if any(values(runs, row.name, name, figure) for row in rows)]
        if figure == "us":
            taking = [name for name in taking if name != "direct"]
        lines += [f"### {title}", "", "| | " + " | ".join(taking) + " |", "|---" * (len(taking) + 1) + "|"]
        for row in rows:
            cells = [spread(list(values(runs, row.name, name, figure).values())) for name in taking]
            if any(cell != "-" for cell in cells):
                lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def spread(figures: list[float]) -> str:
    """The median, and the range where there is more than one value."""
    if not figures:
        return "-"
    text = short(statistics.median(figures))
    return text if len(figures) == 1 else f"{text} ({short(min(figures))}-{short(max(figures))})"
