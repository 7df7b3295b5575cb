"""Traffic that was not resumed: what is recorded of it (L1, L3), and the token change that it may show (R12)."""

from __future__ import annotations

from epochgate.guard.mcp import NOTHING, Headers, Messages, carries_only, read_messages, says_nothing, tokens_of
from epochgate.guard.policy import Policy
from epochgate.guard.record import Event, Session, Stream
from epochgate.guard.sse import Block
from epochgate.guard.sse import Kind as BlockKind


class Watch:
    """Watches one response of `session` under these response headers; `stream` is the stream that it opened, if any."""

    __slots__ = ("session", "stream", "tokens")

    def __init__(self, policy: Policy, session: Session, headers: Headers, stream: Stream | None = None) -> None:
        self.session = session
        self.stream = stream
        self.tokens = tokens_of(policy.sources, headers)

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
        if block.kind is BlockKind.OTHER:
            return False
        messages = NOTHING
        if block.data:
            if not says_nothing(block.data, self.tokens, self.session.token):
                messages = read_messages(block.data, self.tokens)
        elif block.kind is BlockKind.MESSAGE:
            messages = read_messages(None, self.tokens)
        if self.stream is not None and not (block.id is None and block.kind is BlockKind.PRIMING):
            if not messages.readable:
                self.stream.forget_owed()
            self.session.add(self.stream, Event(block.id, block.digest, now), messages.answers, learn=block.own_id)
        return self._changed(messages)

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
