"""The ledger in the memory of one process (`memory://`): gone with it."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from epochgate.guard.record import Limits, Session
from epochgate.ledger.base import Resume

_SCAN = 64  # records looked at for one without open streams before the oldest has to go
_SWEEP_EVERY = 256  # openings


class Records:
    """Sessions by id, the least recently used first to go. Fenced ones are kept apart: neither drives out the other."""

    def __init__(self, *, sessions: int, limits: Limits, session_idle: float, fence: float) -> None:
        self.limits = limits
        self.session_idle = session_idle
        self.fence = fence
        self.evicted: Callable[[Session], None] | None = None  # is told of each that had to give way
        self.most = sessions
        self._live: OrderedDict[bytes, Session] = OrderedDict()
        self._fenced: OrderedDict[bytes, Session] = OrderedDict()
        self._openings = 0

    def get(self, session_id: bytes, now: float) -> Session | None:
        """The record of a session, None where there is none (any more)."""
        session = self._live.get(session_id)
        if session is not None:
            if session.fence is not None:
                del self._live[session_id]
                self._keep(self._fenced, session)
            elif now - session.active_at > self.session_idle and not session.open_flows:
                _let_go(self._live.pop(session_id))
                return None
            else:
                self._live.move_to_end(session_id)
            return session
        session = self._fenced.get(session_id)
        if session is not None and now - session.fenced_at > self.fence:
            _let_go(self._fenced.pop(session_id))
            return None
        return session

    def put(self, session: Session, now: float) -> None:
        """Add a record in place of what is there under its id."""
        self.drop(session.id)
        self._keep(self._live if session.fence is None else self._fenced, session)
        self._openings += 1
        if self._openings % _SWEEP_EVERY == 0:
            self.sweep(now)

    def drop(self, session_id: bytes) -> None:
        """Forget a record."""
        self._live.pop(session_id, None)
        self._fenced.pop(session_id, None)

    def sweep(self, now: float) -> None:
        """Forget what is past its time."""
        for session in list(self._live.values()):
            if session.fence is not None or (now - session.active_at > self.session_idle and not session.open_flows):
                self.get(session.id, now)
        for session in list(self._fenced.values()):
            if now - session.fenced_at > self.fence:
                _let_go(self._fenced.pop(session.id))

    def all(self) -> list[Session]:
        """Every record."""
        return [*self._live.values(), *self._fenced.values()]

    def _keep(self, records: OrderedDict[bytes, Session], session: Session) -> None:
        records[session.id] = session
        if len(records) > self.most:
            victim = next(iter(records))
            for number, (session_id, candidate) in enumerate(records.items()):
                if not candidate.open_flows and candidate is not session:
                    victim = session_id
                    break
                if number >= _SCAN:
                    break
            given_up = records.pop(victim)
            if self.evicted is not None:
                self.evicted(given_up)


def _let_go(session: Session) -> None:
    """It is past its time: nothing of it is written any more, and the two do not wait for the collector."""
    session.watcher = None


class MemoryLedger:
    """See `Ledger`."""

    kept = False

    def __init__(self, records: Records) -> None:
        self.key = secrets.token_bytes(32)
        self._records = records

    def get(self, session_id: bytes, now: float) -> Session | None:
        """See `Ledger`."""
        return self._records.get(session_id, now)

    async def find(self, session_id: bytes, now: float, resume: Resume | None = None) -> Session | None:  # noqa: ARG002
        """See `Ledger`."""
        return self._records.get(session_id, now)

    def open(self, session_id: bytes, credentials: bytes, token: str | None, policy: str, now: float) -> Session:
        """See `Ledger`."""
        session = Session(session_id, credentials, token, self._records.limits, now)
        session.policy = policy
        self._records.put(session, now)
        return session

    def spread(self, session: Session) -> Awaitable[None] | None:  # noqa: ARG002
        """See `Ledger`."""
        return None

    def sessions(self) -> list[Session]:
        """See `Ledger`."""
        return self._records.all()

    async def start(self) -> None:
        """Nothing to begin."""

    async def flush(self) -> None:
        """Nothing is kept elsewhere."""

    async def close(self) -> None:
        """Nothing to end."""

    @property
    def problem(self) -> str | None:
        """Memory is always there."""
        return None
