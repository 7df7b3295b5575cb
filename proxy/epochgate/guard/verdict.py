"""Verdicts, spelt once: these words are the labels of metrics, the values of logs and the `data.reason` of refusals."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from epochgate.guard.policy import Proof


class Kind(StrEnum):
    """What a resume is."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    DIVERGENT = "divergent"


class Reason(StrEnum):
    """Why."""

    # proven
    CONNECTION = "connection"
    EPOCH = "epoch"
    OVERLAP = "overlap"
    # divergent (R7)
    EPOCH_CHANGED = "epoch_changed"
    REPLAY_GAP = "replay_gap"
    REPLAY_MISMATCH = "replay_mismatch"
    FOREIGN_STREAM = "foreign_stream"
    FOREIGN_RESPONSE = "foreign_response"
    ID_GAP = "id_gap"
    ID_REWIND = "id_rewind"
    # unproven (R3, R8, R9, T8)
    UNKNOWN_SESSION = "unknown_session"
    UNKNOWN_CURSOR = "unknown_cursor"
    STALE_CURSOR = "stale_cursor"
    BOUNDARY = "boundary"
    EPOCH_MISSING = "epoch_missing"
    NO_EPOCH = "no_epoch"
    NO_PROOF = "no_proof"
    NO_EVENT = "no_event"
    UNREADABLE = "unreadable"
    # why a session is fenced without a verdict on a resume (N1, L6, the admin side)
    SESSION_LOST = "session_lost"
    DELETED = "deleted"
    FENCED_BY_OPERATOR = "fenced_by_operator"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about one resume. `expected` and `came` tell an operator why; they hold no secret."""

    kind: Kind
    reason: Reason
    proof: Proof | None = None
    expected: str = ""
    came: str = ""


def proven(proof: Proof) -> Verdict:
    """A proven resume: the reason is the proof."""
    return Verdict(Kind.PROVEN, Reason(proof.value), proof)


def unproven(reason: Reason) -> Verdict:
    """Nothing proves it, nothing contradicts it."""
    return Verdict(Kind.UNPROVEN, reason)


def divergent(reason: Reason, expected: str = "", came: str = "") -> Verdict:
    """Something contradicts it."""
    return Verdict(Kind.DIVERGENT, reason, None, expected, came)
