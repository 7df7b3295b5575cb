"""How much of a block has come, for a stream that is to end or to be taken over between two blocks (L3)."""

import pytest

from epochgate.guard.sse import Framer


@pytest.mark.parametrize(
    ("keep_raw", "fed", "unfinished"),
    [
        (100, b"", 0),
        (100, b"data: x\n\n", 0),
        (100, b"data: x\n\nid: 1\nda", 8),
        (100, b"data: x\n", 8),
        (8, b"data: xy", 8),
        (8, b"data: xyz", None),
        (8, b"data: xyz\n\n", 0),
        (0, b"data: x\n\n", 0),
        (0, b"data: x", None),
    ],
)
def test_the_bytes_of_an_unfinished_block_are_counted(keep_raw: int, fed: bytes, unfinished: int | None) -> None:
    """L3: None where they are not kept, since then nobody knows."""
    framer = Framer(keep_raw=keep_raw)
    framer.feed(fed)
    assert framer.unfinished == unfinished
