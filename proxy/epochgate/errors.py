"""Every exception of the product: whose fault it is, and the HTTP status that fits."""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """Who has to act."""

    CLIENT = "client"
    UPSTREAM = "upstream"
    PROXY = "proxy"
    STORE = "store"
    OPERATOR = "operator"


class EpochgateError(Exception):
    """The base of all. `code` is a stable word for logs and metrics, `status` the HTTP status for a client."""

    fault = Fault.PROXY
    code = "internal"
    status = 502


class BadRequestError(EpochgateError):
    """A request that cannot be forwarded without ambiguity."""

    fault = Fault.CLIENT
    code = "bad_request"
    status = 400

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class NoRoomError(EpochgateError):
    """What has to be read cannot be kept now (`limits.copies`). That says nothing of the session."""

    code = "no_room"
    status = 503


class UpstreamError(EpochgateError):
    """The upstream gave no usable answer (T7)."""

    fault = Fault.UPSTREAM
    code = "upstream_failed"
    status = 502
    detail = ""


class UpstreamRefusedError(UpstreamError):
    """No connection could be made: a boundary signal. `detail` is for the operator: it may name the upstream."""

    code = "upstream_refused"

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class UpstreamResetError(UpstreamError):
    """The connection ended before the answer was complete. `fresh`: a new one, before any answer: a boundary signal."""

    code = "upstream_reset"

    def __init__(self, message: str, *, fresh: bool = False) -> None:
        super().__init__(message)
        self.fresh = fresh


class UpstreamFramingError(UpstreamError):
    """What the upstream sent is not HTTP/1.1, or its head is too large."""

    code = "upstream_framing"


class UpstreamTimeoutError(UpstreamError):
    """No connection within `connect_timeout`, or silence longer than `idle_timeout` before the head."""

    code = "upstream_timeout"
    status = 504


class ConfigurationError(EpochgateError):
    """The configuration cannot be used. The message has one problem a line, each with file, line and key."""

    fault = Fault.OPERATOR
    code = "configuration"


class StoreError(EpochgateError):
    """The store did not answer, or what it answered cannot be used."""

    fault = Fault.STORE
    code = "store"


def told(error: Exception) -> str:
    """What may be said of any error: of one that is not ours its kind alone."""
    if isinstance(error, EpochgateError):
        return str(error)
    return "no answer in time" if isinstance(error, TimeoutError) else f"it failed ({type(error).__name__})"
