"""A policy as the guard reads it: the values of one entry of `policies`, ready for use on the hot path."""

from __future__ import annotations

import posixpath
import urllib.parse
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """What a policy does with the requests that it matches (section 9)."""

    ENFORCE = "enforce"
    OBSERVE = "observe"
    BYPASS = "bypass"


class Proof(StrEnum):
    """A reason to believe that resumed events belong to the session."""

    CONNECTION = "connection"
    EPOCH = "epoch"
    OVERLAP = "overlap"


class Unproven(StrEnum):
    """What becomes of a resume that nothing proves and nothing contradicts."""

    RESTART = "restart"
    RESUME = "resume"


class EventIds(StrEnum):
    """The order that event ids follow (E3)."""

    AUTO = "auto"
    CONSECUTIVE = "consecutive"
    INCREASING = "increasing"
    OPAQUE = "opaque"


class PendingCalls(StrEnum):
    """When the pending calls of a refused stream are told so (F4)."""

    ON_RETRY = "on-retry"
    AT_ONCE = "at-once"
    LEAVE = "leave"


class LiveChange(StrEnum):
    """What a token change on traffic that was not resumed does (R12)."""

    FENCE = "fence"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class MetaSource:
    """The epoch token is found under `key` in `params._meta`, `result._meta` or the message's own `_meta`."""

    key: str


@dataclass(frozen=True, slots=True)
class HeaderSource:
    """The epoch token is the value of a response header; `name` is in lower case."""

    name: bytes


Source = MetaSource | HeaderSource


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy. Times in seconds, sizes in bytes, header names in lower case. Defaults live in `settings`."""

    name: str
    path: str | None  # None: every path; else exact, or a prefix when it ends in "*"
    mode: Mode
    sources: tuple[Source, ...]
    instance_header: bytes | None
    session_ttl: float | None
    live_change: LiveChange
    credentials: tuple[bytes, ...]
    accept: frozenset[Proof]
    unproven: Unproven
    event_ids: EventIds
    first_event_timeout: float
    hold_time: float
    hold_bytes: int
    pending_calls: PendingCalls
    normalize_loss: bool
    keepalive: float  # silence after which a guarded stream gets a comment; 0: never

    def matches(self, path: str) -> bool:
        """Whether this policy is for `path`, as `normalize_path` returned it."""
        if self.path is None:
            return True
        if self.path.endswith("*"):
            return path.startswith(self.path[:-1])
        return path == self.path


def normalize_path(target: bytes) -> str:
    """The decoded, normalised path of a request target: no query, fragment, escapes, dot segments or double slashes.

    Policies are compared with this form only; the target itself is forwarded as it came (T3).
    """
    path = target.partition(b"#")[0].partition(b"?")[0]
    if not path.startswith(b"/"):  # absolute-form, or "*"
        _, found, rest = path.partition(b"://")
        path = b"/" + rest.partition(b"/")[2] if found else path
    text = urllib.parse.unquote(path.decode("latin-1"), errors="replace")
    if "//" not in text and "/." not in text:
        return text
    normal = posixpath.normpath("/" + text.lstrip("/"))
    return normal + "/" if text.endswith("/") and normal != "/" else normal
