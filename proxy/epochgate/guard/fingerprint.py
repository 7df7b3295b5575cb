"""Keyed fingerprints: how secrets are compared and shown without being kept (L7)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from epochgate.guard.mcp import Headers


class Fingerprints:
    """Fingerprints under one key. Processes that share a ledger share the key, and so the fingerprints."""

    __slots__ = ("_credentials", "_names")

    def __init__(self, key: bytes) -> None:
        self._names = hashlib.blake2b(key=key, digest_size=6, person=b"epochgate-name")
        self._credentials = hashlib.blake2b(key=key, digest_size=16, person=b"epochgate-cred")

    def name(self, secret: bytes) -> str:
        """A session id or an event id as logs and pages may show it: 12 hex digits."""
        digest = self._names.copy()
        digest.update(secret)
        return digest.hexdigest()

    def credentials(self, headers: Headers, names: Sequence[bytes]) -> bytes:
        """The caller's credentials: 16 bytes over the fields `names` (lower case) in the order that they came in.

        A request without any of them gives the empty string: callers without credentials are all the same caller.
        """
        found = [(lower, value) for name, value in headers if (lower := name.lower()) in names]
        if not found:
            return b""
        digest = self._credentials.copy()
        for name, value in sorted(found, key=lambda field: field[0]):  # stable: repeated fields keep their order
            digest.update(b"%d:%b%d:%b" % (len(name), name, len(value), value))
        return digest.digest()
