"""The model finds the fault when a rule is switched off: what it would not miss, it does not prove."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from epochgate.guard.judge import Judge, _Place
from epochgate.guard.mcp import Messages
from epochgate.guard.policy import Proof
from epochgate.guard.record import Session
from epochgate.guard.verdict import Verdict, proven
from epochgate.ledger.memory import MemoryLedger
from model.machine import Machine

SEARCH = settings(
    max_examples=2000,  # it stops at the first fault
    stateful_step_count=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def place_anywhere(judge: Judge, *rest: object) -> _Place:
    """R7 without the record: nothing is compared."""
    return _Place.NEW


def trust_the_first(judge: Judge, messages: Messages) -> Verdict:
    """R8 without a proof."""
    return proven(Proof.EPOCH)


def look_once(find: Callable[[Judge, Messages], Verdict | None]) -> Callable[[Judge, Messages], Verdict | None]:
    """R11 off: the token is looked at until the verdict has fallen."""
    return lambda judge, messages: None if judge.verdict is not None else find(judge, messages)


def close_nothing(session: Session, *rest: object) -> None:
    """F2 without the fence."""


def keep_the_old(
    open_anew: Callable[..., Session],
) -> Callable[[MemoryLedger, bytes, bytes, str | None, str, float], Session]:
    """L1 off: an id that is granted again keeps its record."""

    def open_session(
        ledger: MemoryLedger, session_id: bytes, credentials: bytes, token: str | None, policy: str, now: float
    ) -> Session:
        return ledger.get(session_id, now) or open_anew(ledger, session_id, credentials, token, policy, now)

    return open_session


MUTATIONS = {
    "R7": (Judge, "_place", lambda _: place_anywhere),
    "R8": (Judge, "_first_verdict", lambda _: trust_the_first),
    "R11": (Judge, "_token_fault", look_once),
    "F2": (Session, "close", lambda _: close_nothing),
    "L1": (MemoryLedger, "open", keep_the_old),
}


@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_rule_that_is_switched_off_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R7, R8, R11, F2, L1."""
    owner, name, mutate = MUTATIONS[rule]
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name)))  # type: ignore[no-untyped-call]
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=SEARCH)  # type: ignore[no-untyped-call]
