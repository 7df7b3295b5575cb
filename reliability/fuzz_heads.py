"""The pure functions on header fields and targets, against plain readings of the same rules (T2, T3, R6).

The first byte of an input chooses a path prefix; the first line after it is a request target, the others are fields.
"""

from __future__ import annotations

import re
import urllib.parse

from epochgate.errors import BadRequestError
from epochgate.guard.policy import normalize_path
from epochgate.relay.headers import (
    HOP_BY_HOP,
    NEVER_NAMED,
    check_connection_options,
    chunk,
    connection_options,
    end_to_end,
    head,
    is_event_stream,
    is_json,
    lower_case,
    members_of,
    prefixed,
    values_of,
    without,
)
from reliability.strict import UnclearError, options, read_head

DICTIONARY = (
    "Connection", "close", "keep-alive", "TE", "Trailer", "Upgrade", "Transfer-Encoding", "Mcp-Session-Id", "Host",
    "Content-Type", "text/event-stream", "application/json", ";", ", ", "%2F", "%2e", "/..", "//", "http://", "?", "#",
    "\\x0d\\x0a", ": ",
)  # fmt: skip
PREFIXES = (b"", b"/base", b"/a/b")


def check(data: bytes) -> None:
    """Raises AssertionError where one of the functions is wrong about this input."""
    if not data:
        return
    target, *lines = data[1:].split(b"\r\n")
    _check_target(target, PREFIXES[data[0] % 3])
    fields = [(name, value) for name, colon, value in (line.partition(b":") for line in lines) if colon]
    names = [lower_case(name) for name, _ in fields]
    assert names == [name.lower() for name, _ in fields]
    _check_fields(fields, names)
    for _, value in fields:
        assert is_json(value) == (value.split(b";")[0].strip(b" \t").lower() == b"application/json")
    joined = b", ".join(value for name, value in fields if name.lower() == b"content-type")
    assert is_event_stream(fields) == (b"text/event-stream" in joined.lower())
    _check_written(fields)
    assert chunk(data) == b"%x\r\n" % len(data) + data + b"\r\n"


def _check_fields(fields: list[tuple[bytes, bytes]], names: list[bytes]) -> None:
    named = options(tuple(fields))
    assert connection_options(fields) == named
    dropped = named | HOP_BY_HOP
    assert end_to_end(fields, names) == [field for field in fields if field[0].lower() not in dropped]
    try:
        check_connection_options(frozenset(named), (b"cookie",))
    except BadRequestError:
        assert named & (NEVER_NAMED | {b"cookie"})
    else:
        assert not named & (NEVER_NAMED | {b"cookie"})
    for name in set(names):
        values = [value for field, value in fields if field.lower() == name]
        assert values_of(fields, name) == values
        joined = [part.strip(b" \t") for part in b",".join(values).split(b",")]
        assert members_of(fields, name) == [part for part in joined if part]
        assert without(fields, name) == [field for field in fields if field[0].lower() != name]


def _check_written(fields: list[tuple[bytes, bytes]]) -> None:
    """What the letter of the standard reads in a written head is what was written."""
    try:
        read = read_head(head(b"GET / HTTP/1.1", fields), is_request=True)
    except UnclearError:
        return  # such fields come out of no parser
    assert read is not None
    if not any(b"\r\n" in value for _, value in fields):
        assert list(read.fields) == [(name, value.strip(b" \t")) for name, value in fields]


def _check_target(target: bytes, prefix: bytes) -> None:
    made = prefixed(target, prefix)
    if not prefix or target == b"*":
        assert made == target
    elif target.startswith(b"/"):
        assert made == prefix + target
    else:
        assert made.startswith(target.split(b"://")[0])
        assert len(made) >= len(target)
    path = normalize_path(target)
    if not target.startswith(b"/") or any(byte > 126 for byte in target):
        return
    assert path.startswith("/")
    assert not re.search(r"//|/\.\.?(/|\Z)", path), path
    again = urllib.parse.quote(path, errors="surrogatepass").encode()
    assert normalize_path(again) == path
