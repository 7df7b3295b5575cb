"""T1, R7, L3: however the bytes of a resume are cut on their way, what comes of it is the same."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from epochgate.guard.sse import Framer, Kind
from epochgate.relay.heartbeat import COMMENT
from relay.wire import settle
from resume.story import LAST_CHUNK, OVERLAP, STREAM, began, event, note, notes, part, priming, response

EOLS = {"lf": b"\n", "cr": b"\r", "crlf": b"\r\n"}


def lines(data: bytes, eol: bytes) -> bytes:
    return data.replace(b"\n", eol)


def body(eol: bytes, epoch: object = None, last: object = None) -> bytes:
    """What a resume after 3 may bring: the cursor's event, comments, a priming event, an event in two lines."""
    two = event(5, note(5, epoch)).replace(b"data: {", b"data: {\ndata:")
    blocks = [
        notes(3, epoch=epoch),
        b"retry: 10\n\n",
        b": hello\n\n",
        priming(4),
        b"event: message\n" + two,
        event(6, note(6, last if last is not None else epoch)),
        response(5, epoch),
    ]
    return lines(b"".join(blocks), eol)


async def resumed_in_pieces(proxy, pieces: list[bytes], *, epoch: object = None):
    """The upstream's whole answer in these pieces; what the client got, and the verdicts."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay, epoch=epoch)
        await story.pause()
        client, server, _ = await story.ask(story.again(3))
        for piece in pieces:
            await server.send(piece)
            if len(pieces) > 2:
                await settle()
        data = await client.rest()
        return client.status, data, client.end, story.verdicts(), story.session.fence


@pytest.mark.parametrize("eol", EOLS.values(), ids=EOLS)
@pytest.mark.parametrize("epoch", [None, 7], ids=["overlap", "epoch"])
async def test_t1_cut_in_two_anywhere(proxy, eol, epoch):
    """The stream is cut in two at every byte, each half in a chunk and a packet of its own."""
    whole = body(eol, epoch)
    repeated = lines(notes(3, epoch=epoch), eol)
    async with proxy(resume=OVERLAP) as relay:
        for at in range(1, len(whole)):
            story = await began(relay, epoch=epoch)
            await story.pause()
            client, server, _ = await story.ask(story.again(3))
            await server.send(STREAM + part(whole[:at]), part(whole[at:]) + LAST_CHUNK)
            assert is_rest(await client.rest(), whole, repeated, cut=at == len(repeated) - 1), at
            assert (client.status, client.end, story.session.fence) == (200, "clean", None)
        assert set(story.verdicts()) == {"epoch" if epoch else "overlap"}


def is_rest(got: bytes, whole: bytes, repeated: bytes, *, cut: bool) -> bool:
    """Whether all but the repeated event came; where its CRLF was cut, the LF may stay: a blank line says nothing."""
    return (got.removeprefix(b"\n") if cut else got) == whole.removeprefix(repeated)


@pytest.mark.parametrize("eol", EOLS.values(), ids=EOLS)
async def test_t1_byte_by_byte(proxy, eol):
    whole = body(eol)
    pieces = [STREAM, *(part(whole[at : at + 1]) for at in range(len(whole))), LAST_CHUNK]
    status, data, end, verdicts, fence = await resumed_in_pieces(proxy, pieces)
    assert (status, end, verdicts, fence) == (200, "clean", ["overlap"], None)
    assert is_rest(data, whole, lines(notes(3), eol), cut=True)


@pytest.mark.parametrize("eol", EOLS.values(), ids=EOLS)
async def test_r11_divergent_wherever_it_is_cut(proxy, eol):
    """The second event has another epoch: not a byte of it comes through, and the call is told."""
    whole = body(eol, 7, last=8)
    start = whole.index(b"id: 6")
    stop = start + len(lines(event(6, note(6, 8)), eol))
    want = whole[:start].removeprefix(lines(notes(3, epoch=7), eol))
    async with proxy(resume=OVERLAP) as relay:
        for at in range(start - 4, stop):
            story = await began(relay, epoch=7)
            await story.pause()
            client, server, _ = await story.ask(story.again(3))
            await server.send(STREAM + part(whole[:at]), part(whole[at:stop]))
            assert await client.told() == [(5, "epoch_changed")], at
            assert client.data.startswith(want[:-1]), at  # a last LF that was cut off belongs to what is refused
            assert b'"n":6' not in client.data
            assert story.session.fence == "epoch_changed"


async def test_l3_a_mark_at_the_start_is_no_data(proxy):
    """Byte order mark in three pieces, then the event."""
    whole = b"\xef\xbb\xbf" + notes(3, 4)
    pieces = [STREAM, *(part(whole[at : at + 1]) for at in range(5)), part(whole[5:]), LAST_CHUNK]
    status, data, end, verdicts, _ = await resumed_in_pieces(proxy, pieces)
    assert (status, end, verdicts) == (200, "clean", ["overlap"])
    assert data == notes(4)  # the mark went with the event that was swallowed


MARK = b"\xef\xbb\xbf"


async def test_l3_a_mark_at_the_start_stays_with_its_event(proxy):
    status, data, end, verdicts, _ = await resumed_in_pieces(
        proxy, [STREAM + part(MARK + notes(4, epoch=1)) + LAST_CHUNK], epoch=1
    )
    assert (status, data, end, verdicts) == (200, MARK + notes(4, epoch=1), "clean", ["epoch"])


@pytest.mark.parametrize("eol", EOLS.values(), ids=EOLS)
@pytest.mark.parametrize("hidden", [b"data: hidden\n\n", b"id: x\n\n", b"id: 4\ndata: 4\n\n"])
async def test_r7_what_is_left_out_makes_no_mark_of_what_was_none(proxy, hidden, eol):
    """The client has event 3: it is swallowed, and what follows is the first that the client gets.

    There a mark would be one, and turn a line that says nothing, and was checked so, into data or an id.
    """
    whole = lines(notes(3, epoch=1) + MARK + hidden + notes(4, epoch=1), eol)
    status, data, end, *_ = await resumed_in_pieces(proxy, [STREAM + part(whole) + LAST_CHUNK], epoch=1)
    assert (status, end) == (200, "clean")
    assert data.startswith(b"\n" + MARK)
    read = [
        [(block.own_id, block.data) for block in Framer().feed(stream) if block.kind is Kind.MESSAGE]
        for stream in (whole, data)
    ]
    assert read[1] == read[0][1:]


async def test_l3_an_unfinished_event_at_the_end_counts_for_nothing(proxy):
    whole = notes(3, 4) + notes(5)[:-1]
    status, data, end, verdicts, fence = await resumed_in_pieces(proxy, [STREAM + part(whole) + LAST_CHUNK])
    assert (status, data, end, verdicts, fence) == (200, notes(4), "clean", ["overlap"], None)


async def test_l3_an_id_before_the_cut_moves_no_cursor(proxy):
    """`id: 4` came without its blank line; the client still resumes after 3, and 4 is new then."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.server.send(part(b"id: 4\ndata: x\n"))
        await story.answer.until(b"data: x\n")
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        assert story.verdicts() == ["epoch"]


@pytest.mark.parametrize("size", [5_000_000, 20_000_000])
async def test_r7_a_huge_event_on_a_resume(proxy, size):
    """It is held back whole, checked, and released as it came."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM)
        huge = event(4, note("x" * size, 1))
        head = b"%x\r\n" % len(huge)
        await server.send(head + huge[:-1])
        assert not client.start
        await server.send(huge[-1:] + b"\r\n" + part(notes(5, epoch=1)))
        await client.until(notes(5, epoch=1))
        assert bytes(client.data) == huge + notes(5, epoch=1)


@pytest.mark.parametrize("resumed", ["upstream", "held"])
async def test_r7_an_event_that_is_too_long_to_be_checked(proxy, resumed, monkeypatch):
    """It is refused as what it is: unreadable; nothing of it comes through (T8)."""
    monkeypatch.setattr("epochgate.relay.flow.JUDGED_BLOCK", 10_000)
    async with proxy(resume={"hold": {"bytes": 5000}}) as relay:
        story = await began(relay, epoch=1)
        if resumed == "held":
            await story.leave()
            client, server = await story.resume(3), story.server
        else:
            await story.cut()
            client, server, _ = await story.resumed(3, STREAM)
        await server.send(part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        await server.send(part(event(5, note("x" * 10_000, 1))))
        assert await client.told() == [(5, "unreadable")]
        assert b"xxx" not in client.data
        await story.fenced("unreadable")
        assert story.verdicts()[-1] == "unreadable"


@pytest.mark.parametrize("hold", ["0s", "120s"], ids=["not held", "held"])
@pytest.mark.parametrize(
    ("comment_after", "stream", "want"),
    [
        (0, MARK + notes(1), COMMENT + notes(1)),
        (0, MARK + MARK + notes(1, 2), COMMENT + MARK + notes(1, 2)),
        (0, MARK[:2] + notes(1, 2), COMMENT + MARK[:2] + notes(1, 2)),
        (0, notes(1), COMMENT + notes(1)),
        (3, MARK + MARK + notes(1, 2), MARK + COMMENT + MARK + notes(1, 2)),
    ],
    ids=["mark", "two marks", "half a mark", "no mark", "behind the mark"],
)
async def test_t1_behind_a_comment_a_mark_is_taken_out_wherever_it_is_cut(proxy, comment_after, stream, want, hold):
    """There the client would take it for a part of the first line; what is no mark to the proxy goes on as it is."""
    async with proxy(resume={"hold": {"time": hold}}) as relay:
        for count in range(5):
            for cuts in combinations(range(comment_after + 1, 5), count):
                story = await began(relay, events=b"")
                await story.answer.begin()
                if comment_after:
                    await story.server.send(part(stream[:comment_after]))
                    await story.answer.until(stream[:comment_after])
                story.flow._beat()
                for begin, end in pairwise((comment_after, *cuts, len(stream))):
                    await story.server.send(part(stream[begin:end]))
                    await settle()
                await story.server.send(LAST_CHUNK)
                assert await story.answer.rest() == want, cuts
