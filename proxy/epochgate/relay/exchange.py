"""One request, phase by phase: classify, gate, forward, judge, release, record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from epochgate.errors import BadRequestError, UpstreamError
from epochgate.guard.judge import Cursor, Ending, Judge, is_refused
from epochgate.guard.mcp import LAST_EVENT_ID, PROTOCOL_VERSION, SESSION_ID, Call, is_session_era, read_call, tokens_of
from epochgate.guard.policy import Mode, Policy, Proof
from epochgate.guard.record import Origin, Session, Stream
from epochgate.guard.refusal import (
    Answer,
    answer_refused_resume,
    is_session_lost,
    may_fence,
    not_found_body,
    told_events,
)
from epochgate.guard.verdict import Reason, Verdict, proven, unproven
from epochgate.guard.watch import Watch
from epochgate.ledger.base import Resume
from epochgate.relay.client import REASONS, Request, error_body
from epochgate.relay.context import Context
from epochgate.relay.flow import LIVE_DATA, Answered, Downstream, Flow, Outcome
from epochgate.relay.handshake import open_handshake
from epochgate.relay.headers import (
    LAST_CHUNK,
    VIA,
    Field,
    Framing,
    check_connection_options,
    chunk,
    connection_options,
    end_to_end,
    head,
    is_event_stream,
    is_json,
    prefixed,
)
from epochgate.relay.passage import BodyTap, Passage, Suspect
from epochgate.relay.upstream import Head, Receiver, UpstreamConnection

HANDSHAKE_BODY = 1024 * 1024  # bytes of a POST that may be an `initialize` with a stale session id (L2)
DRAINED_BODY = 64 * 1024 * 1024  # bytes of a refused request that are read so that the connection stays usable (F1)
ASK_AGAIN_AFTER = (0.1, 0.3, 0.5)  # s (R9)

Choose = Callable[[UpstreamConnection, Head], "Receiver | None"]


class Opening:
    """Waits for the head of the answer, and lets `choose` say who hears the rest."""

    def __init__(self, connection: UpstreamConnection, exchange: Exchange, choose: Choose) -> None:
        self._connection = connection
        self._exchange = exchange
        self._choose = choose

    def received_interim(self, head: bytes) -> None:
        """A 1xx answer is passed on."""
        self._exchange.reply.interim(head)

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
        self._exchange.fail(error)

    def client_gone(self) -> None:
        """A request that has no answer yet cannot be resumed (H1)."""
        self._connection.abort()
        self._exchange.finish(Outcome.DONE)

    def client_paused(self) -> None:
        """The client does not keep up with 1xx answers."""
        self._connection.pause()

    def client_resumed(self) -> None:
        """It does again."""
        self._connection.resume()


class Exchange:
    """Works on one request."""

    def __init__(self, context: Context, request: Request) -> None:
        reply = request.connection.reply
        assert reply is not None
        self.context = context
        self.request = request
        self.client = request.connection
        self.reply = reply
        self.outcome: asyncio.Future[Outcome]
        self._policy: Policy | None = None
        self._session_id: bytes | None = None
        self._session: Session | None = None
        self._sent: list[bytes] = []  # a copy of the request body, as far as it is needed
        self._sent_size = 0
        self._copying = False
        self._lost = False  # the upstream says that the session is lost
        self._flow: Flow
        self._began = time.perf_counter()
        tracing = context.telemetry.tracing
        self._span = None if tracing is None else tracing.begin(request)

    async def run(self) -> None:
        """Answer the request, or break its connection off."""
        try:
            await self._work()
        except BadRequestError as error:
            if self.reply.started:
                self.reply.break_off()
            else:
                await self._answer(error.status, error_body(str(error)))
        except UpstreamError as error:
            self.context.saw_upstream_error(error)
            if self.reply.started:
                self.reply.break_off()
            else:
                await self._answer(error.status, error_body(str(error)))
        except ConnectionError:
            self.client.abort()  # the client left in the middle of its request
        policy = "" if self._policy is None else self._policy.name
        seconds = time.perf_counter() - self._began
        self.context.telemetry.request(policy, self.request.method, self.reply.status, self._session_id, seconds)
        if self._span is not None:
            self._span.end(self._policy, self.reply.status)

    def finish(self, outcome: Outcome) -> None:
        """The work on the answer is over."""
        self.client.watcher = None
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def fail(self, error: UpstreamError) -> None:
        """The upstream gives no answer."""
        self.client.watcher = None
        if not self.outcome.done():
            self.outcome.set_exception(error)

    # -- classify and gate

    async def _work(self) -> None:
        request = self.request
        if self.context.draining:
            self.reply.keep_alive = False  # the client's next request is to go elsewhere
        if self.context.retry_after is not None:
            retry_after = (b"Retry-After", b"%d" % self.context.retry_after)
            await self._answer(503, error_body("The proxy is about to end; try again"), [retry_after])
            return
        options = connection_options(request.fields) if b"connection" in request.first else frozenset()
        check_connection_options(options)
        fields = end_to_end(request.fields, options)
        policy = self._policy = self.context.policies.match(request.target)
        if policy is None or policy.mode is Mode.BYPASS or not is_session_era(request.get(PROTOCOL_VERSION)):
            await self._forward(fields, self._pass)
            return
        enforced = policy.mode is Mode.ENFORCE
        if enforced and (request.is_repeated(SESSION_ID) or request.is_repeated(LAST_EVENT_ID)):
            raise BadRequestError("Mcp-Session-Id and Last-Event-ID may be given only once")
        is_post = request.method == b"POST"
        session_id = self._session_id = request.get(SESSION_ID) or None
        if session_id is None:
            self._copying = is_post
            await self._forward(fields, self._choose_unnamed if is_post else self._pass)
            return
        now = time.time()
        cursor = request.get(LAST_EVENT_ID) if request.method == b"GET" else None
        ledger = self.context.ledger
        session = None if cursor else ledger.get(session_id, now)
        if session is None:
            resume = Resume(cursor, self._credentials(policy)) if cursor else None
            session = await ledger.find(session_id, now, resume)
            if self.client.lost:
                return
        self._session = session
        if enforced and is_post and (session is None or session.fence is not None):
            await self._read_ahead()
            call = self._call()
            if call is not None and call.initialize:
                fields = [field for field in fields if field[0].lower() != SESSION_ID]
                await self._forward(fields, self._choose_unnamed)
                return
        if session is not None:
            session.touch(now, policy.session_ttl)
        if enforced and session is not None and session.fence is not None:
            await self._refuse_fenced(policy, session, cursor)
        elif cursor:
            await self._resume(policy, session, session_id, cursor, fields)
        elif session is None:
            await self._forward(fields, self._pass)
        else:
            if enforced and request.method == b"GET":
                self._make_room(policy, session)
            self._copying = is_post
            if await self._forward(fields, self._choose_known) is Outcome.REFUSED:
                await self._tell_loss(policy, session)

    def _make_room(self, policy: Policy, session: Session) -> None:
        """Servers allow one standalone stream: one that is held, or whose client is gone in half, gives way (H2)."""
        credentials = self._credentials(policy)
        for flow in list(self.context.holds.of(session)):
            standalone = flow.stream.origin is Origin.STANDALONE and flow.credentials == credentials
            if standalone and (flow.downstream is None or flow.downstream.client.half_closed):
                flow.close()

    def _credentials(self, policy: Policy) -> bytes:
        return self.context.fingerprints.credentials(self.request.fields, policy.credentials)

    def _call(self) -> Call | None:
        """What the POST asks for, None where its body was too large to be read."""
        return read_call(b"".join(self._sent)) if self._sent_size <= LIVE_DATA else None

    # -- forward

    async def _forward(self, fields: list[Field], choose: Choose) -> Outcome:
        """Send the request, and wait until its answer is dealt with. Raises UpstreamError where there is none."""
        context, request = self.context, self.request
        connection = context.upstream.idle() or await context.upstream.connect()
        if self.client.lost:  # it would not be told
            connection.abort()
            return Outcome.DONE
        self.outcome = context.loop.create_future()
        opening = Opening(connection, self, choose)
        self.client.watcher = opening
        connection.begin(opening, request.method)
        fields = self._addressed(fields)
        body = request.body
        if body.framing is Framing.CHUNKED:
            fields.append((b"Transfer-Encoding", b"chunked"))
        start = b"%b %b HTTP/1.1" % (request.method, prefixed(request.target, context.prefix))
        ahead = b"".join(self._sent)
        data = head(start, fields) + (self._framed(ahead) if ahead else b"")
        if not body.complete or body.size:
            data += self._framed(self._take())
        if body.complete:
            connection.write(data + (LAST_CHUNK if body.framing is Framing.CHUNKED else b""))
            connection.request_sent()
        else:
            connection.write(data)
            await self._send_rest(connection)
        return await self.outcome

    def _addressed(self, fields: list[Field]) -> list[Field]:
        """With the upstream's authority in `Host`, unless the client's is to be kept, and `Via`."""
        context = self.context
        if not context.keep_host:
            fields = [(name, context.authority) if name.lower() == b"host" else (name, value) for name, value in fields]
            if b"host" not in self.request.first:
                fields.insert(0, (b"Host", context.authority))
        fields.append(VIA)
        return fields if self._span is None else self._span.pass_on(fields)

    async def _send_rest(self, connection: UpstreamConnection) -> None:
        """Send what is still to come of the body, as it comes, as long as nobody has answered."""
        body = self.request.body
        while not self.outcome.done():
            waiting = asyncio.ensure_future(body.wait())
            await asyncio.wait((waiting, self.outcome), return_when=asyncio.FIRST_COMPLETED)
            if self.outcome.done():
                if not waiting.cancel():
                    waiting.exception()  # the client has gone, as everybody knows
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
        data = self.request.body.take()
        if self._copying:
            self._sent_size += len(data)
            if self._sent_size <= LIVE_DATA:
                self._sent.append(data)
            else:
                self._sent.clear()
        return data

    def _framed(self, data: bytes) -> bytes:
        return chunk(data) if data and self.request.body.framing is Framing.CHUNKED else data

    async def _read_ahead(self) -> None:
        """Read the body before anything is forwarded, as far as an `initialize` could be long."""
        body = self.request.body
        self._invite_body()
        pieces = 0
        while pieces <= HANDSHAKE_BODY:
            data = body.take()
            pieces += len(data)
            self._sent.append(data)
            if body.complete:
                break
            await body.wait()
        self._sent_size = pieces

    def _invite_body(self) -> None:
        """A client that waits for a `100 Continue` gets it from the proxy where the proxy reads first."""
        expects = (self.request.get(b"expect") or b"").lower() == b"100-continue"
        if expects and not self.request.body.complete and not self.request.body.size:
            self.reply.interim(b"HTTP/1.1 100 Continue\r\n\r\n")

    # -- who hears the answer

    def _downstream(self) -> Downstream:
        return Downstream(self.client, self.reply, self.outcome)

    def _pass(self, connection: UpstreamConnection, head: Head) -> Receiver:
        return Passage(connection, head, self._downstream(), self.context)

    def _choose_unnamed(self, connection: UpstreamConnection, head: Head) -> Receiver:
        """The answer to a POST that names no session: it may open one (L1)."""
        policy = self._policy
        assert policy is not None
        granted = head.get(SESSION_ID)
        call = self._call() if granted and 200 <= head.status < 300 else None
        if call is None or not call.initialize:
            return self._pass(connection, head)
        credentials = self._credentials(policy)
        tap = open_handshake(self.context, policy, head, call.owes, credentials)
        return Passage(connection, head, self._downstream(), self.context, tap)

    def _choose_known(self, connection: UpstreamConnection, head: Head) -> Receiver:
        """The answer to a request of a session that is in the ledger."""
        policy, session, method = self._policy, self._session, self.request.method
        assert policy is not None
        assert session is not None
        self._see_instance(policy, session, head)
        if head.status in (400, 404) and method != b"HEAD":  # whose answer says nothing
            return self._suspect(policy, session, connection, head)
        if not 200 <= head.status < 300:
            return self._pass(connection, head)
        content_type = head.get(b"content-type")
        is_stream = is_event_stream(content_type)
        call = Call()
        if method == b"POST" and (is_stream or any(b"initialize" in piece for piece in self._sent)):
            call = self._call() or Call()
            if call.initialize and head.get(SESSION_ID):
                return self._choose_unnamed(connection, head)
        if is_stream and method in (b"POST", b"GET"):
            origin = Origin.CALL if method == b"POST" else Origin.STANDALONE
            credentials = self._credentials(policy)
            stream = session.open_stream(origin, call.owes, credentials)
            stream.owes_known = self._sent_size <= LIVE_DATA
            answer = Answered(connection, head)
            return Flow(self.context, policy, session, stream, answer, self._downstream(), credentials=credentials)
        if method == b"DELETE":
            self.context.fence(policy, session, Reason.DELETED)
            return self._pass(connection, head)
        watch = Watch(policy, session, head.fields)
        if watch.head():
            self.context.live_change(policy, session)
        tap = None
        if is_json(content_type) and watch.tokens.keys:
            tap = BodyTap(head.get(b"content-encoding"), lambda body: self._read_body(policy, session, watch, body))
        return Passage(connection, head, self._downstream(), self.context, tap)

    def _read_body(self, policy: Policy, session: Session, watch: Watch, body: bytes) -> None:
        if watch.body(body):
            self.context.live_change(policy, session)

    def _see_instance(self, policy: Policy, session: Session, head: Head) -> None:
        if policy.instance_header is not None:
            session.see_instance(head.get(policy.instance_header), time.time())

    def _suspect(self, policy: Policy, session: Session, connection: UpstreamConnection, head: Head) -> Receiver:
        """A 404 or a 400: perhaps a lost session (N1), which is a boundary signal at least."""
        method, status = self.request.method, head.status

        def is_lost(body: bytes) -> bool:
            self._lost = is_session_lost(method, status, body)
            if self._lost:
                session.mark_boundary(time.time())
            return self._lost

        def note_loss(body: bytes) -> None:
            if is_lost(body) and policy.normalize_loss:
                self.context.fence(policy, session, Reason.SESSION_LOST)  # in observe mode it is only counted

        if policy.mode is Mode.ENFORCE and policy.normalize_loss:
            return Suspect(connection, head, self._downstream(), is_lost)
        tap = BodyTap(head.get(b"content-encoding"), note_loss)
        return Passage(connection, head, self._downstream(), self.context, tap)

    async def _tell_loss(self, policy: Policy, session: Session) -> None:
        """A lost session, told in the one form that clients understand (N1)."""
        if may_fence(session, self._credentials(policy), granted=False):
            self.context.fence(policy, session, Reason.SESSION_LOST)
        await self._not_found(Reason.SESSION_LOST)

    # -- resume (section 6)

    async def _resume(
        self, policy: Policy, session: Session | None, session_id: bytes, cursor: bytes, fields: list[Field]
    ) -> None:
        enforced = policy.mode is Mode.ENFORCE
        if session is None:
            verdict = unproven(Reason.UNKNOWN_SESSION)
            self._report(policy, session_id, cursor, verdict)
            if enforced and is_refused(verdict, policy):
                await self._not_found(verdict.reason)
            else:
                await self._forward(fields, self._pass)
            return
        found = session.locate(cursor)
        if found is not None:
            await self._resume_known(policy, session, Cursor(*found), cursor, fields)
            return
        verdict = unproven(Reason.UNKNOWN_CURSOR if session.delivered else Reason.STALE_CURSOR)
        self._report(policy, session_id, cursor, verdict)
        if not session.delivered:
            if enforced:
                self._make_room(policy, session)
                fields = [field for field in fields if field[0].lower() != LAST_EVENT_ID]
            if await self._forward(fields, self._choose_known) is Outcome.REFUSED:
                await self._tell_loss(policy, session)
        elif enforced and is_refused(verdict, policy):
            if may_fence(session, self._credentials(policy), granted=False):
                self.context.fence(policy, session, verdict.reason)
            await self._not_found(verdict.reason)
        else:
            judge = Judge(policy, session, None, outage_at=self.context.upstream.outage_at, verdict=verdict)
            await self._ask(policy, session, judge, cursor, fields)

    async def _resume_known(
        self, policy: Policy, session: Session, cursor: Cursor, cursor_id: bytes, fields: list[Field]
    ) -> None:
        credentials = self._credentials(policy)
        stream = cursor.stream
        flow = self.context.holds.get(stream)
        if policy.mode is Mode.OBSERVE:
            verdict = self._would_be_held(policy, cursor) if credentials == stream.credentials else None
            if verdict is not None:
                self._report(policy, session.id, cursor_id, verdict, len(stream.owes))
        else:
            verdict = None
            if flow is not None and flow.credentials == credentials and not flow.is_contested():
                if flow.serves(cursor.position):
                    if flow.decided:
                        self._report(policy, session.id, cursor_id, proven(Proof.CONNECTION), len(stream.owes))
                    self.outcome = self.context.loop.create_future()
                    stream.spent = False
                    flow.attach(self._downstream(), cursor.position, cursor_id)
                    await self.outcome
                    return
                flow.close()
        judge = Judge(policy, session, cursor, outage_at=self.context.upstream.outage_at, verdict=verdict)
        await self._ask(policy, session, judge, cursor_id, fields)

    def _would_be_held(self, policy: Policy, cursor: Cursor) -> Verdict | None:
        """Observe mode: whether the stream would still have been held."""
        left_at = cursor.stream.left_at
        if Proof.CONNECTION not in policy.accept or left_at is None or time.time() - left_at > policy.hold_time:
            return None
        return proven(Proof.CONNECTION)

    async def _ask(self, policy: Policy, session: Session, judge: Judge, cursor: bytes, fields: list[Field]) -> None:
        """Ask the upstream, again where that may help, until the resume is decided (R5, R9)."""
        enforced = policy.mode is Mode.ENFORCE
        credentials = self._credentials(policy)
        ask_from = cursor
        if enforced:
            ask_from = judge.rewound or cursor
            fields = _with_identity(fields)
            self._copying = True  # a body, however odd, is sent each time
        asked = 0
        while not enforced or session.fence is None:
            rewound = ask_from != cursor
            choose = self._judged(policy, session, judge, cursor, rewound=rewound)
            try:
                outcome = await self._forward(_with_cursor(fields, ask_from) if rewound else fields, choose)
            except UpstreamError:
                self._note_spent(session, judge.stream, credentials)
                raise
            if outcome is Outcome.NO_STREAM:
                ask_from = cursor
            elif outcome is Outcome.EMPTY and session.fence is None:
                asked += 1
                ending = judge.end_without_message(asked)
                if ending is Ending.ASK_AGAIN:
                    await asyncio.sleep(ASK_AGAIN_AFTER[asked - 1])
                    if self.client.lost:
                        return
                    continue
                if judge.verdict is not None and judge.verdict.reason is Reason.NO_EVENT:
                    self._report(policy, session.id, cursor, judge.verdict, len(judge.stream.owes))
                if ending is Ending.PASS:
                    self._flow.pass_empty(self.reply)
                    return
                self.context.fence(policy, session, Reason.NO_EVENT)
            elif outcome is Outcome.DONE:
                if self.reply.status >= 400:
                    self._note_spent(session, judge.stream, credentials)
                return
            elif self._lost:
                if may_fence(session, credentials, granted=False):
                    self.context.fence(policy, session, Reason.SESSION_LOST)
                await self._refuse(policy, session, judge.stream, Reason.SESSION_LOST, credentials)
                return
        await self._refuse(policy, session, judge.stream, Reason(session.fence or ""), credentials)

    def _note_spent(self, session: Session, stream: Stream, credentials: bytes) -> None:
        """One of the tries that a client has was answered by an error (F4)."""
        if credentials == stream.credentials:
            stream.spent = True
            session.stream_changed(stream)

    def _judged(self, policy: Policy, session: Session, judge: Judge, cursor: bytes, *, rewound: bool) -> Choose:
        """Who hears the answer to a resume."""

        def choose(connection: UpstreamConnection, head: Head) -> Receiver | None:
            self._see_instance(policy, session, head)
            if head.status == 200 and is_event_stream(head.get(b"content-type")):
                judge.tokens = tokens_of(policy.sources, head.fields)
                judge.outage_at = self.context.upstream.outage_at
                former = self.context.holds.get(judge.stream)
                if former is not None and not former.is_contested():
                    former.close()  # of another caller; the upstream has let this one in (R4)
                answer = Answered(connection, head)
                downstream = self._downstream()
                credentials = self._credentials(policy)
                self._flow = Flow(
                    self.context,
                    policy,
                    session,
                    judge.stream,
                    answer,
                    downstream,
                    credentials=credentials,
                    cursor=cursor,
                    judge=judge,
                )
                return self._flow
            if rewound:
                self.finish(Outcome.NO_STREAM)
                return None
            if head.status in (400, 404):
                return self._suspect(policy, session, connection, head)
            return self._pass(connection, head)

        return choose

    # -- refuse

    async def _refuse_fenced(self, policy: Policy, session: Session, cursor: bytes | None) -> None:
        """R2: the upstream is not asked. A stream that still owes responses may be told so (F4)."""
        found = session.locate(cursor) if cursor else None
        reason = Reason(session.fence or "")
        if found is None:
            await self._not_found(reason)
        else:
            await self._refuse(policy, session, found[0], reason, self._credentials(policy))

    async def _refuse(
        self, policy: Policy, session: Session, stream: Stream, reason: Reason, credentials: bytes
    ) -> None:
        if answer_refused_resume(session, stream, policy, credentials) is Answer.TELL:
            self.context.telemetry.told(policy.name, len(stream.owes))
            self.reply.start(
                200, b"OK", [(b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-store")], Framing.CHUNKED
            )
            self.reply.write(told_events(stream.owes, reason.value))
            self.reply.end()
        else:
            await self._not_found(reason)

    async def _not_found(self, reason: Reason) -> None:
        """The 404 of F1."""
        await self._answer(404, not_found_body(reason.value), [(b"Cache-Control", b"no-store")])

    async def _answer(self, status: int, body: bytes, more: list[Field] | None = None) -> None:
        """An answer of the proxy's own. The request is read to its end first, so that the connection stays usable."""
        await self._drain()
        fields: list[Field] = [
            (b"Content-Type", b"application/json"),
            *(more or []),
            (b"Content-Length", b"%d" % len(body)),
        ]
        framing = Framing.NONE if self.request.method == b"HEAD" else Framing.SIZED
        self.reply.start(status, REASONS.get(status, b"Error"), fields, framing)
        self.reply.write(body)
        self.reply.end()

    async def _drain(self) -> None:
        body = self.request.body
        if body.complete:
            return
        if self.request.get(b"expect") and not body.size:
            self.reply.keep_alive = False  # a client that waits for `100 Continue` sends nothing more, or does it?
            return
        size = len(body.take())
        with contextlib.suppress(ConnectionError, BadRequestError):
            while size <= DRAINED_BODY and not self.request.body.complete:
                await body.wait()
                size += len(body.take())

    def _report(self, policy: Policy, session_id: bytes, cursor: bytes, verdict: Verdict, pending: int = 0) -> None:
        enforced = policy.mode is Mode.ENFORCE
        self.context.telemetry.verdict(
            policy.name, verdict, session=session_id, cursor=cursor, enforced=enforced, pending=pending
        )


def _with_cursor(fields: list[Field], cursor: bytes) -> list[Field]:
    """The fields with another cursor in place of the client's (R5)."""
    return [(name, cursor) if name.lower() == LAST_EVENT_ID else (name, value) for name, value in fields]


def _with_identity(fields: list[Field]) -> list[Field]:
    """What must be read to be checked should come readable (T8)."""
    kept = [field for field in fields if field[0].lower() != b"accept-encoding"]
    kept.append((b"Accept-Encoding", b"identity"))
    return kept
