"""Writes docs/servers.md, what real servers do: in the folder tests, `python -m probe.table`.

With `--from FILE` the reports of an earlier run, kept as JSON, are taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import subprocess
import sys
from typing import Any

from interop.environments import UnavailableError
from probe.real import CACHE, HERE, REAL, Real, command, probed, version

PAGE = HERE.parents[1] / "docs" / "servers.md"
KEPT = CACHE / "reports.json"

HEAD = """\
# What real servers do

`epochgate probe` was run against real servers, each with a tool that streams for about two seconds. A command writes this
page from one run; do not edit it:

```sh
cd tests && ../.venv/bin/python -m probe.table
```

The Python and TypeScript servers use the event stores of their SDK's examples, which most servers copy; FastMCP and
server-everything use their own. Some findings depend on chance: a store that sorts events of one millisecond at random
loses or shuffles them in some runs and not in others, and a reconnect can fall into the moment in which a server loses an
event.

| server | lost session | event ids | replay | reconnect in a call | unknown cursor | other session's events | buffer after DELETE | recommended |
|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501

FOOT = """
- *lost session*: what a request gets whose session is unknown or deleted. Clients start over at a 404 only; epochgate turns
  a 400 that speaks of a session into that 404.
- *event ids*: their form, and the order that they follow. An opaque id shows neither loss nor rewinding.
- *replay*: what comes after a cursor of a stream that has ended. "rewritten" are the same messages in other bytes.
- *reconnect in a call*: what a client gets that loses its connection in the middle of a call and comes back after a second.
- *unknown cursor*: a granted stream that ends at once ("empty") makes some clients ask once a second for ever, one that
  stays open ("silent") lets their call hang.
- *other session's events*: a **leak** gives a session the events of another one that it names a cursor of.
- *buffer after DELETE*: whether events of a deleted session can still be had. Where the buffer **outlives** its session, a
  session that is created anew under the old id gives spliced streams.
- *recommended*: what the report recommends for `resume.accept` and, where it differs from the default, `resume.event_ids`.

## Your own server

```console
$ epochgate probe http://127.0.0.1:3000/mcp --tool NAME --arguments '{"some": "arguments"}'
```

Name a harmless tool that streams for a second or more; without one, nothing is called, and what shows only in a running call
is reported as "not looked at". Credentials go into `--header`. The report says for each finding what it means, and ends with a configuration to
paste. Exit status: 0 no risk was found, 1 there are risks, 2 it could not be told.

How to read the recommendation:

| the report says | then |
|---|---|
| `mode: bypass` | the server has no sessions: nothing to guard |
| `mode: observe` | look first, then enforce with the same `resume` settings ([rollout.md](rollout.md)); where no event carries an id there is nothing to guard, and it can stay so |
| `epoch.sources` | the server sends an epoch token there: any resume can be proven, on any connection |
| `accept: [connection, epoch]` | without a token a resume is proven by the connection that epochgate holds (`hold.time`), and by nothing else |
| `overlap` as well | the server closes streams on purpose, so that held connections do not help; its buffer ends with the session, and it replays faithfully ([what voids it, and what it does not see](runbook.md#overlap)) |
| `event_ids: increasing` | one counter numbers all sessions: gaps mean nothing |

A server that silently creates a lost session anew, on top of its old buffer, cannot be told from a healthy one by a replay.
So `overlap` is recommended only where the buffer ends with the session. The last two rows of the first table are servers
that close streams on purpose. Without `overlap` their long calls are started over at each close.

- The buffer of the Python SDK's example outlives its sessions: the report says so, leaves `overlap` out, and leaves it to
  you. With it these calls pass, and a splice of this kind passes too.
- FastMCP writes the same messages with other bytes in a replay (members in another order). epochgate compares bytes, so
  `overlap` would refuse every such resume as a contradiction (`replay_mismatch`): the report advises against it. Let tools
  keep their streams open.

Only an epoch token gives both. Tests drive healthy traffic and injected faults through each of these servers under the
policy that the report recommends.
"""  # noqa: E501


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/servers.md.")
    parser.add_argument("--from", dest="kept", type=pathlib.Path, help="reports of an earlier run, a JSON file")
    parser.add_argument("--output", type=pathlib.Path, default=PAGE)
    options = parser.parse_args()
    try:
        reports = json.loads(options.kept.read_text()) if options.kept else asyncio.run(probe_all())
    except (UnavailableError, subprocess.CalledProcessError) as error:
        print(f"probe.table: {error}", file=sys.stderr)
        return 1
    options.output.write_text(render(reports))
    return 0


async def probe_all() -> dict[str, Any]:
    """The report on each server by its name, kept for `--from`."""
    for real in REAL:
        command(real.environment)
    found = await asyncio.gather(*map(probed, REAL))
    reports = {real.name: report for real, report in zip(REAL, found, strict=True)}
    KEPT.write_text(json.dumps(reports, indent=1))
    return reports


def title(real: Real) -> str:
    return real.title.format(version=version(real.environment))


def render(reports: dict[str, Any]) -> str:
    """The page."""
    return HEAD + "".join(_row(real, reports[real.name]) for real in REAL if real.name in reports) + FOOT


def _row(real: Real, report: dict[str, Any]) -> str:
    outcomes = {finding["check"]: finding["outcome"] for finding in report["findings"]}
    lost = dict.fromkeys((outcomes["unknown session"], outcomes["deleted session"]))
    resume = report["recommended"]["policies"][0].get("resume", {})
    recommended = f"`accept: [{', '.join(resume.get('accept', []))}]`"
    if "event_ids" in resume:
        recommended += f", `event_ids: {resume['event_ids']}`"
    cells = (
        title(real),
        ", ".join(lost),
        f"`{report['event_id_form']}`, {outcomes['event ids']}",
        outcomes["replay"],
        outcomes["reconnect in a call"],
        outcomes["unknown cursor"],
        "**leak**" if outcomes["cursor of another session"] == "leak" else "none",
        "**outlives**" if outcomes["resume after DELETE"] == "outlives" else "gone",
        recommended,
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.exit(main())
