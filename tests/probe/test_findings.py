"""Each finding of `epochgate probe`, shown by a server that has just this fault."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epochgate.probe import streams, survey
from epochgate.probe.client import Client
from epochgate.probe.findings import Check, Facts, Finding, Level
from epochgate.probe.meanings import MEANINGS
from epochgate.probe.policy import Recommendation, recommend
from epochgate.probe.report import Report
from epochgate.probe.run import run
from epochgate.probe.survey import ToolCall
from probe.scripted import Knobs, ScriptedServer

STREAMING = ToolCall("count", {"steps": 12, "pause": 0.05})


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of these tests answer at once, so that less patience will do."""
    monkeypatch.setattr(streams, "GRACE", 0.15)
    monkeypatch.setattr(streams, "SETTLE", 0.05)
    monkeypatch.setattr(streams, "_PATIENCE", 0.3)


async def probe(server: ScriptedServer, tool: ToolCall | None = None, seconds: float = 20.0) -> Report:
    async with Client(server.url, [("Authorization", "Bearer geheim")]) as client:
        findings, facts = await run(client, tool=tool, idle=0.1, seconds=seconds, progress=lambda *_: None)
    return Report(server.url, findings, facts, recommend(server.url, findings, facts))


def outcomes(report: Report) -> dict[Check, str]:
    return {finding.check: finding.outcome for finding in report.findings}


GOOD = {
    Check.PROTOCOL: "sessions",
    Check.SESSION: "unique",
    Check.MISSING: "refused",
    Check.UNKNOWN: "404",
    Check.DELETED: "404",
    Check.ANSWERS: "stream",
    Check.EVENT_IDS: "consecutive",
    Check.PRIMING: "primed",
    Check.EPOCH: "none",
    Check.REPLAY: "faithful",
    Check.RECONNECT: "continued",
    Check.UNKNOWN_CURSOR: "refused",
    Check.FOREIGN_CURSOR: "refused",
    Check.AFTER_DELETE: "refused",
    Check.SECOND_GET: "one",
    Check.IDLE: "alive",
}


async def test_a_good_server_is_safe() -> None:
    """No risk, exit status 0; the named tool was called twice and no other."""
    async with ScriptedServer(Knobs()).running() as server:
        report = await probe(server, STREAMING)
        assert outcomes(report) == GOOD
        assert report.status == 0
        assert server.tools_called == ["count", "count"]
        allowed = {"initialize", "notifications/initialized", "ping", "tools/list", "tools/call", ""}
        assert {method for _, method in server.requests} <= allowed
        assert server.live == {}, "all sessions were deleted"


async def test_no_tool_is_called_that_was_not_named() -> None:
    """Harmless: initialize, ping, tools/list, GET and DELETE are all that is sent."""
    async with ScriptedServer(Knobs()).running() as server:
        report = await probe(server)
        assert server.tools_called == []
        assert outcomes(report) == GOOD | {Check.RECONNECT: "not looked at"}
        assert report.as_text().endswith(" Not looked at, because no tool was named: reconnect in a call.")
        assert report.status == 0


@pytest.mark.parametrize(
    ("knobs", "check", "outcome"),
    [
        ({"session_ids": "repeated"}, Check.SESSION, "repeated"),
        ({"missing": "accepted"}, Check.MISSING, "accepted"),
        ({"loss": "400"}, Check.UNKNOWN, "400"),
        ({"loss": "400"}, Check.DELETED, "400"),
        ({"loss": "500"}, Check.UNKNOWN, "other"),
        ({"loss": "404-method"}, Check.UNKNOWN, "other"),
        ({"loss": "200-error"}, Check.DELETED, "other"),
        ({"loss": "401"}, Check.UNKNOWN, "forbidden"),
        ({"loss": "accepted"}, Check.UNKNOWN, "accepted"),
        ({"loss": "accepted"}, Check.DELETED, "accepted"),
        ({"deletable": False}, Check.DELETED, "not deletable"),
        ({"deletable": False}, Check.AFTER_DELETE, "not deletable"),
        ({"answers": "json"}, Check.ANSWERS, "json"),
        ({"answers": "json"}, Check.EVENT_IDS, "none seen"),
        ({"answers": "json"}, Check.REPLAY, "not looked at"),
        ({"answers": "json"}, Check.UNKNOWN_CURSOR, "not looked at"),
        ({"answers": "json"}, Check.FOREIGN_CURSOR, "not looked at"),
        ({"answers": "json"}, Check.AFTER_DELETE, "not looked at"),
        ({"answers": "mixed"}, Check.ANSWERS, "mixed"),
        ({"ids": "none"}, Check.EVENT_IDS, "none seen"),
        ({"ids": "increasing"}, Check.EVENT_IDS, "increasing"),
        ({"ids": "shared"}, Check.EVENT_IDS, "shared counter"),
        ({"ids": "opaque"}, Check.EVENT_IDS, "opaque"),
        ({"ids": "repeated"}, Check.EVENT_IDS, "repeated"),
        ({"priming": False}, Check.PRIMING, "plain"),
        ({"retry": True}, Check.PRIMING, "retry"),
        ({"epoch": "meta"}, Check.EPOCH, "present"),
        ({"epoch": "header"}, Check.EPOCH, "present"),
        ({"epoch": "partial"}, Check.EPOCH, "partial"),
        ({"epoch": "unstable"}, Check.EPOCH, "unstable"),
        ({"replay": "inclusive", "priming": False}, Check.REPLAY, "inclusive"),
        ({"replay": "lossy"}, Check.REPLAY, "lossy"),
        ({"replay": "shuffled"}, Check.REPLAY, "shuffled"),
        ({"replay": "altered"}, Check.REPLAY, "altered"),
        ({"replay": "rewritten"}, Check.REPLAY, "rewritten"),
        ({"replay": "silent"}, Check.REPLAY, "silent"),
        ({"replay": "empty"}, Check.REPLAY, "empty"),
        ({"replay": "refused"}, Check.REPLAY, "refused"),
        ({"unknown_cursor": "silent"}, Check.UNKNOWN_CURSOR, "silent"),
        ({"unknown_cursor": "silent"}, Check.FOREIGN_CURSOR, "nothing"),
        ({"unknown_cursor": "empty"}, Check.UNKNOWN_CURSOR, "empty"),
        ({"unknown_cursor": "replayed"}, Check.UNKNOWN_CURSOR, "replayed"),
        ({"scoped": False}, Check.FOREIGN_CURSOR, "leak"),
        ({"scoped": False, "outlives": True}, Check.AFTER_DELETE, "outlives"),
        ({"loss": "accepted", "outlives": True}, Check.AFTER_DELETE, "outlives"),
        ({"loss": "accepted", "unknown_cursor": "silent"}, Check.AFTER_DELETE, "granted"),
        ({"second_get": "takeover"}, Check.SECOND_GET, "takeover"),
        ({"second_get": "several"}, Check.SECOND_GET, "several"),
        ({"second_get": "none"}, Check.SECOND_GET, "none"),
        ({"second_get": "ends"}, Check.IDLE, "alive"),
        ({"sessions": 1}, Check.SESSION, "not found out"),
        ({"sessions": 2}, Check.DELETED, "not found out"),
        ({"sessions": 2}, Check.IDLE, "not found out"),
        ({"forgets": True}, Check.IDLE, "lost"),
    ],
)
async def test_a_fault_is_found(knobs: dict[str, Any], check: Check, outcome: str) -> None:
    """Sessions, ids, tokens, replays, cursors: one knob, one finding, and the exit status that it earns."""
    async with ScriptedServer(Knobs(**knobs)).running() as server:
        report = await probe(server)
    found = outcomes(report)
    assert found[check] == outcome
    level = MEANINGS[check, outcome].level
    if level is Level.RISK:
        assert report.status == 1
    if level is Level.UNKNOWN:
        assert report.status == 2


@pytest.mark.parametrize(
    ("knobs", "tool", "check", "outcome"),
    [
        ({"reconnect": "hangs"}, STREAMING, Check.RECONNECT, "hangs"),
        ({"reconnect": "refused"}, STREAMING, Check.RECONNECT, "refused"),
        ({"reconnect": "busy"}, STREAMING, Check.RECONNECT, "continued"),
        ({"reconnect": "repeated"}, STREAMING, Check.RECONNECT, "repeated"),
        ({"reconnect": "lossy"}, STREAMING, Check.RECONNECT, "lossy"),
        ({"closes": True}, STREAMING, Check.PRIMING, "polling"),
        ({"closes": True}, STREAMING, Check.RECONNECT, "continued"),
        ({}, ToolCall("count", {"steps": 0, "pause": 0}), Check.RECONNECT, "too short"),
        ({"ids": "none"}, STREAMING, Check.EVENT_IDS, "none"),
        ({"ids": "none"}, STREAMING, Check.RECONNECT, "does not apply"),
        ({"ids": "none"}, STREAMING, Check.REPLAY, "nothing to replay"),
        ({"ids": "none"}, STREAMING, Check.UNKNOWN_CURSOR, "does not apply"),
        ({"ids": "none"}, STREAMING, Check.AFTER_DELETE, "does not apply"),
        ({}, ToolCall("broken", {}), Check.ANSWERS, "failed"),
    ],
)
async def test_a_fault_is_found_with_a_tool(knobs: dict[str, Any], tool: ToolCall, check: Check, outcome: str) -> None:
    """What shows only in a call that loses its connection."""
    async with ScriptedServer(Knobs(**knobs)).running() as server:
        report = await probe(server, tool)
    assert outcomes(report)[check] == outcome


async def test_a_stateless_server_needs_no_guard() -> None:
    """S3: exit status 0, and a policy that does not look."""
    async with ScriptedServer(Knobs(session_ids="none")).running() as server:
        report = await probe(server)
    assert outcomes(report)[Check.SESSION] == "stateless"
    assert report.status == 0
    assert policy(report)["mode"] == "bypass"


def policy(report: Report) -> dict[str, Any]:
    assert report.recommendation is not None
    configuration: Any = report.recommendation.configuration
    found: dict[str, Any] = configuration["policies"][0]
    return found


async def test_the_policy_follows_what_was_found() -> None:
    """Section 10: token sources, `overlap` for honest servers that poll, `increasing` for shared counters."""
    async with ScriptedServer(Knobs(epoch="meta", ids="shared")).running() as server:
        found = policy(await probe(server))
    assert found["mode"] == "observe"
    assert found["epoch"] == {"sources": [{"meta": "com.example/session_epoch"}]}
    assert found["resume"] == {"accept": ["connection", "epoch"], "unproven": "restart", "event_ids": "increasing"}
    async with ScriptedServer(Knobs(closes=True)).running() as server:
        found = policy(await probe(server, STREAMING))
    assert found["resume"]["accept"] == ["connection", "epoch", "overlap"]
    async with ScriptedServer(Knobs(closes=True, loss="accepted")).running() as server:
        report = await probe(server, STREAMING)
    assert policy(report)["resume"]["accept"] == ["connection", "epoch"]
    assert "no overlap" in report.as_text()
    assert "a lost session does not show" in report.as_text()
    assert "or add overlap to accept, if you are sure" in str(report.recommendation)
    knobs = Knobs(closes=True, scoped=False, outlives=True, replay="lossy", reconnect="lossy")
    async with ScriptedServer(knobs).running() as server:
        report = await probe(server, STREAMING)
    assert policy(report)["resume"]["accept"] == ["connection", "epoch"]
    assert report.recommendation is not None
    assert "its buffer may outlive the session and its replay is not what was sent" in report.recommendation.reasons[1]
    assert "To add overlap to accept would not help" in report.recommendation.reasons[1]
    async with ScriptedServer(Knobs(ids="none")).running() as server:
        report = await probe(server, STREAMING)
    assert policy(report)["mode"] == "observe"
    assert "there is nothing to guard" in report.as_text()


async def test_a_rewritten_replay_is_told_with_what_follows_from_it() -> None:
    """R7: such a replay is `replay_mismatch` where it covers delivered events, so `overlap` is not even advised."""
    async with ScriptedServer(Knobs(closes=True, replay="rewritten")).running() as server:
        report = await probe(server, STREAMING)
    assert policy(report)["resume"]["accept"] == ["connection", "epoch"]
    assert report.recommendation is not None
    assert "its replay is not what was sent" in report.recommendation.reasons[1]
    assert "To add overlap to accept would not help" in report.recommendation.reasons[1]
    async with ScriptedServer(Knobs(epoch="meta", replay="rewritten")).running() as server:
        report = await probe(server, STREAMING)
    assert report.recommendation is not None
    assert report.recommendation.reasons[-1].startswith("hold.time: keep it longer than clients need")


async def test_it_keeps_its_bound_of_time() -> None:
    """What was not reached is told as such, and the exit status says that it could not be told."""
    knobs = Knobs(replay="silent", unknown_cursor="silent")
    async with ScriptedServer(knobs).running() as server:
        begin = asyncio.get_running_loop().time()
        report = await probe(server, ToolCall("count", {"steps": 1000, "pause": 1}), seconds=1.0)
        assert asyncio.get_running_loop().time() - begin < 1.5
        assert server.live == {}, "the sessions were deleted within the bound"
    assert outcomes(report)[Check.ANSWERS] == "not found out"
    assert report.status == 2


async def test_secrets_stay_out_of_the_report() -> None:
    """L7: no session id, event id or credential is shown, nor what a server hides in its name."""
    async with ScriptedServer(Knobs(outlives=True, scoped=False)).running() as server:
        report = await probe(server, STREAMING)
        shown = report.as_text() + str(report.as_json())
        secrets = {"geheim", *(h["Mcp-Session-Id"] for h in server.headers if "Mcp-Session-Id" in h)}
        secrets |= {event_id for stream in server.streams for event_id, _ in stream.events}
        assert all("Bearer geheim" in headers.values() for headers in server.headers)
    assert not [secret for secret in secrets if secret in shown]
    assert "\x1b" not in shown


def test_every_outcome_has_a_meaning() -> None:
    """A newcomer reads the report alone: each risk and each gap says what follows."""
    for (check, outcome), meaning in MEANINGS.items():
        assert meaning.meaning.endswith((".", "!"))
        if meaning.level in (Level.RISK, Level.UNKNOWN):
            assert meaning.follows.endswith("."), f"{check}: {outcome}"


def test_the_report_is_readable() -> None:
    """Each finding with its level, what was seen, what it means; then the policy; then the sum."""
    findings = [Finding(Check.FOREIGN_CURSOR, "leak", "HTTP 200"), Finding(Check.ANSWERS, "failed", "1 by failed")]
    report = Report(
        "http://h/mcp",
        findings,
        Facts("demo 1"),
        Recommendation({"version": 1, "policies": [{"name": "p"}]}, ("because",)),
    )
    text = report.as_text()
    assert "[ risk  ] cursor of another session: leak" in text
    assert "This is a leak" in text
    assert "# because\nversion: 1\npolicies:\n- {name: p}\n" in text
    assert text.endswith("Risks: cursor of another session. Could not be told: answers.")
    assert report.status == 1


@pytest.mark.parametrize(
    "identifier",
    ["7", "_0", "702ad144-643e-4abc-9def-1234567890ab_1796092027052_cwftj3yr", "a/12", "YWJj:ZGVm:3", "deadbeef"],
)
def test_a_made_up_id_has_the_form_of_its_model(identifier: str) -> None:
    """An unknown cursor must fail for being unknown, not for its form."""
    made_up = survey.lookalike(identifier)
    assert made_up != identifier
    assert survey.form(made_up) == survey.form(identifier)


def test_what_the_server_chose_moves_no_terminal() -> None:
    """Ids, types and names of fields are shown by their form, which keeps what is no letter or digit."""
    seen = "form " + survey.form("a\x1b]0;x\x07\u202e7")
    finding = Finding(Check.EVENT_IDS, "consecutive", seen)
    shown = Report("http://a/mcp", [finding], Facts(), None).as_text()
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert "form <text>]<n>;<text><n>" in shown


async def test_a_version_that_cannot_be_a_header_field_is_no_answer() -> None:
    async with ScriptedServer(Knobs(version="2025-06-18\x1b")).running() as server:
        report = await probe(server, seconds=5.0)
    (finding,) = [finding for finding in report.findings if finding.check is Check.PROTOCOL]
    assert (finding.outcome, finding.seen) == ("none", "initialize was answered HTTP 200, application/json")
