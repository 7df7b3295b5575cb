"""One worker as the supervisor sees it: a number, and the processes that have it one after the other."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from epochgate.admin.snapshot import Obstacle, Snapshot, past, total
from epochgate.admin.views import View
from epochgate.relay.listener import Reserved
from epochgate.relay.telemetry import Decided, log
from epochgate.workers.channel import (
    Accepting,
    Answered,
    Asked,
    Begin,
    Channel,
    Drain,
    Failed,
    Question,
    Report,
    Reported,
)
from epochgate.workers.worker import SIGNALS

Answer = TypeVar("Answer")

RESTART_AFTER = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # s, by how many died young in a row; the last again and again
YOUNG = 30.0  # s
START_WITHIN = 60  # looks until it accepts connections
ANSWER_WITHIN = 30  # looks without a word, and it is taken to hang
QUIET = 3  # looks without a word, and it is told of
END_WITHIN = 5.0  # s from the end of its channel to its own

# The import path is that of this process. The working directory is on it only if it is on ours.
_PROGRAM = "import sys; sys.path[:] = sys.argv[4:]; from epochgate.workers.worker import main; sys.exit(main())"

_decode = msgspec.msgpack.Decoder(Accepting | Failed | Answered).decode


@dataclass(frozen=True, slots=True)
class Crew:
    """What the workers of one proxy have in common."""

    reserved: Reserved
    begin: Callable[[], Begin]  # the first message to a process, with the settings that are in force by then
    decided: Callable[[list[Decided]], None]  # hears of new verdicts
    failed: Callable[[str], None]  # hears why a worker cannot serve with its settings
    serving: Callable[[], None]  # hears that another worker accepts connections


class UnansweredError(Exception):
    """A worker that does not serve, ended before it answered, or could not answer."""


class WorkerProcess:
    """See the module. `state` is `starting`, `serving`, `waiting` (for its next process) or `ended`."""

    def __init__(self, number: int, crew: Crew) -> None:
        self.number = number
        self.state = "starting"
        self.restarts = 0
        self.last: Snapshot | None = None  # that the present process told of
        self.known = self.fenced = b""  # tags of sessions, as in `Reported`
        self._crew = crew
        self._former: Snapshot | None = None  # what the processes before it had counted
        self._last_end = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._since = time.time()
        self._quiet = 0  # looks since it was heard of
        self._questions: dict[int, tuple[asyncio.Future[Any], Any]] = {}
        self._asked = 0
        self._ending = asyncio.Event()

    # -- what is told of it

    def view(self) -> View:
        """For `Subject.workers`. `since`: when the state began, in s since 1970."""
        return {
            "worker": self.number,
            "pid": None if self._process is None else self._process.pid,
            "state": self.state,
            "since": self._since,
            "restarts": self.restarts,
            "last_end": self._last_end,
        }

    def trouble(self) -> Obstacle | None:
        """Why it does not serve, None if it does."""
        before = f"; the one before ended with {self._last_end}" if self._last_end else ""
        if self.state == "starting":
            return Obstacle("worker", f"does not accept connections yet{before}")
        if self.state != "serving":
            return Obstacle("worker", f"is to be started{before}")
        return Obstacle("worker", "does not answer") if self._quiet > QUIET else None

    def snapshot(self) -> Snapshot | None:
        """What all of its processes have counted, as far as they told; None before one did."""
        told = [each for each in (self._former, self.last) if each is not None]
        return total(told, self._since) if told else None

    # -- what it is asked

    async def ask(self, question: Question, answer: type[Answer]) -> Answer:
        """The answer, of the type that the question says. Raises UnansweredError."""
        return cast("Answer", await self._send(question, answer))

    def look(self) -> None:
        """Have it report, and end it if it has not been heard of for too long. To be called once a second."""
        if self._process is None:
            return
        self._quiet += 1
        if self._quiet > (ANSWER_WITHIN if self.state == "serving" else START_WITHIN):
            log.error("worker.hangs", worker=self.number, pid=self._process.pid, seconds=self._quiet)
            self._quiet = 0
            self._process.kill()
        elif self.state == "serving" and not self._questions:
            _ignore(self._send(Report(sessions=False), Reported))

    def _send(self, question: Question, answer: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._channel is None or self.state != "serving":
            future.set_exception(UnansweredError())
        else:
            self._asked += 1
            self._questions[self._asked] = (future, answer)
            self._channel.send(Asked(self._asked, question))
        return future

    # -- its processes

    async def keep(self) -> None:
        """Have a process run as this worker, again and again, until it is told to end."""
        loop = asyncio.get_running_loop()
        young = 0
        while not self._ending.is_set():
            began = loop.time()
            self._last_end = await self._run()
            if self._ending.is_set():
                break
            young = young + 1 if loop.time() - began < YOUNG else 1
            wait = RESTART_AFTER[min(young, len(RESTART_AFTER)) - 1]
            self.restarts += 1
            self._enter("waiting")
            log.error("worker.ended", worker=self.number, end=self._last_end, restart_in=wait)
            try:
                async with asyncio.timeout(wait):
                    await self._ending.wait()
            except TimeoutError:
                pass
        self._enter("ended")

    def end(self, drain: Drain) -> None:
        """End in an orderly way; what does not serve yet ends at once."""
        self._ending.set()
        if self.state == "serving":
            _ignore(self._send(drain, None))
        else:
            self.kill()

    def kill(self) -> None:
        """End at once."""
        self._ending.set()
        if self._process is not None:
            self._process.kill()

    def _enter(self, state: str) -> None:
        self.state = state
        self._since = time.time()

    async def _run(self) -> str:
        """Run one process to its end; how it ended."""
        try:
            process, sock = _start(self.number, self._crew.reserved.inherited)
        except OSError as error:
            return f"no start at all ({(error.strerror or str(error)).lower()})"
        self._process = process
        self._quiet = 0
        self._enter("starting")
        channel = self._channel = await Channel.open(sock)
        channel.send(self._crew.begin())
        try:
            while (data := await channel.receive()) is not None:
                self._quiet = 0
                self._hear(_decode(data))
        except Exception as error:  # noqa: BLE001  # whatever it is, there has to be a worker again
            log.error("worker.garbled", worker=self.number, error=type(error).__name__)
            process.kill()
        await channel.close()
        end = await asyncio.to_thread(_await_end, process)
        self._bury()
        return end

    def _bury(self) -> None:
        """What it counted stays; what it was asked is not answered."""
        self._process = self._channel = None
        if self.last is not None:
            told = [each for each in (self._former, past(self.last)) if each is not None]
            self._former, self.last = total(told, self._since), None
        self.known = self.fenced = b""
        for future, _ in self._questions.values():
            if not future.done():
                future.set_exception(UnansweredError())
                _ignore(future)
        self._questions.clear()

    # -- what it says

    def _hear(self, message: Accepting | Failed | Answered) -> None:
        match message:
            case Accepting():
                self._enter("serving")
                pid = None if self._process is None else self._process.pid
                log.info("worker.serves", worker=self.number, pid=pid)
                self._crew.serving()
            case Failed():
                log.error("worker.failed", worker=self.number, message=message.message)
                self._crew.failed(message.message)
            case Answered():
                self._take_answer(message)

    def _take_answer(self, message: Answered) -> None:
        """A report is taken even if nobody waits for it any more."""
        future, kind = self._questions.pop(message.number)
        if message.error:
            if not future.done():
                future.set_exception(UnansweredError(message.error))
                _ignore(future)
            return
        answer = msgspec.msgpack.decode(message.answer, type=kind)
        if isinstance(answer, Reported):
            self.last = answer.snapshot
            if answer.known is not None and answer.fenced is not None:
                self.known, self.fenced = answer.known, answer.fenced
            self._crew.decided(answer.decided)
        if not future.done():
            future.set_result(answer)


def _start(number: int, inherited: socket.socket | None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process for a worker, and our end of its channel. It inherits the other end and nothing of other workers."""
    ours, theirs = socket.socketpair()
    descriptors = [theirs.fileno(), *([] if inherited is None else [inherited.fileno()])]
    listener = -1 if inherited is None else inherited.fileno()
    command = [sys.executable, "-c", _PROGRAM, str(number), str(theirs.fileno()), str(listener), *sys.path]
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it knows what they mean
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)  # noqa: S603
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        theirs.close()
    return process, ours


def _await_end(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a process whose channel has ended; how it ended."""
    try:
        status = process.wait(END_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _ignore(future: asyncio.Future[Any]) -> None:
    """Nobody waits for it, so nobody is to be told of its error."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
