"""Spans by OpenTelemetry (the extra `otel`): one for each request, an event in it for each verdict.

Names are those of OpenTelemetry for HTTP and MCP. Ids of sessions and events stay out: fingerprints take their place.
"""

from __future__ import annotations

import asyncio
import os
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epochgate import __version__
from epochgate.guard.mcp import LAST_EVENT_ID, PROTOCOL_VERSION, SESSION_ID
from epochgate.guard.policy import Policy
from epochgate.relay.headers import Field, without
from epochgate.relay.request import Request
from epochgate.relay.telemetry import METHODS, Decided

CLOSE_SECONDS = 3.0  # for the last spans to be sent
_TRACE_FIELDS = (b"traceparent", b"tracestate")
_VERSION_LENGTH = 32  # characters of a protocol version that are kept
_METHOD_LENGTH = 64  # characters of a JSON-RPC method that are kept


class RequestSpan:
    """The span of one request."""

    def __init__(self, span: Span, tracing: Tracing, resume: tuple[bytes, bytes] | None) -> None:
        self._span = span
        self._tracing = tracing
        self._resume = resume

    def pass_on(self, fields: list[Field]) -> list[Field]:
        """The fields for the upstream, whose spans are then below this one."""
        carrier: dict[str, str] = {}
        self._tracing.propagator.inject(carrier, set_span_in_context(self._span))
        carried = [(name.encode(), value.encode()) for name, value in carrier.items()]
        return [*without(fields, *_TRACE_FIELDS), *carried]

    def decided(self, decided: Decided) -> None:
        """A verdict about the resume that this request is."""
        self._span.set_attribute("epochgate.session", decided.session)
        self._span.add_event(
            "epochgate.verdict",
            {
                "epochgate.verdict": decided.verdict,
                "epochgate.reason": decided.reason,
                "epochgate.proof": decided.proof or "",
                "epochgate.enforced": decided.enforced,
                "epochgate.pending": decided.pending,
            },
        )

    def end(self, policy: Policy | None, status: int, rpc_method: str | None) -> None:
        """The request is done. `status` 0: the client left before it was answered; `rpc_method` of a guarded POST."""
        if rpc_method is not None:
            self._span.set_attribute("mcp.method.name", rpc_method[:_METHOD_LENGTH])
            if rpc_method == "tools/call":
                self._span.set_attribute("gen_ai.operation.name", "execute_tool")
        if policy is not None:
            self._span.set_attribute("epochgate.policy", policy.name)
            if policy.path is not None:
                self._span.set_attribute("http.route", policy.path)
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
        self._tracing.forget(self._resume)


class Tracing:
    """Makes the spans and sends them by OTLP over HTTP, as the variables `OTEL_...` say."""

    def __init__(self) -> None:
        self.propagator = TraceContextTextMapPropagator()
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "epochgate"}
        resource = Resource.create({**name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("epochgate", __version__)
        self._resumes: dict[tuple[bytes, bytes], RequestSpan] = {}

    def begin(self, request: Request) -> RequestSpan:
        """The span of a request, below the one that its `traceparent` names."""
        carrier = {name.decode(): value.decode("latin-1") for name in _TRACE_FIELDS if (value := request.get(name))}
        method = METHODS.get(request.method, "_OTHER")
        attributes = {"http.request.method": method, "network.protocol.name": "http"}
        if version := request.get(PROTOCOL_VERSION):
            attributes["mcp.protocol.version"] = version.decode("latin-1")[:_VERSION_LENGTH]
        span = self._tracer.start_span(
            method if method in METHODS.values() else "HTTP",
            context=self.propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        session, cursor = request.get(SESSION_ID), request.get(LAST_EVENT_ID)
        if not session or not cursor:
            return RequestSpan(span, self, None)
        resume = (session, cursor)
        self._resumes[resume] = begun = RequestSpan(span, self, resume)
        return begun

    def decided(self, session: bytes, cursor: bytes, decided: Decided) -> None:
        """A verdict, which goes to the span of the request that it is about."""
        if (span := self._resumes.get((session, cursor))) is not None:
            span.decided(decided)

    def forget(self, resume: tuple[bytes, bytes] | None) -> None:
        """A request that may be a resume is done."""
        if resume is not None:
            self._resumes.pop(resume, None)

    async def close(self) -> None:
        """Send what is left, but wait for a collector that does not answer only so long."""
        sender = threading.Thread(target=self._provider.shutdown, daemon=True)
        sender.start()
        await asyncio.to_thread(sender.join, CLOSE_SECONDS)
