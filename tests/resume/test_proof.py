"""How far one proof reaches (R8, R11), and which of two token sources counts: what docs/THREAT_MODEL.md says of P1."""

from __future__ import annotations

import pytest

from resume.story import STREAM, Story, began, compact, event, note, notes, part

SOURCES = {"sources": [{"meta": "session_epoch"}, {"meta": "other"}, {"header": "Epoch"}]}


async def test_r8_one_token_proves_what_comes_after_it(proxy):
    """Until a token contradicts it (R11)."""
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        client, server, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1)))
        await server.send(part(notes(5)))
        await client.until(notes(5))
        await server.send(part(notes(6, epoch=2)))
        assert await client.told() == [(5, "epoch_changed")]
        assert story.verdicts() == ["epoch", "epoch_changed"]


@pytest.mark.parametrize("later", [5, 50, "x"])
async def test_r7_the_first_new_id_alone_is_held_to_an_order(proxy, later):
    """What comes after it, under an id that is on no record, is not."""
    async with proxy(resume={"event_ids": "consecutive"}) as relay:
        story = await began(relay, epoch=1, events=notes(10, 11, 12, epoch=1))
        await story.cut()
        client, server, _ = await story.resumed(12, STREAM + part(notes(13, epoch=1)))
        await server.send(part(event(later, note(14))))
        await client.until(event(later, note(14)))
        assert story.verdicts() == ["epoch"]
        server.reset()
        await client.rest()
        client, _, _ = await story.resumed(later, STREAM + part(event("y", note(15, 1))))
        assert (await client.error())["data"] == {"reason": "id_gap"}


async def test_r3_a_cursor_of_another_session_resumes_nothing(proxy):
    """The session has delivered no id: its GET opens a new stream, which is delivered and fenced for (R12)."""
    async with proxy() as relay:
        story = Story(relay)
        await story.open(1)
        client, _, request = await story.resumed(77, STREAM + part(notes(1, epoch=2)))
        assert request.get(b"Last-Event-ID") is None
        await client.until(notes(1, epoch=2))
        assert story.verdicts() == ["stale_cursor"]
        await story.fenced("epoch_changed")


def two(n: int, first: object, second: object) -> bytes:
    tokens = {"session_epoch": first, "other": second}
    meta = {key: token for key, token in tokens.items() if token is not None}
    return event(n, compact({"jsonrpc": "2.0", "method": "notifications/x", "params": {"n": n, "_meta": meta}}))


JUDGED = {
    "the first alone": (two(4, 1, None), "epoch"),
    "the second alone": (two(4, None, 1), "epoch"),
    "the first, the second disagrees": (two(4, 1, 2), "epoch"),
    "the second, the first disagrees": (two(4, 2, 1), "epoch_changed"),
    "neither, the head disagrees": (event(4, note(4)), "epoch_changed"),
}


@pytest.mark.parametrize(("answer", "reason"), JUDGED.values(), ids=JUDGED)
async def test_the_first_source_that_is_present_counts(proxy, answer, reason):
    async with proxy(epoch=SOURCES) as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        head = STREAM[:-2] + b"Epoch: 2\r\n\r\n"
        client, _, _ = await story.resumed(3, head + part(answer))
        if reason == "epoch":
            await client.until(answer)
        else:
            assert (await client.error())["data"] == {"reason": reason}
        assert story.verdicts() == [reason]


@pytest.mark.parametrize(("tokens", "reason"), [((1, 2), "epoch_changed"), ((2, 1), "epoch")])
async def test_of_equal_keys_the_last_one_counts(proxy, tokens, reason):
    async with proxy() as relay:
        story = await began(relay, epoch=1)
        await story.cut()
        twice = b'"session_epoch":%d,"session_epoch":%d' % tokens
        client, _, _ = await story.resumed(3, STREAM + part(notes(4, epoch=1).replace(b'"session_epoch":1', twice)))
        await client.begin()
        assert client.status == (200 if reason == "epoch" else 404)
        assert story.verdicts() == [reason]
