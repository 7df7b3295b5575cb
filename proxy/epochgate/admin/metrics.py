"""The counters of `relay.telemetry` as Prometheus metrics (section 11). No label holds an id."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epochgate import __version__
from epochgate.relay.context import Context


class ContextCollector(Collector):
    """Reads the counters when they are asked for."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterable[Metric]:
        """Every metric of the proxy."""
        telemetry = self._context.telemetry
        resumes = CounterMetricFamily(
            "epochgate_resumes", "Resumes by verdict.", labels=["policy", "verdict", "reason", "enforced"]
        )
        for labels, count in telemetry.resumes.items():
            resumes.add_metric(labels, count)
        yield resumes
        fences = CounterMetricFamily(
            "epochgate_fences", "Sessions that were fenced.", labels=["policy", "reason", "enforced"]
        )
        for fence, count in telemetry.fences.items():
            fences.add_metric(fence, count)
        yield fences
        requests = CounterMetricFamily(
            "epochgate_requests",
            "Requests by answer; status 0: the client left first.",
            labels=["policy", "method", "status"],
        )
        for (policy, method, status), count in telemetry.requests.items():
            requests.add_metric([policy, method, str(status)], count)
        yield requests
        errors = CounterMetricFamily(
            "epochgate_upstream_errors", "Answers that the upstream did not give.", labels=["code"]
        )
        for code, count in telemetry.upstream_errors.items():
            errors.add_metric([code], count)
        yield errors
        opened = CounterMetricFamily("epochgate_sessions_opened", "Sessions that were granted.", labels=["policy"])
        for policy, count in telemetry.sessions_opened.items():
            opened.add_metric([policy], count)
        yield opened
        told = CounterMetricFamily("epochgate_pending_calls_told", "Calls told of a refusal.", labels=["policy"])
        for policy, count in telemetry.pending_told.items():
            told.add_metric([policy], count)
        yield told
        yield CounterMetricFamily("epochgate_events", "Events of guarded streams.", value=telemetry.events)
        yield GaugeMetricFamily("epochgate_streams_open", "Guarded streams being read.", value=telemetry.open_streams)
        yield GaugeMetricFamily(
            "epochgate_streams_held", "Streams whose client is away.", value=len(self._context.holds)
        )
        yield GaugeMetricFamily("epochgate_sessions", "Sessions at hand.", value=len(self._context.ledger.sessions()))
        info = GaugeMetricFamily("epochgate_build_info", "The version that runs.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info


def build_registry(context: Context) -> CollectorRegistry:
    """All metrics of this process."""
    registry = CollectorRegistry()
    registry.register(ContextCollector(context))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The page of `/metrics`."""
    return generate_latest(registry)
