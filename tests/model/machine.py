"""A client, a proxy and a server, and whatever may happen between them; and what must hold all the same."""

import json
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epochgate.guard.policy import EventIds, LiveChange, PendingCalls, Proof, Unproven
from epochgate.guard.record import Limits
from epochgate.guard.verdict import Reason
from guard.scene import HEADER, META, policy
from model.client import Pipe, parsed, said
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
    epochs=st.sampled_from(["none", "emission", "sending", "header"]),
    ids=st.sampled_from(["session", "stream", "prefixed", "opaque", "process"]),
    replay=st.sampled_from(["exclusive", "inclusive", "from start"]),
    priming=st.booleans(),
    alike=st.sampled_from([False, False, False, True]),
    handshake_token=st.booleans(),
    same_id_again=st.booleans(),
)
NOTHING, STRANGERS, OUTAGE, LOSS = "nothing", "a stranger asks", "outage", "session lost"
ANEW, FROM_1, BUFFERS_LOST = "made anew", "made anew, counts from 1", "made anew, buffers lost"
SPOILT = ["lose", "swap", "alter", "foreign"]
FAULTS = [*[NOTHING] * 5, STRANGERS, OUTAGE, LOSS, ANEW, ANEW, ANEW, FROM_1, BUFFERS_LOST, *SPOILT]
PICK = st.integers(0, 7)
FEW = st.integers(0, 3)
BACK = st.sampled_from([0, 0, 0, 1, 2, 5])  # how many ids a client goes back


class Machine(RuleBasedStateMachine):
    """The rules are what may happen; the invariants what must hold."""

    @initialize(
        traits=TRAITS,
        accept=st.sampled_from(ACCEPTS),
        lenient=st.sampled_from([False, False, False, True]),
        pending_calls=st.sampled_from(PendingCalls),
        live_change=st.sampled_from([LiveChange.FENCE, LiveChange.FENCE, LiveChange.IGNORE]),
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
        if events < 1024 and traits.replay == "from start":
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
        self.strict = not lenient and Proof.OVERLAP not in accept
        self.roomy = events == 1024
        self.proxy = Proxy(self.policy, Limits(streams=64, events=events), self.server)
        self.requests = 0
        self.pipes: list[Pipe] = []
        self.open_session()

    def open_session(self) -> None:
        """L1: under a new id or under the same one; either way it is served."""
        self.id = self.proxy.initialize()
        session = self.proxy.session(self.id)
        assert session is not None
        self.session = session
        self.execution = self.server.execution
        self.server.spoil = None
        self.pipes.clear()
        self.dead = False  # refused: the client has to start over
        self.faulty = False  # the upstream did something for which it may be refused
        self.unproven = False  # it was resumed without a proof
        self.buffers_lost = self.counted_anew = self.had_outage = False
        line = Line()
        self.proxy.post(self.id, b"{}", line)
        assert line.state == "passed", "a new session was refused (L1)"

    # -- what may happen

    @rule(calls=FEW, data=st.data())
    def stream_opens(self, calls: int, data: st.DataObject) -> None:
        """A call, a batch of calls, or a standalone GET."""
        if self.dead:
            self.open_session()
        if not self.may_open():
            return
        line = Line()
        owes = tuple(range(self.requests + 1, self.requests + calls + 1))
        self.requests += calls
        if owes:
            batch = [{"jsonrpc": "2.0", "id": n, "method": "tools/call"} for n in owes]
            self.proxy.post(self.id, json.dumps(batch).encode(), line)
        else:
            self.proxy.listen(self.id, line)
        if line.busy and line.flow is not None:
            buffer = self.server.buffers[max(self.server.buffers)]
            pipe = Pipe(buffer, self.session, line.flow.stream, self.server.execution, line)
            self.pipes.append(pipe)
            self.notify(pipe, data.draw(FEW))
        else:
            assert self.faulty or self.unproven, f"a healthy session was refused: {line.reason}"
            self.check_fence(line.reason)

    def may_open(self) -> bool:
        """Streams that all count 1, 2, 3 can only be used one after another: a cursor names none of them."""
        for pipe in self.pipes:
            if not pipe.line.busy:
                pipe.absorb()
        return len(self.pipes) < 4 and (self.traits.ids != "stream" or all(pipe.complete for pipe in self.pipes))

    @precondition(lambda self: not self.dead and self.pipes)
    @rule(
        pick=PICK,
        how=st.sampled_from(["the server's end", "the client's end", "half open"]),
        fault=st.sampled_from(FAULTS),
        data=st.data(),
    )
    def stream_is_interrupted(self, pick: int, how: str, fault: str, data: st.DataObject) -> None:
        """The usual story: events, an interruption, something that goes wrong, events meanwhile, a resume."""
        pipe = self.pipes[pick % len(self.pipes)]
        self.notify(pipe, data.draw(FEW))
        if how == "the server's end":
            self.server.cut(pipe.buffer)
        elif how == "the client's end":
            self.client_leaves(pick, data.draw(FEW))
        self.notify(pipe, data.draw(FEW))
        self.something_goes_wrong(fault, pick)
        self.notify(pipe, data.draw(FEW))
        self.refusals_are_noticed()
        if not self.dead:
            self.client_resumes(pick, data.draw(BACK), data.draw(FEW), data.draw(st.booleans()))
            self.notify(pipe, data.draw(FEW))

    @precondition(lambda self: self.pipes)
    @rule(pick=PICK, what=st.sampled_from(["note", "note", "prime", "respond", "respond", "cut"]))
    def server_acts(self, pick: int, what: str) -> None:
        """On a stream that is not over; a polling server cuts connections on purpose."""
        live = [buffer for buffer in self.server.buffers.values() if not buffer.done]
        if not live:
            return
        buffer = live[pick % len(live)]
        if what == "note":
            self.server.note(buffer)
        elif what == "prime" and self.traits.priming:
            self.server.prime(buffer)
        elif what == "respond" and buffer.owes:
            self.server.respond(buffer)
        elif what == "cut":
            self.server.cut(buffer)

    def notify(self, pipe: Pipe, count: int) -> None:
        buffer = self.server.buffers.get(pipe.buffer.key)
        if buffer is not None and not buffer.done:
            for _ in range(count):
                self.server.note(buffer)

    @precondition(lambda self: not self.dead and self.pipes)
    @rule(pick=PICK, lost=FEW)
    def client_leaves(self, pick: int, lost: int) -> None:
        """Its connection breaks, and the last blocks are lost on their way."""
        pipe = self.pipes[pick % len(self.pipes)]
        if pipe.line.state == "open" and pipe.line.flow is not None:
            pipe.line.flow.client_gone()
            pipe.absorb(lost)

    @precondition(lambda self: not self.dead and self.pipes)
    @rule(pick=PICK, back=BACK, lost=FEW, impatient=st.booleans())
    def client_resumes(self, pick: int, back: int, lost: int, impatient: bool) -> None:
        """From its last id or from an earlier one, its former connection closed or not."""
        pipe = self.pipes[pick % len(self.pipes)]
        if pipe.line.state == "waiting":
            return
        pipe.absorb(lost if pipe.line.busy else 0)
        if pipe.cursors and not pipe.complete:
            self.resume(pipe, back, impatient=impatient)
        elif pipe.line.flow is not None:
            pipe.line.flow.client_gone()

    def resume(self, pipe: Pipe, back: int = 0, *, impatient: bool = False) -> None:
        cursor = pipe.go_back(back)
        former = pipe.line
        line = pipe.line = Line(on_refusal=lambda reason: self.check_refusal(pipe, reason))
        pipe.must_pass = self.has_proof(pipe, cursor)
        self.unproven = self.unproven or not pipe.must_pass
        pipe.unanchored = pipe.unanchored or self.session.locate(cursor) is None
        self.proxy.resume(self.id, cursor, line)
        if former.flow is not None:
            former.flow.client_gone()
        if impatient and line.flow is not None:
            line.flow.open_head()  # R10: nothing came in time
        self.look_at(pipe)

    @precondition(lambda self: self.dead and self.pipes)
    @rule(pick=PICK)
    def client_insists(self, pick: int) -> None:
        """It asks again for a stream of a session that was refused (F4)."""
        pipe = self.pipes[pick % len(self.pipes)]
        pipe.absorb()
        if pipe.cursors and not pipe.complete:
            pipe.line = Line()
            self.proxy.resume(self.id, pipe.cursors[-1][0], pipe.line)
            assert pipe.line.state in ("404", "told"), "a fenced session was resumed (R2)"
            self.look_at(pipe)

    def something_goes_wrong(self, fault: str, pick: int) -> None:
        """What is no fault of the upstream must not be held against it."""
        if fault == OUTAGE:  # a boundary signal (section 2)
            self.had_outage = True
            self.proxy.outage_at = self.proxy.tick()
        elif fault == STRANGERS and self.session.delivered:
            fence = self.session.fence
            self.proxy.resume(self.id, b"no such event", Line(credentials=STRANGER))
            assert self.session.fence == fence, "a stranger fenced the session (F3)"
        elif fault == LOSS:
            self.faulty = True
            self.server.lost_as = SESSION_LOST[pick % len(SESSION_LOST)]
            self.server.evict()
        elif fault in (ANEW, FROM_1, BUFFERS_LOST):  # the incident of section 1
            self.faulty = True
            self.buffers_lost = self.buffers_lost or fault == BUFFERS_LOST
            self.counted_anew = self.counted_anew or fault == FROM_1
            self.server.recreate(keep_buffers=fault != BUFFERS_LOST, keep_count=fault != FROM_1)
        elif fault in SPOILT and self.roomy and not (fault == "foreign" and self.traits.alike):
            self.faulty = True
            self.server.spoil = lambda events: self.spoil(fault, pick, events)

    def spoil(self, how: str, pick: int, events: list[Emitted]) -> list[Emitted]:
        """The next replay loses, shuffles or alters an event that was read, or brings one of another stream."""
        events = list(events)
        read = [n for n, event in enumerate(events) if self.was_read(event)]
        if how == "foreign" and events:
            own = self.server.names[events[0].name]
            others = [event for buffer in self.server.buffers.values() if buffer is not own for event in buffer.events]
            others = [event for event in others if self.was_read(event)]
            if others:
                events.insert(0, others[pick % len(others)])
        elif read:
            at, other = read[pick % len(read)], read[(pick + 1) % len(read)]
            if how == "lose":
                del events[at]
            elif how == "alter":
                events[at] = replace(events[at], text="altered", answers=())
            elif how == "swap":
                events[at], events[other] = events[other], events[at]
        return events

    def was_read(self, event: Emitted) -> bool:
        """Whether the proxy has this event on record, on the stream that it belongs to."""
        (block,) = parsed([self.server.block(event)])
        streams = [pipe.stream for pipe in self.pipes if event in pipe.buffer.events]
        return bool(said(block)) and any(stream.holds(event.name.encode(), block.digest) for stream in streams)

    # -- what must hold

    def has_proof(self, pipe: Pipe, cursor: bytes) -> bool:
        """Whether a healthy session can prove this resume."""
        if self.faulty or not self.roomy:
            return False
        accept = self.policy.accept
        if Proof.EPOCH in accept and self.traits.epochs != "none" and self.session.token == str(self.execution):
            return True
        events = pipe.buffer.events
        at = next(n for n, event in enumerate(events) if event.name.encode() == cursor)
        last = max((n for n in range(at + 1) if self.server.said(events[n])), default=0)
        return Proof.OVERLAP in accept and last > 0 and not self.had_outage

    def check_refusal(self, pipe: Pipe, reason: str) -> None:
        if pipe.must_pass and not self.faulty:
            assert reason == Reason.NO_EVENT, f"a healthy resume with an accepted proof was refused: {reason}"

    def look_at(self, pipe: Pipe) -> None:
        """What the client makes of the state of its line."""
        line = pipe.line
        if not line.busy:
            pipe.absorb()
        own = set(pipe.failed) <= set(pipe.buffer.owes)
        assert own or self.counted_anew, "calls that the stream does not owe were told (F4)"
        assert len(set(pipe.failed)) == len(pipe.failed), "a call was told twice (F4, F5)"
        if line.state == "told":
            assert pipe.failed, "nothing was told"
            assert self.policy.pending_calls is not PendingCalls.LEAVE, "told all the same (F4)"
        if line.state in ("404", "told") or (line.state == "aborted" and line.reason):
            self.check_fence(line.reason)
        elif line.state == "passed":
            assert self.faulty, "a healthy resume found no stream"

    def check_fence(self, reason: str) -> None:
        """F2: from now on nothing of this session reaches the upstream."""
        self.dead = True
        asked = self.server.requests
        for ask in (self.proxy.listen, lambda session, line: self.proxy.post(session, b"{}", line)):
            line = Line()
            ask(self.id, line)
            assert line.state == "404", f"a session that was refused ({reason}) is still served (F2)"
        assert self.server.requests == asked, "a request of a fenced session reached the upstream (F2)"

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
            fresh = pipe.fresh
            allowed = self.allowed_executions(pipe)
            if pipe.line.resumed and not self.traits.alike and allowed is not None:
                executions = {text.split(" of ")[1] for text in fresh[pipe.judged :]}
                assert executions <= allowed, f"released events of {executions}, where {allowed} may come"
            pipe.judged = len(fresh)
            if self.is_known_whole(pipe):
                emitted = self.emitted(pipe.buffer)
                released = pipe.received + fresh
                assert released == emitted[: len(released)], f"released {released}, emitted {emitted}"

    def allowed_executions(self, pipe: Pipe) -> set[str] | None:
        """The executions whose events may come after a resume; None where the rules let another slip in."""
        if self.traits.epochs != "none":
            return None if pipe.session.token is None else {pipe.session.token}
        if self.strict:  # no epoch, no resume beyond one upstream connection's lifetime
            return {str(pipe.execution)} if pipe.line.from_buffer else set()
        return None

    def is_known_whole(self, pipe: Pipe) -> bool:
        """Whether the client must have a beginning of this very stream, and nothing else."""
        told_apart = self.traits.epochs != "none" and pipe.session.token == str(pipe.execution)
        if self.counted_anew and (not told_apart or self.policy.live_change is LiveChange.IGNORE):
            return False  # an id of two events names the last of them (R3)
        if self.buffers_lost and not told_apart and (self.lenient or (self.traits.alike and not self.strict)):
            return False  # another execution passes as unproven, or says the very same
        return not pipe.unanchored

    def emitted(self, buffer: Buffer) -> list[str]:
        return [text for event in buffer.events for text in self.server.said(event)]

    def teardown(self) -> None:
        """A healthy session that can prove its resumes brings everything in the end."""
        for pipe in getattr(self, "pipes", []):
            if not self.faulty and not self.dead:
                self.finish(pipe)

    def finish(self, pipe: Pipe) -> None:
        buffer = pipe.buffer
        if pipe.line.state == "waiting" and pipe.line.flow is not None:
            pipe.line.flow.open_head()
        self.notify(pipe, 1)
        if buffer.owes and not buffer.done:
            self.server.respond(buffer)
        self.refusals_are_noticed()
        while not self.dead and not pipe.line.busy:  # what is held first, and then the upstream's
            pipe.absorb()
            if pipe.unanchored or pipe.complete or not pipe.cursors or not self.has_proof(pipe, pipe.cursors[-1][0]):
                return
            self.resume(pipe)
        pipe.absorb()
        assert self.dead or pipe.unanchored or pipe.received == self.emitted(buffer), "some of it never came"
