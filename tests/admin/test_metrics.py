"""The names and the reference of the metrics (section 11)."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp

from admin.stage import Client, play_divergent, proxy
from epochgate.admin.metrics import FAMILIES, FROM_THE_START, write_reference
from epochgate.guard.policy import Proof
from epochgate.guard.verdict import Reason

DOCS = Path(__file__).parents[2] / "docs"
IDS = {"session", "fingerprint", "cursor", "event", "event_id", "client", "path", "url", "token"}


def test_the_reference_is_current():
    """`python -m epochgate.admin.metrics > docs/metrics.md` writes it."""
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == write_reference()


def test_names_follow_the_rules_of_prometheus():
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch(r"epochgate_[a-z]+(_[a-z]+)*", family.name)
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb)(_|$)", family.name)  # base units only
        assert family.text.endswith(".")
        assert not IDS & set(family.labels)
        for label in family.labels:
            assert re.fullmatch(r"[a-z]+", label)


def test_the_one_that_matters_has_the_labels_of_the_design():
    (resumes,) = [family for family in FAMILIES if family.name == "epochgate_resumes"]
    assert (resumes.counts, resumes.labels) == (True, ("policy", "verdict", "reason", "enforced"))


def test_every_reason_of_a_verdict_exists_from_the_start():
    fences_only = {Reason.SESSION_LOST, Reason.DELETED, Reason.FENCED_BY_OPERATOR}
    assert {Reason(reason) for _, reason in FROM_THE_START} == set(Reason) - fences_only
    assert {reason for kind, reason in FROM_THE_START if kind == "proven"} == set(Proof)


async def test_the_number_of_series_does_not_grow_with_the_traffic(server, tmp_path, http):
    async def series(gate) -> int:
        async with http.get(gate.admin + "/metrics") as answer:
            return sum(line.startswith("epochgate_") for line in (await answer.text()).splitlines())

    async with server.listening() as upstream, proxy(upstream, tmp_path) as gate:

        async def play(name: str) -> None:
            client = Client(http, gate.url, {"Authorization": f"Bearer {name}", "User-Agent": name})
            client.url = f"{gate.url}/{name}?{name}"
            await play_divergent(client, server)
            async with http.request(f"X{name}".upper(), client.url) as answer:  # no method that HTTP knows
                assert answer.status == 501

        await play("a")
        before = await series(gate)
        for name in "bcdefgh":
            await play(name)
        assert await series(gate) == before


async def test_the_page_passes_the_strict_parser(gate, client, server):
    """OpenMetrics forbids what the older format lets pass: a wrong suffix, two families of one name, mixed series."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    await play_divergent(client, server)
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with aiohttp.ClientSession() as http, http.get(gate.admin + "/metrics", headers=headers) as answer:
        families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    assert {family.name for family in FAMILIES} <= families.keys()
