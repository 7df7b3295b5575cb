"""The proxy's own answers: the 404, the errors for pending calls, and what went wrong (F1, F4, T7)."""

from __future__ import annotations

import asyncio
import contextlib

from epochgate.errors import BadRequestError
from epochgate.guard.policy import Policy
from epochgate.guard.record import Session, Stream
from epochgate.guard.refusal import Answer, answer_refused_resume, not_found_body, told_events
from epochgate.guard.verdict import Reason
from epochgate.relay.context import Context
from epochgate.relay.headers import Field, Framing
from epochgate.relay.reply import REASONS, Reply
from epochgate.relay.request import Request

DRAINED_BODY = 64 * 1024 * 1024  # bytes of a refused request that are read so that the connection stays usable (F1)
DRAIN_TIME = 10.0  # s for that; the body of a client that is slower is not waited for


class Answers:
    """Answers one request in the place of the upstream."""

    def __init__(self, context: Context, request: Request, reply: Reply) -> None:
        self._context = context
        self._request = request
        self._reply = reply

    async def refuse(
        self, policy: Policy, session: Session, stream: Stream, reason: Reason, credentials: bytes
    ) -> None:
        """Refuse a resume of `stream`: by the 404, or by an error for each call that it owes (F4)."""
        answer = answer_refused_resume(session, stream, policy, credentials)
        await self._context.spread(session)
        if answer is Answer.TELL:
            self._context.telemetry.told(policy.name, len(stream.owes))
            self._reply.start(
                200, b"OK", [(b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-store")], Framing.CHUNKED
            )
            self._reply.write(told_events(stream.owes, reason.value))
            self._reply.end()
        else:
            await self.not_found(reason)

    async def not_found(self, reason: Reason) -> None:
        """The 404 of F1."""
        await self.send(404, not_found_body(reason.value), [(b"Cache-Control", b"no-store")])

    async def send(self, status: int, body: bytes, more: list[Field] | None = None) -> None:
        """An answer of the proxy's own. The request is read to its end first, so that the connection stays usable."""
        await self._drain()
        fields: list[Field] = [
            (b"Content-Type", b"application/json"),
            *(more or []),
            (b"Content-Length", b"%d" % len(body)),
        ]
        framing = Framing.NONE if self._request.method == b"HEAD" else Framing.SIZED
        self._reply.start(status, REASONS.get(status, b"Error"), fields, framing)
        self._reply.write(body)
        self._reply.end()

    async def _drain(self) -> None:
        body = self._request.body
        if body.complete:
            return
        if self._request.get(b"expect") and not body.size:
            self._reply.keep_alive = False  # a client that waits for `100 Continue` sends nothing more, or does it?
            return
        size = len(body.take())
        with contextlib.suppress(ConnectionError, BadRequestError, TimeoutError):
            async with asyncio.timeout(DRAIN_TIME):
                while size <= DRAINED_BODY and not self._request.body.complete:
                    await body.wait()
                    size += len(body.take())
