"""What the admin listener tells of and acts upon: one process, or all workers of one proxy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from epochgate.admin.snapshot import Readiness, Snapshot, count_sessions, obstacles, take
from epochgate.admin.views import View, find_session, session_detail, session_views
from epochgate.errors import EpochgateError, Fault
from epochgate.guard.verdict import Reason
from epochgate.relay.context import Context
from epochgate.relay.telemetry import Decided

if TYPE_CHECKING:
    from epochgate.relay.reload import Reload, Reloaded  # takes time to load, which a worker can do without


class PolicyGoneError(EpochgateError):
    """The policy of a session is no longer in force, so that nothing says what a fence would do."""

    fault = Fault.OPERATOR
    code = "policy_gone"
    status = 409


class Subject(Protocol):
    """See the module. What is told of sessions holds fingerprints only (L7)."""

    async def readiness(self) -> Readiness:
        """Whether it is ready, and why not."""

    async def snapshot(self) -> Snapshot:
        """What was counted and is at hand."""

    async def decided(self) -> Sequence[Decided]:
        """The last verdicts, the oldest first."""

    async def sessions(self, wanted: dict[str, str], limit: int) -> tuple[int, list[View]]:
        """How many sessions are as `wanted` (`state`, `policy`), and those that were last active."""

    async def session(self, fingerprint: str) -> View | None:
        """A session with its streams and its verdicts, None if it is not at hand."""

    async def fence(self, fingerprint: str) -> View | None:
        """Fence a session and tell of it, None if it is not at hand. Raises PolicyGoneError."""

    async def reload(self) -> Reloaded:
        """Read the configuration again; it is in force afterwards, or nothing has changed."""

    def workers(self) -> list[View]:
        """The processes that serve, where the one that tells is another: number, pid and state of each."""


class OneProcess:
    """See `Subject`: the process that tells is the one that serves."""

    def __init__(self, context: Context, reload: Reload) -> None:
        self._context = context
        self._reload = reload

    async def readiness(self) -> Readiness:
        """See `Subject`."""
        return Readiness(obstacles(take(self._context), self._context.policies))

    async def snapshot(self) -> Snapshot:
        """See `Subject`."""
        snapshot = take(self._context)
        count_sessions(self._context, snapshot)
        return snapshot

    async def decided(self) -> Sequence[Decided]:
        """See `Subject`."""
        return self._context.telemetry.decided

    async def sessions(self, wanted: dict[str, str], limit: int) -> tuple[int, list[View]]:
        """See `Subject`."""
        return session_views(self._context, wanted, limit)

    async def session(self, fingerprint: str) -> View | None:
        """See `Subject`."""
        session = await find_session(self._context, fingerprint)
        return None if session is None else session_detail(self._context, session)

    async def fence(self, fingerprint: str) -> View | None:
        """See `Subject`."""
        return await fence(self._context, fingerprint)

    async def reload(self) -> Reloaded:
        """See `Subject`."""
        return self._reload.apply("request")

    def workers(self) -> list[View]:
        """See `Subject`."""
        return []


async def fence(context: Context, fingerprint: str) -> View | None:
    """See `Subject.fence`; in this process."""
    session = await find_session(context, fingerprint)
    if session is None:
        return None
    policy = next((policy for policy in context.policies if policy.name == session.policy), None)
    if policy is None:
        raise PolicyGoneError(f"the policy {session.policy} of this session is no longer in force")
    context.fence(policy, session, Reason.FENCED_BY_OPERATOR)
    await context.spread(session)
    return session_detail(context, session)
