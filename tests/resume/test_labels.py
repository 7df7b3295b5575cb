"""R6: what is judged as an event stream is what some client would read as one, whatever its status and label say."""

from __future__ import annotations

import pytest

from relay.wire import get
from resume.story import OVERLAP, SESSION, STREAM, began, event, note, notes, part, reply, until

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


@pytest.mark.parametrize("head", STREAMS.values(), ids=STREAMS)
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


async def test_l3_a_new_standalone_stream_without_a_type_gives_no_cursor(proxy):
    """It passes and is not recorded: a resume of it is refused."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        client, server, _ = await story.ask(get(b"/mcp", SESSION))
        await server.send(UNTYPED["no type"] + part(event("g1", note(1, 1))))
        await client.until(note(1, 1))
        resumed = await story.resume("g1")
        assert (await resumed.error())["data"] == {"reason": "unknown_cursor"}
