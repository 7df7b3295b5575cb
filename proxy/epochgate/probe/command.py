"""The command line of `epochgate probe`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from epochgate.probe.client import OWN_HEADERS, Client
from epochgate.probe.findings import Check
from epochgate.probe.policy import recommend
from epochgate.probe.report import Report
from epochgate.probe.run import run
from epochgate.probe.survey import ToolCall

_DESCRIPTION = """\
Ask a live MCP server, as an ordinary client, what it can promise about sessions and resumed streams, and recommend a
policy. It opens sessions, sends initialize, ping and tools/list, resumes its own streams, and deletes its sessions. No
tool is called unless --tool names it: then it is called twice, and one of the two calls loses its connection."""
_EPILOG = "Exit status: 0 no risk was found, 1 there are risks, 2 it could not be told."


def main(argv: list[str]) -> int:
    """Run `epochgate probe` with the arguments after the verb; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.idle >= options.timeout:
        parser.error("--idle must be shorter than --timeout, which bounds everything")
    report = asyncio.run(_probe(options))
    print(json.dumps(report.as_json(), indent=2) if options.json else report.as_text())
    return report.status


async def _probe(options: argparse.Namespace) -> Report:
    tool = None if options.tool is None else ToolCall(options.tool, options.arguments)
    progress = Progress()
    async with Client(options.url, options.header) as client:
        try:
            findings, facts = await run(
                client, tool=tool, idle=options.idle, seconds=options.timeout, progress=progress.show
            )
        finally:
            progress.clear()
    parts = urlsplit(options.url)
    shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    told = any(f.check is Check.PROTOCOL and f.outcome == "sessions" for f in findings)
    return Report(shown, findings, facts, recommend(shown, findings, facts) if told else None)


class Progress:
    """Says on standard error what is being asked: one line that is rewritten on a terminal, else a line for each."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def show(self, number: int, total: int, check: Check) -> None:
        """Question `number` (from 0) of `total` has begun."""
        bar = "#" * number + "." * (total - number)
        line = f"[{bar}] {check.value}"
        if self._terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """All is asked."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epochgate probe", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("url", type=_url, help="the MCP endpoint, such as http://127.0.0.1:3000/mcp")
    parser.add_argument("--tool", metavar="NAME", help="a harmless tool that streams for a second or more")
    parser.add_argument("--arguments", metavar="JSON", type=_arguments, default={}, help="its arguments, an object")
    parser.add_argument(
        "--header", metavar="'NAME: VALUE'", type=_header, action="append", default=[],
        help="sent with every request, such as credentials; never printed; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--idle", metavar="SECONDS", type=_seconds, default=5.0, help="how long to watch an idle session (default 5)"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, default=30.0, help="bound for everything (default 30)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError("expected http://HOST[:PORT]/PATH or https://...")
    return text


def _arguments(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object, such as '{\"count\": 5}'")
    return value


def _header(text: str) -> tuple[str, str]:
    # The messages leave the value out: it is a secret. (argparse would print it after a ValueError.)
    name, colon, value = text.partition(":")
    name = name.strip()
    if not colon or not name or not name.isascii() or not all(c.isalnum() or c in "!#$%&'*+-.^_`|~" for c in name):
        raise argparse.ArgumentTypeError("expected 'NAME: VALUE'")
    if name.lower() in OWN_HEADERS:
        raise argparse.ArgumentTypeError(f"{name} is set by the probe itself")
    if any(c in value for c in "\r\n\0"):
        raise argparse.ArgumentTypeError(f"the value of {name} has a line break or a NUL in it")
    return name, value.strip()


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("expected a number of seconds above 0")
    return value
