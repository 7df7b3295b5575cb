"""What is kept of requests, answers and events that are not whole yet, so that they can be read when they are.

Each of them has a bound of its own, of a few MiB, and very many can be on their way at once: so all of them together
have one, too (`limits.copies`).
"""

from __future__ import annotations

FREE = 64 * 1024  # bytes of each that do not count; a connection's own buffers are no smaller


class Copies:
    """The bytes that are kept, of all together."""

    __slots__ = ("most", "used")

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0


class Copy:
    """The share of one of them. It has to be let go of (`size` 0) in the end."""

    __slots__ = ("_copies", "_counted")

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._counted = 0

    def resize(self, size: int) -> bool:
        """So many bytes are kept now; False where that is more than there is room for: then they have to go."""
        size = size if size > FREE else 0
        copies = self._copies
        copies.used += size - self._counted
        self._counted = size
        return not size or copies.used <= copies.most
