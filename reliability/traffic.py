"""Clients that check what they get against the truth: one execution, no event missing, none twice, no vain refusal.

A client opens a session, reads streams, breaks off and resumes with `Last-Event-ID`, calls in between, and starts over
when it is told to. A *wrong verdict* is an event of another execution on its stream, an event missing or repeated, or
the refusal of a session that is as healthy as ever and could have been proven.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from reliability.truth import Session, TrueServer
from reliability.wire import Wire

BACK_AFTER = (0.02, 0.1)  # s until a client comes back
UNPROVEN = frozenset({"no_epoch", "no_proof", "no_event", "boundary"})  # what a session without epochs may be told
FENCED_FOR = 0.3  # s after a refusal; then the fence is looked at
HELD_FOR = 2.0  # s for which a stream surely waits for its client
CONTEST = 1.0  # s in which a second resume of one stream counts as a rival's


class TroubleError(Exception):
    """An ask came to nothing; the client comes back."""


class End(Enum):
    """How a client's reading of a stream ended."""

    COMPLETE = "its response has come"
    BROKEN = "it is to be resumed"
    REFUSED = "the client has to start over"


@dataclass(frozen=True, slots=True)
class Ways:
    """What a client does, and how often. Times in s; the means of random ones."""

    cut_every: float = 3.0
    call_every: float = 1.0
    patience: float = 4.0  # for an answer, or a sign of life on a stream
    streams: int = 4  # in one session
    linger: tuple[float, float] = BACK_AFTER


@dataclass(slots=True)
class Tally:
    """What happened."""

    events: int = 0
    opened: int = 0
    cuts: int = 0
    resumes: int = 0
    calls: int = 0
    lost_patience: int = 0
    fences_seen: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)  # refusals of healthy sessions that nothing could prove
    statuses: Counter[int] = field(default_factory=Counter)  # other than 200 and 404
    # The last sessions that were refused: when, path, id and reason.
    fenced: deque[tuple[float, str, str, str]] = field(default_factory=lambda: deque(maxlen=50))
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Voyage:
    """One stream as its client sees it."""

    standalone: bool
    cursor: str = ""
    last: int = 0
    life: int = 0
    resumed: bool = False
    resumed_at: float = 0.0  # when it was last resumed
    got_at: float = 0.0  # when its last event came
    left_at: float = 0.0  # when its connection ended


@dataclass(frozen=True, slots=True)
class Refusal:
    """A client is told to start over. `held`: the server still had the stream's connection when it was resumed."""

    agent: Agent
    session: Session
    reason: str
    voyage: Voyage | None
    held: bool


Excuse = Callable[[Refusal], bool]


def excuse_unproven(refusal: Refusal) -> bool:
    """What the policy allows where nothing is wrong with a session: it has no epochs, and its stream is not held."""
    return refusal.session.epoch is None and refusal.reason in UNPROVEN and not refusal.held


class Agent:
    """One client. `excuse` says whether a healthy session may have been refused."""

    def __init__(
        self,
        port: Callable[[], int],
        truth: TrueServer,
        tally: Tally,
        ways: Ways,
        *,
        seed: int,
        excuse: Excuse,
        in_doubt: Callable[[float], bool],
        fenced_for: float,
    ) -> None:
        self._port = port
        self._truth = truth
        self._tally = tally
        self._ways = ways
        self._excuse = excuse
        self._in_doubt = in_doubt
        self._fenced_for = fenced_for
        self._chance = random.Random(seed)
        self.plain = self._chance.random() < 0.25
        self.path = "/plain" if self.plain else "/epoch"
        self.session_id = ""
        self.opened_at = 0.0
        self.progress_at = time.time()  # when it last got what it asked for
        self._refused = False
        self._refused_at = 0.0
        self._reason = ""
        self._voyage: Voyage | None = None  # the stream that it reads
        self._wire: Wire | None = None  # for calls
        self._reading: Wire | None = None

    async def run(self, after: float = 0.0) -> None:
        """Until it is cancelled; it comes after so many s."""
        try:
            await asyncio.sleep(after)
            self.progress_at = time.time()
            while True:
                if await self._try(self._open()):
                    await self._use_session()
                else:
                    await self._pause()
        finally:
            for wire in (self._wire, self._reading):
                if wire is not None:
                    wire.close()

    def cut(self) -> None:
        """Break off what it reads."""
        if self._reading is not None:
            self._reading.close()

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.uniform(*self._ways.linger))

    async def _try(self, work: Any) -> Any:
        """The outcome, None where it came to nothing."""
        try:
            async with asyncio.timeout(self._ways.patience):
                return await work
        except (TroubleError, OSError):
            return None
        except TimeoutError:
            self._tally.lost_patience += 1
            return None

    @property
    def _fields(self) -> dict[str, str]:
        return {
            "Mcp-Session-Id": self.session_id,
            "MCP-Protocol-Version": "2025-06-18",
            "Accept": "text/event-stream, application/json",
        }

    # -- sessions

    async def _open(self) -> bool:
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {}}
        wire = await Wire.to(self._port())
        try:
            status = await wire.ask("POST", self.path, {"Accept": "application/json"}, json.dumps(body).encode())
            self._check_status(status)
            await wire.read_all()
        finally:
            wire.close()
        self.session_id = wire.fields["mcp-session-id"]
        self.opened_at = self.progress_at = time.time()
        self._refused = False
        self._tally.opened += 1
        return True

    async def _use_session(self) -> None:
        chatting = asyncio.create_task(self._chat())
        try:
            for _ in range(self._ways.streams):
                if not await self._use_stream() or self._refused:
                    break
            else:
                await self._try(self._delete())
        finally:
            chatting.cancel()
            await asyncio.gather(chatting, return_exceptions=True)
        await self._check_fence()
        self._truth.retire(self.session_id)

    async def _delete(self) -> None:
        wire = await Wire.to(self._port())
        try:
            await wire.ask("DELETE", self.path, self._fields)
        finally:
            wire.close()

    async def _check_fence(self) -> None:
        """F2: a session that was refused stays refused. One without a record is refused alone (R3)."""
        session = self._truth.sessions.get(self.session_id)
        if not self._refused or self._chance.random() > 0.3 or session is None or self._reason == "unknown_session":
            return
        if session.lost_at is not None and time.time() - session.lost_at > self._fenced_for:
            return  # who hears of it late, while a stream goes on (F6), may find the fence past its time
        await asyncio.sleep(FENCED_FOR)
        answer = await self._try(self._ask_once("POST", _call(9, "tools/list")))
        if answer is not None and answer[0] in (200, 404) and not self._in_doubt(self._refused_at):
            self._tally.fences_seen += 1
            if answer[0] == 200:
                self._wrong("a session that was refused is served again")

    async def _chat(self) -> None:
        """Calls beside the stream, on a connection that is kept."""
        number = 100
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / self._ways.call_every))
            number += 1
            answer = await self._try(self._call(number))
            if answer is None and self._wire is not None:
                self._wire.close()
                self._wire = None
            elif answer == 404:
                self.cut()
                return

    async def _call(self, number: int) -> int:
        if self._wire is None or not self._wire.usable:
            self._wire = await Wire.to(self._port())
        status = await self._wire.ask("POST", self.path, self._fields, _call(number, "tools/list"))
        body = await self._wire.read_all()
        if status == 200:
            message = json.loads(body)
            if message["id"] != number:
                self._wrong(f"a call got the answer of another one: {message}")
            self._tally.calls += 1
            return 200
        if status == 404:
            self._take_refusal(body, self._voyage, held=False)  # the resume of its stream may have been refused first
            return 404
        self._check_status(status)
        return status

    async def _ask_once(self, method: str, body: bytes) -> tuple[int, bytes]:
        wire = await Wire.to(self._port())
        try:
            return await wire.ask(method, self.path, self._fields, body), await wire.read_all()
        finally:
            wire.close()

    # -- streams

    async def _use_stream(self) -> bool:
        """One stream to its end; False if the session is over before."""
        voyage = self._voyage = Voyage(standalone=self._chance.random() < 0.3)
        enough = self._chance.randint(60, 120)  # events of a stream that does not end by itself
        while not self._refused:
            end = await self._read(voyage)
            if end is End.REFUSED:
                return False
            if end is End.COMPLETE or (voyage.standalone and voyage.last > enough):
                return True
            await self._pause()
        return False

    async def _read(self, voyage: Voyage) -> End:
        """One connection of a stream, until it ends or is cut."""
        fields, held = self._fields, False
        if voyage.cursor:
            fields["Last-Event-ID"] = voyage.cursor
            held = self._is_held(voyage)
            now = time.time()
            if now - voyage.resumed_at < CONTEST or now - voyage.left_at > HELD_FOR:
                held = False
            voyage.resumed, voyage.resumed_at = True, now
            self._tally.resumes += 1
            request = ("GET", b"")
        else:
            request = ("GET", b"") if voyage.standalone else ("POST", _call(1, "tools/call"))
        wire = await self._try(self._ask(fields, *request))
        if wire is None:
            return End.BROKEN
        self._reading = wire
        try:
            if wire.status == 404:
                self._take_refusal(await self._try(wire.read_all()) or b"", voyage, held=held)
                return End.REFUSED
            cut_at = time.time() + self._chance.expovariate(1 / self._ways.cut_every)
            return await self._take_events(wire, voyage, cut_at, held=held)
        except ConnectionError:
            return End.BROKEN
        finally:
            wire.close()
            self._reading = None
            voyage.left_at = time.time()

    async def _ask(self, fields: dict[str, str], method: str, body: bytes) -> Wire:
        wire = await Wire.to(self._port())
        try:
            self._check_status(await wire.ask(method, self.path, fields, body))
        except BaseException:
            wire.close()
            raise
        return wire

    def _check_status(self, status: int) -> None:
        if status not in (200, 404):
            self._tally.statuses[status] += 1
            if status not in (502, 503, 504):
                self._wrong(f"an answer that nobody gave: {status}")
            raise TroubleError

    def _is_held(self, voyage: Voyage) -> bool:
        """Whether the stream's connection between proxy and server still stands."""
        session = self._truth.sessions.get(self.session_id)
        stream = None if session is None else session.streams.get(voyage.cursor.partition("-")[0])
        return stream is not None and stream.reader is not None

    async def _take_events(self, wire: Wire, voyage: Voyage, cut_at: float, *, held: bool) -> End:
        unfinished = b""
        while True:
            left = cut_at - time.time()
            try:
                async with asyncio.timeout(max(min(left, self._ways.patience), 0.001)):
                    data = await wire.read()
            except TimeoutError:
                if left <= self._ways.patience:
                    self._tally.cuts += 1
                else:
                    self._tally.lost_patience += 1
                return End.BROKEN
            if not data:
                return End.BROKEN  # an end without the response that was owed
            *blocks, unfinished = (unfinished + data).split(b"\n\n")
            for block in blocks:
                end = self._take_event(block, voyage, held=held)
                if end is not None:
                    return end

    def _take_event(self, block: bytes, voyage: Voyage, *, held: bool) -> End | None:
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
        if b"data" not in fields:
            return None
        message = json.loads(fields[b"data"])
        if "error" in message:
            self._take_refusal(fields[b"data"], voyage, held=held)
            return End.REFUSED
        said = message.get("result") or message["params"]
        how = "after a resume" if voyage.resumed else "on a stream that was not resumed"
        if voyage.life and said["life"] != voyage.life:
            self._wrong(f"SPLICED {how}: execution {said['life']} after {voyage.life} at event {said['n']}")
        if said["n"] != voyage.last + 1:
            self._wrong(f"event {said['n']} after {voyage.last} {how}")
        voyage.life, voyage.last, voyage.cursor = said["life"], said["n"], fields[b"id"].decode()
        self.progress_at = voyage.got_at = time.time()
        self._tally.events += 1
        return End.COMPLETE if "result" in message else None

    # -- being refused

    def _take_refusal(self, body: bytes, voyage: Voyage | None, *, held: bool) -> None:
        reason = "cut off"
        with contextlib.suppress(ValueError, KeyError):
            reason = json.loads(body)["error"]["data"]["reason"]
        already, self._refused = self._refused, True
        self.progress_at = self._refused_at = time.time()
        if already:
            return
        self._reason = reason
        self._tally.refusals[reason] += 1
        self._tally.fenced.append((self.progress_at, self.path, self.session_id, reason))
        session = self._truth.sessions.get(self.session_id)
        if session is None or not session.healthy:
            return
        refusal = Refusal(self, session, reason, voyage, held)
        if self._excuse(refusal):
            self._tally.excused[reason] += 1
        else:
            self._wrong(f"a healthy session was refused: {reason}{', though its stream was held' if held else ''}")

    def _wrong(self, what: str) -> None:
        self._tally.wrong.append(f"{time.time():.3f} {self.path} {self.session_id}: {what}")


def _call(number: int, method: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": {}}).encode()
