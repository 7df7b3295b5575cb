"""Logs on stderr by structlog: JSON lines, or lines for people."""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import threading
import traceback
from typing import Any

import msgspec
import structlog

from epochgate.settings import Log

_FRAMES = 5  # the innermost places of a fault that are told
BACKLOG = 1 << 20  # bytes of lines that wait to be written
END_WITHIN = 1.0  # s that the end waits for them

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Sink:
    """Writes lines in a thread of its own, so that nobody who has one to say waits for whoever reads them.

    Where too many wait, further ones are dropped, and it is said once how many. A full disk or a closed pipe loses
    lines. (The descriptor is shared with other processes, so it cannot be made to not block.)
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._size = 0  # of those that wait, and those that are being written
        self._lost = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, line: bytes | str) -> int:
        """Have a line written."""
        data = line if isinstance(line, bytes) else line.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._size + len(data) > BACKLOG:
                self._lost += 1
            else:
                if not self._lines:
                    self._changed.notify_all()
                self._lines.append(data)
                self._size += len(data)
        return len(line)

    def flush(self) -> None:
        """As a stream has it: nothing is waited for."""

    def end(self, within: float = END_WITHIN) -> None:
        """Wait until all is written, or so many s."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, within)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines, self._lines = self._lines, []
            data = b"".join(lines)
            self._write(data)
            with self._changed:
                self._size -= len(data)
                lost, self._lost = self._lost, 0
                self._changed.notify_all()
            if lost:
                log.warning("log.lost", lines=lost, remedy="what reads stderr does not keep up; look at it")

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another process has made it so
                    select.select([], [self._descriptor], [])
        except (OSError, ValueError):
            pass


_sinks: list[Sink] = []  # the one of this process


def end_logs() -> None:
    """What was logged is written, or it is not in a moment."""
    for sink in _sinks:
        sink.end()


class _Forward(logging.Handler):
    """What libraries log is a line like any other."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().partition("\n")[0]  # what follows shows objects, with what they hold (L7)
        log.log(record.levelno, "fault", source=record.name, message=message)


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
    if not _sinks:
        _sinks.append(Sink(None if sys.stderr is None else sys.stderr.fileno()))
        atexit.register(end_logs)
    sink: Any = _sinks[0]
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
        encoder = msgspec.json.Encoder(enc_hook=str)

        def encode(event: Any, **_: Any) -> bytes:
            return encoder.encode(event)

        structlog.configure(
            processors=[*shared, structlog.processors.JSONRenderer(serializer=encode)],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            logger_factory=structlog.BytesLoggerFactory(sink),
            cache_logger_on_first_use=True,
        )
    else:
        structlog.configure(
            processors=[*shared, structlog.dev.ConsoleRenderer(colors=sys.stderr is not None and sys.stderr.isatty())],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            logger_factory=structlog.WriteLoggerFactory(sink),
            cache_logger_on_first_use=True,
        )
    logging.getLogger("asyncio").addFilter(without_contents)
    logging.getLogger("redis").setLevel(logging.CRITICAL + 1)  # may quote what it sent; the ledger tells of failures
    logging.captureWarnings(capture=True)
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[_Forward()], force=True)
