"""What a request or a message is: its era, whether it initializes, what it asks for, what it answers, its epoch token.

Everything is read from a copy. Bytes that cannot be read say nothing: they never stop a message from being forwarded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from epochgate.guard.policy import HeaderSource, MetaSource, Source

RpcId = int | str
Headers = Sequence[tuple[bytes, bytes]]

SESSION_ID = b"mcp-session-id"
PROTOCOL_VERSION = b"mcp-protocol-version"
LAST_EVENT_ID = b"last-event-id"

# The protocol versions that have sessions and name themselves in a header (S1); without the header it is theirs too.
SESSION_ERA = frozenset({b"2025-03-26", b"2025-06-18", b"2025-11-25"})


class _Message(msgspec.Struct, gc=False):
    """The members of a JSON-RPC message that matter here, undecoded; an absent one is empty."""

    id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    params: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    meta: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="_meta")


class _Meta(msgspec.Struct, gc=False):
    meta: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict, name="_meta")


class _InitializeResult(msgspec.Struct, gc=False):
    protocol_version: str = msgspec.field(name="protocolVersion")


class Messages(msgspec.Struct, frozen=True, gc=False):
    """What the messages of one event or body say: a token or None for each, and the ids that they answer."""

    tokens: tuple[str | None, ...] = (None,)
    answers: tuple[RpcId, ...] = ()


class Call(msgspec.Struct, frozen=True, gc=False):
    """What a POST asks for: whether it initializes, and the ids of the requests in it."""

    initialize: bool = False
    owes: tuple[RpcId, ...] = ()


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Where the epoch token of a response's messages is found: under `keys` in their `_meta`, else it is `default`."""

    keys: tuple[str, ...]
    default: str | None


NOTHING = Messages()
# How the SDKs begin a request or a notification, neither of which answers anything.
_CALLS = (b'{"jsonrpc":"2.0","method":', b'{"method":', b'{"jsonrpc": "2.0", "method": ', b'{"method": ')
_TOKEN = re.compile(rb'\s*:\s*("?)([^",}\s\\]+)\1\s*[,}]')
_messages = msgspec.json.Decoder(_Message | list[_Message])
_meta = msgspec.json.Decoder(_Meta)
_meta_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_identifier = msgspec.json.Decoder(int | str | None)
_token = msgspec.json.Decoder(int | str)
_initialize_result = msgspec.json.Decoder(_InitializeResult)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


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
                return Tokens(tuple(keys), token)
    return Tokens(tuple(keys), None)


def header_value(headers: Headers, source: HeaderSource) -> str | None:
    """The value of a response header as text, None where it is absent or empty."""
    for name, value in headers:
        if len(name) == len(source.name) and name.lower() == source.name and value:
            return value.decode("latin-1")
    return None


def read_call(body: bytes) -> Call:
    """What the body of a POST asks for. Bytes that are no JSON-RPC ask for nothing."""
    initialize = False
    owes: list[RpcId] = []
    for message in _split(body):
        if not message.method:
            continue
        if bytes(message.method) == b'"initialize"':
            initialize = True
        identifier = _rpc_id(message.id)
        if identifier is not None:
            owes.append(identifier)
    return Call(initialize, tuple(owes))


def read_messages(data: bytes, tokens: Tokens) -> Messages:
    """The tokens and the answered ids of the messages in an event or a JSON body."""
    if not tokens.keys and b'"id"' not in data:
        return NOTHING if tokens.default is None else Messages((tokens.default,))
    found: list[str | None] = []
    answers: list[RpcId] = []
    for message in _split(data):
        found.append(_token_of(message, tokens.keys) or tokens.default)
        if (message.result or message.error) and not message.method:
            identifier = _rpc_id(message.id)
            if identifier is not None:
                answers.append(identifier)
    return Messages(tuple(found) or (tokens.default,), tuple(answers))


def says_nothing(data: bytes, tokens: Tokens, known: str | None) -> bool:
    """Whether an event surely answers nothing and carries no token but the `known` one: a look that decodes nothing."""
    answers_nothing = data.startswith(_CALLS) or (b'"result"' not in data and b'"error"' not in data)
    return answers_nothing and carries_only(data, tokens, known)


def carries_only(data: bytes, tokens: Tokens, known: str | None) -> bool:
    """Whether an event or a body surely carries no token but the `known` one."""
    if b"\\" in data and (b"\\u" in data or b"\\/" in data):  # a key may be written with escapes
        return False
    if tokens.default != known and tokens.default is not None:
        return False
    for key in tokens.keys:
        name = b'"%b"' % key.encode()
        at = data.find(name)
        if at >= 0:
            if known is None or data.find(name, at + 1) >= 0:
                return False
            value = _TOKEN.match(data, at + len(name))
            if value is None or value[2] != known.encode():
                return False
    return True


def holds_initialize_result(data: bytes) -> bool:
    """Whether one of the messages is the answer to `initialize` (L1)."""
    for message in _split(data):
        if message.result:
            try:
                _initialize_result.decode(message.result)
            except _UNREADABLE:
                continue
            return True
    return False


def error_code(body: bytes) -> int | None:
    """The code of the JSON-RPC error that a body holds, None if it holds none."""
    for message in _split(body):
        if message.error:
            try:
                code = _meta_members.decode(message.error).get("code")
                return None if code is None else msgspec.json.decode(code, type=int)
            except _UNREADABLE:
                return None
    return None


def _split(data: bytes) -> Iterable[_Message]:
    try:
        decoded = _messages.decode(data.removeprefix(b"\xef\xbb\xbf"))
    except _UNREADABLE:
        return ()
    return decoded if isinstance(decoded, list) else (decoded,)


def _rpc_id(raw: msgspec.Raw) -> RpcId | None:
    if not raw:
        return None
    try:
        identifier: RpcId | None = _identifier.decode(raw)
    except _UNREADABLE:
        return None
    return identifier


def _token_of(message: _Message, keys: Sequence[str]) -> str | None:
    for key in keys:
        name = key.encode()
        for holder in (message.params, message.result):
            raw = bytes(holder)
            if name in raw or b"\\" in raw:
                try:
                    members = _meta.decode(raw).meta
                except _UNREADABLE:
                    continue
                token = _as_text(members.get(key))
                if token is not None:
                    return token
        if message.meta:
            try:
                token = _as_text(_meta_members.decode(message.meta).get(key))
            except _UNREADABLE:
                continue
            if token is not None:
                return token
    return None


def _as_text(raw: msgspec.Raw | None) -> str | None:
    """A token compares as text: `1` equals `"1"`. What is neither an integer nor a text, or is empty, is none."""
    if raw is None:
        return None
    try:
        return str(_token.decode(raw)) or None
    except _UNREADABLE:
        return None
