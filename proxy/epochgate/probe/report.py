"""The report: as text to read, or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from epochgate.probe.findings import Facts, Finding, Level, Meaning, plain
from epochgate.probe.meanings import MEANINGS
from epochgate.probe.policy import Recommendation

SAFE, FINDINGS, NOT_TOLD = 0, 1, 2  # exit statuses
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Report:
    """All that one probe found."""

    url: str  # without credentials
    findings: Sequence[Finding]
    facts: Facts
    recommendation: Recommendation | None  # None: nothing is known about the server

    @property
    def status(self) -> int:
        """The exit status: 1 if there is a risk, else 2 if something that matters could not be found out, else 0."""
        levels = {means(finding).level for finding in self.findings}
        return FINDINGS if Level.RISK in levels else NOT_TOLD if Level.UNKNOWN in levels else SAFE

    def as_json(self) -> dict[str, object]:
        """The report as JSON values."""
        return {
            "url": self.url,
            "server": self.facts.server,
            "status": self.status,
            "findings": [
                {
                    "check": f.check.value,
                    "outcome": f.outcome,
                    "level": means(f).level.value,
                    "seen": f.seen,
                    "meaning": means(f).meaning,
                    "follows": means(f).follows,
                }
                for f in self.findings
            ],
            "event_id_form": self.facts.id_form,
            "recommended": self.recommendation and self.recommendation.configuration,
            "reasons": list(self.recommendation.reasons) if self.recommendation else [],
        }

    def as_text(self) -> str:
        """The report for a reader: one paragraph a finding, then the policy to paste, then the sum."""
        lines = [f"{self.url}" + (f" ({self.facts.server})" if self.facts.server else ""), ""]
        for finding in self.findings:
            meaning = means(finding)
            lines.append(f"[{meaning.level.value:^7}] {finding.check.value}: {finding.outcome}")
            for text in (finding.seen, f"{meaning.meaning} {meaning.follows}".strip()):
                lines += textwrap.wrap(text, _WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)
            lines.append("")
        if self.recommendation is not None:
            lines += ["Recommended configuration:", "", self.as_yaml()]
        return "\n".join(map(plain, "\n".join([*lines, self.summary()]).split("\n")))

    def as_yaml(self) -> str:
        """The recommended configuration, ready to paste, with its reasons as comments."""
        assert self.recommendation is not None
        comments = [
            line
            for reason in self.recommendation.reasons
            for line in textwrap.wrap(reason, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
        ]
        block = yaml.safe_dump(
            self.recommendation.configuration, sort_keys=False, default_flow_style=None, width=_WIDTH
        )
        return "\n".join([*comments, block])

    def summary(self) -> str:
        """One sentence: what the exit status says."""
        risks = [f.check.value for f in self.findings if means(f).level is Level.RISK]
        unknown = [f.check.value for f in self.findings if means(f).level is Level.UNKNOWN]
        skipped = [f.check.value for f in self.findings if f.outcome == "not looked at"]
        if self.recommendation is None:
            return "Could not tell: nothing was found out about this server."
        text = f"Risks: {', '.join(risks)}." if risks else "No risk was found."
        if unknown:
            text += f" Could not be told: {', '.join(unknown)}."
        if skipped:
            text += f" Not looked at, because no tool was named: {', '.join(skipped)}."
        return text


def means(finding: Finding) -> Meaning:
    """What a finding means."""
    return MEANINGS[finding.check, finding.outcome]
