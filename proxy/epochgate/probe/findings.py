"""What a probe can find, and what each finding means to an operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


def plain(text: str) -> str:
    """A line without what a terminal would obey: the server, or whoever wrote the file, chose some of it."""
    return "".join(character for character in text if character.isprintable())


class Level(StrEnum):
    """How much a finding matters."""

    GOOD = "good"
    NOTE = "note"  # worth to know, no risk by itself
    RISK = "risk"
    UNKNOWN = "unknown"  # could not be found out, and it matters


class Check(StrEnum):
    """The questions, in the order of the report."""

    PROTOCOL = "protocol"
    SESSION = "session id"
    MISSING = "no session id"
    UNKNOWN = "unknown session"
    DELETED = "deleted session"
    ANSWERS = "answers"
    EVENT_IDS = "event ids"
    PRIMING = "priming and retry"
    EPOCH = "epoch token"
    REPLAY = "replay"
    RECONNECT = "reconnect in a call"
    UNKNOWN_CURSOR = "unknown cursor"
    FOREIGN_CURSOR = "cursor of another session"
    AFTER_DELETE = "resume after DELETE"
    SECOND_GET = "second GET"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Meaning:
    """The level of an outcome, what it means and what follows from it."""

    level: Level
    meaning: str
    follows: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer to one question: the outcome, and what exactly was seen, without secrets.

    The check and the outcome are a key of `meanings.MEANINGS`.
    """

    check: Check
    outcome: str
    seen: str


@dataclass(slots=True)
class Facts:
    """What the policy is derived from, apart from the outcomes."""

    server: str = ""
    meta_keys: list[str] = field(default_factory=list)  # where an epoch token was seen
    token_headers: list[str] = field(default_factory=list)
    id_form: str = ""  # such as `<uuid>_<n>_<text>`
    polling: bool = False  # a stream was closed before its response
