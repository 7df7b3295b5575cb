"""The results as a page: docs/reliability.md."""

from __future__ import annotations

from reliability.part import Part

HEAD = """# Reliability

What was done to the proxy to break it, each part with the command that does it again and the figures of its last
run. `make reliability` runs all parts in their short form; `make reliability LONG=--long` gives the full figures.
Traffic goes to loopback only. This page is written by that command; the [threat model](THREAT_MODEL.md) says what is
promised.
"""


def render(parts: list[Part], results: dict) -> str:
    """The page: a section for each part, those that were not run said so."""
    return HEAD + "".join(_section(part, results.get(part.name)) for part in parts)


def _section(part: Part, result: dict | None) -> str:
    lines = [f"\n## {part.title}\n", part.about.strip(), ""]
    if result is None:
        return "\n".join([*lines, f"Not run yet: `make reliability ONLY={part.name}`.", ""])
    long = " LONG=--long" if result["long"] else ""
    last = f"{_took(result['seconds'])} on {result['date']}, seed {result['seed']}"
    lines += [
        f"`make reliability ONLY={part.name}{long}`: {last}.",
        "",
        "| what | figure | bound | |",
        "|---|---|---|---|",
    ]
    for figure in result["figures"]:
        holds = "holds" if figure["holds"] else "**not known**" if figure.get("unreachable") else "**fails**"
        lines.append(f"| {figure['what']} | {figure['value']} | {figure['bound']} | {holds} |")
    lines += ["", *(f"![{part.title}](reliability/{plot})\n" for plot in part.plots)]
    return "\n".join(lines)


def _took(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
