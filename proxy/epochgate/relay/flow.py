"""The upstream half of a guarded stream: it is read, recorded and checked, with a client on the other side or without.

A flow outlives the request that began it: when the client goes away it is held (H1), and a later resume attaches a
client anew (R4). Until a judge has spoken the head of a resumed stream is held back (R5).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from epochgate.errors import UpstreamError
from epochgate.guard.judge import EMPTY_RESUMES, Cursor, Judge, Step, is_refused
from epochgate.guard.ordinary import record_ordinary
from epochgate.guard.policy import Mode, Policy, Proof
from epochgate.guard.record import Asked, Session, Stream
from epochgate.guard.refusal import may_fence, may_tell_in_band, told_events
from epochgate.guard.sse import MARK, Block, Framer, Kind, end_of_block
from epochgate.guard.verdict import Reason, proven, unproven
from epochgate.guard.watch import Watch
from epochgate.relay.backlog import LONGEST_REST
from epochgate.relay.coding import Decoder, decoder_of
from epochgate.relay.copies import FREE, Copy
from epochgate.relay.downstream import Downstream, Outcome, Response
from epochgate.relay.headers import Framing, Head, is_like_ascii, values_of, without
from epochgate.relay.heartbeat import COMMENT, Heartbeat
from epochgate.relay.hold import Tail
from epochgate.relay.upstream import UpstreamConnection

if TYPE_CHECKING:
    from epochgate.relay.context import Context

LIVE_DATA = 4 * 1024 * 1024  # bytes of one event that are read for tokens and answers; longer ones are only digested
JUDGED_BLOCK = 32 * 1024 * 1024  # bytes of one block that can be held back until it is checked
MOST_WAITING = 1024 * 1024  # bytes of released blocks that wait for the head; then the upstream waits too (T6)
CONTEST = 0.5  # s after a resume from the buffer in which another one is taken for a rival, not for the same client


@dataclass(frozen=True, slots=True)
class Answered:
    """An upstream connection whose answer has begun."""

    connection: UpstreamConnection
    head: Head
    asked: Asked


class Flow:
    """One guarded stream on one upstream connection."""

    __slots__ = (
        "_asked",
        "_at_start",
        "_attached_at",
        "_begun",
        "_checked",
        "_clean",
        "_coded",
        "_copy",
        "_decoder",
        "_ending",
        "_enforced",
        "_framer",
        "_heartbeat",
        "_holdable",
        "_ids",
        "_left",
        "_marked",
        "_may_fence",
        "_readable",
        "_reported",
        "_tail",
        "_timer",
        "_waiting",
        "_watch",
        "closed",
        "connection",
        "context",
        "credentials",
        "cursor",
        "downstream",
        "ended",
        "head",
        "judge",
        "pending",
        "policy",
        "session",
        "stream",
    )

    def __init__(
        self,
        context: Context,
        policy: Policy,
        session: Session,
        stream: Stream,
        answer: Answered,
        downstream: Downstream,
        *,
        credentials: bytes,
        cursor: bytes = b"",
        judge: Judge | None = None,
    ) -> None:
        self.context = context
        self.policy = policy
        self.session = session
        self.stream = stream
        self.connection = connection = answer.connection
        self.head = head = answer.head
        self._asked = answer.asked
        self.downstream: Downstream | None = downstream
        self.credentials = credentials  # of the request that the upstream answered with it
        self.cursor = cursor
        self.judge = judge
        self.pending: list[bytes] = []  # released blocks that wait for the head
        self._waiting = 0  # bytes of these
        self._coded = bytearray()  # read, and not released before the block that it belongs to is whole and checked
        self._enforced = policy.mode is Mode.ENFORCE
        self._holdable = self._enforced and Proof.CONNECTION in policy.accept and policy.hold_time > 0
        self._checked = judge is not None and self._enforced  # whole blocks are released, after they are checked
        self._watch = Watch(policy, session, head.fields, stream)
        self._may_fence = may_fence(session, credentials, granted=head.is_stream)  # a body without a type is no grant
        self._reported = None if judge is None else judge.verdict
        self._timer: asyncio.TimerHandle | None = None
        self._decoder: Decoder | None = None
        if head.get(b"content-encoding"):
            self._decoder = decoder_of(b", ".join(values_of(head.fields, b"content-encoding")))
        if not is_like_ascii(head.fields):
            self._decoder = Decoder(())  # nor is that readable here
        keep = JUDGED_BLOCK if self._checked else policy.hold_bytes if self._holdable else 0
        raw = keep if self._decoder is None else 0
        self._framer = Framer(keep_raw=raw, keep_data=max(LIVE_DATA, keep))  # what can be replayed is read: R11, H3
        self._tail = Tail(stream.end - 1, policy.hold_bytes)
        self._copy: Copy | None = None
        self.ended = False  # nothing more is read from the upstream
        self.closed = False
        self._clean = False  # the upstream ended the stream, it did not break off
        self._readable = True
        self._ending = False
        self._attached_at = float("-inf")
        self._left = -1  # the last position when the client left
        self._ids = stream.last_id is not None
        self._begun = False  # the first block has come
        self._marked = False  # it is that block's turn, and it had a byte order mark, which means nothing elsewhere
        self._at_start = True  # the client got nothing of the body yet, as far as blocks go out one by one
        stream.left_at = None
        session.open_flows += 1
        context.telemetry.open_streams += 1
        if self._decoder is not None:
            self._holdable = False  # coded bytes cannot be cut at blocks
        if self._holdable:
            context.holds.add(self)
        known = head.is_stream or judge is not None  # else it may be a body of any kind, to be left alone
        if known:
            context.streams.add(self)
        downstream.client.watcher = self
        if downstream.client.paused:
            connection.pause()
        if judge is None or not self._enforced or judge.verdict is not None:
            self._open_head()
        else:
            self._set_timer(policy.first_event_timeout, self._release_silent)
        if judge is None and self._may_fence and self._watch.head():
            self._see_another_epoch()
        beats = known and self._enforced and policy.keepalive
        self._heartbeat = Heartbeat(beats, self._beat) if beats else None

    # -- the upstream

    def received_interim(self, head: bytes) -> None:
        """Cannot come any more."""

    def received_head(self, head: Head) -> None:
        """Has come already."""

    def received_data(self, data: bytes) -> None:
        """Record, check and pass on."""
        downstream = self.downstream
        if downstream is not None and self._copy is None and self._is_plain():
            downstream.reply.write(data)
            self.context.backlog.add(self, data)
            return
        now = time.time()
        self.context.backlog.settle()
        if self._checked:
            self.session.active_at = now
            self._take_checked(data, self.session.came_at(self._asked, now))
        else:
            self._take_live(data, now)
        if self._copy is not None or self._framer.kept + len(self._coded) > FREE:
            self._count_copy()
        if self.downstream is None and not self._has_room():
            self.close()
        if self._ending:
            self.end_at_boundary()

    def read(self, data: bytes, now: float, *, final: bool) -> bytes:
        """See `Reader`."""
        self.session.active_at = now
        now = self.session.came_at(self._asked, now)
        if self._heartbeat is not None:
            self._heartbeat.heard()
        framer = self._framer
        if self.downstream is not None and self._is_plain():
            begins = framer.at_start_of_block
            if not begins and (end := end_of_block(data)):
                self._read_blocks(data[:end], now)
                data = data[end:]
                begins = framer.at_start_of_block
            if begins and (stops := record_ordinary(self._watch, framer, data, now)):
                data = self._keep_ordinary(data, stops)
                if not data or (not final and len(data) <= LONGEST_REST):
                    return data
        self._read_blocks(data, now)
        if framer.kept > FREE:
            self._count_copy()
        return b""

    def _keep_ordinary(self, data: bytes, stops: list[int]) -> bytes:
        """Keep the blocks that `data` begins with, which were recorded; what comes after them."""
        if not self._ids:
            self._ids = self._framer.last_id is not None
        count, stream = len(stops), self.stream
        self.context.telemetry.events += count
        if self._holdable:
            self._tail.add_all(stream.first + len(stream.events) - count, data, stops)
        return data[stops[-1] :]

    def _is_plain(self) -> bool:
        """Whether it was not resumed, and has begun to bring what can be read."""
        return self._begun and self.judge is None and self._decoder is None and not self._ending

    def received_end(self) -> None:
        """The upstream ended the stream cleanly; coded bytes that cannot be released make it an incomplete one."""
        self.context.backlog.settle()
        self._clean = not self._coded
        self._end_upstream()

    def received_error(self, error: UpstreamError) -> None:
        """It broke off."""
        self.context.backlog.settle()
        self.context.saw_upstream_error(error)
        self._end_upstream()

    def received_all(self) -> None:
        """Write what this read has brought."""
        downstream = self.downstream
        if downstream is not None and downstream.reply.started and not downstream.reply.finished:
            downstream.reply.flush()

    # -- the client

    def client_gone(self) -> None:
        """The client went away: hold the stream if it can be resumed (H1), else close it."""
        self.context.backlog.settle()
        downstream, self.downstream = self.downstream, None
        if downstream is not None:
            downstream.finish(Outcome.DONE)
        if downstream is not None and downstream.reply.started and self._may_be_held():
            self.connection.resume()
            self._hold()
        else:
            self.stream.left_at = time.time()
            self.close()

    def _hold(self) -> None:
        self.stream.left_at = time.time()
        self._left = self.stream.end - 1
        self._set_timer(self.policy.hold_time, self.close)
        self.context.holds.hold(self)

    def client_paused(self) -> None:
        """The client does not keep up: read no further (T6)."""
        self.connection.pause()

    def client_resumed(self) -> None:
        """It does again: what was buffered is on its way."""
        self._tail.deliver()
        if self._waiting <= MOST_WAITING:
            self.connection.resume()

    # -- resumes from the buffer (R4)

    def serves(self, position: int) -> bool:
        """Whether the events after this position are in the buffer, or still to come on this connection."""
        self.context.backlog.settle()
        if self.closed or not self._holdable or self._framer.unfinished is None:
            return False
        if self.downstream is not None and not self.downstream.reply.started:
            return False
        position = self._delivered(position)
        if self.judge is not None and self.judge.next <= position:
            return False  # it still repeats what this client has
        blocks = self._tail.after(position)
        # Where it has ended, a comment alone is nothing to serve.
        return blocks is not None and (not self.ended or self._tail.end > position)

    def _delivered(self, position: int) -> int:
        """Of the events under one id that a cursor names the last one (R3) that came while the client was there."""
        if self.downstream is not None:
            return position
        stream = self.stream
        cursor, former = stream.at(position), self._left
        while former < position and cursor is not None and (event := stream.at(former)) is not None:
            if event.id == cursor.id:
                return former
            former -= 1
        return position

    @property
    def decided(self) -> bool:
        """Whether this connection is the stream's own, or proven to continue it."""
        return self.judge is None or self.judge.verdict is not None

    def is_left_by(self, credentials: bytes) -> bool:
        """Whether it is held for a client with these credentials."""
        return self.downstream is None and self.credentials == credentials

    def is_contested(self) -> bool:
        """Whether another resume got it a moment ago: two at once, of which only one is served from the buffer."""
        downstream = self.downstream
        if downstream is None or downstream.client.half_closed:
            return False
        return self.context.loop.time() - self._attached_at < CONTEST

    def attach(self, downstream: Downstream, position: int, cursor: bytes) -> None:
        """Give a client what comes after this position, and then the live tail. A former client is dropped."""
        self.context.backlog.settle()
        position = self._delivered(position)
        former, self.downstream = self.downstream, None
        if former is not None:
            former.finish(Outcome.DONE)
            former.client.abort()
        self.cursor = cursor
        if self.judge is None:
            # The stream is a resumed one from here on: whole blocks, and none of another epoch (R11).
            self.judge = Judge(self.policy, self.session, Cursor(self.stream, position), connected=True)
            self.judge.tokens = self._watch.tokens
            self.judge.verdict = proven(Proof.CONNECTION)
            self._checked = True
            self._framer.keep_raw = self._framer.keep_data = JUDGED_BLOCK
        self._reported = self.judge.verdict
        self._attached_at = self.context.loop.time()
        self.downstream = downstream
        downstream.client.watcher = self
        fields = without(self.head.fields, b"content-length")
        framing = Framing.CHUNKED if self.head.framing is Framing.SIZED else self.head.framing
        downstream.reply.start(self.head.status, self.head.reason, fields, framing)
        self._at_start, self._marked = True, False
        for block in self._tail.after(position) or ():
            downstream.reply.write(self._placed(block))
        if self.ended:  # it stays resumable until its time is over (H3)
            self._end_reply(downstream)
            return
        self._set_timer(None)
        self.context.holds.release(self)
        self.context.streams.add(self)
        downstream.reply.flush()
        if downstream.client.paused:
            self.connection.pause()
        else:
            self.client_resumed()

    def close(self) -> None:
        """End it all: nothing is read any more, nothing can be resumed. A client that is there is cut off."""
        self.context.backlog.settle()
        if self.closed:
            return
        self.closed = True
        self._framer.let_go()
        self._set_timer(None)
        self.context.holds.remove(self)
        self._give_up()
        downstream, self.downstream = self.downstream, None
        if downstream is not None:
            if not downstream.reply.finished and downstream.reply.started:
                downstream.reply.break_off()
            downstream.finish(Outcome.DONE)

    def end_at_boundary(self) -> None:
        """The proxy drains: end cleanly after a whole event."""
        self.context.backlog.settle()
        self._ending = True
        self._holdable = False
        downstream = self.downstream
        if downstream is not None and downstream.reply.started and (self._checked or self._framer.clean):
            self._clean = True
            self._give_up()
            self._end_downstream(downstream)

    def pass_empty(self, reply: Response) -> None:
        """The upstream's answer ended before any message, and goes to the client as it came (R9)."""
        reply.start(self.head.status, self.head.reason, without(self.head.fields, b"content-length"), Framing.CHUNKED)
        for data in self.pending:
            reply.write(data)
        if self._clean:
            reply.end()
        else:
            reply.break_off()

    def _beat(self) -> None:
        """The upstream is silent: a comment goes to the client where nothing would be cut by it."""
        downstream = self.downstream
        if downstream is None or not downstream.reply.started or downstream.client.paused:
            return
        self.context.backlog.settle()
        readable = self._decoder is None and self.head.framing is not Framing.SIZED
        if readable and (self._checked or self._framer.clean):
            self._at_start = False
            downstream.reply.write(COMMENT)
            downstream.reply.flush()

    # -- blocks as they come

    def _take_live(self, data: bytes, now: float) -> None:
        downstream = self.downstream
        if downstream is not None:
            # Behind a comment a byte order mark would be a part of the first line.
            downstream.reply.write(data if self._at_start else self._framer.without_mark(data))
        self.read(data, now, final=True)

    def _read_blocks(self, data: bytes, now: float) -> None:
        stream = self.stream
        changed = False
        for block in self._blocks_of(data):
            before = stream.first + len(stream.events)
            if self.judge is not None:
                self._shadow(block, now)
            elif self._watch.see(block, now):
                changed = True
            if self._holdable:
                self._keep(block, before)
        if not self._readable:
            self.session.mark_delivered()
            if self.judge is not None:
                self.judge.unreadable()
                self._end_judging()
        if changed:
            self._see_another_epoch()

    def _see_another_epoch(self) -> None:
        """It flows on (R12). Whatever `live_change` says: what is kept of it is not delivered again (H3)."""
        self._holdable = False
        self.context.holds.remove(self)
        if self._may_fence:
            self.context.live_change(self.policy, self.session)
        if self.downstream is None:
            self.close()

    def _shadow(self, block: Block, now: float) -> None:
        """Observe mode: judge, report, and record what goes through all the same."""
        judge = self.judge
        assert judge is not None
        if judge.check(block, now) is Step.REFUSE:
            self._end_judging()
            self._watch.see(block, now)
        else:
            self._report()

    def _end_judging(self) -> None:
        """Observe mode: the judge would have refused, and nothing more is judged."""
        self._report()
        judge, self.judge = self.judge, None
        if judge is not None and judge.verdict is not None and judge.refused and self._may_fence:
            self.context.fence(self.policy, self.session, judge.verdict.reason)

    def _take_checked(self, data: bytes, now: float) -> None:
        judge = self.judge
        assert judge is not None
        if judge.verdict is None and self.session.fence is not None:
            self._refuse()  # fenced, or granted anew, before anything was decided
            return
        coded = self._decoder is not None
        for block in self._blocks_of(data):
            if block.raw is None and not coded:  # too long to be released, whatever it says
                judge.unreadable()
                self._report()
                self._refuse()
                return
            before = self.stream.end
            step = judge.check(block, now)
            if coded and step is Step.SWALLOW:  # nothing can be taken out of coded bytes
                judge.unreadable()
            self._report()
            if step is Step.REFUSE or judge.refused:
                self._refuse()
                return
            if step is Step.RELEASE and not coded:
                self._write(self._placed(block.raw or b""))
            self._marked = False
            if step is Step.RELEASE and self._holdable:
                self._keep(block, before)
            if judge.verdict is not None:
                self._open_head()
        if not coded and self._framer.unfinished is None:  # it is too long already
            judge.unreadable()
            self._report()
            self._refuse()
        if coded:
            self._coded += data
            unreadable = not self._readable or len(self._coded) > JUDGED_BLOCK
            if unreadable and (judge.verdict is None or judge.verdict.reason is not Reason.UNREADABLE):
                judge.unreadable()
                self._report()
            if judge.refused:
                self._refuse()
                return
            if unreadable or self._framer.clean:
                self._write(bytes(self._coded))
                self._coded.clear()
            if judge.verdict is not None:
                self._open_head()

    def _count_copy(self) -> None:
        """A long block has begun, or one did: what is kept of all of these has a bound."""
        self._copy = self._copy or Copy(self.context.copies)
        fits = self._copy.resize(0 if self.ended else self._framer.kept + len(self._coded))
        if fits:
            return
        if self._checked and self.judge is not None:
            if self._decoder is None or is_refused(unproven(Reason.UNREADABLE), self.policy):
                self._put_off()
                return
            self.judge.unreadable()
            self._report()
            self._readable = False
        self._framer.let_go()
        self._copy.resize(self._framer.kept + len(self._coded))

    def _put_off(self) -> None:
        """There is no room for what has to be checked. That says nothing of the session: the client may ask again."""
        downstream = self.downstream
        if downstream is not None and not downstream.reply.started:
            self.downstream = None
            self.close()
            downstream.finish(Outcome.NO_ROOM)
        else:
            self.close()

    def _blocks_of(self, data: bytes) -> list[Block]:
        if self._decoder is not None:
            plain = self._decoder.decode(data) if self._readable else None
            if plain is None:
                self._readable = False
                return []
            data = plain
        blocks = self._framer.feed(data)
        if blocks:
            if not self._begun:
                self._begin(blocks)
            self._ids = self._ids or self._framer.last_id is not None
            self.context.telemetry.events += len(blocks)
        return blocks

    def _begin(self, blocks: list[Block]) -> None:
        """The first block has come: keep a byte order mark apart from it."""
        self._begun = True
        raw = blocks[0].raw
        if raw is not None and raw.startswith(MARK):
            self._marked = True
            blocks[0] = msgspec.structs.replace(blocks[0], raw=raw[len(MARK) :])

    def _placed(self, block: bytes) -> bytes:
        """A block as it goes to the client. Blocks before it may have been left out, so that it is the first one there.

        Then a mark in front of it, which was no mark where it stood, would turn a line that says nothing into one of
        data: an empty line goes before it.
        """
        if not self._at_start:
            return block
        self._at_start = False
        if self._marked:
            return MARK + block
        return b"\n" + block if block.startswith(MARK) else block

    def _write(self, data: bytes) -> None:
        downstream = self.downstream
        if downstream is None:
            return
        if downstream.reply.started:
            downstream.reply.write(data)
        else:
            self.pending.append(data)
            self._waiting += len(data)
            if self._waiting > MOST_WAITING:
                self.connection.pause()

    def _keep(self, block: Block, before: int) -> None:
        """Keep a block for a resume; `before` is where the stream ended before it."""
        delivered = self.downstream is not None
        stream, raw = self.stream, block.raw
        if stream.first + len(stream.events) > before:
            position = before
        elif block.kind is Kind.OTHER and not delivered:
            position = -1
        elif self.judge is not None and self.judge.replayed > self._tail.end:
            position = self.judge.replayed  # a rival's connection has brought it to the record first
        else:
            return  # it came again and is on record already, or nobody will miss it
        if raw is not None:
            if not self._tail.add(position, raw, delivered=delivered):
                self.close()
        elif delivered:
            self._tail.skip(position)
        else:
            self.close()
        if not delivered and stream.finished and self._tail.end >= stream.end - 1:
            self._clean = True  # every response is here, not only on record: the upstream has done its part (H2)
            self._give_up()

    # -- ends

    def _end_upstream(self) -> None:
        self._stop_reading()
        downstream = self.downstream
        if downstream is None:
            if not self._tail.waiting:
                self.close()
        elif downstream.reply.started:
            if self.judge is not None and not self._checked:
                self.judge.end_without_message(EMPTY_RESUMES + 1)  # observe mode asks only once (R9)
                self._report()
            self._end_downstream(downstream)
        else:
            self.downstream = None
            self.close()
            downstream.finish(Outcome.EMPTY)

    def _end_downstream(self, downstream: Downstream) -> None:
        # Who had closed his side may have gone, and the end with what came last be lost on the way to nobody (H3).
        is_leaving = self._clean and downstream.client.half_closed and self._is_resumable()
        self._end_reply(downstream)
        if is_leaving:
            self._hold()
        else:
            self.close()

    def _end_reply(self, downstream: Downstream) -> None:
        if self._clean:
            if self._checked and self._framer.clean and self._decoder is None:
                downstream.reply.write(self._framer.pending_raw)  # the LF of a last CRLF that came in two pieces
            downstream.reply.end()
        else:
            downstream.reply.break_off()
        self.downstream = None
        downstream.finish(Outcome.DONE)

    def _refuse(self) -> None:
        """The judge refuses: fence, and tell it in the way that is still open (F1, F5)."""
        judge = self.judge
        assert judge is not None
        reason = Reason(self.session.fence or "") if judge.verdict is None else judge.verdict.reason
        self._set_timer(None)
        self._give_up()
        self.context.holds.remove(self)
        self.closed = True
        self._framer.let_go()
        downstream, self.downstream = self.downstream, None
        if downstream is not None:
            if not downstream.reply.started:
                downstream.finish(Outcome.REFUSED)
            else:
                if self._decoder is None and may_tell_in_band(self.stream, self.policy):
                    self.context.telemetry.told(self.policy.name, len(self.stream.owes))
                    downstream.reply.write(told_events(self.stream.owes, reason))
                    downstream.reply.end()
                else:
                    downstream.reply.break_off()
                downstream.finish(Outcome.DONE)
        if self._may_fence:
            self.context.fence(self.policy, self.session, reason)

    def _open_head(self) -> None:
        """Release the head, and the blocks that wait for it (R8, R10)."""
        downstream = self.downstream
        if downstream is None or downstream.reply.started:
            return
        self._set_timer(None)
        fields = self.head.fields
        framing = self.head.framing
        if self._checked:
            self.stream.spent = False
            if framing is Framing.SIZED:  # blocks may be swallowed
                fields, framing = without(fields, b"content-length"), Framing.CHUNKED
        downstream.reply.start(self.head.status, self.head.reason, fields, framing)
        for data in self.pending:
            downstream.reply.write(data)
        self.pending.clear()
        if self._waiting > MOST_WAITING and not downstream.client.paused:
            self.connection.resume()
        self._waiting = 0

    def _release_silent(self) -> None:
        """No message for `first_event_timeout`: the head goes out, and checking goes on (R10)."""
        self.context.backlog.settle()
        if self.session.fence is not None:
            self._refuse()
            return
        self._open_head()
        self.received_all()

    def _may_be_held(self) -> bool:
        """Whether a resume could find it here: not one that another took the place of, nor one that is forgotten."""
        return not self.ended and self._has_room() and self._is_resumable()

    def _is_resumable(self) -> bool:
        session, stream, context = self.session, self.stream, self.context
        if not self._holdable or not self._ids or self.closed:
            return False
        known = context.holds.get(stream) is self and session.streams.get(stream.key) is stream
        return known and session.fence is None and not context.draining

    def _has_room(self) -> bool:
        """Whether the event that is just coming still fits into the buffer (H2)."""
        unfinished = self._framer.unfinished
        return unfinished is not None and self._tail.waiting + unfinished <= self.policy.hold_bytes

    def _report(self) -> None:
        judge = self.judge
        if judge is None or judge.verdict is self._reported or judge.verdict is None:
            return
        self._reported = judge.verdict
        self.context.telemetry.verdict(
            self.policy.name,
            judge.verdict,
            session=self.session.id,
            cursor=self.cursor,
            enforced=self._enforced,
            pending=len(self.stream.owes),
        )

    def _set_timer(self, seconds: float | None, action: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and action is not None:
            self._timer = self.context.loop.call_later(seconds, action)

    def _give_up(self) -> None:
        """Read no more from an upstream that would go on."""
        if not self.ended:
            self.connection.abort()
            self._stop_reading()

    def _stop_reading(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._copy is not None:
            self._copy.resize(0)
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        self.context.streams.discard(self)
        self.session.open_flows -= 1
        self.context.telemetry.open_streams -= 1
