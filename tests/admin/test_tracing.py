"""Spans by OpenTelemetry, as a collector gets them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from admin.stage import Client, free_port, play_divergent, play_proven, proxy


@pytest.fixture
def otel() -> Any:
    """The messages of the protocol; without the extra the test is skipped, on the build server it fails."""
    try:
        import opentelemetry.exporter.otlp.proto.http
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"the extra otel is not installed: {error}")
    assert opentelemetry.exporter.otlp.proto.http
    return ExportTraceServiceRequest


class Collector:
    def __init__(self, message: Any) -> None:
        self.message = message
        self.raw = b""
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        application = web.Application()
        application.router.add_post("/v1/traces", self._take)
        runner = web.AppRunner(application)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.raw += body
        for resource in self.message.FromString(body).resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")


def attributes(item: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in item.attributes}


async def test_a_span_for_each_request_and_an_event_for_each_verdict(otel, server, tmp_path, http):
    collector = Collector(otel)
    server.session, server.prefix = "hunter2", ""
    policies = [{"name": "mcp", "match": {"path": "/mcp"}}]
    async with collector.listening() as endpoint, server.listening() as upstream:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        async with proxy(upstream, tmp_path, environment, tracing={"enabled": True}, policies=policies) as gate:
            trace = "0af7651916cd43dd8448eb211c80319c"
            caller = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "tracestate": "vendor=x"}
            await play_proven(Client(http, gate.url, caller))
            await play_divergent(Client(http, gate.url), server)
            gate.process.send_signal(signal.SIGTERM)
            assert await gate.ended() == 0
            assert [line for line in gate.said if not line.startswith("{")] == []
    assert collector.services == {"epochgate"}
    spans = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in spans] == ["POST", "POST", "GET"] * 2
    assert len(spans) == len(server.seen)
    for span, request in zip(spans, server.seen, strict=True):
        found = attributes(span)
        assert found["http.request.method"] == request.method
        assert (found["http.route"], found["epochgate.policy"]) == ("/mcp", "mcp")
        (passed,) = request.headers.getall("traceparent")
        assert passed.rpartition("-")[0] == f"00-{span.trace_id.hex()}-{span.span_id.hex()}"
    for span, request in zip(spans[:3], server.seen[:3], strict=True):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, "b7ad6b7169203331")
        assert request.headers["tracestate"] == "vendor=x"
    assert [attributes(span)["http.response.status_code"] for span in spans] == [200, 200, 200, 200, 200, 404]
    methods = ["initialize", "tools/call", None]
    assert [attributes(span).get("mcp.method.name") for span in spans] == methods * 2
    assert attributes(spans[1])["gen_ai.operation.name"] == "execute_tool"
    assert [[attributes(event) for event in span.events] for span in spans] == [
        [],
        [],
        [verdict("proven", "epoch", "epoch")],
        [],
        [],
        [verdict("divergent", "epoch_changed", "")],
    ]
    assert b"hunter2" not in collector.raw


def verdict(kind: str, reason: str, proof: str) -> dict[str, Any]:
    return {
        "epochgate.verdict": kind,
        "epochgate.reason": reason,
        "epochgate.proof": proof,
        "epochgate.enforced": True,
        "epochgate.pending": 1,
    }


async def test_a_collector_that_does_not_answer_does_not_keep_the_proxy(otel, server, tmp_path, http):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    async with (
        server.listening() as upstream,
        proxy(upstream, tmp_path, environment, tracing={"enabled": True}) as gate,
    ):
        await play_proven(Client(http, gate.url))
        gate.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await gate.ended() == 0


async def test_without_tracing_the_field_passes_as_it_came(server, gate, http):
    """T2: it is an ordinary field then."""
    caller = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    await Client(http, gate.url, caller).initialize()
    assert server.seen[0].headers["traceparent"] == caller["traceparent"]


async def test_without_the_extra_the_remedy_is_told(server, tmp_path):
    blind = tmp_path / "blind"
    blind.mkdir()
    (blind / "opentelemetry.py").write_text("raise ImportError('away', name='opentelemetry')\n")
    path = os.pathsep.join([str(blind), *filter(None, sys.path)])
    async with (
        server.listening() as upstream,
        proxy(upstream, tmp_path, {"PYTHONPATH": path}, tracing={"enabled": True}, fails=True) as gate,
    ):
        assert await gate.ended() == 78
        assert "tracing.enabled: needs opentelemetry, which is not installed" in gate.said[-1]
        assert 'pip install "epochgate[otel]"' in gate.said[-1]
