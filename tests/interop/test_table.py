"""The committed page docs/clients.md is of these SDK versions and these faults."""

from __future__ import annotations

import pytest

from interop.faults import SCENARIOS, Outcome, Scenario
from interop.table import PAGE, labels, render

OUTCOME = Outcome(
    scenario="evict",
    sdk="python1",
    proxied=False,
    answer="spliced",
    detail="fault: 12 steps for nobody",
    code=None,
    after=1.92,
    steps=[],
    runs=2,
    next_status=200,
    fresh=True,
    upstream=3,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_page_has_each_fault_with_each_client_both_ways(scenario: Scenario) -> None:
    section = PAGE.read_text().partition(f"\n## {scenario.title}\n")[2].partition("\n## ")[0]
    for label in labels().values():
        for way in ("direct", "epochgate"):
            assert f"| {label} | {way} |" in section, f"write docs/clients.md anew: it lacks {label}, {way}"


def test_a_row_says_what_the_client_saw() -> None:
    row = "| direct | **spliced**: fault: 12 steps for nobody | 1.9 s | 2 | 200 | yes | 3 |"
    assert f"{labels()['python1']} {row}" in render([OUTCOME])
