"""Rule E3: which order a stream's ids follow, and what violates it."""

import time

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epochgate.guard.eventids import IdFault, Learner, Order, successor_fault


def learn(*ids: str) -> Learner:
    learner = Learner()
    seen: set[str] = set()
    for name in ids:
        learner.see(name.encode(), repeated=name in seen)
        seen.add(name)
    return learner


def fault(order: Order, last: str | None, new: str, *elsewhere: str) -> IdFault | None:
    known = {name.encode() for name in elsewhere}
    return successor_fault(order, None if last is None else last.encode(), new.encode(), known.__contains__)


def trailing_digits(name: str) -> str:
    return name[len(name.rstrip("0123456789")) :]


CONSECUTIVE, INCREASING, OPAQUE, UNCHECKED = Order.CONSECUTIVE, Order.INCREASING, Order.OPAQUE, Order.UNCHECKED

LEARNT = [
    # ids of the stream, what it is held to when it is alone in its session, and when it is not
    ("", OPAQUE, OPAQUE),
    ("1", OPAQUE, OPAQUE),
    ("1 2", OPAQUE, OPAQUE),
    ("1 2 3", CONSECUTIVE, INCREASING),
    ("0 1 2", CONSECUTIVE, INCREASING),
    ("8 9 10 11", CONSECUTIVE, INCREASING),
    ("10 20 33", INCREASING, INCREASING),
    ("1 2 3 5", INCREASING, INCREASING),
    ("1 3 4 5", INCREASING, INCREASING),
    ("1 3 2", OPAQUE, OPAQUE),
    ("3 2 1", OPAQUE, OPAQUE),
    ("1 2 3 02", OPAQUE, OPAQUE),
    ("1 2 3 03", OPAQUE, OPAQUE),
    ("8 9 10 010", OPAQUE, OPAQUE),
    ("a-5 a-6 a-7", CONSECUTIVE, CONSECUTIVE),
    ("a-5 a-6 a-9", INCREASING, INCREASING),
    ("_0 _1 _2", CONSECUTIVE, CONSECUTIVE),
    ("é9 é10 é11", CONSECUTIVE, CONSECUTIVE),
    ("2/a/1 2/a/2 2/a/3", CONSECUTIVE, CONSECUTIVE),
    ("a-5 b-6 b-7 b-8", OPAQUE, OPAQUE),
    ("1 2 3 a-4", OPAQUE, OPAQUE),
    ("0/7 1/7 2/7", OPAQUE, OPAQUE),
    ("b-9f a-01 c-77 x_y 10 9", OPAQUE, OPAQUE),
    ("a b c", OPAQUE, OPAQUE),
    ("٣ ٤ ٥", OPAQUE, OPAQUE),
    ("1 1", UNCHECKED, UNCHECKED),
    ("1 2 3 4 4 5 6 7", UNCHECKED, UNCHECKED),
    ("a b a", UNCHECKED, UNCHECKED),
    # padded numbers may be hexadecimal until a decimal carry shows that they are not
    ("007 008 009", OPAQUE, OPAQUE),
    ("007 008 009 010", CONSECUTIVE, INCREASING),
    ("s:098 s:099 s:100 s:101", CONSECUTIVE, CONSECUTIVE),
    ("s:008 s:009 s:010 s:015", INCREASING, INCREASING),
    ("s:0008 s:0009 s:000a s:000b", OPAQUE, OPAQUE),
    (f"{10**63} {10**63 + 1} {10**63 + 2}", CONSECUTIVE, INCREASING),
    (f"{10**64} {10**64 + 1} {10**64 + 2}", OPAQUE, OPAQUE),
]


@pytest.mark.parametrize(("ids", "alone", "shared"), LEARNT)
def test_the_strictest_order_that_held_is_learnt(ids: str, alone: Order, shared: Order) -> None:
    """E3: over at least three ids; bare integers of several streams rise at most; repeated ids are not checked."""
    learner = learn(*ids.split())
    assert learner.order(several_streams=False) is alone
    assert learner.order(several_streams=True) is shared


FAULTS = [
    (CONSECUTIVE, "5", "6", None),
    (CONSECUTIVE, "9", "10", None),
    (CONSECUTIVE, "0", "1", None),
    (CONSECUTIVE, "5", "7", IdFault.ID_GAP),
    (CONSECUTIVE, "5", "5", IdFault.ID_REWIND),
    (CONSECUTIVE, "5", "4", IdFault.ID_REWIND),
    (CONSECUTIVE, "950", "1", IdFault.ID_REWIND),
    (CONSECUTIVE, "a-5", "a-6", None),
    (CONSECUTIVE, "a-5", "a-7", IdFault.ID_GAP),
    (CONSECUTIVE, "a-5", "a-5", IdFault.ID_REWIND),
    (CONSECUTIVE, "a-5", "a-4", IdFault.ID_REWIND),
    (CONSECUTIVE, "a-5", "b-6", IdFault.ID_GAP),
    (CONSECUTIVE, "a-5", "6", IdFault.ID_GAP),
    (CONSECUTIVE, "5", "a-6", IdFault.ID_GAP),
    (CONSECUTIVE, "a-5", "a-", IdFault.ID_GAP),
    (CONSECUTIVE, "5", "x", IdFault.ID_GAP),
    (CONSECUTIVE, "a", "a", IdFault.ID_GAP),
    (CONSECUTIVE, "009", "010", None),
    (CONSECUTIVE, "099", "100", None),
    (CONSECUTIVE, "999", "1000", None),
    (CONSECUTIVE, "009", "011", IdFault.ID_GAP),
    (CONSECUTIVE, "010", "9", IdFault.ID_REWIND),
    (CONSECUTIVE, "7", "007", IdFault.ID_REWIND),
    (CONSECUTIVE, "9" * 30, "1" + "0" * 30, None),
    (CONSECUTIVE, "1" * 65, "1" * 64 + "2", IdFault.ID_GAP),
    (CONSECUTIVE, None, "700", None),
    (INCREASING, "35", "36", None),
    (INCREASING, "35", "50", None),
    (INCREASING, "35", "34", IdFault.ID_REWIND),
    (INCREASING, "35", "35", IdFault.ID_REWIND),
    (INCREASING, "a-35", "a-50", None),
    (INCREASING, "a-35", "b-50", IdFault.ID_GAP),
    (INCREASING, "35", "x", IdFault.ID_GAP),
    (INCREASING, None, "x", None),
    (OPAQUE, "5", "300", None),
    (OPAQUE, "300", "5", None),
    (OPAQUE, "5", "x", None),
    (UNCHECKED, "5", "5", None),
]


@pytest.mark.parametrize(("order", "last", "new", "expected"), FAULTS)
def test_what_may_follow(order: Order, last: str | None, new: str, expected: IdFault | None) -> None:
    """E3, R7."""
    assert fault(order, last, new) is expected


def test_faults_are_spelt_like_the_reasons() -> None:
    """R7: the values are the reasons of the verdict."""
    assert [str(member) for member in IdFault] == ["id_gap", "id_rewind"]


def test_ids_of_other_streams_fill_a_gap() -> None:
    """E3: all that is missing must have been seen elsewhere, spelt the way that this stream counts."""
    assert fault(CONSECUTIVE, "5", "8", "6", "7") is None
    assert fault(CONSECUTIVE, "5", "8", "7") is IdFault.ID_GAP
    assert fault(CONSECUTIVE, "5", "8", "6") is IdFault.ID_GAP
    assert fault(CONSECUTIVE, "a-5", "a-7", "a-6") is None
    assert fault(CONSECUTIVE, "a-5", "a-7", "6", "b-6") is IdFault.ID_GAP
    assert fault(CONSECUTIVE, "008", "011", "009", "010") is None
    assert fault(CONSECUTIVE, "098", "101", "099", "100") is None
    assert fault(CONSECUTIVE, "098", "101", "99", "100") is IdFault.ID_GAP
    assert fault(CONSECUTIVE, "98", "101", "99", "100") is None
    assert fault(CONSECUTIVE, "8", "4", "5", "6", "7") is IdFault.ID_REWIND


def test_a_gap_of_thousands_is_not_searched() -> None:
    """E3, L5: up to 4096 missing ids are looked for, never more."""
    asked = 0

    def seen(_: bytes) -> bool:
        nonlocal asked
        asked += 1
        return True

    assert successor_fault(CONSECUTIVE, b"1", b"4098", seen) is None
    assert asked == 4096
    assert successor_fault(CONSECUTIVE, b"1", b"4099", seen) is IdFault.ID_GAP
    assert successor_fault(CONSECUTIVE, b"1", b"9" * 60, seen) is IdFault.ID_GAP
    assert asked == 4096


counters = st.builds(
    lambda prefix, first, steps: [f"{prefix}{first + sum(steps[:n])}" for n in range(len(steps) + 1)],
    st.sampled_from(["", "a-", "s_", "x:"]),
    st.integers(0, 120),
    st.lists(st.integers(0, 2) | st.just(1), max_size=8),
)
strings = st.lists(st.text("ab-019", max_size=4), max_size=8)


@given(ids=counters | strings, several=st.booleans())
@example(ids=["", "", ""], several=False)
def test_what_is_learnt_agrees_with_what_is_checked(ids: list[str], several: bool) -> None:
    """E3: a stream that is held to an order has never violated it, and a stricter one was violated or is not used."""
    order = learn(*ids).order(several_streams=several)
    faults = {
        stricter: any(fault(stricter, last, new) for last, new in zip(ids, ids[1:], strict=False))
        for stricter in (INCREASING, CONSECUTIVE)
    }
    padded = any(len(digits) > 1 and digits[0] == "0" for digits in map(trailing_digits, ids))
    if len(set(ids)) < len(ids):
        assert order is UNCHECKED
    elif len(ids) < 3 or faults[INCREASING]:
        assert order is OPAQUE
    elif padded and order is OPAQUE:
        pass
    elif faults[CONSECUTIVE] or (several and ids[0].isdecimal()):
        assert order is INCREASING
    else:
        assert order is CONSECUTIVE


def test_what_was_learnt_can_be_stored() -> None:
    """L5: the fields of a learner are all that it knows, and stay small whatever the ids are."""
    learner = learn("s-8", "s-9", "s-10")
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(learner), type=Learner)
    again.see(b"s-11", repeated=False)
    assert again.order(several_streams=True) is CONSECUTIVE
    long = learn("1" * 60_000, "2", "3")
    assert long.order(several_streams=False) is OPAQUE
    assert len(msgspec.msgpack.encode(long)) < 200


def test_a_long_integer_costs_no_more_than_its_bytes() -> None:
    """L5: neither the time nor the limit of converting large integers is met."""
    huge = b"9" * 60_000
    begin = time.thread_time()
    for n in range(100):
        Learner().see(huge, repeated=False)
        assert successor_fault(INCREASING, huge, huge + b"%d" % n, bool) is IdFault.ID_GAP
    assert time.thread_time() - begin < 1.0
