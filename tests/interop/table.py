"""Writes docs/clients.md, what real clients see of each fault: in the folder tests, `python -m interop.table`.

With `--from FILE` the outcomes of an earlier run, kept as JSON, are taken.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import re
import sys

import msgspec

from interop.environments import CACHE, HERE, SDKS, UnavailableError, prepare
from interop.faults import SCENARIOS, STEPS, WINDOW, Outcome, play_all

PAGE = HERE.parents[1] / "docs" / "clients.md"
KEPT = CACHE / "outcomes.json"
NAMES = {"python1": "Python", "python2": "Python", "typescript1": "TypeScript"}

HEAD = f"""\
# What clients see

Real SDK clients against real servers of the same SDK, with a fault in the middle of a tool call of {STEPS} steps. Each
fault was played twice: directly, and through epochgate. A command writes this page from one run; do not edit it:

```sh
cd tests && ../.venv/bin/python -m interop.table
```

SDKs: {{versions}}.

- *call*: what became of the pending call. **spliced** is the result of another execution, or of another session.
  "pending" had not ended when the test gave up, after 10 s; "died" took the whole client with it.
- *ended*: seconds from the fault to that end.
- *runs*: how often the tool was executed, as the server counts that answers in the end.
- *next POST*: the status of the next request on the old session; 404 tells a client to start over.
- *new session*: whether it then worked.
- *requests*: of that session at the server in the {WINDOW:.0f} s after the fault, the next POST and a DELETE included.

"Default policy" is `accept: [connection, epoch]` with `unproven: restart`. Where no epoch is told, a stream can be
resumed only from the connection that epochgate holds; `overlap` adds a proof for servers without epochs.
"""

COLUMNS = ("client", "way", "call", "ended", "runs", "next POST", "new session", "requests")


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/clients.md.")
    parser.add_argument("--from", dest="kept", type=pathlib.Path, help="outcomes of an earlier run, a JSON file")
    parser.add_argument("--output", type=pathlib.Path, default=PAGE)
    options = parser.parse_args()
    try:
        outcomes = read(options.kept) if options.kept else run()
    except (UnavailableError, ExceptionGroup) as error:
        print(f"interop.table: {error}", file=sys.stderr)
        return 1
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(render(outcomes))
    return 0


def run() -> list[Outcome]:
    """Plays everything; the outcomes are kept for `--from`."""
    found = asyncio.run(play_all([prepare(name) for name in SDKS], direct=True))
    failed = [each for each in found.values() if isinstance(each, Exception)]
    if failed:
        raise ExceptionGroup("runs that failed", failed)
    outcomes = [each for each in found.values() if isinstance(each, Outcome)]
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))
    return outcomes


def read(path: pathlib.Path) -> list[Outcome]:
    return msgspec.json.decode(path.read_bytes(), type=list[Outcome])


def versions() -> dict[str, str]:
    """The pinned version of each SDK."""
    pins = {name: (HERE / f"requirements-{name}.txt").read_text() for name in ("python1", "python2")}
    found = {name: _only(r"^mcp==(\S+)", text) for name, text in pins.items()}
    return found | {"typescript1": _only(r'"@modelcontextprotocol/sdk": "(.+?)"', (HERE / "package.json").read_text())}


def _only(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match is not None
    return match[1]


def labels() -> dict[str, str]:
    """What the page calls each SDK: its language and the pinned version."""
    return {name: f"{NAMES[name]} {version}" for name, version in versions().items()}


def render(outcomes: list[Outcome]) -> str:
    """The page."""
    called = labels()
    parts = [HEAD.format(versions=", ".join(called.values()))]
    for scenario in SCENARIOS:
        rows = [outcome for outcome in outcomes if outcome.scenario == scenario.name]
        rows.sort(key=lambda outcome: (SDKS.index(outcome.sdk), outcome.proxied))
        lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *(_row(each, called[each.sdk]) for each in rows)]
        parts.append(f"\n## {scenario.title}\n\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _row(outcome: Outcome, label: str) -> str:
    return _line(
        [
            label,
            "epochgate" if outcome.proxied else "direct",
            _call(outcome),
            "" if outcome.answer == "pending" else f"{max(outcome.after, 0):.1f} s",
            "" if outcome.runs is None else str(outcome.runs),
            "" if outcome.next_status is None else str(outcome.next_status),
            "yes" if outcome.fresh else "no",
            str(outcome.upstream),
        ]
    )


def _call(outcome: Outcome) -> str:
    if outcome.answer == "spliced":
        return f"**spliced**: {outcome.detail}"
    if outcome.answer != "error":
        return outcome.answer
    code = "" if outcome.code is None else f" {outcome.code}"
    detail = outcome.detail.removeprefix(f"MCP error{code}: ")  # one SDK says so in its message
    return f"error{code}: {detail.replace('|', ' ')}"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
