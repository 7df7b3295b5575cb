"""Odd but legal HTTP/1.1 exchanges: what a client sends and what an upstream answers, chosen by a seed.

Left out is what `docs/behind-a-proxy.md` lists as refused (methods that the parser does not know, raw non-ASCII
targets, blanks around chunk extensions), ends of idle connections that nobody was told of (T5), and, in a guarded
session, the answers that a rule replaces (N1, R3, F2).
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from random import Random

METHODS = (
    b"GET", b"GET", b"GET", b"POST", b"POST", b"POST", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE",
    b"PROPFIND",
    b"PROPPATCH", b"MKCOL", b"COPY", b"MOVE", b"LOCK", b"UNLOCK", b"SEARCH", b"REPORT", b"M-SEARCH", b"NOTIFY",
    b"SUBSCRIBE",
    b"PURGE", b"LINK", b"UNLINK", b"BIND", b"REBIND", b"ACL", b"MERGE", b"CHECKOUT", b"MKCALENDAR", b"QUERY",
)  # fmt: skip
PATHS = (b"/mcp", b"/observe", b"/bypass", b"/other")
TAILS = (
    b"", b"", b"/", b"//", b"/%2F/%2f", b";v=1;w", b"?", b"??", b"?a=1&a=2&&=", b"/a%20b/%zz%", b"/%C3%A9",
    b"/..;/x", b"/./x/..",
    b"?q=a+b%2B&u=http://x/y?z", b"/:@!$&'()*+,;=-._~", b"/%00%0d%0a", b'/"<>\\^`{|}', b"#f", b"/" + b"long/" * 300,
)  # fmt: skip
NAMES = (
    b"X-One", b"x-one", b"X-ONE", b"Cookie", b"Set-Cookie", b"Via", b"Warning", b"Link", b"!#$%&'*+-.^_`|~1",
    b"X_Under",
    b"Accept", b"Accept-Encoding", b"User-Agent", b"Authorization", b"X-Forwarded-For", b"Forwarded",
    b"Cache-Control", b"Date",
    b"Server", b"ETag", b"Range", b"If-None-Match", b"Origin", b"Content-Language", b"X-Session", b"Alt-Svc", b"Vary",
)  # fmt: skip
VALUES = (
    b"", b"1", b"a, b,,c", b'"quoted \\" , text"', b"caf\xe9", b"caf\xc3\xa9", b"\xff\x80\xa0", b"in \t ner",
    b"a=b; c=d", b"0", b"-",
    b"text/html;q=0.5, */*", b"Basic eDp5", b'W/"x"', b":", b"::1", b"(a comment)", b"x" * 3000, b"\\", b"%41",
    b"=?utf-8?q?x?=",
)  # fmt: skip
BLANKS = (b" ", b" ", b" ", b"", b"\t", b"   ", b" \t ")
ENDS = (b"", b"", b"", b" ", b"\t", b"  \t")
REASONS = (b"OK", b"", b"Fine  and dandy", b"caf\xe9", b"\tx", b"200", b"(none)", b"a" * 300)
STATUSES = (
    200, 200, 200, 200, 201, 202, 203, 206, 207, 226, 299, 300, 301, 302, 307, 308, 401, 402, 403, 405, 406, 409, 410,
    413, 415, 418, 421, 422, 426, 429, 431, 451, 499, 500, 501, 502, 503, 504, 507, 511, 599, 700, 999,
)  # fmt: skip
EXTENSIONS = (b"", b"", b"", b";a", b";a=b", b';a="b;c"', b";" + b"e" * 200)
TRAILERS = (b"", b"", b"", b"X-Sum: 1\r\n", b"X-Sum: caf\xe9\r\nX-Sum:\r\n", b'ETag: "x"\r\n')
DROPPED = (
    (b"Keep-Alive: timeout=5",), (b"TE: trailers, deflate;q=0.5",), (b"Trailer: X-Sum",),
    (b"Proxy-Connection: keep-alive",),
    (b"Connection: x-hop", b"X-Hop: 1", b"x-hop: 2"), (b"Connection: , keep-alive ,, X-ONE,",), (b"Upgrade: foo/2",),
    (b"Connection: Upgrade", b"Upgrade: h2c"), (b"Proxy-Authorization: Basic x", b"Proxy-Authenticate: Basic"),
)  # fmt: skip
EVENT_STREAM = b"Content-Type: text/event-stream"
JSON = b"Content-Type: application/json"
VERSIONS = (b"2025-03-26", b"2025-06-18", b"2025-11-25")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its head, its body as it is on the wire. `waits`: the body is sent after a 100 (Expect) only."""

    head: bytes
    body: bytes
    waits: bool = False

    @property
    def method(self) -> bytes:
        return self.head.partition(b" ")[0]

    @property
    def http11(self) -> bool:
        return self.head.partition(b"\r\n")[0].endswith(b"1.1")

    @property
    def closes(self) -> bool:
        """Whether it is the last one on its connection."""
        lower = self.head.lower()
        return b"\r\nconnection: close" in lower or (not self.http11 and b"keep-alive" not in lower)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request is answered. `refuses`: at its head, without its body, which is still to come (Expect).

    `plain` is the body without its framing, `framing` the one to an HTTP/1.1 request; `cut`: so many bytes of the end
    are missing, and the connection ends.
    """

    interims: tuple[bytes, ...]
    start: bytes
    fields: tuple[bytes, ...]
    plain: bytes
    framing: str  # none | sized | chunked | close
    wire: bytes
    cut: int = 0
    refuses: bool = False

    @property
    def closes(self) -> bool:
        return self.framing == "close" or self.cut > 0 or self.refuses or b"Connection: close" in self.fields


@dataclass(frozen=True, slots=True)
class Exchange:
    """Requests of one client and their answers. `pipelined`: all are sent ahead."""

    number: int
    asked: tuple[Asked, ...]
    answers: tuple[Answer, ...]
    pipelined: bool
    split: bool
    slow: bool
    mode: bytes  # the path that all of them are for


def generate(seed: int, number: int) -> Exchange:
    """The exchange with this number."""
    choose = Random(f"{seed}:{number}")
    path = choose.choice(PATHS)
    count = choose.choice((1, 1, 1, 2, 3, 5))
    pipelined = count > 1 and choose.random() < 0.5
    session = b"S%d-%d" % (seed, number) if choose.random() < 0.4 else None
    asked: list[Asked] = []
    answers: list[Answer] = []
    if session is not None:
        opening = _opening(choose, path, session, may_end=not pipelined)
        asked.append(opening[0])
        answers.append(opening[1])
    for at in range(count):
        last = at == count - 1
        made = _Maker(choose, path, session, may_end=last or not pipelined, ahead=pipelined).make()
        asked.append(made[0])
        answers.append(made[1])
    return Exchange(number, tuple(asked), tuple(answers), pipelined, choose.random() < 0.5, choose.random() < 0.1, path)


def _repeat(choose: Random, asked: list[Asked], answers: list[Answer]) -> None:
    """The same heads again and again, but for the lengths: the proxy knows them then."""
    plain = [
        at
        for at, answer in enumerate(answers)
        if not (answer.refuses or answer.cut or asked[at].waits or asked[at].closes) and at > 0
    ]
    if not plain:
        return
    at = choose.choice(plain)
    for place in range(choose.choice((2, 3, 4))):
        request, answer = asked[at], answers[at]
        if request.body and b"chunked" not in request.head.lower():
            body = _call(choose)
            request = Asked(_with_length(request.head, len(body)), body)
        if answer.framing == "sized" and answer.plain:
            text = choose.randbytes(choose.choice((0, 1, 100, 3000)))
            fields = tuple(_with_length(b"\r\n" + line, len(text))[2:] for line in answer.fields)
            answer = Answer(answer.interims, answer.start, fields, text, "sized", text)
        asked.insert(at + 1 + place, request)
        answers.insert(at + 1 + place, answer)


def _with_length(head: bytes, size: int) -> bytes:
    return re.sub(rb"(?i)(\r\ncontent-length:[ \t]*)\d+", lambda found: found[1] + b"%d" % size, head)


def _opening(choose: Random, path: bytes, session: bytes, *, may_end: bool) -> tuple[Asked, Answer]:
    """The handshake of a session, answered as JSON or as a stream."""
    body = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-06-18"}}'
    meta = {"_meta": {"session_epoch": choose.randrange(9)}} if choose.random() < 0.5 else {}
    result = json.dumps({"jsonrpc": "2.0", "id": 0, "result": {"protocolVersion": "2025-06-18", **meta}}).encode()
    head = b"POST %b HTTP/1.1\r\nHost: a\r\n%b\r\nContent-Length: %d\r\n\r\n" % (path, JSON, len(body))
    fields = [b"Mcp-Session-Id: " + session]
    if choose.random() < 0.5:
        fields.append(EVENT_STREAM)
        plain, framing = (
            b"event: message\nid: i0\ndata: " + result + b"\n\n",
            choose.choice(("chunked", "sized", "close")[: 2 + may_end]),
        )
    else:
        fields.append(JSON)
        plain, framing = result, "sized"
    return Asked(head, body), _answer(choose, (), b"HTTP/1.1 200 OK", fields, plain, framing)


class _Maker:
    """Makes one request and its answer."""

    def __init__(self, choose: Random, path: bytes, session: bytes | None, *, may_end: bool, ahead: bool) -> None:
        self._choose = choose
        self._path = path
        self._session = session
        self._may_end = may_end  # the connection may end with it
        self._ahead = ahead  # it is sent before the others are answered
        self._guarded = session is not None and path == b"/mcp"
        self._method = choose.choice((b"GET", b"POST", b"POST", b"PUT", b"OPTIONS") if session else METHODS)
        self._http11 = not may_end or choose.random() < 0.9

    def make(self) -> tuple[Asked, Answer]:
        choose = self._choose
        body, framing = self._body()
        expects = framing != "none" and bool(body) and self._http11 and not self._ahead and choose.random() < 0.15
        asked = self._ask(body, framing, expects=expects)
        return asked, self._reply(expects=expects)

    # -- the request

    def _ask(self, body: bytes, framing: str, *, expects: bool) -> Asked:
        choose = self._choose
        own = self._own_fields(framing, len(body), expects=expects)
        fields = [_field(choose) for _ in range(choose.choice((0, 1, 3, 8, 40)))]
        if choose.random() < 0.3:
            fields += choose.choice(DROPPED)
        for field in own:
            fields.insert(choose.randrange(len(fields) + 1), field)
        if not self._http11:
            fields = [field for field in fields if not field.lower().startswith((b"connection", b"upgrade"))]
            fields += [b"Connection: keep-alive"] if choose.random() < 0.5 else []
        elif self._may_end and choose.random() < 0.1:
            fields.append(b"Connection: close")
        start = b"%b %b HTTP/1.%d" % (self._method, self._target(), self._http11)
        wire = _chunked(choose, body) if framing == "chunked" else body
        return Asked(b"\r\n".join([start, *fields, b"", b""]), wire, expects)

    def _body(self) -> tuple[bytes, str]:
        choose = self._choose
        if self._method in (b"GET", b"HEAD", b"TRACE", b"DELETE") and choose.random() < 0.8:
            return b"", "none"
        kind = choose.randrange(5)
        if kind == 0:
            return b"", "sized"
        if kind == 1:
            return b"", "none"
        body = _call(choose) if kind < 4 else choose.randbytes(choose.choice((1, 100, 5000, 70_000)))
        return body, "chunked" if self._http11 and choose.random() < 0.5 else "sized"

    def _own_fields(self, framing: str, size: int, *, expects: bool) -> list[bytes]:
        choose = self._choose
        name = choose.choice((b"Content-Length", b"content-length", b"CONTENT-LENGTH"))
        fields = [choose.choice((b"Host: a", b"host:\tpublic.example:8080 ", b"HOST:"))] if self._http11 else []
        if framing == "sized":
            fields.append(name + b":" + choose.choice(BLANKS) + b"%d" % size)
        if framing == "chunked":
            fields.append(choose.choice((b"Transfer-Encoding: chunked", b"transfer-encoding:\tChunked ")))
        if expects:
            fields.append(choose.choice((b"Expect: 100-continue", b"expect: 100-Continue")))
        if self._session is not None:
            fields.append(choose.choice((b"Mcp-Session-Id: ", b"mcp-session-id:")) + self._session)
            if choose.random() < 0.7:
                fields.append(b"MCP-Protocol-Version: " + choose.choice(VERSIONS))
            if self._method == b"GET" and not self._guarded and choose.random() < 0.3:
                fields.append(b"Last-Event-ID: " + choose.choice((b"1", b"a-7", b"none")))
        elif self._method == b"GET" and choose.random() < 0.1:
            fields.append(b"Last-Event-ID: 7")  # without a session it passes (S3)
        return fields

    def _target(self) -> bytes:
        choose = self._choose
        if self._method == b"OPTIONS" and choose.random() < 0.3:
            return b"*"
        target = self._path + choose.choice(TAILS)
        form = choose.random()
        if self._session is not None or form < 0.8:
            return self._path if self._guarded else target
        return (
            choose.choice((b"http://a.example", b"https://[::1]:81", b"http://u@h:8")) + target
            if form < 0.9
            else b"/" + target
        )

    # -- the answer

    def _reply(self, *, expects: bool) -> Answer:
        choose = self._choose
        refuses = expects and choose.random() < 0.4
        interims = tuple(_interim(choose, expects=expects) for _ in range(choose.choice((0, 0, 0, 1, 3))))
        interims = interims if self._http11 else ()
        if expects and not refuses:
            interims = (b"HTTP/1.1 100 Continue\r\n\r\n", *interims)
        status = 417 if refuses else self._status()
        version = 0 if self._may_end and choose.random() < 0.1 else 1
        start = b"HTTP/1.%d %d %b" % (version, status, choose.choice(REASONS))
        fields = [_field(choose) for _ in range(choose.choice((0, 1, 3, 8, 40)))]
        if choose.random() < 0.2:
            fields += choose.choice(DROPPED)
        if status in (204, 304):
            fields += [b"Content-Length: 99"] if status == 304 and choose.random() < 0.5 else []
            return Answer(interims, start, tuple(fields), b"", "none", b"")
        plain = self._plain(fields)
        framing = self._framing(version)
        cut = choose.randrange(1, len(plain) + 1) if self._may_cut(plain, framing, refuses=refuses) else 0
        ends_unsaid = framing == "close" and self._method == b"HEAD"  # no body whose end it could be
        if refuses or version == 0 or ends_unsaid or (self._may_end and choose.random() < 0.1):
            fields.append(b"Connection: close")
        answer = _answer(choose, interims, start, fields, plain, framing)
        return Answer(answer.interims, start, answer.fields, plain, framing, answer.wire, cut=cut, refuses=refuses)

    def _status(self) -> int:
        choose = self._choose
        odd = choose.random()
        if odd < 0.05:
            return 204
        if odd < 0.1:
            return 304
        status = choose.choice(STATUSES) if odd < 0.6 else 200
        return 200 if self._guarded and status >= 300 else status

    def _plain(self, fields: list[bytes]) -> bytes:
        choose = self._choose
        kind = choose.randrange(6)
        if kind == 0:
            return b""
        if kind == 1:
            fields.append(JSON)
            return json.dumps(
                {"jsonrpc": "2.0", "id": choose.randrange(9), "result": {"é": "x" * choose.choice((1, 999))}}
            ).encode()
        if kind < 4:
            fields.append(
                choose.choice((EVENT_STREAM, EVENT_STREAM + b"; charset=utf-8", b"content-type:TEXT/event-stream"))
            )
            plain = _events(choose)
            if choose.random() < 0.1:
                fields.append(b"Content-Encoding: gzip")
                plain = choose.choice((plain, zlib.compress(plain, wbits=31)))
            return plain
        return choose.randbytes(choose.choice((1, 100, 5000, 200_000)))

    def _framing(self, version: int) -> str:
        choices = ["sized"] if version == 0 else ["sized", "chunked", "chunked"]
        if self._may_end:
            choices.append("close")
        return self._choose.choice(choices)

    def _may_cut(self, plain: bytes, framing: str, *, refuses: bool) -> bool:
        able = (
            self._may_end
            and self._http11
            and framing in ("sized", "chunked")
            and not refuses
            and self._method != b"HEAD"
        )
        return able and bool(plain) and self._choose.random() < 0.05


def _field(choose: Random) -> bytes:
    return choose.choice(NAMES) + b":" + choose.choice(BLANKS) + choose.choice(VALUES) + choose.choice(ENDS)


def _interim(choose: Random, *, expects: bool) -> bytes:
    """One that is not the answer to `Expect`; a 100 that nobody waits for is legal."""
    fields = b"".join(_field(choose) + b"\r\n" for _ in range(choose.randrange(3)))
    starts = (b"103 Early Hints", b"102 Processing", b"199 ", b"104 Upload Resumption", b"100 Continue")
    start = choose.choice(starts[:4] if expects else starts)
    return b"HTTP/1.1 " + start + b"\r\n" + fields + b"\r\n"


def _call(choose: Random) -> bytes:
    method = choose.choice(("tools/call", "ping", "notifications/x", "tools/list"))
    call: object = {
        "jsonrpc": "2.0",
        "id": choose.randrange(9),
        "method": method,
        "params": {"t": "é" * choose.choice((0, 9, 2000))},
    }
    return json.dumps([call, call] if choose.random() < 0.1 else call, ensure_ascii=choose.random() < 0.5).encode()


def _events(choose: Random) -> bytes:
    """An event stream as a server may write it, with or without a clean end."""
    eol = choose.choice((b"\n", b"\n", b"\r\n", b"\r"))
    blocks = [b"\xef\xbb\xbf"] if choose.random() < 0.1 else []
    for number in range(choose.choice((0, 1, 2, 10, 60))):
        data = json.dumps(
            {"jsonrpc": "2.0", "method": "n", "params": {"n": number, "t": "é" * choose.choice((0, 5, 400))}}
        )
        lines = [
            b"id: %d" % number if choose.random() < 0.8 else b": comment",
            *([b"event: message"] if choose.random() < 0.5 else []),
            *([b"retry: 5"] if choose.random() < 0.1 else []),
            *(
                b"data:" + choose.choice((b"", b" ")) + line
                for line in (data.encode(), b"")[: choose.choice((0, 1, 1, 1, 2))]
            ),
        ]
        blocks.append(eol.join([*lines, b"", b""]))
    if choose.random() < 0.2:
        blocks.append(b"id: 9\ndata: unfinished")
    return b"".join(blocks)


def _chunked(choose: Random, body: bytes) -> bytes:
    wire, at = b"", 0
    while at < len(body):
        size = choose.choice((1, 2, 7, 100, 4096, 1 << 20) if len(body) < 10_000 else (100, 4096, 1 << 20))
        piece = body[at : at + size]
        number = b"%x" % len(piece)
        wire += choose.choice((b"", b"", b"000")) + choose.choice((number, number.upper())) + choose.choice(EXTENSIONS)
        wire += b"\r\n" + piece + b"\r\n"
        at += size
    return wire + choose.choice((b"0", b"000", b"0;last")) + b"\r\n" + choose.choice(TRAILERS) + b"\r\n"


def _answer(
    choose: Random, interims: tuple[bytes, ...], start: bytes, fields: list[bytes], plain: bytes, framing: str
) -> Answer:
    if framing == "sized":
        fields.insert(choose.randrange(len(fields) + 1), b"Content-Length: %d" % len(plain))
    if framing == "chunked":
        fields.insert(choose.randrange(len(fields) + 1), b"Transfer-Encoding: chunked")
    wire = _chunked(choose, plain) if framing == "chunked" else plain
    return Answer(interims, start, tuple(fields), plain, framing, wire)
