"""The framer against the text of the standard: every sample whole, byte by byte, and cut in two at every place (L3)."""

import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from epochgate.guard.sse import Block, Framer, Kind

ALL = 1 << 30
MARK = b"\xef\xbb\xbf"


# A second reader, written from WHATWG HTML section 9.2.6 and nothing else: one byte at a time, no thought of speed.


@dataclass
class Expected:
    """What the standard says of one block."""

    id: bytes | None
    own_id: bool
    lines: list[bytes]
    name: bytes | None

    def check(self, block: Block, *, keep_data: int = ALL) -> None:
        data = b"\n".join(self.lines)
        kind = Kind.MESSAGE if data else Kind.PRIMING if self.own_id else Kind.OTHER
        assert (block.id, block.own_id, block.name, block.kind) == (self.id, self.own_id, self.name, kind)
        assert block.data == (data if self.lines and len(data) <= keep_data else None)
        assert block.digest == (xxhash.xxh3_128_digest(data) if data else b"")


@dataclass
class SlowReader:
    id: bytes = b""
    id_buffer: bytes = b""
    own_id: bool = False
    lines: list[bytes] = field(default_factory=list)
    name: bytes = b""
    expected: list[Expected] = field(default_factory=list)
    rest: bytes = b""

    def read(self, stream: bytes) -> None:
        if stream[:3] == MARK:
            stream = stream[3:]
        line = b""
        previous = 0
        for byte in stream:
            if byte == 0x0A and previous == 0x0D:
                pass
            elif byte in (0x0A, 0x0D):
                self.line(line)
                line = b""
            else:
                line += bytes([byte])
            previous = byte
        self.rest = line

    def line(self, line: bytes) -> None:
        if not line:
            self.dispatch()
        elif line[0] == 0x3A:
            pass
        elif 0x3A in line:
            colon = line.index(0x3A)
            value = line[colon + 1 :]
            if value and value[0] == 0x20:
                value = value[1:]
            self.field(line[:colon], value)
        else:
            self.field(line, b"")

    def field(self, name: bytes, value: bytes) -> None:
        if name == b"event":
            self.name = value
        elif name == b"data":
            self.lines.append(value)
        elif name == b"id" and 0 not in value:
            self.id_buffer = value
            self.own_id = True

    def dispatch(self) -> None:
        self.id = self.id_buffer
        self.expected.append(Expected(self.id or None, self.own_id, self.lines, self.name or None))
        self.own_id = False
        self.lines = []
        self.name = b""


def halves(stream: bytes) -> Iterator[list[bytes]]:
    for cut in range(len(stream) + 1):
        yield [stream[:cut], stream[cut:]]


def read(chunks: list[bytes], *, keep_raw: int = ALL, keep_data: int = ALL) -> tuple[Framer, list[Block]]:
    framer = Framer(keep_raw=keep_raw, keep_data=keep_data)
    return framer, [block for chunk in chunks for block in framer.feed(chunk)]


def check(chunks: list[bytes]) -> None:
    """The blocks are those of the slow reader, the bytes are those that were fed, and no limit changes a verdict."""
    stream = b"".join(chunks)
    slow = SlowReader()
    slow.read(stream)
    framer, blocks = read(chunks)
    assert len(blocks) == len(slow.expected)
    for block, expected in zip(blocks, slow.expected, strict=True):
        expected.check(block)
    assert framer.last_id == (slow.id or None)
    assert b"".join(block.raw or b"" for block in blocks) + framer.pending_raw == stream
    unfinished = framer.pending_raw.removeprefix(b"\n") if blocks else framer.pending_raw.removeprefix(MARK)
    assert framer.clean == (not unfinished)
    for limit in (0, 1, 9):
        short, shortened = read(chunks, keep_raw=limit, keep_data=limit)
        for block, expected, whole in zip(shortened, slow.expected, blocks, strict=True):
            expected.check(block, keep_data=limit)
            assert block.raw == (whole.raw if 0 < len(whole.raw or b"") <= limit else None)
        assert short.pending_raw == (framer.pending_raw if len(framer.pending_raw) <= limit else b"")
        assert (short.last_id, short.clean) == (framer.last_id, framer.clean)


SAMPLES = {
    "ordinary": b'id: 1\ndata: {"n":1}\n\nid: 2\ndata: {"n":2}\n\n',
    "named": b"event: message\nid: 1\ndata: a\n\nid: 2\nevent: note\ndata: b\n\nevent:\ndata: c\n\n",
    "named after the data": b"event: message\ndata: a\nid: 1\n\ndata: b\nevent: x\n\n",
    "three lines": b"data: a\ndata:b\ndata\nid: 1\n\n",
    "line without a colon": b"data\n\ndata\ndata\n\nid\n\nevent\n\nid: 3\n\nid\ndata: a\n\n",
    "priming": b"id: p0\nretry: 500\ndata: \n\nid: k\n\nid: q\ndata:\n\nid:\n\n",
    "other": b": hi\n\nretry: 20\n\nevent: x\n\ndata:\n\nfoo: bar\n\n:\n\n\n\n\n",
    "ids stick": b"id: 1\ndata: a\n\ndata: b\n\n: c\n\nid\ndata: d\n\ndata: e\n\n",
    "last id counts": b"id: 1\nid: 2\ndata: a\n\nid: 3\nid: x\0\ndata: b\n\nid: 4\nid:\ndata: c\n\n",
    "NUL": b"id: \0\ndata: a\n\nid: 1\ndata: \0\n\nid: a\0b\n\n",
    "spaces": b"id:  1\ndata:  a\n\nid: 1 \ndata:\tb\n\ndata : c\n\n data: d\n\nid:5\ndata:e\n\n",
    "colons": b"id: a:b\ndata: c:d\n\n::\n\n:data: a\n\ndata::\n\n",
    "prefixes of names": b"dat: a\nda\nd\ni: 1\nidd: 2\ndatas: x\nevents: y\neven: z\ndata\0: q\nDATA: r\n\nID: 1\n\n",
    "cuts in spaces": b"data: \ndata:  \ndata:\n\n",
    "mark": MARK + b"id: 1\ndata: a\n\n" + MARK + b"id: 2\ndata: b\n\n",
    "two marks": MARK + MARK + b"id: 1\ndata: a\n\nid: 2\ndata: " + MARK + b"\n\n",
    "mark and blank line": MARK + b"\n" + MARK + b"\n\n",
    "half a mark": MARK[:2] + b"id: 1\ndata: a\n\nid: 2\ndata: b\n\n",
    "mark alone": MARK,
    "no line ends": "data: a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\n\n".encode(),
    "cut off": b"id: 1\ndata: a\n\nid: 2\ndata: b\n",
    "cut off in a line": b"id: 1\ndata: a\n\nid: 2\ndata: b",
    "blank line first": b"\n\nid: 1\ndata: a\n\n\ndata: b\n\n\n",
    "nothing": b"",
}
ENDS = {
    "LF": lambda sample: sample,
    "CRLF": lambda sample: sample.replace(b"\n", b"\r\n"),
    "CR": lambda sample: sample.replace(b"\n", b"\r"),
    "CR LF in turn": lambda sample: b"".join(
        part + (b"\r", b"\n", b"\r\n", b"\n", b"\r")[n % 5] for n, part in enumerate(sample.split(b"\n"))
    ),
    "data with CR": lambda sample: sample.replace(b"data: ", b"data: x\rdata: "),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", SAMPLES)
def test_any_cut_gives_the_same_blocks(name: str, end: str) -> None:
    """L3, T1."""
    stream = ENDS[end](SAMPLES[name])
    check([stream])
    check([stream[i : i + 1] for i in range(len(stream))])
    check([part for i in range(len(stream)) for part in (b"", stream[i : i + 1], b"")])
    for chunks in halves(stream):
        check(chunks)


pieces = st.sampled_from(
    [
        *(b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r", MARK, MARK[:1], MARK[1:], b"\0"),
        *(b"id: ", b"id:", b"id", b"data: ", b"data:", b"data", b"event: ", b"event:", b"event", b"retry: 1", b":"),
        *(b" ", b"a", b"12", b"x" * 40, b'{"n":1}', b"id: 7\ndata: m\n\n", b"id: 8\r\ndata: n\r\n\r\n"),
    ]
)
streams = st.lists(pieces | st.binary(max_size=4), max_size=24).map(b"".join)


@settings(max_examples=400, deadline=None)
@given(stream=streams, cuts=st.lists(st.integers(0, 120), max_size=6))
def test_any_bytes_in_any_pieces(stream: bytes, cuts: list[int]) -> None:
    """L3: what the standard says, whatever comes and however it is cut."""
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    check([stream[begin:end] for begin, end in zip(places, places[1:], strict=False)])


def test_a_late_lf_opens_the_next_block() -> None:
    """T1, L3: a CR ends the block at once; its LF comes later, is not lost, and opens no block."""
    framer = Framer(keep_raw=ALL)
    (first,) = framer.feed(b"id: 1\r\ndata: a\r\n\r")
    assert (first.raw, framer.last_id, framer.clean) == (b"id: 1\r\ndata: a\r\n\r", b"1", True)
    assert framer.feed(b"\n") == []
    assert (framer.clean, framer.pending_raw) == (True, b"\n")
    (second,) = framer.feed(b"data: b\n\n")
    assert second.raw == b"\ndata: b\n\n"


def test_an_unfinished_block_moves_no_cursor() -> None:
    """L3: the id commits at the blank line."""
    framer = Framer(keep_raw=ALL)
    framer.feed(b"id: 7\ndata: a\n\nid: 8\ndata: par")
    assert (framer.last_id, framer.clean, framer.pending_raw) == (b"7", False, b"id: 8\ndata: par")
    (block,) = framer.feed(b"tial\n\n")
    assert (block.id, block.data, framer.last_id, framer.clean) == (b"8", b"partial", b"8", True)


@pytest.mark.parametrize("step", [1 << 20, 1000])
@pytest.mark.parametrize(("size", "counts"), [(64 * 1024, True), (64 * 1024 + 1, False)])
def test_an_id_longer_than_a_request_head_is_ignored(step: int, size: int, counts: bool) -> None:
    """L3: it could not come back as a cursor; the same holds for the name."""
    for field_line, member in ((b"id: ", "id"), (b"id:", "id"), (b"event: ", "name"), (b"event:", "name")):
        stream = field_line + b"7" * size + b"\ndata: a\n\n"
        _, (block,) = read([stream[i : i + step] for i in range(0, len(stream), step)])
        assert getattr(block, member) == (b"7" * size if counts else None)
        assert block.own_id == (counts and member == "id")
        assert block.data == b"a"


def test_data_beyond_the_limit_is_hashed_but_not_kept() -> None:
    """L3, L5: the digest is that of the whole data, whole or in pieces."""
    stream = b"id: 1\ndata: " + b"ab" * 500 + b"\ndata: c\n\nid: 2\ndata: " + b"d" * 20 + b"\n\n"
    whole = xxhash.xxh3_128_digest(b"ab" * 500 + b"\nc")
    for step in (1, 7, 64, 5000):
        framer, blocks = read([stream[i : i + step] for i in range(0, len(stream), step)], keep_raw=50, keep_data=20)
        assert [(block.data, block.digest == whole, block.kind) for block in blocks] == [
            (None, True, Kind.MESSAGE),
            (b"d" * 20, False, Kind.MESSAGE),
        ]
        assert [block.raw for block in blocks] == [None, b"id: 2\ndata: " + b"d" * 20 + b"\n\n"]
        assert framer.pending_raw == b""


@pytest.mark.parametrize("keep_raw", [0, ALL])
@pytest.mark.parametrize("cut", [0, 3, 7, 8, 12, 20, 27])
def test_a_block_that_is_let_go_is_hashed_but_not_kept(keep_raw: int, cut: int) -> None:
    """L3: the digest, id and kind are those of the whole block; the next block is kept again."""
    block = b"id: 1\ndata: abc\ndata: defg\n\n"
    framer = Framer(keep_raw=keep_raw)
    framer.feed(block[:cut])
    framer.let_go()
    framer.let_go()
    assert framer.kept == 0
    assert framer.unfinished is None or not cut or not keep_raw
    first, second = framer.feed(block[cut:] + block)
    assert (first.digest, first.id, first.kind) == (second.digest, b"1", Kind.MESSAGE)
    assert second.data == b"abc\ndefg"
    assert (first.raw, second.raw) == (None, block if keep_raw else None)
    assert first.data == (None if cut > len(b"id: 1\ndata: ") else b"abc\ndefg")


def test_a_block_without_data_stays_one_when_it_is_let_go() -> None:
    framer = Framer()
    framer.feed(b"id: 1\ndata:\n")
    framer.let_go()
    (block,) = framer.feed(b"\n")
    assert block.kind is Kind.PRIMING


def test_what_is_kept_of_an_unfinished_block() -> None:
    framer = Framer(keep_raw=ALL)
    assert framer.kept == 0
    framer.feed(b"data: abc")
    assert framer.kept == len(b"data: abc") + len(b"abc")
    framer.feed(b"\n\n")
    assert framer.kept == 0


@pytest.mark.parametrize("head", [b"id: 1\ndata: ", b"id: ", b": ", b"event: ", b"x", b"data: a\ndata: "])
def test_memory_does_not_grow_with_an_event(head: bytes) -> None:
    """L5, T6: 64 MB on one line, whatever the line is for."""
    chunk = b"x" * 65536
    framer = Framer(keep_raw=1000, keep_data=0)
    framer.feed(head)
    tracemalloc.start()
    try:
        for _ in range(1024):
            framer.feed(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400_000
    (block,) = framer.feed(b"\n\n")
    assert (block.raw, block.kind is Kind.MESSAGE) == (None, b"data" in head)


def test_what_is_kept_is_bounded_in_the_tiniest_pieces() -> None:
    """L5: pieces of two bytes cost no more than their bytes."""
    framer = Framer(keep_raw=100_000, keep_data=100_000)
    framer.feed(b"data: ")
    tracemalloc.start()
    try:
        for _ in range(200_000):
            framer.feed(b"xy")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * (100_000 + 100_000) + 100_000


def seconds(size: int, step: int, *, lines: bytes = b"") -> float:
    """The least CPU time of three to read events of `size` bytes in all, in pieces of `step`."""
    stream = b"id: 1\ndata: " + (lines * (size // len(lines)) if lines else b"x" * size) + b"\n\n"
    chunks = [stream[i : i + step] for i in range(0, len(stream), step)]
    times = []
    for _ in range(3):
        framer = Framer(keep_raw=4096, keep_data=1 << 20)
        begin = time.thread_time()
        got = sum(len(framer.feed(chunk)) for chunk in chunks)
        times.append(time.thread_time() - begin)
        assert got == 1 + stream.count(b"\r\r")
    return min(times)


@pytest.mark.parametrize(
    ("size", "step", "lines"),
    [
        (4 << 20, 65536, b""),
        (1 << 17, 1, b""),
        (1 << 20, 65536, b"a\ndata: "),
        (1 << 20, 65536, b"a\rdata: "),
        (1 << 18, 1 << 23, b"a\rdata: "),
        (1 << 20, 1 << 23, b"a\r\ndata: "),
        (1 << 19, 1 << 23, b"a\r\rdata: "),
    ],
)
def test_time_is_linear(size: int, step: int, lines: bytes) -> None:
    """T6: four times the bytes cost about four times as much, in any pieces and with any line ends."""
    assert seconds(4 * size, step, lines=lines) < 8 * seconds(size, step, lines=lines)


@pytest.mark.parametrize(
    "stream", [MARK + b"data: 1\n\n", MARK[:2] + b"data: 1\n\n", b"data: 1\n\n", MARK + MARK + b"x\n\n"]
)
def test_a_stream_without_its_mark(stream: bytes) -> None:
    """Wherever it is cut: the bytes of a mark that was none are not lost."""
    for first in range(len(stream)):
        for second in range(first, len(stream)):
            framer, passed = Framer(), b""
            for data in (stream[:first], stream[first:second], stream[second:]):
                passed += framer.without_mark(data)
                framer.feed(data)
            assert passed == stream.removeprefix(MARK)
