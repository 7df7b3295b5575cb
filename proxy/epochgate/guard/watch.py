"""Traffic that was not resumed: what is recorded of it (L1, L3), and the token change that it may show (R12)."""

from __future__ import annotations

from epochgate.guard.mcp import (
    NOTHING,
    Headers,
    Looks,
    Messages,
    answers_nothing,
    carries_only,
    read_answers,
    read_messages,
    tokens_of,
    usual_token,
)
from epochgate.guard.policy import Policy
from epochgate.guard.record import Event, Session, Stream
from epochgate.guard.sse import Block
from epochgate.guard.sse import Kind as BlockKind

_PRIMING, _OTHER = BlockKind.PRIMING, BlockKind.OTHER  # a global is looked up faster than a member


class Watch:
    """Watches one response of `session` under these response headers; `stream` is the stream that it opened, if any."""

    __slots__ = ("_known", "_looks", "session", "stream", "tokens")

    def __init__(self, policy: Policy, session: Session, headers: Headers, stream: Stream | None = None) -> None:
        self.session = session
        self.stream = stream
        self.tokens = tokens_of(policy.sources, headers)
        self._known: str | None = None
        self._looks: Looks | None = None  # for the token above; None: not made yet

    def looks(self) -> Looks | None:
        """What a message has to be looked through for, see `usual_token`; None where each shows another epoch."""
        known = self.session.token
        if self._looks is None or self._known != known:
            fits = self.tokens.default in (None, known)
            self._known = known
            self._looks = tuple(usual_token(key, known) for key in self.tokens.keys) if fits else None
        return self._looks

    def head(self) -> bool:
        """Whether the response head alone shows another epoch (R12). The first token of a session is learnt (L1)."""
        return self._changed(Messages((self.tokens.default,))) if not self.tokens.keys else False

    def body(self, data: bytes) -> bool:
        """Whether a JSON body shows another epoch."""
        if carries_only(data, self.tokens, self.session.token):
            return False
        return self._changed(read_messages(data, self.tokens))

    def see(self, block: Block, now: float) -> bool:
        """Record one block at time `now` (s); whether it shows another epoch."""
        kind, data, stream = block.kind, block.data, self.stream
        if kind is _OTHER:
            return False
        if not data:
            messages = NOTHING if kind is _PRIMING else read_messages(None, self.tokens)
        elif not carries_only(data, self.tokens, self.session.token):
            messages = read_messages(data, self.tokens)
        elif answers_nothing(data):
            messages = NOTHING
        else:
            messages = read_answers(data)
        if stream is not None and not (block.id is None and kind is _PRIMING):
            if not messages.readable:
                stream.forget_owed()
            self.session.add(stream, Event(block.id, block.digest, now), messages.answers, learn=block.own_id)
        return messages is not NOTHING and self._changed(messages)

    def _changed(self, messages: Messages) -> bool:
        known = self.session.token
        for token in messages.tokens:
            if token is None:
                continue
            if known is None:
                known = token
                self.session.learn_token(token)
            elif token != known:
                return True
        return False
