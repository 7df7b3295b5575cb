"""An MCP server whose every promise can be broken by a knob."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

SSE = {"Content-Type": "text/event-stream"}


@dataclass
class Knobs:
    """How the server behaves. The defaults are what a good server does."""

    loss: str = "404"  # 404 | 404-method | 400 | 500 | 200-error | accepted | 401
    missing: str = "refused"  # refused | accepted
    deletable: bool = True
    session_ids: str = "unique"  # unique | repeated | none
    answers: str = "stream"  # stream | json | mixed
    ids: str = "consecutive"  # consecutive | increasing | opaque | shared | repeated | none
    replay: str = "faithful"  # faithful | inclusive | lossy | shuffled | altered | rewritten | silent | empty | refused
    unknown_cursor: str = "refused"  # refused | silent | empty | replayed
    scoped: bool = True
    outlives: bool = False
    epoch: str = "none"  # none | meta | header | partial | unstable
    priming: bool = True
    retry: bool = False
    closes: bool = False  # the tool's stream before its response
    reconnect: str = "continued"  # continued | hangs | refused | lossy | repeated | busy: of a call that is not done
    sessions: int = 1000  # more are refused
    second_get: str = "one"  # one | takeover | several | none | ends
    version: str = ""  # that it chooses; empty: the one that was asked for
    forgets: bool = False  # an idle session, after two requests


@dataclass
class Stream:
    session: str
    name: str
    events: list[tuple[str, str]] = field(default_factory=list)  # id, data
    done: bool = False
    grown: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedServer:
    """Serves on a free port of the loopback; `requests` is what was asked of it, `tools_called` the tools."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.url = ""
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.tools_called: list[str] = []
        self.live: dict[str, int] = {}
        self.streams: list[Stream] = []
        self.gets: dict[str, asyncio.Event] = {}
        self.counter = itertools.count(1)
        self.tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedServer]:
        runner = web.ServerRunner(web.Server(self.handle, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
        try:
            yield self
        finally:
            await runner.cleanup()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        message = json.loads(await request.read() or b"{}")
        self.requests.append((request.method, message.get("method", "")))
        self.headers.append(dict(request.headers))
        if message.get("method") == "initialize":
            return self.initialize(message)
        session = request.headers.get("Mcp-Session-Id")
        if self.knobs.session_ids != "none":
            if session is None:
                if self.knobs.missing == "refused":
                    return web.json_response({"error": {"code": -32000, "message": "no session"}}, status=400)
                session = "nobody"
            elif session not in self.live:
                if self.knobs.loss != "accepted":
                    return self.lost(message)
                self.live[session] = 0
        else:
            session = "all"
        self.live[session] = self.live.get(session, 0) + 1
        if request.method == "DELETE":
            return self.delete(session)
        if request.method == "GET":
            cursor = request.headers.get("Last-Event-ID")
            return await (self.resume(request, session, cursor) if cursor else self.standalone(request, session))
        if "id" not in message:
            return web.Response(status=202)
        if self.knobs.forgets and self.live[session] == 2:
            del self.live[session]
            return self.lost(message)
        return await self.answer(request, session, message)

    def initialize(self, message: dict[str, Any]) -> web.Response:
        if len(self.live) >= self.knobs.sessions:
            return web.Response(status=503)
        session = "the-one" if self.knobs.session_ids == "repeated" else str(uuid.uuid4())
        self.live[session] = 0
        version = self.knobs.version or message["params"]["protocolVersion"]
        result = {"protocolVersion": version, "serverInfo": {"name": "scripted\x1b[2J"}}
        if self.knobs.epoch in ("meta", "partial", "unstable"):
            result["_meta"] = {"com.example/session_epoch": 1}
        headers = self.stamp({} if self.knobs.session_ids == "none" else {"Mcp-Session-Id": session})
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result}, headers=headers)

    def stamp(self, headers: dict[str, str]) -> dict[str, str]:
        return headers | ({"Mcp-Session-Epoch": "1"} if self.knobs.epoch == "header" else {})

    def lost(self, message: dict[str, Any]) -> web.Response:
        error: dict[str, Any] = {"code": -32001, "message": "Session not found"}
        match self.knobs.loss:
            case "404":
                return web.json_response({"jsonrpc": "2.0", "error": error, "id": None}, status=404)
            case "404-method":
                return web.json_response({"error": {"code": -32601, "message": "no method"}}, status=404)
            case "400":
                return web.Response(text="Invalid or missing session ID", status=400)
            case "200-error":
                return web.json_response({"jsonrpc": "2.0", "error": error, "id": message.get("id")})
            case status:
                return web.Response(status=int(status))

    def delete(self, session: str) -> web.Response:
        if not self.knobs.deletable:
            return web.Response(status=405)
        del self.live[session]
        if not self.knobs.outlives:
            self.streams = [stream for stream in self.streams if stream.session != session]
        return web.Response(status=204)

    def event_id(self, stream: Stream) -> str:
        number = len(stream.events)
        match self.knobs.ids:
            case "consecutive":
                return f"{stream.name}_{number}"
            case "increasing":
                return f"{stream.name}_{number * 10}"
            case "shared":
                return str(next(self.counter))
            case "repeated":
                return "always"
            case "none":
                return ""
        return str(uuid.uuid4())

    def add(self, stream: Stream, message: dict[str, Any] | None) -> None:
        data = "" if message is None else json.dumps({"jsonrpc": "2.0"} | message)
        stream.events.append((self.event_id(stream), data))
        stream.grown.set()
        stream.grown = asyncio.Event()

    def meta(self, number: int) -> dict[str, Any]:
        epoch = {"com.example/session_epoch": 1}
        match self.knobs.epoch:
            case "meta":
                return {"_meta": epoch}
            case "partial":
                return {"_meta": epoch} if number % 2 else {}
            case "unstable":
                return {"_meta": {"com.example/session_epoch": next(self.counter)}}
        return {}

    async def answer(self, request: web.BaseRequest, session: str, message: dict[str, Any]) -> web.StreamResponse:
        result = {"id": message["id"], "result": self.meta(1)}
        if self.knobs.answers == "json" or (self.knobs.answers == "mixed" and message["method"] == "ping"):
            return web.json_response({"jsonrpc": "2.0"} | result, headers=self.stamp({}))
        stream = Stream(session, uuid.uuid4().hex)
        self.streams.append(stream)
        if self.knobs.priming:
            self.add(stream, None)
        if message["method"] == "tools/call":
            self.tools_called.append(message["params"]["name"])
            if message["params"]["name"] == "broken":
                result = {"id": message["id"], "error": {"code": -32602, "message": "no such tool"}}
                self.add(stream, result)
                stream.done = True
            else:
                task = asyncio.create_task(self.work(stream, message["params"]["arguments"], result))
                self.tasks.add(task)
        else:
            self.add(stream, {"method": "notifications/message", "params": {"of": stream.name} | self.meta(2)})
            self.add(stream, result)
            stream.done = True
        closes = self.knobs.closes and message["method"] == "tools/call"
        return await self.show(request, stream, 0, close_at=4 if closes else None)

    async def work(self, stream: Stream, arguments: dict[str, Any], result: dict[str, Any]) -> None:
        for number in range(arguments["steps"]):
            await asyncio.sleep(arguments["pause"])
            self.add(stream, {"method": "notifications/message", "params": {"n": number} | self.meta(number)})
        stream.done = True
        self.add(stream, result)

    async def show(
        self, request: web.BaseRequest, stream: Stream, begin: int, close_at: int | None = None, *, drop: bool = False
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=self.stamp(dict(SSE)))
        await response.prepare(request)
        at = begin
        stored = len(stream.events) if request.method == "GET" and self.knobs.replay == "rewritten" else 0
        while True:
            while at < len(stream.events):
                event_id, data = stream.events[at]
                if not (drop and at == begin):
                    await self.write(response, event_id, rewritten(data) if at < stored else data)
                at += 1
                if at == close_at:
                    return response
            if stream.done:
                return response
            await stream.grown.wait()

    async def write(self, response: web.StreamResponse, event_id: str, data: str) -> None:
        retry = "retry: 100\n" if self.knobs.retry else ""
        await response.write((f"id: {event_id}\n" if event_id else "").encode() + f"{retry}data: {data}\n\n".encode())

    async def resume(self, request: web.BaseRequest, session: str, cursor: str) -> web.StreamResponse:
        for stream in self.streams:
            ids = [event_id for event_id, _ in stream.events]
            if cursor in ids and (stream.session == session or not self.knobs.scoped):
                if not stream.done:
                    return await self.go_on(request, stream, ids.index(cursor))
                return await self.replay(request, stream, ids.index(cursor))
        match self.knobs.unknown_cursor:
            case "silent":
                return await self.quiet(request)
            case "empty":
                return await self.show(request, Stream(session, "", done=True), 0)
            case "replayed":
                return await self.show(request, self.streams[0], 0)
        return web.Response(status=400, text="no such event")

    async def go_on(self, request: web.BaseRequest, stream: Stream, at: int) -> web.StreamResponse:
        match self.knobs.reconnect:
            case "hangs":
                return await self.quiet(request)
            case "refused":
                return web.Response(status=400, text="no resume")
            case "busy":
                self.knobs.reconnect = "continued"
                return web.Response(status=409)
            case "repeated":
                return await self.show(request, stream, at - 1)
        return await self.show(request, stream, at + 1, drop=self.knobs.reconnect == "lossy")

    async def replay(self, request: web.BaseRequest, stream: Stream, at: int) -> web.StreamResponse:
        rest = stream.events[at + 1 :]
        copy = Stream(stream.session, stream.name, done=True)
        match self.knobs.replay:
            case "refused":
                return web.Response(status=400, text="this stream has ended")
            case "silent":
                return await self.quiet(request)
            case "empty":
                rest = []
            case "lossy":
                rest = rest[1:]
            case "shuffled":
                rest = rest[::-1]
            case "inclusive":
                rest = stream.events[max(at, 1) :] if at else stream.events[: len(stream.events)]
            case "altered":
                rest = [(event_id, json.dumps({"other": event_id})) for event_id, _ in rest]
        copy.events = rest
        return await self.show(request, copy, 0)

    async def quiet(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(b": quiet\n\n")
        await asyncio.Event().wait()
        return response

    async def standalone(self, request: web.BaseRequest, session: str) -> web.StreamResponse:
        if self.knobs.second_get == "none":
            return web.Response(status=405)
        former = self.gets.get(session)
        if former is not None and self.knobs.second_get == "one":
            return web.Response(status=409)
        if former is not None and self.knobs.second_get == "takeover":
            former.set()
        ended = self.gets[session] = asyncio.Event()
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(b": open\n\n")
        if self.knobs.second_get == "ends":
            return response
        try:
            await ended.wait()
        finally:
            if self.gets.get(session) is ended:
                del self.gets[session]
        return response


def rewritten(data: str) -> str:
    """The same message with its members in another order."""
    return data and json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"))
