"""The one process that supervises the workers: starts and replaces them, has them reload and drain, tells of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from epochgate import __version__
from epochgate.admin.server import AdminServer
from epochgate.errors import ConfigurationError
from epochgate.relay.clients import raise_open_files
from epochgate.relay.listener import Reserved, reserve
from epochgate.relay.logs import set_up_logs
from epochgate.relay.reload import Reload
from epochgate.relay.server import Stop, announce, find_tracing, leave_no_core
from epochgate.relay.telemetry import Decided, log
from epochgate.relay.tls import check_store, client_context, server_context
from epochgate.settings import Settings
from epochgate.workers.channel import Begin, Drain, pack
from epochgate.workers.process import Crew, WorkerProcess
from epochgate.workers.together import Together

LOOK_EVERY = 1.0  # s between two reports of the workers: so much of what one had counted is lost when it is killed
END_WITHIN = 15.0  # s beyond the time to drain that workers get for the rest, such as writing the records


def supervise(settings: Settings, load: Callable[[], Settings], config: Path | None = None) -> int:
    """Serve with `settings.workers` processes until SIGTERM or SIGINT; the exit status. See `relay.server.serve`."""
    set_up_logs(settings.log)
    raise_open_files()  # as the next, for the workers, too
    leave_no_core()
    check(settings)
    reserved = reserve(settings.listen, "listen")
    try:
        return asyncio.run(Supervisor(settings, load, config, reserved).run())
    finally:
        reserved.close()


def check(settings: Settings) -> None:
    """Find what would keep a worker from serving. Raises ConfigurationError."""
    server_context(settings.tls)
    if settings.upstream.url.scheme == "https":
        client_context(settings.upstream.tls)
    check_store(settings.store.tls)
    find_tracing(settings)


class Supervisor:
    """See the module."""

    def __init__(
        self, settings: Settings, load: Callable[[], Settings], config: Path | None, reserved: Reserved
    ) -> None:
        self._settings = settings
        self._reserved = reserved
        self._in_force = settings
        self._reload = Reload(settings, load, self._use, config=config)
        self._stop = Stop(began=self._be_draining, hurried=self._kill)
        self._failed = ""  # why no worker can serve
        self._ready = asyncio.Event()
        crew = Crew(
            reserved,
            self._begin,
            decided=self._hear,
            failed=self._fail,
            serving=self._look_whether_all_serve,
        )
        self._workers = [WorkerProcess(number + 1, crew) for number in range(settings.workers)]
        self._together = Together(self._workers, self._reload)

    async def run(self) -> int:
        """Start the workers, keep them, drain them; the exit status."""
        admin = AdminServer(self._together, self._reload, self._stop.begin)
        self._stop.heed_signals()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload.apply, "signal")
        beside = [asyncio.create_task(self._reload.watch()), asyncio.create_task(self._look())]
        keeping: list[asyncio.Task[None]] = []
        try:
            await admin.start(self._settings.admin.listen)
            keeping = [asyncio.create_task(worker.keep()) for worker in self._workers]
            await self._serve()
            return await self._drain(keeping)
        finally:
            self._kill()
            await asyncio.gather(*keeping, return_exceptions=True)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await admin.close()

    async def _serve(self) -> None:
        """Until the end is asked for. Raises ConfigurationError where it turns out that no worker can serve."""
        told = asyncio.create_task(self._stop.told.wait())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((told, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._failed:
            told.cancel()
            raise ConfigurationError(self._failed)
        if self._ready.is_set():
            announce(self._settings, self._reserved.address)
        await told

    async def _drain(self, keeping: list[asyncio.Task[None]]) -> int:
        """Have the workers end, all at the same time; 1 where one had to be killed."""
        drain = self._reload.settings.drain
        grace = drain.grace if self._stop.grace else 0.0
        for worker in self._workers:
            worker.end(Drain(grace, drain.window))
        _, late = await asyncio.wait(keeping, timeout=grace + drain.window + END_WITHIN)
        if late:
            log.error("worker.late", workers=[worker.number for worker in self._workers if worker.state != "ended"])
        return 1 if late else 0

    def _begin(self) -> Begin:
        return Begin(__version__, pack(self._in_force), self._reserved.address.port)

    def _use(self, settings: Settings) -> None:
        check(self._settings)  # the files are those that it started with, and may have changed
        self._in_force = self._settings.model_copy(update={"policies": settings.policies, "drain": settings.drain})
        self._together.use(pack(self._in_force))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for worker in self._workers:
                worker.look()

    def _hear(self, decided: list[Decided]) -> None:
        self._together.hear(decided)

    def _look_whether_all_serve(self) -> None:
        if all(worker.state == "serving" for worker in self._workers):
            self._together.complete = True
            self._ready.set()

    def _fail(self, message: str) -> None:
        if not self._together.complete:
            self._failed = message
            self._ready.set()

    def _be_draining(self) -> None:
        self._together.draining = True

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
