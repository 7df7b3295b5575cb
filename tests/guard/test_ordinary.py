"""Ordinary events of live streams, read in one go: the record is the one that block by block gives."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochgate.guard.ordinary import record_ordinary
from epochgate.guard.record import Limits, Origin, Session, Watcher
from epochgate.guard.sse import Framer, end_of_block, only_block
from epochgate.guard.watch import Watch
from guard.scene import HEADER, META, note, policy, result

LIMITS = Limits(streams=4, events=6)

texts = st.one_of(
    st.builds(note, st.integers(0, 3), st.sampled_from([None, "e", "e", "f", 7])),
    st.builds(result, st.integers(1, 3), st.sampled_from([None, "e", "f"])),
    st.sampled_from([
        b'{"method":"n","params":{"_meta":{"session_epoch" : "e"}}}',
        b'{"method":"n","params":{"_meta":{"\\u0073ession_epoch":"f"}}}',
        b'{"method":"n","params":{"text":"session_epoch","more":"\\"session_epoch\\":1"}}',
        b'{"jsonrpc": "2.0", "method": "n", "x": "' + b"y" * 5000 + b'"}',
        b'{"method":"n","x":"' + b"y" * 5000 + b'","_meta":{"session_epoch":"f"}}',
        b'{"method":"n","params":{"_meta":{"session_epoch":"e"},"again":{"_meta":{"session_epoch":"f"}}}}',
        b'{"jsonrpc":"2.0","method":null,"id":1,"result":{}}',
        b"", b"no json", b"[]",
    ]),
)  # fmt: skip


@st.composite
def blocks(draw: Any) -> bytes:
    """One block as some server may write it."""
    eol = draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\r\n", b"\r"]))
    lines = [
        draw(st.sampled_from([b"id: %d" % draw(st.integers(1, 9)), b"id:%d" % draw(st.integers(1, 9)), b"", b"id: a"])),
        draw(st.sampled_from([b"", b"", b"event: message", b": here", b"retry: 5", b"id"])),
        draw(st.sampled_from([b"data: ", b"data:", b"data:  "])) + draw(texts),
        draw(st.sampled_from([b"", b"", b"", b"data: more", b"data", b"id: 77"])),
    ]
    if draw(st.integers(0, 9)) == 0:
        lines = [b": keep-alive"]
    return b"".join(line + eol for line in lines if line) + draw(st.sampled_from([eol, eol, eol, b"\n"]))


@st.composite
def reads(draw: Any) -> list[bytes]:
    """A stream, cut anywhere."""
    parts = draw(st.lists(st.one_of(blocks(), st.builds(plain, st.integers(1, 9))), max_size=12))
    if draw(st.booleans()):
        return parts
    stream = b"".join(parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def plain(number: int) -> bytes:
    return b"id: %d\ndata: %b\n\n" % (number, note(number, "e"))


class Recorder:
    """A session with one stream that is read in one way or the other."""

    def __init__(self, token: str | None, headers: Any, *, quick: bool) -> None:
        sources = policy(sources=(META, HEADER))
        self.session = Session(b"S", b"", token, LIMITS, 0.0)
        other = self.session.open_stream(Origin.STANDALONE)
        self.stream = self.session.open_stream(Origin.CALL, (1, 2))
        self.watch = Watch(sources, self.session, headers, self.stream)
        Watch(sources, self.session, headers, other).see(Framer().feed(b"id: 4\ndata: x\n\n")[0], 1.0)
        self.framer = Framer(keep_data=4500)
        self.quick = quick
        self.changed = False
        self.taken = 0
        self.rest = b""

    def read(self, data: bytes, now: float, *, final: bool = True) -> None:
        """As `Flow.read` does, and `Backlog` with what that returns."""
        data, self.rest = self.rest + data, b""
        if self.quick:
            if not self.framer.at_start_of_block and (end := end_of_block(data)):
                self.see(data[:end], now)
                data = data[end:]
            if self.framer.at_start_of_block and (stops := record_ordinary(self.watch, self.framer, data, now)):
                self.taken += len(stops)
                data = data[stops[-1] :]
                if not final:
                    self.rest = data
                    return
        self.see(data, now)

    def see(self, data: bytes, now: float) -> None:
        for block in self.framer.feed(data):
            self.changed |= self.watch.see(block, now)

    def state(self) -> Any:
        session, stream = self.session, self.stream
        index = {event_id: found.key for event_id, found in session.index.items()}
        known = session.token, session.delivered, session.shared_ids, index
        events = list(stream.events), stream.first, stream.positions, stream.last_id, stream.empties
        return known, events, stream.learner, list(stream.owes), stream.owes_known, self.framer.last_id, self.changed


@given(
    reads(),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.sampled_from([None, "e", 'a"b']),
    st.sampled_from([(), ((b"Mcp-Session-Epoch", b"e"),)]),
)
def test_l3_the_record_is_the_same_in_one_go_and_block_by_block(
    pieces: list[bytes], finals: list[bool], token: Any, headers: Any
) -> None:
    quick, slow = Recorder(token, headers, quick=True), Recorder(token, headers, quick=False)
    for piece, final in zip([*pieces, b""], [*finals[: len(pieces)], True], strict=True):
        quick.read(piece, 1.0, final=final)
        slow.read(piece, 1.0)
        if final:
            assert quick.state() == slow.state()


@pytest.mark.parametrize(
    "odd",
    [
        b'id: 5\ndata: {"method":"n","_meta":{"session_epoch":"f"},"more":{"session_epoch":"e"}}\n\n',
        b'id: 5\ndata: {"method":"n","params":{"_meta":{"\\u0073ession_epoch":"f"}}}\n\n',
        b'id: 5\ndata: {"method":"n","params":{"_meta":{"session_epoch":"f"}}}\n\n',
        b"data: " + note(1, "e") + b"\n\n",
        b'id: 5\ndata: {"method":"n","x":"' + b"y" * 4600 + b'"}\n\n',
        b"id: 5\r\ndata: " + note(1, "e") + b"\rdata: more\r\n\r\n",
        b"id: 5\ndata: " + note(1, "e") + b"\rid: 6\n\n",
        b"id: 5\ndata: " + result(1, "e") + b"\n\n",
        b"id: 5\ndata: " + note(1, "e") + b"\nid: 6\n\n",
        b"id:\ndata: " + note(1, "e") + b"\n\n",
        b"id: 5\ndata: \n\n",
        plain(3) + plain(3),
        plain(4),
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 30])
def test_l3_one_odd_block_among_ordinary_ones(odd: bytes, cut: int) -> None:
    """What decides of a block is whether it is ordinary, not its neighbours."""
    stream = b"".join(map(plain, (1, 2, 3))) + odd + b"".join(map(plain, (8, 9)))
    quick, slow = Recorder("e", (), quick=True), Recorder("e", (), quick=False)
    for recorder in (quick, slow):
        recorder.read(b": here\n\n", 0.0)
        recorder.read(stream[:cut], 1.0)
        recorder.read(stream[cut:], 1.0)
    assert quick.state() == slow.state()
    assert quick.taken >= 2 or b"\\" in odd


@given(blocks(), st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf", b"data: x\n\n", b"\n", b"\r"]), st.booleans())
def test_a_stream_of_one_block_is_read_as_a_framer_reads_it(block: bytes, other: bytes, first: bool) -> None:
    """L3: or left to one."""
    stream = other + block if first else block + other
    found = only_block(stream, 4500)
    told = Framer(keep_data=4500).feed(stream)
    assert found is None or [found] == told


def test_the_usual_answers_need_no_framer() -> None:
    for stream in (plain(1), plain(1).replace(b"\n", b"\r\n"), b"event: message\n" + plain(2), b"data: x\n\n"):
        assert [only_block(stream, 4500)] == Framer().feed(stream)


def test_ordinary_events_are_taken_wherever_a_read_is_cut() -> None:
    """What an unfinished block leaves at the start of a read costs that block only."""
    recorder = Recorder("e", (), quick=True)
    recorder.read(b": here\n\n", 0.0)
    stream = b"".join(map(plain, range(10, 40)))
    for at in range(0, len(stream), 1000):
        recorder.read(stream[at : at + 1000], 1.0)
    assert recorder.taken > 15
    assert recorder.stream.end == 30


def test_l5_a_forgotten_stream_takes_nothing() -> None:
    """Its events are left to the one who knows that."""
    recorder = Recorder("e", (), quick=True)
    recorder.read(b": here\n\n", 0.0)
    recorder.session.forget(recorder.stream)
    assert record_ordinary(recorder.watch, recorder.framer, plain(1), 1.0) == []


def test_a_mark_at_the_start_of_the_stream_is_left_to_the_framer() -> None:
    framer = Framer()
    assert not framer.at_start_of_block
    framer.feed(b"\xef\xbb\xbf: here\n\n")
    assert framer.at_start_of_block
    framer.feed(b"data: x\n\n\r")
    assert not framer.at_start_of_block


class Heard(Watcher):
    """A ledger that is told of each event."""

    def __init__(self) -> None:
        self.ids: list[bytes | None] = []

    def event_added(self, session: Session, stream: Any, event: Any, answers: tuple[Any, ...]) -> None:
        assert answers == ()
        self.ids.append(event.id)


def test_l5_the_oldest_events_give_way_and_the_ledger_hears_of_all() -> None:
    recorder = Recorder("e", (), quick=True)
    recorder.session.watcher = heard = Heard()
    recorder.read(b": here\n\n", 0.0)
    recorder.read(b"".join(map(plain, range(1, 9))), 1.0)
    assert recorder.taken == 8
    assert heard.ids == [b"%d" % number for number in range(1, 9)]
    assert (recorder.stream.first, recorder.stream.end) == (2, 8)
    assert recorder.session.locate(b"2") is None


def test_l3_events_of_a_stream_without_ids_are_no_cursors() -> None:
    recorder = Recorder("e", (), quick=True)
    recorder.read(b": here\n\n", 0.0)
    recorder.read((b"data: " + note(1, "e") + b"\n\n") * 2, 1.0)
    assert recorder.taken == 2
    assert [event.id for event in recorder.stream.events] == [None, None]
    assert recorder.stream.last_id is None


@pytest.mark.parametrize(
    ("data", "end"),
    [(b"x\n\nrest", 3), (b"x\r\n\r\nrest", 5), (b"x\nid: 1\n\n", 9), (b"x", 0), (b"x\n", 0), (b"x\n" * 20 + b"\n", 0)],
)
def test_where_an_unfinished_block_ends(data: bytes, end: int) -> None:
    """A block of many lines is left to the framer."""
    assert end_of_block(data) == end


@pytest.mark.parametrize(
    "stream", [b"data: \n\n", b"data: " + b"x" * 11 + b"\n\n", b"data: x\n\ndata: y\n\n", b": x\n\n"]
)
def test_what_is_no_single_message_is_left_to_the_framer(stream: bytes) -> None:
    assert only_block(stream, 10) is None


@pytest.mark.parametrize(("origin", "delivered"), [(Origin.CALL, True), (Origin.INITIALIZE, False)])
def test_r3_an_id_was_delivered_unless_it_was_the_handshakes(origin: Origin, delivered: bool) -> None:
    recorder = Recorder("e", (), quick=True)
    recorder.session.delivered = False
    recorder.stream.origin = origin
    recorder.read(b": here\n\n", 0.0)
    recorder.read(plain(1), 1.0)
    assert recorder.taken == 1
    assert recorder.session.delivered is delivered


@pytest.mark.parametrize("token", ["f", None])
def test_r12_what_is_looked_for_is_the_token_that_the_session_has_now(token: str | None) -> None:
    """A header that says the former one shows another epoch then, at each look."""
    recorder = Recorder("e", ((b"Mcp-Session-Epoch", b"e"),), quick=True)
    recorder.read(b": here\n\n", 0.0)
    recorder.read(plain(1), 1.0)
    assert recorder.taken == 1
    recorder.session.token = token
    for _ in range(2):
        assert record_ordinary(recorder.watch, recorder.framer, plain(2), 1.0) == []
