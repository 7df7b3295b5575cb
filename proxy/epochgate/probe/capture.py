"""Audits a HAR capture: the traffic is played through the guard, entry by entry, as the proxy would have seen it.

A capture shows what the server answered to the client's own requests. It does not show what the proxy would have done
instead: a held connection could have served the resume (R4), or a rewound cursor could have given an overlap (R5).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from datetime import datetime

import msgspec

from epochgate.guard.fingerprint import Fingerprints
from epochgate.guard.judge import EMPTY_RESUMES, Cursor, Judge, is_refused
from epochgate.guard.mcp import Headers, holds_initialize_result, is_session_era, read_call, tokens_of
from epochgate.guard.policy import Mode, Policy, Proof
from epochgate.guard.record import Limits, Origin, Session, Stream
from epochgate.guard.sse import Block, Framer
from epochgate.guard.verdict import Kind, Reason, Verdict, unproven
from epochgate.guard.watch import Watch
from epochgate.probe.decision import FENCED, Decision, UnusableFileError

_LIMITS = Limits(streams=1 << 20, events=1 << 20)  # a capture is finite


class _Field(msgspec.Struct):
    name: str
    value: str


class _PostData(msgspec.Struct):
    text: str = ""


class _Content(msgspec.Struct):
    text: str = ""
    encoding: str = ""


class _Request(msgspec.Struct, rename="camel"):
    method: str
    url: str
    headers: list[_Field]
    post_data: _PostData | None = None


class _Response(msgspec.Struct):
    status: int
    headers: list[_Field]
    content: _Content


class _Entry(msgspec.Struct, rename="camel"):
    started_date_time: datetime
    time: float  # ms
    request: _Request
    response: _Response


class _Log(msgspec.Struct):
    entries: list[_Entry]


class _Har(msgspec.Struct):
    log: _Log


def audit_capture(data: bytes, policy_for: Callable[[str], Policy]) -> Iterator[Decision]:
    """Decide each resume of a HAR document; `policy_for` gives the policy for a URL.

    Raises:
        UnusableFileError: it is no HAR document.
    """
    try:
        har = msgspec.json.decode(data, type=_Har)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableFileError(f"no HAR document: {error}. Save the capture anew, with content") from None
    replay = _Replay(policy_for)
    entries = sorted(enumerate(har.log.entries, 1), key=lambda one: one[1].started_date_time)
    for number, entry in entries:
        decision = replay.play(f"entry {number}", entry)
        if decision is not None:
            yield decision


class _Replay:
    """The ledger of one capture."""

    def __init__(self, policy_for: Callable[[str], Policy]) -> None:
        self._policy_for = policy_for
        self._sessions: dict[str, Session] = {}
        self._left: dict[int, float] = {}  # when the connection of a stream ended
        self._names = Fingerprints(b"")

    def play(self, place: str, entry: _Entry) -> Decision | None:
        """Take the next exchange; returns the decision if it is a guarded resume that was granted a stream."""
        request, response = entry.request, entry.response
        version = _value(request.headers, "mcp-protocol-version")
        if not is_session_era(version.encode() if version is not None else None):
            return None
        policy = self._policy_for(request.url)
        if policy.mode is Mode.BYPASS:
            return None
        begin = entry.started_date_time.timestamp()
        end = begin + entry.time / 1000
        headers = [(field.name.encode(), field.value.encode()) for field in response.headers]
        body = _body(response.content)
        name = _value(request.headers, "mcp-session-id")
        cursor = _value(request.headers, "last-event-id")
        call = read_call((request.post_data.text if request.post_data else "").encode())
        if call.initialize:
            self._open(policy, response, headers, body, end)
            return None
        session = self._sessions.get(name or "")
        if request.method == "GET" and name and cursor:
            return self._resume(place, policy, name, cursor, response, headers, body, begin, end)
        if session is None:
            return None
        if not response.status:
            session.mark_boundary(end)
            return None
        session.note_gap(begin, policy.session_ttl)
        if response.status < 300:
            session.touch(end)
        if request.method == "DELETE" and response.status < 300:
            session.close(Reason.DELETED.value, end)
        elif _streams(response):
            origin = Origin.CALL if request.method == "POST" else Origin.STANDALONE
            stream = session.open_stream(origin, call.owes)
            watch = Watch(policy, session, headers, stream)
            for block in _blocks(body):
                watch.see(block, end)
            self._left[id(stream)] = end
        else:
            Watch(policy, session, headers).body(body)
        return None

    def _open(self, policy: Policy, response: _Response, headers: Headers, body: bytes, now: float) -> None:
        """L1: a session begins, or begins anew."""
        name = _value(response.headers, "mcp-session-id")
        blocks = _blocks(body) if _streams(response) else []
        held = any(block.data and holds_initialize_result(block.data) for block in blocks)
        if not name or response.status >= 300 or not (held or holds_initialize_result(body)):
            return
        session = self._sessions[name] = Session(name.encode(), b"", None, _LIMITS, now)
        if blocks:
            watch = Watch(policy, session, headers, session.open_stream(Origin.INITIALIZE))
            for block in blocks:
                watch.see(block, now)
        else:
            Watch(policy, session, headers).body(body)

    def _resume(
        self, place: str, policy: Policy, name: str, cursor: str, response: _Response, headers: Headers, body: bytes,
        begin: float, end: float,
    ) -> Decision | None:  # fmt: skip
        shown = self._names.name(name.encode())
        session = self._sessions.get(name)
        if session is None:
            return _decision(place, shown, policy, unproven(Reason.UNKNOWN_SESSION), 0)
        session.note_gap(begin, policy.session_ttl)
        found = session.locate(cursor.encode())
        pending = len(found[0].owes) if found else 0
        if session.fence is not None:
            return Decision(place, shown, None, FENCED, refused=True, pending=pending)
        if found is None:
            reason = Reason.UNKNOWN_CURSOR if session.delivered else Reason.STALE_CURSOR
            return self._fence(session, _decision(place, shown, policy, unproven(reason), 0), end)
        if not response.status:
            session.mark_boundary(end)
        untyped = 200 <= response.status < 300 and bool(body) and not _value(response.headers, "content-type")
        if not _streams(response) and not untyped:
            return None  # R6
        stream = found[0]
        verdict = _judge(Judge(policy, session, Cursor(*found)), policy, headers, body, end)
        if verdict is None:
            return None
        decision = _decision(place, shown, policy, verdict, pending, self._maybe(policy, stream, verdict, begin))
        self._left[id(stream)] = end
        return self._fence(session, decision, end)

    def _maybe(self, policy: Policy, stream: Stream, verdict: Verdict, begin: float) -> str:
        """Why the proxy could have decided otherwise, with what it would have asked."""
        away = begin - self._left.get(id(stream), begin)
        if Proof.CONNECTION in policy.accept and away <= policy.hold_time:
            return "unless the proxy still held the connection"
        if Proof.OVERLAP in policy.accept and verdict.reason in (Reason.NO_EPOCH, Reason.EPOCH_MISSING):
            return "unless the server repeats the cursor's own event when it is asked to"
        return ""

    def _fence(self, session: Session, decision: Decision, now: float) -> Decision:
        if decision.refused and not decision.maybe:
            session.close(decision.reason, now)
        return decision


def _decision(place: str, session: str, policy: Policy, verdict: Verdict, pending: int, maybe: str = "") -> Decision:
    refused = is_refused(verdict, policy)
    return Decision(place, session, verdict.kind, verdict.reason.value, refused, pending, maybe if refused else "")


def _judge(judge: Judge, policy: Policy, headers: Headers, body: bytes, now: float) -> Verdict | None:
    judge.tokens = tokens_of(policy.sources, headers)
    for block in _blocks(body):
        judge.check(block, now)
        if judge.verdict is not None and judge.verdict.kind is Kind.DIVERGENT:
            break
    if judge.verdict is None:
        judge.end_without_message(EMPTY_RESUMES + 1)
    return judge.verdict


def _blocks(body: bytes) -> list[Block]:
    return Framer(keep_data=len(body)).feed(body)


def _streams(response: _Response) -> bool:
    kinds = [field.value.lower() for field in response.headers if field.name.lower() == "content-type"]
    return 200 <= response.status < 300 and any("text/event-stream" in kind for kind in kinds)


def _body(content: _Content) -> bytes:
    if content.encoding != "base64":
        return content.text.encode()
    try:
        return base64.b64decode(content.text)
    except binascii.Error:
        return b""


def _value(fields: list[_Field], name: str) -> str | None:
    return next((field.value for field in fields if field.name.lower() == name), None)
