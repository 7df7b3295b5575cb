"""The order of event ids, learnt id by id and checked, against the whole list looked at once (E3).

Each byte of an input chooses how the next id follows the one before.
"""

from __future__ import annotations

import re
from itertools import pairwise

from epochgate.guard.eventids import IdFault, Learner, Order, successor_fault

DICTIONARY = ("\\x01\\x01\\x01\\x01", "\\x00\\x10\\x01", "\\x40")
MOST_DIGITS = 64
PREFIXES = (b"", b"a-", b"s_1_", b"0", b"-", b"x" * 70)


def grow(choices: bytes) -> list[bytes]:
    """Ids: most count on from the one before."""
    prefix, number, width = b"", 1, 0
    ids = []
    for byte in choices[:64]:
        what, amount = byte // 32, byte % 32
        if what < 4:
            number += amount if what else 1
        elif what == 4:
            number = max(0, number - amount)
        elif what == 5:
            prefix = PREFIXES[amount % len(PREFIXES)]
        elif what == 6:
            width = amount % 12
        else:
            number = 10 ** (amount * 3) - amount % 3
        ids.append((prefix or b"x") if byte == 255 else prefix + str(number).zfill(width).encode())
    return ids


def split(event_id: bytes) -> tuple[bytes, int | None]:
    found = re.fullmatch(rb"(.*?)([0-9]+)", event_id, re.DOTALL)
    if found is None or len(found[2]) > MOST_DIGITS:
        return event_id, None
    return found[1], int(found[2])


def strictest(ids: list[bytes]) -> Order:
    """What all of them followed, whatever their number."""
    if len(set(ids)) < len(ids):
        return Order.UNCHECKED
    parts = [split(event_id) for event_id in ids]
    if any(number is None for _, number in parts) or len({prefix for prefix, _ in parts}) > 1:
        return Order.OPAQUE
    steps = {second[1] - first[1] for first, second in pairwise(parts)}
    if steps <= {1}:
        return Order.CONSECUTIVE
    return Order.INCREASING if min(steps) > 0 else Order.OPAQUE


def check(data: bytes) -> None:
    """Raises AssertionError where the learner or the check is wrong about this input."""
    ids = grow(data)
    learner = Learner()
    seen: set[bytes] = set()
    for count, event_id in enumerate(ids, 1):
        learner.see(event_id, repeated=event_id in seen)
        seen.add(event_id)
        _check_order(learner, ids[:count])
    for last, new in pairwise(ids):
        for order in Order:
            _check_fault(order, last, new, seen)


def _check_order(learner: Learner, ids: list[bytes]) -> None:
    held = strictest(ids)
    padded = any(re.search(rb"(?<![0-9])0[0-9]+\Z", event_id) for event_id in ids)
    for several in (False, True):
        order = learner.order(several_streams=several)
        if len(ids) < 3:
            assert order == min(held, Order.OPAQUE), ids
        elif padded:
            assert order <= held, ids  # zeros in front: it may have learnt less, never more
        elif several and not split(ids[0])[0]:
            assert order == min(held, Order.INCREASING), ids
        else:
            assert order == held, (ids, order, held)


def _check_fault(order: Order, last: bytes, new: bytes, seen: set[bytes]) -> None:
    fault = successor_fault(order, last, new, seen.__contains__)
    (prefix, before), (other, number) = split(last), split(new)
    if order <= Order.OPAQUE:
        assert fault is None
    elif prefix != other or before is None or number is None:
        assert fault is IdFault.ID_GAP
    elif number <= before:
        assert fault is IdFault.ID_REWIND
    elif order is Order.INCREASING or number == before + 1:
        assert fault is None
    elif number - before > 5000:
        assert fault is IdFault.ID_GAP
    else:
        between = range(before + 1, number)
        if fault is None:
            assert {(prefix, value) for value in between} <= {split(event_id) for event_id in seen}, (last, new)
        elif not last[len(prefix) :].startswith(b"0"):  # zeros in front are a part of the id
            assert not {prefix + b"%d" % value for value in between} <= seen, (last, new)
