"""The command line of `epochgate audit`: what a policy would have decided about recorded resumes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from epochgate.configuration import load
from epochgate.errors import ConfigurationError
from epochgate.guard.policy import Policy, Proof, Unproven, normalize_path
from epochgate.probe.capture import audit_capture
from epochgate.probe.decision import Decision, UnusableFileError, add_up, policy_in_words
from epochgate.probe.findings import plain
from epochgate.probe.verdict_log import audit_log
from epochgate.settings import PolicySettings

_DESCRIPTION = """\
Read the proxy's verdict log (JSON lines) or a HAR capture of MCP traffic, and tell what a policy would have decided:
which resumes it lets through, which it refuses, why, and how many calls would have been run again. The policy is the
one of --config that has the name in the log (or matches the URL in the capture), else the default one; --accept and
--unproven change it."""
_EPILOG = "Exit status: 0 audited, 2 the file cannot be audited or has no resume in it."


def main(argv: list[str]) -> int:
    """Run `epochgate audit` with the arguments after the verb; returns the exit status.

    Raises:
        ConfigurationError: the file of `--config` cannot be used.
    """
    options = _parser().parse_args(argv)
    policies = _Policies(options.config, options.accept, options.unproven)
    try:
        decisions = _audit(options.file, policies, options.recorded_accept)
    except (UnusableFileError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"epochgate audit: {options.file}: {reason}", file=sys.stderr)
        return 2
    total = add_up(decisions)
    if options.json:
        values = {"resumes": [decision.as_json() for decision in decisions], "sum": dataclasses.asdict(total)}
        print(json.dumps(values, indent=2))
        return 0
    for policy in policies.used.values():
        print(f"policy {policy.name}: {policy_in_words(policy)}")
    for decision in decisions:
        print(plain(decision.as_text()))
    print(total.as_text())
    return 0


def _audit(path: Path, policies: _Policies, recorded: frozenset[Proof]) -> Sequence[Decision]:
    data = path.read_bytes()
    if _is_capture(data):
        decisions = list(audit_capture(data, policies.for_url))
        wanted = "no resume (a GET with Last-Event-ID that was granted a stream) is in it"
    else:
        decisions = list(audit_log(data.splitlines(), policies.for_name, recorded))
        wanted = (
            'no line with "event": "resume.decided" is in it; give a JSON log (`log.format: json`) or a HAR capture'
        )
    if not decisions:
        raise UnusableFileError(wanted)
    return decisions


class _Document(msgspec.Struct):
    log: msgspec.Raw = msgspec.Raw()


def _is_capture(data: bytes) -> bool:
    """A HAR document is one object with the member `log`; a verdict log is one object a line."""
    try:
        return bool(msgspec.json.decode(data, type=_Document).log)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class _Policies:
    """The policies that are audited; `used` are those that were asked for, by name."""

    def __init__(self, config: Path | None, accept: frozenset[Proof] | None, unproven: Unproven | None) -> None:
        self.used: dict[str, Policy] = {}
        written = load(config, os.environ, {}).compiled() if config is not None else (PolicySettings().compiled(),)
        if not written:
            raise ConfigurationError(f"{config}: policies: the list is empty; write the policy that is to be audited")
        changes: dict[str, object] = {}
        if accept is not None:
            changes["accept"] = accept
        if unproven is not None:
            changes["unproven"] = unproven
        self._all = [dataclasses.replace(policy, **changes) for policy in written]  # type: ignore[arg-type]

    def for_name(self, name: str) -> Policy:
        """The policy with this name, or the first one."""
        return self._use(next((policy for policy in self._all if policy.name == name), self._all[0]))

    def for_url(self, url: str) -> Policy:
        """The first policy that matches the URL's path, or the first one."""
        path = normalize_path(urlsplit(url).path.encode())
        return self._use(next((policy for policy in self._all if policy.matches(path)), self._all[0]))

    def _use(self, policy: Policy) -> Policy:
        return self.used.setdefault(policy.name, policy)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epochgate audit", description=_DESCRIPTION, epilog=_EPILOG)
    proofs = ",".join(Proof)
    parser.add_argument("file", type=Path, help="the verdict log or the HAR capture")
    parser.add_argument("--config", metavar="FILE", type=Path, help="the configuration with the policies to audit")
    parser.add_argument(
        "--accept", metavar="PROOFS", type=_proofs, help=f"a list such as {proofs}, instead of the policy's"
    )
    parser.add_argument("--unproven", choices=[*Unproven], type=Unproven, help="instead of the policy's")
    parser.add_argument(
        "--recorded-accept", metavar="PROOFS", type=_proofs, default="connection,epoch",
        help="what the policy accepted that wrote the log (default: connection,epoch)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the decisions as JSON")
    return parser


def _proofs(text: str) -> frozenset[Proof]:
    try:
        return frozenset(Proof(word.strip()) for word in text.split(",") if word.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a list of {', '.join(Proof)}, with commas") from None
