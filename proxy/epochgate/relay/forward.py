"""One request on its way to the upstream: connection, head, body as it comes, and who hears the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from epochgate.errors import UpstreamError
from epochgate.guard.mcp import Call, may_initialize, method_of, read_call
from epochgate.relay.coding import decoded_within
from epochgate.relay.context import Context
from epochgate.relay.copies import FREE, Copy
from epochgate.relay.downstream import Downstream, Outcome, Tell, telling
from epochgate.relay.flow import LIVE_DATA
from epochgate.relay.headers import (
    LAST_CHUNK,
    VIA,
    Field,
    Framing,
    Head,
    chunk,
    has_plain_charset,
    head,
    prefixed,
    values_of,
    without,
)
from epochgate.relay.known import form_of
from epochgate.relay.reply import Reply
from epochgate.relay.request import Request
from epochgate.relay.upstream import Receiver, UpstreamConnection

HANDSHAKE_BODY = 1024 * 1024  # bytes of a POST that may be an `initialize` with a stale session id (L2)
QUICKLY_READ = 16 * 1024  # bytes; in the worst case it takes some ms
HANDSHAKE_TIME = 10.0  # s that they may take
_reader = ThreadPoolExecutor(1, "epochgate-reader")

if TYPE_CHECKING:
    from epochgate.relay.tracing import RequestSpan  # an extra

Choose = Callable[[UpstreamConnection, Head], "Receiver | None"]
Leave = Callable[[UpstreamConnection], object]


class Opening:
    """Waits for the head of the answer, and lets `choose` say who hears the rest."""

    __slots__ = ("_choose", "_connection", "_downstream", "_leave")

    def __init__(
        self, connection: UpstreamConnection, downstream: Downstream, choose: Choose, leave: Leave | None
    ) -> None:
        self._connection = connection
        self._downstream = downstream
        self._choose = choose
        self._leave = leave

    def received_interim(self, head: bytes) -> None:
        """A 1xx answer is passed on."""
        self._downstream.reply.interim(head)

    def received_head(self, head: Head) -> None:
        """The head of the answer."""
        receiver = self._choose(self._connection, head)
        if receiver is None:
            self._connection.abort()
        else:
            self._connection.hand_over(receiver)

    def received_data(self, data: bytes) -> None:
        """Comes after the head only."""

    def received_end(self) -> None:
        """Comes after the head only."""

    def received_all(self) -> None:
        """Nothing to write yet."""

    def received_error(self, error: UpstreamError) -> None:
        """No head will come."""
        self._downstream.finish(error)

    def client_gone(self) -> None:
        """A request that has no answer yet cannot be resumed (H1), though there may be something to hear in it."""
        if self._leave is None:
            self._connection.abort()
        else:
            self._leave(self._connection)
        self._downstream.finish(Outcome.DONE)

    def client_paused(self) -> None:
        """The client does not keep up with 1xx answers."""
        self._connection.pause()

    def client_resumed(self) -> None:
        """It does again."""
        self._connection.resume()


class Forwarder:
    """Sends one request; more than once only one whose body means nothing (R5, R9)."""

    def __init__(self, context: Context, request: Request, reply: Reply, span: RequestSpan | None) -> None:
        self.reply = reply
        self.downstream: Downstream  # the client, for whoever hears the answer
        self.copying = False  # whether what the body says matters
        self.leave: Leave | None = None  # takes the connection where the client goes before the answer; None: given up
        self._context = context
        self._request = request
        self._client = request.connection
        self._span = span
        self._sent: list[bytes] = []  # a copy of the request body, as far as it is needed
        self._sent_size = 0
        self._torn = False  # some of what was sent of the body is not here any more
        self._copy: Copy | None = None
        self._rpc_method: str | None = None

    def forget(self) -> None:
        """What was copied of the body is not needed any more; an answer may stream for hours."""
        self.copying = False
        if self._span is not None:
            self._rpc_method = self.rpc_method
        self._sent.clear()
        if self._copy is not None:
            self._copy.resize(0)

    @property
    def rpc_method(self) -> str | None:
        """The JSON-RPC method that the body asks for, as far as the body was copied."""
        return method_of(b"".join(self._sent)) if self._sent else self._rpc_method

    def may_initialize(self) -> bool:
        """Whether the body may hold an `initialize`, however it came and is written: a quick look."""
        body = self._sent[0] if len(self._sent) == 1 else b"".join(self._sent)
        if b"initialize" in body or b"\\u" in body:
            return True
        return b"\0" in body or b"content-encoding" in self._request.first

    def call(self) -> Call | None:
        """What the POST asks for, None where its body was too large to be read."""
        if self._sent_size > LIVE_DATA:
            return None
        body = b"".join(self._sent)
        if b"content-encoding" in self._request.first:
            plain = self._plain(body)
            body = body if plain is None else plain
        return read_call(body)

    async def is_handshake(self, *, unknown: bool) -> bool:
        """Whether the body, which was read ahead, is an `initialize`, or for a session that is `unknown` may be one.

        Anybody may send one that takes long to read: it is read beside the traffic, and one after the other.
        """
        if self._sent_size <= QUICKLY_READ and b"content-encoding" not in self._request.first:
            return self._is_handshake(unknown)
        return await self._context.loop.run_in_executor(_reader, self._is_handshake, unknown)

    def _is_handshake(self, unknown: bool) -> bool:
        call = self.call()
        return (call is not None and call.initialize) or (unknown and self._may_be_handshake())

    def _may_be_handshake(self) -> bool:
        """Whether a server may take the body for an `initialize`; all of it was read ahead, or nobody knows (L2)."""
        if not self._request.body.complete or not 0 < self._sent_size <= HANDSHAKE_BODY:
            return False
        body = b"".join(self._sent)
        plain = self._plain(body)
        if plain is None or not has_plain_charset(self._request.fields) or may_initialize(plain):
            return True
        return plain is not body and read_call(body).initialize  # some servers know no content codings

    def _plain(self, body: bytes) -> bytes | None:
        """A copied body without its content coding, None where this is not known, or more than a handshake came out."""
        return decoded_within(HANDSHAKE_BODY, body, b", ".join(values_of(self._request.fields, b"content-encoding")))

    async def send(self, choose: Choose, fields: list[Field] | None = None) -> Outcome:
        """Send the request, and wait until its answer is dealt with. Raises UpstreamError where there is none.

        `fields` are those that go on, where they are not just the request's own end-to-end ones.
        """
        upstream = self._context.upstream
        connection = upstream.idle() or await upstream.connect()
        if self._client.lost:  # it would not be told
            connection.abort()
            return Outcome.DONE
        ended: asyncio.Future[Outcome] = self._context.loop.create_future()
        bodiless = self._torn
        self.begin(connection, choose, telling(ended), fields)
        if not bodiless and not self._request.body.complete:
            await self._send_rest(connection, ended)
        return await ended

    def begin(
        self,
        connection: UpstreamConnection,
        choose: Choose,
        tell: Tell,
        fields: list[Field] | None = None,
    ) -> None:
        """Send what is here of the request on this connection; `tell` hears how it ended.

        Where it is sent again, and its body cannot be, it goes without one: what follows is not to be taken for it.
        """
        request = self._request
        self.downstream = Downstream(self._client, self.reply, tell)
        opening = Opening(connection, self.downstream, choose, self.leave)
        self._client.watcher = opening
        connection.begin(opening, request.method)
        body = request.body
        if self._torn:
            connection.write(self._head(fields, bodiless=True))
            connection.request_sent()
            return
        data = self._head(fields)
        if self._sent:
            data += self._framed(b"".join(self._sent))
        if not body.complete or body.size:
            data += self._framed(self._take())
        if not body.complete:
            connection.write(data)
            return
        connection.write(data + LAST_CHUNK if body.framing is Framing.CHUNKED else data)
        connection.request_sent()

    async def wait_for(self, attach: Callable[[Downstream], None]) -> Outcome:
        """Let a flow that is there already answer the request."""
        ended: asyncio.Future[Outcome] = self._context.loop.create_future()
        self.downstream = Downstream(self._client, self.reply, telling(ended))
        attach(self.downstream)
        return await ended

    def _head(self, fields: list[Field] | None, *, bodiless: bool = False) -> bytes:
        """The head of the request as it goes on."""
        request = self._request
        known = request.known if fields is None and self._span is None and not bodiless else None
        if known is not None and known.outgoing is not None:
            return known.outgoing.with_length(request.first[b"content-length"])
        fields = self._addressed(request.end_to_end() if fields is None else fields)
        if bodiless:
            fields = without(fields, b"content-length")
        elif request.body.framing is Framing.CHUNKED:
            fields.append((b"Transfer-Encoding", b"chunked"))
        start = b"%b %b HTTP/1.1" % (request.method, prefixed(request.target, self._context.prefix))
        data = head(start, fields)
        if known is not None:
            known.outgoing = form_of(data)
        return data

    def _addressed(self, fields: list[Field]) -> list[Field]:
        """With the upstream's authority in `Host`, unless the client's is to be kept, and `Via`."""
        context = self._context
        if not context.keep_host:
            fields = [
                (name, context.authority) if len(name) == 4 and name.lower() == b"host" else (name, value)
                for name, value in fields
            ]
            if b"host" not in self._request.first:
                fields.insert(0, (b"Host", context.authority))
        fields.append(VIA)
        return fields if self._span is None else self._span.pass_on(fields)

    async def _send_rest(self, connection: UpstreamConnection, ended: asyncio.Future[Outcome]) -> None:
        """Send what is still to come of the body, as it comes, as long as nobody has answered."""
        body = self._request.body
        while not ended.done():
            waiting = asyncio.ensure_future(body.wait())
            await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                if not waiting.cancel() and (error := waiting.exception()) is not None:
                    error.__traceback__ = None  # the client has gone, as everybody knows; and no cycle is to be left
                return
            await waiting
            connection.write(self._framed(self._take()))
            if body.complete:
                if body.framing is Framing.CHUNKED:
                    connection.write(LAST_CHUNK)
                connection.request_sent()
                return
            await connection.drained()

    def _take(self) -> bytes:
        data = self._request.body.take()
        if self.copying:
            self._sent_size += len(data)
            is_post = self._request.method == b"POST"  # the body of another one means nothing
            if self._sent_size <= FREE or (is_post and self._sent_size <= LIVE_DATA and self._has_room()):
                self._sent.append(data)
            else:
                self._sent_size = LIVE_DATA + 1
                self._sent.clear()
                self._torn = True
        return data

    def _has_room(self) -> bool:
        """Whether the copy of a long body may be kept."""
        if self._copy is None:
            self._copy = Copy(self._context.copies)
        if self._copy.resize(self._sent_size):
            return True
        self._copy.resize(0)
        return False

    def _framed(self, data: bytes) -> bytes:
        return chunk(data) if data and self._request.body.framing is Framing.CHUNKED else data

    async def read_ahead(self) -> None:
        """Read the body before anything is forwarded, as far as an `initialize` could be long."""
        body = self._request.body
        self._invite_body()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKE_TIME):
                while self._sent_size <= HANDSHAKE_BODY:
                    data = body.take()
                    self._sent_size += len(data)
                    self._sent.append(data)
                    if body.complete or (self._sent_size > FREE and not self._has_room()):
                        break
                    await body.wait()

    def _invite_body(self) -> None:
        """A client that waits for a `100 Continue` gets it from the proxy where the proxy reads first."""
        expects = (self._request.get(b"expect") or b"").lower() == b"100-continue"
        if expects and not self._request.body.complete and not self._request.body.size:
            self.reply.interim(b"HTTP/1.1 100 Continue\r\n\r\n")
