"""Real SDK clients and servers with faults between them: nothing spliced, nothing that hangs, nothing that loops."""

from __future__ import annotations

import pytest

from interop.conftest import Need
from interop.environments import SDKS
from interop.faults import RIGHT, SCENARIOS, STEPS, Key, Outcome, Scenario

FAILS_WITHIN = 5.0  # s after the fault, for a pending call whose resume is refused
UPSTREAM_REQUESTS = 5  # of the session at the upstream in the 10 s after the fault

pytestmark = pytest.mark.slow


def cases(*ends: str) -> pytest.MarkDecorator:
    found = [(scenario, sdk) for scenario in SCENARIOS for sdk in SDKS if scenario.must_end(sdk) in ends]
    return pytest.mark.parametrize(("scenario", "sdk"), found, ids=[f"{s.name}-{sdk}" for s, sdk in found])


@pytest.fixture
def outcome(scenario: Scenario, sdk: str, need: Need, outcomes: dict[Key, Outcome | Exception]) -> Outcome:
    need(sdk)
    found = outcomes[(scenario.name, sdk, True)]
    if isinstance(found, Exception):
        raise found
    return found


@cases("right", "refused", "seen")
def test_nothing_of_another_execution_is_seen(scenario: Scenario, outcome: Outcome) -> None:
    """The claim of the product: no step and no result of a re-created or of another session (R3, R7, R11)."""
    assert outcome.answer != "spliced", outcome.detail
    assert all(message.endswith(" for ada") for message in outcome.steps)
    assert outcome.steps == [f"fault#{step} for ada" for step in range(1, len(outcome.steps) + 1)]


@cases("right")
def test_a_healthy_call_ends_right_after_one_execution(scenario: Scenario, outcome: Outcome) -> None:
    """R4, R5, R8: a cut connection or a polling server costs nothing where there is a proof."""
    assert (outcome.answer, outcome.detail) == ("right", RIGHT)
    assert len(outcome.steps) == STEPS
    assert outcome.runs == 1
    assert outcome.next_status == 200
    assert outcome.fresh


@cases("refused")
def test_a_pending_call_fails_soon(scenario: Scenario, outcome: Outcome) -> None:
    """F4, F5: the call whose resume is refused ends with an error within 5 s; it never hangs."""
    assert outcome.answer == "error", outcome.detail
    assert outcome.after <= FAILS_WITHIN


@cases("refused")
def test_the_session_is_over_and_a_new_one_works(scenario: Scenario, outcome: Outcome) -> None:
    """F2: the next POST gets the 404, which makes a client start over; the new session works."""
    assert outcome.next_status == 404
    assert outcome.fresh


@cases("refused", "seen")
def test_no_client_loops_at_the_upstream(scenario: Scenario, outcome: Outcome) -> None:
    """R9, F4: few requests of the session reach the upstream after the fault."""
    assert outcome.upstream <= UPSTREAM_REQUESTS
