"""The admin listener, on aiohttp: health, metrics, the status page and its API."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import yaml
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.exposition import choose_encoder

from epochgate.admin.access import check_change, check_look, read_token
from epochgate.admin.metrics import Metrics, Sources
from epochgate.admin.page import build_page
from epochgate.admin.subject import PolicyGoneError, Subject
from epochgate.admin.views import STATES, View, status_view, verdict_views
from epochgate.guard.verdict import Kind, Reason
from epochgate.relay.listener import cannot_listen, make_way
from epochgate.relay.logs import without_contents
from epochgate.relay.reload import Reload
from epochgate.relay.telemetry import LAST_VERDICTS, log
from epochgate.values import Address

MOST_SESSIONS = 1000  # in one answer
FOR_ALL = frozenset({"/livez", "/readyz", "/metrics"})  # for probes and Prometheus, under any name
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_encode = msgspec.json.Encoder(enc_hook=str).encode


class AdminServer:
    """Serves the admin side of `subject`. `begin_drain` ends the proxy as SIGTERM does."""

    def __init__(self, subject: Subject, reload: Reload, begin_drain: Callable[[], None]) -> None:
        self._subject = subject
        self._reload = reload
        self._begin_drain = begin_drain
        self._measured = Metrics(subject.workers)
        application = web.Application(middlewares=[_guard_answers, self._guard_looks], client_max_size=64 * 1024)
        add = application.router
        add.add_get("/", self._root)
        add.add_get("/livez", self._livez)
        add.add_get("/readyz", self._readyz)
        add.add_get("/metrics", self._metrics)
        add.add_get("/status", self._page)
        add.add_get("/config", self._config)
        add.add_get("/api/status", self._status)
        add.add_get("/api/verdicts", self._verdicts)
        add.add_get("/api/sessions", self._sessions)
        add.add_get("/api/sessions/{fingerprint}", self._session)
        add.add_post("/api/sessions/{fingerprint}/fence", self._fence)
        add.add_post("/-/reload", self._post_reload)
        add.add_post("/-/drain", self._post_drain)
        faults = logging.getLogger("epochgate.admin")
        faults.addFilter(only_own_faults)
        self._runner = _Runner(application, access_log=None, logger=faults, shutdown_timeout=1.0)

    async def start(self, address: Address) -> None:
        """Listen at `address`. Raises ConfigurationError where that cannot be, or without a usable token."""
        if (token_file := self._reload.settings.admin.token_file) is not None:
            read_token(token_file)
        await self._runner.setup()
        site: web.BaseSite
        try:
            if address.path is not None:
                make_way(address.path)
                site = web.UnixSite(self._runner, address.path)
            else:
                site = web.TCPSite(self._runner, address.host, address.port)
            await site.start()
        except OSError as error:
            raise cannot_listen("admin.listen", address, error) from None

    async def close(self) -> None:
        """End."""
        await self._runner.cleanup()

    @web.middleware
    async def _guard_looks(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What tells of the traffic or the configuration is not for pages of others."""
        if request.path not in FOR_ALL and request.method in ("GET", "HEAD"):
            check_look(request, self._reload.settings.admin.token_file)
        return await handler(request)

    # -- health

    async def _root(self, request: web.Request) -> web.Response:  # noqa: ARG002
        raise web.HTTPFound("/status")

    async def _livez(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        found = await self._subject.readiness()
        status = 503 if found.obstacles else 200
        if "application/json" in request.headers.get("Accept", ""):
            notes = {"notes": found.notes} if found.notes else {}
            return _json({"ready": not found.obstacles, "obstacles": found.obstacles, **notes}, status)
        told = [f"{told.code}: {told.message}" for told in (*found.obstacles, *found.notes)]
        lines = told if found.obstacles else ["ok", *told]
        return web.Response(text="\n".join(lines) + "\n", status=status)

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        snapshot, readiness = await self._subject.snapshot(), await self._subject.readiness()
        sources = Sources(snapshot, not readiness.obstacles, self._reload, tuple(self._subject.workers()))
        return web.Response(body=encode(self._measured.registry(sources)), headers={"Content-Type": content_type})

    # -- what is seen

    async def _page(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return build_page()

    async def _config(self, request: web.Request) -> web.Response:  # noqa: ARG002
        text = yaml.safe_dump(self._reload.settings.model_dump(mode="json"), sort_keys=False)
        return web.Response(text=text, content_type="application/yaml")

    async def _status(self, request: web.Request) -> web.Response:  # noqa: ARG002
        snapshot, readiness = await self._subject.snapshot(), await self._subject.readiness()
        workers = self._subject.workers()
        notes = {"notes": readiness.notes, "workers": workers} if workers else {}
        return _json(status_view(snapshot, readiness, self._reload) | notes)

    async def _verdicts(self, request: web.Request) -> web.Response:
        known = {"verdict": tuple(Kind), "reason": tuple(Reason), "enforced": ("true", "false")}
        wanted, limit = _read_query(request, known, ("policy", "session"), LAST_VERDICTS)
        decided = await self._subject.decided()
        return _json({"kept": LAST_VERDICTS, "verdicts": verdict_views(decided, wanted, limit)})

    async def _sessions(self, request: web.Request) -> web.Response:
        wanted, limit = _read_query(request, {"state": STATES}, ("policy",), MOST_SESSIONS)
        total, sessions = await self._subject.sessions(wanted, limit)
        return _json({"total": total, "sessions": sessions})

    async def _session(self, request: web.Request) -> web.Response:
        return _named(await self._subject.session(request.match_info["fingerprint"]))

    # -- what is changed

    async def _fence(self, request: web.Request) -> web.Response:
        self._check_change(request)
        try:
            return _named(await self._subject.fence(request.match_info["fingerprint"]))
        except PolicyGoneError as error:
            raise web.HTTPConflict(text=str(error)) from None

    async def _post_reload(self, request: web.Request) -> web.Response:
        self._check_change(request)
        reloaded = await self._subject.reload()
        return _json({"ok": not reloaded.error, **msgspec.to_builtins(reloaded)}, 422 if reloaded.error else 200)

    async def _post_drain(self, request: web.Request) -> web.Response:
        self._check_change(request)
        self._begin_drain()
        return _json({"draining": True, **self._reload.settings.drain.model_dump()}, 202)

    def _check_change(self, request: web.Request) -> None:
        try:
            check_change(request, self._reload.settings.admin.token_file)
        except web.HTTPException as refused:
            resource = request.match_info.route.resource  # not the path itself: somebody may have put an id there
            log.warning("admin.refused", path=resource.canonical if resource else "", why=refused.text)
            raise


class _Connection(web.RequestHandler):
    """One that tells whoever sends no HTTP so, in words that quote nothing of it: it may be a token (L7)."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See `RequestHandler`."""
        return super().handle_error(request, status, exc, message and "The request cannot be read\n")


class _Server(web.Server):
    """Makes such connections."""

    def __call__(self) -> web.RequestHandler:
        """For a new connection."""
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """Runs such a server."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await made.request_handler(request)
            except web.HTTPExpectationFailed:
                raise web.HTTPExpectationFailed(text="Only Expect: 100-continue is served here\n") from None

        return _Server(handle, request_factory=made.request_factory, **self._kwargs)


def only_own_faults(record: logging.LogRecord) -> bool:
    """Not the peer's faults; of the own ones what may be told (L7)."""
    error = record.exc_info[1] if record.exc_info else None
    return error is not None and not isinstance(error, HttpProcessingError) and without_contents(record)


@web.middleware
async def _guard_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in one form; nothing is stored, guessed or framed."""
    try:
        response = await handler(request)
    except web.HTTPRedirection:
        raise
    except web.HTTPException as error:
        kept = {name: error.headers[name] for name in ("Allow", "WWW-Authenticate") if name in error.headers}
        response = _json({"error": error.text}, error.status)
        response.headers.update(kept)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Referrer-Policy", "no-referrer")
    return response


def _named(session: View | None) -> web.Response:
    if session is None:
        raise web.HTTPNotFound(text="no session at hand has this fingerprint; /api/sessions lists them")
    return _json(session)


def _json(data: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encode(data), status=status, content_type="application/json")


def _read_query(
    request: web.Request, known: dict[str, tuple[str, ...]], free: tuple[str, ...], most: int
) -> tuple[dict[str, str], int]:
    """The filters and the `limit` of a query. Raises HTTPBadRequest that says what can be asked."""
    wanted = dict(request.query)
    limit = wanted.pop("limit", str(min(most, 100)))
    if not re.fullmatch(r"[0-9]{1,9}", limit) or not 1 <= int(limit) <= most:
        raise web.HTTPBadRequest(text=f"limit: write a number from 1 to {most}")
    for name, value in wanted.items():
        if name not in known and name not in free:
            names = ", ".join((*known, *free, "limit"))
            raise web.HTTPBadRequest(text=f"{name}: there is no such filter; there are {names}")
        if name in known and value not in known[name]:
            raise web.HTTPBadRequest(text=f"{name}: write one of {', '.join(known[name])}")
    return wanted, int(limit)
