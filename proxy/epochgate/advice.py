"""What a configuration says that is valid, and is hardly what was meant: told by `check` and `serve`."""

from __future__ import annotations

from collections.abc import Iterator

from epochgate.guard.policy import Mode, Policy, Proof
from epochgate.settings import Settings


def advise(settings: Settings) -> Iterator[str]:
    """A line for each doubt, with its key and the remedy."""
    policies = settings.compiled()
    yield from _doubt_prefix(settings.upstream.url.prefix, policies)
    for index, policy in enumerate(policies):
        if policy.mode is not Mode.BYPASS and policy.accept == {Proof.CONNECTION} and not policy.hold_time:
            yield (
                f"policies[{index}].resume: accepts only connection, and hold.time: 0s keeps none, so no resume can be "
                "proven; set hold.time to 60s, or accept epoch or overlap too"
            )
        earlier = next((number for number in range(index) if _covers(policies[number], policy)), None)
        if earlier is not None:
            yield (
                f"policies[{index}].match: policy {policy.name} never applies, because policies[{earlier}] "
                f"({policies[earlier].name}) matches all of its requests first; move it up"
            )


def _doubt_prefix(prefix: str, policies: tuple[Policy, ...]) -> Iterator[str]:
    """The prefix is put before each path; whoever gives the URL of the endpoint means something else."""
    if prefix and any(policy.path is None or policy.path.rstrip("*").rstrip("/") == prefix for policy in policies):
        yield (
            f"upstream.url: its path goes before that of each request, so {prefix} is asked for as {prefix}{prefix}; "
            "leave the path out, unless clients leave it out too"
        )


def _covers(earlier: Policy, later: Policy) -> bool:
    """Whether every path of `later` is one of `earlier`."""
    if earlier.path is None or later.path is None:
        return earlier.path is None
    if earlier.path.endswith("*"):
        return later.path.removesuffix("*").startswith(earlier.path[:-1])
    return earlier.path == later.path
