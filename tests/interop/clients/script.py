"""What the Python clients of both SDK lines do: `session` shows all of the protocol, `fault` makes one call.

Usage: PYTHON CLIENT.py session|fault URL [PLAN]. The program prints one JSON document of everything that it saw.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcp.shared._httpx_utils import create_mcp_http_client

# Between two steps, so that no step falls on the moment of a resume, 1 s after a cut: the Python servers lose an event
# that comes between the replay and the live tail.
PAUSE_MS = 230
PATIENCE = 10.0  # s, for the call under fault
SHORT_PATIENCE = 5.0  # s, for what follows it


@dataclass
class Sight:
    """What reached the client outside of answers."""

    requests: list[Any] = field(default_factory=list)
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    session_id: str | None = None
    post_status: int | None = None

    async def read_head(self, response: Any) -> None:
        """A response hook of httpx: the session id and the status of the last POST."""
        self.session_id = response.headers.get("mcp-session-id", self.session_id)
        if response.request.method == "POST":
            self.post_status = response.status_code


class Client(Protocol):
    """One session of an SDK; the answers are plain JSON."""

    sight: Sight
    hello: dict[str, Any]

    async def list_tools(self) -> list[Any]: ...
    async def call(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        progress: Any = None,
        token: str | None = None,
        on_token: Any = None,
    ) -> Any: ...
    async def ping(self) -> Any: ...
    async def cancel(self, call: asyncio.Task[Any]) -> None: ...


def plain(model: Any) -> Any:
    """A model as it stands on the wire."""
    return model.model_dump(by_alias=True, mode="json", exclude_none=True)


async def post_ping(url: str, session_id: str | None) -> int:
    """The status of a ping on a session that was ended, past the SDK."""
    headers = {"mcp-session-id": session_id or "", "accept": "application/json, text/event-stream"}
    async with create_mcp_http_client() as http:
        return (await http.post(url, headers=headers, json={"jsonrpc": "2.0", "id": 99, "method": "ping"})).status_code


Open = Callable[[str], AbstractAsyncContextManager[Client]]


async def outcome(client: Client, answer: Awaitable[Any], patience: float) -> dict[str, Any]:
    """`{result}`, `{error: {code, message}}` or `{pending}`, and the time at which it fell."""
    found: dict[str, Any]
    try:
        async with asyncio.timeout(patience):
            found = {"result": await answer}
    except TimeoutError:
        found = {"pending": True}
    except Exception as error:
        found = {"error": {"code": getattr(getattr(error, "error", None), "code", None), "message": str(error)}}
    return found | {"at": time.time(), "status": client.sight.post_status}


async def counted(
    client: Client, arguments: dict[str, Any], **options: Any
) -> tuple[list[Any], asyncio.Event, asyncio.Task[Any]]:
    seen: list[Any] = []
    moving = asyncio.Event()

    async def progress(step: float, total: float | None, message: str | None) -> None:
        seen.append([step, total, message])
        if len(seen) == 2:
            moving.set()

    return seen, moving, asyncio.create_task(client.call("count", arguments, progress, **options))


async def run_session(open_client: Open, url: str) -> dict[str, Any]:
    async with open_client(url) as client:
        doc: dict[str, Any] = dict(client.hello)
        doc["session"] = client.sight.session_id is not None
        doc["tools"] = await client.list_tools()
        doc["echo"] = await client.call("echo", {"text": "grüße, 世界"})
        await client.call("remember", {"owner": "ada"})
        progress, _, call = await counted(client, {"label": "stream", "steps": 5, "pause_ms": 20})
        doc["count"] = await call
        doc["progress"] = progress
        doc["ask"] = await client.call("ask")
        doc["requests"] = client.sight.requests
        _, moving, call = await counted(client, {"label": "cancel", "steps": 50, "pause_ms": 50})
        await moving.wait()
        await client.cancel(call)
        done, _ = await asyncio.wait({call}, timeout=2)  # not every server answers a cancelled call
        call.cancel()
        doc["cancel"] = repr((await asyncio.gather(call, return_exceptions=True))[0]) if done else "no answer"
        await asyncio.sleep(0.3)
        doc["cancelled"] = await client.call("runs", {"label": "cancel"})
        doc["ping"] = await client.ping()
        await client.call("announce")
        async with asyncio.timeout(3):
            doc["announced"] = await client.sight.announced.wait()
        progress, _, call = await counted(client, {"label": "resume", "steps": 12, "pause_ms": PAUSE_MS})
        doc["resumed"] = await call
        doc["resumedProgress"] = progress
        doc["resumedRuns"] = await client.call("runs", {"label": "resume"})
    doc["terminated"] = await post_ping(url, client.sight.session_id)  # leaving the context sent the DELETE
    return doc


async def run_fault(open_client: Open, url: str, plan: dict[str, Any]) -> dict[str, Any]:
    doc: dict[str, Any] = {}
    try:
        async with open_client(url) as first:
            await first.call("remember", {"owner": "ada"})
            if plan.get("foreign"):
                token = await cursor_of(first)
                async with open_client(url) as second:
                    await second.call("echo", {"text": "mine"})
                    doc |= {"start": time.time(), "session": second.sight.session_id}
                    stolen = second.call("echo", {"text": "foreign"}, token=token)
                    doc["call"] = await outcome(second, stolen, PATIENCE)
                    await finish(doc, open_client, url, second, plan)
                return doc
            doc |= {"start": time.time(), "session": first.sight.session_id}
            arguments = {"label": "fault", "steps": plan.get("steps", 12), "pause_ms": PAUSE_MS}
            if "close_at" in plan:
                arguments["close_at"] = plan["close_at"]
            doc["progress"], _, call = await counted(first, arguments)
            doc["call"] = await outcome(first, call, PATIENCE)
            await finish(doc, open_client, url, first, plan)
    except BaseExceptionGroup as error:  # one SDK dies of an unexpected status
        doc["died"] = repr(error.exceptions[0])
        doc.setdefault("call", {"error": {"code": None, "message": "the client died"}, "at": time.time()})
    if "fresh" not in doc:
        await start_over(doc, open_client, url)
    return doc


async def cursor_of(client: Client) -> str:
    """The id of the first event of a call that went well."""
    tokens: list[str] = []

    async def on_token(value: str) -> None:
        tokens.append(value)

    _, _, call = await counted(client, {"label": "foreign", "steps": 3, "pause_ms": 20}, on_token=on_token)
    await call
    return tokens[0]


async def finish(doc: dict[str, Any], open_client: Open, url: str, client: Client, plan: dict[str, Any]) -> None:
    """What a host does next: a POST on the old session, then a new session; the old client lives on for a while."""
    client.sight.post_status = None
    doc["next"] = await outcome(client, client.call("echo", {"text": "next"}), SHORT_PATIENCE)
    await start_over(doc, open_client, url)
    await asyncio.sleep(max(0.0, doc["start"] + plan.get("linger", 0) - time.time()))


async def start_over(doc: dict[str, Any], open_client: Open, url: str) -> None:
    async with open_client(url) as fresh:
        doc["fresh"] = await outcome(fresh, fresh.call("echo", {"text": "fresh"}), SHORT_PATIENCE)
        runs = await outcome(fresh, fresh.call("runs", {"label": "fault"}), SHORT_PATIENCE)
        doc["runs"] = json.loads(runs["result"])["runs"] if "result" in runs else None


def main(open_client: Open) -> None:
    program, url, *plan = sys.argv[1:]
    if program == "session":
        doc = asyncio.run(run_session(open_client, url))
    else:
        doc = asyncio.run(run_fault(open_client, url, json.loads(plan[0])))
    print(json.dumps(doc))
