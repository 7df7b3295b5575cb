"""The metrics (section 11): each with its labels and where its value comes from. No label holds an id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epochgate import __version__
from epochgate.admin.snapshot import Snapshot
from epochgate.admin.views import View
from epochgate.guard.policy import Mode, Policy, Proof
from epochgate.guard.verdict import Kind, Reason
from epochgate.relay.reload import Reload
from epochgate.relay.telemetry import LOANS

# Series that exist from the start: a counter that begins with 1 shows no increase to an alert rule.
FROM_THE_START = (
    *((Kind.PROVEN, proof.value) for proof in Proof),
    *(
        (Kind.DIVERGENT, reason)
        for reason in (
            Reason.EPOCH_CHANGED, Reason.REPLAY_GAP, Reason.REPLAY_MISMATCH, Reason.FOREIGN_STREAM,
            Reason.FOREIGN_RESPONSE, Reason.ID_GAP, Reason.ID_REWIND,
        )
    ),
    *(
        (Kind.UNPROVEN, reason)
        for reason in (
            Reason.UNKNOWN_SESSION, Reason.UNKNOWN_CURSOR, Reason.STALE_CURSOR, Reason.BOUNDARY, Reason.EPOCH_MISSING,
            Reason.NO_EPOCH, Reason.NO_PROOF, Reason.NO_EVENT, Reason.UNREADABLE,
        )
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the values come from. `workers` as `Subject` tells of them."""

    snapshot: Snapshot
    ready: bool
    reload: Reload
    workers: tuple[View, ...] = ()
    policies: tuple[Policy, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", self.reload.settings.compiled())


Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. A counter's name is written without its `_total`."""

    counts: bool
    name: str
    text: str
    labels: tuple[str, ...]
    read: Callable[[Sources], Samples]

    @property
    def shown(self) -> str:
        """The name as it stands on the page."""
        return f"{self.name}_total" if self.counts else self.name


def _one(read: Callable[[Sources], float]) -> Callable[[Sources], Samples]:
    return lambda sources: [((), read(sources))]


def _resumes(sources: Sources) -> Samples:
    counted = dict.fromkeys(
        (
            (policy.name, kind.value, str(reason), str(policy.mode is Mode.ENFORCE).lower())
            for policy in sources.policies
            if policy.mode is not Mode.BYPASS
            for kind, reason in FROM_THE_START
        ),
        0,
    )
    return (counted | sources.snapshot.resumes).items()


FAMILIES = (
    Family(
        True,
        "epochgate_resumes",
        "Resumes that were decided. `enforced` is `true` where the verdict was acted on, `false` in observe mode.",
        ("policy", "verdict", "reason", "enforced"),
        _resumes,
    ),
    Family(
        True,
        "epochgate_fences",
        "Sessions that were fenced; with `enforced` `false`: that would have been.",
        ("policy", "reason", "enforced"),
        lambda s: s.snapshot.fences.items(),
    ),
    Family(
        True,
        "epochgate_pending_calls_told",
        "Calls that were answered with an error because their stream was refused.",
        ("policy",),
        lambda s: (((policy,), count) for policy, count in s.snapshot.pending_told.items()),
    ),
    Family(
        True,
        "epochgate_sessions_opened",
        "Sessions that the upstream granted.",
        ("policy",),
        lambda s: (((policy,), count) for policy, count in s.snapshot.sessions_opened.items()),
    ),
    Family(
        False,
        "epochgate_sessions",
        "Sessions at hand, the fenced ones included.",
        (),
        _one(lambda s: s.snapshot.sessions),
    ),
    Family(False, "epochgate_sessions_fenced", "Fenced sessions at hand.", (), _one(lambda s: s.snapshot.fenced)),
    Family(
        False,
        "epochgate_streams_open",
        "Guarded streams that are being read from the upstream, the held ones included.",
        (),
        _one(lambda s: s.snapshot.open_streams),
    ),
    Family(
        False,
        "epochgate_streams_held",
        "Guarded streams that are kept for a client that went away.",
        (),
        _one(lambda s: s.snapshot.held_streams),
    ),
    Family(
        True,
        "epochgate_loans",
        "Held streams that go over from one process to another. `lent`: by this one; `served`: to a client here; "
        "`failed`: could not be had, the resume went to the upstream; `lost`: in the middle, its client was cut off.",
        ("outcome",),
        lambda s: (((outcome,), s.snapshot.loans.get(outcome, 0)) for outcome in LOANS),
    ),
    Family(True, "epochgate_events", "Events of guarded streams.", (), _one(lambda s: s.snapshot.events)),
    Family(
        True,
        "epochgate_requests",
        "Requests by answer. `status` is `0` where the client left first; `policy` is empty where none matched; "
        "`method` is `other` where it is none of the usual.",
        ("policy", "method", "status"),
        lambda s: (
            ((policy, method, str(status)), count) for (policy, method, status), count in s.snapshot.requests.items()
        ),
    ),
    Family(
        True,
        "epochgate_upstream_errors",
        "Requests or streams that the upstream failed, by what it did.",
        ("code",),
        lambda s: (((code,), count) for code, count in s.snapshot.upstream_errors.items()),
    ),
    Family(
        False,
        "epochgate_upstream_connections",
        "Connections to the upstream, the idle ones included.",
        (),
        _one(lambda s: s.snapshot.connections),
    ),
    Family(
        False,
        "epochgate_client_connections",
        "Connections of clients, the idle ones included.",
        (),
        _one(lambda s: s.snapshot.clients),
    ),
    Family(
        True,
        "epochgate_client_connections_closed",
        "Connections of clients that were closed to keep to `limits`; `why` is `gave_way` (to another one, while it "
        "waited), `refused` (all were at work), `slow_head` or `slow_body`.",
        ("why",),
        lambda s: (((why,), count) for why, count in s.snapshot.clients_closed.items()),
    ),
    Family(
        False,
        "epochgate_copies_bytes",
        "Bytes that are kept of unfinished requests, answers and events; `limits.copies` is the most.",
        (),
        _one(lambda s: s.snapshot.copies),
    ),
    Family(
        False,
        "epochgate_tasks",
        "Tasks of the event loop: some of the requests that are being worked on, and a few that are always there.",
        (),
        _one(lambda s: s.snapshot.tasks),
    ),
    Family(
        False,
        "epochgate_policy_info",
        "1 for each policy in force, with its mode.",
        ("policy", "mode"),
        lambda s: (((policy.name, policy.mode.value), 1) for policy in s.policies),
    ),
    Family(
        False,
        "epochgate_ready",
        "1 while `/readyz` answers 200.",
        (),
        _one(lambda s: s.ready),
    ),
    Family(
        False,
        "epochgate_store_available",
        "1 while records are kept in the store.",
        (),
        _one(lambda s: s.snapshot.problem is None),
    ),
    Family(
        True,
        "epochgate_config_reloads",
        "Readings of the configuration while the proxy runs; `result` is `success` or `failure`.",
        ("result",),
        lambda s: (((result,), count) for result, count in s.reload.results.items()),
    ),
    Family(
        False,
        "epochgate_config_reload_successful",
        "1 while the configuration as it was last read is in force, 0 where it could not be used.",
        (),
        _one(lambda s: not s.reload.last.error),
    ),
    Family(
        False,
        "epochgate_config_reload_timestamp_seconds",
        "When the configuration was last read, in seconds since 1970.",
        (),
        _one(lambda s: s.reload.last.at),
    ),
    Family(
        False,
        "epochgate_config_restart_needed",
        "The number of changed keys that take a restart to be in force.",
        (),
        _one(lambda s: len(s.reload.last.needs_restart)),
    ),
    Family(
        False, "epochgate_build_info", "1, with the version that runs.", ("version",), lambda _: [((__version__,), 1)]
    ),
)


WORKER_FAMILIES = (
    Family(
        False,
        "epochgate_worker_serving",
        "1 while this worker accepts connections.",
        ("worker",),
        lambda s: (((str(worker["worker"]),), worker["state"] == "serving") for worker in s.workers),
    ),
    Family(
        True,
        "epochgate_worker_restarts",
        "Processes that this worker lost: each was replaced.",
        ("worker",),
        lambda s: (((str(worker["worker"]),), worker["restarts"]) for worker in s.workers),
    ),
)  # only where `workers` is above 1


class SourcesCollector(Collector):
    """Hands over the values that it was given last."""

    sources: Sources

    def collect(self) -> Iterable[Metric]:
        """Every metric of the proxy."""
        for family in (*FAMILIES, *(WORKER_FAMILIES if self.sources.workers else ())):
            kind = CounterMetricFamily if family.counts else GaugeMetricFamily
            metric = kind(family.name, family.text, labels=family.labels)
            for labels, value in family.read(self.sources):
                metric.add_metric(labels, value)
            yield metric


class ProcessesCollector(Collector):
    """The usual metrics of a process, with a label `worker`, for each worker and for the one that supervises them."""

    def __init__(self, workers: Callable[[], list[View]]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        """Those of the processes that run."""
        processes = {"supervisor": "self"} | {
            str(worker["worker"]): str(worker["pid"]) for worker in self._workers() if worker["pid"] is not None
        }
        found: dict[str, Metric] = {}
        for name, pid in processes.items():
            for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                joined = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    joined.add_sample(sample.name, {**sample.labels, "worker": name}, sample.value)
        return found.values()


class Metrics:
    """All metrics, from the sources of the moment."""

    def __init__(self, workers: Callable[[], list[View]]) -> None:
        self._registry = CollectorRegistry()
        self._collector = SourcesCollector()
        self._registry.register(self._collector)
        if workers():
            self._registry.register(ProcessesCollector(workers))
        else:
            ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def registry(self, sources: Sources) -> CollectorRegistry:
        """What gives the metrics, until it is asked for anew."""
        self._collector.sources = sources
        return self._registry


_INTRODUCTION = """\
# Metrics

<!-- Written by `python -m epochgate.admin.metrics`; change the texts in `admin/metrics.py` instead. -->

`GET /metrics` on the admin listener (`admin.listen`) answers in the text format of Prometheus, or in OpenMetrics where
that is asked for. No label holds an id of a session or an event, and none can be chosen by a client, so the number of
series is bounded: by the policies, the verdicts and the statuses of the upstream.

The one that matters is `epochgate_resumes_total`. A resume that was, or in observe mode would have been, refused
because it contradicts the record:

```
sum by (policy, reason) (increase(epochgate_resumes_total{verdict="divergent"}[1h]))
```

What enforcing would change, asked while a policy still observes:

```
sum by (verdict, reason) (increase(epochgate_resumes_total{policy="mcp",enforced="false"}[1d]))
```

The series of `epochgate_resumes_total` exist with 0 from the start for every policy, so that an alert sees the first
one. The reasons are told in [runbook.md](runbook.md).

| metric | type | labels | meaning |
|---|---|---|---|
"""

_END = """
The usual ones of the process come with them: `process_cpu_seconds_total`, `process_resident_memory_bytes`,
`process_open_fds`, `process_max_fds`, `process_start_time_seconds`, `python_gc_*` and `python_info`.

With `workers` above 1 the listener tells of all workers together. Counters are added up, and what a worker that has
ended had counted stays in them. Gauges of streams and connections are added up as well; a session that several workers
have at hand is one session. `epochgate_ready` and `/readyz` are told in [scaling.md](scaling.md);
`epochgate_store_available` is 0 where any worker is without its store. The `process_*` have a label `worker` then: the
number of the worker, or `supervisor`. `python_*` are those of the supervisor. And there are:

| metric | type | labels | meaning |
|---|---|---|---|
"""


def write_reference() -> str:
    """The text of `docs/metrics.md`."""
    return _INTRODUCTION + "".join(_rows(FAMILIES)) + _END + "".join(_rows(WORKER_FAMILIES))


def _rows(families: tuple[Family, ...]) -> Iterator[str]:
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        yield f"| `{family.shown}` | {'counter' if family.counts else 'gauge'} | {labels} | {family.text} |\n"


if __name__ == "__main__":
    print(write_reference(), end="")  # noqa: T201
