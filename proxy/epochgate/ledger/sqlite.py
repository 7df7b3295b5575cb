"""A file as the store (`sqlite:///path`), for one process. SQLite works in threads of its own, never on the event loop.

Session ids and event ids stand in the file as they are, since they are compared and sent again (R5): it is private to
its owner. Of credentials it has fingerprints only, and the key of these is in the file as well (L7).

A disk that is full keeps no fence. Should the process end before there is room again, the next one must not take what
the file has for all there was: a session in it may have been deleted. So a second, empty file beside it says that it is
whole. It is removed when a write fails, for which there is always room, and is back when all has been written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import TypeVar

import structlog

from epochgate.errors import ConfigurationError, StoreError
from epochgate.ledger.base import Written
from epochgate.ledger.state import NEVER, Change, Kept, KeptStream

PAGES_FREED = 2000  # pages given back to the file system at once
REMOVED_AT_ONCE = 500  # sessions; a longer step would keep writes waiting
SLACK = 16  # the limit of sessions is looked at when this part of it was added

T = TypeVar("T")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class SqliteStore:
    """See `Store`. It keeps `sessions` of either kind, live and fenced; the least recently active one goes first."""

    def __init__(self, path: str, *, sessions: int) -> None:
        self._path = Path(path)
        self._whole = Path(f"{path}-whole")
        self._most = sessions
        self._added = 0
        self._numbers: dict[bytes, tuple[int, str]] = {}  # by session id: the number and the life that is there
        self._run = 0  # the number of this run of the proxy; 0: not begun
        self._torn_until = 0  # what this run or an earlier one wrote last may lack its end: its process was killed
        self._void_until = 0  # of what this run or an earlier one wrote only fences count: some may be missing
        self._lock: int | None = None
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._writes = ThreadPoolExecutor(1, "ledger-write")
        self._reads = ThreadPoolExecutor(1, "ledger-read")

    async def open(self, key: bytes) -> bytes:
        """See `Store`."""
        if not self._path.parent.is_dir():
            raise ConfigurationError(f"store.url: {self._path.parent} is no directory; create it, or name another file")
        await self._call(self._reads, self._close_reader)
        return await self._call(self._writes, lambda: self._changing(lambda: self._open(key)))

    async def write(self, changes: Sequence[Change], removed: Sequence[bytes]) -> list[Written]:
        """See `Store`."""
        return await self._call(self._writes, lambda: self._changing(lambda: self._write(changes, removed)))

    async def read(self, session_id: bytes, life: str, head_rev: int, revs: dict[int, int]) -> Kept | None:  # noqa: ARG002
        """See `Store`. Nobody else writes: what is read is read whole."""
        return await self._call(self._reads, lambda: self._read(session_id))

    async def outage_at(self) -> float:
        """See `Store`."""
        return await self._call(self._writes, self._outage_at)

    async def keep_outage(self, at: float) -> None:
        """See `Store`. There is no other process."""
        await self._call(self._writes, lambda: self._changing(lambda: self._keep_outage(at)))

    async def caught_up(self) -> None:
        """See `Store`."""
        await self._call(self._writes, self._be_whole)

    async def tidy(self) -> None:
        """See `Store`."""
        while await self._call(self._writes, self._remove_expired):
            pass
        await self._call(self._writes, self._give_back)

    async def close(self, *, complete: bool) -> None:
        """See `Store`."""
        try:
            if not complete:
                await self._call(self._reads, self._lack)
            await self._call(self._reads, self._close_reader)
            await self._call(self._writes, lambda: self._close(complete=complete))
        finally:
            self._writes.shutdown(wait=False)
            self._reads.shutdown(wait=False)

    async def _call(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except (sqlite3.Error, OSError) as error:
            what = what_fails(error)
            raise StoreError(f"{self._path}: {what}; look at the space and the rights of its directory") from None

    # -- in the threads

    def _changing(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException:
            self._lack()
            raise

    def _lack(self) -> None:
        """The file lacks something that was recorded."""
        if self._lock is not None:  # else it is another process's
            self._whole.unlink(missing_ok=True)

    def _be_whole(self) -> None:
        os.close(os.open(self._whole, os.O_CREAT, 0o600))

    def _open(self, key: bytes) -> bytes:
        self._close_writer()
        self._take_lock()
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))
        writer = self._writer = self._connect()
        (version,) = writer.execute("PRAGMA user_version").fetchone()
        if not version:
            writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA foreign_keys = ON")
        self._migrate(writer, version)
        with _transaction(writer):
            writer.execute("INSERT OR IGNORE INTO meta VALUES ('key', ?)", (key,))
            run = self._run or self._begin_run(writer)
        if not self._run:
            self._run = run
            self._be_whole()
        (kept,) = writer.execute("SELECT value FROM meta WHERE name = 'key'").fetchone()
        return bytes(kept)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=1.0)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _take_lock(self) -> None:
        if self._lock is None:
            lock = os.open(f"{self._path}-lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise StoreError(f"{self._path}: another process uses it; end that one, or name another file") from None
            self._lock = lock

    def _migrate(self, writer: sqlite3.Connection, version: int) -> None:
        found = (entry for entry in resources.files("epochgate.ledger").iterdir() if entry.name.startswith("sqlite-"))
        steps = sorted(found, key=lambda entry: entry.name)
        if version > len(steps):
            raise ConfigurationError(
                f"store.url: {self._path} was written by a newer epochgate; run that one, or name another file"
            )
        for number, step in enumerate(steps[version:], version + 1):
            # One transaction, so that a kill leaves the file as it was before.
            writer.executescript(f"BEGIN IMMEDIATE;\n{step.read_text()}\nPRAGMA user_version = {number};\nCOMMIT;")

    def _begin_run(self, writer: sqlite3.Connection) -> int:
        names = "('run', 'ended', 'torn_until', 'void_until')"
        meta: dict[str, int] = dict(writer.execute(f"SELECT name, value FROM meta WHERE name IN {names}").fetchall())  # noqa: S608
        former = meta.get("run", 0)
        self._torn_until = former if meta.get("ended", 0) != former else meta.get("torn_until", 0)
        self._void_until = meta.get("void_until", 0)
        if former and not self._whole.exists():
            self._void_until = former
            log.warning(
                "store.incomplete",
                message=f"{self._path} lacks what was recorded last, when it could not be written",
                remedy="of the sessions in it only fences count, the others are unknown",
            )
        writer.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [("run", former + 1), ("torn_until", self._torn_until), ("void_until", self._void_until)],
        )
        return former + 1

    def _outage_at(self) -> float:
        found = self._opened().execute("SELECT value FROM meta WHERE name = 'outage_at'").fetchone()
        if found is None:
            return NEVER
        (at,) = found
        return at if isinstance(at, float) else time.time()  # garbage: it may have been one just now

    def _keep_outage(self, at: float) -> None:
        with _transaction(self._opened()):
            self._opened().execute("INSERT OR REPLACE INTO meta VALUES ('outage_at', ?)", (at,))

    def _write(self, changes: Sequence[Change], removed: Sequence[bytes]) -> list[Written]:
        writer = self._opened()
        rows = _Rows(self._run)
        try:
            with _transaction(writer):
                for session_id in removed:
                    writer.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
                    self._numbers.pop(session_id, None)
                outcomes = [self._write_one(writer, change, rows) for change in changes]
                rows.write(writer)
                if self._added * SLACK > self._most:
                    self._bound(writer)
        except BaseException:
            self._numbers.clear()
            raise
        return outcomes

    def _write_one(self, writer: sqlite3.Connection, change: Change, rows: _Rows) -> Written:
        number, life = self._numbers.get(change.session_id, (0, ""))
        if life != change.life:
            found = writer.execute("SELECT number, life FROM sessions WHERE id = ?", (change.session_id,)).fetchone()
            if found is not None and found[1] == change.life:
                number = found[0]
            elif not change.whole:
                return Written.STALE
            else:
                number = self._add(writer, change, found)
            self._numbers[change.session_id] = (number, change.life)
        rows.add(number, change)
        return Written.KEPT

    def _add(self, writer: sqlite3.Connection, change: Change, former: tuple[int, str] | None) -> int:
        if former is not None:
            writer.execute("DELETE FROM sessions WHERE number = ?", (former[0],))
        if len(self._numbers) > self._most * 2:
            self._numbers.clear()
        self._added += 1
        number = writer.execute(
            "INSERT INTO sessions (id, life, run, fenced, active_at, expires_at, head_rev, head)"
            " VALUES (?, ?, 0, 0, 0, 0, 0, x'')",
            (change.session_id, change.life),
        ).lastrowid
        assert number is not None
        return number

    def _bound(self, writer: sqlite3.Connection) -> None:
        """Sessions of former runs that nobody came back to give way to new ones."""
        self._added = 0
        self._numbers.clear()
        for fenced, count in writer.execute("SELECT fenced, count(*) FROM sessions GROUP BY fenced").fetchall():
            if count > self._most:
                writer.execute(
                    "DELETE FROM sessions WHERE number IN"
                    " (SELECT number FROM sessions WHERE fenced = ? ORDER BY active_at LIMIT ?)",
                    (fenced, count - self._most),
                )

    def _read(self, session_id: bytes) -> Kept | None:
        if self._reader is None:
            self._reader = self._connect()
        reader = self._reader
        reader.execute("BEGIN")
        try:
            session = reader.execute(
                "SELECT number, life, run, active_at, head_rev, head FROM sessions"
                " WHERE id = ? AND expires_at > ? AND (run > ? OR fenced)",
                (session_id, time.time(), self._void_until),
            ).fetchone()
            if session is None:
                return None
            number, life, run, active_at, head_rev, head = session
            blocks: dict[int, dict[int, bytes]] = {}
            for key, at, events in reader.execute(
                "SELECT stream, number, events FROM blocks WHERE session = ?", (number,)
            ):
                blocks.setdefault(key, {})[at] = events
            streams = {
                key: KeptStream(rev, state, blocks.get(key, {}))
                for key, rev, state in reader.execute(
                    "SELECT key, rev, state FROM streams WHERE session = ?", (number,)
                )
            }
        finally:
            reader.execute("ROLLBACK")
        return Kept(life, active_at, head_rev, head, streams, torn=run <= self._torn_until)

    def _remove_expired(self) -> bool:
        """Remove some of what is past its time; whether there may be more."""
        writer = self._opened()
        removed = writer.execute(
            "DELETE FROM sessions WHERE number IN (SELECT number FROM sessions WHERE expires_at <= ? LIMIT ?)",
            (time.time(), REMOVED_AT_ONCE),
        ).rowcount
        if removed:
            self._numbers.clear()
        return removed == REMOVED_AT_ONCE

    def _give_back(self) -> None:
        writer = self._opened()
        writer.executescript(f"PRAGMA incremental_vacuum({PAGES_FREED})")  # one step for each page: not by execute
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _close(self, *, complete: bool) -> None:
        try:
            if complete and self._writer is not None:
                with _transaction(self._writer):
                    self._writer.execute("INSERT OR REPLACE INTO meta VALUES ('ended', ?)", (self._run,))
        finally:
            self._close_writer()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _opened(self) -> sqlite3.Connection:
        if self._writer is None:
            raise StoreError(f"{self._path}: it is not open")
        return self._writer

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Rows:
    """The rows of a batch, table by table, so that few statements write them."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._sessions: list[tuple[object, ...]] = []
        self._streams: list[tuple[object, ...]] = []
        self._blocks: list[tuple[object, ...]] = []
        self._old_blocks: list[tuple[object, ...]] = []
        self._gone: list[tuple[object, ...]] = []

    def add(self, number: int, change: Change) -> None:
        """The rows of one session."""
        expires_at = time.time() + change.expires_in
        self._sessions.append((self._run, change.fenced, change.active_at, expires_at, change.head, number))
        for key, stream in change.streams.items():
            self._streams.append((number, key, stream.base + 1, stream.state))
            self._blocks += [(number, key, at, events) for at, events in stream.blocks.items()]
            if stream.oldest:
                self._old_blocks.append((number, key, stream.oldest))
        self._gone += [(number, key) for key in change.gone]

    def write(self, writer: sqlite3.Connection) -> None:
        """Write them."""
        for statement, rows in (
            (
                """UPDATE sessions SET run = ?, fenced = ?, active_at = ?, expires_at = ?,
                head_rev = head_rev + (?5 IS NOT NULL), head = COALESCE(?5, head) WHERE number = ?6""",
                self._sessions,
            ),
            ("INSERT OR REPLACE INTO streams VALUES (?, ?, ?, ?)", self._streams),
            ("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)", self._blocks),
            ("DELETE FROM blocks WHERE session = ? AND stream = ? AND number < ?", self._old_blocks),
            ("DELETE FROM streams WHERE session = ? AND key = ?", self._gone),
            ("DELETE FROM blocks WHERE session = ? AND stream = ?", self._gone),
        ):
            if rows:
                writer.executemany(statement, rows)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


_SQLITE = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "it cannot be read or written",
    sqlite3.SQLITE_READONLY: "it cannot be written",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_PERM: "it may not be opened",
    sqlite3.SQLITE_BUSY: "another program uses it",
    sqlite3.SQLITE_LOCKED: "another program uses it",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; move it away, and a new one is made",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite file; move it away, and a new one is made",
}


def what_fails(error: sqlite3.Error | OSError) -> str:
    """What is wrong with a file of SQLite's, or with its directory."""
    if isinstance(error, OSError):
        return os.strerror(error.errno).lower() if error.errno else type(error).__name__
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return _SQLITE.get(code, f"it cannot be used ({getattr(error, 'sqlite_errorname', type(error).__name__)})")
