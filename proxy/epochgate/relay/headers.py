"""Header fields between the two sides (T2): what is dropped, what is kept as it came, how a head is written. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum

from epochgate.errors import BadRequestError

Field = tuple[bytes, bytes]

HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
# A request that has one of these taken away by `Connection` would be judged with it and forwarded without it.
NEVER_NAMED = frozenset(
    {
        b"mcp-session-id", b"mcp-protocol-version", b"last-event-id", b"authorization", b"content-length",
        b"content-type", b"content-encoding", b"host",
    }
)  # fmt: skip
MAX_HEAD = 64 * 1024  # bytes of a message head, both ways
VIA = (b"Via", b"1.1 epochgate")


class Framing(Enum):
    """How the end of a body is told."""

    NONE = "none"
    SIZED = "sized"
    CHUNKED = "chunked"
    CLOSE = "close"  # the end of the connection


_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]").search


class Head:
    """The head of an answer: end-to-end fields as they came, and how the body is framed."""

    __slots__ = ("_is_stream", "_lines", "fields", "first", "framing", "reason", "status", "whole")

    def __init__(
        self, status: int, reason: bytes, fields: list[Field], first: dict[bytes, bytes], framing: Framing
    ) -> None:
        self.status = status
        self.reason = reason
        self.fields = fields
        self.first = first  # lower-case name -> first value of these: what the client does not get means nothing
        self.framing = framing
        self.whole = False  # all of the answer came with it, in one read
        self._lines = b""
        self._is_stream: bool | None = None

    def get(self, name: bytes) -> bytes | None:
        """The first value of the field with this lower-case name, without the spaces around it."""
        value = self.first.get(name)
        return None if value is None else value.strip(b" \t")

    @property
    def lines(self) -> bytes:
        """The status line and the fields, as they go to the client."""
        if not self._lines:
            self._lines = answer_lines(self.status, self.reason, self.fields)
        return self._lines

    @property
    def is_stream(self) -> bool:
        """Whether it is said that an event stream follows (R6)."""
        if self._is_stream is None:
            self._is_stream = is_event_stream(self.fields)
        return self._is_stream

    @property
    def may_be_stream(self) -> bool:
        """Whether a client that asked for a stream may read one: also a body of which nothing says what it is."""
        if not 200 <= self.status < 300 or self.framing is Framing.NONE:
            return False
        return self.is_stream or not (
            self.get(b"content-type")
            or self.status == 205
            or (self.framing is Framing.SIZED and not int(self.first[b"content-length"]))
        )

    def again(self, *, fields: list[Field], first: dict[bytes, bytes], lines: bytes) -> Head:
        """The head of another answer, which has the same status, reason and framing."""
        head = Head(self.status, self.reason, fields, first, self.framing)
        head._lines, head._is_stream = lines, self._is_stream
        return head


_LOWER: dict[bytes, bytes] = {}
_MOST_NAMES = 1024
_LONGEST_NAME = 64  # bytes; a peer may send names of 64 KiB


def lower_case(name: bytes) -> bytes:
    """The name of a field in lower case; the usual ones are remembered."""
    lower = _LOWER.get(name)
    if lower is None:
        lower = name.lower()
        if len(name) <= _LONGEST_NAME:
            if len(_LOWER) >= _MOST_NAMES:
                _LOWER.clear()  # a peer that makes names up does not spoil it for good
            _LOWER[name] = lower
    return lower


def connection_options(fields: Iterable[Field]) -> frozenset[bytes]:
    """The lower-case names in all `Connection` fields."""
    return frozenset(option.lower() for option in members_of(fields, b"connection"))


def check_connection_options(options: frozenset[bytes], credentials: Iterable[bytes]) -> None:
    """Refuse a request whose `Connection` names a field that it is judged by, such as one of these (T2)."""
    named = options & NEVER_NAMED.union(credentials)
    if named:
        raise BadRequestError(f"The Connection field names {min(named).decode()}, which is not a connection option")


def end_to_end(fields: Sequence[Field], names: Sequence[bytes]) -> list[Field]:
    """The fields that are passed on, as they came; `names` are theirs in lower case.

    The length of an answer stays even where `Connection` names it: without it nobody would know where the answer ends.
    """
    dropped: frozenset[bytes] = HOP_BY_HOP
    if b"connection" in names:
        dropped = dropped | (connection_options(fields) - {b"content-length"})
    return [field for field, name in zip(fields, names, strict=True) if name not in dropped]


def without(fields: Iterable[Field], *names: bytes) -> list[Field]:
    """The fields but for those with these lower-case names."""
    return [field for field in fields if field[0].lower() not in names]


def values_of(fields: Iterable[Field], name: bytes) -> list[bytes]:
    """All values of the field with this lower-case name, in order."""
    return [value for field, value in fields if field.lower() == name]


def members_of(fields: Iterable[Field], name: bytes) -> list[bytes]:
    """The members, without the empty ones, of all fields with this lower-case name, each a list with commas."""
    listed = [member.strip(b" \t") for value in values_of(fields, name) for member in value.split(b",")]
    return [member for member in listed if member]


def head(start: bytes, fields: Iterable[Field]) -> bytes:
    """The bytes of a message head."""
    return b"%b\r\n%b\r\n" % (start, b"".join([b"%b: %b\r\n" % field for field in fields]))


def answer_lines(status: int, reason: bytes, fields: Iterable[Field]) -> bytes:
    """The status line of an answer, and these fields."""
    return b"HTTP/1.1 %d %b\r\n%b" % (status, reason, b"".join([b"%b: %b\r\n" % field for field in fields]))


def chunk(data: bytes) -> bytes:
    """`data` as one chunk of the chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def prefixed(target: bytes, prefix: bytes) -> bytes:
    """The request target below the upstream's path prefix, else as it came (T3)."""
    if not prefix or target == b"*":
        return target
    if target.startswith(b"/"):
        return prefix + target
    scheme, _, rest = target.partition(b"://")  # absolute form
    end = next((at for at, byte in enumerate(rest) if byte in b"/?#"), len(rest))
    return b"%b://%b%b%b" % (scheme, rest[:end], prefix, rest[end:])


LAST_CHUNK = b"0\r\n\r\n"


def is_unclear(text: bytes) -> bool:
    """Whether a line of a head has control characters, at which some readers would end it."""
    return _CONTROL(text) is not None


def is_event_stream(fields: Iterable[Field]) -> bool:
    """Whether `text/event-stream` stands, in any case, in any of the `Content-Type` fields: so do clients look.

    Some join several of them, some only look for what they hope to find.
    """
    for name, value in fields:
        if len(name) == 12 and name.lower() == b"content-type" and b"text/event-stream" in value.lower():
            return True
    return False


def is_json(content_type: bytes | None) -> bool:
    """Whether a `Content-Type` is `application/json`."""
    return content_type is not None and content_type.partition(b";")[0].strip(b" \t").lower() == b"application/json"


# Here lines, fields and keys are the same as in UTF-8: each byte below 128 is its letter of ASCII, and no other is.
_LIKE_ASCII = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin1", b"windows-1252", b""})


def is_like_ascii(fields: Iterable[Field]) -> bool:
    """Whether a client that goes by the charset of a `Content-Type` reads what is meant: event streams are in UTF-8."""
    for name, value in fields:
        if len(name) == 12 and name.lower() == b"content-type" and b"charset" in value.lower():
            named = _CHARSET(value)
            if len(named) != value.lower().count(b"charset") or not _LIKE_ASCII.issuperset(
                charset.strip(b"'").lower() for charset in named
            ):
                return False
    return True


_CHARSET = re.compile(rb"charset\s*=\s*\"?([^\";,\s]*)", re.IGNORECASE).findall
# JSON in one of these looks like what it is: in ASCII, or by its NUL bytes.
_PLAIN_CHARSETS = frozenset(
    {
        b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"utf-16", b"utf-16le", b"utf-16be", b"utf-32",
        b"utf-32le", b"utf-32be",
    }
)  # fmt: skip


def has_plain_charset(fields: Iterable[Field]) -> bool:
    """Whether what the `Content-Type` says of the letters of a JSON body is nothing that only some servers can read."""
    charsets = _CHARSET(b";".join(values_of(fields, b"content-type")))
    return _PLAIN_CHARSETS.issuperset(charset.lower() for charset in charsets)
