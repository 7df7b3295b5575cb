"""The SSE framer against a second reader, and against itself fed in other pieces (L3).

The first byte of an input chooses the limits, the second how it is cut; the rest is the stream.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import xxhash

from epochgate.guard.sse import Block, Framer

DICTIONARY = (
    "data: ", "data", "id: ", "id", "event: ", "retry: ", ":", "\\x0d\\x0a", "\\x0d", "\\x0a", "\\xef\\xbb\\xbf",
    "\\x00",
)  # fmt: skip
KEEP = (0, 1, 7, 64, 1 << 20)
FIELD_LIMIT = 64 * 1024  # of an id and a name; longer ones do not count (L3: a cursor is no longer than a head)

_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n)", re.DOTALL)

# id, own id, data, digest, kind, name
Seen = tuple[bytes | None, bool, bytes | None, bytes, str, bytes | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader found: the blocks, the id that sticks at the end, whether a block has begun."""

    blocks: list[Seen]
    last_id: bytes | None
    clean: bool


def reference(stream: bytes, keep_data: int) -> Reading:
    """WHATWG HTML section 9.2.6 on the whole stream, line by line; the digest is over all of the data."""
    begun = stream in (b"\xef", b"\xef\xbb")
    stream = stream.removeprefix(b"\xef\xbb\xbf")
    blocks: list[Seen] = []
    last_id, own, name, lines = b"", None, b"", None
    end = 0
    for line, _ in (found.groups() for found in _LINE.finditer(stream)):
        if not line:
            data = None if lines is None else b"\n".join(lines)
            last_id = last_id if own is None else own
            kind = "MESSAGE" if data else "PRIMING" if own is not None else "OTHER"
            digest = xxhash.xxh3_128_digest(data) if data else b""
            kept = None if data is None or len(data) > keep_data else data
            blocks.append((last_id or None, own is not None, kept, digest, kind, name or None))
            own, name, lines = None, b"", None
            begun = False
            continue
        begun = True
        field, colon, value = line.partition(b":")
        if colon and not field:
            continue
        value = value.removeprefix(b" ")
        if field == b"data":
            lines = [*(lines or ()), value]
        elif field == b"id" and b"\0" not in value and len(value) <= FIELD_LIMIT:
            own = value
        elif field == b"event" and len(value) <= FIELD_LIMIT:
            name = value
    end = max((found.end() for found in _LINE.finditer(stream)), default=0)
    return Reading(blocks, last_id or None, not begun and end == len(stream))


def pieces(stream: bytes, how: int) -> list[bytes]:
    """The stream whole, byte by byte, or cut at places that `how` chooses."""
    if how == 0:
        return [stream]
    if how == 1:
        return [stream[at : at + 1] for at in range(len(stream))]
    choose = random.Random(how)
    cuts = sorted(choose.randrange(len(stream) + 1) for _ in range(how % 8 + 1))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def check(data: bytes) -> None:
    """Raises AssertionError where the framer is wrong about this input."""
    if len(data) < 2:
        return
    keep_raw, keep_data = KEEP[data[0] % 5], KEEP[data[0] // 5 % 5]
    stream = data[2:]
    expected = reference(stream, keep_data)
    for how in {0, 1, data[1]}:
        framer = Framer(keep_raw=keep_raw, keep_data=keep_data)
        blocks: list[Block] = []
        for piece in pieces(stream, how):
            blocks += framer.feed(piece)
        seen = [(b.id, b.own_id, b.data, b.digest, b.kind.name, b.name) for b in blocks]
        assert seen == expected.blocks, (how, seen, expected.blocks)
        assert framer.last_id == expected.last_id, how
        assert framer.clean == expected.clean, how
        _check_raw(framer, blocks, stream)


def _check_raw(framer: Framer, blocks: list[Block], stream: bytes) -> None:
    """Every byte is in one block or pending, as far as the limit allows; nothing is kept beyond it."""
    keep = framer.keep_raw
    raws = [block.raw for block in blocks]
    if not keep:
        assert raws == [None] * len(blocks)
        assert framer.pending_raw == b""
        return
    assert all(raw is None or len(raw) <= keep for raw in raws)
    assert len(framer.pending_raw) <= keep
    at = 0
    for raw in raws:
        if raw is None:
            at = -1
        elif at >= 0:
            assert stream.startswith(raw, at)
            at += len(raw)
        else:
            assert raw in stream
    if None not in raws and framer.unfinished is not None:
        assert b"".join(filter(None, raws)) + framer.pending_raw == stream
        assert framer.unfinished == len(framer.pending_raw)
