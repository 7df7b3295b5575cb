"""What the admin side tells, as data for JSON: fingerprints and words, never an id or a credential (L7)."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from epochgate import __version__
from epochgate.admin.snapshot import Readiness, Snapshot
from epochgate.guard.policy import Policy
from epochgate.guard.record import Session, Stream
from epochgate.relay.context import Context
from epochgate.relay.telemetry import HISTORY, HISTORY_SPAN, Decided

if TYPE_CHECKING:
    from epochgate.relay.reload import Reload  # takes time to load, which a worker can do without

View = dict[str, Any]

STATES = ("open", "held", "idle", "fenced")
_AT_ONCE = 500  # sessions that are fingerprinted before others get their turn


def status_view(snapshot: Snapshot, readiness: Readiness, reload: Reload) -> View:
    """What the status page shows above its tables."""
    settings = reload.settings
    return {
        "version": __version__,
        "now": time.time(),
        "started_at": snapshot.started_at,
        "ready": not readiness.obstacles,
        "obstacles": [dataclasses.asdict(obstacle) for obstacle in readiness.obstacles],
        "draining": snapshot.draining,
        "listen": str(settings.listen),
        "upstream": {
            "url": str(settings.upstream.url),
            "connections": snapshot.connections,
            "outage_at": snapshot.outage_at,
            "errors": snapshot.upstream_errors,
        },
        "store": {"url": str(settings.store.url), "problem": snapshot.problem},
        "config": {**dataclasses.asdict(reload.last), "reloads": dict(reload.results)},
        "policies": [_policy_view(policy) for policy in settings.compiled()],
        "sessions": {
            "known": snapshot.sessions,
            "fenced": snapshot.fenced,
            "opened": sum(snapshot.sessions_opened.values()),
        },
        "streams": {"open": snapshot.open_streams, "held": snapshot.held_streams, "events": snapshot.events},
        "requests": sum(snapshot.requests.values()),
        "resumes": [
            {"policy": policy, "verdict": verdict, "reason": reason, "enforced": enforced == "true", "count": count}
            for (policy, verdict, reason, enforced), count in Counter(snapshot.resumes).most_common()
        ],
        "fences": [
            {"policy": policy, "reason": reason, "enforced": enforced == "true", "count": count}
            for (policy, reason, enforced), count in Counter(snapshot.fences).most_common()
        ],
        "timeline": {
            "span": HISTORY_SPAN,
            "spans": HISTORY,
            "counts": [{"at": at, **counts} for at, counts in sorted(snapshot.history.items())],
        },
    }


def verdict_views(decided: Iterable[Decided], wanted: dict[str, str], limit: int) -> list[View]:
    """The last verdicts, newest first; of those only the ones whose fields are as `wanted`."""
    found = [
        view
        for view in map(dataclasses.asdict, decided)
        if all(str(view[key]).lower() == value for key, value in wanted.items())
    ]
    return found[::-1][:limit]


def session_views(context: Context, wanted: dict[str, str], limit: int) -> tuple[int, list[View]]:
    """How many sessions are as `wanted` (`state`, `policy`), and those that were last active."""
    context.backlog.settle()
    state, policy = wanted.get("state"), wanted.get("policy")
    found = [
        session
        for session in context.ledger.sessions()
        if (policy is None or session.policy == policy) and (state is None or session_state(context, session) == state)
    ]
    last = heapq.nlargest(limit, found, key=last_active)
    return len(found), [session_view(context, session) for session in last]


def last_active(session: Session) -> float:
    """When a session was active or fenced last (s since 1970)."""
    return max(session.active_at, session.fenced_at)


def session_state(context: Context, session: Session) -> str:
    """One of `STATES`. Held: every stream of it that is still read waits for its client."""
    if session.fence is not None:
        return "fenced"
    flows = list(context.holds.of(session))
    held = sum(flow.downstream is None for flow in flows)
    if held and session.open_flows <= held:
        return "held"
    return "open" if session.open_flows else "idle"


def session_view(context: Context, session: Session) -> View:
    """A session in a list."""
    return {
        "fingerprint": context.fingerprints.name(session.id),
        "policy": session.policy,
        "state": session_state(context, session),
        "fence": session.fence,
        "fenced_at": session.fenced_at or None,
        "opened_at": session.opened_at,
        "active_at": session.active_at,
        "epoch": session.token is not None,
        "credentials": bool(session.credentials),
        "boundary_at": session.boundary_at if session.boundary_at > 0 else None,
        "streams": len(session.streams),
        "open": session.open_flows,
        "held": sum(flow.downstream is None for flow in context.holds.of(session)),
    }


def session_detail(context: Context, session: Session) -> View:
    """A session with its streams and its verdicts."""
    context.backlog.settle()
    view = session_view(context, session)
    fingerprint = view["fingerprint"]
    decided = [entry for entry in context.telemetry.decided if entry.session == fingerprint]
    return {
        **view,
        "streams": [_stream_view(context, session, stream) for stream in session],
        "verdicts": verdict_views(decided, {}, len(decided)),
    }


async def find_session(context: Context, fingerprint: str) -> Session | None:
    """The session at hand with this fingerprint. Other work goes on meanwhile: there can be very many."""
    for number, session in enumerate(context.ledger.sessions()):
        if context.fingerprints.name(session.id) == fingerprint:
            return session
        if number % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return None


def _stream_view(context: Context, session: Session, stream: Stream) -> View:
    flow = context.holds.get(stream)
    last = stream.last_id
    return {
        "stream": stream.key,
        "origin": stream.origin.value,
        "events": stream.end,
        "on_record": len(stream.events),
        "last_event": None if last is None else context.fingerprints.name(last),
        "owes": len(stream.owes),
        "order": session.order_of(stream).name.lower(),
        "held": flow is not None and flow.downstream is None,
        "told": stream.told,
    }


def _policy_view(policy: Policy) -> View:
    return {
        "name": policy.name,
        "path": policy.path,
        "mode": policy.mode.value,
        "accept": sorted(policy.accept),
        "unproven": policy.unproven.value,
    }
