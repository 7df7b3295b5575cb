"""What the Python servers of both SDK lines share: the world behind the tools, the event store, the control paths.

The event store is the one of the SDK's own example: one for the whole server, kept by JSON-RPC request id, not by
session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import pathlib
import socket
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from mcp.server.streamable_http import EventMessage, EventStore

TOOLS: list[dict[str, Any]] = json.loads((pathlib.Path(__file__).parents[1] / "tools.json").read_text())


class MemoryEventStore(EventStore):
    """The SDK example's in-memory store: bare UUIDs, the last 100 events of each stream."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._streams: dict[str, deque[tuple[str, Any]]] = defaultdict(lambda: deque(maxlen=100))
        self._stream_of: dict[str, str] = {}

    async def store_event(self, stream_id: str, message: Any) -> str:
        event_id = str(uuid.uuid4())
        self._streams[stream_id].append((event_id, message))
        self._stream_of[event_id] = stream_id
        return event_id

    async def replay_events_after(
        self, last_event_id: str, send_callback: Callable[[EventMessage], Awaitable[None]]
    ) -> str | None:
        stream_id = self._stream_of.get(last_event_id)
        if stream_id is None:
            return None
        seen = False
        for event_id, message in list(self._streams[stream_id]):
            if seen and message is not None:
                await send_callback(EventMessage(message, event_id))
            seen = seen or event_id == last_event_id
        return stream_id


@dataclass
class Job:
    """One label's work: its progress is kept, like a job table would; the session's state is not."""

    done: int = 0
    runs: int = 0
    cancelled: int = 0


@dataclass
class World:
    """All state of one server process."""

    stamp: str  # none | meta | header: where the session epoch is told
    store: MemoryEventStore = field(default_factory=MemoryEventStore)
    owners: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: 1))
    jobs: dict[str, Job] = field(default_factory=lambda: defaultdict(Job))

    def evict(self, session_id: str) -> None:
        """Drops the session's state; its next re-creation is a new epoch. Events stay in the store."""
        self.owners.pop(session_id, None)
        self.epochs[session_id] += 1

    def meta(self, epoch: int) -> dict[str, Any] | None:
        return {"session_epoch": epoch} if self.stamp == "meta" else None

    async def count(
        self,
        session_id: str,
        arguments: dict[str, Any],
        report: Callable[[int, str, dict[str, Any] | None], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
    ) -> tuple[str, dict[str, Any] | None]:
        """The long tool: its result names the owner, so that a splice of two executions is visible."""
        label, steps = arguments["label"], arguments["steps"]
        job, epoch = self.jobs[label], self.epochs[session_id]
        job.runs += 1
        meta = self.meta(epoch)
        try:
            while job.done < steps:
                await asyncio.sleep(arguments["pause_ms"] / 1000)
                if self.epochs[session_id] != epoch:
                    raise RuntimeError("the session was evicted")
                job.done += 1
                await report(job.done, f"{label}#{job.done} for {self.owners.get(session_id, 'nobody')}", meta)
                if job.done == arguments.get("close_at"):
                    await asyncio.sleep(0.05)  # the event is on its way
                    await close()
        except asyncio.CancelledError:
            job.cancelled += 1
            raise
        job.done = 0
        return f"{label}: {steps} steps for {self.owners.get(session_id, 'nobody')}", meta

    async def call(
        self, session_id: str, name: str, arguments: dict[str, Any], report: Any, close: Any
    ) -> tuple[str, dict[str, Any] | None]:
        """The tools that need nothing of the SDK."""
        if name == "count":
            return await self.count(session_id, arguments, report, close)
        if name == "echo":
            return arguments["text"], None
        if name == "remember":
            self.owners[session_id] = arguments["owner"]
            return "remembered", None
        if name == "runs":
            job = self.jobs[arguments["label"]]
            return json.dumps({"runs": job.runs, "cancelled": job.cancelled}), None
        raise ValueError(f"no such tool: {name}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stamp", choices=["none", "meta", "header"], default="none")
    parser.add_argument("--retry-ms", type=int)
    return parser.parse_args()


def serve(world: World, manager: Any, recreate: Callable[[Any, Any, str], Awaitable[None]]) -> None:
    """Runs the server on a free port, which it prints; `recreate` rebuilds an evicted session under its old id.

    Control paths: `/control/evict` evicts every session and re-creates each lazily at its next request;
    `/control/forget` empties the event store and leaves the sessions.
    """
    evicted: set[str] = set()

    async def evict() -> None:
        for session_id, transport in list(manager._server_instances.items()):
            evicted.add(session_id)
            world.evict(session_id)
            await manager._discard_session(session_id, transport)

    async def control(path: str, send: Any) -> None:
        if path == "/control/evict":
            await evict()
        elif path == "/control/forget":
            world.store.forget()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        if scope["path"].startswith("/control/"):
            await control(scope["path"], send)
            return
        session_id = dict(scope["headers"]).get(b"mcp-session-id", b"").decode()
        if session_id in evicted:
            evicted.discard(session_id)
            await recreate(manager, scope, session_id)

        async def stamped(message: Any) -> None:
            if world.stamp == "header" and message["type"] == "http.response.start":
                granted = dict(message["headers"]).get(b"mcp-session-id", b"").decode()
                if granted:
                    message["headers"] = [*message["headers"], (b"mcp-session-epoch", b"%d" % world.epochs[granted])]
            await send(message)

        await manager.handle_request(scope, receive, stamped)

    async def lifespan(receive: Any, send: Any) -> None:
        await receive()
        async with manager.run():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    logging.disable(logging.CRITICAL)  # the SDK logs a traceback whenever a session ends with its stream open
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])
