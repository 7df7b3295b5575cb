"""A client that does one thing after the other on a plain socket: sessions, single calls, resumes, and their time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.sink import INITIALIZE

_POST = (
    b"POST %b HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Accept: application/json, text/event-stream\r\n"
)
_GET = b"GET %b HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n"
_CALL = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hello"}}}'


@dataclass(slots=True)
class Caller:
    """One connection to a port, and the session that was opened on it."""

    sock: socket.socket
    session: bytes = b""
    last: bytes = b""  # the whole of the last answer

    def initialize(self, path: bytes = b"/init") -> bytes:
        """Open a session; its id."""
        self.sock.sendall(_POST % path + b"Content-Length: %d\r\n\r\n%b" % (len(INITIALIZE), INITIALIZE))
        head, _ = self._read_sized()
        granted = [line for line in head.split(b"\r\n") if line.lower().startswith(b"mcp-session-id:")]
        self.session = granted[0].partition(b":")[2].strip() if granted else b""
        if path == b"/mcp":
            self.post(path, b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        return self.session

    def _names(self) -> bytes:
        return b"MCP-Protocol-Version: 2025-06-18\r\n" + (
            b"Mcp-Session-Id: %b\r\n" % self.session if self.session else b""
        )

    def call(self, number: int, path: bytes = b"/json") -> float:
        """POST a tool call with this id and read its answer; s. Raises ValueError on a wrong answer."""
        began = time.perf_counter()
        answer = self.post(path, _CALL % number)
        took = time.perf_counter() - began
        if b'"id":%d,' % number not in answer:
            raise ValueError(f"the answer to {number} is {answer[:200]!r}")
        return took

    def post(self, path: bytes, body: bytes) -> bytes:
        """POST this message; the body of the answer, as it is framed."""
        self.sock.sendall(_POST % path + self._names() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        _, answer = self._read_sized()
        return answer

    def resume(self, path: bytes, cursor: int | None, until: bytes) -> float:
        """GET a stream, after a cursor if there is one, and read up to `until`; s."""
        request = _GET % path + self._names()
        if cursor is not None:
            request += b"Last-Event-ID: %d\r\n" % cursor
        began = time.perf_counter()
        self.sock.sendall(request + b"\r\n")
        answer = b""
        while until not in answer:
            data = self.sock.recv(65536)
            if not data:
                raise ValueError(f"the stream ended with {answer[-300:]!r}")
            answer += data
            if not answer.startswith(b"HTTP/1.1 200"):
                raise ValueError(f"the stream was refused with {answer[:300]!r}")
        self.last = answer
        return time.perf_counter() - began

    def _read_sized(self) -> tuple[bytes, bytes]:
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._more()
        head, body = data[:end], data[end + 4 :]
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at >= 0:
            length = int(lower[at + 15 :].partition(b"\r\n")[0])
            while len(body) < length:
                body += self._more()
        else:
            while body != b"0\r\n\r\n" and not body.endswith(b"\r\n0\r\n\r\n"):
                body += self._more()
        return head, body

    def _more(self) -> bytes:
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError("closed")
        return data


@contextmanager
def connected(port: int) -> Iterator[Caller]:
    """A connection for as long as the context lasts."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Caller(sock)


def open_sessions(port: int, count: int, path: bytes = b"/init") -> list[bytes]:
    """The ids of new sessions, opened through whatever listens there."""
    with connected(port) as caller:
        return [caller.initialize(path) for _ in range(count)]
