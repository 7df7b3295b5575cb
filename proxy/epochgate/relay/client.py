"""The client's side: one TCP connection, the requests that come on it, and the reply that is being written.

A connection answers its requests in order. Requests that were sent ahead wait in a queue; beyond a few the connection
is not read any further. A peer that half-closes (FIN after its request) is still there until a write to it fails (H1).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from typing import cast

import httptools

from epochgate.errors import BadRequestError
from epochgate.relay.clients import BODY_RATE, Clients
from epochgate.relay.downstream import Watcher
from epochgate.relay.headers import MAX_HEAD, Framing, connection_options, lower_case
from epochgate.relay.known import KnownRequests, with_length
from epochgate.relay.listener import notice_death
from epochgate.relay.reply import Reply, error_reply
from epochgate.relay.request import Body, Request

QUEUED_REQUESTS = 8  # sent ahead; more wait in the kernel
FLUSH_TIMEOUT = 30.0  # s for a peer to take the last bytes of a reply that breaks off
LINGER = 5.0  # s for a peer to close after the last reply; what it still sends meanwhile is dropped
PEER_CHECK = 0.2  # s between looks at a peer from which nothing is read
PROBE_AT = frozenset({1, 5, 25, 125})  # looks at which a half-closed peer is probed

_NO_LINGER = struct.pack("ii", 1, 0)


# Works on a request: what it returns goes on in a task; None: it goes on by itself, and calls `work_done`.
Handler = Callable[[Request], Coroutine[None, None, None] | None]


class ClientConnection(asyncio.Protocol):
    """One connection of a client. `handler` works on one request at a time and must finish or break off the reply."""

    def __init__(self, handler: Handler, clients: Clients) -> None:
        self._handler = handler
        self._clients = clients
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._incoming: Request | None = None  # its head or body is being read
        self._in_head = False
        self._head_timed = False  # the time for the rest of it runs
        self._overhead = 0  # bytes read since the last piece of a body; a head and trailers are no longer than that
        self._opening = b""  # the read that is being parsed, where a request begins with it
        self._served = False  # one request at least: a connection for one stream keeps nothing for the next
        self._known = KnownRequests(clients.heads)
        self._upgrade: Request | None = None  # it asks for another protocol; a new parser reads on
        self._queue: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf  # of an idle connection, in the loop's time
        self._peer_check: asyncio.TimerHandle | None = None
        self._reading = True
        self._last = False  # nothing is read after the request that came last
        self._lingering = False
        self._refusal: BadRequestError | None = None  # what comes cannot be understood; told when its turn comes
        self.current: Request | None = None
        self.reply: Reply | None = None
        self.watcher: Watcher | None = None
        self._until_lost: asyncio.Future[None] | None = None
        self._peer_checks = 0
        self.half_closed = False
        self.lost = False
        self.paused = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        if self._clients.admit(self):
            self._set_timer(self._clients.limits.connection_idle)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse; then begin with the next request, if none is being worked on."""
        at_start = self._incoming is None and not self._last
        if at_start and self._served and (request := self._read_known(data)) is not None:
            self._queue.append(request)
            self._next()
            self._steer_reading()
            return
        self._opening = data if at_start else b""
        self._overhead += len(data)
        while data and not self._last:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._pass_over_upgrade()
                continue
            except httptools.HttpParserError as error:
                cause = error.__context__
                if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(cause, BadRequestError):
                    fault = {"message": "a request could not be read", "exception": cause or error}  # a fault of ours
                    self._loop.call_exception_handler(fault)
                self._refuse(cause if isinstance(cause, BadRequestError) else _as_bad_request(error))
            else:
                if self._incoming is not None and self._overhead > MAX_HEAD:
                    self._refuse(BadRequestError("The head of the request is too large", status=431))
            break
        self._next()
        self._steer_reading()

    def eof_received(self) -> bool:
        """The client will send no more; what it asked for is still answered."""
        self.half_closed = True
        if self._incoming is not None:  # half a request and gone: it can never be answered
            if self._incoming is self.current:
                return False
            self._forget_incoming()
        if self.current is None and not self._queue:
            return False
        assert self._transport is not None
        if self._transport.get_extra_info("ssl_object") is not None:
            return False  # TLS knows no half-closed connection here
        self._last = True
        self._watch_peer()
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The client has gone."""
        self.lost = True
        if self._until_lost is not None:
            self._until_lost.set_result(None)
        self._clients.remove(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._queue.clear()
        self._known.forget()
        if self._incoming is not None and not self._in_head:
            self._incoming.body.break_off(ConnectionResetError("the client has gone"))
        self._incoming = None
        if self.reply is not None:
            self.reply.closed = True
        if self.watcher is not None:
            self.watcher.client_gone()
        del self._parser  # it knows this connection: without it, nothing here has to wait for the collector

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self.paused = True
        if self.watcher is not None:
            self.watcher.client_paused()

    def resume_writing(self) -> None:
        """It does again."""
        self.paused = False
        if self.watcher is not None:
            self.watcher.client_resumed()
        if self.current is None:
            self._next()
            self._steer_reading()

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        """A request begins."""
        self._incoming = Request(self)
        self._in_head = True
        self._head_timed = False
        self._overhead = 0  # what came with its beginning is counted when the head is complete

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        assert self._incoming is not None
        self._incoming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field; those after the body are trailers, which end here (T2)."""
        request = self._incoming
        if not self._in_head or request is None:
            return
        request.fields.append((name, value))
        lower = lower_case(name)
        request.names.append(lower)
        request.size += len(name) + len(value) + 4
        if lower not in request.first:
            request.first[lower] = value

    def on_headers_complete(self) -> None:
        """The head is there: the request can be worked on."""
        request = self._incoming
        assert request is not None
        self._overhead = 0
        if self._upgrade is not None:  # its head has been read; this one only says how its body is framed
            self._incoming, self._upgrade = self._upgrade, None
            self._in_head = False
            return
        if len(request.target) + request.size > MAX_HEAD:
            raise BadRequestError("The head of the request is too large", status=431)
        request.method = self._parser.get_method()
        version = self._parser.get_http_version()
        request.http11 = version == "1.1"
        request.keep_alive = self._parser.should_keep_alive()
        if not request.http11 and request.keep_alive:  # RFC 9112 section 9.3: `close` counts, whatever else is there
            request.keep_alive = b"close" not in connection_options(request.fields)
        request.body = self._body_of(request)
        self._in_head = False
        if request.method == b"CONNECT":
            raise BadRequestError("CONNECT is not served here", status=501)
        if not request.http11 and version != "1.0":
            raise BadRequestError("The version of the request is not HTTP/1.1", status=505)
        if request.is_repeated(b"host"):
            raise BadRequestError("Host may be given only once")
        if self._parser.should_upgrade():
            self._upgrade = request
        self._queue.append(request)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        assert self._incoming is not None
        self._overhead = 0
        self._incoming.body.feed(data)
        if self._deadline < math.inf and self._incoming is self.current:
            latest = self._loop.time() + self._clients.limits.body_time
            self._deadline = min(latest, self._deadline + len(data) / BODY_RATE)

    def on_message_complete(self) -> None:
        """The request is complete, unless the parser ends at its head because it asks for another protocol."""
        request = self._incoming
        if request is None or request is self._upgrade:
            return
        request.body.finish()
        self._incoming = None
        if self._served and self._opening and request.body.framing is Framing.SIZED and request.keep_alive:
            self._known.keep(self._opening, request)
        self._opening = b""  # what follows in it is another request
        if request is self.current:
            self._set_timer(None)
            self._clients.begin(self)
        if not request.keep_alive:
            self._last = True

    def _read_known(self, data: bytes) -> Request | None:
        """The request that `data` is, where it differs from one before at most in its body; else None."""
        split = self._known.split(data)
        if split is None:
            return None
        known, digits, body = split
        request = Request(self)
        request.method = known.method
        request.target = known.target
        request.names = known.names
        request.fields = with_length(known.fields, known.at, digits)
        request.first = known.first | {b"content-length": digits}
        request.known = known
        request.body = Body.whole(self, body)
        return request

    # -- for those who work on a request

    def body_taken(self) -> None:
        """A body was taken from: there is room for more."""
        self._steer_reading()

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if self._transport is not None and not self.lost:
            self._transport.write(data)

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            if self.half_closed:
                self._reset()  # what it was probed with, and then an end, may look complete
            self._transport.abort()

    def break_off(self, *, reset: bool) -> None:
        """End the connection after what was written, so that the reply does not look complete (T4).

        `reset`: only a RST tells that, since the end of the connection would end the body.
        """
        if self._transport is None or self.lost:
            return
        if reset:
            self._reset()
        self._transport.close()
        self._loop.call_later(FLUSH_TIMEOUT, self._transport.abort)

    def _reset(self) -> None:
        """Have the end of the connection be a RST."""
        if self._transport is None or self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)

    @property
    def busy(self) -> bool:
        """Whether a request is being worked on, or the end of an answer has not gone out yet."""
        transport = self._transport
        return self.current is not None or (transport is not None and transport.get_write_buffer_size() > 0)

    def close_when_idle(self) -> None:
        """Serve no request beyond the one that is being worked on."""
        if self.current is None:
            if self._transport is not None:
                self._transport.close()
        elif self.reply is not None:
            self.reply.keep_alive = False

    def until_lost(self) -> asyncio.Future[None]:
        """Done when this connection, which still stands, is no more: what was written has gone out, or never will."""
        if self._until_lost is None:
            self._until_lost = self._loop.create_future()
        return self._until_lost

    # -- the loop of requests

    def _next(self) -> None:
        if self.current is not None or self.lost:
            return
        if self._queue and self.paused:
            self._set_timer(self._clients.limits.connection_idle)  # answers that nobody takes would pile up (T6)
        elif self._queue:
            request = self._queue.popleft()
            if request.body.complete:
                self._set_timer(None)
                self._clients.begin(self)
            else:
                self._set_timer(self._clients.limits.body_time)
            self.current = request
            self.reply = Reply(self, request)
            try:
                work = self._handler(request)
            except Exception as error:  # noqa: BLE001  # a fault of ours: logged, and the connection breaks off
                self._loop.call_exception_handler({"message": "a request could not be handled", "exception": error})
                self.work_done()
            else:
                if work is not None:
                    self.go_on(work)
        elif self._refusal is not None:
            self._tell_refusal(self._refusal)
        elif self._last:
            self._close()
        elif not self._in_head:
            if self._deadline == math.inf:  # empty lines before a request gain no time
                self._set_timer(self._clients.limits.connection_idle)
        elif not self._head_timed:  # it does not begin again with each byte
            self._head_timed = True
            self._set_timer(self._clients.limits.head_time)

    def go_on(self, work: Coroutine[None, None, None]) -> None:
        """Go on with the work on the current request in a task of its own."""
        self._task = self._loop.create_task(self._finish(work))

    async def _finish(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # a fault of ours: logged, and the reply breaks off
            self._loop.call_exception_handler({"message": "a request could not be handled", "exception": error})
        finally:
            self._task = None
            self.work_done()

    def work_done(self) -> None:
        """The work on the current request has ended; whatever it left open is broken off."""
        request, reply = self.current, self.reply
        assert request is not None
        assert reply is not None
        watcher, self.watcher = self.watcher, None
        if watcher is not None:  # given up in the middle
            watcher.client_gone()
        if not reply.finished:
            self.abort()
        elif not request.body.complete or not reply.keep_alive:
            self._last = True  # what is left of the request is not read
            self._queue.clear()
            self._refusal = None
        self.current = None
        self.reply = None
        self._served = True
        self._set_timer(None)
        self._clients.finish(self)
        self._next()
        self._steer_reading()

    def _body_of(self, request: Request) -> Body:
        """The body that the head announces. Raises BadRequestError where two servers could read it differently."""
        coding = request.first.get(b"transfer-encoding")
        if coding is not None:
            if not request.http11:
                raise BadRequestError("HTTP/1.0 has no Transfer-Encoding")
            if coding.strip(b" \t").lower() != b"chunked" or request.is_repeated(b"transfer-encoding"):
                raise BadRequestError("No transfer coding but chunked is served here", status=501)
            return Body(self, Framing.CHUNKED, 0)
        length = request.first.get(b"content-length")
        return Body(self, Framing.NONE, 0) if length is None else Body(self, Framing.SIZED, int(length))

    def _steer_reading(self) -> None:
        """Read only while there is room for what comes. What comes after the last request is dropped."""
        incoming = self._incoming
        full = not self._last and (
            len(self._queue) >= QUEUED_REQUESTS
            or (incoming is not None and not self._in_head and incoming.body.size > MAX_HEAD)
        )
        if self._transport is None or self.lost or self._reading is not full or self._transport.is_closing():
            return
        self._reading = not full
        if full:
            self._transport.pause_reading()
            self._watch_peer()
        else:
            self._transport.resume_reading()
            if incoming is not None and incoming is self.current:
                self._set_timer(self._clients.limits.body_time)

    def _pass_over_upgrade(self) -> None:
        """A request that asks for another protocol is served as HTTP/1.1: a new parser reads its body and goes on."""
        request = self._upgrade
        assert request is not None
        self._parser = httptools.HttpRequestParser(self)
        framing = request.body.framing
        if framing is Framing.NONE:
            self._upgrade = None
            self.on_message_complete()
        elif framing is Framing.CHUNKED:
            self._parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        else:
            self._parser.feed_data(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % request.body.length)

    def _refuse(self, error: BadRequestError) -> None:
        """Read nothing more. The request that is being worked on answers for its own body (400)."""
        self._last = True
        if self._incoming is not None and self._incoming is self.current:
            self._incoming.body.break_off(error)
            self._incoming = None
        else:
            self._refusal = error
            self._forget_incoming()

    def _forget_incoming(self) -> None:
        """A request whose rest will not come, and on which nobody has begun to work."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None and incoming in self._queue:
            self._queue.remove(incoming)

    def _tell_refusal(self, error: BadRequestError) -> None:
        self._refusal = None
        self.write(error_reply(error.status, str(error)))
        self._close()

    def _close(self) -> None:
        """Close after the last reply, once the client has: a reset for what it still sends could destroy the reply."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._lingering:
            return
        if self.half_closed or not transport.can_write_eof():
            transport.close()
        else:
            self._lingering = True
            transport.write_eof()
            self._set_timer(LINGER)

    def _set_timer(self, seconds: float | None) -> None:
        """When to look after this connection. A timer that is set already may fire early, and is set again then."""
        self._deadline = math.inf if seconds is None else self._loop.time() + seconds
        if seconds is None or self.lost:
            return
        if self._timer is not None:
            if self._timer.when() <= self._deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._deadline > self._loop.time() + 0.001:
            if self._deadline < math.inf:
                self._timer = self._loop.call_at(self._deadline, self._look)
        else:
            self._time_out()

    def _time_out(self) -> None:
        if self._transport is None:
            return
        if self.current is not None:
            self._time_out_body()
        elif self._lingering and self._transport.get_write_buffer_size():
            self._set_timer(LINGER)  # it is still reading
        else:
            self._clients.closed["slow_head"] += self._in_head
            self._last = True
            self._queue.clear()
            self._transport.close()
            self._loop.call_later(FLUSH_TIMEOUT, self._transport.abort)

    def _time_out_body(self) -> None:
        """The body of the request that is being worked on has stalled."""
        if self._incoming is not self.current or self.reply is None:
            return
        if self.reply.started or not self._reading:  # nobody waits for the rest, or it is the upstream that stalls
            self._set_timer(self._clients.limits.body_time)
            return
        self._clients.closed["slow_body"] += 1
        self._refuse(BadRequestError("The body of the request did not come in time", status=408))

    def _watch_peer(self) -> None:
        """Nothing is read: only the kernel can tell then that the peer is no more."""
        if self._peer_check is not None or self._transport is None:
            return
        notice_death(self._transport.get_extra_info("socket"), 5, 5)
        self._peer_check = self._loop.call_later(PEER_CHECK, self._check_peer)

    def _check_peer(self) -> None:
        self._peer_check = None
        if self.lost or self._transport is None or (self._reading and not self.half_closed):
            return
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # reset, or closed both ways
            self.abort()
        else:
            self._peer_checks += 1
            if self.half_closed and self._peer_checks in PROBE_AT and self.reply is not None and not self.paused:
                self.reply.probe()
            self._peer_check = self._loop.call_later(PEER_CHECK, self._check_peer)


def _as_bad_request(error: httptools.HttpParserError) -> BadRequestError:
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return BadRequestError("The method of the request is not known", status=501)
    return BadRequestError("The request is not HTTP/1.1")
