"""The admin listener, on aiohttp."""

from __future__ import annotations

import dataclasses

from aiohttp import web

from epochgate.admin.metrics import build_registry, render
from epochgate.relay.context import Context
from epochgate.values import Address

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AdminServer:
    """Health, metrics and what was decided."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._registry = build_registry(context)
        application = web.Application()
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/status", self._verdicts)
        application.router.add_get("/api/verdicts", self._verdicts)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, address: Address) -> None:
        """Listen at `address`. Raises OSError where that cannot be."""
        await self._runner.setup()
        site: web.BaseSite
        if address.path is not None:
            site = web.UnixSite(self._runner, address.path)
        else:
            site = web.TCPSite(self._runner, address.host, address.port)
        await site.start()

    async def close(self) -> None:
        """End."""
        await self._runner.cleanup()

    async def _livez(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:  # noqa: ARG002
        reasons = []
        if self._context.draining:
            reasons.append("draining")
        if (problem := self._context.ledger.problem) is not None:
            reasons.append(problem)
        return web.Response(text="\n".join(reasons or ["ok"]) + "\n", status=503 if reasons else 200)

    async def _metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(body=render(self._registry), headers={"Content-Type": METRICS_TYPE})

    async def _verdicts(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response([dataclasses.asdict(decided) for decided in self._context.telemetry.decided])
