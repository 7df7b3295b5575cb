"""The protocol of a ledger. The relay works on the records that it gets here; a ledger keeps them, elsewhere too."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from epochgate.guard.record import Session
from epochgate.ledger.messages import Offer
from epochgate.ledger.state import Change, Kept


@dataclass(frozen=True, slots=True)
class Resume:
    """Which stream is resumed, and by whom; without a cursor it is a new standalone stream.

    `find` adds what other processes offer, where `serves` says that it can be used.
    """

    cursor: bytes
    credentials: bytes
    serves: bool = field(default=False, compare=False)
    offers: list[Offer] = field(default_factory=list, compare=False)


class Ledger(Protocol):
    """Sessions by id, bounded (L5). A session that it does not give is unknown, which is no reproach."""

    @property
    def key(self) -> bytes:
        """The key of all fingerprints, shared by all processes that share the ledger (L7)."""

    @property
    def kept(self) -> bool:
        """Whether what is recorded outlives the process."""

    def get(self, session_id: bytes, now: float) -> Session | None:
        """The record that is at hand at `now` (s since 1970), without waiting; fenced sessions included."""

    async def find(self, session_id: bytes, now: float, resume: Resume | None = None) -> Session | None:
        """The record, wherever it is kept. Never raises: a store that does not answer knows nothing.

        For a resume what other processes have recorded counts as well, and is waited for a moment. What they hold of
        the stream they offer, or let go of.
        """

    def open(self, session_id: bytes, credentials: bytes, token: str | None, policy: str, now: float) -> Session:
        """A new epoch of this id (L1): what was recorded under it is void, a fence is lifted. `now` in s since 1970."""

    def spread(self, session: Session) -> Awaitable[None] | None:
        """Until what was recorded so far of a session is kept where it is needed, or a moment has passed.

        A fence has to outlive the process; where there are other processes, they have to know the rest as well. None:
        there is nothing to wait for.
        """

    def sessions(self) -> list[Session]:
        """The records at hand, for the admin side."""

    async def start(self) -> None:
        """Begin to work. Raises StoreError where that cannot be."""

    async def flush(self) -> None:
        """Wait until all that was recorded is kept."""

    async def close(self) -> None:
        """Flush and end."""

    @property
    def problem(self) -> str | None:
        """Why records are not kept right now, for readiness; None if all is well."""


class Written(Enum):
    """What became of a change."""

    KEPT = "it is kept"
    STALE = "nothing was written: what the store has is something else; read it, and write again"


class Store(Protocol):
    """Where a `KeptLedger` keeps its records. Every call may raise StoreError, and then may have worked or not."""

    async def open(self, key: bytes) -> bytes:
        """Begin, again after a failure. Returns the key of all fingerprints: the one that is kept, or else `key`.

        Raises ConfigurationError for what does not get better by waiting.
        """

    async def write(self, changes: Sequence[Change], removed: Sequence[bytes]) -> list[Written]:
        """Write changes, each in one step, and remove sessions. Says for each change what became of it."""

    async def read(self, session_id: bytes, life: str, head_rev: int, revs: dict[int, int]) -> Kept | None:
        """A session, without the streams that are unchanged since these revisions of this epoch (`life`).

        Raises ValueError where what is there is no session.
        """

    async def outage_at(self) -> float:
        """When the upstream had its last outage of which the store was told (s since 1970), -inf: none."""

    async def keep_outage(self, at: float) -> None:
        """Keep it, unless a later one is there, for longer than any record; other processes hear of it."""

    async def caught_up(self) -> None:
        """After failures: all that was recorded is kept."""

    async def tidy(self) -> None:
        """Remove what is past its time; called once a minute or so."""

    async def close(self, *, complete: bool) -> None:
        """End. `complete`: all was written; otherwise the last of what is kept may be missing."""
