"""What the exchanges of one proxy share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from epochgate.errors import UpstreamError
from epochgate.guard.fingerprint import Fingerprints
from epochgate.guard.policy import LiveChange, Mode, Policy, normalize_path
from epochgate.guard.record import Session
from epochgate.guard.verdict import Reason
from epochgate.ledger.base import Ledger
from epochgate.relay.backlog import Backlog
from epochgate.relay.clients import Clients
from epochgate.relay.copies import Copies
from epochgate.relay.hold import Holds
from epochgate.relay.telemetry import Telemetry
from epochgate.relay.upstream import Upstream

if TYPE_CHECKING:
    from epochgate.relay.elsewhere import Elsewhere
    from epochgate.relay.farewell import Farewell

_REMEMBERED_TARGETS = 1024
_LONGEST_REMEMBERED = 256  # bytes; a client may send targets of 64 KiB


class Policies:
    """The policies in force; the first that matches a target wins (section 10)."""

    def __init__(self, policies: tuple[Policy, ...]) -> None:
        self._policies = policies
        self._by_target: dict[bytes, Policy | None] = {}

    def match(self, target: bytes) -> Policy | None:
        """The policy for a request target, None if there is none."""
        try:
            return self._by_target[target]
        except KeyError:
            path = normalize_path(target)
            policy = next((policy for policy in self._policies if policy.matches(path)), None)
            if len(target) <= _LONGEST_REMEMBERED:
                if len(self._by_target) >= _REMEMBERED_TARGETS:
                    self._by_target.clear()
                self._by_target[target] = policy
            return policy

    def __iter__(self) -> Iterator[Policy]:
        return iter(self._policies)


class EventStream(Protocol):
    """An event stream that flows to a client."""

    def end_at_boundary(self) -> None:
        """End it cleanly after a whole event: the proxy drains."""


@dataclass(slots=True)
class Context:
    """The collaborators, built by `relay.server`."""

    policies: Policies
    upstream: Upstream
    clients: Clients
    copies: Copies
    ledger: Ledger
    fingerprints: Fingerprints
    telemetry: Telemetry
    holds: Holds
    keep_host: bool  # `upstream.host: client`
    authority: bytes  # what `Host` says at the upstream otherwise
    prefix: bytes  # of the upstream's paths
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    backlog: Backlog = field(init=False)
    draining: bool = False  # told to end: not ready
    retry_after: int | None = None  # s: the time for new requests is over, they are told to come back then
    elsewhere: Elsewhere | None = None  # the other processes, where the store is shared
    streams: set[EventStream] = field(default_factory=set)  # event streams that flow to a client, guarded or not
    farewells: dict[Farewell, None] = field(default_factory=dict)  # DELETEs whose client has gone, by age

    def __post_init__(self) -> None:
        self.backlog = Backlog(self.loop, kept=self.ledger.kept)

    def fence(self, policy: Policy, session: Session, reason: Reason) -> None:
        """Fence a session, once (F2), and close what is held for it. In observe mode it is only counted, once."""
        if policy.mode is not Mode.ENFORCE:
            if not session.would_be_fenced:
                session.would_be_fenced = True
                self.telemetry.fenced(policy.name, reason.value, session=session.id, enforced=False)
            return
        if session.fence is None:
            session.close(reason.value, time.time())
            self.telemetry.fenced(policy.name, reason.value, session=session.id, enforced=True)
        self.holds.close_held(session)

    async def spread(self, session: Session) -> None:
        """Wait until what was decided of a session is kept: before its client is told, if that is soon.

        The client's next request may come to another process, or to one that starts after this was killed.
        """
        settled = self.ledger.spread(session)
        if settled is not None:
            await settled

    def live_change(self, policy: Policy, session: Session) -> None:
        """Traffic that was not resumed shows another epoch (R12)."""
        if policy.live_change is not LiveChange.IGNORE:
            self.fence(policy, session, Reason.EPOCH_CHANGED)

    def saw_upstream_error(self, error: UpstreamError) -> None:
        """Count it, and take it for a boundary signal where it is one."""
        self.upstream.saw_reset(error)
        self.telemetry.upstream_failed(error.code, f"{error} ({error.detail})" if error.detail else str(error))
