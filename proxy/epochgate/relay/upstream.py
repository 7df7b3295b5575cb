"""The upstream's side: connections, a small pool of idle ones, and what goes wrong there, as errors of `errors.py`.

The seam is `Receiver`: whoever sent a request hears its answer through it, call by call, without a task in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast

import aiohappyeyeballs
import httptools

from epochgate.errors import (
    UpstreamError,
    UpstreamFramingError,
    UpstreamRefusedError,
    UpstreamResetError,
    UpstreamTimeoutError,
)
from epochgate.relay.headers import (
    MAX_HEAD,
    Field,
    Framing,
    Head,
    connection_options,
    end_to_end,
    is_unclear,
    lower_case,
    values_of,
)
from epochgate.relay.known import KnownAnswers
from epochgate.relay.listener import notice_death

IDLE_SECONDS = 4.0  # an idle connection is not used again after that: servers close theirs after 5 s and more
IDLE_CONNECTIONS = 256
HAPPY_EYEBALLS_DELAY = 0.2  # s between the addresses of one name


class Receiver(Protocol):
    """Hears the answer to one request. After `received_end` or `received_error` it hears nothing more."""

    def received_interim(self, head: bytes) -> None:
        """A 1xx answer, as it goes to the client."""

    def received_head(self, head: Head) -> None:
        """The head of the answer."""

    def received_data(self, data: bytes) -> None:
        """A piece of the body."""

    def received_end(self) -> None:
        """The clean end of the body. The connection is no longer the receiver's."""

    def received_error(self, error: UpstreamError) -> None:
        """The connection ended before the answer was complete."""

    def received_all(self) -> None:
        """What was read in one go has been handed over, and there is more to come: time to write it."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to the upstream; it carries one request at a time."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._method = b""
        self._status = b""
        self._fields: list[Field] = []
        self._names: list[bytes] = []  # of the fields, in lower case
        self._size = 0  # of the fields
        self._body: list[bytes] = []  # read and not handed over yet
        self._in_head = False
        self._head: Head | None = None
        self._told = False  # the receiver has heard the head
        self._opening = b""  # the read that is being parsed, where an answer begins with it
        self._overhead = 0  # bytes read since the last piece of a body; a head and trailers are no longer than that
        self._interim = False
        self._keep = False
        self._read_paused = False
        self._request_sent = True  # nothing of the request body is still to come
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self.asked_at = 0.0  # when its request began to be sent (s)
        self.fresh = True  # it has carried no answer yet
        self.idle_since = 0.0
        self.closed = False
        self._drain: asyncio.Future[None] | None = None  # set while the upstream does not keep up
        self._poll = select.poll()

    # -- for those who send requests

    def begin(self, receiver: Receiver, method: bytes) -> None:
        """Take the connection for a request with this method."""
        self._receiver = receiver
        self._method = method
        self.asked_at = time.time()
        self._head = None
        self._told = False
        self._in_head = False
        self._interim = False
        self._request_sent = False
        if self._upstream.idle_timeout:
            self._heard_at = self._loop.time()
            self._timer = self._loop.call_later(self._upstream.idle_timeout, self._check_silence)

    def write(self, data: bytes) -> None:
        """Send bytes of the request."""
        if self._transport is not None and not self.closed:
            self._heard_at = self._loop.time()
            self._transport.write(data)

    async def drained(self) -> None:
        """Wait until the upstream takes more of the request (T6)."""
        if self._drain is not None and not self.closed:
            await self._drain

    def request_sent(self) -> None:
        """The request is complete; the connection may be used again after the answer."""
        self._request_sent = True
        self._heard_at = self._loop.time()

    def pause(self) -> None:
        """Read no more for now (T6)."""
        if not self._read_paused and self._transport is not None and not self.closed:
            self._read_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._read_paused and self._transport is not None and not self.closed:
            self._read_paused = False
            self._heard_at = self._loop.time()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def hand_over(self, receiver: Receiver) -> None:
        """Let somebody else hear the rest of the answer."""
        if self._receiver is not None:
            self._receiver = receiver

    def abort(self) -> None:
        """Give the request up; the receiver hears nothing more."""
        self._receiver = None
        self._close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._upstream.connections.add(self)
        sock = self._transport.get_extra_info("socket")
        notice_death(sock)
        self._poll.register(sock.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Parse, and hand over what it means."""
        if self._receiver is None:
            self._close()  # bytes that nobody asked for
            return
        self._heard_at = self._loop.time()
        self._opening = b""
        if self._head is None and not self._in_head and self._method != b"HEAD":
            known = self._upstream.known.split(data)
            if known is not None:
                self._head, body = known
                self._body.append(body)
                self._keep = True
                self._finish()
                return
            self._opening = data
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(UpstreamFramingError("The upstream switched protocols without being asked"))
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(cause, UpstreamError):
                self._fail(UpstreamError("The answer of the upstream could not be handled"))
                raise  # a fault of ours: the event loop's handler logs it
            if isinstance(cause, UpstreamError):
                self._fail(cause)
            else:
                self._fail(UpstreamFramingError("The answer of the upstream is not HTTP/1.1"))
            return
        if self._overhead > MAX_HEAD and self._receiver is not None:
            self._fail(UpstreamFramingError("The head of the upstream's answer is too large"))
            return
        self._hand_over()
        if self._receiver is not None:
            self._receiver.received_all()

    def eof_received(self) -> bool:
        """The upstream has closed its side: the end of a body that nothing else delimits."""
        receiver, head = self._receiver, self._head
        if receiver is not None and head is not None and head.framing is Framing.CLOSE:
            self._receiver = None
            receiver.received_end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        self.closed = True
        self._upstream.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        if self._receiver is not None:
            how = "reset" if exc is not None else "closed"
            when = "in the middle of its answer" if self._head is not None else "before it answered"
            fresh = self.fresh and self._head is None  # one that had begun to answer was not refused
            self._fail(UpstreamResetError(f"The upstream {how} the connection {when}", fresh=fresh))
        del self._parser  # it knows this connection: without it, nothing here has to wait for the collector

    def pause_writing(self) -> None:
        """The upstream does not keep up."""
        self._drain = self._loop.create_future()

    def resume_writing(self) -> None:
        """It does again."""
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)
        self._drain = None

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        """An answer begins."""
        self._status = b""
        self._fields = []
        self._names = []
        self._size = 0
        self._in_head = True
        self._overhead = 0
        if self._head is not None or self._receiver is None:
            self._keep = False  # a second answer to one request: never let it meet another request

    def on_status(self, status: bytes) -> None:
        """A piece of the reason phrase."""
        self._status += status

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field; those after the body are trailers, which end here (T2)."""
        if self._in_head:
            self._fields.append((name, value))
            self._names.append(lower_case(name))
            self._size += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = False
        self._overhead = 0
        if self._receiver is None or self._head is not None:
            return
        status = self._parser.get_status_code()
        if self._size + len(self._status) > MAX_HEAD:
            raise UpstreamFramingError("The head of the upstream's answer is too large")
        if not self._status.isalnum() and is_unclear(self._status):  # the parser lets everything through here
            raise UpstreamFramingError("The reason in the upstream's answer has control characters")
        fields = end_to_end(self._fields, self._names)
        if status < 200:
            self._opening = b""
            self._interim = True
            if status < 100:
                raise UpstreamFramingError("The status of the upstream's answer is none of HTTP")
            if status == 101:
                raise UpstreamFramingError("The upstream switched protocols without being asked")
            lines = b"".join(b"%b: %b\r\n" % field for field in fields)
            self._receiver.received_interim(b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, self._status, lines))
            return
        framing = self._framing(status)
        self._keep = framing is not Framing.CLOSE and self._parser.should_keep_alive()
        if self._keep and self._parser.get_http_version() != "1.1":  # RFC 9112 sections 6.1 and 9.3
            self._keep = framing is not Framing.CHUNKED and b"close" not in connection_options(self._fields)
        first = {lower_case(name): value for name, value in reversed(fields)}
        self._head = Head(status, self._status, fields, first, framing)
        if self._method == b"HEAD" and framing is Framing.NONE:
            self._finish()  # the parser waits for a body that does not come
            self._parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._overhead = 0
        if self._receiver is not None:
            self._body.append(data)
        else:
            self._keep = False  # the body of an answer that has none

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._interim:
            self._interim = False
        elif self._receiver is not None and self._head is not None:
            if self._opening and self._keep:
                self._upstream.known.keep(self._opening, self._head, len(self._fields))
            self._finish()

    # -- inside

    def _framing(self, status: int) -> Framing:
        if self._method == b"HEAD" or status in (204, 304):
            return Framing.NONE
        if b"transfer-encoding" in self._names:
            codings = values_of(self._fields, b"transfer-encoding")
            if [coding.strip(b" \t").lower() for coding in codings] != [b"chunked"]:
                raise UpstreamFramingError("The answer of the upstream has a transfer coding other than chunked")
            return Framing.CHUNKED
        return Framing.SIZED if b"content-length" in self._names else Framing.CLOSE

    def _finish(self) -> None:
        assert self._head is not None
        self._head.whole = not self._told
        self._hand_over()
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return  # it gave the answer up
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        receiver.received_end()
        if self._keep and self._request_sent and not self._read_paused:
            self.fresh = False
            self._loop.call_soon(self._upstream.take_back, self)  # after the rest of what was read has been parsed
        else:
            self._close()

    def _hand_over(self) -> None:
        """What this read has brought: the head, and the body in one piece: borders of chunks may move (T1)."""
        if not self._told and self._head is not None and self._receiver is not None:
            self._told = True
            self._receiver.received_head(self._head)
        if self._body and self._receiver is not None:
            data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            self._receiver.received_data(data)

    def _fail(self, error: UpstreamError) -> None:
        self._hand_over()
        receiver, self._receiver = self._receiver, None
        self._close()
        if receiver is not None:
            receiver.received_error(error)

    def _close(self) -> None:
        self._keep = False
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    def _check_silence(self) -> None:
        """`idle_timeout`: silence of the upstream, before the head or after it; not that of a slow client (T6)."""
        left = self._upstream.idle_timeout - (self._loop.time() - self._heard_at)
        waits_for_client = self._read_paused or (not self._request_sent and self._drain is None)
        if left > 0 or waits_for_client:
            self._timer = self._loop.call_later(left if left > 0 else self._upstream.idle_timeout, self._check_silence)
        else:
            self._fail(UpstreamTimeoutError("The upstream was silent for longer than upstream.idle_timeout"))

    @property
    def usable(self) -> bool:
        """Whether an idle connection can carry another request."""
        return self._keep and not self.closed and self._transport is not None and not self._transport.is_closing()

    def is_quiet(self) -> bool:
        """Whether nothing waits to be read: its end, or bytes that nobody asked for, may have just come (T5)."""
        return not self._poll.poll(0)


class Upstream:
    """Where requests go, and the connections to it. Times in seconds."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_timeout: float,
        idle_timeout: float,
        path: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`path` is that of a Unix socket, which then takes the place of host and port."""
        self.host = host
        self.port = port
        self.connect_timeout = connect_timeout
        self.idle_timeout = idle_timeout
        self.outage_at = float("-inf")  # when it last refused or reset a new connection: a boundary signal
        self.tell_outage: Callable[[float], None] = lambda _: None  # has it kept, and tells other processes of it
        self.connections: set[UpstreamConnection] = set()
        self.tls = tls  # of connections to come
        self.known = KnownAnswers()
        self.make_room: Callable[[], None] = lambda: None  # descriptors may run short
        self._path = path
        self._is_address = _is_address(host)
        self._idle: list[UpstreamConnection] = []

    def idle(self) -> UpstreamConnection | None:
        """An idle connection that can be used at once, None if there is none."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since < IDLE_SECONDS and connection.is_quiet():
                return connection
            connection.abort()
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises UpstreamRefusedError or UpstreamTimeoutError (T7)."""
        loop = asyncio.get_running_loop()
        self.make_room()
        try:
            async with asyncio.timeout(self.connect_timeout):
                if self._path is not None:
                    _, connection = await loop.create_unix_connection(lambda: UpstreamConnection(self), self._path)
                    return connection
                if self._is_address:  # needs no look-up
                    _, connection = await loop.create_connection(
                        lambda: UpstreamConnection(self), self.host, self.port, ssl=self.tls
                    )
                    return connection
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self),
                    sock=await self._open_socket(loop),
                    ssl=self.tls,
                    server_hostname=self.host if self.tls is not None else None,
                )
        except TimeoutError:
            self._note_outage()
            raise UpstreamTimeoutError("No connection to the upstream within upstream.connect_timeout") from None
        except OSError as error:
            self._note_outage()
            detail = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else ""
            raise UpstreamRefusedError(f"No connection to the upstream: {_describe(error)}", detail=detail) from None
        return connection

    async def _open_socket(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        """A connected socket; of the addresses that a name has, the first that answers."""
        addresses = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY, loop=loop)

    def take_back(self, connection: UpstreamConnection) -> None:
        """An answer is complete; keep its connection for the next request."""
        if not connection.usable or len(self._idle) >= IDLE_CONNECTIONS:
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        oldest = self._idle[0]
        if connection.idle_since - oldest.idle_since >= IDLE_SECONDS:
            oldest.abort()

    def forget(self, connection: UpstreamConnection) -> None:
        """A connection is no more."""
        self.connections.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def saw_reset(self, error: UpstreamError) -> None:
        """A connection broke: where it was a new one, that is a boundary signal."""
        if isinstance(error, UpstreamResetError) and error.fresh:
            self._note_outage()

    def heard_of_outage(self) -> None:
        """Another process saw one."""
        self.outage_at = time.time()

    def _note_outage(self) -> None:
        self.outage_at = time.time()
        self.tell_outage(self.outage_at)

    def close(self) -> None:
        """Drop all connections."""
        for connection in list(self.connections):
            connection.abort()


def _is_address(host: str) -> bool:
    """Whether the host is an IP address, which needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _describe(error: OSError) -> str:
    """The kind of an error, without addresses."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not valid"
    if isinstance(error, ssl.SSLError):
        return "the TLS handshake failed"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if type(error).__name__ == "gaierror":
        return "its name cannot be resolved"
    return (error.strerror or "connection failed").lower()
