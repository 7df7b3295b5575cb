"""The answer to one request as it is written to the client."""

from __future__ import annotations

from typing import Protocol

from epochgate.relay.headers import LAST_CHUNK, Field, Framing, Head, answer_lines
from epochgate.relay.request import Request


class Writer(Protocol):
    """The connection that a reply is written to."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    def break_off(self, *, reset: bool) -> None:
        """End the connection after what was written; `reset`: so that even its end does not look like one."""


class Reply:
    """The answer to one request: a head, a body in one framing, and an end that is clean or not."""

    __slots__ = (
        "_connection",
        "_framing",
        "_http11",
        "_pending",
        "_probed",
        "closed",
        "finished",
        "keep_alive",
        "started",
        "status",
    )

    def __init__(self, connection: Writer, request: Request) -> None:
        self._connection = connection
        self._framing = Framing.NONE
        self._http11 = request.http11
        self._pending: list[bytes] = []  # written together by `flush`
        self._probed = False  # some of the size of the next chunk was written
        self.keep_alive = request.keep_alive
        self.status = 0
        self.started = False
        self.finished = False
        self.closed = False  # the client has gone

    def interim(self, head: bytes) -> None:
        """Pass on a 1xx answer; an HTTP/1.0 client knows none."""
        if self._http11:
            self._connection.write(head)

    def start(self, status: int, reason: bytes, fields: list[Field], framing: Framing) -> None:
        """The head. `fields` are end-to-end, `framing` is how the body comes; it may have to change for the client."""
        self._begin(status, answer_lines(status, reason, fields), framing)

    def pass_on(self, head: Head) -> None:
        """The head of the upstream's answer, as it came."""
        self._begin(head.status, head.lines, head.framing)

    def _begin(self, status: int, lines: bytes, framing: Framing) -> None:
        self.status = status
        self.started = True
        if framing is Framing.CLOSE and self._http11:
            framing = Framing.CHUNKED
        elif framing is Framing.CHUNKED and not self._http11:
            framing = Framing.CLOSE
        if framing is Framing.CLOSE:
            self.keep_alive = False
        self._framing = framing
        more = b"Transfer-Encoding: chunked\r\n" if framing is Framing.CHUNKED else b""
        if not self.keep_alive:
            more += b"Connection: close\r\n"
        elif not self._http11:
            more += b"Connection: keep-alive\r\n"
        self._pending = [lines, more, b"\r\n"]

    def write(self, data: bytes) -> None:
        """A piece of the body; sent by `flush`."""
        if self._framing is Framing.CHUNKED:
            if data:
                self._pending.append(b"%x\r\n%b\r\n" % (len(data), data))
        elif self._framing is not Framing.NONE:
            self._pending.append(data)

    def probe(self) -> None:
        """Send what changes nothing, a leading zero of the next chunk's size: a peer that is gone answers by a RST."""
        if self._framing is Framing.CHUNKED and self.started and not self.finished and not self._pending:
            self._probed = True
            self._connection.write(b"0")

    def flush(self) -> None:
        """Send what was written, in one go."""
        pending = self._pending
        if pending:
            data = pending[0] if len(pending) == 1 else b"".join(pending)
            pending.clear()
            self._probed = False
            self._connection.write(data)

    def end(self) -> None:
        """A clean end."""
        if self._framing is Framing.CHUNKED:
            self._pending.append(LAST_CHUNK)
        self.finished = True
        self.flush()

    def break_off(self) -> None:
        """An end that does not look complete (T4)."""
        if self._probed:
            self._pending.append(b"1\r\n")  # zeros alone, and then the end, are the last chunk to some
        self.flush()
        self.finished = True
        self.keep_alive = False
        self._connection.break_off(reset=self._framing is Framing.CLOSE)


def error_reply(status: int, message: str) -> bytes:
    """A whole answer of the proxy that ends the connection: a JSON-RPC error without an id."""
    body = error_body(message)
    fields: list[Field] = [
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"%d" % len(body)),
        (b"Connection", b"close"),
    ]
    start = b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, b"Error"))
    return start + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n" + body


def error_body(message: str) -> bytes:
    """A JSON-RPC error without an id (T7)."""
    text = message.replace("\\", "\\\\").replace('"', '\\"')
    return b'{"jsonrpc":"2.0","error":{"code":-32000,"message":"%b"}}' % text.encode()


REASONS = {
    400: b"Bad Request", 404: b"Not Found", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
    501: b"Not Implemented", 502: b"Bad Gateway", 503: b"Service Unavailable", 504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}  # fmt: skip
