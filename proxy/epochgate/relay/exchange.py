"""One request, phase by phase: classify, gate, forward, and who hears the answer."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from functools import partial

from epochgate.errors import BadRequestError, NoRoomError, UpstreamError
from epochgate.guard.judge import is_refused
from epochgate.guard.mcp import LAST_EVENT_ID, PROTOCOL_VERSION, SESSION_ID, Call, is_session_era
from epochgate.guard.policy import Mode, Policy
from epochgate.guard.record import Asked, Origin, Session
from epochgate.guard.refusal import is_session_lost, may_fence
from epochgate.guard.verdict import Reason, unproven
from epochgate.guard.watch import Watch
from epochgate.ledger.base import Resume
from epochgate.ledger.messages import Offer
from epochgate.relay.answers import Answers
from epochgate.relay.context import Context
from epochgate.relay.downstream import Outcome
from epochgate.relay.farewell import Farewell
from epochgate.relay.flow import Answered, Flow
from epochgate.relay.forward import Choose, Forwarder
from epochgate.relay.handshake import Grant, Handshake
from epochgate.relay.headers import (
    Head,
    check_connection_options,
    connection_options,
    is_json,
    members_of,
    without,
)
from epochgate.relay.passage import BodyTap, Passage, StreamTap, Suspect
from epochgate.relay.reply import error_body
from epochgate.relay.request import Request
from epochgate.relay.resumption import Resumption
from epochgate.relay.settling import Settling
from epochgate.relay.upstream import Receiver, UpstreamConnection

RETRY_AFTER = (b"Retry-After", b"1")  # s, when others may have let go of what they keep


class Exchange:
    """Works on one request."""

    def __init__(self, context: Context, request: Request) -> None:
        reply = request.connection.reply
        assert reply is not None
        tracing = context.telemetry.tracing
        self._span = None if tracing is None else tracing.begin(request)
        self.context = context
        self.request = request
        self.client = request.connection
        self.reply = reply
        self.forwarder = Forwarder(context, request, reply, self._span)
        self.lost = False  # the upstream says that the session is lost
        self.offers: list[Offer] = []  # of the stream that is resumed, by the process that holds it
        self._policy: Policy | None = None
        self._session_id: bytes | None = None
        self._session: Session | None = None
        self._began = time.perf_counter()

    @property
    def answers(self) -> Answers:
        """The proxy's own answers to it."""
        return Answers(self.context, self.request, self.reply)

    def begin(self) -> bool:
        """Send the request on, where nothing has to be waited for; False: nothing was sent, and `run` is to do it.

        The client's connection is told when it is done: an ordinary call needs no task of its own.
        """
        request, context = self.request, self.context
        if not request.body.complete or context.draining or self._span is not None or b"connection" in request.first:
            return False
        try:
            choose = self._choose_at_once()
        except BadRequestError:
            return False
        connection = None if choose is None else context.upstream.idle()
        if choose is None or connection is None:
            return False
        self.forwarder.begin(connection, choose, self._ended)
        return True

    def _ended(self, outcome: Outcome | UpstreamError) -> None:
        if outcome is Outcome.DONE:
            self._account()
            self.client.work_done()
        else:
            self.client.go_on(self._run(self._conclude(outcome)))

    async def run(self) -> None:
        """Answer the request, or break its connection off."""
        await self._run(self._work())

    async def _run(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except (BadRequestError, NoRoomError, UpstreamError) as error:
            error.__traceback__ = None  # its frames know what it came out of, which knows it: a cycle
            if isinstance(error, UpstreamError):
                self.context.saw_upstream_error(error)
            if self.reply.started:
                self.reply.break_off()
            else:
                more = [RETRY_AFTER] if isinstance(error, NoRoomError) else None
                await self.answers.send(error.status, error_body(str(error)), more)
        except ConnectionError as error:
            error.__traceback__ = None
            self.client.abort()  # the client left in the middle of its request
        self._account()

    def _account(self) -> None:
        policy = "" if self._policy is None else self._policy.name
        seconds = time.perf_counter() - self._began
        self.forwarder.forget()
        self.context.telemetry.request(policy, self.request.method, self.reply.status, self._session_id, seconds)
        if self._span is not None:
            self._span.end(self._policy, self.reply.status, self.forwarder.rpc_method)

    async def _work(self) -> None:
        request, context = self.request, self.context
        if context.draining:
            self.reply.keep_alive = False  # the client's next request is to go elsewhere
        if context.retry_after is not None:
            retry_after = (b"Retry-After", b"%d" % context.retry_after)
            await self.answers.send(503, error_body("The proxy is about to end; try again"), [retry_after])
            return
        if b"connection" in request.first:
            policy = context.policies.match(request.target)
            credentials = () if policy is None or policy.mode is Mode.BYPASS else policy.credentials
            check_connection_options(connection_options(request.fields), credentials)
        choose = self._choose_at_once()
        if choose is not None:
            await self._conclude(await self.forwarder.send(choose))
            return
        policy, session_id = self._policy, self._session_id
        assert policy is not None
        assert session_id is not None
        await self._work_guarded(policy, session_id)

    def _choose_at_once(self) -> Choose | None:
        """Who hears the answer, where that needs no more than a look; None for a session that has to be looked into."""
        request = self.request
        policy = self._policy = self.context.policies.match(request.target)
        if policy is None or policy.mode is Mode.BYPASS or not self._is_session_era():
            return self.relay
        if policy.mode is Mode.ENFORCE and (request.is_repeated(SESSION_ID) or request.is_repeated(LAST_EVENT_ID)):
            raise BadRequestError("Mcp-Session-Id and Last-Event-ID may be given only once")
        is_post = request.method == b"POST"
        session_id = self._session_id = request.get(SESSION_ID) or None
        if session_id is None:
            self.forwarder.copying = is_post
            return self._choose_unnamed if is_post else self.relay
        if not is_post:
            return None
        now = time.time()
        session = self._session = self.context.ledger.get(session_id, now)
        if session is None or session.fence is not None:
            return None
        session.note_gap(now, policy.session_ttl)
        self.forwarder.copying = True
        return self.choose_known

    async def _conclude(self, outcome: Outcome | UpstreamError) -> None:
        """The answer is dealt with, unless it told of a lost session (N1) or none came."""
        if isinstance(outcome, UpstreamError):
            raise outcome
        if outcome is Outcome.REFUSED and self._policy is not None and self._session is not None:
            await self.tell_loss(self._policy, self._session)

    async def _work_guarded(self, policy: Policy, session_id: bytes) -> None:
        """A request of a session that has to be looked up, that is fenced, or that is resumed."""
        request = self.request
        enforced = policy.mode is Mode.ENFORCE
        is_post = request.method == b"POST"
        now = time.time()
        cursor = request.get(LAST_EVENT_ID) if request.method == b"GET" else None
        fields = None  # as they came
        if enforced and cursor == b"":  # no cursor, and yet some servers replay all that they have to whoever sends it
            fields = without(request.end_to_end(), LAST_EVENT_ID)
        ledger = self.context.ledger
        session = None if cursor else ledger.get(session_id, now)
        if session is None:
            resume = Resume(cursor, self.credentials(policy), enforced, self.offers) if cursor else None
            session = await ledger.find(session_id, now, resume)
            self.context.backlog.settle()
            if self.client.lost:
                return
        self._session = session
        if enforced and is_post and (session is None or session.fence is not None):
            await self.forwarder.read_ahead()
            is_handshake = await self.forwarder.is_handshake(unknown=session is None)
            if self.client.lost:
                return
            if is_handshake:
                fields = without(request.end_to_end(), SESSION_ID, LAST_EVENT_ID)
                await self.forwarder.send(self._choose_unnamed, fields)
                return
        if session is not None:
            session.note_gap(now, policy.session_ttl)
        if enforced and session is not None and session.fence is not None:
            await Resumption(self, policy, session, cursor or b"").refuse_fenced()
        elif cursor:
            await self._resume(policy, session, session_id, cursor)
        elif session is None:
            await self.forwarder.send(self.relay, fields)
        else:
            if enforced and request.method == b"GET":
                await self.make_room(policy, session)
            self.forwarder.copying = is_post
            if request.method == b"DELETE":
                self.forwarder.leave = partial(Farewell, self.context, policy, session)
            await self._conclude(await self.forwarder.send(self.choose_known, fields))

    def _is_session_era(self) -> bool:
        """S1. A field that is empty names no version; of several versions nobody knows which one the server takes."""
        version = self.request.first.get(PROTOCOL_VERSION)
        if is_session_era(version):
            return True
        versions = members_of(self.request.fields, PROTOCOL_VERSION)
        return not versions or any(is_session_era(version) for version in versions)

    async def _resume(self, policy: Policy, session: Session | None, session_id: bytes, cursor: bytes) -> None:
        if session is not None:
            await Resumption(self, policy, session, cursor).run()
            return
        verdict = unproven(Reason.UNKNOWN_SESSION)
        enforced = policy.mode is Mode.ENFORCE
        self.context.telemetry.verdict(
            policy.name, verdict, session=session_id, cursor=cursor, enforced=enforced, pending=0
        )
        if enforced and is_refused(verdict, policy):
            await self.answers.not_found(verdict.reason)
        else:
            await self.forwarder.send(self.relay)

    async def make_room(self, policy: Policy, session: Session) -> None:
        """Servers allow one standalone stream: the one that is held, here or in another process, gives way (H2)."""
        credentials = self.credentials(policy)
        self.context.holds.make_room(session, credentials)
        if self.context.elsewhere is not None:
            await self.context.ledger.find(session.id, time.time(), Resume(b"", credentials))

    def credentials(self, policy: Policy) -> bytes:
        """The fingerprint of the caller's credentials."""
        request, names, fingerprints = self.request, policy.credentials, self.context.fingerprints
        for name in names:
            if name in request.first:
                break
        else:
            return b""
        known = request.known
        if known is None:
            return fingerprints.credentials(request.fields, names)
        if known.caller is None or known.caller[0] is not fingerprints or known.caller[1] is not names:
            known.caller = fingerprints, names, fingerprints.credentials(request.fields, names)
        return known.caller[2]

    # -- who hears the answer

    def relay(self, connection: UpstreamConnection, head: Head) -> Receiver:
        """The answer goes to the client as it comes."""
        self.forwarder.forget()
        return Passage(connection, head, self.forwarder.downstream, self.context)

    def _choose_unnamed(self, connection: UpstreamConnection, head: Head) -> Receiver:
        """The answer to a POST that names no session: it may open one (L1)."""
        policy = self._policy
        assert policy is not None
        granted = head.get(SESSION_ID)
        call = self.forwarder.call() if granted and 200 <= head.status < 300 else None
        if call is None or not call.initialize:
            return self.relay(connection, head)
        self.forwarder.forget()
        grant = Grant(self.context, policy, head, self.credentials(policy))
        return Handshake(connection, head, self.forwarder.downstream, self.context, grant, call.owes)

    def choose_known(self, connection: UpstreamConnection, head: Head) -> Receiver:
        """The answer to a request of a session that is in the ledger."""
        policy, session, method = self._policy, self._session, self.request.method
        assert policy is not None
        assert session is not None
        asked = self.note_answer(policy, session, connection, head)
        if head.status in (400, 404) and method != b"HEAD":  # whose answer says nothing
            return self.suspect(policy, session, connection, head)
        if not 200 <= head.status < 300:
            return self.relay(connection, head)
        is_stream = head.may_be_stream and method in (b"POST", b"GET")
        call = Call()
        if method == b"POST" and (is_stream or self.forwarder.may_initialize()):
            call = self.forwarder.call() or Call(readable=False)
            if call.initialize and head.get(SESSION_ID):
                return self._choose_unnamed(connection, head)
            # Without a type it is the empty answer to a notification, as a rule.
            is_stream = is_stream and (head.is_stream or bool(call.owes) or not call.readable)
        if is_stream:
            origin = Origin.CALL if method == b"POST" else Origin.STANDALONE
            credentials = self.credentials(policy)
            stream = session.open_stream(origin, call.owes, credentials)
            stream.owes_known = call.readable
            self.forwarder.forget()
            if head.whole and head.get(b"content-encoding") is None:
                record = StreamTap(self.context, policy, session, stream, head, credentials, asked)
                return Passage(connection, head, self.forwarder.downstream, self.context, record)
            answered = Answered(connection, head, asked)
            return Flow(
                self.context, policy, session, stream, answered, self.forwarder.downstream, credentials=credentials
            )
        if method == b"DELETE":
            self.context.fence(policy, session, Reason.DELETED)
            answer = Settling(connection, head, self.forwarder.downstream, self.context)
            answer.settle(session)
            return answer
        watch = Watch(policy, session, head.fields)
        tap = None
        if not may_fence(session, self.credentials(policy), granted=False):
            return self.relay(connection, head)  # whatever it says of the session, it says to a stranger (F3)
        if watch.head():
            self.context.live_change(policy, session)
        if watch.tokens.keys and is_json(head.get(b"content-type")):
            tap = BodyTap(
                head.get(b"content-encoding"),
                lambda body: self._read_body(policy, session, watch, body),
                self.context.copies,
            )
        self.forwarder.forget()
        return Passage(connection, head, self.forwarder.downstream, self.context, tap)

    def _read_body(self, policy: Policy, session: Session, watch: Watch, body: bytes) -> None:
        self.context.backlog.settle()
        if watch.body(body):
            self.context.live_change(policy, session)

    def note_answer(self, policy: Policy, session: Session, connection: UpstreamConnection, head: Head) -> Asked:
        """A 2xx shows that the session lives, and its instance header may tell of a boundary.

        Any other answer says nothing of it: a gateway may have given it, to a stranger.
        """
        self.context.backlog.settle()
        instance = None if policy.instance_header is None else head.get(policy.instance_header)
        if 200 <= head.status < 300:
            now = time.time()
            session.touch(now)
            session.see_instance(instance, now)
        return Asked(connection.asked_at, instance)

    def suspect(self, policy: Policy, session: Session, connection: UpstreamConnection, head: Head) -> Receiver:
        """A 404 or a 400: perhaps a lost session (N1), which is a boundary signal at least."""
        method, status = self.request.method, head.status

        def is_lost(body: bytes) -> bool:
            self.lost = is_session_lost(method, status, body)
            if self.lost:
                session.mark_boundary(time.time())  # whoever asked: a client whose token was renewed is a stranger too
            return self.lost

        def note_loss(body: bytes) -> None:
            may = may_fence(session, self.credentials(policy), granted=False)
            if is_lost(body) and policy.normalize_loss and may:
                self.context.fence(policy, session, Reason.SESSION_LOST)  # in observe mode it is only counted

        if policy.mode is Mode.ENFORCE and policy.normalize_loss:
            return Suspect(connection, head, self.forwarder.downstream, is_lost, self.context.copies)
        tap = BodyTap(head.get(b"content-encoding"), note_loss, self.context.copies)
        return Passage(connection, head, self.forwarder.downstream, self.context, tap)

    async def tell_loss(self, policy: Policy, session: Session) -> None:
        """A lost session, told in the one form that clients understand (N1)."""
        if may_fence(session, self.credentials(policy), granted=False):
            self.context.fence(policy, session, Reason.SESSION_LOST)
            await self.context.spread(session)
        await self.answers.not_found(Reason.SESSION_LOST)


def work_on(context: Context, request: Request) -> Coroutine[None, None, None] | None:
    """Work on a request. What is returned is to be awaited; None: it goes on by itself, and tells the connection."""
    context.backlog.settle()
    exchange = Exchange(context, request)
    return None if exchange.begin() else exchange.run()
