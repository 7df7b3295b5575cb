"""The guard for a client: does a resumed stream still belong to the session that the client opened?

Usable alone, without the proxy: no I/O, no clock, only the standard library. An MCP client that reads its own streams
captures the epoch token at `initialize` and, after every reconnect with `Last-Event-ID`, asks `resume_or_restart` about
the first event that comes. This is the strict rule of the proxy (R7, R8 and E3 `consecutive`): no epoch, no resume.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from epochgate.guard.eventids import Order, successor_fault

Token = int | str
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = 60  # characters of a value that an error message repeats


@dataclass(frozen=True, slots=True)
class SessionEpoch:
    """What a client captured at `initialize`: the session's id, and its epoch token (`None`: the server gave none)."""

    session_id: str
    epoch: Token | None


class StreamResumeDivergence(RuntimeError):  # noqa: N818  the name that clients know
    """A resumed event does not provably belong to the session. The message names what was expected and what came."""


def validate_resumed_event(
    observed_epoch: SessionEpoch | Token | None,
    first_resumed_event: Mapping[str, object],
    last_seen_event_id: Token,
) -> None:
    """Return if the first event after a resume continues the session and the stream; raise if not.

    Args:
        observed_epoch: what `initialize` gave, whole or the token alone. Tokens are compared as text: `1` equals `"1"`.
        first_resumed_event: a mapping with `id` (the event's SSE id) and `_meta` (a mapping with `session_epoch`).
        last_seen_event_id: the cursor that was sent as `Last-Event-ID`.

    Raises:
        StreamResumeDivergence: no epoch was captured, the event carries none, the epochs differ, or the event's id is
            not exactly the last plus one. Malformed input of any shape is divergence too, never another exception.
    """
    expected = _text(observed_epoch.epoch if isinstance(observed_epoch, SessionEpoch) else observed_epoch)
    if expected is None:
        raise StreamResumeDivergence(
            "no session epoch was captured at initialize: nothing can prove that the resumed stream is the same session"
        )
    if not isinstance(first_resumed_event, Mapping):
        raise StreamResumeDivergence(
            f"expected an event with an id and session epoch {_show(expected)}, got {_show(first_resumed_event)}"
        )
    meta = first_resumed_event.get("_meta")
    token = meta.get("session_epoch") if isinstance(meta, Mapping) else None
    got = _text(token)
    if got is None:
        raise StreamResumeDivergence(
            f"expected session epoch {_show(expected)} on the first resumed event, got no epoch "
            f"(_meta is {_show(meta)})"
        )
    if got != expected:
        raise StreamResumeDivergence(
            f"expected session epoch {_show(expected)} on the first resumed event, got {_show(got)}: "
            "the session was created anew"
        )
    last, new = _event_id(last_seen_event_id), _event_id(first_resumed_event.get("id"))
    if last is None or new is None or successor_fault(Order.CONSECUTIVE, last, new, lambda _: False):
        raise StreamResumeDivergence(
            f"expected the event id that is {_show(last_seen_event_id)} plus one, "
            f"got {_show(first_resumed_event.get('id'))}"
        )


def resume_or_restart(
    observed_epoch: SessionEpoch | Token | None,
    first_resumed_event: Mapping[str, object],
    last_seen_event_id: Token,
) -> Literal["resume", "restart"]:
    """`"resume"` if `validate_resumed_event` accepts the event, else `"restart"`: initialize anew, call again."""
    try:
        validate_resumed_event(observed_epoch, first_resumed_event, last_seen_event_id)
    except StreamResumeDivergence:
        return "restart"
    return "resume"


def _event_id(value: object) -> bytes | None:
    """An event id as its bytes; `None` if it is none. A minus sign would pass for the prefix of a number."""
    text = None if isinstance(value, int) and value < 0 else _text(value)
    return None if text is None else text.encode(errors="surrogatepass")


def _text(value: object) -> str | None:
    """A token or an id as text; `None` if it is neither an integer nor a text with something in it."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return str(value)
        except ValueError:  # more digits than Python converts
            return None
    return None


def _show(value: object) -> str:
    """A value for an error message: short whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # more digits than Python converts
        return f"an enormous {type(value).__name__}"
