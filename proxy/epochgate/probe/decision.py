"""What a policy would have decided about one recorded resume, and the sum over many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epochgate.guard.policy import Policy
from epochgate.guard.verdict import Kind

FENCED = "fenced"  # the reason where an earlier refusal already fenced the session (F2)


class UnusableFileError(Exception):
    """The file cannot be audited; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One resume under the audited policy. `maybe` is empty, or says why it could have gone the other way."""

    place: str  # such as `line 12`
    session: str  # a fingerprint
    verdict: Kind | None  # None: the session was fenced before
    reason: str
    refused: bool
    pending: int  # calls that the stream owed: refused, they are run again
    maybe: str = ""

    def as_text(self) -> str:
        """One line of the report."""
        what = f"{self.verdict}, {self.reason}" if self.verdict else self.reason
        then = "refused" if self.refused else "resumed"
        calls = f", {self.pending} calls to run again" if self.refused and self.pending else ""
        return f"{self.place}: session {self.session}: {then} ({what}){calls}" + (f"; {self.maybe}" * bool(self.maybe))

    def as_json(self) -> dict[str, object]:
        """The decision as JSON values."""
        return {
            "place": self.place,
            "session": self.session,
            "verdict": self.verdict,
            "reason": self.reason,
            "refused": self.refused,
            "pending": self.pending,
            "maybe": self.maybe,
        }


@dataclass(frozen=True, slots=True)
class Sum:
    """The numbers of an audit."""

    resumed: int
    refused: int
    unsure: int  # among both: those that could have gone the other way
    rerun: int  # calls of the refused ones
    rerun_unsure: int  # those of them that are unsure

    def as_text(self) -> str:
        """The last line of the report."""
        calls = f"{self.rerun} calls would have been run again"
        if self.rerun_unsure:
            calls += f", {self.rerun_unsure} of them perhaps not"
        unsure = f", {self.unsure} of all could have gone the other way" if self.unsure else ""
        return (
            f"{self.resumed + self.refused} resumes: {self.resumed} resumed, {self.refused} refused{unsure}; {calls}."
        )


def add_up(decisions: Sequence[Decision]) -> Sum:
    """The sum over all decisions."""
    refused = [one for one in decisions if one.refused]
    return Sum(
        resumed=len(decisions) - len(refused),
        refused=len(refused),
        unsure=sum(bool(one.maybe) for one in decisions),
        rerun=sum(one.pending for one in refused),
        rerun_unsure=sum(one.pending for one in refused if one.maybe),
    )


def policy_in_words(policy: Policy) -> str:
    """The values of a policy that an audit turns on."""
    return f"accept [{', '.join(sorted(policy.accept))}], unproven {policy.unproven}"
