"""A client: the streams that it has opened, what it has of each, and where it would resume."""

import json
from dataclasses import dataclass, field

from epochgate.guard.record import Session, Stream
from epochgate.guard.sse import Block, Framer
from model.proxy import Line
from model.server import Buffer


@dataclass(eq=False)
class Pipe:
    """A stream as the client knows it."""

    buffer: Buffer  # the one that the upstream opened for it
    session: Session
    stream: Stream  # the proxy's record of it
    execution: int  # that opened it
    line: Line
    received: list[str] = field(default_factory=list)
    cursors: list[tuple[bytes, int]] = field(default_factory=list)  # each id, and how much had been received with it
    failed: list[int] = field(default_factory=list)  # calls that the proxy told as failed
    unanchored: bool = False  # it was resumed from a cursor that the ledger had forgotten
    must_pass: bool = False  # its last resume had an accepted proof
    judged: int = 0  # how many of the fresh ones were looked at, by what was known when they came

    def absorb(self, lost: int = 0) -> None:
        """Read what came on the line; the last `lost` blocks never arrived."""
        blocks, self.line.blocks = self.line.blocks, []
        self.judged = 0
        for block in parsed(blocks[: max(len(blocks) - lost, 0)]):
            self.received += said(block)
            self.failed += told(block)
            if block.own_id and block.id is not None:
                self.cursors.append((block.id, len(self.received)))

    def go_back(self, by: int) -> bytes:
        """Forget what came after an earlier id; the cursor to resume from."""
        del self.cursors[len(self.cursors) - min(by, len(self.cursors) - 1) :]
        cursor, count = self.cursors[-1]
        del self.received[count:]
        return cursor

    @property
    def fresh(self) -> list[str]:
        """What was released on the line and not read yet."""
        return [text for block in parsed(self.line.blocks) for text in said(block)]

    @property
    def complete(self) -> bool:
        """Whether every response has come: the client will not ask for it again."""
        answered = {text.split()[0] for text in self.received}
        return bool(self.buffer.owes) and answered.issuperset(map(str, self.buffer.owes))


def parsed(blocks: list[bytes]) -> list[Block]:
    """The blocks of one line."""
    return Framer().feed(b"".join(blocks))


def said(block: Block) -> list[str]:
    """What the messages of an event say; not what the proxy itself tells."""
    return [
        message.get("params", message.get("result"))["data"] for message in _messages(block) if "error" not in message
    ]


def told(block: Block) -> list[int]:
    """The calls that the proxy tells as failed."""
    return [message["id"] for message in _messages(block) if "error" in message]


def _messages(block: Block) -> list[dict[str, dict[str, str]]]:
    decoded = json.loads(block.data) if block.data else []
    return decoded if isinstance(decoded, list) else [decoded]
