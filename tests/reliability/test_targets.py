"""The targets of the fuzzer, without it: inputs that are kept, mutated exchanges; the targets notice faults."""

from __future__ import annotations

import importlib

import pytest

from epochgate.guard import eventids, judge, sse
from epochgate.guard.eventids import Learner, Order
from epochgate.guard.judge import Judge, Step
from epochgate.guard.mcp import Call, Messages
from epochgate.relay import client, forward, upstream
from epochgate.relay.headers import Framing
from epochgate.relay.request import Body
from reliability import fuzz_heads, fuzz_peek
from reliability.fuzz import CORPUS, TARGETS, seeds
from reliability.mutation import SIDES, check_side
from reliability.strict import UnclearError

MOST_KEPT = 300_000  # bytes of all inputs


def target(name: str):
    return importlib.import_module(f"reliability.fuzz_{name}")


@pytest.mark.parametrize("name", TARGETS)
def test_the_inputs_that_are_kept(name):
    inputs = seeds(name)
    assert inputs
    for data in inputs:
        target(name).check(data)


def test_there_are_not_too_many_of_them():
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
    assert sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()) < MOST_KEPT


@pytest.mark.parametrize("side", SIDES)
def test_mutated_exchanges(side):
    assert check_side(side, 150, 20261201) >= 150


def read_nothing(body: bytes) -> Call:
    return Call()


def answer_nothing(data: bytes | None, tokens: object) -> Messages:
    return Messages()


def release(self: Judge, block: object, now: float) -> Step:
    self.verdict = self.verdict or judge.proven(judge.Proof.EPOCH)
    return Step.RELEASE


def lower(event_id: bytes) -> bytes:
    return event_id.lower()


def trust(self: client.ClientConnection, request: object) -> Body:
    """As if there were no transfer codings."""
    length = request.first.get(b"content-length")
    return Body(self, Framing.NONE, 0) if length is None else Body(self, Framing.SIZED, int(length))


def fixed(self: upstream.UpstreamConnection, status: int) -> Framing:
    """As if every answer with a length had a body."""
    return Framing.SIZED if b"content-length" in self._names else Framing.CLOSE


def unnamed(options: frozenset[bytes], credentials: tuple[bytes, ...]) -> None:
    """Whatever `Connection` names is taken away."""


def unread(fields: object) -> frozenset[bytes]:
    return frozenset()


def ordered(self: Learner, *, several_streams: bool) -> Order:
    return self.held


WRONG = {
    "the framer forgets the byte order mark": ("sse", sse, "MARK", b"\xef\xbb\xbe"),
    "the framer keeps no ids": ("sse", sse, "_FIELD_LIMIT", -1),
    "the peek reads no calls": ("peek", fuzz_peek, "read_call", read_nothing),
    "the peek reads no answers": ("peek", fuzz_peek, "read_messages", answer_nothing),
    "fields are looked up as they are": ("heads", fuzz_heads, "lower_case", bytes),
    "options are not refused": ("heads", fuzz_heads, "check_connection_options", unnamed),
    "options are not read": ("heads", fuzz_heads, "connection_options", unread),
    "the order is taken for proven at once": ("ids", eventids, "_ENOUGH", 0),
    "numbers may be missing": ("ids", eventids, "_MOST_MISSING", -1),
    "the judge releases everything": ("resume", Judge, "check", release),
    "chunked bodies are forwarded as none": ("requests", client.ClientConnection, "_body_of", trust),
    "chunks are forwarded without their sizes": ("requests", forward, "chunk", bytes),
    "an answer without a body has one": ("answers", upstream.UpstreamConnection, "_framing", fixed),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_target_notices(monkeypatch, fault):
    """Each fault that is put into the product is found by an input that is kept."""
    name, place, attribute, wrong = WRONG[fault]
    monkeypatch.setattr(place, attribute, wrong)
    with pytest.raises((AssertionError, UnclearError)):
        for data in seeds(name):
            target(name).check(data)
