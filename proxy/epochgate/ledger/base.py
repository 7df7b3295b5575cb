"""The protocol of a ledger. The relay works on the records that it gets here; a ledger keeps them, elsewhere too."""

from __future__ import annotations

from typing import Protocol

from epochgate.guard.record import Session


class Ledger(Protocol):
    """Sessions by id, bounded (L5). A session that it does not give is unknown, which is no reproach."""

    @property
    def key(self) -> bytes:
        """The key of all fingerprints, shared by all processes that share the ledger (L7)."""

    def get(self, session_id: bytes, now: float) -> Session | None:
        """The record that is at hand at `now` (s since 1970), without waiting; fenced sessions included."""

    async def find(self, session_id: bytes, now: float) -> Session | None:
        """The record, wherever it is kept. Never raises: a store that does not answer knows nothing."""

    def open(self, session_id: bytes, credentials: bytes, token: str | None, policy: str, now: float) -> Session:
        """A new epoch of this id (L1): what was recorded under it is void, a fence is lifted. `now` in s since 1970."""

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
