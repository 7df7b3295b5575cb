"""Commands of many callers on few connections: what comes while all of these are at work is sent together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from epochgate.errors import StoreError

Argument = bytes | str | int | float
Command = tuple[Argument, ...]

CONNECTIONS = 32  # at work at the same time; the client library has no more than 100, and fails whoever asks for more
PIPELINED = 64  # commands that are put together at a stretch


class Bundle:
    """The commands for one server."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._waiting: deque[tuple[Command, asyncio.Future[Any]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._closed = False

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """The answers, in order; an error answer stands in the list. Raises what the client library raises."""
        if self._closed:
            raise StoreError("there is no connection")
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in commands]
        self._waiting.extend(zip(commands, answers, strict=True))
        idle = CONNECTIONS - len(self._senders)
        for _ in range(min(idle, -(-len(commands) // PIPELINED))):
            sender = loop.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        try:
            await asyncio.wait(answers)
        finally:
            for answer in answers:
                answer.cancel()  # nobody waits for it any more
        errors = [error for answer in answers if (error := answer.exception()) is not None]
        if errors:
            raise errors[0]
        return [answer.result() for answer in answers]

    def close(self) -> None:
        """Send nothing more; what waits comes to nothing."""
        self._closed = True
        while self._waiting:
            _, answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(StoreError("the connection was given up"))

    async def _send(self) -> None:
        while self._waiting:
            part = [self._waiting.popleft() for _ in range(min(PIPELINED, len(self._waiting)))]
            part = [(command, answer) for command, answer in part if not answer.done()]
            pipeline = self._client.pipeline(transaction=False)
            for command, _ in part:
                pipeline.execute_command(*command)
            found: Sequence[Any]
            try:
                found = await pipeline.execute(raise_on_error=False)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is that of these commands
                for _, answer in part:
                    if not answer.done():
                        answer.set_exception(error)
            else:
                for (_, answer), result in zip(part, found, strict=True):
                    if not answer.done():
                        answer.set_result(result)
