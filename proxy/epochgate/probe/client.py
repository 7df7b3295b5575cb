"""The wire: a small MCP client on aiohttp that shows what a server sends and repairs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from epochgate import __version__
from epochgate.guard.sse import Framer, Kind

VERSION = "2025-11-25"  # the newest protocol version that has sessions
OLDER_VERSIONS = ("2025-06-18", "2025-03-26")
OWN_HEADERS = frozenset(
    {"accept", "accept-encoding", "content-length", "content-type", "host", "last-event-id", "mcp-protocol-version"}
    | {"mcp-session-id", "transfer-encoding", "connection"}
)
_HEAD_WAIT = 4.0  # seconds for the head of an answer; some servers never send one for a resume
_BODY_LIMIT = 4 << 20  # bytes of a JSON body, or of one SSE block, that are kept


class NoAnswerError(Exception):
    """The server gave no HTTP answer; the message says why, without secrets."""


@dataclass(frozen=True, slots=True)
class Event:
    """One SSE block with an id or data.

    `id` is its own one, empty where it has none; `message` is the decoded data, None where that is empty or no JSON.
    """

    id: str
    data: bytes
    message: object

    @property
    def priming(self) -> bool:
        """Whether it is a cursor without a message. Some servers replay one as an empty object."""
        return not self.data or self.message == {}


@dataclass(slots=True)
class Exchange:
    """One request and its answer. Events are collected as they are read."""

    status: int
    headers: CIMultiDictProxy[str]
    response: aiohttp.ClientResponse
    events: list[Event] = field(default_factory=list)
    body: bytes = b""
    retry: bool = False
    comments: int = 0
    ended: bool = False
    _framer: Framer = field(default_factory=lambda: Framer(keep_raw=_BODY_LIMIT, keep_data=_BODY_LIMIT))

    @property
    def streaming(self) -> bool:
        """Whether the answer is an event stream."""
        return self.status == 200 and self.response.content_type == "text/event-stream"

    @property
    def messages(self) -> list[Event]:
        """The events that are not priming events."""
        return [event for event in self.events if not event.priming]

    @property
    def json(self) -> object:
        """The body as JSON, None if it is none."""
        return decode(self.body)

    async def read(self, seconds: float, until: Callable[[Event], bool] = lambda _: False) -> bool:
        """Read events until one satisfies `until`, the answer ends or `seconds` pass. Returns whether one did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.ended:
                    try:
                        chunk = await self.response.content.readany()
                    except (aiohttp.ClientError, OSError):
                        chunk = b""
                    if not chunk:
                        self.ended = True
                    elif not self.streaming:
                        self.body = (self.body + chunk)[:_BODY_LIMIT]
                    elif any([until(event) for event in self._take(chunk)]):  # noqa: C419  all are taken
                        return True
        return False

    def _take(self, chunk: bytes) -> list[Event]:
        """Add what a chunk completes to the events, and return it."""
        taken = []
        for block in self._framer.feed(chunk):
            lines = (block.raw or b"").replace(b"\r", b"\n").split(b"\n")
            self.retry = self.retry or any(line.startswith(b"retry:") for line in lines)
            self.comments += sum(line.startswith(b":") for line in lines)
            if block.kind is not Kind.OTHER:
                data = block.data or b""
                own = block.id if block.own_id else None
                taken.append(Event((own or b"").decode(errors="replace"), data, decode(data)))
        self.events += taken
        return taken


@dataclass(slots=True)
class Session:
    """A session that the probe opened. `id` is None where the server issues none."""

    id: str | None
    version: str
    opening: Exchange
    result: Mapping[str, object]


@dataclass(slots=True)
class Client:
    """Talks to one MCP endpoint and ends the sessions that it opened. Use as an async context manager."""

    url: str
    headers: Sequence[tuple[str, str]] = ()
    _http: aiohttp.ClientSession = field(init=False)
    _next_id: int = field(default_factory=lambda: secrets.randbelow(1 << 30))
    _open: list[Session] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),  # no request is ever sent twice on a stale connection
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            max_line_size=65536,
            max_field_size=65536,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def end_sessions(self) -> None:
        """Delete what is still open, all at once."""
        sessions, self._open = self._open, []
        await asyncio.gather(*(self.delete(session) for session in sessions), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def send(
        self,
        method: str,
        message: Mapping[str, object] | None = None,
        *,
        session: str | None = None,
        version: str | None = VERSION,
        cursor: str | None = None,
    ) -> AsyncIterator[Exchange]:
        """Send one request; the connection is cut when the block is left.

        Raises:
            NoAnswerError: there is no connection, or no head came in time.
        """
        headers = CIMultiDict(self.headers)
        headers.setdefault("User-Agent", f"epochgate-probe/{__version__}")
        headers["Accept"] = "text/event-stream" if method == "GET" else "application/json, text/event-stream"
        headers["Accept-Encoding"] = "identity"
        for name, value in (("MCP-Protocol-Version", version), ("Mcp-Session-Id", session), ("Last-Event-ID", cursor)):
            if value is not None:
                headers[name] = value
        body = None if message is None else json.dumps(message).encode()
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with asyncio.timeout(_HEAD_WAIT):
                response = await self._http.request(
                    method,
                    self.url,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    skip_auto_headers=["Content-Type"],
                )
        except TimeoutError:
            raise NoAnswerError(f"no answer to {method} within {_HEAD_WAIT:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswerError(f"no answer to {method}: {type(error).__name__}") from error
        try:
            yield Exchange(response.status, response.headers, response)
        finally:
            response.close()

    def request(self, method: str, params: Mapping[str, object] | None = None) -> dict[str, object]:
        """A JSON-RPC request with an id that no other request of this run has."""
        self._next_id += 1
        message: dict[str, object] = {"jsonrpc": "2.0", "id": self._next_id, "method": method}
        return message if params is None else message | {"params": params}

    async def ask(
        self, message: Mapping[str, object], *, session: str | None, version: str | None = VERSION, seconds: float = 4.0
    ) -> Exchange:
        """POST a request and read its answer to the response, the end or the limit of time."""
        async with self.send("POST", message, session=session, version=version) as exchange:
            await exchange.read(seconds, lambda event: is_response(event.message, message["id"]))
            return exchange

    async def initialize(self, version: str = VERSION) -> Session | Exchange:
        """Open a session; returns the answer instead if it holds no InitializeResult."""
        message = self.request(
            "initialize",
            {
                "protocolVersion": version,
                "capabilities": {},
                "clientInfo": {"name": "epochgate-probe", "version": __version__},
            },
        )
        opening = await self.ask(message, session=None, version=None)
        result = response_to(opening, message["id"]).get("result")
        if not isinstance(result, dict):
            return opening
        chosen = result.get("protocolVersion")
        if (
            not isinstance(chosen, str) or not chosen.isascii() or not chosen.isprintable()
        ):  # it is to be a header field
            return opening
        session = Session(opening.headers.get("Mcp-Session-Id"), chosen, opening, result)
        if session.id is not None:
            self._open.append(session)
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        async with self.send("POST", note, session=session.id, version=session.version) as exchange:
            await exchange.read(1.0)
        return session

    async def ping(self, session: Session) -> Exchange:
        """Ask for a sign of life."""
        return await self.ask(self.request("ping"), session=session.id, version=session.version)

    async def delete(self, session: Session) -> int:
        """End a session; returns the status."""
        async with self.send("DELETE", session=session.id, version=session.version) as exchange:
            await exchange.read(1.0)
            if exchange.status < 300 and session in self._open:
                self._open.remove(session)
            return exchange.status


def decode(data: bytes) -> object:
    """JSON as Python values, None for what is no JSON."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value


def is_response(message: object, request_id: object) -> bool:
    """Whether a message (or one of a batch) answers the request."""
    messages = message if isinstance(message, list) else [message]
    return any(isinstance(m, dict) and m.get("id") == request_id and m.get("method") is None for m in messages)


def response_to(exchange: Exchange, request_id: object) -> dict[str, object]:
    """The response to a request, from a stream or a JSON body; empty if none came."""
    for message in [*(event.message for event in exchange.events), exchange.json]:
        for one in message if isinstance(message, list) else [message]:
            if isinstance(one, dict) and is_response(one, request_id):
                return one
    return {}
