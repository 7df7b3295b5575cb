"""The records: what is kept, what is forgotten, and what is asked of them (L1-L5, R3, R5, E3)."""

import pytest

from epochgate.guard.eventids import Order
from epochgate.guard.record import Asked, Event, Limits, Origin, Session, Stream, Watcher
from guard.scene import HEADER, Scene, blocks, note, notes, result


class Hearer(Watcher):
    """Writes down what a ledger is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def session_changed(self, session: Session) -> None:
        self.heard.append("session")

    def stream_opened(self, session: Session, stream: Stream) -> None:
        self.heard.append(f"opened {stream.key}")

    def stream_changed(self, session: Session, stream: Stream) -> None:
        self.heard.append(f"changed {stream.key}")

    def event_added(self, session: Session, stream: Stream, event: Event, answers: tuple[int | str, ...]) -> None:
        self.heard.append(f"event {stream.key} {event.id!r} {answers}")


def at(scene: Scene, cursor: str) -> tuple[int, int] | None:
    """The key of the stream and the position that a cursor names."""
    found = scene.session.locate(cursor.encode())
    return None if found is None else (found[0].key, found[1])


# -- cursors (L4, R3)


def test_every_id_that_was_read_is_a_cursor() -> None:
    """L4: not just the last; L3: priming events too, an unfinished event not."""
    scene = Scene()
    scene.live(scene.call(1), ("p", b""), *notes(1, 2), b"id: 3\ndata: x\n")
    assert [at(scene, name) for name in ("p", "1", "2", "3")] == [(0, 0), (0, 1), (0, 2), None]


def test_an_id_sticks_and_names_the_last_of_its_events() -> None:
    """R3, L3: ids stick."""
    scene = Scene()
    stream = scene.call(1)
    scene.live(stream, ("1", note("a")), (None, note("b")), ("2", note("c")), (None, note("d")), (None, note("e")))
    assert at(scene, "1") == (0, 1)
    assert at(scene, "2") == (0, 4)
    assert stream.holds(b"2", blocks((None, note("c")))[0].digest)
    assert not stream.holds(b"2", blocks((None, note("b")))[0].digest)
    assert not stream.holds(b"3", b"")


def test_a_repeated_id_names_the_last_of_its_events() -> None:
    """R3: some servers repeat them."""
    scene = Scene()
    scene.live(scene.call(1), ("a", note(1)), ("b", note(2)), ("a", note(3)))
    assert at(scene, "a") == (0, 2)


def test_an_empty_id_takes_the_cursor_back() -> None:
    """L3: after it events have no id, and a block with nothing but an empty id is no event."""
    scene = Scene()
    stream = scene.call(1)
    scene.live(stream, ("1", note(1)), ("", note(2)), (None, note(3)), ("", b""), ("a\0b", note(4)))
    assert [event.id for event in stream.events] == [b"1", None, None, None]
    assert at(scene, "") is None
    assert stream.last_id == b"1"


def test_the_last_stream_that_had_an_id_is_meant() -> None:
    """R3, for servers whose streams all count 1, 2, 3."""
    scene = Scene()
    first, second = scene.call(1), scene.call(2)
    scene.live(first, *notes(1, 2, 3))
    assert not scene.session.shared_ids
    assert scene.session.named_by(b"1") == []
    scene.live(second, *notes(1, 2))
    assert [at(scene, name) for name in "123"] == [(1, 0), (1, 1), (0, 2)]
    assert scene.session.shared_ids
    assert [scene.session.named_by(name) for name in (b"1", b"3", b"4")] == [[first, second], [first], []]


def test_ids_of_the_handshake_are_cursors_but_not_delivered() -> None:
    """R3: they do not count."""
    scene = Scene()
    handshake = scene.session.open_stream(Origin.INITIALIZE, (0,), b"owner")
    scene.live(handshake, ("p", b""), ("1", result(0)))
    assert at(scene, "1") == (0, 1)
    assert not scene.session.delivered
    scene.live(scene.call(1), ("2", b""))
    assert scene.session.delivered


# -- what is owed (L3)


def test_a_call_is_finished_when_all_its_responses_have_come() -> None:
    """L3: a batch has several."""
    scene = Scene()
    stream = scene.call(1, "b", 2)
    scene.live(stream, ("1", result("b")), ("2", result(9)))
    assert list(stream.owes) == [1, 2]
    assert not stream.finished
    scene.live(stream, ("3", b"[" + result(1) + b"," + result(2) + b"]"))
    assert stream.finished
    assert not scene.standalone().finished
    unread = scene.call()
    unread.owes_known = False
    assert not unread.finished


def test_a_message_ends_a_row_of_empty_resumes() -> None:
    """R9."""
    scene = Scene()
    stream = scene.standalone()
    stream.empties = 3
    scene.live(stream, ("p", b""))
    assert stream.empties == 3
    scene.live(stream, ("1", note(1)))
    assert stream.empties == 0


# -- bounds (L5)


def test_the_oldest_events_are_forgotten() -> None:
    """L5: what was evicted is unknown; positions go on."""
    scene = Scene(limits=Limits(streams=8, events=3))
    stream = scene.call(1)
    scene.live(stream, *notes(1, 2, 3, 4, 5))
    assert [at(scene, name) for name in "12345"] == [None, None, (0, 2), (0, 3), (0, 4)]
    assert (stream.first, stream.end, stream.at(1), stream.at(5)) == (2, 5, None, None)
    assert not scene.session.knows(b"1")
    assert scene.session.knows(b"3")


def test_an_id_outlives_its_first_event_where_a_later_one_has_it() -> None:
    """L5, R3."""
    scene = Scene(limits=Limits(streams=8, events=2))
    first, second = scene.call(1), scene.call(2)
    scene.live(first, ("a", note(1)), ("b", note(2)), ("a", note(3)), (None, note(4)))
    assert at(scene, "a") == (0, 3)
    scene.live(second, ("a", note(5)))
    scene.live(first, ("c", note(6)), ("d", note(7)))
    assert at(scene, "a") == (1, 0)


def test_finished_calls_give_way_first() -> None:
    """L5: else the oldest stream goes; nothing is added to what is forgotten."""
    scene = Scene(limits=Limits(streams=2, events=8))
    first, second = scene.call(1), scene.call(2)
    scene.live(first, *notes(1))
    scene.live(second, *notes(2), ("3", result(2)))
    third = scene.call(3)
    assert list(scene.session) == [first, third]
    assert [at(scene, name) for name in "123"] == [(0, 0), None, None]
    fourth = scene.call(4)
    assert list(scene.session) == [third, fourth]
    scene.live(first, *notes(5))
    assert at(scene, "5") is None
    assert first.end == 1
    scene.live(third, ("6", result(3)))
    scene.live(fourth, ("7", result(4)))
    assert list(scene.session) == [third, fourth]
    assert scene.call(5) in scene.session
    assert fourth in scene.session
    assert third not in scene.session


def test_forgetting_a_stream_leaves_the_ids_that_others_had_later() -> None:
    """L5."""
    scene = Scene(limits=Limits(streams=2, events=8))
    first = scene.call(1)
    scene.live(first, *notes(1, 2))
    scene.live(scene.call(2), *notes(1))
    scene.call(3)
    assert [at(scene, name) for name in "12"] == [(1, 0), None]


# -- where to ask from (R5)


@pytest.mark.parametrize(
    ("told", "cursor", "before"),
    [
        (notes(1, 2, 3), "3", b"2"),
        (notes(1, 2, 3), "2", b"1"),
        (notes(1, 2, 3), "1", None),
        ([("p", b""), *notes(1)], "1", b"p"),
        ([("p", b"")], "p", None),
        # the last message has to be repeated: what comes again for a priming event proves nothing
        ([*notes(1, 2), ("p", b"")], "p", b"1"),
        ([*notes(1), ("p", b""), ("q", b"")], "q", None),
        # an id that sticks names the last of its events
        ([*notes(1, 2), (None, note("x"))], "2", b"1"),
        ([*notes(1), (None, note("x")), *notes(2)], "2", b"1"),
        # an id that comes again later would take the upstream too far
        ([*notes("a", "b"), ("a", note("x"))], "b", None),
        ([*notes("z", "a", "b"), ("a", note("x"))], "b", b"z"),
        # no id
        ([*notes(1), ("", note("x")), ("2", note(2))], "2", b"1"),
        ([(None, note("x")), *notes(1)], "1", None),
    ],
)
def test_the_cursor_is_rewound_by_one_message(told: list[tuple[str | None, bytes]], cursor: str, before: bytes) -> None:
    """R5: the id must name an event before the last message that the client has, and no later one."""
    scene = Scene()
    scene.live(scene.call(1), *told)
    found = scene.session.locate(cursor.encode())
    assert found is not None
    assert scene.session.cursor_before(*found) == before


def test_the_cursor_is_not_rewound_to_an_id_of_another_stream() -> None:
    """R5: with ids 1, 2, 3 on every stream the upstream would take it for the other one."""
    scene = Scene()
    first, second = scene.call(1), scene.call(2)
    scene.live(first, *notes(1, 2, 3))
    scene.live(second, ("1", note("x")), ("2", note("y")))
    assert scene.session.cursor_before(first, 2) is None
    scene.live(second, ("3", note("z")))
    assert scene.session.cursor_before(second, 2) == b"2"


def test_the_cursor_is_not_rewound_past_what_is_forgotten() -> None:
    """L5, R5."""
    scene = Scene(limits=Limits(streams=8, events=2))
    stream = scene.call(1)
    scene.live(stream, *notes(1, 2, 3))
    assert scene.session.cursor_before(stream, 1) is None
    assert scene.session.cursor_before(stream, 2) == b"2"


# -- the order of ids (E3)


def test_ids_that_stick_are_not_repeated_ids() -> None:
    """E3: an event without an `id` line of its own has no id that could break an order."""
    scene = Scene()
    stream = scene.call(1)
    scene.live(stream, *[pair for n in (1, 2, 3) for pair in ((str(n), note(n)), (None, note(f"{n} more")))])
    assert scene.session.order_of(stream) is Order.CONSECUTIVE


def test_a_priming_event_may_repeat_the_last_id() -> None:
    """E3: it gives out no new id. A message that repeats an id breaks every order."""
    scene = Scene()
    stream = scene.call(1)
    scene.live(stream, *notes(1, 2), ("2", b""), *notes(3))
    assert scene.session.order_of(stream) is Order.CONSECUTIVE
    scene.live(stream, ("3", note("again")))
    assert scene.session.order_of(stream) is Order.UNCHECKED


def test_bare_integers_of_several_streams_only_rise() -> None:
    """E3."""
    scene = Scene()
    stream = scene.call(1)
    scene.live(stream, *notes(1, 2, 3))
    assert scene.session.order_of(stream) is Order.CONSECUTIVE
    scene.call(2)
    assert scene.session.order_of(stream) is Order.INCREASING


# -- the life of a session


def test_a_gap_longer_than_the_ttl_is_a_boundary_signal() -> None:
    """Section 2."""
    session = Scene().session
    session.touch(1100.0)
    session.note_gap(1500.0, None)
    session.note_gap(1400.0, 300.0)
    assert session.boundary_at == float("-inf")
    session.touch(1400.0)
    session.note_gap(1700.1, 300.0)
    assert session.boundary_at == 1700.1


def test_a_request_alone_is_no_sign_of_life() -> None:
    """Section 2, L5: the upstream may refuse it, and it may be anybody's."""
    session = Scene().session
    session.touch(1100.0)
    session.note_gap(1300.0, 300.0)
    assert session.active_at == 1100.0
    session.note_gap(1500.0, 300.0)
    assert session.boundary_at == 1500.0


def test_what_cannot_be_read_is_delivered_all_the_same() -> None:
    """R3, T8: a ledger that keeps it elsewhere hears of it, once."""
    session = Scene().session
    hearer = session.watcher = Hearer()
    session.mark_delivered()
    session.mark_delivered()
    assert session.delivered
    assert hearer.heard == ["session"]
    alone = Scene().session
    alone.mark_delivered()
    assert alone.delivered


def test_another_instance_is_a_boundary_signal() -> None:
    """Section 2: the first one is none, and neither is a response without the header."""
    session = Scene(sources=(HEADER,)).session
    session.see_instance(b"a", 1.0)
    session.see_instance(None, 2.0)
    session.see_instance(b"a", 3.0)
    assert session.boundary_at == float("-inf")
    session.see_instance(b"b", 4.0)
    assert session.boundary_at == 4.0


def test_what_a_former_instance_still_says_came_when_it_was_asked() -> None:
    """R8: its event is from before the sign, however late it is read."""
    session = Scene(sources=(HEADER,)).session
    session.see_instance(b"b", 4.0)
    assert [session.came_at(Asked(1.0, name), 9.0) for name in (None, b"a", b"b")] == [9.0, 1.0, 9.0]


def test_the_first_reason_of_a_fence_stays() -> None:
    """F2."""
    session = Scene().session
    session.close("deleted", 5.0)
    session.close("session_lost", 6.0)
    assert (session.fence, session.fenced_at) == ("deleted", 5.0)


def test_a_ledger_hears_of_every_change() -> None:
    """What a ledger keeps elsewhere it must hear of."""
    scene = Scene(epoch=None)
    session = scene.session
    hearer = session.watcher = Hearer()
    stream = scene.call(1)
    scene.live(stream, ("1", note(1, epoch="e")), ("2", result(1)))
    session.mark_boundary(1.0)
    session.see_instance(b"a", 2.0)
    session.stream_changed(stream)
    session.close("deleted", 3.0)
    session.close("deleted", 4.0)
    events = ["event 0 b'1' ()", "session", "event 0 b'2' (1,)"]
    assert hearer.heard == ["opened 0", *events, "session", "session", "changed 0", "session"]


def test_a_ledger_in_memory_need_not_listen() -> None:
    scene = Scene(epoch=None, limits=Limits(streams=1, events=4))
    scene.session.watcher = Watcher()
    scene.live(scene.call(1), ("1", note(1, epoch="e")))
    scene.session.note_gap(5000.0, 1.0)
    scene.session.touch(5000.0)
    scene.session.stream_changed(scene.call(2))
    assert scene.session.token == "e"
    assert scene.session.boundary_at == 5000.0


def test_other_streams_are_asked_for_an_event() -> None:
    """R7: by id alone, or by id and content where ids identify nothing."""
    scene = Scene()
    first, second, unknown = scene.call(1), scene.call(2), scene.session.open_stream(Origin.UNKNOWN)
    scene.live(first, *notes(1, 2))
    digest = first.events[1].digest
    session = scene.session
    assert session.has_elsewhere(second, b"2", None, set())
    assert not session.has_elsewhere(second, b"3", None, set())
    assert not session.has_elsewhere(first, b"2", None, set())
    assert session.has_elsewhere(second, b"2", digest, set())
    assert not session.has_elsewhere(second, b"2", b"other", set())
    assert not session.has_elsewhere(first, b"2", digest, set())
    session.add(unknown, Event(b"9", b"d", 0.0), learn=False)
    assert not session.shared_ids
    assert not session.has_elsewhere(second, b"9", None, set())
    assert not session.has_elsewhere(second, b"9", b"d", set())
