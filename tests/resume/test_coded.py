"""T8: content codings on a resume. What cannot be read proves nothing, and is not let through as proven."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest

from resume.story import (
    JSON,
    LAST_CHUNK,
    OVERLAP,
    STREAM,
    Answer,
    Story,
    began,
    coded,
    gzipped,
    notes,
    part,
    reply,
    response,
    result,
    until,
)


def raw_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(data) + coder.flush()


def members(data: bytes) -> bytes:
    """Each byte in a gzip member of its own."""
    return b"".join(gzipped(data[at : at + 1]) for at in range(len(data)))


CODINGS = {
    "gzip": (b"gzip", gzipped),
    "x-gzip in members": (b"x-gzip", members),
    "deflate": (b"deflate", zlib.compress),
    "bare deflate": (b"Deflate", raw_deflate),
}


@pytest.mark.parametrize("accepted", [b"Accept-Encoding: gzip, br", None])
@pytest.mark.parametrize("mode", ["enforce", "observe"])
async def test_t8_identity_is_asked_for(proxy, accepted, mode):
    async with proxy(mode=mode) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, request = await story.resumed(3, b"", *([accepted] if accepted else []))
        asked = request.all(b"Accept-Encoding")
        assert asked == ([b"identity"] if mode == "enforce" else [b"gzip, br"] if accepted else [])
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))


@pytest.mark.parametrize(("name", "code"), CODINGS.values(), ids=CODINGS)
@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_t8_read_from_a_copy(proxy, name, code, step):
    """The coded bytes come through as they were, in whatever pieces."""
    body = code(notes(4, 5, epoch=1) + response(5, 1))
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, coded(name))
        for at in range(0, len(body), step * 20 if step == 1 else step * 50):
            await server.send(part(body[at : at + (step * 20 if step == 1 else step * 50)]))
        await server.send(LAST_CHUNK)
        assert (await client.rest(), client.end) == (body, "clean")
        assert client.get(b"Content-Encoding") == name
        assert story.verdicts() == ["epoch"]


@pytest.mark.parametrize(("name", "code"), CODINGS.values(), ids=CODINGS)
async def test_t8_another_epoch_in_a_coding(proxy, name, code):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, coded(name) + part(code(notes(4, epoch=2))))
        assert (await client.error())["data"] == {"reason": "epoch_changed"}
        await story.fenced("epoch_changed")


async def test_r11_t8_another_epoch_later_on(proxy):
    """Nothing can be told in coded bytes: the stream breaks off (F5); a second member hides nothing."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        good = gzipped(notes(4, epoch=1))
        client, server, _ = await story.resumed(3, coded(b"gzip") + part(good))
        await client.until(good)
        await server.send(part(gzipped(notes(5, epoch=2))))
        assert (await client.rest(), client.end) == (good, "aborted")
        assert story.verdicts() == ["epoch", "epoch_changed"]
        again = await story.resume(4)
        assert (await again.error())["data"] == {"reason": "epoch_changed"}
        assert await (await story.resume(4)).told() == [(5, "epoch_changed")]  # F4


UNREADABLE = {
    "unknown coding": (b"br", b"\x0b\x02\x80..."),
    "two codings": (b"gzip, gzip", gzip.compress(gzipped(notes(4, epoch=1)))),
    "no gzip": (b"gzip", notes(4, epoch=1)),
    "junk behind the end": (b"deflate", zlib.compress(notes(4, epoch=1)) + b"\n\n"),
    "bomb": (b"gzip", gzipped(b": " + bytes(17 * 1024 * 1024) + b"\n\n")),
}


@pytest.mark.parametrize(("name", "body"), UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("unproven", ["restart", "resume"])
async def test_t8_unreadable(proxy, name, body, unproven):
    async with proxy(resume={"unproven": unproven}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, coded(name) + part(body) + LAST_CHUNK)
        data = await client.rest()
        assert story.verdicts() == ["unreadable"]
        if unproven == "resume":
            assert (client.status, data, client.end) == (200, body, "clean")
            await story.alive()
        else:
            assert client.status == 404
            await story.fenced("unreadable")


@pytest.mark.parametrize("unproven", ["restart", "resume"])
async def test_t8_unreadable_after_the_proof(proxy, unproven):
    """The first event was proven; what follows cannot be read. It is refused as that, or let through and counted."""
    async with proxy(resume={"unproven": unproven}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        good = gzipped(notes(4, epoch=1))
        client, server, _ = await story.resumed(3, coded(b"gzip") + part(good))
        await client.until(good)
        await server.send(part(b"no gzip") + LAST_CHUNK)
        data = await client.rest()
        assert story.verdicts() == ["epoch", "unreadable"]
        if unproven == "resume":
            assert (data, client.end, story.session.fence) == (good + b"no gzip", "clean", None)
        else:
            assert (data, client.end, story.session.fence) == (good, "aborted", "unreadable")


async def test_t8_nothing_can_be_taken_out_of_coded_bytes(proxy):
    """The repeated event would have to be swallowed: exactly once cannot be had (R7)."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay, epoch=1)
        await story.pause()
        client, server, _ = await story.resumed(3, coded(b"gzip") + part(gzipped(notes(3, 4, epoch=1))))
        assert (await client.error())["data"] == {"reason": "unreadable"}
        assert story.verdicts() == ["unreadable"]


async def test_t8_two_fields_are_two_codings(proxy):
    """`identity` in one field and gzip in the next: plain text would be read where the client decodes."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        head = coded(b"identity")[:-2] + b"Content-Encoding: gzip\r\n\r\n"
        client, server, _ = await story.resumed(3, head + part(gzipped(notes(4, epoch=2))))
        assert (await client.error())["data"] == {"reason": "unreadable"}


async def test_t8_a_coded_stream_is_recorded_and_not_held(proxy):
    """A live one: it passes as it is; coded bytes cannot be cut at events, so nothing is kept of it (H1)."""
    async with proxy() as relay:
        body = gzipped(notes(1, 2, 3, epoch=1))
        story = Story(relay)
        await story.open(1)
        client, server, _ = await story.ask(story.call(5))
        await server.send(coded(b"gzip") + part(body))
        await client.until(body)
        assert story.session.knows(b"3")
        client.peer.reset()
        assert await server.gone()
        again, server, request = await story.resumed(2, STREAM + part(notes(3, 4, epoch=1)))
        await again.until(notes(3, 4, epoch=1))


async def test_r12_t8_another_epoch_in_a_coded_json_answer(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        body = gzipped(result(99, 2))
        other: Answer = await story.other(reply(200, body, JSON, b"Content-Encoding: gzip"))
        assert await other.rest() == body
        await until(lambda: story.session.fence == "epoch_changed")


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, br"])
async def test_r3_t8_a_live_stream_that_cannot_be_read_has_delivered_something(proxy, coding):
    """Its ids are not known, but its client may have some: a cursor is unknown, and no leftover of another session."""
    async with proxy() as relay:
        story = Story(relay)
        await story.open(1)
        client, server, _ = await story.ask(story.call(5))
        await server.send(coded(coding) + part(b"coded"))
        await client.until(b"coded")
        server.reset()
        await client.rest()
        again = await story.resume(5)
        assert (await again.error())["data"] == {"reason": "unknown_cursor"}
        assert await relay.unasked()


class Coder:
    """Codes a stream piece by piece, each so that all of it can be decoded at once."""

    def __init__(self) -> None:
        self._zlib = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)

    def __call__(self, data: bytes) -> bytes:
        return self._zlib.compress(data) + self._zlib.flush(zlib.Z_SYNC_FLUSH)


async def test_r11_t8_coded_bytes_wait_for_the_end_of_their_event(proxy):
    """Half an event, however well it can be decoded, is not checked yet; a whole good one is released."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        code = Coder()
        good, half, rest = code(notes(4, epoch=1)), code(notes(5, epoch=1)[:-1]), code(b"\n")
        client, server, _ = await story.resumed(3, coded(b"gzip") + part(good))
        await client.until(good)
        await server.send(part(half))
        await until(lambda: story.flow._coded == half)
        assert client.data == good
        await server.send(part(rest))
        await client.until(rest)
        assert client.data == good + half + rest
        await server.send(part(code(notes(6, epoch=2)[:-1])))
        await server.send(part(code(b"\n")))
        assert (await client.rest(), client.end) == (good + half + rest, "aborted")
        assert story.verdicts() == ["epoch", "epoch_changed"]


async def test_r10_t8_nothing_of_half_a_coded_event_is_released_in_silence(proxy):
    async with proxy(resume={"first_event_timeout": 0.05}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        code = Coder()
        quiet = code(b": hello\n\n")
        client, server, _ = await story.resumed(3, coded(b"gzip") + part(quiet))
        await client.until(quiet)
        await server.send(part(code(notes(4, epoch=2)[:-1])) + LAST_CHUNK)
        assert (await client.rest(), client.end) == (quiet, "aborted")  # T4: the coding lacks its end


async def test_t8_the_end_of_a_line_in_two_reads_is_coded_as_well(proxy):
    """The LF of a last CRLF is part of the coded bytes; nothing decoded gets among them."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        code = Coder()
        event_ = notes(4, epoch=1).replace(b"\n", b"\r\n")
        first, last = code(event_[:-1]), code(b"\n")
        client, server, _ = await story.resumed(3, coded(b"gzip") + part(first))
        await client.until(first)
        await server.send(part(last) + LAST_CHUNK)
        assert (await client.rest(), client.end) == (first + last, "clean")


@pytest.mark.parametrize("unproven", ["restart", "resume"])
async def test_t8_a_coded_event_that_is_too_long_to_be_held_back(proxy, unproven, monkeypatch):
    monkeypatch.setattr("epochgate.relay.flow.JUDGED_BLOCK", 1000)
    async with proxy(resume={"unproven": unproven}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        code = Coder()
        good = code(notes(4, epoch=1))
        long = code(b": " + random.Random(1).randbytes(2000).hex().encode())
        client, server, _ = await story.resumed(3, coded(b"gzip") + part(good))
        await client.until(good)
        await server.send(part(long))
        if unproven == "resume":
            await client.until(long)
            assert client.data == good + long
        else:
            assert (await client.rest(), client.end) == (good, "aborted")
        assert story.verdicts() == ["epoch", "unreadable"]


TYPE = b"Content-Type: text/event-stream"
ODD = {
    "UTF-7": (b"; charset=utf-7", b"+AGQAYQB0AGE-" + notes(4, epoch=2).partition(b"data")[2]),
    "quoted": (b';Charset = "ISO-2022-JP"', notes(4, epoch=1)),
    "UTF-16": (b"; charset=utf-16", notes(4, epoch=1)),
    "with a mark": (b"; charset=utf-8-sig", notes(4, epoch=1)),
    "two": (b"; charset=utf-8; charset=utf-7", notes(4, epoch=1)),
    "by RFC 8187": (b"; charset*=us-ascii''utf-7", notes(4, epoch=1)),
    "in another field": (b"\r\nContent-Type: text/plain; charset=utf-7", notes(4, epoch=1)),
    "escaped": (b'; charset="ut\\f-7"', notes(4, epoch=1)),
}


@pytest.mark.parametrize(("label", "body"), ODD.values(), ids=ODD)
@pytest.mark.parametrize("unproven", ["restart", "resume"])
async def test_t8_another_charset(proxy, label, body, unproven):
    """An event stream is in UTF-8; clients that go by the name of another charset would read something else."""
    async with proxy(resume={"unproven": unproven}) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        head = STREAM.replace(TYPE, TYPE + label)
        client, server, _ = await story.resumed(3, head + part(body) + LAST_CHUNK)
        data = await client.rest()
        assert story.verdicts() == ["unreadable"]
        if unproven == "resume":
            assert (client.status, data, client.end) == (200, body, "clean")
        else:
            assert client.status == 404
            await story.fenced("unreadable")


PLAIN = [
    b"; charset=utf-8",
    b';CHARSET="UTF-8"',
    b"; charset=utf8",
    b"; charset=ISO-8859-1",
    b"; charset='utf-8'",
    b"; charset=US-ASCII",
    b"; charset=",
]


@pytest.mark.parametrize("label", PLAIN)
async def test_t8_utf8_by_any_name(proxy, label):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM.replace(TYPE, TYPE + label) + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        assert story.verdicts() == ["epoch"]


async def test_t8_a_live_stream_in_another_charset_is_neither_recorded_nor_held(proxy):
    """So nothing of it is a cursor, and a resume is told that it is unknown."""
    async with proxy() as relay:
        story = Story(relay)
        await story.open(1)
        client, server, _ = await story.ask(story.call(5))
        head = STREAM.replace(TYPE, TYPE + b"; charset=utf-7")
        await server.send(head + part(notes(1, 2, 3, epoch=1)))
        await client.until(notes(3, epoch=1))
        client.peer.reset()
        assert await server.gone()
        assert not story.session.knows(b"3")
        assert (await (await story.resume(3)).error())["data"] == {"reason": "unknown_cursor"}
