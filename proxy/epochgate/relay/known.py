"""Heads that came before, byte for byte: what was read from them and written for them is used again. Pure.

An agent sends the same head with each of its calls, and its server the same with each answer, but for the digits of
`Content-Length`. The parser has read such a head once, and the same bytes mean the same again. Only a message that is
here as a whole, in a read of its own, is taken this way; whatever differs in any byte is the parser's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from epochgate.guard.fingerprint import Fingerprints
from epochgate.relay.headers import Field, Framing, Head

if TYPE_CHECKING:
    from epochgate.relay.request import Request

MOST_ANSWERS = 1024  # heads; with `Date` in them they change each second
MOST_REQUESTS = 128  # heads of one connection: it may carry many sessions
MOST_IN_ALL = 2048  # heads of all connections
LONGEST_HEAD = 4096  # bytes; a longer one is not kept
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
# A request with one of these is not just one message like the one before.
_NOT_PLAIN = frozenset({b"connection", b"expect", b"transfer-encoding", b"upgrade"})


class Form:
    """The bytes of a head before the digits of its length, and those after them."""

    __slots__ = ("after", "before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before = before
        self.after = after

    def with_length(self, digits: bytes) -> bytes:
        """The head of a message with a body of this length."""
        return b"%b%b%b" % (self.before, digits, self.after)


def form_of(head: bytes) -> Form | None:
    """The form of a head, or of its lines, that has one `Content-Length`; None where this is written in an odd way."""
    found = _LENGTH.search(head)
    return None if found is None else Form(head[: found.start(1)], head[found.end(1) :])


class KnownRequest:
    """The head of a request that came before, and how it is sent on."""

    __slots__ = ("at", "caller", "fields", "first", "method", "names", "outgoing", "target")

    def __init__(self, request: Request) -> None:
        self.method = request.method  # not the request itself, which knows this: nothing here may need the collector
        self.target = request.target
        self.fields = request.fields
        self.names = request.names
        self.first = request.first
        self.at = request.names.index(b"content-length")
        self.outgoing: Form | None = None  # its head as it goes to the upstream, once it was written
        self.caller: tuple[Fingerprints, tuple[bytes, ...], bytes] | None = None  # of these fields the fingerprint


class Room:
    """How many heads of requests are kept by all connections."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0


class KnownRequests:
    """The heads of requests that came on one connection, by their bytes without the digits of the length.

    They hold credentials: what a connection has sent is forgotten with it (L7).
    """

    __slots__ = ("_heads", "_room")

    def __init__(self, room: Room) -> None:
        self._heads: dict[bytes, KnownRequest] = {}
        self._room = room

    def __len__(self) -> int:
        return len(self._heads)

    def split(self, data: bytes) -> tuple[KnownRequest, bytes, bytes] | None:
        """What is known of the head, the digits of the length, and the body of `data`, one whole request; else None."""
        key, digits, begin = _divide(data)
        known = self._heads.get(key)
        if known is None or not digits or len(data) - begin != int(digits):
            return None
        return known, digits, data[begin:]

    def keep(self, data: bytes, request: Request) -> None:
        """Keep the head of a request with a sized body that the parser found at the start of `data`, if it is plain."""
        if request.names.count(b"content-length") != 1 or not _NOT_PLAIN.isdisjoint(request.names):
            return
        key, digits, begin = _divide(data)
        if not digits or key in self._heads or not _is_plain(data[:begin], len(request.fields)):
            return
        if len(self._heads) >= MOST_REQUESTS:
            self.forget()
        if self._room.taken < MOST_IN_ALL:
            self._room.taken += 1
            request.known = self._heads[key] = KnownRequest(request)

    def forget(self) -> None:
        """Keep none of them any longer."""
        self._room.taken -= len(self._heads)
        self._heads.clear()


class KnownAnswers:
    """The heads of answers that came before, by their bytes without the digits of the length."""

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[Head, int, Form | None]] = {}

    def split(self, data: bytes) -> tuple[Head, bytes] | None:
        """The head and the body, where `data` is one whole answer with a head that is known; else None."""
        key, digits, begin = _divide(data)
        known = self._heads.get(key)
        if known is None:
            return None
        head, at, form = known
        if form is None:
            body = None if digits else _chunked_body(data, begin)
            return None if body is None else (head, body)
        if not digits or len(data) - begin != int(digits):
            return None
        again = head.again(
            fields=with_length(head.fields, at, digits),
            first=head.first | {b"content-length": digits},
            lines=form.with_length(digits),
        )
        return again, data[begin:]

    def keep(self, data: bytes, head: Head, fields: int) -> None:
        """Keep the head of an answer that the parser found at the start of `data`, in which it found `fields`."""
        key, digits, begin = _divide(data)
        if not begin or not _is_plain(data[:begin], fields):
            return
        at, form = -1, None
        if digits:
            names = [name.lower() for name, _ in head.fields]
            form = form_of(head.lines)
            if head.framing is not Framing.SIZED or form is None or names.count(b"content-length") != 1:
                return
            at = names.index(b"content-length")
        elif head.framing is not Framing.CHUNKED:
            return
        if len(self._heads) >= MOST_ANSWERS:
            self._heads.clear()
        self._heads[key] = head, at, form


def with_length(fields: list[Field], at: int, digits: bytes) -> list[Field]:
    """The fields, of which the one at this place is the length, with another length."""
    changed = fields.copy()
    changed[at] = (fields[at][0], digits)
    return changed


def _divide(data: bytes) -> tuple[bytes, bytes, int]:
    """The head that `data` begins with, without the digits of its length; these digits; where the body begins.

    All empty where the head is too long, or not all of it is here.
    """
    begin = data.find(b"\r\n\r\n", 0, LONGEST_HEAD) + 4
    if begin < 4:
        return b"", b"", 0
    head = data[:begin]
    found = _LENGTH.search(head)
    return (head, b"", begin) if found is None else (head[: found.start(1)] + head[found.end(1) :], found[1], begin)


def _is_plain(head: bytes, fields: int) -> bool:
    """Whether these bytes are a start line and one line for each of the fields that the parser found."""
    return head.count(b"\n") == head.count(b"\r\n") == fields + 2


def _chunked_body(data: bytes, at: int) -> bytes | None:
    """The body that begins here, where its last chunk is the end of `data`; None where it is not, or is odd."""
    pieces: list[bytes] = []
    while (size_line := _CHUNK.match(data, at)) is not None:
        begin = size_line.end()
        at = begin + int(size_line[1], 16)
        if at == begin:
            return b"".join(pieces) if data[begin:] == b"\r\n" else None
        pieces.append(data[begin:at])
        if not data.startswith(b"\r\n", at):
            return None
        at += 2
    return None
