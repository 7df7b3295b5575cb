"""What can be seen of the work: counters, the last verdicts, and a log line for each verdict and each request.

Counters are plain numbers, so that the hot path stays cheap; the admin side turns them into metrics.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from epochgate.guard.fingerprint import Fingerprints
from epochgate.guard.verdict import Kind, Verdict

if TYPE_CHECKING:
    from epochgate.relay.tracing import Tracing  # an extra

LAST_VERDICTS = 500
HISTORY = 120  # spans of time for which verdicts are counted apart
HISTORY_SPAN = 60  # s
LOANS = ("lent", "served", "failed", "lost")  # by the owner; to a client here; not to be had; while it was served
# The label of a metric must not be the client's to choose: any other method is `other`.
METHODS = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")}

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Decided:
    """One verdict, as it is logged and shown: fingerprints only (L7). `at` in s since 1970."""

    at: float
    policy: str
    session: str
    cursor: str
    verdict: str
    reason: str
    proof: str | None
    enforced: bool
    pending: int  # calls that the stream owes
    expected: str
    came: str


class History:
    """Verdicts counted by time: of the last `HISTORY` spans, those that had any. The keys are proofs and kinds."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, Counter[str]]] = deque(maxlen=HISTORY)

    def add(self, at: float, key: str) -> None:
        """Count one. `at` in s since 1970."""
        began = int(at // HISTORY_SPAN) * HISTORY_SPAN
        if not self._spans or self._spans[-1][0] < began:
            self._spans.append((began, Counter()))
        self._spans[-1][1][key] += 1

    def __iter__(self) -> Iterator[tuple[int, Counter[str]]]:
        """The beginning of each span (s since 1970) and its counts, the oldest first."""
        return iter(self._spans)


class Telemetry:
    """Counts, remembers and logs."""

    def __init__(self, fingerprints: Fingerprints) -> None:
        self.fingerprints = fingerprints
        self.started_at = time.time()
        self._logs_requests = log.is_enabled_for(logging.INFO)
        self.resumes: Counter[tuple[str, str, str, str]] = Counter()  # policy, verdict, reason, enforced
        self.fences: Counter[tuple[str, str, str]] = Counter()  # policy, reason, enforced
        self.requests: Counter[tuple[str, str, int]] = Counter()  # policy, method, status (0: the client left first)
        self.upstream_errors: Counter[str] = Counter()
        self.sessions_opened: Counter[str] = Counter()
        self.pending_told: Counter[str] = Counter()  # policy: calls that were told of a refusal (F4)
        self.loans: Counter[str] = Counter()  # what became of held streams that go over to another process, see LOANS
        self.events = 0  # events of guarded streams
        self.open_streams = 0
        self.decided: deque[Decided] = deque(maxlen=LAST_VERDICTS)
        self.history = History()
        self.tracing: Tracing | None = None

    def verdict(
        self, policy: str, verdict: Verdict, *, session: bytes, cursor: bytes, enforced: bool, pending: int
    ) -> None:
        """A resume was decided."""
        decided = Decided(
            at=time.time(),
            policy=policy,
            session=self.fingerprints.name(session),
            cursor=self.fingerprints.name(cursor),
            verdict=verdict.kind.value,
            reason=verdict.reason.value,
            proof=verdict.proof.value if verdict.proof is not None else None,
            enforced=enforced,
            pending=pending,
            expected=verdict.expected,
            came=verdict.came,
        )
        self.resumes[policy, decided.verdict, decided.reason, str(enforced).lower()] += 1
        self.decided.append(decided)
        self.history.add(decided.at, decided.proof or decided.verdict)
        if self.tracing is not None:
            self.tracing.decided(session, cursor, decided)
        write = log.info if verdict.kind is Kind.PROVEN else log.warning
        write(
            "resume.decided",
            session=decided.session,
            cursor=decided.cursor,
            verdict=decided.verdict,
            reason=decided.reason,
            proof=decided.proof,
            enforced=enforced,
            policy=policy,
            pending=pending,
            expected=decided.expected,
            came=decided.came,
        )

    def fenced(self, policy: str, reason: str, *, session: bytes, enforced: bool) -> None:
        """A session was fenced; with `enforced` false it would have been."""
        self.fences[policy, reason, str(enforced).lower()] += 1
        log.info(
            "session.fenced", session=self.fingerprints.name(session), reason=reason, enforced=enforced, policy=policy
        )

    def opened(self, policy: str, session: bytes, *, epoch: bool) -> None:
        """A session was opened; `epoch`: its handshake had a token."""
        self.sessions_opened[policy] += 1
        log.info("session.opened", session=self.fingerprints.name(session), policy=policy, epoch=epoch)

    def told(self, policy: str, calls: int) -> None:
        """Pending calls were told of a refusal."""
        self.pending_told[policy] += calls

    def request(self, policy: str, method: bytes, status: int, session: bytes | None, seconds: float) -> None:
        """A request is done. `status` 0: the client left before it was answered."""
        name = METHODS.get(method, "other")
        self.requests[policy, name, status] += 1
        if not self._logs_requests:
            return
        log.info(
            "request.done",
            method=name,
            status=status,
            policy=policy,
            session=None if session is None else self.fingerprints.name(session),
            seconds=round(seconds, 6),
        )

    def upstream_failed(self, code: str, message: str) -> None:
        """The upstream gave no usable answer."""
        self.upstream_errors[code] += 1
        log.warning("upstream.failed", code=code, message=message)
