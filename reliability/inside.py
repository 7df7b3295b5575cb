"""The whole proxy in this process without a socket: bytes in on either side, bytes out, and a clock that leaps.

When nobody has anything to do the clock jumps to the next timer, so that "it never hangs" is a matter of milliseconds.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from epochgate.relay.client import ClientConnection
from epochgate.relay.exchange import work_on
from epochgate.relay.logs import set_up_logs
from epochgate.relay.request import Request
from epochgate.relay.server import build_context, build_ledger
from epochgate.relay.upstream import UpstreamConnection
from epochgate.settings import Settings

PATIENCE = 3600.0  # s of the leaping clock that anything may take

MOST_TURNS = 100_000  # of the loop in which no time passes

_QUIET = socket.socketpair()  # the proxy asks the kernel about its sockets: on these nothing ever happens


class _Leap(selectors.SelectSelector):
    """Waits for nothing: the time that the loop wanted to wait has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._busy = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everybody waits for ever")
        self._busy = self._busy + 1 if timeout <= 0 else 0
        if self._busy > MOST_TURNS:
            raise AssertionError("somebody works for ever")
        self.now += max(timeout, 0.0)
        return []


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once. `faults`: what its exception handler was told."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)
        self.faults: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, fault: self.faults.append(fault))

    def time(self) -> float:
        return self._leap.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """At once: no time passes in which a thread could work."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # it is that of whoever waits
            done.set_exception(error)
        return done

    def run(self, work: Any) -> Any:
        """Run one coroutine to its end; what is left over or went wrong on the way is an error."""
        self._leap.now = 0.0  # far from there a timer could be due by less than a float can tell
        task = self.create_task(work)
        try:
            result = self.run_until_complete(task)
            left = [other for other in asyncio.all_tasks(self) if other is not task]
            assert not left, left
            assert not self.faults, self.faults
        finally:
            self.faults.clear()
            for other in asyncio.all_tasks(self):
                other.cancel()
            self._scheduled.clear()
            self.run_until_complete(asyncio.sleep(0))
            self.faults.clear()
        return result


class Pipe(asyncio.Transport):
    """One connection of the proxy, seen from the other end."""

    def __init__(self, protocol: asyncio.Protocol, heard: Callable[[Pipe], None] = lambda _: None) -> None:
        super().__init__({"socket": _QUIET[0]})
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._heard = heard  # called when something was written
        self._waiting: list[bytes] = []
        self._reading = True
        self.written = bytearray()
        self.reset = False  # aborted by the proxy
        self.finished = False  # the proxy sends no more
        self.closed = False
        protocol.connection_made(self)

    # -- the other end

    def send(self, *pieces: bytes) -> None:
        """Bytes for the proxy, which may not want to read them yet."""
        self._waiting += pieces
        self._loop.call_soon(self._deliver)

    def finish(self) -> None:
        """FIN."""
        self._loop.call_soon(self._finish)

    def break_off(self) -> None:
        """RST."""
        self._lose(ConnectionResetError("reset"))

    def _deliver(self) -> None:
        if self._waiting and self._reading and not self.closed:
            self._protocol.data_received(self._waiting.pop(0))
            self._loop.call_soon(self._deliver)

    def _finish(self) -> None:
        if self._waiting and not self.closed:
            self._loop.call_soon(self._finish) if self._reading else self._loop.call_later(0.1, self._finish)
        elif not self.closed and not self._protocol.eof_received():
            self.close()

    # -- the proxy's end

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += data
            self._loop.call_soon(self._heard, self)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self.finished = True
        self._loop.call_soon(self._finish)  # who has read everything closes as well

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self._lose(None)

    def abort(self) -> None:
        self.reset = True
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = self.finished = True
            self._loop.call_soon(self._protocol.connection_lost, error)
            self._loop.call_soon(self._heard, self)

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._loop.call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        return 0


class Inside:
    """One proxy. `serve` hears of each upstream connection when the proxy has written to it, or has closed it."""

    def __init__(self, settings: Settings, serve: Callable[[Pipe], None]) -> None:
        self.context = build_context(settings, build_ledger(settings))
        self.context.upstream.connect = self._connect  # type: ignore[method-assign]
        self.upstreams: list[Pipe] = []
        self.handled: list[Request] = []
        self._serve = serve

    def client(self) -> Pipe:
        """A new connection to the proxy."""
        return Pipe(ClientConnection(self._handle, self.context.clients))

    async def settle(self) -> None:
        """Until nobody has anything to do at this moment."""
        loop = asyncio.get_running_loop()
        while loop._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Everybody leaves; nothing may be left over."""
        self.context.holds.close_all()
        for connection in list(self.context.clients):
            connection.abort()
        self.context.upstream.close()
        await self.settle()
        assert not len(self.context.clients)
        assert not self.context.upstream.connections
        assert not self.context.streams

    async def _connect(self) -> UpstreamConnection:
        connection = UpstreamConnection(self.context.upstream)
        self.upstreams.append(Pipe(connection, self._serve))
        return connection

    def _handle(self, request: Request) -> Coroutine[None, None, None] | None:
        self.handled.append(request)
        return work_on(self.context, request)


def settings(**changes: Any) -> Settings:
    """The defaults but for these sections; nothing is logged but faults."""
    made = Settings.model_validate({"upstream": {"url": "http://127.0.0.1:9"}, "log": {"level": "error"}, **changes})
    set_up_logs(made.log)
    return made


def cut(data: bytes, how: int) -> list[bytes]:
    """The bytes whole, one by one, or in two or three pieces, as `how` (0 to 255) chooses."""
    if how == 0 or not data:
        return [data]
    if how == 1:
        return [data[at : at + 1] for at in range(len(data))]
    first, second = sorted((how * len(data) // 256, how * 7 % 256 * len(data) // 256))
    return [piece for piece in (data[:first], data[first:second], data[second:]) if piece]
