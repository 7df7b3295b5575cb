"""The composition root: settings become collaborators, listeners and signals; and the end of it all (drain)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epochgate import __version__
from epochgate.errors import ConfigurationError
from epochgate.guard.fingerprint import Fingerprints
from epochgate.guard.record import Limits
from epochgate.ledger.base import Ledger
from epochgate.ledger.kept import KeptLedger
from epochgate.ledger.memory import MemoryLedger, Records
from epochgate.ledger.sqlite import SqliteStore
from epochgate.relay.client import ClientConnection
from epochgate.relay.clients import Clients, raise_open_files
from epochgate.relay.context import Context, Policies
from epochgate.relay.copies import Copies
from epochgate.relay.drain import drain
from epochgate.relay.elsewhere import Elsewhere
from epochgate.relay.exchange import work_on
from epochgate.relay.hold import Holds
from epochgate.relay.listener import listen, listen_together
from epochgate.relay.logs import end_logs, set_up_logs
from epochgate.relay.telemetry import Telemetry, log
from epochgate.relay.tls import check_store, client_context, load_pair, server_context
from epochgate.relay.upstream import Upstream
from epochgate.settings import Settings, pending_keys
from epochgate.values import Address

if TYPE_CHECKING:
    from epochgate.relay.tracing import Tracing

GC_THRESHOLDS = (20_000, 20, 50)  # the records of many sessions live long; looking at them often would cost most


def serve(settings: Settings, load: Callable[[], Settings], config: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    `load` reads the same sources again for a reload; `config` is the file among them, which is watched.
    Raises ConfigurationError where it cannot listen, or a file that the configuration names cannot be used.
    """
    set_up_logs(settings.log)
    raise_open_files()
    leave_no_core()
    return run_loop(Proxy(settings, load, config).run())


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run what serves, on the faster loop where there is one; its exit status."""
    gc.collect()
    gc.freeze()  # what is here now stays: the collector need not look at it again
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        import uvloop  # noqa: PLC0415  # not on every platform
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class Gate:
    """What stands between clients and the upstream in one process: a listener and what its requests need."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tls: ssl.SSLContext | None
        self._tracing: Tracing | None
        self._server: asyncio.Server
        self._path: str | None = None  # of the Unix socket that is this gate's own
        self.context: Context

    async def start(self) -> None:
        """Build all but the listener. Raises ConfigurationError."""
        settings = self._settings
        self._tls = server_context(settings.tls)
        self._tracing = build_tracing(settings)
        ledger = build_ledger(settings)
        await ledger.start()
        self.context = build_context(settings, ledger)
        self.context.telemetry.tracing = self._tracing
        connect_ledger(ledger, self.context)

    async def listen(self) -> None:
        """Accept connections. Raises ConfigurationError."""
        settings = self._settings
        self._server = await listen(settings.listen, self._connect, "listen", self._tls, settings.limits.head_time)
        self._path = settings.listen.path

    async def listen_together(self, address: Address, inherited: socket.socket | None) -> None:
        """Accept connections at an address that other processes listen on, too. Raises ConfigurationError."""
        head_time = self._settings.limits.head_time
        self._server = await listen_together(address, inherited, self._connect, "listen", self._tls, head_time)

    def use(self, settings: Settings) -> None:
        """Put policies in force, and for new connections the files of `tls` and `upstream.tls` as they are now.

        Raises ConfigurationError where one of the files cannot be used; then all stays as it was.
        """
        tls, upstream = self._settings.tls, self._settings.upstream
        renewed = server_context(tls)  # apart, so that a bad pair spoils nothing
        if upstream.url.scheme == "https":
            self.context.upstream.tls = client_context(upstream.tls)
        if renewed is not None and self._tls is not None:
            load_pair(self._tls, "tls", tls.cert or "", tls.key or "")
        self.context.policies = Policies(settings.compiled())

    def stop_listening(self) -> None:
        """Accept no more connections; those that are there go on."""
        self._server.close()

    async def drain(self, *, grace: float, window: float) -> None:
        """End in an orderly way; both in s."""
        await drain(self.context, self._server, grace=grace, window=window)

    async def close(self) -> None:
        """End at once what is left, records excepted: they are kept."""
        self.context.upstream.close()
        self.context.backlog.settle()
        if self._tracing is not None:
            await self._tracing.close()
        await self.context.ledger.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108

    def _connect(self) -> ClientConnection:
        return ClientConnection(partial(work_on, self.context), self.context.clients)


def leave_no_core() -> None:
    """What the memory holds (ids, credentials, events) is not to end up in a file when the process dies."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


class Proxy:
    """One process that serves, and tells of itself on the admin listener."""

    def __init__(self, settings: Settings, load: Callable[[], Settings], config: Path | None) -> None:
        self._settings = settings
        self._load = load
        self._config = config
        self._gate = Gate(settings)

    async def run(self) -> int:
        """Listen, serve, drain; the exit status."""
        from epochgate.admin.server import AdminServer  # noqa: PLC0415  # a worker has none of these
        from epochgate.admin.subject import OneProcess  # noqa: PLC0415
        from epochgate.relay.reload import Reload  # noqa: PLC0415

        settings, gate = self._settings, self._gate
        await gate.start()
        reload = Reload(settings, self._load, gate.use, config=self._config)
        stop = Stop(began=self._be_draining)
        admin = AdminServer(OneProcess(gate.context, reload), reload, stop.begin)
        stop.heed_signals()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload.apply, "signal")
        watch = asyncio.create_task(reload.watch())
        try:
            await gate.listen()
            await admin.start(settings.admin.listen)
            announce(settings, settings.listen)
            await stop.told.wait()
            grace, window = reload.settings.drain.grace, reload.settings.drain.window
            await gate.drain(grace=grace if stop.grace else 0.0, window=window)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await admin.close()
            await gate.close()
        return 0

    def _be_draining(self) -> None:
        self._gate.context.draining = True


class Stop:
    """How a process is told to end, and to hurry. `began` and `hurried` hear of it."""

    def __init__(self, began: Callable[[], None], hurried: Callable[[], None] = lambda: None) -> None:
        self.told = asyncio.Event()
        self.grace = True  # whether whoever sends clients here gets time to learn of it
        self._began = began
        self._hurried = hurried
        self._signals = 0

    def begin(self) -> None:
        """Begin to end."""
        self._began()
        self.told.set()

    def heed_signals(self) -> None:
        """SIGTERM and SIGINT begin it; the second of them ends the process at once, with status 1."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._take_signal, signum)

    def _take_signal(self, signum: int) -> None:
        self._signals += 1
        if self._signals > 1:
            self._hurried()
            end_logs()
            os._exit(1)
        self.grace = signum != signal.SIGINT  # who pressed Ctrl-C waits for no balancer
        self.begin()


def announce(settings: Settings, address: Address) -> None:
    """Tell that connections are accepted; once, on stdout."""
    modes = ", ".join(f"{policy.name}: {policy.mode}" for policy in settings.policies) or "nothing is guarded"
    print(  # noqa: T201
        f"epochgate {__version__} accepts connections on {address} for {settings.upstream.url} ({modes})", flush=True
    )
    for line in pending_keys(settings):
        log.warning("key.pending", message=line)


def build_ledger(settings: Settings) -> Ledger:
    """The ledger that `store.url` names."""
    limits = settings.limits
    records = Records(
        sessions=limits.sessions,
        limits=Limits(streams=limits.streams_per_session, events=limits.events_per_stream),
        session_idle=limits.session_idle,
        fence=limits.fence,
    )
    store = settings.store.url
    if store.scheme == "memory":
        return MemoryLedger(records)
    if store.scheme == "sqlite":
        return KeptLedger(records, SqliteStore(store.path, sessions=limits.sessions))
    from epochgate.ledger.shared import SharedLedger  # noqa: PLC0415  # its client library takes time to load
    from epochgate.ledger.valkey import ValkeyStore  # noqa: PLC0415

    check_store(settings.store.tls)
    lifetime = max(limits.session_idle, limits.fence)
    return SharedLedger(
        records,
        ValkeyStore(store.text, prefix=settings.store.prefix, lifetime=lifetime, tls=settings.store.tls.model_dump()),
    )


def connect_ledger(ledger: Ledger, context: Context) -> None:
    """What the ledger hears from its store concerns the relay as well."""
    if not isinstance(ledger, KeptLedger):
        return

    def use_key(key: bytes) -> None:
        context.fingerprints = context.telemetry.fingerprints = Fingerprints(key)

    ledger.on_key = use_key
    ledger.on_fenced = context.holds.close_held
    ledger.on_outage = context.upstream.heard_of_outage
    context.upstream.tell_outage = ledger.tell_outage
    context.upstream.outage_at = ledger.outage_at  # of before this process
    if ledger.lending is not None:
        context.elsewhere = Elsewhere(context, ledger.lending)


def build_context(settings: Settings, ledger: Ledger) -> Context:
    """What the exchanges share."""
    fingerprints = Fingerprints(ledger.key)
    url = settings.upstream.url
    upstream = Upstream(
        url.host,
        url.port,
        connect_timeout=settings.upstream.connect_timeout,
        idle_timeout=settings.upstream.idle_timeout,
        path=url.path,
        tls=None if url.scheme == "http" else client_context(settings.upstream.tls),
    )
    clients = Clients(settings.limits, upstream.connections)
    upstream.make_room = clients.make_room
    return Context(
        policies=Policies(settings.compiled()),
        upstream=upstream,
        clients=clients,
        copies=Copies(settings.limits.copies),
        ledger=ledger,
        fingerprints=fingerprints,
        telemetry=Telemetry(fingerprints),
        holds=Holds(settings.limits.held_streams),
        keep_host=settings.upstream.host == "client",
        authority=url.authority.encode(),
        prefix=url.prefix.encode(),
    )


def build_tracing(settings: Settings) -> Tracing | None:
    """What makes spans, where that is asked for. Raises ConfigurationError without the extra."""
    found = find_tracing(settings)
    return None if found is None else found()


def find_tracing(settings: Settings) -> type[Tracing] | None:
    """See `build_tracing`."""
    if not settings.tracing.enabled:
        return None
    try:
        from epochgate.relay.tracing import Tracing  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ConfigurationError(
            f"tracing.enabled: needs {error.name}, which is not installed; "
            'install it with pip install "epochgate[otel]", or set this to false'
        ) from None
    return Tracing
