"""What a proxy may change on the way: the rules of design.md section 4 as one pure function for each direction.

Each takes a message as it is without a proxy between, and says what must be seen with one.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliability.strict import Field, Message, options

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What matters of one message at the end that it arrives at."""

    start: tuple[bytes | int, ...]
    fields: tuple[Field, ...]
    framing: str
    body: bytes
    complete: bool = True


def request_through(asked: Message, authority: bytes) -> Seen:
    """What the upstream must see of a request."""
    fields = list(_end_to_end(asked.fields))  # T2: the others keep case, order and repetition
    hosts = [at for at, (name, _) in enumerate(fields) if name.lower() == b"host"]
    if hosts:
        fields[hosts[0]] = (fields[hosts[0]][0], authority)  # T2: `Host` is the upstream's authority
    else:
        fields.insert(0, (b"Host", authority))
    fields.append((b"Via", b"1.1 epochgate"))  # T2
    start = (asked.method, asked.target, b"HTTP/1.1")  # T3; the version is each hop's own (RFC 9110 section 2.5)
    return Seen(
        start, tuple(fields), asked.framing, asked.body
    )  # T1; chunk borders, extensions, trailers end here (T2)


def answer_through(answer: Message, *, http11: bool) -> Seen:
    """What the client must see of an answer, interim ones included; `http11`: the client speaks it."""
    framing = answer.framing
    if framing == "close" and http11:
        framing = "chunked"  # T4: an end that can be told from a broken one, on a connection that stays
    if not http11 and framing == "chunked":
        framing = "close"
    fields = _end_to_end(answer.fields)
    return Seen((answer.status, answer.reason), fields, framing, answer.body, answer.complete)  # T1, T4, T7


def request_seen(message: Message) -> Seen:
    """A request as it arrived through the proxy; of its own fields for one connection only the framing counts."""
    return Seen(
        (message.method, message.target, message.start[-8:]),
        _own(message),
        message.framing,
        message.body,
        message.complete,
    )


def answer_seen(message: Message) -> Seen:
    """An answer as it arrived through the proxy."""
    return Seen((message.status, message.reason), _own(message), message.framing, message.body, message.complete)


def _own(message: Message) -> tuple[Field, ...]:
    """Without what the proxy says for its connection: the framing, and whether it stays."""
    allowed = {b"transfer-encoding": {b"chunked"}, b"connection": {b"close", b"keep-alive"}}
    return tuple(field for field in message.fields if field[1] not in allowed.get(field[0].lower(), ()))


def _end_to_end(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """T2: without the hop-by-hop fields, and without those that `Connection` names, but for the length of an answer."""
    dropped = HOP_BY_HOP | (options(fields) - {b"content-length"})
    return tuple(field for field in fields if field[0].lower() not in dropped)
