"""The guard, driven as the relay drives it: what `relay.exchange` and `relay.flow` do, without waiting."""

from collections.abc import Callable
from dataclasses import dataclass, field

from epochgate.guard.judge import NEVER, Cursor, Ending, Judge, Step, is_refused
from epochgate.guard.mcp import read_call, read_messages, tokens_of
from epochgate.guard.policy import LiveChange, Policy, Proof
from epochgate.guard.record import Limits, Origin, Session, Stream
from epochgate.guard.refusal import (
    Answer as Refusal,
)
from epochgate.guard.refusal import (
    answer_refused_resume,
    is_session_lost,
    may_fence,
    may_tell_in_band,
    told_events,
)
from epochgate.guard.sse import Block, Framer, Kind
from epochgate.guard.verdict import Reason, proven, unproven
from epochgate.guard.watch import Watch
from epochgate.ledger.memory import MemoryLedger, Records
from epochgate.relay.hold import Tail
from model.server import Answer, Connection, Server

OWNER, STRANGER = b"owner", b"stranger"


@dataclass(eq=False)
class Line:
    """The client's end of one request."""

    credentials: bytes = OWNER
    state: str = "waiting"  # waiting | open | ended | aborted | 404 | told | passed
    reason: str = ""
    resumed: bool = False  # what comes was checked before it was released
    from_buffer: bool = False  # it began with what was held
    blocks: list[bytes] = field(default_factory=list)
    flow: "Flow | None" = None
    on_refusal: Callable[[str], None] = lambda reason: None

    @property
    def busy(self) -> bool:
        return self.state in ("waiting", "open")

    def close(self, state: str, reason: str = "") -> None:
        if self.busy:
            self.state, self.reason, self.flow = state, reason, None


class Proxy:
    """One proxy before one server."""

    def __init__(self, policy: Policy, limits: Limits, server: Server) -> None:
        self.policy = policy
        self.server = server
        self.ledger = MemoryLedger(Records(sessions=64, limits=limits, session_idle=1e9, fence=1e9))
        self.now = 1000.0
        self.outage_at = NEVER
        self.flows: dict[Stream, Flow] = {}  # those that can be resumed

    def tick(self) -> float:
        self.now += 1
        return self.now

    def session(self, session_id: bytes) -> Session | None:
        return self.ledger.get(session_id, self.now)

    # -- requests

    def initialize(self) -> bytes:
        """L1: returns the id that was granted."""
        session_id, headers, body = self.server.initialize()
        tokens = read_messages(body, tokens_of(self.policy.sources, headers)).tokens
        former = self.session(session_id)
        if former is not None:
            self.close_held(former)
        token = next((token for token in tokens if token is not None), None)
        self.ledger.open(session_id, OWNER, token, self.policy.name, self.tick())
        return session_id

    def post(self, session_id: bytes, body: bytes, line: Line) -> None:
        """A call, or a notification."""
        owes = read_call(body).owes
        self._ordinary(session_id, line, b"POST", lambda: self.server.post(session_id, tuple(map(int, owes))), owes)

    def listen(self, session_id: bytes, line: Line) -> None:
        """A standalone GET."""
        self._ordinary(session_id, line, b"GET", lambda: self.server.listen(session_id), ())

    def _ordinary(
        self, session_id: bytes, line: Line, method: bytes, ask: Callable[[], Answer], owes: tuple[int | str, ...]
    ) -> None:
        session = self.session(session_id)
        if session is not None and session.fence is not None:
            line.close("404", session.fence)  # R2, F2
            return
        answer = ask()
        if session is None:
            line.close("passed")
        elif answer.stream is not None:
            origin = Origin.CALL if method == b"POST" else Origin.STANDALONE
            Flow(self, session, session.open_stream(origin, owes, line.credentials), answer.stream, line)
        elif not self._is_lost(session, method, answer, line):
            line.close("passed")

    def resume(self, session_id: bytes, cursor: bytes, line: Line) -> None:
        """A GET with a cursor (section 6)."""
        session = self.session(session_id)
        assert session is not None
        found = session.locate(cursor)
        if session.fence is not None:
            if found is None:
                line.close("404", session.fence)
            else:
                self.refuse(session, found[0], session.fence, line)
            return
        if found is None and not session.delivered:
            self.listen(session_id, line)  # R3, a stale cursor
        elif found is None:
            verdict = unproven(Reason.UNKNOWN_CURSOR)
            if is_refused(verdict, self.policy):
                if may_fence(session, line.credentials, granted=False):
                    self.fence(session, verdict.reason)
                line.close("404", verdict.reason)
            else:
                judge = Judge(self.policy, session, None, outage_at=self.outage_at, verdict=verdict)
                self.ask(session, judge, cursor, line)
        else:
            stream, position = found
            flow = self.flows.get(stream)
            if flow is not None and line.credentials == stream.credentials:
                if flow.serves(position):
                    stream.spent = False
                    flow.attach(line, position)
                    return
                flow.close()
            judge = Judge(self.policy, session, Cursor(stream, position), outage_at=self.outage_at)
            self.ask(session, judge, cursor, line)

    def ask(self, session: Session, judge: Judge, cursor: bytes, line: Line, asked: int = 1) -> None:
        """R5: from the rewound cursor first, where there is one."""
        for ask_from in filter(None, (judge.rewound, cursor)):
            answer = self.server.resume(session.id, ask_from)
            if answer.stream is not None:
                judge.tokens = tokens_of(self.policy.sources, answer.stream.headers)
                judge.open()
                former = self.flows.get(judge.stream)
                if former is not None:
                    former.close()
                Flow(self, session, judge.stream, answer.stream, line, judge=judge, cursor=cursor, asked=asked)
                return
        if self._is_lost(session, b"GET", answer, line, judge.stream):
            return
        judge.stream.spent = True
        line.close("passed")

    # -- refusals

    def fence(self, session: Session, reason: str) -> None:
        session.close(reason, self.tick())
        self.close_held(session)

    def live_change(self, session: Session) -> None:
        """R12."""
        if self.policy.live_change is LiveChange.FENCE:
            self.fence(session, Reason.EPOCH_CHANGED)

    def refuse(self, session: Session, stream: Stream, reason: str, line: Line) -> None:
        """F1 or F4, before the head."""
        line.on_refusal(reason)
        if answer_refused_resume(session, stream, self.policy, line.credentials) is Refusal.TELL:
            line.blocks.append(told_events(stream.owes, reason))
            line.close("told", reason)
        else:
            line.close("404", reason)

    def close_held(self, session: Session) -> None:
        for stream in session:
            flow = self.flows.get(stream)
            if flow is not None and flow.line is None:
                flow.close()

    def _is_lost(
        self, session: Session, method: bytes, answer: Answer, line: Line, stream: Stream | None = None
    ) -> bool:
        """N1."""
        if not is_session_lost(method, answer.status, answer.body):
            return False
        if may_fence(session, line.credentials, granted=False):
            self.fence(session, Reason.SESSION_LOST)
        if stream is None:
            line.close("404", Reason.SESSION_LOST)
        else:
            self.refuse(session, stream, Reason.SESSION_LOST, line)
        return True


class Flow:
    """One guarded stream on one upstream connection."""

    def __init__(
        self,
        proxy: Proxy,
        session: Session,
        stream: Stream,
        upstream: Connection,
        line: Line,
        *,
        judge: Judge | None = None,
        cursor: bytes = b"",
        asked: int = 1,
    ) -> None:
        self.proxy = proxy
        self.session = session
        self.stream = stream
        self.upstream = upstream
        self.line: Line | None = line
        self.judge = judge
        self.cursor = cursor
        self.asked = asked
        self.pending: list[bytes] = []
        self.holdable = Proof.CONNECTION in proxy.policy.accept
        self.watch = Watch(proxy.policy, session, upstream.headers, stream)
        self.framer = Framer(keep_raw=1 << 20)
        self.tail = Tail(stream.end - 1, 1 << 20)
        self.ended = self.closed = False
        line.flow = self
        line.resumed = judge is not None
        if self.holdable:
            proxy.flows[stream] = self
        if judge is None or judge.verdict is not None:
            self.open_head()
        if judge is None and self.watch.head():
            self.see_another_epoch()
        upstream.start(self)

    # -- the upstream

    def receive(self, data: bytes) -> None:
        now = self.proxy.tick()
        if self.closed:
            return
        for block in self.framer.feed(data):
            before = self.stream.end
            if self.judge is None:
                if self.line is not None:
                    self.line.blocks.append(block.raw or b"")
                if self.watch.see(block, now):
                    self.see_another_epoch()
                self.keep(block, before)
            elif not self.check(self.judge, block, now, before):
                return

    def see_another_epoch(self) -> None:
        """R12, H3."""
        self.holdable = False
        if self.proxy.flows.get(self.stream) is self:
            del self.proxy.flows[self.stream]
        self.proxy.live_change(self.session)
        if self.line is None:
            self.close()

    def check(self, judge: Judge, block: Block, now: float, before: int) -> bool:
        step = judge.check(block, now)
        if step is Step.REFUSE or judge.refused:
            self.refuse(judge)
            return False
        if step is Step.RELEASE:
            if self.line is not None:
                (self.line.blocks if self.line.state == "open" else self.pending).append(block.raw or b"")
            self.keep(block, before)
        if judge.verdict is not None:
            self.open_head()
        return True

    def upstream_ended(self) -> None:
        self.ended = True
        line = self.line
        if line is None:
            if not self.tail.waiting:
                self.close()
        elif line.state == "open":
            line.close("ended")
            self.close()
        else:
            self.line = None
            self.close()
            self.end_empty(line)

    def end_empty(self, line: Line) -> None:
        """R9."""
        judge = self.judge
        assert judge is not None
        ending = judge.end_without_message(self.asked)
        if ending is Ending.ASK_AGAIN:
            self.proxy.ask(self.session, judge, self.cursor, line, self.asked + 1)
        elif ending is Ending.PASS:
            line.blocks += self.pending
            line.close("ended")
        else:
            self.proxy.fence(self.session, Reason.NO_EVENT)
            self.proxy.refuse(self.session, self.stream, Reason.NO_EVENT, line)

    # -- the client

    def open_head(self) -> None:
        """R8, R10."""
        line = self.line
        if line is not None and line.state == "waiting":
            if self.judge is not None:
                self.stream.spent = False
            line.state = "open"
            line.blocks += self.pending
            self.pending = []

    def client_gone(self) -> None:
        """H1."""
        line, self.line = self.line, None
        assert line is not None
        line.close("aborted")
        if not (self.holdable and self.stream.last_id and not self.ended and self.session.fence is None):
            self.close()

    def serves(self, position: int) -> bool:
        """R4."""
        if self.closed or not self.holdable or (self.line is not None and self.line.state != "open"):
            return False
        blocks = self.tail.after(position)
        return blocks is not None and (bool(blocks) or not self.ended)

    def attach(self, line: Line, position: int) -> None:
        """R4."""
        former, self.line = self.line, line
        if former is not None:
            former.close("aborted")
        if self.judge is None:
            cursor, verdict = Cursor(self.stream, position), proven(Proof.CONNECTION)
            self.judge = Judge(self.proxy.policy, self.session, cursor, verdict=verdict, connected=True)
            self.judge.tokens = self.watch.tokens
        line.flow, line.resumed, line.from_buffer, line.state = self, True, True, "open"
        line.blocks += self.tail.after(position) or []
        self.tail.deliver()
        if self.ended:
            line.close("ended")
            self.close()

    def keep(self, block: Block, before: int) -> None:
        """H1, as the relay keeps the tail."""
        delivered = self.line is not None
        position = before if self.stream.end > before or block.kind is not Kind.OTHER else -1
        on_record = position >= 0 and self.stream.end == before
        if not self.holdable or self.closed or on_record or (position < 0 and delivered):
            return
        self.tail.add(position, block.raw or b"", delivered=delivered)
        if not delivered and self.stream.finished:
            self.ended = True
            self.upstream.drop()

    def close(self) -> None:
        self.closed = True
        if self.proxy.flows.get(self.stream) is self:
            del self.proxy.flows[self.stream]
        self.upstream.drop()
        if self.line is not None:
            self.line.close("aborted")

    def refuse(self, judge: Judge) -> None:
        """F1, F5."""
        assert judge.verdict is not None
        reason = judge.verdict.reason
        line, self.line = self.line, None
        self.close()
        self.proxy.fence(self.session, reason)
        if line is None:
            return
        if line.state == "waiting":
            self.proxy.refuse(self.session, self.stream, reason, line)
            return
        line.on_refusal(reason)
        if may_tell_in_band(self.stream, self.proxy.policy):
            line.blocks.append(told_events(self.stream.owes, reason))
            line.close("told", reason)
        else:
            line.close("aborted", reason)
