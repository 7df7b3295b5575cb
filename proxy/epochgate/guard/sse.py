"""Server-sent events: bytes in, blocks out. Incremental, bounded in memory, linear in time (L3).

The rules are WHATWG HTML section 9.2.6, on bytes: UTF-8 never hides a line end, a colon or a NUL. The hard cases:

* A CR ends its line at once; an LF that follows it belongs to it, even when it comes with the next read. By then the
  block may be out, so this LF stands first in the `raw` of the next block and no byte is lost.
* One byte order mark at the start of the stream, whole or in pieces, is no data; a later one is.
* An id sticks to the blocks after it. It commits at the blank line, so an `id` line before a cut moves no cursor.

Nothing is scanned twice: the end of a line is looked for in the new bytes only, and what a line is for is known from
its first six bytes, so the rest of a long one goes straight to where it belongs.
"""

from __future__ import annotations

import re
from enum import Enum, auto

import msgspec
import xxhash

# Measured for 100 B, 1 KB, 16 KB (us): xxh3_128 0.13, 0.09, 0.7; sha256 0.31, 0.79, 8.4; blake2b 0.29, 1.1, 15. Nobody
# gains by a collision (docs/adr/0004-digests.md).
_hash = xxhash.xxh3_128
digest_of = xxhash.xxh3_128_digest

MARK = b"\xef\xbb\xbf"
_LF, _CR, _SPACE = b"\n\r "
_ENDS_OF_BLANK = (b"\n", b"\r\n")
_FEW_LINES = 8
_ENDS = (b"\n\n", b"\n\r\n")  # of a last line, and the blank one after it
# The longest id or event name that counts, in bytes: request heads end here (T2), so no cursor can be longer.
_FIELD_LIMIT = 64 * 1024
_LINE_LIMIT = len(b"event: ") + _FIELD_LIMIT
# A tool result of megabytes is one event, and whether it answers a call is read from its data (L3).
_KEEP_DATA = 16 * 1024 * 1024

# The ordinary block up to its data: `id` and `event` lines in any order. Bounded, so that it cannot backtrack far.
ORDINARY_HEAD = re.compile(rb"(?:id: ?([^\r\n\0]{0,1024})\r?\n|event: ?([^\r\n]{0,1024})\r?\n){0,4}data: ?").match


class Kind(Enum):
    """What a block is for."""

    MESSAGE = auto()  # it has data
    PRIMING = auto()  # it has an id of its own; its data is empty or absent
    OTHER = auto()  # comments, `retry`, a bare `event`, empty data without an id, a further blank line


_MESSAGE, _PRIMING, _OTHER = Kind  # a global is looked up faster than a member


class Block(msgspec.Struct, frozen=True, gc=False):
    """Everything from the end of one blank line to the end of the next."""

    raw: bytes | None
    """Its bytes as they came, blank line included; None where they are not kept."""
    id: bytes | None
    """The id that sticks after it; None: there is none, or an empty one took it back."""
    own_id: bool
    """Whether it carries an `id` field that counts, be it empty."""
    data: bytes | None
    """The `data` lines, joined by LF; None: there is no such line, or they are longer than what is kept."""
    digest: bytes
    """16 bytes over the whole data, however long; empty unless it is a message."""
    kind: Kind
    name: bytes | None
    """The `event` field; an empty one counts as none."""


def end_of_block(data: bytes) -> int:
    """Where the unfinished block ends that `data` goes on with; 0 where that is not here, or far."""
    at = 0
    for _ in range(_FEW_LINES):  # line by line: to look for two bytes in a long one takes several times as long
        at = data.find(b"\n", at) + 1
        if not at:
            break
        if data.startswith(_ENDS_OF_BLANK, at):
            return at + 1 + (data[at] == _CR)
    return 0


def _split_ordinary(data: bytes) -> tuple[bytes | None, bytes | None, int, int] | None:
    """The id, the name and the place of the data of the one ordinary block that `data` is; None where it is not."""
    head = ORDINARY_HEAD(data)
    if head is None:
        return None
    begin = head.end()
    end = data.find(b"\n", begin)
    if not 2 <= len(data) - end <= 3 or data[end:] not in _ENDS or data.find(b"\r", begin, end - 1) >= 0:
        return None
    if end > begin and data[end - 1] == _CR:
        end -= 1
    return head[1], head[2], begin, end


def only_block(stream: bytes, keep_data: int) -> Block | None:
    """The message that a whole stream is, where this is one ordinary block: what a `Framer` would tell, without one."""
    found = _split_ordinary(stream)
    if found is None:
        return None
    id_field, name, begin, end = found
    data = stream[begin:end]
    if not 0 < len(data) <= keep_data:
        return None
    return Block(None, id_field or None, id_field is not None, data, digest_of(data), _MESSAGE, name or None)


class _Line(Enum):
    """What becomes of the rest of a line that has begun."""

    COLLECT = auto()  # an id, a name, or not known yet
    DATA = auto()
    SKIP = auto()


class Framer:
    """Cuts one stream into blocks. A block that the stream does not finish is never told (L3).

    `keep_raw` and `keep_data` are the most bytes of one block that are kept, raw and as data: memory grows with them
    and never with the block. With `keep_raw` 0 no raw bytes are kept; else the `raw` of all blocks and `pending_raw`
    together are the bytes that were fed, as long as no block exceeds the limit.
    """

    __slots__ = (
        "_after_cr",
        "_data",
        "_data_hash",
        "_id_field",
        "_line",
        "_line_use",
        "_mark",
        "_name",
        "_open",
        "_raw",
        "_raw_exceeded",
        "keep_data",
        "keep_raw",
        "last_id",
    )

    def __init__(self, *, keep_raw: int = 0, keep_data: int = _KEEP_DATA) -> None:
        self.keep_raw = keep_raw  # both may be changed at any time; what a block has lost by then it does not get back
        self.keep_data = keep_data
        self._mark = 0  # how many bytes of a byte order mark were read; all of them also where there is none
        self._after_cr = False
        self.last_id: bytes | None = None  # the id that sticks now
        # The unfinished block. What grows is a bytearray: a list of tiny parts would cost many times their bytes.
        self._open = False  # some of it was read
        self._raw = bytearray()
        self._raw_exceeded = False
        self._line = bytearray()
        self._line_use = _Line.COLLECT
        self._id_field: bytes | None = None
        self._name: bytes | None = None
        self._data: bytearray | None = None
        self._data_hash: xxhash.xxh3_128 | None = None  # the data exceeds `keep_data` and is only hashed

    @property
    def at_start_of_block(self) -> bool:
        """Whether what comes next begins a block, and not the stream."""
        return not (self._open or self._after_cr or self._raw) and self._mark == len(MARK)

    def without_mark(self, data: bytes) -> bytes:
        """What is to be fed next, without the byte order mark that the stream begins with.

        The beginning of a mark is left out until it is known to be none: it then goes before the bytes that tell so.
        """
        if self._mark == len(MARK):
            return data
        seen = MARK[: self._mark] + data
        return seen[len(MARK) :] if MARK.startswith(seen[: len(MARK)]) else seen

    @property
    def clean(self) -> bool:
        """Whether the stream is between two blocks. An LF that belongs to the last one may still be pending."""
        return not self._open

    @property
    def unfinished(self) -> int | None:
        """How many bytes have come since the last block, None where they are not kept."""
        return None if self._raw_exceeded or (self._open and not self.keep_raw) else len(self._raw)

    @property
    def kept(self) -> int:
        """How many bytes are kept of the unfinished block, raw and as data."""
        return len(self._raw) + (0 if self._data is None else len(self._data))

    def let_go(self) -> None:
        """Keep no more of the unfinished block: its data is only hashed, as that of a block beyond the limits."""
        if self._data and self._data_hash is None:
            self._data_hash = _hash(self._data)
            self._data = bytearray()
        if self.keep_raw:
            self._raw_exceeded = True
            self._raw.clear()

    @property
    def pending_raw(self) -> bytes:
        """The bytes since the last block, where raw bytes are kept and these still fit."""
        return bytes(self._raw)

    def feed(self, data: bytes) -> list[Block]:
        """Read the next bytes of the stream; returns the blocks that they complete, in order."""
        if not (self._open or self._after_cr or self._raw) and (block := self._read_ordinary(data)) is not None:
            return [block]
        blocks: list[Block] = []
        size = len(data)
        start = at = 0  # where the bytes of this block begin, and where the next line does
        if self._after_cr and size:
            self._after_cr = False
            at = int(data[0] == _LF)
        elif self._mark < len(MARK):
            at = self._read_mark(data)
        keep_raw = self.keep_raw
        has_cr = data.find(b"\r", at) >= 0
        lf = -1  # the first LF from `at` on, `size` where there is none; looked for anew once `at` has passed it
        while at < size:
            # The fast path: an ordinary block with one line of data, here as a whole.
            if not self._open and (head := ORDINARY_HEAD(data, at)) is not None:
                begin = head.end()
                end = eol = lf if lf >= begin else data.find(b"\n", begin)
                if has_cr and eol >= 0 and (cr := data.find(b"\r", begin, eol)) >= 0:
                    end = cr
                if 0 <= eol <= end + 1:  # else the line is not whole, or has a lone CR
                    stop = eol + 2 if data.startswith(b"\n", eol + 1) else eol + 3
                    if stop == eol + 2 or data.startswith(b"\r\n", eol + 1):
                        id_field, name = head.groups()
                        raw = data[start:stop] if 0 < stop - start <= keep_raw and not self._raw else None
                        if raw is None and keep_raw:
                            raw = self._take_raw(data[start:stop])
                        blocks.append(self._block(raw, id_field, name, data[begin:end], None))
                        at = start = stop
                        continue
            if lf < at and (lf := data.find(b"\n", at)) < 0:
                lf = size
            end, following = lf, lf + 1
            if has_cr and (cr := data.find(b"\r", at, lf)) >= 0:
                end, following = cr, cr + 1
                if following == size:
                    self._after_cr = True
                elif data[following] == _LF:
                    following += 1
            if end == size:
                self._open = True
                self._read_part(data[at:])
                break
            if end == at and not self._line and self._line_use is _Line.COLLECT:
                raw = self._take_raw(data[start:following]) if self.keep_raw else None
                blocks.append(self._finish(raw))
                start = following
            else:
                self._open = True
                self._end_line(data[at:end])
            at = following
        if self.keep_raw:
            self._save_raw(data[start:])
        return blocks

    def _read_ordinary(self, data: bytes) -> Block | None:
        """The block that `data` is, where it is an ordinary one as a whole and no more: the usual read of a stream."""
        found = _split_ordinary(data)
        if found is None:
            return None
        id_field, name, begin, end = found
        self._mark = len(MARK)
        raw = data if len(data) <= self.keep_raw else None
        if not begin < end <= begin + self.keep_data:
            return self._block(raw, id_field, name, data[begin:end], None)
        if id_field is not None:
            self.last_id = id_field or None
        text = data[begin:end]
        return Block(raw, self.last_id, id_field is not None, text, digest_of(text), _MESSAGE, name or None)

    def _read_mark(self, data: bytes) -> int:
        """Step over a byte order mark at the start of the stream; returns where its text begins in `data`."""
        before = self._mark
        seen = MARK[:before] + data[: len(MARK) - before]
        if MARK.startswith(seen):
            self._mark = len(seen)
            self._open = 0 < len(seen) < len(MARK)
            return len(seen) - before
        self._mark = len(MARK)
        self._line += MARK[:before]  # no mark after all: it begins the first line
        return 0

    def _read_part(self, part: bytes) -> None:
        """Take bytes of a line whose end is not here yet."""
        if self._line_use is _Line.DATA:
            self._add(part)
        elif self._line_use is _Line.COLLECT:
            line = self._line
            line += part
            if line.startswith(b"data:"):
                if len(line) > len(b"data:"):  # only now it is known whether a space follows, which does not count
                    self._begin_data()
                    self._add(bytes(line[6:] if line[5] == _SPACE else line[5:]))
                    self._line_use = _Line.DATA
                    line.clear()
            elif len(line) > _LINE_LIMIT or (len(line) > len(b"event:") and not line.startswith((b"id:", b"event:"))):
                self._line_use = _Line.SKIP
                line.clear()

    def _end_line(self, part: bytes) -> None:
        """Take the last bytes of a line."""
        if self._line_use is _Line.COLLECT:
            if self._line:
                part = bytes(self._line) + part
                self._line.clear()
            self._read_line(part)
        elif self._line_use is _Line.DATA:
            self._add(part)
        self._line_use = _Line.COLLECT

    def _read_line(self, line: bytes) -> None:
        """Take a whole line that is not blank. `retry`, comments and unknown fields say nothing here."""
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            self._begin_data()
            self._add(value)
        elif field == b"id":
            if b"\0" not in value and len(value) <= _FIELD_LIMIT:
                self._id_field = value
        elif field == b"event" and len(value) <= _FIELD_LIMIT:
            self._name = value

    def _begin_data(self) -> None:
        """A `data` line begins."""
        if self._data is None:
            self._data = bytearray()
        else:
            self._add(b"\n")

    def _add(self, part: bytes) -> None:
        """Append to the data of the block, whose first line has begun; beyond the limit it is only hashed."""
        if self._data_hash is not None:
            self._data_hash.update(part)
            return
        assert self._data is not None
        if len(self._data) + len(part) <= self.keep_data:
            self._data += part
        else:
            self._data_hash = _hash(self._data)
            self._data_hash.update(part)
            self._data = bytearray()

    def _finish(self, raw: bytes | None) -> Block:
        """The blank line has come: the block, and a fresh start."""
        data = None if self._data is None or self._data_hash is not None else bytes(self._data)
        block = self._block(raw, self._id_field, self._name, data, self._data_hash)
        self._open = False
        self._id_field = self._name = None
        self._data = None
        self._data_hash = None
        return block

    def _block(
        self,
        raw: bytes | None,
        id_field: bytes | None,
        name: bytes | None,
        data: bytes | None,
        hashed: xxhash.xxh3_128 | None,
    ) -> Block:
        """Build a block, and commit its id."""
        own_id = id_field is not None
        if own_id:
            self.last_id = id_field or None
        if data:
            digest = digest_of(data)
            if len(data) > self.keep_data:
                data = None
        elif hashed is not None:
            digest = hashed.digest()
        else:
            return Block(raw, self.last_id, own_id, data, b"", _PRIMING if own_id else _OTHER, name or None)
        return Block(raw, self.last_id, own_id, data, digest, _MESSAGE, name or None)

    def _take_raw(self, rest: bytes) -> bytes | None:
        """The bytes of a block of which `rest` is the end, where they are kept."""
        if not self._raw and not self._raw_exceeded and len(rest) <= self.keep_raw:
            return rest
        self._save_raw(rest)
        raw = None if self._raw_exceeded else bytes(self._raw)
        self._raw.clear()
        self._raw_exceeded = False
        return raw

    def _save_raw(self, part: bytes) -> None:
        """Keep bytes of the unfinished block as long as it fits."""
        if len(self._raw) + len(part) > self.keep_raw:
            self._raw_exceeded = True
            self._raw.clear()
        elif not self._raw_exceeded:
            self._raw += part
