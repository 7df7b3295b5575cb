"""`epochgate probe` against real servers finds what was measured of them, and its policy does what it promises."""

from __future__ import annotations

import asyncio
import json
import pathlib
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
import yaml

from epochgate.probe.client import Client, Session, is_response, response_to
from interop.environments import UnavailableError, required
from interop.stage import process, proxy
from probe.real import REAL, Real, command, probed
from probe.table import PAGE, render, title

pytestmark = pytest.mark.slow

BY_NAME = {real.name: real for real in REAL}
COMMON = {
    "protocol": {"sessions"},
    "session id": {"unique"},
    "no session id": {"refused"},
    "answers": {"stream"},
    "event ids": {"opaque"},
    "epoch token": {"none"},
    "second GET": {"one"},
    "idle": {"alive"},
}
# Events of one millisecond come in a random order from one store, and another loses what falls into a reconnect.
MEASURED: dict[str, dict[str, set[str]]] = {
    "python1": {
        "unknown session": {"404"},
        "deleted session": {"404"},
        "priming and retry": {"primed"},
        "replay": {"faithful"},
        "reconnect in a call": {"continued", "lossy"},
        "unknown cursor": {"empty"},
        "cursor of another session": {"leak"},
        "resume after DELETE": {"outlives"},
    },
    "fastmcp": {
        "unknown session": {"404"},
        "deleted session": {"404"},
        "replay": {"rewritten"},
        "reconnect in a call": {"continued", "lossy"},
        "unknown cursor": {"empty"},
        "cursor of another session": {"nothing"},
        "resume after DELETE": {"refused"},
    },
    "typescript1": {
        "unknown session": {"404"},
        "deleted session": {"404"},
        "replay": {"faithful", "shuffled"},
        "unknown cursor": {"silent"},
        "cursor of another session": {"leak"},
        "resume after DELETE": {"outlives"},
    },
    "everything": {
        "unknown session": {"400"},
        "deleted session": {"400"},
        "replay": {"faithful"},
        "reconnect in a call": {"hangs"},
        "unknown cursor": {"silent"},
        "cursor of another session": {"nothing"},
        "resume after DELETE": {"refused"},
    },
    "typescript1-burst": {"replay": {"shuffled", "lossy"}},
    "python1-polling": {"priming and retry": {"polling"}, "reconnect in a call": {"continued", "lossy"}},
}
MEASURED["python2"] = MEASURED["python1"]


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any] | UnavailableError]:
    """Each real server probed once, several at a time; or why this machine cannot have it."""

    async def probe_all() -> dict[str, dict[str, Any] | UnavailableError]:
        found = await asyncio.gather(*(probed(real) for real in REAL), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, UnavailableError):
                raise each
        return dict(zip(BY_NAME, found, strict=True))  # type: ignore[arg-type]

    return asyncio.run(probe_all())


@pytest.fixture
def report(request: pytest.FixtureRequest, reports: dict[str, dict[str, Any] | UnavailableError]) -> dict[str, Any]:
    found = reports[request.param]
    if isinstance(found, UnavailableError):
        (pytest.fail if required() else pytest.skip)(str(found))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("name", "report"), [(name, name) for name in BY_NAME], indirect=["report"])
def test_what_is_found_is_what_was_measured(name: str, report: dict[str, Any]) -> None:
    """Loss shape, id form, replay, leak and buffer of each server, as the SDKs' behaviour was measured by hand."""
    outcomes = {finding["check"]: finding["outcome"] for finding in report["findings"]}
    wrong = {
        check: outcomes[check]
        for check, expected in (COMMON | MEASURED[name]).items()
        if outcomes[check] not in expected
    }
    assert wrong == {}
    assert report["status"] == 1


@pytest.mark.parametrize(("name", "report"), [(name, name) for name in BY_NAME], indirect=["report"])
def test_the_recommendation_is_a_valid_configuration(name: str, report: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Ready to paste: `epochgate check` accepts it. None of these is given `overlap`: buffers that outlive sessions."""
    path = tmp_path / "epochgate.yaml"
    path.write_text(yaml.safe_dump(report["recommended"]))
    done = subprocess.run(
        [sys.executable, "-m", "epochgate", "check", "--config", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["recommended"]["policies"][0]["resume"]["accept"] == ["connection", "epoch"]
    assert any("no overlap" in reason for reason in report["reasons"]) is (name == "python1-polling")


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_the_page_has_each_server_in_this_version(real: Real) -> None:
    """docs/servers.md is of these servers."""
    assert f"\n| {title(real)} |" in PAGE.read_text(), "write docs/servers.md anew: python -m probe.table"


@pytest.mark.parametrize("report", ["everything"], indirect=True)
def test_a_row_says_what_was_found(report: dict[str, Any]) -> None:
    row = "| 400 | `<uuid>`, opaque | faithful | hangs | silent | none | gone | `accept: [connection, epoch]` |"
    assert f"{title(BY_NAME['everything'])} {row}" in render({"everything": report})


async def tool(client: Client, session: Session, name: str, arguments: dict[str, Any]) -> str:
    message = client.request("tools/call", {"name": name, "arguments": arguments})
    result: Any = response_to(await client.ask(message, session=session.id), message["id"])["result"]
    text: str = result["content"][0]["text"]
    return text


async def cut_call(client: Client, session: Session, arguments: dict[str, Any]) -> tuple[object, str]:
    """Call `count`, and lose the connection after two events: the request's id, and the cursor."""
    message = client.request("tools/call")
    params = {"name": "count", "arguments": arguments, "_meta": {"progressToken": message["id"]}}
    async with client.send("POST", message | {"params": params}, session=session.id) as stream:
        assert await stream.read(10.0, lambda _: len(stream.messages) >= 2)
        return message["id"], stream.events[-1].id


@pytest.mark.parametrize(
    ("name", "report"),
    [(name, name) for name in ("python1", "python2", "typescript1", "python1-polling")],
    indirect=["report"],
)
async def test_healthy_traffic_passes_the_recommended_policy(name: str, report: dict[str, Any]) -> None:
    """A cut call goes on through the proxy, to the right result, and its tool is executed once.

    Where the server closes its streams, with the `overlap` that the report leaves to the operator.
    """
    real = BY_NAME[name]
    resume = report["recommended"]["policies"][0]["resume"]
    if real.flags:
        resume = resume | {"accept": [*resume["accept"], "overlap"]}
    arguments = {"label": "healthy", "steps": 12, "pause_ms": 100} | ({"close_at": 6} if real.flags else {})
    async with (
        process([*command(real.environment), *real.flags]) as line,
        proxy(int(line), resume) as port,
        Client(f"http://127.0.0.1:{port}/mcp") as client,
    ):
        session = await client.initialize()
        assert isinstance(session, Session)
        await tool(client, session, "remember", {"owner": "me"})
        request_id, cursor = await cut_call(client, session, arguments)
        answered = False
        for _ in range(3):
            async with client.send("GET", session=session.id, cursor=cursor) as stream:
                assert stream.status == 200
                answered = await stream.read(10.0, lambda event: is_response(event.message, request_id))
                cursor = stream.events[-1].id
            if answered:
                break
        assert answered
        assert b"12 steps for me" in stream.events[-1].data
        assert json.loads(await tool(client, session, "runs", {"label": "healthy"}))["runs"] == 1
        await client.end_sessions()


@pytest.mark.parametrize(
    ("name", "report"),
    [(name, name) for name in ("python1", "python2", "typescript1", "python1-polling")],
    indirect=["report"],
)
async def test_an_injected_fault_is_stopped_by_the_recommended_policy(name: str, report: dict[str, Any]) -> None:
    """The session is evicted and created anew under its id, its buffer survives: nothing of the new one is shown."""
    real = BY_NAME[name]
    resume = report["recommended"]["policies"][0]["resume"]
    async with (
        process([*command(real.environment), *real.flags]) as line,
        proxy(int(line), resume) as port,
        Client(f"http://127.0.0.1:{port}/mcp") as client,
    ):
        session = await client.initialize()
        assert isinstance(session, Session)
        await tool(client, session, "remember", {"owner": "me"})
        _, cursor = await cut_call(client, session, {"label": "evicted", "steps": 12, "pause_ms": 50})
        async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{int(line)}/control/evict") as done:
            assert done.status == 204
        shown = []
        for _ in range(4):
            async with client.send("GET", session=session.id, cursor=cursor) as stream:
                await stream.read(3.0)
            shown += [event.data for event in stream.events]
            cursor = stream.events[-1].id if stream.events else cursor
            if stream.status == 404:
                break
        assert stream.status == 404
        assert not [data for data in shown if b"nobody" in data]
        assert (await client.ping(session)).status == 404
