"""The composition root: settings become collaborators, listeners and signals; and the end of it all (drain)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from epochgate import __version__
from epochgate.admin.server import AdminServer
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
from epochgate.relay.logs import set_up_logs
from epochgate.relay.reload import Reload
from epochgate.relay.telemetry import Telemetry, log
from epochgate.relay.tls import client_context, server_context
from epochgate.relay.upstream import Upstream
from epochgate.settings import Settings, pending_keys
from epochgate.values import Address

if TYPE_CHECKING:
    from epochgate.relay.tracing import Tracing

BACKLOG = 4096
GC_THRESHOLDS = (20_000, 20, 50)  # the records of many sessions live long; looking at them often would cost most


def serve(settings: Settings, load: Callable[[], Settings], config: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    `load` reads the same sources again for a reload; `config` is the file among them, which is watched.
    Raises ConfigurationError where it cannot listen, or a file that the configuration names cannot be used.
    """
    set_up_logs(settings.log)
    raise_open_files()
    leave_no_core()
    proxy = Proxy(settings, load, config)
    gc.collect()
    gc.freeze()  # what is here now stays: the collector need not look at it again
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        import uvloop  # noqa: PLC0415  # not on every platform
    except ImportError:
        return asyncio.run(proxy.run())
    return uvloop.run(proxy.run())


def leave_no_core() -> None:
    """What the memory holds (ids, credentials, events) is not to end up in a file when the process dies."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


class Proxy:
    """One process that serves."""

    def __init__(self, settings: Settings, load: Callable[[], Settings], config: Path | None) -> None:
        self._settings = settings
        self._load = load
        self._config = config
        self._stop: asyncio.Event
        self._context: Context
        self._grace = True
        self._signals = 0

    async def run(self) -> int:
        """Listen, serve, drain; the exit status."""
        settings = self._settings
        listener_tls = server_context(settings.tls)
        tracing = build_tracing(settings)
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ledger = build_ledger(settings)
        await ledger.start()
        context = self._context = build_context(settings, ledger)
        context.telemetry.tracing = tracing
        connect_ledger(ledger, context)
        reload = Reload(context, settings, self._load, config=self._config, listener_tls=listener_tls)
        admin = AdminServer(context, reload, self._begin_drain)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._take_signal, signum)
        loop.add_signal_handler(signal.SIGHUP, reload.apply, "signal")
        watch = loop.create_task(reload.watch())
        try:
            server = await listen(settings.listen, self._connect, "listen", listener_tls, settings.limits.head_time)
            try:
                await admin.start(settings.admin.listen)
            except OSError as error:
                raise _cannot_listen("admin.listen", settings.admin.listen, error) from None
            self._announce()
            await self._stop.wait()
            grace, window = reload.settings.drain.grace, reload.settings.drain.window
            await drain(context, server, grace=grace if self._grace else 0.0, window=window)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await admin.close()
            context.upstream.close()
            if tracing is not None:
                await tracing.close()
            await ledger.close()
            if settings.listen.path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(settings.listen.path)  # noqa: PTH108
        return 0

    def _connect(self) -> ClientConnection:
        return ClientConnection(partial(work_on, self._context), self._context.clients)

    def _announce(self) -> None:
        settings = self._settings
        modes = ", ".join(f"{policy.name}: {policy.mode}" for policy in settings.policies) or "nothing is guarded"
        print(  # noqa: T201
            f"epochgate {__version__} accepts connections on {settings.listen} for {settings.upstream.url} ({modes})",
            flush=True,
        )
        for line in pending_keys(settings):
            log.warning("key.pending", message=line)

    def _begin_drain(self) -> None:
        self._context.draining = True
        self._stop.set()

    def _take_signal(self, signum: int) -> None:
        self._signals += 1
        if self._signals > 1:
            sys.stderr.flush()
            os._exit(1)  # told twice: at once
        self._grace = signum != signal.SIGINT  # who pressed Ctrl-C waits for no balancer
        self._begin_drain()


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

    lifetime = max(limits.session_idle, limits.fence)
    return SharedLedger(records, ValkeyStore(store.text, prefix=settings.store.prefix, lifetime=lifetime))


def connect_ledger(ledger: Ledger, context: Context) -> None:
    """What the ledger hears from its store concerns the relay as well."""
    if not isinstance(ledger, KeptLedger):
        return

    def use_key(key: bytes) -> None:
        context.fingerprints = context.telemetry.fingerprints = Fingerprints(key)

    ledger.on_key = use_key
    ledger.on_fenced = context.holds.close_held
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
    if not settings.tracing.enabled:
        return None
    try:
        from epochgate.relay.tracing import Tracing  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ConfigurationError(
            f"tracing.enabled: needs {error.name}, which is not installed; "
            'install it with pip install "epochgate[otel]", or set this to false'
        ) from None
    return Tracing()


async def listen(
    address: Address,
    protocol: Callable[[], asyncio.Protocol],
    key: str,
    tls: ssl.SSLContext | None,
    handshake_time: float,
) -> asyncio.Server:
    """Listen at `address`; `handshake_time`: for TLS, in s. Raises ConfigurationError that names the key."""
    loop = asyncio.get_running_loop()
    within = None if tls is None else handshake_time
    try:
        if address.path is not None:
            _remove_stale_socket(address.path)
            return await loop.create_unix_server(
                protocol, address.path, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=within
            )
        return await loop.create_server(
            protocol, address.host or None, address.port, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=within
        )
    except OSError as error:
        raise _cannot_listen(key, address, error) from None


def _cannot_listen(key: str, address: Address, error: OSError) -> ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        remedy = "it is in use; choose another, or end the process that has it"
    elif error.errno == errno.EACCES:
        remedy = "it is not allowed; choose a port above 1023, or a directory that can be written"
    else:
        remedy = (error.strerror or str(error)).lower()
    return ConfigurationError(f"{key}: cannot listen on {address}: {remedy}")


def _remove_stale_socket(path: str) -> None:
    """A socket file that nobody listens on is left over from a process that was killed."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # noqa: PTH108
        except OSError:
            pass
