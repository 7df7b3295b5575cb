"""R6: what is judged as an event stream is what some client would read as one, whatever its status and label say."""

from __future__ import annotations

import asyncio

import pytest

from relay.wire import post
from resume.story import (
    LAST_CHUNK,
    OVERLAP,
    SESSION,
    STREAM,
    Story,
    began,
    compact,
    note,
    notes,
    part,
    reply,
    until,
)  # fmt: skip

TYPE = b"Content-Type: text/event-stream"
SPLICED = notes(4, epoch=2)


def labelled(label: bytes, status: bytes = b"200 OK") -> bytes:
    """The head of an answer with this status, and these lines in place of the `Content-Type`."""
    head = STREAM.replace(b"200 OK", status).replace(TYPE + b"\r\n", label and label + b"\r\n")
    assert head != STREAM
    return head


STREAMS = {
    "200 in capitals": labelled(b"Content-Type: TEXT/Event-Stream"),
    "201": labelled(TYPE, b"201 Created"),
    "202": labelled(TYPE, b"202 Accepted"),
    "203": labelled(TYPE, b"203 Non-Authoritative Information"),
    "206": labelled(TYPE, b"206 Partial Content"),
    "299": labelled(TYPE, b"299 Whatever"),
    "twice in a field": labelled(TYPE + b", text/event-stream"),
    "twice": labelled(TYPE + b"\r\n" + TYPE),
    "second in a field": labelled(b"Content-Type: text/plain, text/event-stream"),
    "second field": labelled(b"Content-Type: text/plain\r\nX: y\r\ncontent-type: text/event-stream;charset=utf-8"),
    "first field": labelled(TYPE + b"\r\nContent-Type: application/json"),
    "without a semicolon": labelled(TYPE + b" charset=utf-8"),
    "with a comma": labelled(TYPE + b","),
    "with more letters": labelled(TYPE + b"x"),
}
UNTYPED = {
    "no type": labelled(b""),
    "no type, 203": labelled(b"", b"203 Whatever"),
    "an empty type": labelled(b"Content-Type:"),
    "no type, to the end of the connection": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
    "no type, sized": reply(200, SPLICED)[: -len(SPLICED)],
}


def framed(head: bytes, data: bytes) -> bytes:
    return data if b"Transfer-Encoding" not in head else part(data)


@pytest.mark.parametrize("head", [*STREAMS.values(), *UNTYPED.values()], ids=[*STREAMS, *UNTYPED])
async def test_r6_what_a_client_reads_as_a_stream_is_judged(proxy, head):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, head + framed(head, SPLICED))
        assert await server.gone()
        assert (await client.error())["data"] == {"reason": "epoch_changed"}
        assert client.status == 404
        await story.fenced("epoch_changed")


@pytest.mark.parametrize("label", [TYPE, b"Content-Type: application/json"])
async def test_r6_t2_a_type_that_its_connection_field_takes_away_says_nothing(proxy, label):
    """The client does not get it."""
    head = STREAM.replace(TYPE, label).replace(b"Connection: close", b"Connection: close, content-type")
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, _, _ = await story.resumed(3, head + part(SPLICED))
        assert (await client.error())["data"] == {"reason": "epoch_changed"}


@pytest.mark.parametrize("head", [*STREAMS.values(), *UNTYPED.values()], ids=[*STREAMS, *UNTYPED])
async def test_r6_t2_its_head_goes_on_as_it_came(proxy, head):
    """What is proven is delivered under the status and the fields of the upstream."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, _, _ = await story.resumed(3, head + framed(head, notes(4, epoch=1)))
        await client.begin()
        dropped = (b"connection", b"transfer-encoding", b"content-length")
        came = [tuple(line.split(b":", 1)) for line in head.split(b"\r\n")[1:-2]]
        want = [(name, value.strip()) for name, value in came if name.lower() not in dropped]
        assert client.start == head.split(b"\r\n")[0]
        assert [field for field in client.fields if field[0].lower() not in dropped] == want
        assert notes(4, epoch=1) in (await client.peer.receive())
        assert story.verdicts() == ["epoch"]


CHUNKED = {name: head for name, head in (STREAMS | UNTYPED).items() if b"Transfer-Encoding" in head}


@pytest.mark.parametrize("head", CHUNKED.values(), ids=CHUNKED)
@pytest.mark.parametrize("calls", [(5,), ()], ids=["call", "standalone"])
async def test_l3_it_is_recorded_and_held_as_well(proxy, head, calls):
    """A stream that was not resumed: its events are cursors, and a new epoch in it fences the session (R12)."""
    async with proxy() as relay:
        story = await began(relay, epoch=1, head=head, calls=calls)
        await story.leave()
        await story.server.send(part(notes(4, epoch=1)))
        client = await story.resume(3)
        await client.until(notes(4, epoch=1))
        assert client.start == head.split(b"\r\n")[0]
        await story.server.send(part(notes(5, epoch=2)))
        await story.fenced("epoch_changed")


@pytest.mark.parametrize("head", [*STREAMS.values(), *UNTYPED.values()], ids=[*STREAMS, *UNTYPED])
async def test_r6_observed_it_is_counted(proxy, head):
    async with proxy(mode="observe") as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, _, _ = await story.resumed(3, head + framed(head, SPLICED))
        await client.begin()
        assert client.start == head.split(b"\r\n")[0]
        await until(lambda: story.verdicts() == ["epoch_changed"])
        assert story.session.fence is None


@pytest.mark.parametrize("head", [STREAMS["203"], UNTYPED["no type"]], ids=["203", "no type"])
async def test_r5_it_answers_the_rewound_ask(proxy, head):
    """The upstream is not asked again with the client's own cursor: the repeated event is the proof."""
    async with proxy(resume=OVERLAP) as relay:
        story = await began(relay)
        await story.pause()
        client, _, request = await story.resumed(3, head + part(notes(3, 4)))
        assert request.get(b"Last-Event-ID") == b"2"
        await client.until(notes(4))
        assert client.data == notes(4)
        assert story.verdicts() == ["overlap"]


PASSED = {
    "json": reply(200, note(4, 2), b"Content-Type: application/json"),
    "another type": labelled(b"Content-Type: application/octet-stream") + part(SPLICED) + part(b""),
    "accepted, without a body": reply(202),
    "204": b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
    "204, said to be a stream": b"HTTP/1.1 204 No Content\r\n" + TYPE + b"\r\nConnection: close\r\n\r\n",
    "205": labelled(b"", b"205 Reset Content") + b"0\r\n\r\n",
    "an error that is a stream": labelled(TYPE, b"503 Whatever") + part(SPLICED) + part(b""),
    "a redirect": labelled(TYPE, b"307 Whatever") + part(SPLICED) + part(b""),
}


@pytest.mark.parametrize("answer", PASSED.values(), ids=PASSED)
async def test_r6_other_answers_pass_unread(proxy, answer):
    """What the server labels as something else is not judged; that is a limit of the promise (docs/THREAT_MODEL.md)."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, answer)
        head, _, body = answer.partition(b"\r\n\r\n")
        await client.begin()
        assert client.start == head.split(b"\r\n")[0]
        if b"Transfer-Encoding" in head:
            body = b"" if body == b"0\r\n\r\n" else SPLICED
        if client.status != 204:
            assert await client.rest() == body
        assert story.verdicts() == []
        await story.alive()


async def test_r6_r9_an_untyped_answer_that_is_no_stream_proves_nothing(proxy):
    """It is asked for again, as any resume that brings no message; in the end the call it owes is not left waiting."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, reply(200, b"<h1>hello</h1>"))
        for _ in range(3):
            server, _ = await story.asked()
            await server.send(reply(200, b"<h1>hello</h1>"))
        assert (await client.error())["data"] == {"reason": "no_event"}


BODIES = {
    "JSON": (b'{"jsonrpc":"2.0",\n\n', b'"id":5,\n\n"result":{}}'),
    "text with blank lines": (b"one\n\n", b"two\n\n"),
    "a page": (b"\xef\xbb\xbf<html>\r\n\r\n", b"\xef\xbb\xbf</html>"),
    "bytes": (bytes(range(256)), bytes(range(255, -1, -1))),
}


@pytest.mark.parametrize("pieces", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("calls", [(5,), ()], ids=["call", "standalone"])
async def test_t1_without_a_type_it_may_be_no_stream_and_is_left_alone(proxy, sized, pieces, calls):
    """At once, byte by byte, without a comment; nobody ends it early, and nobody holds it."""
    first, second = pieces
    head = reply(200, first + second)[: -len(first + second)] if sized else UNTYPED["no type"]
    async with proxy(keepalive="10ms") as relay:
        story = Story(relay)
        await story.open(1)
        for cut_off in (False, True):
            client, server, _ = await story.ask(story.call(*calls) if calls else story.again(None))
            await server.send(head + framed(head, first))
            await client.until(first)
            await asyncio.sleep(0.05)  # five silences that would bring a comment
            assert not relay.context.streams, "the proxy would end it in a drain"
            if cut_off:
                client.peer.reset()
                assert await server.gone()
                assert story.held == 0
            else:
                await server.send(framed(head, second) + (b"" if sized else LAST_CHUNK))
                assert (await client.rest(), client.end) == (first + second, "clean")


@pytest.mark.parametrize("whole", [False, True])
async def test_e3_the_untyped_answer_to_a_notification_is_no_stream(proxy, whole):
    """As the TypeScript SDK writes it; streams that are none would change what is learnt of ids."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        said = post(compact({"jsonrpc": "2.0", "method": "notifications/x"}), SESSION)
        client, server, _ = await story.ask(said)
        answer = labelled(b"", b"202 Accepted"), LAST_CHUNK
        await server.send(*([b"".join(answer)] if whole else answer))
        assert (await client.rest(), client.status) == (b"", 202)
        assert len(story.session.streams) == 1


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("mine", [False, True])
async def test_f3_r12_an_untyped_answer_to_a_stranger_is_no_grant(proxy, mine, whole):
    """Its head alone fences for the one who opened the session."""
    owner, other = b"Authorization: Bearer mine", b"Authorization: Bearer other"
    async with proxy(epoch={"sources": [{"header": "Epoch"}]}) as relay:
        story = Story(relay, (owner,))
        await story.open(None, b"Epoch: 1")
        client, server, _ = await story.ask(story.call(5, fields=(owner if mine else other,)))
        head = UNTYPED["no type"][:-2] + b"Epoch: 2\r\n\r\n"
        answer = head, part(b"please log in") + LAST_CHUNK
        await server.send(*([b"".join(answer)] if whole else answer))
        assert await client.rest() == b"please log in"
        assert story.session.fence == ("epoch_changed" if mine else None)


PAGES = {
    "a page": (UNTYPED["no type"] + part(b"please log in") + LAST_CHUNK, "no_event"),
    "a coded page": (
        UNTYPED["no type"][:-2] + b"Content-Encoding: br\r\n\r\n" + part(b"please log in") + LAST_CHUNK,
        "unreadable",
    ),
    "an event of another epoch": (UNTYPED["no type"] + part(SPLICED), "epoch_changed"),
}


@pytest.mark.parametrize(("answer", "reason"), PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("mine", [False, True])
async def test_f3_an_untyped_answer_to_the_resume_of_a_stranger_is_no_grant(proxy, answer, reason, mine):
    """It is refused to him alone."""
    owner, other = b"Authorization: Bearer mine", b"Authorization: Bearer other"
    async with proxy() as relay:
        story = await began(relay, epoch=1, fields=(owner,))
        await story.cut()
        client = await story.resume(3, fields=(owner if mine else other,))
        for _ in range(4 if reason == "no_event" else 1):
            server, _ = await story.asked()
            await server.send(answer)
        assert (await client.error())["data"] == {"reason": reason}
        assert story.verdicts() == [reason]
        assert story.session.fence == (reason if mine else None)


async def test_r3_a_stream_without_a_type_is_not_taken_for_nothing_delivered(proxy):
    """Its resume is one, and is judged."""
    async with proxy(resume={"hold": {"time": 0}}) as relay:
        story = await began(relay, epoch=1, head=UNTYPED["no type"], calls=())
        await story.cut()
        client, _, request = await story.resumed(3, UNTYPED["no type"] + part(SPLICED))
        assert request.get(b"Last-Event-ID") == b"3"
        assert (await client.error())["data"] == {"reason": "epoch_changed"}


async def test_it_ends_in_a_drain_once_it_is_known_to_be_a_stream(proxy):
    async with proxy() as relay:
        story = await began(relay, epoch=1, head=UNTYPED["no type"])
        await story.leave()
        client = await (await story.resume(3)).begin()
        story.flow.end_at_boundary()
        assert (await client.rest(), client.end) == (b"", "clean")
