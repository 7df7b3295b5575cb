"""The peek into JSON-RPC bodies and events against the standard library's reading of them (guard.mcp, guard.ordinary).

The first byte of an input chooses where tokens are and what is known, and whether the rest is the body as it is or the
choices by which one is grown: most bytes are no JSON, and most JSON is no message. Where the reference gives up (nested
too deep), the peek may say what it likes, as long as it says something.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from epochgate.guard.mcp import (
    Tokens,
    answers_nothing,
    carries_only,
    error_code,
    holds_initialize_result,
    method_of,
    read_answers,
    read_call,
    read_messages,
)
from epochgate.guard.ordinary import record_ordinary
from epochgate.guard.record import Limits, Origin, Session
from epochgate.guard.sse import Framer
from epochgate.guard.watch import Watch
from epochgate.settings import PolicySettings

DICTIONARY = (
    '"jsonrpc"', '"2.0"', '"method"', '"initialize"', '"params"', '"result"', '"error"', '"code"', '"id"', '"_meta"',
    '"session_epoch"', '"k"', '"protocolVersion"', "null", "true", "false", "NaN", "Infinity", "1e400", "-0", "1.0",
    "18446744073709551616", "\\\\u0069", "\\\\ud800", "\\\\/", "\\xef\\xbb\\xbf", "\\xff", "[", "{", "}", "]", ",", ":",
    '{"jsonrpc":"2.0","method":', '"_meta":{"session_epoch":"e"}', '{"id":1,"result":{}}',
)  # fmt: skip
POLICY = PolicySettings().compiled()
KEYS = ((), ("session_epoch",), ("session_epoch", "k"))
KNOWN = (None, "e", "1")
MOST_IDS = 1024  # of one POST are remembered (L5)
MOST_ID_BYTES = 64 * 1024
MOST_DIGITS = 4300
GROWN = 128

Id = int | float | str

NAMES = (
    '"id"', '"method"', '"params"', '"result"', '"error"', '"_meta"', '"session_epoch"', '"k"', '"protocolVersion"',
    '"code"', '"jsonrpc"', '"\\u0069d"', '"m\\u0065thod"', '"re\\u0073ult"', '"_m\\u0065ta"',
    '"session_\\u0065poch"', '""',
    '"err\tor"',
)  # fmt: skip
SCALARS = (
    "1", '"1"', '"e"', '"initialize"', '"initializ\\u0065"', '"tools/call"', '"tools\\/call"', "null", "true", "false",
    "NaN", "-Infinity", "1.0", "1e2", "-0", "0.1", "1E400", "18446744073709551616", "9" * 30, '""', '"\\ud800"',
    '"\u00e9"',
    '"\x7f"', '"a\nb"', '"\\u0000"', "-5", '"2.0"', "00", "'x'", "9" * 5000,
)  # fmt: skip
BLANKS = ("", " ", "\n", "\t\r")


class Number(str):
    """A number as it was written."""

    __slots__ = ()

    @property
    def value(self) -> int | float:
        plain = self.lstrip("-").isdigit() and len(self.lstrip("-")) <= MOST_DIGITS
        return int(self) if plain else float(self)


@dataclass(frozen=True, slots=True)
class Read:
    """What the standard library reads: the objects; None where it is no JSON."""

    objects: list[dict[str, object]] | None


def reference(body: bytes) -> Read:
    """All JSON objects of a body, as a lenient client reads it. Raises RecursionError."""
    text = body.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    try:
        decoded = json.loads(text, strict=False, parse_int=Number, parse_float=Number, parse_constant=Number)
    except ValueError:
        return Read(None)
    return Read([one for one in (decoded if isinstance(decoded, list) else [decoded]) if type(one) is dict])


def grow(choices: bytes) -> bytes:
    """A body in which each byte chooses the next piece: objects and arrays of what a message may have."""
    rest = iter(choices)

    def value(depth: int) -> str:
        choice = next(rest, 255)
        blank = BLANKS[choice % 4] if choice % 7 == 0 else ""
        if choice < 96 and depth < 6:
            members = [f"{NAMES[next(rest, 0) % len(NAMES)]}:{blank}{value(depth + 1)}" for _ in range(choice % 6)]
            return blank + "{" + ",".join(members) + blank + "}"
        if choice < 128 and depth < 6:
            return "[" + ",".join(value(depth + 1) for _ in range(choice % 4)) + "]" + blank
        return blank + SCALARS[choice % len(SCALARS)]

    return value(0).encode()


def is_ordinary(body: bytes, tokens: Tokens, known: str | None) -> bool:
    """Whether an event with this data is recorded without a closer look (guard.ordinary)."""
    session = Session(b"S", b"", known, Limits(1, 1), 0.0)
    watch = Watch(POLICY, session, (), session.open_stream(Origin.CALL))
    watch.tokens = tokens
    framer = Framer()
    framer.feed(b": here\n\n")
    return bool(record_ordinary(watch, framer, b"data: " + body + b"\n\n", 0.0))


def check(data: bytes) -> None:
    """Raises AssertionError where the peek is wrong about this input."""
    if not data:
        return
    keys, known, default = KEYS[data[0] % 3], KNOWN[data[0] // 3 % 3], KNOWN[data[0] // 9 % 3]
    body, tokens = grow(data[1:]) if data[0] >= GROWN else data[1:], Tokens(keys, default)
    call, messages, method = read_call(body), read_messages(body, tokens), method_of(body)
    only, ordinary = carries_only(body, tokens, known), is_ordinary(body, tokens, known)
    quiet, quick = answers_nothing(body), read_answers(body)
    code, opened = error_code(body), holds_initialize_result(body)
    try:
        read = reference(body)
        if b"\0" in body:  # a call may come in UTF-16 or UTF-32
            text = body.decode(json.detect_encoding(body), "replace")
            _check_call(call, reference(text.encode("utf-8", "replace")), None)
        else:
            _check_call(call, read, method)
    except RecursionError:
        return
    _check_messages(messages, read, tokens)
    found = _tokens(read, keys)
    if ordinary:
        assert not list(_answers(read)), body
    if only or ordinary:
        assert all(known in texts for texts in found), (body, known, found)
        assert default in (None, known)
        # What is read then says no more of the tokens.
        assert (() if quiet else quick.answers) == tuple(_answers(read)), body
    if read.objects is None:
        assert (code, opened) == (None, False)
    assert opened == any(
        type(result := one.get("result")) is dict and type(result.get("protocolVersion")) is str
        for one in read.objects or ()
    )


def _check_call(call: object, read: Read, method: str | None) -> None:
    if read.objects is None:
        assert (call.initialize, call.owes, call.readable) == (False, (), False)
        assert method is None
        return
    requests = [one for one in read.objects if type(one.get("method")) is str]
    initialize = any(one["method"] == "initialize" for one in requests)
    assert call.initialize == initialize, read
    ids = [_identifier(one) for one in requests]
    owes = [identifier for identifier in ids if identifier is not None]
    known = all(identifier is not None or one.get("id") is None for one, identifier in zip(requests, ids, strict=True))
    if len(owes) > MOST_IDS or sum(len(str(one)) for one in owes) > MOST_ID_BYTES:
        assert (call.owes, call.readable) == ((), False)
    else:
        assert list(call.owes) == owes, (call, owes)
        assert call.readable == known, (call, read)
    if method is not None:
        assert method == requests[0]["method"]


def _check_messages(messages: object, read: Read, tokens: Tokens) -> None:
    assert messages.readable
    assert list(messages.answers) == _answers(read), (messages, read)
    expected = _tokens(read, tokens.keys, every=True)
    found = set(messages.tokens)
    if not expected:
        assert found == {tokens.default}
    for texts in expected:
        assert found & (texts or {tokens.default}), (messages, texts)
    allowed = set().union(*expected) | {tokens.default}
    assert found <= allowed, (messages, expected)


def _answers(read: Read) -> list[Id]:
    answers = [
        _identifier(one)
        for one in read.objects or ()
        if ("result" in one or one.get("error") is not None) and type(one.get("method")) is not str
    ]
    return [identifier for identifier in answers if identifier is not None]


def _identifier(message: dict[str, object]) -> Id | None:
    """The id, None where there is none or it is none that JSON-RPC knows and JSON can say again."""
    value = message.get("id")
    if type(value) is Number:
        return value.value if abs(value.value) < float("inf") else None
    return value if type(value) is str and _is_text(value) else None


def _tokens(read: Read, keys: tuple[str, ...], *, every: bool = False) -> list[set[str]]:
    """For each message the texts that its token may be written as; messages without one only where asked for."""
    found = [_token(one, keys) for one in read.objects or ()]
    return found if every else [texts for texts in found if texts]


def _token(message: dict[str, object], keys: tuple[str, ...]) -> set[str]:
    for key in keys:
        for holder in (message.get("params"), message.get("result"), message):
            members = holder.get("_meta") if type(holder) is dict else None
            value = members.get(key) if type(members) is dict else None
            if type(value) is str and _is_text(value):
                if value:
                    return {value}
            elif value is not None:
                return _texts(value)
    return set()


def _texts(value: object) -> set[str]:
    if type(value) is Number:
        return {str(value), json.dumps(value.value)}
    return {json.dumps(_plain(value), separators=(",", ":"))}


def _plain(value: object) -> object:
    if type(value) is Number:
        return value.value
    if type(value) is list:
        return [_plain(one) for one in value]
    if type(value) is dict:
        return {name: _plain(one) for name, one in value.items()}
    return value


def _is_text(value: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in value)
