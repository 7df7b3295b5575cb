"""The policy to recommend for what a probe has found (design.md section 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from epochgate.probe.findings import Check, Facts, Finding

_FAITHFUL = ("faithful", "inclusive")  # replays that repeat what was sent, byte for byte


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A configuration that can be used as it is, and the reasons for what differs from the defaults."""

    configuration: dict[str, object]
    reasons: tuple[str, ...]


def recommend(url: str, findings: Sequence[Finding], facts: Facts) -> Recommendation:
    """Derive the policy: strict unless the server was seen to make more provable, and to be observed first."""
    outcomes = {finding.check: finding.outcome for finding in findings}
    reasons = []
    policy: dict[str, object] = {"name": "mcp", "match": {"path": urlsplit(url).path or "/"}}
    if outcomes.get(Check.SESSION) == "stateless":
        policy["mode"] = "bypass"
        reasons.append("bypass: the server has no sessions")
        return Recommendation(_configuration(url, policy), tuple(reasons))
    policy["mode"] = "observe"
    if outcomes.get(Check.EVENT_IDS) == "none":
        reasons.append("observe: no event carries an id, so clients never resume, and there is nothing to guard")
    else:
        reasons.append("observe: look first what enforcing would do, then write enforce and reload (docs/rollout.md)")
    sources: list[dict[str, str]] = [{"meta": key} for key in facts.meta_keys]
    sources += [{"header": name} for name in facts.token_headers]
    if sources:
        policy["epoch"] = {"sources": sources}
        reasons.append("epoch: the server sends its epoch token there")
    accept = ["connection", "epoch"]
    resume: dict[str, object] = {"accept": accept, "unproven": "restart"}
    if facts.polling and not sources:
        doubts = _doubts(outcomes)
        if not doubts:
            accept.append("overlap")
        reasons.append(_about_overlap(doubts, outcomes.get(Check.REPLAY)))
    elif sources and outcomes.get(Check.REPLAY) == "rewritten":
        reasons.append(
            "hold.time: keep it longer than clients need to come back. The epoch token proves a resume on any "
            "connection, but a client that lost events which were sent to it gets them from a held connection only: "
            "the server's replay writes them with other bytes, which is refused (replay_mismatch)"
        )
    if outcomes.get(Check.EVENT_IDS) == "shared counter":
        resume["event_ids"] = "increasing"
        reasons.append("increasing: one counter serves all sessions")
    policy["resume"] = resume
    return Recommendation(_configuration(url, policy), tuple(reasons))


def _about_overlap(doubts: Sequence[str], replay: str | None) -> str:
    """Why `overlap` is in the policy of a server that closes streams, or is not, and what would help then."""
    if not doubts:
        return (
            "overlap: the server closes streams on purpose, replays faithfully, and drops buffers with sessions. "
            "It does not see a server that is killed and started again in between and repeats the same events: set "
            "epoch.instance_header if a response header names the instance"
        )
    found = (
        f"no overlap, although the server closes streams on purpose, because {' and '.join(doubts)}. Calls whose "
        "stream is closed are started over, so that long ones may never end. Let the server send an epoch token; or "
    )
    if replay in _FAITHFUL:
        return found + (
            "add overlap to accept, if you are sure that it never creates a lost session anew under its old id"
        )
    return found + (
        "let it keep the streams of long calls open. To add overlap to accept would not help: such a replay "
        "contradicts what was sent, and is refused"
    )


def _doubts(outcomes: dict[Check, str]) -> list[str]:
    """Why a faithful replay would not prove the session (`overlap`): in a clause each, none if it would."""
    doubts = []
    if not {outcomes.get(Check.UNKNOWN), outcomes.get(Check.DELETED)} <= {"404", "400"}:
        doubts.append("a lost session does not show")
    if outcomes.get(Check.AFTER_DELETE) != "refused":
        doubts.append("its buffer may outlive the session")
    if outcomes.get(Check.REPLAY) not in _FAITHFUL:
        doubts.append("its replay is not what was sent")
    return doubts


def _configuration(url: str, policy: dict[str, object]) -> dict[str, object]:
    parts = urlsplit(url)
    authority = parts.netloc.rpartition("@")[2]
    return {"version": 1, "upstream": {"url": f"{parts.scheme}://{authority}"}, "policies": [policy]}
