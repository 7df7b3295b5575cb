"""One worker: a process that serves, for a supervisor that tells of it and to which it owes its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

import msgspec

from epochgate import __version__
from epochgate.errors import ConfigurationError
from epochgate.relay.logs import set_up_logs
from epochgate.relay.server import Gate, run_loop
from epochgate.relay.telemetry import log
from epochgate.values import Address
from epochgate.workers.channel import Accepting, Answered, Asked, Begin, Channel, Failed, unpack
from epochgate.workers.desk import Desk

EX_CONFIG = 78
HEAR_WITHIN = 1.0  # s from SIGTERM until what the supervisor has to say of it

# Blocked from before it starts until it knows what to do with them: a terminal sends them to all processes.
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_decode = msgspec.msgpack.Decoder(Begin | Asked).decode


def main() -> int:
    """Serve until the supervisor says otherwise, or is gone; the exit status.

    Arguments: the number of the worker, the descriptor of its channel, and that of the Unix socket to listen on, or -1.
    """
    number, channel, listener = map(int, sys.argv[1:4])
    inherited = None if listener < 0 else socket.socket(fileno=listener)
    return run_loop(Worker(number, socket.socket(fileno=channel), inherited).run())


class Worker:
    """See the module."""

    def __init__(self, number: int, sock: socket.socket, inherited: socket.socket | None) -> None:
        self._number = number
        self._sock = sock
        self._inherited = inherited
        self._channel: Channel
        self._gate: Gate
        self._told = asyncio.Event()  # to end, by a signal

    async def run(self) -> int:
        """See `main`."""
        self._heed_signals()
        self._channel = await Channel.open(self._sock)
        try:
            begin = await self._receive()
            return 0 if not isinstance(begin, Begin) else await self._serve(begin)
        finally:
            await self._channel.close()

    def _heed_signals(self) -> None:
        """The supervisor hears them and says what they mean; SIGTERM for one worker ends that one."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._told.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    async def _receive(self) -> Begin | Asked | None:
        data = await self._channel.receive()
        return None if data is None else _decode(data)

    async def _serve(self, begin: Begin) -> int:
        if begin.version != __version__:
            return self._fail(f"this is version {__version__}, the supervisor is {begin.version}; restart epochgate")
        settings = unpack(begin.settings)
        set_up_logs(settings.log, worker=self._number)
        self._gate = Gate(settings)
        listen = settings.listen
        try:
            await self._gate.start()
            address = listen if listen.path is not None else Address(listen.host, begin.port)
            await self._gate.listen_together(address, self._inherited)
        except ConfigurationError as error:
            return self._fail(str(error))
        desk = Desk(self._gate, settings)
        self._channel.send(Accepting())
        answering = asyncio.create_task(self._answer(desk))
        try:
            await self._drain(desk, answering)
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            await self._gate.close()
        return 0

    def _fail(self, message: str) -> int:
        self._channel.send(Failed(message))
        return EX_CONFIG

    async def _answer(self, desk: Desk) -> None:
        """Until the supervisor is gone."""
        while (asked := await self._receive()) is not None:
            if isinstance(asked, Asked):
                try:
                    answer = msgspec.msgpack.encode(await desk.answer(asked.question))
                    self._channel.send(Answered(asked.number, msgspec.Raw(answer)))
                except Exception as error:  # noqa: BLE001  # what it says may quote an id (L7)
                    name = type(error).__name__
                    log.error("worker.answer", question=type(asked.question).__name__, error=name)
                    self._channel.send(Answered(asked.number, msgspec.Raw(msgspec.msgpack.encode(None)), name))

    async def _drain(self, desk: Desk, answering: asyncio.Task[None]) -> None:
        """Serve, and end as the supervisor says.

        Without it there is nobody to tell clients of the end beforehand, but others listen here, or will: it makes way.
        """
        told = asyncio.create_task(self._told.wait())
        await asyncio.wait((told, answering, desk.drains), return_when=asyncio.FIRST_COMPLETED)
        if told.done() and not answering.done():  # both are told where all processes get the signal
            await asyncio.wait((answering, desk.drains), timeout=HEAR_WITHIN, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        await asyncio.gather(told, return_exceptions=True)
        if desk.drains.done():
            grace, window = desk.drains.result()
        else:
            self._gate.context.draining = True
            self._gate.stop_listening()
            log.warning("worker.leaves", why="the supervisor is gone" if answering.done() else "SIGTERM")
            grace, window = 0.0, desk.settings.drain.window
        await self._gate.drain(grace=grace, window=window)
