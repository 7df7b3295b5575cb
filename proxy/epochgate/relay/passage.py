"""An answer that is relayed as it comes, and what may look at a copy of it on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from epochgate.errors import UpstreamError
from epochgate.guard.mcp import Headers, RpcId, holds_initialize_result
from epochgate.guard.policy import Policy
from epochgate.guard.record import Asked, Origin, Session, Stream
from epochgate.guard.refusal import may_fence
from epochgate.guard.sse import Block, Framer, only_block
from epochgate.guard.watch import Watch
from epochgate.relay.coding import decoded, decoder_of
from epochgate.relay.context import Context
from epochgate.relay.copies import FREE, Copies, Copy
from epochgate.relay.downstream import Downstream, Outcome
from epochgate.relay.flow import LIVE_DATA
from epochgate.relay.headers import Head
from epochgate.relay.upstream import UpstreamConnection

LOSS_BODY = {400: 64 * 1024, 404: 1024 * 1024}  # bytes that are read to see whether they tell of a lost session (N1)
LOSS_TIME = 2.0  # s that it may take to come


class Tap(Protocol):
    """Looks at a copy of a body."""

    def data(self, data: bytes) -> None:
        """A piece of it."""

    def end(self) -> None:
        """Its clean end."""

    def close(self) -> None:
        """It is over, clean or not."""


class _Answer:
    """What both kinds below have in common: the head has come, and a client that is gone or slow is told upstream."""

    def __init__(self, connection: UpstreamConnection, downstream: Downstream) -> None:
        self._connection = connection
        self._downstream = downstream
        downstream.client.watcher = self
        if downstream.client.paused:
            connection.pause()

    def received_interim(self, head: bytes) -> None:
        """Cannot come any more."""

    def received_head(self, head: Head) -> None:
        """Has come already."""

    def client_gone(self) -> None:
        """Nobody is there to read it."""
        self._connection.abort()
        self._downstream.finish(Outcome.DONE)

    def client_paused(self) -> None:
        """The client does not keep up: read no further."""
        self._connection.pause()

    def client_resumed(self) -> None:
        """It does again."""
        self._connection.resume()


class Passage(_Answer):
    """Relays one answer as it comes (T1, T4, T6)."""

    def __init__(
        self,
        connection: UpstreamConnection,
        head: Head,
        downstream: Downstream,
        context: Context,
        tap: Tap | None = None,
    ) -> None:
        super().__init__(connection, downstream)
        self._context = context
        self._tap = tap
        self._last = b""  # the end of what was written, where a drain has to know it
        self._ending = False
        self._is_stream = not head.whole and head.is_stream
        if self._is_stream:
            context.streams.add(self)
        downstream.reply.pass_on(head)

    def received_data(self, data: bytes) -> None:
        """A piece of the body."""
        if self._tap is not None:
            self._tap.data(data)
        self._downstream.reply.write(data)
        if self._is_stream:
            self._last = (self._last + data[-4:])[-4:]
            if self._ending:
                self.end_at_boundary()

    def received_end(self) -> None:
        """A clean end stays a clean end."""
        if self._tap is not None:
            self._tap.end()
        self._end()

    def received_error(self, error: UpstreamError) -> None:
        """A truncated body is passed on as an aborted one."""
        self._context.saw_upstream_error(error)
        self._downstream.reply.break_off()
        self._finish()

    def client_gone(self) -> None:
        """Nobody is there to read it."""
        self._connection.abort()
        self._finish()

    def end_at_boundary(self) -> None:
        """The proxy drains: end cleanly after a whole event."""
        self._ending = True
        if not self._downstream.done and (not self._last or self._last.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))):
            self._connection.abort()
            self._end()

    def _end(self) -> None:
        self._downstream.reply.end()
        self._finish()

    def _finish(self) -> None:
        self._context.streams.discard(self)
        if self._tap is not None:
            self._tap.close()
            self._tap = None
        self._downstream.finish(Outcome.DONE)

    def received_all(self) -> None:
        """Write what this read has brought."""
        self._downstream.reply.flush()


class Suspect(_Answer):
    """Holds back a 404 or a 400 until its body tells whether the session is lost (N1)."""

    def __init__(
        self,
        connection: UpstreamConnection,
        head: Head,
        downstream: Downstream,
        decide: Callable[[bytes], bool],
        copies: Copies,
    ) -> None:
        super().__init__(connection, downstream)
        self._head = head
        self._decide = decide  # takes the plain body; True: the session is lost, and the exchange answers
        self._body = bytearray()
        self._copy = Copy(copies)
        self._passing = False
        self._timer = asyncio.get_running_loop().call_later(LOSS_TIME, self._time_out)

    def received_data(self, data: bytes) -> None:
        """A piece of the body; a long one is no answer of this kind."""
        if self._passing:
            self._downstream.reply.write(data)
            return
        self._body += data
        if len(self._body) > LOSS_BODY[self._head.status] or not self._copy.resize(len(self._body)):
            self._pass()

    def received_end(self) -> None:
        """All of it is here."""
        self._timer.cancel()
        if not self._passing:
            if self._decide(decoded(bytes(self._body), self._head.get(b"content-encoding"))):
                self._copy.resize(0)
                self._downstream.finish(Outcome.REFUSED)
                return
            self._pass()
        self._downstream.reply.end()
        self._downstream.finish(Outcome.DONE)

    def received_error(self, error: UpstreamError) -> None:  # noqa: ARG002
        """It broke off: pass on what came, as broken off."""
        if not self._passing:
            self._pass()
        self._downstream.reply.break_off()
        self._downstream.finish(Outcome.DONE)

    def received_all(self) -> None:
        """Write what this read has brought."""
        if self._passing:
            self._downstream.reply.flush()

    def client_gone(self) -> None:
        """Nobody is there to read it."""
        self._timer.cancel()
        self._copy.resize(0)
        super().client_gone()

    def _time_out(self) -> None:
        """Who answers a lost session says so at once: this is something else, perhaps a stream."""
        self._pass()
        self.received_all()

    def _pass(self) -> None:
        self._timer.cancel()
        self._passing = True
        self._downstream.reply.pass_on(self._head)
        self._downstream.reply.write(bytes(self._body))
        self._body.clear()
        self._copy.resize(0)


class BodyTap:
    """Reads a whole body of at most `LIVE_DATA` bytes and hands it on, in plain bytes, at its clean end."""

    def __init__(self, content_encoding: bytes | None, read: Callable[[bytes], None], copies: Copies) -> None:
        self._coding = content_encoding
        self._copies = copies
        self._copy: Copy | None = None
        self._read = read
        self._pieces: list[bytes] = []
        self._size = 0

    def data(self, data: bytes) -> None:
        """See `Tap`."""
        self._size += len(data)
        if self._size <= LIVE_DATA and (self._size <= FREE or self._has_room()):
            self._pieces.append(data)
        else:
            self._size = LIVE_DATA + 1
            self._pieces.clear()
            self.close()

    def _has_room(self) -> bool:
        self._copy = self._copy or Copy(self._copies)
        return self._copy.resize(self._size)

    def end(self) -> None:
        """See `Tap`."""
        if 0 < self._size <= LIVE_DATA:
            self._read(decoded(b"".join(self._pieces), self._coding))

    def close(self) -> None:
        """See `Tap`."""
        if self._copy is not None:
            self._copy.resize(0)


class StreamTap:
    """Records a guarded stream that came in one read, with its end: nothing of it can be held (L3, R12)."""

    def __init__(
        self,
        context: Context,
        policy: Policy,
        session: Session,
        stream: Stream,
        head: Head,
        credentials: bytes,
        asked: Asked,
    ) -> None:
        self._context = context
        self._asked = asked
        self._policy = policy
        self._session = session
        self._watch = Watch(policy, session, head.fields, stream)
        self._may_fence = may_fence(session, credentials, granted=head.is_stream)
        if self._may_fence and self._watch.head():
            context.live_change(policy, session)

    def data(self, data: bytes) -> None:
        """See `Tap`."""
        now = self._session.came_at(self._asked, time.time())
        block = only_block(data, LIVE_DATA)
        blocks = Framer(keep_data=LIVE_DATA).feed(data) if block is None else [block]
        self._context.telemetry.events += len(blocks)
        if True in [self._watch.see(block, now) for block in blocks] and self._may_fence:
            self._context.live_change(self._policy, self._session)

    def end(self) -> None:
        """See `Tap`."""

    def close(self) -> None:
        """See `Tap`."""


class HandshakeTap:
    """Reads an `initialize` that is answered by a stream (L1); its events are cursors too (L4)."""

    def __init__(
        self, policy: Policy, head: Head, owes: tuple[RpcId, ...], grant: Callable[[bytes], Session], copies: Copies
    ) -> None:
        self._copy = Copy(copies)
        self._policy = policy
        self._fields: Headers = head.fields
        self._owes = owes
        self._grant = grant
        self._decoder = decoder_of(head.get(b"content-encoding"))
        self._framer = Framer(keep_data=LIVE_DATA)
        self._before: list[Block] = []  # blocks that came before the result
        self._size = 0  # bytes of those that are kept
        self._watch: Watch | None = None

    def data(self, data: bytes) -> None:
        """See `Tap`."""
        plain = data if self._decoder is None else self._decoder.decode(data)
        for block in self._framer.feed(plain or b""):
            if self._watch is not None:
                self._watch.see(block, time.time())
                continue
            self._size += len(block.data or b"") + 1024
            if self._size > LIVE_DATA:  # no handshake is that long; no session is opened
                self._before.clear()
                continue
            self._before.append(block)
            if block.data and holds_initialize_result(block.data):
                session = self._grant(block.data)
                self._watch = Watch(self._policy, session, self._fields)
                if any(earlier.id is not None for earlier in self._before):
                    self._watch.stream = session.open_stream(Origin.INITIALIZE, self._owes, session.credentials)
                for earlier in self._before:
                    self._watch.see(earlier, time.time())
                self._before.clear()
        if not self._copy.resize(self._framer.kept + (self._size if self._before else 0)):
            self._framer.let_go()
            self._before.clear()
            self._size = LIVE_DATA + 1
            self._copy.resize(self._framer.kept)

    def end(self) -> None:
        """See `Tap`."""

    def close(self) -> None:
        """See `Tap`."""
        self._copy.resize(0)
