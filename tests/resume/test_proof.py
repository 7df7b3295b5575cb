"""How far one proof reaches (R8, R11), and which of two token sources counts: what docs/THREAT_MODEL.md says of P1."""

from __future__ import annotations

import pytest

from resume.story import STREAM, began, compact, event, note, notes, part

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
