"""Heads that came before, byte for byte: what was read from them and written for them is used again. Pure.

An agent sends the same head with each of its calls, and its server the same with each answer, but for the digits of
`Content-Length`. The parser has read such a head once, and the same bytes mean the same again. Only a message that is
here as a whole, in a read of its own, is taken this way; whatever differs in any byte is the parser's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from epochgate.relay.headers import Field, Framing, Head

if TYPE_CHECKING:
    from epochgate.relay.request import Request

MOST_HEADS = 1024  # of answers; with `Date` in them they change each second
LONGEST_HEAD = 4096  # bytes; a longer one is not kept
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
_LONGEST_DIGITS = 15
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")


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


def _head_in(data: bytes, fields: int) -> bytes | None:
    """The head that a message begins with, in which the parser found so many fields; None where its lines are odd."""
    end = data.find(b"\r\n\r\n") + 4
    if not 4 <= end <= LONGEST_HEAD:
        return None
    head = data[:end]
    return head if head.count(b"\n") == head.count(b"\r\n") == fields + 2 else None


def _with_length(fields: list[Field], at: int, digits: bytes) -> list[Field]:
    changed = fields.copy()
    changed[at] = (fields[at][0], digits)
    return changed


class KnownRequest:
    """The head of a request that came on this connection before, and how it is sent on."""

    __slots__ = ("_at", "_fields", "_first", "_form", "method", "names", "outgoing", "target")

    def __init__(self, request: Request, form: Form) -> None:
        self._form = form
        self._fields = request.fields
        self._first = request.first
        self._at = request.names.index(b"content-length")
        self.method = request.method
        self.target = request.target
        self.names = request.names
        self.outgoing: Form | None = None  # its head as it goes to the upstream, once it was written

    def fields(self, digits: bytes) -> tuple[list[Field], dict[bytes, bytes]]:
        """All fields, and the first of each name, with this length."""
        return _with_length(self._fields, self._at, digits), self._first | {b"content-length": digits}

    def split(self, data: bytes) -> tuple[bytes, bytes] | None:
        """The digits of the length and the body, where `data` is one whole request with this head; else None."""
        form = self._form
        if not data.startswith(form.before):
            return None
        begin = len(form.before)
        end = data.find(b"\r", begin, begin + _LONGEST_DIGITS + 1)
        digits = data[begin:end]
        body = end + len(form.after)
        if end < 0 or not digits.isdigit() or not data.startswith(form.after, end) or len(data) - body != int(digits):
            return None
        return digits, data[body:]


def known_request(data: bytes, request: Request) -> KnownRequest | None:
    """What to keep of a request that the parser found at the start of `data`; None where it is not plain enough."""
    if request.names.count(b"content-length") != 1 or not _NOT_PLAIN.isdisjoint(request.names):
        return None
    head = _head_in(data, len(request.fields))
    form = None if head is None else form_of(head)
    return None if form is None else KnownRequest(request, form)


# A request with one of these is not just one message like the one before.
_NOT_PLAIN = frozenset({b"connection", b"expect", b"transfer-encoding", b"upgrade"})


class KnownAnswers:
    """The heads of answers that came before, by their bytes without the digits of the length."""

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[Head, int, Form | None]] = {}

    def split(self, data: bytes) -> tuple[Head, bytes] | None:
        """The head and the body, where `data` is one whole answer with a head that is known; else None."""
        begin = data.find(b"\r\n\r\n") + 4
        if not 4 <= begin <= LONGEST_HEAD:
            return None
        raw = data[:begin]
        found = _LENGTH.search(raw)
        known = self._heads.get(raw if found is None else raw[: found.start(1)] + raw[found.end(1) :])
        if known is None:
            return None
        head, at, form = known
        if found is None or form is None:
            body = _chunked_body(data, begin)
            return None if body is None else (head.again(fields=head.fields, first=head.first, lines=head.lines), body)
        digits = found[1]
        if len(data) - begin != int(digits):
            return None
        again = head.again(
            fields=_with_length(head.fields, at, digits),
            first=head.first | {b"content-length": digits},
            lines=form.with_length(digits),
        )
        return again, data[begin:]

    def keep(self, data: bytes, head: Head, fields: int) -> None:
        """Keep the head of an answer that the parser found to be the whole of `data`, in which it found `fields`."""
        raw = _head_in(data, fields)
        if raw is None:
            return
        found = _LENGTH.search(raw)
        at, form = -1, None
        if found is not None:
            names = [name.lower() for name, _ in head.fields]
            form = form_of(head.lines)
            if head.framing is not Framing.SIZED or form is None or names.count(b"content-length") != 1:
                return
            raw = raw[: found.start(1)] + raw[found.end(1) :]
            at = names.index(b"content-length")
        elif head.framing is not Framing.CHUNKED:
            return
        if len(self._heads) >= MOST_HEADS:
            self._heads.clear()
        self._heads[raw] = head, at, form


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
