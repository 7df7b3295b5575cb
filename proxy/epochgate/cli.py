"""The verbs of the command line. What each needs is imported when it runs, so that `version` and `check` start fast."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from epochgate import __version__
from epochgate.errors import ConfigurationError, EpochgateError

if TYPE_CHECKING:
    from epochgate.guard.policy import Policy
    from epochgate.settings import Settings

EX_UNAVAILABLE = 69  # of sysexits.h, as the next
EX_CONFIG = 78


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb in `argv` (default: the process's own arguments) and return the exit status.

    0: done; 2: wrong usage; 69: an error of the product; 78: the configuration cannot be used.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["probe"]:
            from epochgate.probe.command import main as probe

            return probe(words[1:])
        if words[:1] == ["audit"]:
            from epochgate.probe.audit import main as audit

            return audit(words[1:])
        if words[:1] == ["demo"]:
            from epochgate.demo.play import main as demo

            return demo(words[1:])
        arguments = _build_parser().parse_args(words)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except EpochgateError as error:
        for line in str(error).splitlines():  # each with its place
            print(f"epochgate: {line}", file=sys.stderr)
        return EX_CONFIG if isinstance(error, ConfigurationError) else EX_UNAVAILABLE


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="epochgate",
        description="A reverse proxy for MCP over Streamable HTTP that lets no spliced stream through.",
    )
    sources = argparse.ArgumentParser(add_help=False)
    sources.add_argument("--config", metavar="FILE", type=Path, help="the YAML file to read")
    sources.add_argument("--upstream", metavar="URL", help="the server to guard, such as http://127.0.0.1:3000")
    sources.add_argument(
        "--listen", metavar="ADDRESS", help="where clients connect: host:port, [v6]:port or unix:/path"
    )
    sources.add_argument("--admin-listen", metavar="ADDRESS", help="where health, metrics and the status page are")
    sources.add_argument(
        "--mode", help="enforce, observe or bypass, for every policy; wins over the file, also when it is reloaded"
    )

    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    add = partial(verbs.add_parser, allow_abbrev=False)
    add("serve", parents=[sources], help="run the proxy").set_defaults(run=_serve)
    add("check", parents=[sources], help="tell whether the configuration is right").set_defaults(run=_check)
    # These three read their own arguments; `main` never asks the parser about them.
    add("probe", add_help=False, help="ask a server what it can promise")
    add("audit", add_help=False, help="tell what a policy would have decided on recorded resumes")
    add("demo", add_help=False, help="play the incident, with and without the proxy")
    config = add("config", parents=[sources], help="print the configuration that is in effect")
    config.set_defaults(run=_config)
    output = config.add_mutually_exclusive_group()
    output.add_argument("--schema", action="store_true", help="print the JSON Schema of the file instead")
    output.add_argument("--reference", action="store_true", help="print the reference of all keys instead")
    add("version", help="print the version").set_defaults(run=_version)
    return parser


def _reader(arguments: argparse.Namespace) -> Callable[[], Settings]:
    """What reads the settings from the sources that `arguments` name; a reload calls it again."""
    from epochgate.configuration import load

    flags = {
        "--upstream": arguments.upstream,
        "--listen": arguments.listen,
        "--admin-listen": arguments.admin_listen,
        "--mode": arguments.mode,
    }
    return partial(load, arguments.config, os.environ, flags)


def _warn(settings: Settings) -> None:
    from epochgate.advice import advise
    from epochgate.settings import pending_keys

    for line in (*pending_keys(settings), *advise(settings)):
        print(f"epochgate: {line}", file=sys.stderr)


def _serve(arguments: argparse.Namespace) -> int:
    read = _reader(arguments)
    settings = read()
    _warn(settings)
    if settings.workers > 1:
        from epochgate.workers.supervisor import supervise

        return supervise(settings, read, arguments.config)
    from epochgate.relay.server import serve

    return serve(settings, read, arguments.config)


def _check(arguments: argparse.Namespace) -> int:
    settings = _reader(arguments)()
    _warn(settings)
    print(f"OK: {settings.listen} guards {settings.upstream.url}")
    for policy in settings.compiled():
        print(f"policy {policy.name}: {_summarize(policy)}")
    if not settings.policies:
        print("no policies: nothing is guarded")
    return 0


def _summarize(policy: Policy) -> str:
    where = policy.path or "every path"
    accepted = " or ".join(sorted(policy.accept))
    return f"{where}, {policy.mode}, resumes need {accepted}, unproven ones {policy.unproven}"


def _config(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        import json

        from epochgate.reference import build_schema

        print(json.dumps(build_schema(), indent=2))
    elif arguments.reference:
        from epochgate.reference import write_reference

        print(write_reference(), end="")
    else:
        import yaml

        print(yaml.safe_dump(_reader(arguments)().model_dump(mode="json"), sort_keys=False), end="")
    return 0


def _version(arguments: argparse.Namespace) -> int:
    del arguments
    print(f"epochgate {__version__}")
    return 0
