"""Traffic that was not resumed: the first token counts, another one shows a re-created session (L1, R12)."""

import pytest

from epochgate.guard.mcp import Headers
from epochgate.guard.policy import MetaSource
from epochgate.guard.sse import Framer
from epochgate.guard.watch import Watch
from guard.scene import HEADER, META, TOO_DEEP, Scene, batch, blocks, note, result, sse

TOKEN_1: Headers = [(b"Mcp-Session-Epoch", b"1")]
TOKEN_2: Headers = [(b"Mcp-Session-Epoch", b"2")]


def watch(scene: Scene, headers: Headers = ()) -> Watch:
    return Watch(scene.policy, scene.session, headers)


@pytest.mark.parametrize(
    ("known", "body", "changed", "then"),
    [
        (1, result(1, 1), False, "1"),
        (1, result(1, "1"), False, "1"),
        (1, result(1), False, "1"),
        (1, result(1, 2), True, "1"),
        (1, b"no json", False, "1"),
        (1, batch(note(1, 1), result(1, 2)), True, "1"),
        (None, result(1), False, None),
        (None, result(1, 2), False, "2"),
        (None, batch(note(1), note(2, 3), result(1, 3)), False, "3"),
        (None, batch(note(1, 3), result(1, 4)), True, "3"),
    ],
)
def test_a_body_shows_the_epoch(known: object, body: bytes, changed: bool, then: str | None) -> None:
    """R12; L1: the first token that is seen counts where the handshake had none."""
    scene = Scene(epoch=known)
    assert watch(scene).body(body) is changed
    assert scene.session.token == then


@pytest.mark.parametrize(
    ("sources", "headers", "by_head", "by_body"),
    [
        ((HEADER,), TOKEN_1, False, False),
        ((HEADER,), TOKEN_2, True, True),
        ((HEADER, META), TOKEN_2, True, True),
        ((HEADER, META), (), False, False),
        # the token in the message comes first, so the head alone tells nothing
        ((META, HEADER), TOKEN_2, False, False),
        ((META,), TOKEN_2, False, False),
    ],
)
def test_a_head_shows_the_epoch_where_no_message_can_say_otherwise(
    sources: tuple[object, ...], headers: Headers, by_head: bool, by_body: bool
) -> None:
    """R12, section 10: the first source that is present."""
    scene = Scene(sources=sources)
    assert watch(scene, headers).head() is by_head
    assert watch(scene, headers).body(result(1, 1)) is by_body


def test_a_header_counts_for_a_message_without_a_token() -> None:
    """Section 10, R12."""
    scene = Scene(sources=(META, HEADER))
    assert watch(scene, TOKEN_2).body(result(1))
    assert not watch(scene, TOKEN_1).body(result(1))


def test_a_live_stream_is_recorded_and_watched() -> None:
    """L3, R12: comments and empty blocks leave no trace, and what shows the change is on record too."""
    scene = Scene()
    stream = scene.call(1)
    told = [
        b": hello\n\n",
        b"retry: 5\n\n",
        b"event: ping\n\n",
        ("", b""),
        ("1", b""),
        ("2", note(2, 1)),
        (None, note(3)),
    ]
    assert not scene.live(stream, *told)
    assert [event.id for event in stream.events] == [b"1", b"2", b"2"]
    assert [event.priming for event in stream.events] == [True, False, False]
    assert scene.live(stream, ("3", note(4, 2)))
    assert stream.end == 4
    assert not scene.live(stream, ("4", note(5, 1)))


@pytest.mark.parametrize(
    ("told", "changed"),
    [
        (b'{"method":"n","params":{"text":"\\ud83d","_meta":{"session_epoch":2}}}', True),
        (b'{"method":"n","params":{"x":NaN,"_meta":{"session_epoch":1}}}', False),
        (b'{"method":"n","params":{"_meta":{"session_epoch":2.0}}}', True),
        (TOO_DEEP, False),
    ],
)
def test_what_some_client_can_read_counts(told: bytes, changed: bool) -> None:
    """R12: on live traffic what nobody can read shows nothing."""
    scene = Scene()
    assert scene.live(scene.call(1), ("1", told)) is changed


@pytest.mark.parametrize(("size", "told"), [(10, result(1, 1)), (1 << 20, TOO_DEEP[:-1] + b',"id":1}')])
def test_what_a_stream_owes_is_unknown_after_a_message_that_cannot_be_read(size: int, told: bytes) -> None:
    """L3, R9: it may have been the response."""
    scene = Scene()
    stream = scene.call(1)
    watched = Watch(scene.policy, scene.session, (), stream)
    for block in Framer(keep_data=size).feed(sse("1", told)):
        assert not watched.see(block, 1.0)
    assert stream.end == 1
    assert not stream.owes
    assert not stream.owes_known
    assert not stream.finished


def test_a_response_without_a_stream_leaves_no_record() -> None:
    """L3."""
    scene = Scene()
    watched = watch(scene)
    assert [watched.see(block, 1.0) for block in blocks(("1", note(1)), ("2", note(2, 2)))] == [False, True]
    assert not scene.session.delivered


def test_a_key_with_escapes_is_seen_on_live_traffic() -> None:
    """L1, R12: PHP, for one, writes `/` as `\\/`."""
    scene = Scene(epoch=None, sources=(MetaSource("example.com/epoch"),))
    stream = scene.call(1)
    told = rb'{"method":"n","params":{"_meta":{"example.com\/epoch":%d}}}'
    assert not scene.live(stream, ("1", told % 1))
    assert scene.session.token == "1"
    assert scene.live(stream, ("2", told % 2))
