"""The client-side guard: the strict rule of section 1, with ids as in E3."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epochgate.guard.epoch import (
    SessionEpoch,
    StreamResumeDivergence,
    resume_or_restart,
    validate_resumed_event,
)

SESSION = SessionEpoch("s-1", 7)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
anything = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
near_events = st.fixed_dictionaries(
    {}, optional={"id": anything, "_meta": anything | st.fixed_dictionaries({"session_epoch": anything})}
)


def event(event_id: object, token: object = 7) -> dict[str, object]:
    return {"id": event_id, "_meta": {"session_epoch": token}}


@pytest.mark.parametrize(
    ("last", "new"),
    [(900, 901), ("900", "901"), (900, "901"), ("900", 901), ("a-9", "a-10"), ("s:t:1", "s:t:2"), ("_0", "_1"), (0, 1)],
)
def test_the_next_event_of_the_same_epoch_resumes(last: int | str, new: int | str) -> None:
    """E3 consecutive: integers, or a shared prefix before a trailing integer."""
    validate_resumed_event(SESSION, event(new), last)
    assert resume_or_restart(SESSION, event(new), last) == "resume"


@pytest.mark.parametrize(("expected", "got"), [(1, "1"), ("1", 1), ("abc", "abc"), (10**40, str(10**40))])
def test_tokens_are_compared_as_text(expected: int | str, got: int | str) -> None:
    """Section 2: `1` equals `"1"`; the token alone serves as well as the whole `SessionEpoch`."""
    validate_resumed_event(SessionEpoch("s", expected), event(2, got), 1)
    validate_resumed_event(expected, event(2, got), 1)


@pytest.mark.parametrize(
    ("observed", "resumed", "last", "words"),
    [
        (None, event(901), 900, ["no session epoch was captured at initialize"]),
        (SessionEpoch("s", None), event(901), 900, ["no session epoch was captured at initialize"]),
        (SESSION, {"id": 901}, 900, ["expected session epoch '7'", "no epoch"]),
        (SESSION, {"id": 901, "_meta": {}}, 900, ["expected session epoch '7'", "no epoch"]),
        (SESSION, {"id": 901, "_meta": [7]}, 900, ["expected session epoch '7'", "_meta is [7]"]),
        (SESSION, event(901, 8), 900, ["expected session epoch '7'", "got '8'", "created anew"]),
        (SESSION, event(902), 900, ["900 plus one", "got 902"]),
        (SESSION, event(900), 900, ["900 plus one", "got 900"]),
        (SESSION, event("b-2"), "a-1", ["'a-1' plus one", "got 'b-2'"]),
        (SESSION, {"_meta": {"session_epoch": 7}}, 900, ["900 plus one", "got None"]),
        (SESSION, [event(901)], 900, ["expected an event", "got ["]),
        (SESSION, event(10**5000), 900, ["900 plus one", "got an enormous int"]),
    ],
)
def test_a_divergence_names_what_was_expected_and_what_came(
    observed: Any, resumed: Any, last: Any, words: list[str]
) -> None:
    """R7, R8: epoch missing, epoch changed, id gap, id rewind, and what is no event at all."""
    with pytest.raises(StreamResumeDivergence) as caught:
        validate_resumed_event(observed, resumed, last)
    assert isinstance(caught.value, RuntimeError)
    for word in words:
        assert word in str(caught.value)
    assert resume_or_restart(observed, resumed, last) == "restart"


@pytest.mark.parametrize("token", [True, 7.0, None, "", [7], {"a": 7}, b"7"])
def test_a_token_is_an_integer_or_a_text(token: object) -> None:
    """Section 2: what is neither is no token, wherever it stands."""
    with pytest.raises(StreamResumeDivergence, match="no epoch"):
        validate_resumed_event(SESSION, event(901, token), 900)
    with pytest.raises(StreamResumeDivergence, match="no session epoch was captured"):
        validate_resumed_event(SessionEpoch("s", token), event(901, token), 900)  # type: ignore[arg-type]


@pytest.mark.parametrize(("last", "new"), [(-1, -2), (-1, 0), ("x", "y"), (True, 2), (1, 2.0), ("\ud800", "\ud801")])
def test_what_has_no_successor_diverges(last: Any, new: Any) -> None:
    """E3: negative integers, texts without a number, and values that are no ids."""
    assert resume_or_restart(SESSION, event(new), last) == "restart"


def test_messages_stay_short_and_keep_the_session_id_out() -> None:
    """L7: whatever a server sends, an error can be shown."""
    with pytest.raises(StreamResumeDivergence) as caught:
        validate_resumed_event(SessionEpoch("secret-session", 7), event("x" * 10_000), "1")
    assert len(str(caught.value)) < 300
    assert "secret-session" not in str(caught.value)


@given(st.integers(min_value=0), st.integers() | st.text(min_size=1), st.text())
def test_exactly_the_successor_resumes(number: int, token: int | str, prefix: str) -> None:
    """E3: of all ids near the last one, the next alone is accepted."""
    carries = len(str(number + 1)) > len(str(number))  # into a prefix that ends in a digit: then that is another number
    assume(not (carries and prefix[-1:] in set("0123456789")))
    last = f"{prefix}{number}"
    for step in (-1, 0, 2, 3, 10):
        if number + step >= 0:
            assert resume_or_restart(token, event(f"{prefix}{number + step}", token), last) == "restart"
    expected = "resume" if _short(prefix, number) else "restart"
    assert resume_or_restart(token, event(f"{prefix}{number + 1}", token), last) == expected


def _short(prefix: str, number: int) -> bool:
    """Whether the trailing integer has few enough digits to be a counter (a prefix may end in digits itself)."""
    ascii_digits = "0123456789"
    return all(
        len(text) - len(text.rstrip(ascii_digits)) <= 64 for text in (f"{prefix}{number}", f"{prefix}{number + 1}")
    )


@given(anything, anything | near_events, anything)
def test_input_of_any_shape_is_judged_and_never_raises_anything_else(observed: Any, resumed: Any, last: Any) -> None:
    """The answer is `resume` only for an event with the session's own token."""
    answer = resume_or_restart(observed, resumed, last)
    assert answer in ("resume", "restart")
    if answer == "resume":
        assert isinstance(resumed, Mapping)
        assert str(resumed["_meta"]["session_epoch"]) == str(observed)


@given(near_events, st.integers(min_value=0) | st.text())
def test_events_that_nearly_fit_are_judged(resumed: dict[str, object], last: int | str) -> None:
    """Malformed members are divergence, whichever they are."""
    assert resume_or_restart(SESSION, resumed, last) in ("resume", "restart")


def test_importing_it_loads_neither_aiohttp_nor_pydantic() -> None:
    """The guard is usable alone."""
    code = "import sys, json, epochgate.guard.epoch; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert loaded.isdisjoint(
        {"aiohttp", "pydantic", "pydantic_core", "pydantic_settings", "asyncio", "yaml", "structlog"}
    )
