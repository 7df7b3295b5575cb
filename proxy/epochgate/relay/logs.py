"""Logs on stderr by structlog: JSON lines, or lines for people."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import Any

import msgspec
import structlog

from epochgate.settings import Log

_FRAMES = 5  # the innermost places of a fault that are told


class _Sink:
    """A stream whose errors disturb nobody: a full disk or a closed pipe loses lines and never stops the traffic."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(data)
        return len(data)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def without_contents(record: logging.LogRecord) -> bool:
    """Of a fault, its kind and places alone: what an error says may quote the request (L7)."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        frames = reversed(traceback.extract_tb(error.__traceback__)[-_FRAMES:])
        places = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
        record.msg, record.args = f"a request could not be handled: {type(error).__name__} at {places}", ()
        record.exc_info = None
    return True


def set_up_logs(settings: Log, *, worker: int | None = None) -> None:
    """Write what is at least of the configured level, in the configured format. Times are UTC.

    With a number of a `worker` it is in each line.
    """
    text: Any = _Sink(sys.stderr)
    level = logging.getLevelNamesMapping()[settings.level.upper()]

    def name_worker(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["worker"] = worker
        return event

    shared: list[structlog.typing.Processor] = [
        *([] if worker is None else [name_worker]),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if settings.format == "json":
        binary: Any = _Sink(sys.stderr.buffer)
        encoder = msgspec.json.Encoder(enc_hook=str)

        def encode(event: Any, **_: Any) -> bytes:
            return encoder.encode(event)

        structlog.configure(
            processors=[*shared, structlog.processors.JSONRenderer(serializer=encode)],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            logger_factory=structlog.BytesLoggerFactory(binary),
            cache_logger_on_first_use=True,
        )
    else:
        structlog.configure(
            processors=[*shared, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            logger_factory=structlog.PrintLoggerFactory(text),
            cache_logger_on_first_use=True,
        )
    logging.getLogger("asyncio").addFilter(without_contents)
    logging.getLogger("redis").setLevel(logging.CRITICAL + 1)  # may quote what it sent; the ledger tells of failures
    logging.basicConfig(level=max(level, logging.WARNING), stream=text, format="%(name)s: %(message)s", force=True)
