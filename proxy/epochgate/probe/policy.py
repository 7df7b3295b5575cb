"""The policy to recommend for what a probe has found (design.md section 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from epochgate.probe.findings import Check, Facts, Finding


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A configuration that can be used as it is, and the reasons for what differs from the defaults."""

    configuration: dict[str, object]
    reasons: tuple[str, ...]


def recommend(url: str, findings: Sequence[Finding], facts: Facts) -> Recommendation:
    """Derive the policy: strict unless the server was seen to make more provable."""
    outcomes = {finding.check: finding.outcome for finding in findings}
    reasons = []
    policy: dict[str, object] = {"name": "mcp", "match": {"path": urlsplit(url).path or "/"}}
    if outcomes.get(Check.SESSION) == "stateless":
        policy["mode"] = "bypass"
        reasons.append("bypass: the server has no sessions")
        return Recommendation(_configuration(url, policy), tuple(reasons))
    policy["mode"] = "enforce"
    sources: list[dict[str, str]] = [{"meta": key} for key in facts.meta_keys]
    sources += [{"header": name} for name in facts.token_headers]
    if sources:
        policy["epoch"] = {"sources": sources}
        reasons.append("epoch: the server sends its epoch token there")
    accept = ["connection", "epoch"]
    resume: dict[str, object] = {"accept": accept, "unproven": "restart"}
    if facts.polling and not sources:
        if _honest(outcomes):
            accept.append("overlap")
            reasons.append("overlap: the server closes streams on purpose, replays faithfully and tells a lost session")
        else:
            reasons.append(
                "no overlap, although the server closes streams on purpose: a lost session might not show. Long calls "
                "are started over at each close until the server sends an epoch token"
            )
    if outcomes.get(Check.EVENT_IDS) == "shared counter":
        resume["event_ids"] = "increasing"
        reasons.append("increasing: one counter serves all sessions")
    policy["resume"] = resume
    return Recommendation(_configuration(url, policy), tuple(reasons))


def _honest(outcomes: dict[Check, str]) -> bool:
    """Whether a lost session is sure to show, and a replay to be what was sent: the conditions for `overlap`."""
    return (
        outcomes.get(Check.UNKNOWN) in ("404", "400")
        and outcomes.get(Check.DELETED) in ("404", "400")
        and outcomes.get(Check.AFTER_DELETE) != "granted"
        and outcomes.get(Check.REPLAY) in ("faithful", "inclusive")
        and outcomes.get(Check.UNKNOWN_CURSOR) != "replayed"
    )


def _configuration(url: str, policy: dict[str, object]) -> dict[str, object]:
    parts = urlsplit(url)
    authority = parts.netloc.rpartition("@")[2]
    return {"version": 1, "upstream": {"url": f"{parts.scheme}://{authority}"}, "policies": [policy]}
