"""The order that the event ids of a stream follow (E3): learnt from un-resumed traffic, checked on a resume.

Two ids are comparable when both end in an integer and what stands before it is the same: `5` and `6`, `a-5` and `a-6`.
Numbers are compared by value, so `009` comes before `010`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, StrEnum

import msgspec


class Order(IntEnum):
    """What the ids of a stream are held to, from the weakest to the strictest."""

    UNCHECKED = 0  # not even `opaque` held
    OPAQUE = 1  # not seen before
    INCREASING = 2
    CONSECUTIVE = 3


class IdFault(StrEnum):
    """How the id of an event violates the order of its stream."""

    ID_GAP = "id_gap"
    ID_REWIND = "id_rewind"


# Longer integers are no counters but random numbers or digests, and converting them takes quadratic time.
_MOST_DIGITS = 64
# A stream that lacks more ids than this lost them, even if other streams of the session had as many.
_MOST_MISSING = 4096
# An order that fewer ids followed may be chance.
_ENOUGH = 3


def _split(event_id: bytes) -> tuple[bytes, bytes]:
    """What stands before the trailing integer, and its digits: none where it has too many."""
    prefix = event_id.rstrip(b"0123456789")
    digits = event_id[len(prefix) :]
    return (prefix, digits) if len(digits) <= _MOST_DIGITS else (event_id, b"")


class Learner(msgspec.Struct, gc=False):
    """Learns the order of one stream, id by id. Its fields are all that it knows, so that a store can keep it."""

    held: Order = Order.CONSECUTIVE
    """The strictest order that all ids so far followed."""
    count: int = 0
    prefix: bytes = b""
    padded: bool = False
    """Some number has leading zeros."""
    carried: bool = False
    """Some number ending in 9 was followed by the next decimal one."""
    number: int = 0
    first: bytes = b""
    """The first id, until there is a second: most streams have one only, which tells nothing."""
    expected: bytes = b""
    """The id that follows `number`, where all ids so far counted on without leading zeros; else empty."""

    def see(self, event_id: bytes, *, repeated: bool) -> None:
        """Take the next id of the stream; `repeated` tells that the stream had it before."""
        self.count += 1
        if event_id == self.expected and not repeated:
            self.number = number = self.number + 1
            self.expected = self.prefix + b"%d" % (number + 1)
            return
        if repeated:
            self.held = Order.UNCHECKED
        if self.count == 1:
            self.first = event_id
            return
        if self.first:
            first, self.first = self.first, b""
            self._learn(first, is_first=True)
        self._learn(event_id, is_first=False)

    def _learn(self, event_id: bytes, *, is_first: bool) -> None:
        self.expected = b""
        if self.held <= Order.OPAQUE:
            return
        prefix, digits = _split(event_id)
        if not digits or (not is_first and prefix != self.prefix):
            self.held = Order.OPAQUE
            return
        if not is_first:
            step = int(digits) - self.number
            if step < 1:
                self.held = Order.OPAQUE
            elif step > 1:
                self.held = Order.INCREASING
            elif digits.endswith(b"0"):
                self.carried = True
        self.padded = self.padded or (len(digits) > 1 and digits.startswith(b"0"))
        self.prefix = prefix
        self.number = int(digits)
        if self.held is Order.CONSECUTIVE and not self.padded:
            self.expected = prefix + b"%d" % (self.number + 1)

    def order(self, *, several_streams: bool) -> Order:
        """The order to hold the stream to; `several_streams` tells whether its session had more than this one (E3)."""
        if self.count < _ENOUGH or (self.padded and not self.carried):
            # Padded ids may be hexadecimal (one well-known host counts ...09, ...0a): only a decimal carry tells.
            return min(self.held, Order.OPAQUE)
        if several_streams and not self.prefix:
            return min(self.held, Order.INCREASING)
        return self.held


def successor_fault(
    order: Order, last: bytes | None, new: bytes, seen_elsewhere: Callable[[bytes], bool]
) -> IdFault | None:
    """How `new`, which the stream has not had before, violates `order` after `last`; None: it does not (E3).

    `seen_elsewhere` tells whether another stream of the session had an id: such ids fill a gap.
    """
    if order <= Order.OPAQUE or last is None:
        return None
    prefix, digits = _split(new)
    last_prefix, last_digits = _split(last)
    if not digits or not last_digits or prefix != last_prefix:
        return IdFault.ID_GAP
    number, last_number = int(digits), int(last_digits)
    if number <= last_number:
        return IdFault.ID_REWIND
    if order is Order.INCREASING or number == last_number + 1:
        return None
    if number - last_number - 1 > _MOST_MISSING:
        return IdFault.ID_GAP
    width = len(last_digits)  # keeps the zeros of a padded counter, and adds none to another: its numbers grow
    between = (prefix + str(n).zfill(width).encode() for n in range(last_number + 1, number))
    return None if all(map(seen_elsewhere, between)) else IdFault.ID_GAP
