"""The guard as a whole against a model: sessions, buffers, evictions, restarts, and every kind of resume."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from model.machine import Machine

# Hypothesis loads its profile `ci` where the environment has CI, or by `--hypothesis-profile ci`.
EXAMPLES = 2000 if settings.get_current_profile_name() == "ci" else 200


def test_no_sequence_of_events_breaks_the_invariants() -> None:
    """L1-L5, R2-R12, E3, F2-F5, H1, N1."""
    search = settings(
        max_examples=EXAMPLES, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Machine, settings=search)  # type: ignore[no-untyped-call]
