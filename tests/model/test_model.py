"""The guard as a whole against a model: sessions, buffers, evictions, restarts, and every kind of resume."""

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from model.machine import Machine

PROFILE = settings(
    max_examples=2000 if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else 200,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_no_sequence_of_events_breaks_the_invariants() -> None:
    """L1-L5, R2-R12, F2-F5, H1, N1."""
    run_state_machine_as_test(Machine, settings=PROFILE)  # type: ignore[no-untyped-call]
