"""What a request or a message is: its era, whether it initializes, what it asks for, what it answers, its epoch token.

Everything is read from a copy, twice where need be: quickly and strictly, then as the most lenient client would read it
(broken UTF-8, lone surrogates, `NaN`, raw control characters). What is no JSON at all says nothing to anybody; what is
nested too deep is unreadable, which is not the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Sequence

import msgspec

from epochgate.guard.policy import HeaderSource, MetaSource, Source

RpcId = int | float | str  # compared by value: 5.0 answers 5
Headers = Sequence[tuple[bytes, bytes]]

SESSION_ID = b"mcp-session-id"
PROTOCOL_VERSION = b"mcp-protocol-version"
LAST_EVENT_ID = b"last-event-id"

# The protocol versions that have sessions and name themselves in a header (S1); without the header it is theirs too.
SESSION_ERA = frozenset({b"2025-03-26", b"2025-06-18", b"2025-11-25"})


class _Message(msgspec.Struct, gc=False):
    """The members of a JSON-RPC message that matter here, but for the id undecoded; an absent one is empty.

    Who writes out all members of a struct writes `null` for those that are not there. Only a `result` may be null.
    """

    id: RpcId | None = None
    method: msgspec.Raw = msgspec.Raw()
    params: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    meta: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="_meta")

    @property
    def asks(self) -> bool:
        """Whether it names a method, which is a text: to most readers a message with anything else there has none."""
        return bool(self.method) and bytes(self.method).startswith(b'"')

    @property
    def answers(self) -> bool:
        """Whether it is a response."""
        return bool(self.result or (self.error and bytes(self.error) != b"null")) and not self.asks


class _Meta(msgspec.Struct, gc=False):
    meta: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict, name="_meta")


class Messages(msgspec.Struct, frozen=True, gc=False):
    """What the messages of one event or body say: a token or None for each, and the ids that they answer.

    Where they are not `readable` some client may read in them what is not told here.
    """

    tokens: tuple[str | None, ...] = (None,)
    answers: tuple[RpcId, ...] = ()
    readable: bool = True


class Call(msgspec.Struct, frozen=True, gc=False):
    """What a POST asks for: whether it initializes, and the ids of the requests in it; all of them if `readable`."""

    initialize: bool = False
    owes: tuple[RpcId, ...] = ()
    readable: bool = True


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Where the epoch token of a response's messages is found: under `keys` in their `_meta`, else it is `default`."""

    keys: tuple[str, ...]
    default: str | None


Looks = tuple[tuple[bytes, tuple[bytes, ...]], ...]  # of each key what `usual_token` tells
NOTHING = Messages()
_NO_TOKENS = Tokens((), None)
# How the SDKs begin a request or a notification, neither of which answers anything.
CALLS = (b'{"jsonrpc":"2.0","method":"', b'{"method":"', b'{"jsonrpc": "2.0", "method": "', b'{"method": "')
_TOKEN = re.compile(rb'\s*:\s*("?)([^",}\s\\]+)\1\s*[,}]')
_PLAIN_TOKEN = re.compile(r"[!#-\[\]-~]+")  # written in one way only
_messages = msgspec.json.Decoder(_Message | list[_Message])
_meta = msgspec.json.Decoder(_Meta)
_meta_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_token = msgspec.json.Decoder(int | str | None)
_STRANGE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)  # for a lenient reader, perhaps
_INFINITY = float("inf")
_LONGEST_TOKEN = 256  # characters
_MOST_DIGITS = 4300  # Python converts no more; to most readers such a number is infinite
# The requests in one POST whose ids are remembered (L5).
_MOST_OWED = 1024
_MOST_OWED_BYTES = 64 * 1024


def is_session_era(version: bytes | None) -> bool:
    """Whether a request with this `MCP-Protocol-Version` belongs to the era that has sessions (S1)."""
    return version is None or version in SESSION_ERA


def tokens_of(sources: Sequence[Source], headers: Headers) -> Tokens:
    """Where to look for tokens in the messages under these response headers; the first source that is there counts."""
    keys: list[str] = []
    for source in sources:
        if isinstance(source, MetaSource):
            keys.append(source.key)
        else:
            token = header_value(headers, source)
            if token is not None:
                return Tokens(tuple(keys), _bounded_token(token))
    return Tokens(tuple(keys), None)


def header_value(headers: Headers, source: HeaderSource) -> str | None:
    """The value of a response header as text, None where it is absent or empty; blanks around it do not count."""
    for name, value in headers:
        if len(name) == len(source.name) and name.lower() == source.name and (text := value.strip(b" \t")):
            return text.decode("latin-1")
    return None


def read_call(body: bytes) -> Call:
    """What the body of a POST asks for. Not readable: it may ask for more (no JSON, strange ids, too many: L3, L5)."""
    initialize = False
    owes: list[RpcId] = []
    if b"\0" in body:
        body = _in_utf8(body)
    try:
        for message in _split(body):
            if message.asks:
                initialize = initialize or _is_initialize(bytes(message.method))
                if message.id is not None:
                    owes.append(message.id)
    except _STRANGE:
        return _bounded(_read_call_leniently(body))
    call = Call(initialize, tuple(owes))
    return _bounded(call) if len(body) > _MOST_OWED else call


def may_initialize(body: bytes) -> bool:
    """Whether some server may read an `initialize` in a body: some `method` in it says so, or it cannot be read here.

    Of equal keys some readers take the first, some the last; some do not tell capitals from other letters.
    """
    body = _in_utf8(body)
    if b"initialize" not in body and b"\\u" not in body:
        with contextlib.suppress(*_STRANGE):
            _split(body)
            return False  # the quick way for most
    try:
        decoded = _pairs.decode(body.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return True
    messages = [message for message in (decoded if isinstance(decoded, list) else [decoded]) if type(message) is tuple]
    return any(key.lower() == "method" and value == "initialize" for message in messages for key, value in message)


def method_of(body: bytes) -> str | None:
    """The method of the first message in a body that names one, None where none can be read."""
    try:
        methods = [bytes(message.method) for message in _split(body) if message.asks]
        return str(msgspec.json.decode(methods[0], type=str)) if methods else None
    except _STRANGE:
        return None


def _bounded(call: Call) -> Call:
    size = sum(len(str(identifier)) for identifier in call.owes)
    if len(call.owes) > _MOST_OWED or size > _MOST_OWED_BYTES:
        return Call(call.initialize, readable=False)
    return call


def read_answers(data: bytes) -> Messages:
    """The answered ids of the messages in an event in which `carries_only` found no token that tells anything."""
    return read_messages(data, _NO_TOKENS) if b'"id"' in data else NOTHING


def read_messages(data: bytes | None, tokens: Tokens) -> Messages:
    """The tokens and the answered ids of the messages in an event or a JSON body (None: too long to be read)."""
    if data is None:
        return Messages((tokens.default,), readable=False)
    found: list[str | None] = []
    answers: list[RpcId] = []
    try:
        for message in _split(data):
            if tokens.keys:
                found.append(_token_of(message, tokens.keys) or tokens.default)
            if message.id is not None and message.answers:
                answers.append(message.id)
    except _STRANGE:
        return _read_leniently(data, tokens)
    return Messages(tuple(found) or (tokens.default,), tuple(answers))


def answers_nothing(data: bytes) -> bool:
    """Whether an event surely answers no request, where nothing is written with escapes: only a look."""
    return data.startswith(CALLS) or (b'"result"' not in data and b'"error"' not in data)


def tells_escapes(data: bytes) -> bool:
    """Whether a key in it may be written with escapes."""
    return b"\\" in data and (b"\\u" in data or b"\\/" in data)


def carries_only(data: bytes, tokens: Tokens, known: str | None) -> bool:
    """Whether an event or a body surely carries no token but the `known` one."""
    if tells_escapes(data):
        return False
    if tokens.default != known and tokens.default is not None:
        return False
    for key in tokens.keys:
        name, usual = usual_token(key, known)
        at = data.rfind(name)  # the quickest way over the whole of a long one
        if at < 0 or (data.startswith(usual, at) and data.find(name, 0, at) < 0):
            continue
        if known is None or data.find(name) != at:
            return False
        value = _TOKEN.match(data, at + len(name))
        if value is None or value[2] != known.encode():
            return False
    return True


@functools.lru_cache(maxsize=1024)
def usual_token(key: str, token: str | None) -> tuple[bytes, tuple[bytes, ...]]:
    """A key as it stands in JSON, and how it usually stands there with this token after it."""
    name = json.dumps(key, ensure_ascii=False).encode()
    if token is None or not _PLAIN_TOKEN.fullmatch(token):
        return name, ()
    value = b'"%b"' % token.encode()
    return name, (name + b":" + value, name + b": " + value)


def holds_initialize_result(data: bytes) -> bool:
    """Whether one of the messages is the answer to `initialize` (L1)."""
    for message in _all_messages(data):
        result = message.get("result")
        if isinstance(result, dict) and isinstance(result.get("protocolVersion"), str):
            return True
    return False


def error_code(body: bytes) -> int | None:
    """The code of the JSON-RPC error that a body holds, None if it holds none."""
    for message in _all_messages(body):
        error = message.get("error")
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            return code if isinstance(code, int) else None
    return None


# -- quickly: raises one of _STRANGE where a lenient reader may see more


def _split(data: bytes) -> Sequence[_Message]:
    decoded = _messages.decode(data.removeprefix(b"\xef\xbb\xbf"))
    return decoded if isinstance(decoded, list) else (decoded,)


def _is_initialize(method: bytes) -> bool:
    """Whether a method is this one, be it written with escapes."""
    return method == b'"initialize"' or (b"\\" in method and bool(msgspec.json.decode(method) == "initialize"))


def _token_of(message: _Message, keys: Sequence[str]) -> str | None:
    for key in keys:
        name = key.encode()
        for holder in (message.params, message.result):
            raw = bytes(holder)
            if name in raw or b"\\" in raw:
                token = _as_text(_meta.decode(raw).meta.get(key))
                if token is not None:
                    return token
        if message.meta:
            token = _as_text(_meta_members.decode(message.meta).get(key))
            if token is not None:
                return token
    return None


def _as_text(raw: msgspec.Raw | None) -> str | None:
    """A token compares as text: `1` equals `"1"`. An empty text and `null` are none."""
    if raw is None:
        return None
    token = _token.decode(raw)
    return None if token is None else _bounded_token(str(token)) or None


def _bounded_token(token: str) -> str:
    """A token as it is remembered: one that nobody needs to be so long, by its digest."""
    if len(token) <= _LONGEST_TOKEN:
        return token
    return f"sha256:{hashlib.sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()}"


# -- as the most lenient client would


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


_lenient = json.JSONDecoder(strict=False, parse_int=_integer)
_pairs = json.JSONDecoder(strict=False, parse_int=_integer, object_pairs_hook=tuple)  # keeps equal keys


def _in_utf8(data: bytes) -> bytes:
    """JSON as it is, or, where it is in UTF-16 or UTF-32 and so has NUL bytes, in UTF-8."""
    if b"\0" not in data:
        return data
    return data.decode(json.detect_encoding(data), "replace").encode("utf-8", "replace")


def _split_leniently(data: bytes) -> list[dict[str, object]]:
    """The JSON objects. Raises ValueError where the data is no JSON, RecursionError where it is nested too deep."""
    decoded = _lenient.decode(data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace"))
    return [message for message in (decoded if isinstance(decoded, list) else [decoded]) if isinstance(message, dict)]


def _all_messages(data: bytes) -> list[dict[str, object]]:
    with contextlib.suppress(ValueError, RecursionError):
        return _split_leniently(data)
    return []


def _read_call_leniently(body: bytes) -> Call:
    initialize, readable = False, True
    owes: list[RpcId] = []
    try:
        for message in _split_leniently(body):
            if isinstance(message.get("method"), str):
                initialize = initialize or message["method"] == "initialize"
                identifier, known = _lenient_id(message)
                readable = readable and known
                if identifier is not None:
                    owes.append(identifier)
    except (ValueError, RecursionError):
        readable = False
    return Call(initialize, tuple(owes), readable)


def _read_leniently(data: bytes, tokens: Tokens) -> Messages:
    found: list[str | None] = []
    answers: list[RpcId] = []
    try:
        for message in _split_leniently(data):
            found.append(_lenient_token(message, tokens.keys) or tokens.default)
            answered = "result" in message or message.get("error") is not None
            if answered and not isinstance(message.get("method"), str):
                identifier, _ = _lenient_id(message)
                if identifier is not None:
                    answers.append(identifier)
    except RecursionError:
        return read_messages(None, tokens)
    except ValueError:
        return Messages((tokens.default,))
    return Messages(tuple(found) or (tokens.default,), tuple(answers))


def _lenient_id(message: dict[str, object]) -> tuple[RpcId | None, bool]:
    """The id of a message, and whether it is known: what cannot be sent again as it came is not."""
    identifier = message.get("id")
    if isinstance(identifier, str) and _is_sendable(identifier):
        return identifier, True
    if isinstance(identifier, int | float) and not isinstance(identifier, bool) and abs(identifier) < _INFINITY:
        return identifier, True
    return None, identifier is None


def _lenient_token(message: dict[str, object], keys: Sequence[str]) -> str | None:
    for key in keys:
        for holder in (message.get("params"), message.get("result"), message):
            members = holder.get("_meta") if isinstance(holder, dict) else None
            value = members.get(key) if isinstance(members, dict) else None
            if isinstance(value, str) and _is_sendable(value):
                if value:
                    return _bounded_token(value)
            elif value is not None:
                # Whatever it is, it is there, and may differ.
                return _bounded_token(json.dumps(value, separators=(",", ":")))
    return None


def _is_sendable(text: str) -> bool:
    """Whether it has no lone surrogate."""
    return text.isascii() or text.encode("utf-8", "replace").decode() == text
