"""HTTP/1.1 messages read by the letter of RFC 9110 and 9112, with none of the tolerances that they allow.

It shares no code with the proxy. What it cannot read, two servers could read differently. `tolerant` are two readings
that nobody makes anything else of, and that the proxy's parser allows: line ends in front of a request, and several
spaces behind its method. What the proxy writes has neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Field = tuple[bytes, bytes]

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(%b) ([\x21-\x7e]+) HTTP/1\.([01])\Z" % _TOKEN)
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9]) ([\t\x20-\x7e\x80-\xff]*)\Z")
_FIELD = re.compile(
    rb"(%b):[ \t]*((?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?)[ \t]*\Z" % _TOKEN
)
_SPACES = re.compile(rb"\A(%b) +([\x21-\x7e]+) +(?=HTTP/)" % _TOKEN)
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
_CHUNK_LINE = re.compile(
    rb"0*([0-9A-Fa-f]{1,16})(?:[ \t]*;[ \t]*%b(?:[ \t]*=[ \t]*(?:%b|%b))?)*\Z" % (_TOKEN, _TOKEN, _QUOTED)
)


class UnclearError(Exception):
    """Not by the letter."""


@dataclass(frozen=True, slots=True)
class Message:
    """One whole message. `framing`: none | sized | chunked | close; `complete`: its end came as it should."""

    start: bytes
    fields: tuple[Field, ...]
    body: bytes
    framing: str
    trailers: tuple[Field, ...] = ()
    complete: bool = True

    @property
    def method(self) -> bytes:
        return self.start.split(b" ")[0]

    @property
    def target(self) -> bytes:
        return self.start.split(b" ")[1]

    @property
    def http11(self) -> bool:
        return b"HTTP/1.1" in (self.start[:8], self.start[-8:])

    @property
    def status(self) -> int:
        return int(self.start[9:12])

    @property
    def reason(self) -> bytes:
        return self.start[13:]

    def all(self, name: bytes) -> list[bytes]:
        return values(self.fields, name)


def values(fields: tuple[Field, ...], name: bytes) -> list[bytes]:
    """All values of a field."""
    return [value for field, value in fields if field.lower() == name]


def options(fields: tuple[Field, ...]) -> set[bytes]:
    """The lower-case members of all `Connection` fields."""
    return {member.strip(b" \t").lower() for value in values(fields, b"connection") for member in value.split(b",")} - {
        b""
    }


@dataclass(frozen=True, slots=True)
class Head:
    """A head, and where it ends."""

    start: bytes
    fields: tuple[Field, ...]
    end: int


def read_head(data: bytes, at: int = 0, *, is_request: bool, tolerant: bool = False) -> Head | None:
    """The head that begins at `at`; None where it is not all here. Raises UnclearError."""
    while tolerant and data[at : at + 1] in (b"\r", b"\n"):
        at += 1
    end = data.find(b"\r\n\r\n", at)
    if end < 0:
        return None
    start, *lines = data[at:end].split(b"\r\n")
    if tolerant:
        start = _SPACES.sub(rb"\1 \2 ", start)
    if not (_REQUEST_LINE if is_request else _STATUS_LINE).match(start):
        raise UnclearError(f"start line {start[:80]!r}")
    fields = []
    for line in lines:
        found = _FIELD.match(line)
        if found is None:
            raise UnclearError(f"field {line[:80]!r}")
        fields.append((found[1], found[2]))
    return Head(start, tuple(fields), end + 4)


def read_request(data: bytes, at: int = 0, *, tolerant: bool = False) -> tuple[Message, int] | None:
    """The whole request that begins at `at`, and where it ends; None where it is not all here. Raises UnclearError."""
    head = read_head(data, at, is_request=True, tolerant=tolerant)
    if head is None:
        return None
    if len(values(head.fields, b"host")) > 1:  # none is refused by most servers, and unclear to nobody
        raise UnclearError("two Host fields")
    framing, size = _announced(head)
    if framing == "chunked" and head.start.endswith(b"1.0"):
        raise UnclearError("chunked in HTTP/1.0")
    return _whole(head, framing, size, data)


def read_answer(data: bytes, at: int = 0, *, method: bytes, ended: bool) -> tuple[Message, int] | None:
    """The answer to a request with this method; `ended`: the connection did, and nothing more comes."""
    head = read_head(data, at, is_request=False)
    if head is None:
        return None
    status = int(head.start[9:12])
    framing, size = _announced(head)
    if status < 200 or status in (204, 304) or method == b"HEAD":
        framing = "none"
    elif framing == "none":
        framing = "close"
    if framing == "close":
        return (Message(head.start, head.fields, data[head.end :], framing), len(data)) if ended else None
    whole = _whole(head, framing, size, data)
    if whole is None and ended:
        body = data[head.end :] if framing == "sized" else _chunks(data, head.end)[0]
        return Message(head.start, head.fields, body, framing, complete=False), len(data)
    return whole


def _announced(head: Head) -> tuple[str, int]:
    codings, lengths = values(head.fields, b"transfer-encoding"), values(head.fields, b"content-length")
    if codings and lengths:
        raise UnclearError("Content-Length and Transfer-Encoding")
    if codings:
        if [coding.lower() for coding in codings] != [b"chunked"]:
            raise UnclearError(f"transfer coding {codings!r}")
        return "chunked", 0
    if not lengths:
        return "none", 0
    if len(lengths) > 1 or not re.fullmatch(rb"0*[0-9]{1,19}", lengths[0]):
        raise UnclearError(f"Content-Length {lengths!r}")
    return "sized", int(lengths[0])


def _whole(head: Head, framing: str, size: int, data: bytes) -> tuple[Message, int] | None:
    if framing != "chunked":
        end = head.end + (size if framing == "sized" else 0)
        return None if end > len(data) else (Message(head.start, head.fields, data[head.end : end], framing), end)
    body, trailers, at = _chunks(data, head.end)
    return None if at is None else (Message(head.start, head.fields, body, framing, tuple(trailers)), at)


def _chunks(data: bytes, at: int) -> tuple[bytes, list[Field], int | None]:
    """The chunks that begin at `at`: their bytes as far as they are here, the trailers, the end if it is here."""
    body = b""
    while (end := data.find(b"\r\n", at)) >= 0:
        line = _CHUNK_LINE.match(data[at:end])
        if line is None:
            raise UnclearError(f"chunk size {data[at:end][:80]!r}")
        size, at = int(line[1], 16), end + 2
        if size == 0:
            break
        body += data[at : at + size]
        after = data[at + size : at + size + 2]
        if not b"\r\n".startswith(after):
            raise UnclearError(f"after a chunk: {after!r}")
        if len(after) < 2:
            return body, [], None
        at += size + 2
    else:
        return body, [], None
    trailers: list[Field] = []
    while (end := data.find(b"\r\n", at)) > at:
        found = _FIELD.match(data[at:end])
        if found is None or found[1].lower() in (b"content-length", b"transfer-encoding"):
            raise UnclearError(f"trailer {data[at:end][:80]!r}")
        trailers.append((found[1], found[2]))
        at = end + 2
    return body, trailers, (at + 2 if end == at else None)


def read_requests(data: bytes, *, tolerant: bool = False) -> tuple[list[Message], bytes, UnclearError | None]:
    """All whole requests, what is left over, and what is wrong with it."""
    found, at = [], 0
    try:
        while (request := read_request(data, at, tolerant=tolerant)) is not None:
            found.append(request[0])
            at = request[1]
    except UnclearError as error:
        return found, data[at:], error
    return found, data[at:], None
