"""`epochgate probe` against real servers finds what was measured of them, and its policy does what it promises."""

from __future__ import annotations

import asyncio
import json
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import yaml

from epochgate.probe.client import Client, Event, Session, is_response, response_to
from interop.environments import UnavailableError, required
from interop.stage import proxy
from probe.gateway import Gateway
from probe.real import REAL, Real, probed, running
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
    "fastmcp-polling": {"priming and retry": {"polling"}, "replay": {"rewritten"}},
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


def each(*names: str) -> pytest.MarkDecorator:
    """The test with the report on each of these servers."""
    return pytest.mark.parametrize(("name", "report"), [(name, name) for name in names], indirect=["report"])


@each(*BY_NAME)
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


@each(*BY_NAME)
def test_the_recommendation_is_a_valid_configuration(name: str, report: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Ready to paste: `epochgate check` accepts it. None of these is given `overlap`: buffers that outlive sessions."""
    path = tmp_path / "epochgate.yaml"
    path.write_text(yaml.safe_dump(report["recommended"]))
    done = subprocess.run(
        [sys.executable, "-m", "epochgate", "check", "--config", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["recommended"]["policies"][0]["resume"]["accept"] == ["connection", "epoch"]
    assert any("no overlap" in reason for reason in report["reasons"]) is ("polling" in name)


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_the_page_has_each_server_in_this_version(real: Real) -> None:
    """docs/servers.md is of these servers."""
    assert f"\n| {title(real)} |" in PAGE.read_text(), "write docs/servers.md anew: python -m probe.table"


@pytest.mark.parametrize("report", ["everything"], indirect=True)
def test_a_row_says_what_was_found(report: dict[str, Any]) -> None:
    row = "| 400 | `<uuid>`, opaque | faithful | hangs | silent | none | gone | `accept: [connection, epoch]` |"
    assert f"{title(BY_NAME['everything'])} {row}" in render({"everything": report})


@dataclass(slots=True)
class Scene:
    """A server, a gateway that can lose its sessions, the proxy under the recommended policy, and a session."""

    real: Real
    gateway: Gateway
    client: Client
    direct: Client  # reaches the gateway without the proxy
    session: Session
    arguments: dict[str, Any]  # of the long call

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text that a tool answers."""
        message = self.client.request("tools/call", {"name": name, "arguments": arguments})
        result: Any = response_to(await self.client.ask(message, session=self.session.id), message["id"])["result"]
        text: str = result["content"][0]["text"]
        return text

    async def begin(self, client: Client) -> tuple[object, list[Event]]:
        """Begin the long call, and lose the connection after two events: the request's id, and what came."""
        message = client.request("tools/call")
        params = {"name": self.real.tool, "arguments": self.arguments, "_meta": {"progressToken": message["id"]}}
        async with client.send("POST", message | {"params": params}, session=self.session.id) as stream:
            assert await stream.read(10.0, lambda _: len(stream.messages) >= 2)
            return message["id"], stream.events

    async def come_back(
        self, client: Client, events: list[Event], until: Callable[[Event], bool]
    ) -> tuple[int, list[Event]]:
        """Resume behind these events, as clients do, until an event comes: the last status, and all that was shown."""
        shown: list[Event] = []
        for _ in range(4):
            cursor = next(event.id for event in reversed([*events, *shown]) if event.id)
            async with client.send("GET", session=self.session.id, cursor=cursor) as stream:
                done = await stream.read(5.0, until)
            shown += stream.events
            if done or stream.status == 404:
                break
        return stream.status, shown

    async def is_refused(self, client: Client) -> bool:
        """Whether the session is fenced, and a new one is granted and works."""
        fresh = await client.initialize()
        assert isinstance(fresh, Session)
        return (await client.ping(self.session)).status == 404 and (await client.ping(fresh)).status == 200


def answers(request_id: object) -> Callable[[Event], bool]:
    return lambda event: is_response(event.message, request_id)


def steps(events: list[Event]) -> list[int]:
    """The steps of the long call that the events tell of."""
    messages: list[Any] = [event.message for event in events]
    return [m["params"]["progress"] for m in messages if m and m.get("method") == "notifications/progress"]


@pytest.fixture
async def scene(name: str, report: dict[str, Any], accept: list[str]) -> AsyncIterator[Scene]:
    real = BY_NAME[name]
    arguments: dict[str, Any] = {"label": "a", "steps": 12, "pause_ms": 150}
    if real.flags:
        arguments["close_at"] = 6
    if real.environment == "everything":
        arguments = {"duration": 2, "steps": 12}
    resume = report["recommended"]["policies"][0]["resume"]
    async with (
        running(real) as server,
        Gateway(server, real.tool).listening() as gateway,
        proxy(gateway.port, resume | {"accept": resume["accept"] + accept}) as port,
        Client(gateway.url) as direct,
        Client(f"http://127.0.0.1:{port}/mcp") as client,
    ):
        session = await client.initialize()
        assert isinstance(session, Session)
        scene = Scene(real, gateway, client, direct, session, arguments)
        if real.environment != "everything":
            await scene.call("remember", {"owner": "me"})
        yield scene
        await client.end_sessions()


@pytest.fixture
def accept() -> list[str]:
    """What an operator accepts beside the recommended proofs."""
    return []


STEADY = ("python1", "python2", "fastmcp", "typescript1", "everything")


@each(*STEADY)
async def test_healthy_traffic_passes_the_recommended_policy(scene: Scene) -> None:
    """A cut call goes on through the proxy, each step once, to the right result, and its tool is executed once."""
    request_id, before = await scene.begin(scene.client)
    status, after = await scene.come_back(scene.client, before, answers(request_id))
    assert status == 200
    assert steps([*before, *after]) == [*range(1, 13)]
    assert is_response(after[-1].message, request_id)
    if scene.real.environment != "everything":
        assert b"12 steps for me" in after[-1].data
        assert json.loads(await scene.call("runs", {"label": "a"}))["runs"] == 1


@each("python1-polling")
@pytest.mark.parametrize("accept", [["overlap"]])
async def test_a_server_that_closes_streams_passes_with_overlap(scene: Scene) -> None:
    """What the report leaves to the operator: each reconnect is proven by the event before it, which comes again."""
    request_id, before = await scene.begin(scene.client)
    status, after = await scene.come_back(scene.client, before, answers(request_id))
    assert status == 200
    assert b"12 steps for me" in after[-1].data
    assert json.loads(await scene.call("runs", {"label": "a"}))["runs"] == 1


@each("fastmcp-polling")
@pytest.mark.parametrize("accept", [["overlap"], []])
async def test_where_replays_are_rewritten_overlap_does_not_help(scene: Scene, report: dict[str, Any]) -> None:
    """R7 compares bytes: the report says so, and such a server's call is started over at the close of its stream."""
    assert any("To add overlap to accept would not help" in reason for reason in report["reasons"])
    request_id, before = await scene.begin(scene.client)
    status, after = await scene.come_back(scene.client, before, answers(request_id))
    assert (status, steps([*before, *after])) == (404, [*range(1, 7)])
    assert await scene.is_refused(scene.client)


@each("python1", "python2", "typescript1", "python1-polling")
async def test_a_session_that_its_server_evicts_is_stopped(scene: Scene) -> None:
    """The server itself creates it anew under its id, its buffer survives: nothing of the new one is shown."""
    request_id, before = await scene.begin(scene.client)
    address = f"http://127.0.0.1:{scene.gateway.server}/control/evict"
    async with aiohttp.ClientSession() as http, http.post(address) as done:
        assert done.status == 204
    status, after = await scene.come_back(scene.client, before, answers(request_id))
    assert status == 404
    assert not [event for event in after if b"nobody" in event.data]
    assert await scene.is_refused(scene.client)


@each(*STEADY, "python1-polling", "fastmcp-polling")
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "direct"])
async def test_a_session_that_a_gateway_creates_anew_is_stopped(scene: Scene, guarded: bool) -> None:
    """The incident of section 1: step 3 from the buffer, then the new execution, to its result, in one stream.

    Without the proxy the splice shows: a result of another owner, or steps that begin again.
    """
    client = scene.client if guarded else scene.direct
    request_id, before = await scene.begin(client)
    await scene.gateway.recreate(scene.session.id or "", unseen=1)
    status, after = await scene.come_back(client, before, answers(request_id))
    if guarded:
        assert (status, after) == (404, [])
        assert await scene.is_refused(client)
    else:
        told = steps([*before, *after])
        assert (status, told[:3]) == (200, [1, 2, 3])
        assert b"12 steps for nobody" in after[-1].data or told[told.index(1, 1) :] == [*range(1, 13)]


@each(*STEADY)
async def test_a_server_that_was_replaced_is_told(scene: Scene) -> None:
    """The new one knows no session, and says so with 404 or 400: the client gets 404 in either case (N1)."""
    async with running(scene.real) as successor:
        request_id, before = await scene.begin(scene.client)
        scene.gateway.replace(successor)
        status, after = await scene.come_back(scene.client, before, answers(request_id))
        told = steps([*before, *after])
        assert status == 404
        assert told == [*range(1, len(told) + 1)], "what the proxy held until the end of the first is right"
        assert len(told) < 12
        assert await scene.is_refused(scene.client)
        await scene.client.end_sessions()
