"""What the supervisor and a worker say to each other, over a pair of sockets that only the two have.

Its end is news, too: a worker that is gone, or for a worker that nobody supervises it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import msgspec

from epochgate.admin.snapshot import Snapshot
from epochgate.relay.telemetry import Decided
from epochgate.settings import Settings

_HEAD = 4  # bytes of a length before each message


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The first message to a worker. `port` is the one that `listen` came to."""

    version: str
    settings: bytes
    port: int


class Report(msgspec.Struct, tag=True, frozen=True):
    """What did you count? Answered with `Reported`. `sessions`: they are wanted, too."""

    sessions: bool


class ListSessions(msgspec.Struct, tag=True, frozen=True):
    """Which sessions are at hand? Answered with `Listed`. `state` and `policy` as for `/api/sessions`."""

    state: str | None
    policy: str | None
    limit: int


class ShowSessions(msgspec.Struct, tag=True, frozen=True):
    """How are these sessions? Answered with a view for each tag that is at hand."""

    tags: list[int]


class ShowSession(msgspec.Struct, tag=True, frozen=True):
    """How is this session? Answered with `Found`."""

    fingerprint: str


class Fence(msgspec.Struct, tag=True, frozen=True):
    """Fence this session. Answered with `Found`."""

    fingerprint: str


class Use(msgspec.Struct, tag=True, frozen=True):
    """Put these settings in force, as after a reload. Answered with what is wrong with them, or ""."""

    settings: bytes


class Drain(msgspec.Struct, tag=True, frozen=True):
    """End in an orderly way; both in s. Answered at once, with None."""

    grace: float
    window: float


Question = Report | ListSessions | ShowSessions | ShowSession | Fence | Use | Drain


class Asked(msgspec.Struct, tag=True, frozen=True):
    """A question to a worker."""

    number: int
    question: Question


class Accepting(msgspec.Struct, tag=True, frozen=True):
    """The worker accepts connections."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker cannot serve with these settings, and ends."""

    message: str


class Answered(msgspec.Struct, tag=True, frozen=True):
    """The answer to the question with this number, or the error that it came to."""

    number: int
    answer: msgspec.Raw
    error: str = ""


class Reported(msgspec.Struct, frozen=True):
    """`decided`: the verdicts since the last report. `known`, `fenced`: tags of sessions, 8 bytes each, if wanted."""

    snapshot: Snapshot
    decided: list[Decided]
    known: bytes | None = None
    fenced: bytes | None = None


class Listed(msgspec.Struct, frozen=True):
    """`tags` by state (under "" where none was asked for), 8 bytes each; when the `last` ones were active, and who."""

    tags: dict[str, bytes]
    last: list[tuple[float, int]]


class Found(msgspec.Struct, frozen=True):
    """`session` is None where it is not at hand. `gone`: why it could not be fenced."""

    session: dict[str, Any] | None = None
    gone: str = ""


class Channel:
    """One end. Messages arrive whole and in order, until one of both ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Channel:
        """The end that is `sock`."""
        return cls(*await asyncio.open_unix_connection(sock=sock))

    async def receive(self) -> bytes | None:
        """The next message, None at the end."""
        try:
            head = await self._reader.readexactly(_HEAD)
            return await self._reader.readexactly(int.from_bytes(head, "big"))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. The other may have gone; then nothing happens."""
        if not self._writer.is_closing():
            data = msgspec.msgpack.encode(message)
            self._writer.write(len(data).to_bytes(_HEAD, "big") + data)

    async def close(self) -> None:
        """Send what is left, and end."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def pack(settings: Settings) -> bytes:
    """Settings for `unpack`, the password of the store included."""
    data = settings.model_dump(mode="json")
    data["store"]["url"] = settings.store.url.text
    return msgspec.json.encode(data)


def unpack(data: bytes) -> Settings:
    """The settings that were packed."""
    return Settings.model_validate(msgspec.json.decode(data))
