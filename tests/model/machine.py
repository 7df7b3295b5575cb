"""A client, a proxy and a server, and whatever may happen between them; and what must hold all the same."""

import json
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epochgate.guard.policy import EventIds, LiveChange, PendingCalls, Proof, Unproven
from epochgate.guard.record import Limits, Session
from epochgate.guard.sse import Framer
from epochgate.guard.verdict import Reason
from guard.scene import HEADER, META, policy
from model.proxy import STRANGER, Line, Proxy
from model.server import SESSION_LOST, Buffer, Emitted, Server, Traits

ACCEPTS = [
    frozenset({Proof.CONNECTION, Proof.EPOCH}),
    frozenset({Proof.EPOCH}),
    frozenset({Proof.CONNECTION}),
    frozenset(Proof),
    frozenset({Proof.EPOCH, Proof.OVERLAP}),
]
TRAITS = st.builds(
    Traits,
    epochs=st.sampled_from(["emission", "sending", "header", "none"]),
    ids=st.sampled_from(["session", "stream", "prefixed", "opaque", "process"]),
    replay=st.sampled_from(["exclusive", "inclusive", "from start"]),
    priming=st.booleans(),
    alike=st.booleans(),
    handshake_token=st.booleans(),
    same_id_again=st.booleans(),
)
FAULTS = [
    *["none"] * 11,
    "outage",
    "lost",
    "anew",
    "anew",
    "anew, from 1",
    "anew, buffers lost",
    "anew, from 1, buffers lost",
    "lose",
    "swap",
    "alter",
    "foreign",
]
PICK = st.integers(0, 7)


@dataclass(eq=False)
class Pipe:
    """A stream as the client knows it."""

    buffer: Buffer  # the one that the upstream opened for it
    session: Session
    execution: int  # that opened it
    line: Line
    received: list[str] = field(default_factory=list)
    cursors: list[tuple[bytes, int]] = field(default_factory=list)  # each id, and how much had been received with it
    failed: list[int] = field(default_factory=list)  # calls that the proxy told as failed
    unanchored: bool = False  # resumed from a cursor that the ledger had forgotten
    must_pass: bool = False  # the last resume had an accepted proof

    def absorb(self, lost: int = 0) -> None:
        """Read what came on the line; the last `lost` blocks never arrived."""
        blocks, self.line.blocks = self.line.blocks, []
        framer = Framer()
        for raw in blocks[: max(len(blocks) - lost, 0)]:
            for block in framer.feed(raw):
                self.received += said(block.data or b"")
                self.failed += told(block.data or b"")
                if block.own_id and block.id is not None:
                    self.cursors.append((block.id, len(self.received)))

    @property
    def over(self) -> bool:
        """Whether the client will never ask for it again."""
        if not self.line.busy:
            self.absorb()
        return self.complete

    @property
    def complete(self) -> bool:
        return bool(self.buffer.owes) and {text.split()[0] for text in self.received}.issuperset(
            map(str, self.buffer.owes)
        )


def said(data: bytes) -> list[str]:
    """What the messages of an event say; not what the proxy itself tells."""
    if not data:
        return []
    decoded = json.loads(data)
    messages = decoded if isinstance(decoded, list) else [decoded]
    return [message.get("params", message.get("result"))["data"] for message in messages if "error" not in message]


def told(data: bytes) -> list[int]:
    """The call that the proxy tells as failed, if it does."""
    message = json.loads(data) if data else {}
    return [message["id"]] if "error" in message else []


class Machine(RuleBasedStateMachine):
    """The rules are what may happen; the invariants what must hold."""

    @initialize(
        traits=TRAITS,
        accept=st.sampled_from(ACCEPTS),
        lenient=st.integers(0, 4).map(lambda n: n == 0),
        pending_calls=st.sampled_from(PendingCalls),
        live_change=st.sampled_from(LiveChange),
        events=st.sampled_from([1024, 1024, 6]),
        header_first=st.booleans(),
    )
    def begin(
        self,
        traits: Traits,
        accept: frozenset[Proof],
        lenient: bool,
        pending_calls: PendingCalls,
        live_change: LiveChange,
        events: int,
        header_first: bool,
    ) -> None:
        if events < 1024 and traits.ids not in ("session", "process", "prefixed"):
            traits = replace(traits, replay="exclusive")  # what is forgotten cannot be told from what is new
        self.traits = traits
        self.server = Server(traits)
        self.policy = policy(
            accept=accept,
            unproven=Unproven.RESUME if lenient else Unproven.RESTART,
            pending_calls=pending_calls,
            live_change=live_change,
            sources=(HEADER, META) if header_first else (META, HEADER),
            event_ids=EventIds.INCREASING if traits.ids == "process" else EventIds.AUTO,
        )
        self.lenient = lenient
        self.roomy = events == 1024
        self.strict = not lenient and Proof.OVERLAP not in accept
        self.proxy = Proxy(self.policy, Limits(streams=64, events=events), self.server)
        self.requests = 0
        self.pipes: list[Pipe] = []
        self.open_session()

    def open_session(self) -> None:
        self.id = self.proxy.initialize()
        session = self.proxy.session(self.id)
        assert session is not None
        self.session = session
        self.execution = self.server.execution
        self.pipes.clear()
        self.server.spoil = None
        self.faulty = False  # the upstream did something to this session that may be refused
        self.buffers_lost = self.counted_anew = False
        self.dead = False  # refused: the client has to start over
        self.had_outage = False

    # -- the client

    def next_ids(self, count: int) -> tuple[int, ...]:
        self.requests += count
        return tuple(range(self.requests - count + 1, self.requests + 1))

    def may_open(self) -> bool:
        """Streams that all count 1, 2, 3 can only be used one after another: a cursor names none of them."""
        if self.dead or len(self.pipes) >= 4:
            return False
        return self.traits.ids != "stream" or all(pipe.over for pipe in self.pipes)

    @precondition(may_open)
    @rule(calls=st.integers(0, 2))
    def open_stream(self, calls: int) -> None:
        """A call, a batch of two, or a standalone GET."""
        line = Line()
        owes = self.next_ids(calls)
        if calls:
            requests = [{"jsonrpc": "2.0", "id": n, "method": "tools/call"} for n in owes]
            self.proxy.post(self.id, json.dumps(requests).encode(), line)
        else:
            self.proxy.listen(self.id, line)
        if line.state in ("404", "passed"):
            assert self.faulty, f"a healthy session was refused: {line.reason}"
            self.after_refusal(line.reason)
        else:
            buffer = self.server.buffers[max(self.server.buffers)]
            self.pipes.append(Pipe(buffer, self.session, self.server.execution, line))

    @precondition(lambda self: not self.dead and self.pipes)
    @rule(pick=PICK, lost=st.integers(0, 3), clean=st.booleans())
    def client_leaves(self, pick: int, lost: int, clean: bool) -> None:
        """Its connection breaks, and the last blocks are lost on their way."""
        pipe = self.pipes[pick % len(self.pipes)]
        if pipe.line.state == "open":
            flow = pipe.line.flow
            assert flow is not None
            flow.client_gone()
            pipe.absorb(0 if clean else lost)

    @precondition(lambda self: not self.dead and self.pipes)
    @rule(pick=PICK, back=st.sampled_from([0, 0, 0, 1, 2, 5]), lost=st.sampled_from([0, 0, 1]))
    def client_resumes(self, pick: int, back: int, lost: int) -> None:
        """From its last id or from an earlier one, the former connection closed or not."""
        pipe = self.pipes[pick % len(self.pipes)]
        if pipe.line.state == "waiting":
            return
        pipe.absorb(lost if pipe.line.busy else 0)
        if pipe.cursors and not pipe.complete:
            self.resume(pipe, min(back, len(pipe.cursors) - 1))
        elif pipe.line.flow is not None:
            pipe.line.flow.client_gone()

    def resume(self, pipe: Pipe, back: int = 0) -> None:
        del pipe.cursors[len(pipe.cursors) - back :]
        cursor, count = pipe.cursors[-1]
        del pipe.received[count:]
        former = pipe.line
        line = pipe.line = Line(on_refusal=lambda reason: self.check_refusal(pipe, reason))
        pipe.must_pass = self.has_proof(pipe, cursor)
        pipe.unanchored = pipe.unanchored or self.session.locate(cursor) is None
        self.proxy.resume(self.id, cursor, line)
        if former.flow is not None:
            former.flow.client_gone()
        self.look_at(pipe)

    def has_proof(self, pipe: Pipe, cursor: bytes) -> bool:
        """Whether a healthy session can prove this resume."""
        if self.faulty or not self.roomy:
            return False
        accept = self.policy.accept
        by_epoch = Proof.EPOCH in accept and self.traits.epochs != "none" and self.session.token == str(self.execution)
        events = pipe.buffer.events
        at = next(n for n, event in enumerate(events) if event.name.encode() == cursor)
        messages = [n for n in range(at + 1) if self.server.said(events[n])]
        repeatable = bool(messages) and messages[-1] > 0
        return by_epoch or (Proof.OVERLAP in accept and repeatable and not self.had_outage)

    def check_refusal(self, pipe: Pipe, reason: str) -> None:
        if pipe.must_pass and not self.faulty:
            assert reason == Reason.NO_EVENT, f"a healthy resume with an accepted proof was refused: {reason}"

    def look_at(self, pipe: Pipe) -> None:
        """What the client makes of the state of its line."""
        line = pipe.line
        if not line.busy:
            pipe.absorb()
        assert set(pipe.failed) <= set(pipe.buffer.owes), "calls that the stream does not owe were told"
        assert len(set(pipe.failed)) == len(pipe.failed), "a call was told twice (F4, F5)"
        if line.state == "told":
            assert pipe.failed, "nothing was told"
            assert self.policy.pending_calls is not PendingCalls.LEAVE
        if line.state in ("404", "told") or (line.state == "aborted" and line.reason):
            self.after_refusal(line.reason)
        elif line.state == "passed":
            assert self.faulty, "a healthy resume found no stream"

    def after_refusal(self, reason: str) -> None:
        """F2: from now on nothing of this session reaches the upstream."""
        self.dead = True
        asked = self.server.requests
        for ask in (self.proxy.listen, lambda session, line: self.proxy.post(session, b"{}", line)):
            line = Line()
            ask(self.id, line)
            assert line.state == "404", f"a session that was refused ({reason}) is still served (F2)"
        assert self.server.requests == asked, "a request of a fenced session reached the upstream (F2)"

    @precondition(lambda self: self.dead and self.pipes)
    @rule(pick=PICK)
    def client_insists(self, pick: int) -> None:
        """It asks again for a stream of a session that was refused (F4)."""
        pipe = self.pipes[pick % len(self.pipes)]
        pipe.absorb()
        if pipe.cursors:
            pipe.line = Line()
            self.proxy.resume(self.id, pipe.cursors[-1][0], pipe.line)
            assert pipe.line.state in ("404", "told"), "a fenced session was resumed (R2)"
            self.look_at(pipe)

    @precondition(lambda self: self.dead)
    @rule()
    def client_starts_over(self) -> None:
        """L1: under a new id or under the same one."""
        self.open_session()
        line = Line()
        self.proxy.post(self.id, b"{}", line)
        assert line.state == "passed", "a new session was refused (L1)"

    @precondition(lambda self: not self.dead and self.session.delivered)
    @rule()
    def stranger_asks(self) -> None:
        """F3: a bad cursor from somebody else fences nothing."""
        fence = self.session.fence
        self.proxy.resume(self.id, b"no such event", Line(credentials=STRANGER))
        assert self.session.fence == fence, "a stranger fenced the session (F3)"

    # -- the server

    def buffer_of(self, pick: int) -> Buffer | None:
        live = [buffer for buffer in self.server.buffers.values() if not buffer.done]
        return live[pick % len(live)] if live else None

    @rule(pick=PICK, count=st.integers(1, 3))
    def server_notifies(self, pick: int, count: int) -> None:
        buffer = self.buffer_of(pick)
        for _ in range(count if buffer is not None else 0):
            self.server.note(buffer)  # type: ignore[arg-type]

    @rule(pick=PICK)
    def server_primes(self, pick: int) -> None:
        buffer = self.buffer_of(pick)
        if buffer is not None and self.traits.priming:
            self.server.prime(buffer)

    @rule(pick=PICK)
    def server_responds(self, pick: int) -> None:
        buffer = self.buffer_of(pick)
        if buffer is not None and buffer.owes:
            self.server.respond(buffer)

    @rule(pick=PICK)
    def connection_breaks(self, pick: int) -> None:
        """Also what a polling server does on purpose."""
        buffer = self.buffer_of(pick)
        if buffer is not None:
            self.server.cut(buffer)

    @precondition(lambda self: not self.dead and self.pipes)
    @rule(fault=st.sampled_from(FAULTS), pick=PICK)
    def something_goes_wrong(self, fault: str, pick: int) -> None:
        """Half of the time nothing does: what is healthy has to be seen for long."""
        if fault == "outage":  # a boundary signal (section 2)
            self.had_outage = True
            self.proxy.outage_at = self.proxy.tick()
        elif fault == "lost":
            self.faulty = True
            self.server.lost_as = SESSION_LOST[pick % len(SESSION_LOST)]
            self.server.evict()
        elif fault.startswith("anew") and not self.lenient:  # the incident of section 1
            self.faulty = True
            self.buffers_lost = self.buffers_lost or "buffers lost" in fault
            self.counted_anew = self.counted_anew or "from 1" in fault
            self.server.recreate(keep_buffers="buffers lost" not in fault, keep_count="from 1" not in fault)
        elif fault in ("lose", "swap", "alter", "foreign") and self.roomy:
            if fault == "foreign" and self.traits.alike:
                return  # what is the same everywhere is nobody's own
            self.faulty = True
            self.server.spoil = lambda events: self.spoil(fault, pick, events)

    def spoil(self, how: str, pick: int, events: list[Emitted]) -> list[Emitted]:
        """The next replay loses, shuffles or alters an event that was read, or brings one of another stream."""
        events = list(events)
        read = [
            n for n, event in enumerate(events) if self.server.said(event) and self.session.knows(event.name.encode())
        ]
        if how == "foreign":
            own = self.server.names.get(events[0].name) if events else None
            others = [
                event
                for buffer in self.server.buffers.values()
                if buffer is not own
                for event in buffer.events
                if self.server.said(event) and event.name.encode() in self.session.index
            ]
            if own is not None and others:
                events.insert(0, others[pick % len(others)])
        elif read:
            at = read[pick % len(read)]
            if how == "lose":
                del events[at]
            elif how == "alter":
                events[at] = replace(events[at], execution=0, text="altered")
            else:
                other = read[(pick + 1) % len(read)]
                events[at], events[other] = events[other], events[at]
        return events

    @precondition(lambda self: self.pipes)
    @rule(pick=PICK)
    def nothing_comes(self, pick: int) -> None:
        """R10: the head is released without a verdict."""
        flow = self.pipes[pick % len(self.pipes)].line.flow
        if flow is not None:
            flow.open_head()

    # -- what must hold

    @invariant()
    def refusals_are_noticed(self) -> None:
        """A line may be refused while the server sends."""
        for pipe in getattr(self, "pipes", []):
            if not self.dead:
                self.look_at(pipe)

    @invariant()
    def what_was_released_is_the_stream(self) -> None:
        """Each event exactly once, in order, as it was sent; and none of another execution after a resume."""
        for pipe in getattr(self, "pipes", []):
            fresh = [
                text for raw in pipe.line.blocks for block in Framer().feed(raw) for text in said(block.data or b"")
            ]
            if pipe.unanchored or (self.counted_anew and not self.tells(pipe)):
                continue  # an id of two streams names the last of them (R3), and nothing else tells
            if self.traits.alike and self.buffers_lost and not self.strict and not self.tells(pipe):
                continue  # another execution says the very same
            emitted = [text for event in pipe.buffer.events for text in self.server.said(event)]
            released = pipe.received + fresh
            assert released == emitted[: len(released)], f"released {released}, emitted {emitted}"
            own = self.own_execution(pipe)
            if pipe.line.resumed and not self.traits.alike and own is not None:
                executions = {text.split(" of ")[1] for text in fresh}
                assert executions <= {own}, "an event of another execution was released"

    def own_execution(self, pipe: Pipe) -> str | None:
        """The only execution whose events may come after a resume; None where the rules allow another to slip in."""
        if self.traits.epochs != "none" and pipe.session.token is not None:
            return pipe.session.token
        return str(pipe.execution) if self.strict and self.traits.epochs == "none" else None

    def tells(self, pipe: Pipe) -> bool:
        """Whether the epoch can tell the executions apart."""
        return self.traits.epochs != "none" and pipe.session.token == str(pipe.execution)

    def teardown(self) -> None:
        """A healthy session that can prove its resumes brings everything in the end."""
        if not hasattr(self, "pipes") or self.faulty or self.dead:
            return
        for pipe in self.pipes:
            self.finish(pipe)

    def finish(self, pipe: Pipe) -> None:
        buffer = pipe.buffer
        self.refusals_are_noticed()
        if pipe.line.state == "waiting" and pipe.line.flow is not None:
            pipe.line.flow.open_head()
        if not buffer.done:
            self.server.note(buffer)
            if buffer.owes:
                self.server.respond(buffer)
        while not pipe.line.busy:  # a held stream that has ended brings what it has, and the upstream the rest
            pipe.absorb()
            proven = bool(pipe.cursors) and not pipe.complete and self.has_proof(pipe, pipe.cursors[-1][0])
            if self.dead or pipe.unanchored or not proven:
                break
            self.resume(pipe)
        else:
            pipe.absorb()
            self.refusals_are_noticed()
            emitted = [text for event in buffer.events for text in self.server.said(event)]
            assert self.dead or pipe.received == emitted, "some of the stream never came"
