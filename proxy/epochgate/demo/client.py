"""An ordinary MCP client: it resumes a broken stream with `Last-Event-ID`, and starts over when its session is lost.

It looks at everything that the transport offers, and not at session epochs: the protocol does not ask it to.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import aiohttp
from aiohttp_sse_client.client import EventSource

PROTOCOL_VERSION = "2025-11-25"
RESUMES = 3  # how often one call is resumed
SESSIONS = 3  # how many sessions one call may use up
SILENCE = 10.0  # seconds


class SessionLostError(Exception):
    """A 404 to a request with a session id: the session is not found."""


class CallFailedError(Exception):
    """The call was answered with a JSON-RPC error. The argument is its `data.reason`, or else its message."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One HTTP request and the head of its response. `session` counts the client's sessions from 1."""

    method: str
    what: str
    session: int
    status: int
    content_type: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """One message of a stream. `id` is the event's, or empty if it had none; `resumed` tells that it came to a GET."""

    id: str
    message: Mapping[str, Any]
    session: int
    resumed: bool

    @property
    def epoch(self) -> int | None:
        """The server's epoch token, which the client itself does not look at."""
        body = self.message.get("params") or self.message.get("result") or {}
        epoch: int | None = body.get("_meta", {}).get("session_epoch")
        return epoch


class Client:
    """A client of one server, as an asynchronous context manager. It tells what it sees, as it comes."""

    def __init__(
        self, url: str, on_exchange: Callable[[Exchange], None], on_message: Callable[[Received], None]
    ) -> None:
        self._url = url
        self._on_exchange = on_exchange
        self._on_message = on_message
        self._session_id: str | None = None
        self._sessions = 0
        self._ids = itertools.count(1)
        self._cursor = ""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def call_tool(self, name: str) -> Mapping[str, Any]:
        """Call a tool and return its result.

        Raises CallFailedError for a JSON-RPC error, SessionLostError when one session after the other is lost, and
        aiohttp.ClientError when the stream cannot be resumed.
        """
        for _ in range(SESSIONS):
            try:
                if self._session_id is None:
                    await self._initialize()
                return await self._call_once(name)
            except SessionLostError:
                self._session_id = None
        raise SessionLostError

    async def _initialize(self) -> None:
        self._sessions += 1
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "capabilities": {},
            "clientInfo": {"name": "demo", "version": "1"},
        }
        async with await self._post("initialize", {"id": next(self._ids), "params": params}) as response:
            self._session_id = response.headers["Mcp-Session-Id"]
            await response.read()
        async with await self._post("notifications/initialized", {}):
            pass

    async def _post(self, method: str, rest: Mapping[str, Any]) -> aiohttp.ClientResponse:
        body = {"jsonrpc": "2.0", "method": method, **rest}
        return await self._http.post(self._url, json=body, headers=self._headers(), middlewares=[self._watch(method)])

    def _headers(self) -> dict[str, str]:
        if self._session_id is None:
            return {}
        return {"Mcp-Session-Id": self._session_id, "MCP-Protocol-Version": PROTOCOL_VERSION}

    async def _call_once(self, name: str) -> Mapping[str, Any]:
        call = next(self._ids)
        params = {"name": name, "arguments": {}, "_meta": {"progressToken": call}}
        body = {"jsonrpc": "2.0", "id": call, "method": "tools/call", "params": params}
        self._cursor = ""
        try:
            return await self._read(call, "POST", "tools/call", body=body)
        except aiohttp.ClientError:
            if not self._cursor:
                raise
        for left in reversed(range(RESUMES)):
            try:
                return await self._read(call, "GET", f"Last-Event-ID: {self._cursor}", cursor=self._cursor)
            except aiohttp.ClientError:
                if not left:
                    raise
        raise AssertionError  # the last round returns or raises

    async def _read(
        self, call: int, method: str, what: str, *, body: Mapping[str, Any] | None = None, cursor: str = ""
    ) -> Mapping[str, Any]:
        headers = self._headers()
        if cursor:
            headers["Last-Event-ID"] = cursor
        source = EventSource(
            self._url,
            option={"method": method},
            max_connect_retry=0,
            session=self._http,
            on_error=_give_up,
            headers=headers,
            json=body,
            middlewares=[self._watch(what)],
        )
        async with source:
            async for event in source:
                if (result := self._take(event.last_event_id, event.data, call, resumed=bool(cursor))) is not None:
                    return result
        raise AssertionError  # only a 204 ends the loop, and that is not an event stream

    def _take(self, event_id: str, data: str, call: int, *, resumed: bool) -> Mapping[str, Any] | None:
        """Note a message; return the result if it is the call's response."""
        message = json.loads(data)
        own_id = "" if event_id == self._cursor else event_id  # the reader repeats the last id for an event without one
        self._cursor = event_id
        self._on_message(Received(own_id, message, self._sessions, resumed))
        if message.get("id") != call:
            return None
        if "error" in message:
            raise CallFailedError(message["error"].get("data", {}).get("reason") or message["error"]["message"])
        result: Mapping[str, Any] = message["result"]
        return result

    def _watch(self, what: str) -> aiohttp.ClientMiddlewareType:
        """A middleware for one request: asks for both content types, tells the exchange, raises for an error status."""

        async def watch(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            if request.method == "POST":
                request.headers["Accept"] = "application/json, text/event-stream"
            response = await handler(request)
            lost = response.status == 404 and self._session_id is not None
            reason = _reason(await response.text()) if lost else ""
            kind = response.headers.get("Content-Type", "").partition(";")[0]
            self._on_exchange(Exchange(request.method, what, self._sessions, response.status, kind, reason))
            if lost:
                raise SessionLostError
            response.raise_for_status()
            return response

        return watch


def _reason(body: str) -> str:
    """The `data.reason` of a JSON-RPC error, or nothing."""
    try:
        reason: str = json.loads(body)["error"]["data"]["reason"]
    except (ValueError, LookupError, TypeError):
        return ""
    return reason


def _give_up() -> NoReturn:
    """Instead of the reader's own reconnecting, which would send a POST again."""
    raise aiohttp.ClientPayloadError("the stream ended before the response")
