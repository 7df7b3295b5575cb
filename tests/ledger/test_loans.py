"""The two ends of a loan: numbers, room, and what each knows of the other (docs/adr/0009)."""

from __future__ import annotations

import pytest

from epochgate.errors import StoreError
from epochgate.ledger.loans import AHEAD, BEHIND, WINDOW, Borrowing, Data, End, Head, Loan
from epochgate.ledger.messages import Offer

HEAD = Head(200, b"OK", [(b"Content-Type", b"text/event-stream")], "CHUNKED")
BIG = Data(b"x" * 50_000)


class Owner:
    """What a lender hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def has_room(self) -> None:
        self.heard.append("room")

    def is_over(self, *, close: bool) -> None:
        self.heard.append(f"over {close}")


def loan() -> Loan:
    made = Loan("name", "key", "reader", lambda _: None, 0.0)
    made.lender = Owner()
    made.put(HEAD)
    return made


def borrowing() -> Borrowing:
    return Borrowing(Offer("name", "owner", "life", 0, 3, decided=True), "key", lambda _: None, 0.0)


def entries_of(lent: Loan) -> list[tuple[int, bytes]]:
    """What lies in the store after all of it was appended, in one step."""
    step = lent.collect()
    lent.appended()
    return list(enumerate(step.entries, step.first))


def test_numbers_go_on_and_what_failed_is_collected_again():
    lent = loan()
    first = lent.collect()
    lent.put(Data(b"a"))
    assert lent.collect() == first, "it may be there already: the same again"
    lent.appended()
    lent.put(End(clean=True))
    assert [number for number, _ in entries_of(lent)] == [2, 3]


def test_t6_what_lies_in_the_store_is_bounded():
    lent = loan()
    for _ in range(20):
        lent.put(BIG)
    inside: list[int] = []  # sizes of what was appended and not read
    read = 0
    while entries := entries_of(lent) or inside:
        inside += [len(data) for _, data in entries] if entries is not inside else []
        assert sum(inside) <= WINDOW
        inside.pop(0)
        read += 1
        lent.was_read(read, 1.0)
    assert (read, lent.size) == (21, 0)


def test_t6_one_entry_larger_than_the_window_goes_alone():
    lent = loan()
    entries_of(lent)
    lent.put(Data(b"x" * (WINDOW + 1)))
    assert not lent.waits
    lent.was_read(1, 1.0)
    assert len(entries_of(lent)) == 1


def test_t6_the_owner_waits_for_a_slow_reader_and_is_told_when_to_go_on():
    lent = loan()
    while lent.size <= AHEAD:
        assert not lent.full
        lent.put(Data(b"x" * 10_000))
    assert lent.full
    numbers = [number for number, _ in entries_of(lent)]
    for number in numbers[:-1]:
        lent.was_read(number, 1.0)
        assert lent.full == (lent.size > BEHIND)
    assert lent.lender.heard == ["room"]


def test_a_reader_that_claims_too_much():
    """It cannot have read what was not sent."""
    lent = loan()
    entries_of(lent)
    lent.put(Data(b"a"))
    lent.was_read(900, 1.0)
    assert [number for number, _ in entries_of(lent)] == [2]
    assert lent.size > 0


def test_what_comes_after_it_is_over_is_for_nobody():
    lent = loan()
    lent.end()
    lent.put(Data(b"a"))
    assert not lent.waits


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries[1:],
        lambda entries: [entries[0], entries[2]],
        lambda entries: [entries[0], entries[0]],
        lambda entries: [entries[1], entries[0]],
        lambda entries: [(1, b"")],
        lambda entries: [(1, b"\xff")],
        lambda entries: [(1, entries[1][1])],
        lambda entries: [entries[0], (2, entries[0][1])],
        lambda _: None,
    ],
    ids=["no beginning", "a gap", "twice", "another order", "empty", "garbage", "no head", "two heads", "gone"],
)
def test_any_doubt_ends_it(change):
    lent = loan()
    lent.put(Data(b"a"))
    lent.put(End(clean=True))
    entries = entries_of(lent)
    assert borrowing().take(entries) == [HEAD, Data(b"a"), End(clean=True)]
    with pytest.raises((StoreError, ValueError)):
        borrowing().take(change(entries))


def test_the_owner_is_told_what_was_read_but_not_what_waits_for_a_slow_client():
    lent, reader = loan(), borrowing()
    reader.paused = False
    reader.take(entries_of(lent))
    assert reader.note(now=False) is None
    assert reader.note(now=True) == ("name", 1)
    lent.put(Data(b"x" * (BEHIND + 1)))
    reader.take(entries_of(lent))
    reader.paused = True
    assert reader.note(now=False) is None
    assert reader.note(now=True) == ("name", 1)
    reader.paused = False
    assert reader.note(now=False) == ("name", 2)
