"""What one process has counted and has at hand, at one moment; and what several of them make together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from epochgate.guard.policy import Mode, Policy
from epochgate.relay.context import Context
from epochgate.relay.telemetry import HISTORY

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why the proxy is not ready, or is so only in part."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """Ready where there is no obstacle; `notes` tell what is amiss all the same."""

    obstacles: Sequence[Obstacle] = ()
    notes: Sequence[Obstacle] = ()


class Snapshot(msgspec.Struct, kw_only=True):
    """Counters, which only grow, and gauges. Times are s since 1970, the keys of the counters those of `Telemetry`."""

    started_at: float
    resumes: dict[tuple[str, str, str, str], int]
    fences: dict[tuple[str, str, str], int]
    requests: dict[tuple[str, str, int], int]
    upstream_errors: dict[str, int]
    sessions_opened: dict[str, int]
    pending_told: dict[str, int]
    events: int
    clients_closed: dict[str, int]
    loans: dict[str, int]
    history: dict[int, dict[str, int]]
    outage_at: float | None
    draining: bool = False
    problem: str | None = None  # of the store
    connections: int = 0  # to the upstream
    clients: int = 0  # connections of them
    tasks: int = 0
    copies: int = 0  # bytes
    open_streams: int = 0
    held_streams: int = 0
    sessions: int = 0
    fenced: int = 0


def take(context: Context) -> Snapshot:
    """Of this process, now. Sessions are left to `count_sessions`, which has to look at each of them."""
    context.backlog.settle()
    telemetry = context.telemetry
    outage_at = context.upstream.outage_at
    return Snapshot(
        started_at=telemetry.started_at,
        resumes=dict(telemetry.resumes),
        fences=dict(telemetry.fences),
        requests=dict(telemetry.requests),
        upstream_errors=dict(telemetry.upstream_errors),
        sessions_opened=dict(telemetry.sessions_opened),
        pending_told=dict(telemetry.pending_told),
        events=telemetry.events,
        clients_closed=dict(context.clients.closed),
        loans=dict(telemetry.loans),
        history={at: dict(counts) for at, counts in telemetry.history},
        outage_at=outage_at if outage_at > 0 else None,
        draining=context.draining,
        problem=context.ledger.problem,
        connections=len(context.upstream.connections),
        clients=len(context.clients),
        tasks=len(asyncio.all_tasks()),
        copies=context.copies.used,
        open_streams=telemetry.open_streams,
        held_streams=len(context.holds),
    )


def count_sessions(context: Context, snapshot: Snapshot) -> None:
    """Fill in the sessions at hand."""
    sessions = context.ledger.sessions()
    snapshot.sessions = len(sessions)
    snapshot.fenced = sum(session.fence is not None for session in sessions)


def past(snapshot: Snapshot) -> Snapshot:
    """What is left of a process that has ended: what it had counted."""
    gauges = ("connections", "clients", "tasks", "copies", "open_streams", "held_streams", "sessions", "fenced")
    return msgspec.structs.replace(snapshot, draining=False, problem=None, **dict.fromkeys(gauges, 0))


def total(snapshots: Sequence[Snapshot], started_at: float) -> Snapshot:
    """All of them together, of processes that belong to one which started at that time.

    Sessions are added up, though several may have the same one at hand; whoever can tell puts the number right.
    """
    return Snapshot(
        started_at=started_at,
        resumes=_sum(snapshot.resumes for snapshot in snapshots),
        fences=_sum(snapshot.fences for snapshot in snapshots),
        requests=_sum(snapshot.requests for snapshot in snapshots),
        upstream_errors=_sum(snapshot.upstream_errors for snapshot in snapshots),
        sessions_opened=_sum(snapshot.sessions_opened for snapshot in snapshots),
        pending_told=_sum(snapshot.pending_told for snapshot in snapshots),
        events=sum(snapshot.events for snapshot in snapshots),
        clients_closed=_sum(snapshot.clients_closed for snapshot in snapshots),
        loans=_sum(snapshot.loans for snapshot in snapshots),
        history=_join([snapshot.history for snapshot in snapshots]),
        outage_at=max((at for snapshot in snapshots if (at := snapshot.outage_at) is not None), default=None),
        draining=any(snapshot.draining for snapshot in snapshots),
        problem=next((snapshot.problem for snapshot in snapshots if snapshot.problem is not None), None),
        connections=sum(snapshot.connections for snapshot in snapshots),
        clients=sum(snapshot.clients for snapshot in snapshots),
        tasks=sum(snapshot.tasks for snapshot in snapshots),
        copies=sum(snapshot.copies for snapshot in snapshots),
        open_streams=sum(snapshot.open_streams for snapshot in snapshots),
        held_streams=sum(snapshot.held_streams for snapshot in snapshots),
        sessions=sum(snapshot.sessions for snapshot in snapshots),
        fenced=sum(snapshot.fenced for snapshot in snapshots),
    )


def obstacles(snapshot: Snapshot, policies: Iterable[Policy]) -> list[Obstacle]:
    """What keeps a process from being ready; nothing: it is.

    A store that does not answer matters where a policy enforces: what it does not know is refused.
    """
    found = []
    if snapshot.draining:
        found.append(Obstacle("draining", "the proxy is about to end"))
    if snapshot.problem is not None and any(policy.mode is Mode.ENFORCE for policy in policies):
        found.append(Obstacle("store", snapshot.problem))
    return found


def _sum(counts: Iterable[dict[Key, int]]) -> dict[Key, int]:
    found: Counter[Key] = Counter()
    for each in counts:
        found.update(each)
    return dict(found)


def _join(histories: Sequence[dict[int, dict[str, int]]]) -> dict[int, dict[str, int]]:
    """The last spans of several histories."""
    spans = sorted({at for history in histories for at in history})[-HISTORY:]
    return {at: _sum(history[at] for history in histories if at in history) for at in spans}
