"""Whole sessions of real SDKs: what a client sees through the proxy is what it sees without (T1-T8, R4)."""

from __future__ import annotations

import json

import pytest

from interop.conftest import Need
from interop.sessions import PAIRS, Document, Key

STEPS = [f"resume#{step} for ada" for step in range(1, 13)]

pytestmark = pytest.mark.slow


@pytest.fixture(params=PAIRS, ids="-".join)
def seen(
    request: pytest.FixtureRequest, need: Need, documents: dict[Key, Document | Exception]
) -> tuple[Document, Document]:
    """What one pair's client saw: directly and through the proxy."""
    pair: tuple[str, str] = request.param
    need(*pair)
    direct, proxied = documents[(*pair, False)], documents[(*pair, True)]
    if isinstance(direct, Exception):
        raise direct
    if isinstance(proxied, Exception):
        raise proxied
    return direct, proxied


def test_the_proxy_changes_nothing_that_a_client_sees(seen: tuple[Document, Document]) -> None:
    """T1-T8, R4: initialize, list, progress, requests to the client, cancellation, ping, a cut connection, DELETE."""
    direct, proxied = seen
    assert proxied == direct


def test_the_session_was_a_whole_one(seen: tuple[Document, Document]) -> None:
    """What is compared above is not two equal failures."""
    _, proxied = seen
    assert proxied["echo"] == "grüße, 世界"
    assert proxied["count"] == "stream: 5 steps for ada"
    assert [kind for kind, *_ in proxied["requests"]] == ["sampling", "elicitation"]
    assert json.loads(proxied["cancelled"]) == {"runs": 1, "cancelled": 1}
    assert proxied["announced"]
    assert proxied["terminated"] == 404


def test_a_cut_call_goes_on_from_the_held_stream(seen: tuple[Document, Document]) -> None:
    """R4: every step exactly once, in order, the right result, one execution."""
    _, proxied = seen
    assert proxied["resumed"] == "resume: 12 steps for ada"
    assert [message for _, _, message in proxied["resumedProgress"]] == STEPS
    assert json.loads(proxied["resumedRuns"])["runs"] == 1
