"""The verdict on a resume, rule by rule (R5, R7-R12, E3, L5, T8)."""

import pytest

from epochgate.guard.judge import Cursor, Ending, Judge, Step
from epochgate.guard.mcp import Tokens
from epochgate.guard.policy import EventIds, Mode, Proof
from epochgate.guard.record import Limits, Origin
from epochgate.guard.sse import Block, Framer, Kind
from epochgate.guard.verdict import Reason, proven, unproven
from guard.scene import (
    ALL_PROOFS,
    HEADER,
    LENIENT,
    META,
    OVERLAP,
    STRICT,
    TOO_DEEP,
    Resume,
    Scene,
    Told,
    batch,
    note,
    notes,
    outcome,
    result,
    sse,
)

RELEASE, SWALLOW, REFUSE = Step.RELEASE, Step.SWALLOW, Step.REFUSE


def story(*ids: object, epoch: object = 1, **changes: object) -> Scene:
    """A session with one call that brought a notification under each of these ids, and a token in each."""
    scene = Scene(epoch=epoch, **changes)  # type: ignore[arg-type]
    scene.live(scene.call(5), *notes(*ids, epoch=epoch))
    return scene


# -- tokens (R7, R8, R11)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (note(6, 1), "proven epoch"),
        (note(6, "1"), "proven epoch"),
        (note(6, 2), "divergent epoch_changed"),
        (note(6, "01"), "divergent epoch_changed"),
        (note(6), "unproven epoch_missing"),
        (batch(note(6, 1), note(7)), "proven epoch"),
        (batch(note(6), note(7, 1)), "proven epoch"),
        (batch(note(6, 1), note(7, 2)), "divergent epoch_changed"),
        (batch(note(6), note(7)), "unproven epoch_missing"),
        (b"no json", "unproven epoch_missing"),
    ],
)
def test_the_token_decides(data: bytes, expected: str) -> None:
    """R7, R8: in a batch any token that differs; integers and texts are compared as text."""
    assert outcome(story(1, 2, 3, 4, 5), "5", [("6", data)]) == expected


def test_the_token_may_be_in_the_head() -> None:
    """R7, section 10."""
    scene = story(1, 2, 3, sources=(HEADER, META))
    assert (
        outcome(
            scene,
            "3",
            [("4", note(4, 1))],
        )
        == "proven epoch"
    )
    resume = scene.resume("3", headers=[(b"mcp-session-epoch", b"2")])
    resume.feed(("4", note(4, 1)))
    assert resume.outcome == "divergent epoch_changed"


def test_an_epoch_that_is_not_accepted_proves_nothing_but_contradicts() -> None:
    """R8: no_proof; R7 holds all the same."""
    scene = story(1, 2, 3, accept=frozenset({Proof.CONNECTION}))
    assert outcome(scene, "3", [("4", note(4, 1))]) == "unproven no_proof"
    assert outcome(scene, "3", [("4", note(4, 2))]) == "divergent epoch_changed"


@pytest.mark.parametrize(
    "data",
    [
        b'{"method":"n","params":{"text":"\\ud83d","_meta":{"session_epoch":2}}}',
        b'{"method":"n","params":{"x":NaN,"_meta":{"session_epoch":2}}}',
        b'{"method":"n","params":{"text":"a\tb","_meta":{"session_epoch":2}}}',
        b'{"method":"n","params":{"_meta":{"session_epoch":2,"k\xff":1}}}',
        b'[{"method":"n","params":{"_meta":{"session_epoch":2}}},null]',
        b'{"method":"n","params":{"_meta":{"session_epoch":1.0}}}',
        b'{"method":"n","params":{"_meta":{"session_epoch":true}}}',
        b'{"method":"n","params":{"_meta":{"session_epoch":{"n":1}}}}',
    ],
)
def test_another_epoch_is_seen_in_what_some_client_can_read(data: bytes) -> None:
    """R7, R11: strange JSON, tokens of other types."""
    scene = story(1, 2, 3)
    resume = scene.resume("3")
    assert resume.feed(*notes(4, epoch=1), ("5", data)) == [RELEASE, REFUSE]
    assert resume.outcome == "divergent epoch_changed"


def test_a_later_change_is_caught_at_its_event() -> None:
    """R11, the incident of section 1: 901-950 are right, 951 is of another epoch."""
    scene = story(*range(890, 901))
    resume = scene.resume("900")
    assert resume.feed(*notes(*range(901, 951), epoch=1)) == [RELEASE] * 50
    assert resume.outcome == "proven epoch"
    assert resume.feed(*notes(951, 952, epoch=2)) == [REFUSE]
    assert resume.outcome == "divergent epoch_changed"
    assert resume.judge.refused
    assert not scene.session.knows(b"951")


def test_a_later_change_is_caught_where_the_session_had_no_token() -> None:
    """R11: the first token on a resumed stream is not the session's (L1), yet it must not change."""
    scene = story(1, 2, 3, epoch=None, **LENIENT)
    resume = scene.resume("3")
    assert resume.feed(*notes(4, epoch="a"), *notes(5), *notes(6, epoch="a")) == [RELEASE] * 3
    assert resume.outcome == "unproven no_epoch"
    assert scene.session.token is None
    assert resume.feed(*notes(7, epoch="b")) == [REFUSE]
    assert resume.outcome == "divergent epoch_changed"


def test_a_swallowed_event_has_a_token_too() -> None:
    """R7: the token comes first, stamped when it is sent."""
    assert outcome(story(1, 2, 3), "3", [("3", note("3", 2))]) == "divergent epoch_changed"


# -- no proof (R8): the reasons in their order


@pytest.mark.parametrize(
    ("accept", "known", "token", "boundary", "expected"),
    [
        (ALL_PROOFS, None, None, False, "proven overlap"),
        (ALL_PROOFS, None, None, True, "unproven boundary"),
        (ALL_PROOFS, 1, None, False, "proven overlap"),
        (ALL_PROOFS, 1, None, True, "unproven boundary"),
        (ALL_PROOFS, 1, 1, True, "proven epoch"),
        (ALL_PROOFS, 1, 2, False, "divergent epoch_changed"),
        (ALL_PROOFS - {Proof.EPOCH}, 1, 1, True, "unproven boundary"),
        (STRICT, None, None, True, "unproven no_epoch"),
        (STRICT, None, 1, False, "unproven no_epoch"),
        (STRICT, 1, None, True, "unproven epoch_missing"),
        (STRICT - {Proof.EPOCH}, 1, None, False, "unproven epoch_missing"),
        (STRICT - {Proof.EPOCH}, 1, 1, False, "unproven no_proof"),
    ],
)
def test_the_reason_is_the_first_that_applies(
    accept: frozenset[Proof], known: object, token: object, boundary: bool, expected: str
) -> None:
    """R8, on an inclusive replay."""
    scene = Scene(epoch=known, accept=accept)
    scene.live(scene.call(5), *notes(1, 2), ("3", note("3")))
    if token is not None:  # the record has the event as it comes again
        scene.live(scene.call(6), ("a", b""), ("b", note("b", token)))
    cursor = "3" if token is None else "b"
    told = ("3", note("3")) if token is None else ("b", note("b", token))
    if known is None:
        scene.session.token = None  # the resumed traffic alone has one
    elif token == 2:
        scene.session.token = "1"
    if boundary:
        scene.session.mark_boundary(scene.outage())
    assert outcome(scene, cursor, [told]) == expected


def test_without_overlap_a_boundary_is_no_reason() -> None:
    """R8: `boundary` is an overlap with a boundary signal; an event that is new is no overlap."""
    scene = story(1, 2, 3, epoch=None, **OVERLAP)
    scene.session.mark_boundary(scene.outage())
    assert outcome(scene, "3", [("4", note(4))]) == "unproven no_epoch"


@pytest.mark.parametrize(
    ("when", "expected"),
    [("before the cursor", "proven overlap"), ("since the cursor", "unproven boundary")],
)
@pytest.mark.parametrize("kind", ["session", "upstream"])
def test_only_a_boundary_since_the_cursor_counts(when: str, expected: str, kind: str) -> None:
    """R8: since the event that the cursor names was read."""
    scene = Scene(epoch=None, **OVERLAP)
    stream = scene.call(5)
    scene.live(stream, *notes(1, 2))
    if when == "before the cursor":
        signal = scene.outage()
        scene.live(stream, *notes(3))
    else:
        scene.live(stream, *notes(3))
        signal = scene.outage()
    if kind == "session":
        scene.session.mark_boundary(signal)
        resume = scene.resume("3")
    else:
        resume = scene.resume("3", outage_at=signal)
    resume.feed(*notes(3, 4))
    assert resume.outcome == expected
    # an earlier cursor is older than the signal in any case
    earlier = scene.resume("2", outage_at=signal)
    earlier.feed(*notes(2))
    assert earlier.outcome == "unproven boundary"


# -- replays (R5, R7)

REPLAYS = [
    # what the server sends after cursor 3 of 1-5, the ids that the client gets, the verdict
    ("faithful", [4, 5, 6, 7], ["4", "5", "6", "7"]),
    ("inclusive", [3, 4, 5, 6], ["4", "5", "6"]),
    ("from the start", [1, 2, 3, 4, 5, 6], ["4", "5", "6"]),
    ("from the one before", [2, 3, 4, 5, 6], ["4", "5", "6"]),
    ("only what is new after all", [4, 5], ["4", "5"]),
    ("one twice", [4, 4, 5, 5, 6, 6], ["4", "5", "6"]),
]


@pytest.mark.parametrize(("ids", "released"), [case[1:] for case in REPLAYS], ids=[case[0] for case in REPLAYS])
def test_a_replay_is_reduced_to_what_is_new(ids: list[int], released: list[str]) -> None:
    """R5, R7: exactly once."""
    resume = story(1, 2, 3, 4, 5).resume("3")
    assert resume.released(*notes(*ids, epoch=1)) == released
    assert resume.outcome == "proven epoch"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (notes(5, epoch=1), "replay_gap"),
        (notes(6, epoch=1), "replay_gap"),
        (notes(4, 6, epoch=1), "replay_gap"),
        (notes(3, 5, epoch=1), "replay_gap"),
        (notes(5, 4, epoch=1), "replay_gap"),
        ([("4", note("4!", 1))], "replay_mismatch"),
        ([*notes(4, epoch=1), ("5", note("5!", 1))], "replay_mismatch"),
        ([("3", note("3!", 1))], "replay_mismatch"),
        ([("1", note("1!", 1))], "replay_mismatch"),
        ([("5", note("5!", 1))], "replay_gap"),
        ([(None, note("?", 1))], "replay_gap"),
        ([("5", note("4", 1))], "replay_gap"),
        ([("6", note("4", 1))], "replay_gap"),
        ([*notes(4, 5, 6, epoch=1), ("6", note("6!", 1))], "replay_mismatch"),
        ([*notes(4, 5, 6, 7, epoch=1), ("2", note("2!", 1))], "replay_mismatch"),
    ],
)
def test_a_replay_that_loses_shuffles_or_alters_is_divergent(told: list[Told], reason: str) -> None:
    """R7, after cursor 3 of 1-5: a missing event, another order, another content."""
    assert outcome(story(1, 2, 3, 4, 5), "3", told) == f"divergent {reason}"


def test_the_verdict_falls_at_the_first_message_and_contradictions_later() -> None:
    """R8, R7."""
    resume = story(1, 2, 3, 4, 5).resume("3")
    resume.feed(*notes(4, epoch=1))
    assert resume.outcome == "proven epoch"
    assert resume.feed(("5", note("5!", 1))) == [REFUSE]
    assert resume.outcome == "divergent replay_mismatch"


def test_events_of_the_same_millisecond_that_a_store_loses() -> None:
    """R7: one SDK's example store sorts by a random suffix, and lost 9 of 21 events."""
    ids = [f"s_1796092027052_{suffix}" for suffix in ("q", "a", "z", "c", "x", "b")]
    scene = story(*ids)
    told = notes(*[name for name in sorted(ids) if name > ids[2]], epoch=1)
    assert told == []
    told = notes(*[name for name in sorted(ids) if name > ids[1]], epoch=1)
    assert outcome(scene, ids[1], told) == "divergent replay_gap"


def test_new_priming_events_comments_and_retry_are_kept_in_order() -> None:
    """R7: they decide nothing."""
    resume = story(1, 2, 3, 4, 5).resume("3")
    told = [b": hi\n\n", ("6", b""), b"retry: 10\n\n", b"event: x\ndata:\n\n", ("", b""), (b"id\ndata\n\n")]
    assert resume.feed(*told) == [RELEASE] * 6
    assert resume.outcome == "none"
    assert resume.released(*notes(4), ("7", b""), *notes(5, 8)) == []
    resume = story(1, 2, 3, 4, 5).resume("3")
    assert resume.released(("6", b""), *notes(4, epoch=1), ("7", b""), *notes(5, 8, epoch=1)) == [
        "6",
        "4",
        "7",
        "5",
        "8",
    ]


def test_what_has_to_come_next_is_no_priming_event() -> None:
    """R4, R7: until then a connection repeats what the client has."""
    scene = Scene(epoch=1)
    scene.live(scene.call(5), *notes(1, 2, epoch=1), ("p", b""), *notes(3, epoch=1))
    resume = scene.resume("2")
    assert resume.judge.next == 3
    resume.feed(*notes(3, epoch=1))
    assert resume.judge.next == 4


def test_a_recorded_priming_event_need_not_come_again() -> None:
    """R7: priming events decide nothing."""
    scene = Scene()
    scene.live(scene.call(5), ("p", b""), *notes(1, epoch=1), ("q", b""), *notes(2, epoch=1))
    assert scene.resume("1").released(*notes(2, 3, epoch=1)) == ["2", "3"]
    assert scene.resume("p").released(*notes(1, 2, epoch=1)) == ["1", "2"]
    assert scene.resume("q").released(*notes(2, 3, epoch=1)) == ["2", "3"]


def test_a_priming_event_that_the_client_has_does_not_take_its_cursor_back() -> None:
    """R7: it is on record before the cursor; with its id the client would ask for what it has."""
    scene = Scene()
    scene.live(scene.call(5), ("p", b""), *notes(1, 2, epoch=1), ("q", b""), *notes(3, epoch=1))
    resume = scene.resume("2")
    steps = resume.feed(("p", b""), *notes(1, 2, epoch=1), ("q", b""), *notes(3, epoch=1), ("q", b""), ("1", b""))
    assert steps == [SWALLOW, SWALLOW, SWALLOW, RELEASE, RELEASE, SWALLOW, SWALLOW]
    assert scene.resume("2").feed(("2", b"")) == [RELEASE]
    assert scene.session.locate(b"2") == (resume.judge.stream, 2)


def test_what_came_without_an_id_is_compared_as_well() -> None:
    """R7, L3."""
    scene = Scene()
    told: list[Told] = [(None, note("a", 1)), ("1", note("b", 1)), (None, note("c", 1)), ("2", note("d", 1))]
    scene.live(scene.call(5), *told)
    assert scene.resume("1").released(("2", note("d", 1)), ("3", note("e", 1))) == ["2", "3"]
    assert scene.resume("2").released(*told, ("3", note("e", 1)), (None, note("f", 1))) == ["3", None]
    assert outcome(scene, "1", [(None, note("x", 1))]) == "divergent replay_gap"


def test_a_sticky_id_on_the_resumed_connection_is_matched() -> None:
    """L3: ids stick on each connection anew."""
    scene = Scene()
    scene.live(scene.call(5), *notes(1, epoch=1), *notes(2, epoch=1), (None, note("2 more", 1)), *notes(3, epoch=1))
    assert scene.resume("1").released(*notes(2, epoch=1), (None, note("2 more", 1)), *notes(3, 4, epoch=1)) == [
        "2",
        None,
        "3",
        "4",
    ]
    assert outcome(scene, "1", notes(2, 3, epoch=1)) == "proven epoch"


def idless() -> Scene:
    """Ids 1, 2 and 3; before each of them, and after the last, a message without an id."""
    scene = Scene()
    told: list[Told] = []
    for number in (1, 2, 3):
        told += [(None, note(f"before {number}", 1)), *notes(number, epoch=1)]
    scene.live(scene.call(5), *told, (None, note("after", 1)))
    return scene


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (notes(2, 3, 4, epoch=1), "proven epoch"),
        (notes(2, 3, 4, 5, epoch=1), "proven epoch"),
        (
            [(None, note("before 2", 1)), *notes(2, 3, epoch=1), (None, note("after", 1)), *notes(4, epoch=1)],
            "proven epoch",
        ),
        ([*notes(2, epoch=1), (None, note("before 3", 1)), *notes(3, 4, epoch=1)], "proven epoch"),
        (notes(3, epoch=1), "divergent replay_gap"),
        ([(None, note("before 3", 1)), *notes(2, epoch=1)], "divergent replay_gap"),
        (notes(2, 4, epoch=1), "divergent replay_gap"),
        ([("2", note("other", 1))], "divergent replay_gap"),
    ],
)
def test_what_came_without_an_id_may_be_missing_from_a_replay(told: list[Told], expected: str) -> None:
    """R7: servers do not store it. Where it comes it is matched, and what has an id stays required."""
    scene = idless()
    judge = Judge(scene.policy, scene.session, Cursor(scene.session.index[b"1"], 1))
    resume = Resume(scene, judge, ())
    steps = resume.feed(*told)
    assert resume.outcome == expected
    assert (steps == [RELEASE] * len(told)) is expected.startswith("proven")


def test_repeated_ids_tell_nothing() -> None:
    """E3: some servers give every response the session's id. What is the same is swallowed, what is new passes."""
    scene = Scene()
    scene.live(scene.call(5, 6), ("s", note("a", 1)), ("s", note("b", 1)))
    resume = scene.resume("s")
    assert resume.released(("s", note("a", 1)), ("s", note("c", 1)), ("s", note("a", 1)), ("s", note("d", 1))) == [
        "s",
        "s",
        "s",
    ]
    assert resume.outcome == "proven epoch"


# -- overlap (R5)


@pytest.mark.parametrize(
    ("changes", "cursor", "rewound"),
    [
        (OVERLAP, "3", b"2"),
        (OVERLAP, "2", b"1"),
        (OVERLAP, "1", None),
        ({}, "3", None),
    ],
)
def test_where_the_upstream_is_asked_from(changes: dict[str, object], cursor: str, rewound: bytes | None) -> None:
    """R5: one recorded event back, where overlap is accepted."""
    assert story(1, 2, 3, **changes).resume(cursor).judge.rewound == rewound


def test_an_unknown_cursor_is_not_rewound() -> None:
    """R5."""
    resume = Scene(**OVERLAP, **LENIENT).resume_unknown(unproven(Reason.UNKNOWN_CURSOR))
    assert resume.judge.rewound is None


def test_the_repetition_is_the_proof_and_is_swallowed() -> None:
    """R5, R7, R8."""
    resume = story(1, 2, 3, epoch=None, **OVERLAP).resume("3")
    assert resume.feed(*notes(3, 4)) == [SWALLOW, RELEASE]
    assert resume.outcome == "proven overlap"


def test_an_event_without_an_id_is_no_overlap() -> None:
    """R5, R7: any stream may begin with the same greeting."""
    scene = Scene(epoch=None, **OVERLAP)
    greeting: Told = (None, note("hello"))
    scene.live(scene.call(5), greeting, *notes(1, 2, 3))
    assert outcome(scene, "3", [greeting, *notes(4)]) == "unproven no_epoch"
    resume = scene.resume("3")
    resume.feed(*notes(3), greeting)
    assert resume.outcome == "proven overlap"


def test_overlap_catches_a_plausible_counter() -> None:
    """R5: another execution has just reached the same numbers."""
    scene = story(1, 2, 3, 4, 5, epoch=None, **OVERLAP)
    assert scene.resume("5").judge.rewound == b"4"
    assert outcome(scene, "5", [("5", note("other 5"))]) == "divergent replay_mismatch"
    assert outcome(scene, "5", notes(6)) == "unproven no_epoch"


def test_after_a_priming_event_the_last_message_is_asked_for() -> None:
    """R5: servers that close streams on purpose often do so right after a priming event."""
    scene = Scene(epoch=None, **OVERLAP)
    scene.live(scene.call(5), *notes(1, 2), ("p", b""))
    resume = scene.resume("p")
    assert resume.judge.rewound == b"1"
    assert resume.feed(*notes(2), ("p", b""), *notes(3)) == [SWALLOW, RELEASE, RELEASE]
    assert resume.outcome == "proven overlap"


# -- other streams (R7)


def test_an_event_of_another_stream_is_foreign() -> None:
    """R7: by its id alone, where each id is seen on one stream only."""
    scene = story("a-1", "a-2", "a-3")
    scene.live(scene.standalone(), *notes("g-1", "g-2", epoch=1))
    assert outcome(scene, "a-3", notes("g-2", epoch=1)) == "divergent foreign_stream"
    assert outcome(scene, "a-3", [("g-2", note("other", 1))]) == "divergent foreign_stream"
    assert outcome(scene, "a-2", notes("g-2", epoch=1)) == "divergent replay_gap"


def per_stream_counters(**changes: object) -> Scene:
    """Each stream counts 1, 2, 3 and says what is its own."""
    scene = Scene(**changes)  # type: ignore[arg-type]
    for call in (1, 2, 3):
        stream = scene.call(call)
        scene.live(stream, *[(str(n), note(f"call {call}, {n}", 1)) for n in range(1, 7 - call)])
    return scene


def test_streams_that_count_alike_are_healthy() -> None:
    """R7, E3: ids 1, 2, 3 on every stream identify nothing."""
    scene = per_stream_counters()
    resume = scene.resume("3")
    assert resume.judge.stream.key == 2
    assert resume.released(("4", note("call 3, 4", 1)), ("5", note("call 3, 5", 1)), ("6", result(3, 1))) == [
        "4",
        "5",
        "6",
    ]
    assert resume.outcome == "proven epoch"


def test_their_events_are_foreign_on_each_other() -> None:
    """R7: by id and content, on any other stream, not just on the last one with this id."""
    scene = per_stream_counters()
    assert outcome(scene, "3", [("4", note("call 2, 4", 1))]) == "divergent foreign_stream"
    assert outcome(scene, "3", [("4", note("call 1, 4", 1))]) == "divergent foreign_stream"


def test_streams_that_say_the_same_are_healthy() -> None:
    """R7: the same tool called twice logs the same; one more line that both have tells nothing."""
    scene = Scene()
    first, second = scene.call(1), scene.call(2)
    scene.live(first, ("p", b""), *notes(1, 2, 3, 4, 5, epoch=1), ("6", result(1, 1)))
    scene.live(second, *notes(1, 2, 3, epoch=1))
    assert scene.resume("3").released(*notes(4, 5, epoch=1), ("6", result(2, 1))) == ["4", "5", "6"]


def test_a_priming_event_in_common_is_no_likeness() -> None:
    """R7: what a resumed stream brings does not excuse what follows."""
    scene = Scene()
    first, second = scene.call(1), scene.call(2)
    scene.live(first, ("1", b""), ("2", note("a", 1)), ("3", note("b", 1)))
    scene.live(second, ("1", b""), ("2", note("x", 1)))
    assert outcome(scene, "2", [("1", b""), ("3", note("b", 1))]) == "divergent foreign_stream"


def test_a_foreign_priming_event_does_not_make_ids_shared() -> None:
    """R7: only un-resumed traffic tells how a server counts."""
    scene = story("a-1", "a-2", "a-3")
    scene.live(scene.standalone(), ("g-1", b""), *notes("g-2", epoch=1))
    assert outcome(scene, "a-3", [("g-1", b""), ("g-2", note("other", 1))]) == "divergent foreign_stream"
    assert not scene.session.shared_ids


@pytest.mark.parametrize("owes_known", [True, False])
def test_a_response_that_is_not_owed_is_foreign(owes_known: bool) -> None:
    """R7: unless the request was too large to be read."""
    scene = story(1, 2, 3)
    resume = scene.resume("3")
    resume.judge.stream.owes_known = owes_known
    resume.feed(("4", result(6, 1)))
    assert resume.outcome == ("divergent foreign_response" if owes_known else "proven epoch")


def test_responses_are_owed_once() -> None:
    """R7, L3: a batch owes several; `5` is not `"5"`; on a standalone stream nothing is owed."""
    scene = Scene()
    stream = scene.call(5, 6)
    scene.live(stream, *notes(1, 2, 3, epoch=1))
    resume = scene.resume("3")
    assert resume.feed(("4", result(6, 1)), ("5", batch(note("x", 1), result(5, 1)))) == [RELEASE, RELEASE]
    assert stream.finished
    assert resume.feed(("6", result(5, 1))) == [REFUSE]
    assert outcome(scene, "3", [("4", result(6, 1)), ("5", batch(note("x", 1), result(5, 1)))]) == "proven epoch"
    other = Scene()
    other.live(other.call(5), *notes(1, epoch=1))
    assert outcome(other, "1", [("2", result("5", 1))]) == "divergent foreign_response"
    other.live(other.standalone(), *notes("g", epoch=1))
    assert outcome(other, "g", [("h", result(5, 1))]) == "divergent foreign_response"


def test_a_request_of_the_server_is_no_response() -> None:
    """R7."""
    ask = b'{"jsonrpc":"2.0","id":6,"method":"sampling/createMessage","params":{"_meta":{"session_epoch":1}}}'
    assert outcome(story(1, 2, 3), "3", [("4", ask)]) == "proven epoch"


# -- the order of ids (E3)


@pytest.mark.parametrize(
    ("ids", "cursor", "new", "expected"),
    [
        ((1, 2, 3), "3", 4, "proven epoch"),
        ((1, 2, 3), "3", 5, "divergent id_gap"),
        ((1, 2, 3), "3", 0, "divergent id_rewind"),
        ((1, 2, 3), "3", "x", "divergent id_gap"),
        (("a-1", "a-2", "a-3"), "a-3", "a-4", "proven epoch"),
        (("a-1", "a-2", "a-3"), "a-3", "a-5", "divergent id_gap"),
        (("a-1", "a-2", "a-3"), "a-3", "b-4", "divergent id_gap"),
        ((10, 20, 33), "33", 34, "proven epoch"),
        ((10, 20, 33), "33", 99, "proven epoch"),
        ((10, 20, 33), "33", 32, "divergent id_rewind"),
        (("q", "z", "c"), "c", "a", "proven epoch"),
        ((1, 2), "2", 9, "proven epoch"),
        ((3, 1, 2), "2", 0, "proven epoch"),
        (("a", "a", "b"), "b", "c", "proven epoch"),
    ],
)
def test_the_first_new_id_keeps_the_order_that_was_learnt(
    ids: tuple[object, ...], cursor: str, new: object, expected: str
) -> None:
    """E3, `auto`: the strictest order over at least three ids."""
    assert outcome(story(*ids), cursor, notes(new, epoch=1)) == expected


@pytest.mark.parametrize(
    ("event_ids", "new", "expected"),
    [
        (EventIds.CONSECUTIVE, 3, "proven epoch"),
        (EventIds.CONSECUTIVE, 4, "divergent id_gap"),
        (EventIds.INCREASING, 4, "proven epoch"),
        (EventIds.INCREASING, 1, "divergent id_rewind"),
        (EventIds.OPAQUE, 1, "proven epoch"),
        (EventIds.OPAQUE, 4, "proven epoch"),
    ],
)
def test_an_order_may_be_configured(event_ids: EventIds, new: int, expected: str) -> None:
    """E3: it holds from the first id on."""
    assert outcome(story(2, event_ids=event_ids), "2", notes(new, epoch=1)) == expected


def test_the_order_is_that_of_the_whole_record_not_of_the_cursor() -> None:
    """E3: the first event beyond the ledger, wherever the client resumes."""
    scene = story(1, 2, 3, 4, 5)
    assert outcome(scene, "2", notes(3, 4, 5, 7, epoch=1)) == "divergent id_gap"
    assert scene.resume("2").released(*notes(3, 4, 5, 6, 9, epoch=1)) == ["3", "4", "5", "6", "9"]


def test_ids_of_other_streams_fill_a_gap() -> None:
    """E3: one counter for all streams; bare integers of several streams only rise."""
    scene = Scene(event_ids=EventIds.CONSECUTIVE)
    first, second = scene.call(1), scene.call(2)
    scene.live(first, *notes(1, 2, 3, epoch=1))
    scene.live(second, *notes(4, 5, epoch=1))
    assert scene.resume("3").released(*notes(6, epoch=1)) == ["6"]
    assert outcome(scene, "3", notes(8, epoch=1)) == "divergent replay_gap"
    assert outcome(scene, "5", notes(8, epoch=1)) == "divergent id_gap"


def test_prefixed_ids_from_one_counter_are_healthy() -> None:
    """E3: streams that draw their numbers from one counter are learnt as rising."""
    scene = Scene()
    first, second = scene.call(1), scene.call(2)
    scene.live(first, *notes("s1", "s2", epoch=1))
    scene.live(second, *notes("s3", epoch=1))
    scene.live(first, *notes("s4", epoch=1))
    assert scene.resume("s4").released(*notes("s9", epoch=1)) == ["s9"]


def test_ids_of_priming_events_count_as_seen() -> None:
    """E3: a priming event at the head of the resumed stream draws an id too; but it hides no gap."""
    scene = story(1, 2, 3)
    assert scene.resume("3").released(("4", b""), *notes(5, epoch=1)) == ["4", "5"]
    assert outcome(story(1, 2, 3), "3", [("9", b""), *notes(10, epoch=1)]) == "divergent id_gap"
    assert outcome(story(1, 2, 3), "3", [("4", b""), ("5", b""), *notes(6, epoch=1)]) == "proven epoch"
    assert outcome(story(1, 2, 3), "3", [("prime", b""), *notes(4, epoch=1)]) == "proven epoch"


def test_a_priming_event_of_an_earlier_resume_is_not_the_last_id() -> None:
    """E3: whatever ids a server gives to priming events, messages are held to those of messages."""
    scene = story(1, 2, 3)
    scene.resume("3").feed(("prime", b""))
    assert scene.resume("prime").released(*notes(4, epoch=1)) == ["4"]
    scene = story(event_ids=EventIds.CONSECUTIVE)
    scene.live(scene.call(1), ("1", b""))
    assert outcome(scene, "1", notes(3, epoch=1)) == "divergent id_gap"


def test_an_event_without_an_id_breaks_no_order() -> None:
    """E3."""
    scene = story(1, 2, 3)
    resume = scene.resume("3")
    assert resume.feed((None, note("x", 1)), ("", note("y", 1)), *notes(9, epoch=1)) == [RELEASE] * 3


# -- what had to be forgotten (L5)


@pytest.mark.parametrize("ids", [(1, 2, 3, 4, 5, 6), ("q", "b", "z", "c", "y", "a")])
@pytest.mark.parametrize(("accept", "expected"), [(STRICT, "proven epoch"), (frozenset[Proof](), "unproven no_proof")])
def test_a_forgotten_event_is_unknown_not_divergent(
    ids: tuple[object, ...], accept: frozenset[Proof], expected: str
) -> None:
    """L5: a server that replays from the start; the record begins at the third event. R8 decides as ever."""
    scene = story(*ids, limits=Limits(streams=8, events=4), accept=accept)
    resume = scene.resume(str(ids[3]))
    steps = resume.feed(*notes(*ids, epoch=1))
    assert resume.outcome == expected
    assert steps == ([SWALLOW] * 4 + [RELEASE] * 2 if accept else [REFUSE])


def test_a_forgotten_event_is_no_overlap() -> None:
    """L5, R8."""
    scene = story(1, 2, 3, 4, epoch=None, limits=Limits(streams=8, events=2), **OVERLAP)
    assert outcome(scene, "3", notes(1)) == "unproven no_epoch"


def test_what_is_not_forgotten_is_missing() -> None:
    """L5, R7: rising ids tell what came before the record; after the first recorded event nothing is forgotten."""
    limits = Limits(streams=8, events=3)
    assert outcome(story(1, 2, 3, 4, 5, limits=limits), "4", notes(6, epoch=1)) == "divergent replay_gap"
    assert outcome(story(1, 2, 3, 4, 5, limits=limits), "4", notes(4, 2, epoch=1)) == "divergent replay_gap"
    assert outcome(story(1, 2, 3, 4, 5, limits=limits), "5", notes("x", epoch=1)) == "divergent id_gap"
    assert outcome(story("x", "c", "b", "a", limits=limits), "b", notes("b", "x", epoch=1)) == "divergent replay_gap"
    assert outcome(story("x", "c", "b", "a", limits=limits), "a", notes("n", epoch=1)) == "proven epoch"


def test_a_forgotten_stream_records_no_more() -> None:
    """L5."""
    scene = story(1, 2, 3, limits=Limits(streams=1, events=9))
    resume = scene.resume("3")
    scene.call(6)
    assert resume.feed(*notes(4, 5, epoch=1)) == [RELEASE, RELEASE]
    assert resume.judge.stream.end == 3


def test_where_the_record_may_lack_its_end_only_another_epoch_is_divergent() -> None:
    """R3, L5: it was read from a store whose writer died."""
    scene = story(1, 2, 3, 4, 5)
    found = scene.session.locate(b"5")
    assert found is not None
    found[0].torn = True
    assert outcome(scene, "3", notes(5, epoch=1)) == "unproven unknown_cursor"
    assert outcome(scene, "5", notes(6, epoch=2)) == "divergent epoch_changed"
    assert outcome(scene, "5", notes(9, epoch=1)) == "proven epoch"
    scene = story(1, 2, 3, 4, 5, **LENIENT)
    scene.session.index[b"5"].torn = True
    resume = scene.resume("3")
    assert resume.released(*notes(5, 6, epoch=1)) == ["5", "6"]
    assert resume.outcome == "unproven unknown_cursor"


# -- nothing comes (R9)


def test_a_stream_that_owes_is_asked_for_again() -> None:
    """R9: up to three more times."""
    judge = story(1, 2, 3).resume("3").judge
    endings = [judge.end_without_message(asked) for asked in (1, 2, 3, 4)]
    assert endings == [Ending.ASK_AGAIN, Ending.ASK_AGAIN, Ending.ASK_AGAIN, Ending.REFUSE]
    assert judge.verdict == unproven(Reason.NO_EVENT)


def empty(scene: Scene, cursor: str) -> Ending:
    return scene.resume(cursor).judge.end_without_message(1)


def quiet(**changes: object) -> Scene:
    scene = Scene(**changes)  # type: ignore[arg-type]
    scene.live(scene.standalone(), *notes(1, 2, 3, epoch=1))
    return scene


def test_a_quiet_stream_may_end_three_times_in_a_row() -> None:
    """R9: counted per stream, whatever the cursor."""
    scene = quiet()
    scene.live(scene.standalone(), *notes(7, epoch=1))
    assert [empty(scene, cursor) for cursor in ("3", "2", "3")] == [Ending.PASS] * 3
    assert empty(scene, "7") is Ending.PASS
    assert empty(scene, "1") is Ending.REFUSE


@pytest.mark.parametrize("told", [notes(4, epoch=1), notes(3, epoch=1), notes(2, 3, epoch=1)])
def test_a_message_ends_the_row(told: list[Told]) -> None:
    """R9: a new one, one that is swallowed, one that comes again."""
    scene = quiet()
    for _ in range(3):
        assert empty(scene, "3") is Ending.PASS
    scene.resume("1" if told[0][0] == "2" else "3").feed(*told)
    assert [empty(scene, "3") for _ in range(4)] == [Ending.PASS] * 3 + [Ending.REFUSE]


BARE = [(None, note("b", 1)), ("2", note("c", 1)), (None, note("d", 1)), ("3", note("e", 1))]


@pytest.mark.parametrize("recorded", [1, 2, 3, 4])
@pytest.mark.parametrize("left_out", [False, True])
def test_r7_a_faithful_replay_of_events_without_an_id(recorded: int, left_out: bool) -> None:
    """Those after the cursor's own event stand under its id in the record (L3): the client has them (R3)."""
    scene = Scene(accept=STRICT)
    stream = scene.call()
    scene.live(stream, ("1", note("a", 1)), *BARE[:recorded])
    told = [item for item in BARE if item[0] is not None] if left_out else BARE
    resume = scene.resume("1")
    steps = resume.feed(*told)
    assert resume.outcome == "proven epoch"
    assert steps == [RELEASE] * 2 if left_out else [SWALLOW, RELEASE, RELEASE, RELEASE]


def test_r7_another_event_without_an_id_is_no_part_of_it() -> None:
    scene = Scene(accept=STRICT)
    scene.live(scene.call(), ("1", note("a", 1)), *BARE)
    resume = scene.resume("1")
    assert resume.feed((None, note("x", 1))) == [REFUSE]
    assert resume.outcome == "divergent replay_gap"


def test_a_priming_event_does_not_end_the_row() -> None:
    """R9: it is no message."""
    scene = quiet()
    endings = []
    for name in "pqrs":
        resume = scene.resume("3")
        resume.feed((name, b""), b": ping\n\n")
        endings.append(resume.judge.end_without_message(1))
    assert endings == [Ending.PASS] * 3 + [Ending.REFUSE]


def test_an_empty_resume_passes_a_lenient_policy() -> None:
    """R9, `unproven: resume`: counted all the same."""
    scene = story(1, 2, 3, **LENIENT)
    judge = scene.resume("3").judge
    assert judge.end_without_message(4) is Ending.PASS
    assert judge.verdict == unproven(Reason.NO_EVENT)
    assert judge.end_without_message(5) is Ending.PASS


# -- unproven: resume


def test_what_is_let_through_is_still_checked() -> None:
    """Section 6: the token always, the replay where the ledger has it."""
    for told, expected in (
        (notes(4, 5), "unproven no_epoch"),
        (notes(5), "divergent replay_gap"),
        ([("4", note("other"))], "divergent replay_mismatch"),
        ([*notes(4, 5), ("6", result(9))], "divergent foreign_response"),
        (notes(4, 5, 9), "divergent id_gap"),
    ):
        assert outcome(story(1, 2, 3, 4, 5, epoch=None, **LENIENT), "3", told) == expected
    scene = story(1, 2, 3, **LENIENT)
    resume = scene.resume("3")
    assert resume.released(*notes(3), *notes(4, epoch=1)) == []
    assert resume.outcome == "divergent replay_mismatch"
    resume = scene.resume("3")
    assert resume.released(*notes(4), *notes(5, epoch=1), *notes(6, epoch=2)) == ["4", "5"]
    assert resume.outcome == "divergent epoch_changed"


def unknown(scene: Scene) -> Resume:
    return scene.resume_unknown(unproven(Reason.UNKNOWN_CURSOR))


def test_a_cursor_that_is_not_known_is_checked_as_far_as_can_be() -> None:
    """R3, R7: the token, and what the ledger has under the same id."""
    scene = story(1, 2, 3, **LENIENT)
    resume = unknown(scene)
    assert resume.feed(*notes(2, 3, epoch=1), (None, note("x")), ("", note("y")), ("9", result(77))) == [RELEASE] * 5
    assert resume.outcome == "unproven unknown_cursor"
    assert resume.feed(("3", note("other"))) == [REFUSE]
    assert resume.outcome == "divergent replay_mismatch"
    resume = unknown(scene)
    assert resume.feed(*notes(20, epoch=2)) == [REFUSE]
    assert resume.outcome == "divergent epoch_changed"


def test_a_cursor_that_is_not_known_where_ids_tell_nothing() -> None:
    """E3, R7: ids that repeat, and ids that are shared."""
    scene = Scene(**LENIENT)
    scene.live(scene.call(5), ("s", note(1)), ("s", note(2)), ("t", note(3)))
    assert unknown(scene).feed(("s", note(4))) == [RELEASE]
    scene = per_stream_counters(**LENIENT)
    assert unknown(scene).feed(("4", note("new", 1))) == [RELEASE]


def test_what_an_unknown_resume_brought_is_not_another_stream() -> None:
    """L4, R7: the client resumes once more, from a cursor that is known."""
    scene = story(1, 2, 3, **LENIENT)
    assert unknown(scene).feed(*notes(4, epoch=1)) == [RELEASE]
    assert scene.resume("3").released(*notes(4, 5, epoch=1)) == ["4", "5"]


def test_a_resume_of_a_resume_that_was_unknown() -> None:
    """R3, R8: its events are cursors; a token proves it."""
    scene = story(1, 2, 3, **LENIENT)
    unknown(scene).feed(*notes(40, epoch=1))
    resume = scene.resume("40")
    assert resume.judge.stream.origin is Origin.UNKNOWN
    assert resume.released(*notes(41, epoch=1)) == ["41"]
    assert resume.outcome == "proven epoch"


# -- a held connection (R4, R11, R12)


def connected(scene: Scene, cursor: str) -> Resume:
    return scene.resume(cursor, verdict=proven(Proof.CONNECTION), connected=True)


def test_what_comes_on_a_held_connection_is_its_own() -> None:
    """R4: nothing is compared, gaps and repetitions are the server's own; the order is learnt from it (E3)."""
    scene = story(1, epoch=None)
    resume = connected(scene, "1")
    told = [*notes(2), ("p", b""), *notes(3, 1), ("1", b""), ("9", result(77))]
    assert resume.feed(*told) == [RELEASE] * 6
    assert resume.outcome == "proven connection"
    scene = story("a-1")
    connected(scene, "a-1").feed(*notes("a-2", "a-3", epoch=1))
    assert outcome(scene, "a-3", notes("a-5", epoch=1)) == "divergent id_gap"


def test_what_a_rival_has_brought_first_is_recorded_once() -> None:
    """R4, R7: two connections of one stream, as two resumes at once leave them; each brings all of it."""
    scene = story(1)
    own, rival = connected(scene, "1"), scene.resume("1")
    assert rival.feed(*notes(2, 3, epoch=1)) == [RELEASE] * 2
    places = []
    for told in (*notes(2, epoch=1), ("p", b""), *notes(3, 4, epoch=1)):
        assert own.feed(told) == [RELEASE]
        places.append(own.judge.replayed)
    stream = own.judge.stream
    assert [event.id for event in stream.events] == [b"1", b"2", b"3", b"p", b"4"]
    assert places == [1, -1, 2, -1]
    assert rival.feed(*notes(4, epoch=1)) == [RELEASE]
    assert rival.judge.replayed == 4
    assert rival.feed(*notes(5, epoch=1)) == [RELEASE]
    assert own.feed(*notes(6, epoch=1)) == [RELEASE], "what a server sends on one of them only is its own affair"
    assert own.judge.replayed == -1


def test_another_epoch_on_a_held_connection_is_stopped() -> None:
    """R11, R12; L1: it is un-resumed traffic, so its first token counts where there was none."""
    scene = story(1, epoch=None)
    resume = connected(scene, "1")
    assert resume.feed(*notes(2), *notes(3, epoch="a")) == [RELEASE, RELEASE]
    assert scene.session.token == "a"
    assert resume.feed(*notes(4, epoch="b")) == [REFUSE]
    assert resume.outcome == "divergent epoch_changed"


def test_an_event_too_long_to_be_read_passes_on_a_held_connection() -> None:
    """R4: it needs no proof."""
    long = Block(b"", b"9", own_id=True, data=None, digest=b"d" * 16, kind=Kind.MESSAGE, name=None)
    scene = story(1)
    assert connected(scene, "1").judge.check(long, 1.0) is RELEASE


# -- what cannot be read (T8)


@pytest.mark.parametrize(("changes", "step"), [({}, REFUSE), (LENIENT, RELEASE)])
def test_an_event_too_long_to_be_read_is_unproven(changes: dict[str, object], step: Step) -> None:
    """T8."""
    scene = story(1, 2, 3, **changes)
    (block,) = Framer(keep_data=10).feed(sse("4", note(4, 1)))
    judge = scene.resume("3").judge
    assert judge.check(block, 1.0) is step
    assert judge.verdict == unproven(Reason.UNREADABLE)


def test_a_judge_reads_no_token_before_it_is_told_where() -> None:
    """The head of the answer says where tokens are (R7)."""
    scene = story(1)
    judge = Judge(scene.policy, scene.session, None)
    assert judge.tokens == Tokens((), None)
    assert not judge.refused


@pytest.mark.parametrize("proven_before", [False, True])
@pytest.mark.parametrize(("changes", "step"), [({}, REFUSE), (LENIENT, RELEASE)])
def test_an_event_nested_too_deep_is_unproven(changes: dict[str, object], step: Step, proven_before: bool) -> None:
    """R7, R11: some client may read in it what the proxy cannot, whatever was proven before."""
    scene = story(1, 2, 3, **changes)
    resume = scene.resume("3")
    if proven_before:
        resume.feed(*notes(4, epoch=1))
    assert resume.feed(("5" if proven_before else "4", TOO_DEEP)) == [step]
    assert resume.judge.verdict == unproven(Reason.UNREADABLE)
    if step is RELEASE:
        assert resume.judge.stream.owes_known is False
        assert scene.session.knows(b"5" if proven_before else b"4")
        assert resume.feed(*notes(6, epoch=1), *notes(7, epoch=2)) == [RELEASE, REFUSE]


def test_an_event_nested_too_deep_is_refused_on_a_held_connection() -> None:
    """R11: resumed traffic is read to its end."""
    resume = connected(story(1), "1")
    assert resume.feed(*notes(2, epoch=1), ("3", TOO_DEEP)) == [RELEASE, REFUSE]
    assert resume.outcome == "unproven unreadable"


def test_a_recorded_event_that_cannot_be_read_is_matched_all_the_same() -> None:
    """R7: by its digest, where the policy lets it through."""
    scene = story(1, **LENIENT)
    scene.live(scene.session.index[b"1"], ("2", TOO_DEEP), *notes(3, epoch=1))
    assert scene.resume("1").released(("2", TOO_DEEP), *notes(3, 4, epoch=1)) == ["2", "3", "4"]


def test_an_unknown_cursor_takes_no_room_before_the_upstream_has_granted_it() -> None:
    """L5, F3: else anybody could push the streams of a session out of its record."""
    scene = story(1, 2, 3, limits=Limits(streams=1, events=9), **LENIENT)
    judge = Judge(scene.policy, scene.session, None, verdict=unproven(Reason.UNKNOWN_CURSOR))
    assert judge.stream.origin is Origin.UNKNOWN
    assert judge.end_without_message(1) is Ending.PASS
    scene.session.stream_changed(judge.stream)
    assert scene.session.knows(b"3")
    judge.open()
    stream = judge.stream
    judge.open()
    assert list(scene.session) == [judge.stream] == [stream]
    assert not scene.session.knows(b"3")


def test_what_enforce_would_have_held_is_proven_once_nothing_contradicts_it() -> None:
    """Section 9: observe counts one verdict for a resume, and a contradiction comes first."""
    scene = Scene(epoch=None, mode=Mode.OBSERVE)
    scene.live(scene.call(5), *notes(1, 2, 3))
    good = scene.resume("3", held=True)
    good.feed(*notes(4))
    assert good.judge.verdict == proven(Proof.CONNECTION)
    bad = scene.resume("3", held=True)
    bad.feed(("4", note("another")))
    assert bad.judge.verdict is not None
    assert bad.judge.verdict.reason is Reason.REPLAY_MISMATCH


def test_a_held_stream_that_is_empty_is_no_reproach() -> None:
    """R9 in observe mode."""
    scene = Scene(epoch=None, mode=Mode.OBSERVE)
    scene.live(scene.call(5), *notes(1, 2, 3))
    judge = scene.resume("3", held=True).judge
    judge.end_without_message(4)
    assert judge.verdict == proven(Proof.CONNECTION)
