"""Odd but legal exchanges, directly and through a proxy process: equal after the rules of section 4; and that a
difference would be told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reliability.exchanges import generate
from reliability.lanes import Play, differences
from reliability.strict import Message
from reliability.transparency import compare

SEED = 20261201
AUTHORITY = b"127.0.0.1:1"


async def test_t1_to_t7_exchanges_are_equal_through_the_proxy(tmp_path):
    found = await compare(SEED, range(150), tmp_path, 1)
    assert found.differing == []
    assert found.complaints == []
    assert found.exchanges == 150
    assert all(found.kinds.values()), found.kinds


def test_an_exchange_is_the_same_for_a_seed():
    assert generate(1, 7) == generate(1, 7)
    assert generate(1, 7) != generate(2, 7)


REQUEST = Message(b"POST /mcp HTTP/1.1", ((b"Host", b"a"), (b"X", b"1"), (b"x", b"2")), b"body", "sized")
ANSWER = Message(b"HTTP/1.1 200 OK", ((b"X", b"1"), (b"x", b"2")), b"body", "sized")
HINT = Message(b"HTTP/1.1 103 Early Hints", ((b"Link", b"a"),), b"", "none")
FORWARDED = replace(REQUEST, fields=((b"Host", AUTHORITY), (b"X", b"1"), (b"x", b"2"), (b"Via", b"1.1 epochgate")))


def told(request: Message = FORWARDED, answer: Message = ANSWER, interims: tuple[Message, ...] = (HINT,)) -> list[str]:
    direct = Play([REQUEST], [[HINT]], [ANSWER])
    through = Play([request], [list(interims)], [answer])
    exchange = generate(SEED, 0)
    return list(differences(direct, through, exchange, AUTHORITY))


def test_no_difference_is_told_where_there_is_none():
    assert told() == []


@pytest.mark.parametrize(
    ("what", "through"),
    [
        ("request 0: start", {"request": replace(FORWARDED, start=b"POST /mcp/ HTTP/1.1")}),
        ("request 0: start", {"request": replace(FORWARDED, start=b"POST /mcp HTTP/1.0")}),
        ("request 0: fields", {"request": REQUEST}),
        ("request 0: fields", {"request": replace(FORWARDED, fields=FORWARDED.fields[::-1])}),
        ("request 0: body", {"request": replace(FORWARDED, body=b"bodY")}),
        ("request 0: framing", {"request": replace(FORWARDED, framing="chunked")}),
        ("answer 0: start", {"answer": replace(ANSWER, start=b"HTTP/1.1 200 Ok")}),
        ("answer 0: fields", {"answer": replace(ANSWER, fields=((b"X", b"1"), (b"X", b"2")))}),
        ("answer 0: fields", {"answer": replace(ANSWER, fields=(*ANSWER.fields, (b"Server", b"p")))}),
        ("answer 0: fields", {"answer": replace(ANSWER, fields=(*ANSWER.fields, (b"Connection", b"x")))}),
        ("answer 0: body", {"answer": replace(ANSWER, body=b"bod")}),
        ("answer 0: complete", {"answer": replace(ANSWER, complete=False)}),
        ("answer 0: framing", {"answer": replace(ANSWER, framing="chunked")}),
        ("answer 0: interim", {"interims": ()}),
        ("answer 0: interim", {"interims": (HINT, HINT)}),
    ],
)
def test_every_difference_is_told(what, through):
    assert [line for line in told(**through) if line.startswith(what)]
