"""Audits the proxy's own verdict log: what another policy would have made of the same resumes.

A log line has the verdict of the policy that was in force, not all that could be proven. So the recorded policy's
`accept` matters: a proof that it accepted and did not find was not there; one that it did not look for may have been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import msgspec

from epochgate.guard.judge import is_refused
from epochgate.guard.policy import Policy, Proof
from epochgate.guard.verdict import Kind, Reason, Verdict
from epochgate.probe.decision import FENCED, Decision

# A proof is looked for in this order (R4, R8): a later one is not looked for once an earlier one was found.
_ORDER = (Proof.CONNECTION, Proof.EPOCH, Proof.OVERLAP)
# With these reasons there was no event, or no record, that could have proven anything.
_BARE = {Reason.UNKNOWN_SESSION, Reason.UNKNOWN_CURSOR, Reason.STALE_CURSOR, Reason.NO_EVENT, Reason.UNREADABLE}


class _Opened(msgspec.Struct, tag_field="event", tag="session.opened"):
    session: str
    epoch: bool


class _Decided(msgspec.Struct, tag_field="event", tag="resume.decided"):
    session: str
    cursor: str
    verdict: Kind
    reason: Reason
    enforced: bool
    policy: str
    pending: Annotated[int, msgspec.Meta(ge=0)]
    proof: Proof | None = None


_line = msgspec.json.Decoder(_Opened | _Decided)


def audit_log(
    lines: Iterable[bytes], policy_for: Callable[[str], Policy], recorded: frozenset[Proof]
) -> Iterator[Decision]:
    """Decide each `resume.decided` line anew; other lines are passed over.

    `policy_for` gives the audited policy for a policy's name in the log; `recorded` is what the policies of the log
    accepted.
    """
    epochs: dict[str, bool] = {}
    fenced: set[str] = set()
    counted: set[tuple[str, str]] = set()
    for number, text in enumerate(lines, 1):
        line = _read(text)
        if isinstance(line, _Opened):
            epochs[line.session] = line.epoch
            fenced.discard(line.session)
        elif line is not None:
            decision = _decide(f"line {number}", line, policy_for(line.policy), recorded, epochs.get(line.session))
            if line.session in fenced:
                decision = Decision(decision.place, line.session, None, FENCED, refused=True, pending=decision.pending)
            if decision.refused and (line.session, line.cursor) in counted:
                decision = dataclasses.replace(decision, pending=0)
            if decision.refused:
                counted.add((line.session, line.cursor))
                if line.reason is not Reason.UNKNOWN_SESSION and not decision.maybe:
                    fenced.add(line.session)
            yield decision


def _read(text: bytes) -> _Opened | _Decided | None:
    try:
        return _line.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decide(place: str, line: _Decided, policy: Policy, recorded: frozenset[Proof], epoch: bool | None) -> Decision:
    verdict = Verdict(line.verdict, line.reason, line.proof)
    maybe = ""
    if line.proof is not None and line.proof not in policy.accept:
        verdict = Verdict(Kind.UNPROVEN, Reason.NO_PROOF)
    if verdict.kind is Kind.UNPROVEN and is_refused(verdict, policy):
        possible = [proof for proof in _ORDER if proof in policy.accept and _may_prove(proof, line, recorded, epoch)]
        if possible:
            maybe = f"unless proven by {' or '.join(possible)}, which the log does not tell"
    return Decision(
        place, line.session, verdict.kind, verdict.reason.value, is_refused(verdict, policy), line.pending, maybe
    )


def _may_prove(proof: Proof, line: _Decided, recorded: frozenset[Proof], epoch: bool | None) -> bool:
    """Whether a proof that the log does not tell could have been there."""
    if line.reason in _BARE or line.proof is proof:
        return False
    if proof is Proof.EPOCH and (epoch is False or line.reason in (Reason.NO_EPOCH, Reason.EPOCH_MISSING)):
        return False
    if proof is Proof.OVERLAP and line.reason is Reason.BOUNDARY:
        return False
    if proof is Proof.CONNECTION and not line.enforced:
        return True  # where it only observes, the proxy holds no connection
    looked_for = line.proof is None or _ORDER.index(proof) < _ORDER.index(line.proof)
    return not (proof in recorded and looked_for)
