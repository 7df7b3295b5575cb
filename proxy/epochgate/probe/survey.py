"""What the questions share: the sessions and streams of one probe, and words for an answer that hold no secrets."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from epochgate.probe.client import Client, Event, Exchange, Session, decode, is_response
from epochgate.probe.findings import Facts

GRACE = 1.0  # seconds that a stream is given to show what it has
SETTLE = 0.3  # seconds for what should not come any more

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PARTS = re.compile(f"({_UUID.pattern})|([0-9]+(?![0-9A-Za-z+/=]))|([0-9A-Za-z+/=]+)")
_NUMBER = re.compile(r"(?<![0-9a-zA-Z])[0-9]{1,9}\Z")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The one tool that the operator allowed the probe to call."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The events of one POST stream, as they first came."""

    session: Session
    events: tuple[Event, ...]
    answered: bool

    @property
    def ids(self) -> list[str]:
        """The ids of its events, in order."""
        return [event.id for event in self.events if event.id]


@dataclass(slots=True)
class Survey:
    """One probe: what it may use, and what it has seen so far."""

    client: Client
    tool: ToolCall | None
    idle: float
    main: Session
    other: Session | None = None
    facts: Facts = field(default_factory=Facts)
    traffic: list[tuple[Session, Exchange]] = field(default_factory=list)
    streams: list[Recorded] = field(default_factory=list)
    call: Recorded | None = None  # the stream of the named tool, and how long it took
    call_seconds: float = 0.0

    async def ask(self, session: Session, message: Mapping[str, object], seconds: float = 4.0) -> Exchange:
        """POST a request in a session; the answer is kept for the questions about ids, tokens and replays."""
        exchange = await self.client.ask(message, session=session.id, version=session.version, seconds=seconds)
        self.traffic.append((session, exchange))
        if exchange.streaming:
            answered = any(is_response(event.message, message["id"]) for event in exchange.events)
            self.streams.append(Recorded(session, tuple(exchange.events), answered))
        return exchange

    def cursors(self, session: Session) -> list[Recorded]:
        """The streams of a session that begin with an id and have more events behind it."""
        return [s for s in self.streams if s.session is session and len(s.events) > 1 and s.events[0].id]

    def longest(self) -> Recorded | None:
        """The stream of the first session that has the most events, None if it has no cursor at all."""
        return max(self.cursors(self.main), key=lambda stream: len(stream.events), default=None)


def form(identifier: str) -> str:
    """The form of an id without its content, such as `<uuid>_<n>_<text>`."""
    return _PARTS.sub(lambda m: "<uuid>" if m[1] else "<n>" if m[2] else "<text>", identifier)


def lookalike(identifier: str) -> str:
    """An id of the same form that the server never issued."""
    number = _NUMBER.search(identifier)
    if number:
        head = identifier[: number.start()]
        return "".join(map(_other, head)) + str(int(number[0]) + 10_000_019)
    if _UUID.search(identifier):
        return _UUID.sub(lambda _: str(uuid.uuid4()), identifier)
    return "".join(map(_other, identifier))


def _other(character: str) -> str:
    for alphabet in (string.digits, "abcdef", "ABCDEF", string.ascii_lowercase, string.ascii_uppercase):
        if character in alphabet:
            return secrets.choice(alphabet)
    return character


def describe(exchange: Exchange) -> str:
    """A short answer in words: status, type, JSON-RPC error and its id. Free text is left out: it may hold secrets."""
    parts = [f"HTTP {exchange.status}"]
    if exchange.response.headers.get("Content-Type"):
        parts.append(exchange.response.content_type)
    for message in [decode(exchange.body), *(event.message for event in exchange.events)]:
        error = message.get("error") if isinstance(message, dict) else None
        if isinstance(message, dict) and isinstance(error, dict):
            parts.append(f"JSON-RPC error {error.get('code')!r:.20}")
            parts.append(
                "no id member" if "id" not in message else "id null" if message["id"] is None else "with an id"
            )
            break
    return ", ".join(parts)


def tokens(exchange: Exchange) -> Iterator[tuple[str, str, str]]:
    """Everything in an answer that looks like an epoch token: (`header` or `meta`, name or key, value as text)."""
    for name, value in exchange.headers.items():
        if "epoch" in name.lower():
            yield "header", name, value
    for message in [exchange.json, *(event.message for event in exchange.events)]:
        yield from meta_tokens(message)


def meta_tokens(message: object) -> Iterator[tuple[str, str, str]]:
    """The same for one message (or a batch)."""
    for one in message if isinstance(message, list) else [message]:
        if isinstance(one, dict):
            for holder in (one, one.get("params"), one.get("result")):
                meta = holder.get("_meta") if isinstance(holder, dict) else None
                for key, value in meta.items() if isinstance(meta, dict) else ():
                    if "epoch" in key.rpartition("/")[2].lower() and type(value) in (int, str):
                        yield "meta", key, str(value)
