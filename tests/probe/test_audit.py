"""`epochgate audit`: what a policy would have decided about recorded resumes."""

from __future__ import annotations

import base64
import json
import pathlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from epochgate.errors import ConfigurationError
from epochgate.probe.audit import main

START = datetime(2026, 1, 1, tzinfo=UTC)


def opened(session: str, *, epoch: bool) -> dict[str, Any]:
    return {"event": "session.opened", "session": session, "policy": "mcp", "epoch": epoch}


def decided(session: str, verdict: str, reason: str, **more: Any) -> dict[str, Any]:
    proof = reason if verdict == "proven" else None
    line = {"event": "resume.decided", "session": session, "cursor": "c1", "verdict": verdict, "reason": reason}
    return line | {"proof": proof, "enforced": True, "policy": "mcp", "pending": 1, "expected": "", "came": ""} | more


@dataclass
class Audit:
    path: pathlib.Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> dict[str, Any]:
        assert main([str(self.path), "--json", *arguments]) == 0
        found: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        return found

    def one(self, *arguments: str) -> tuple[str, str, bool]:
        """What became of the last resume: its reason, whether it is refused, whether it may be otherwise."""
        last = self(*arguments)["resumes"][-1]
        return last["reason"], "refused" if last["refused"] else "resumed", bool(last["maybe"])


@pytest.fixture
def audit(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Audit:
    return Audit(tmp_path / "recorded", capsys)


def write_log(audit: Audit, *lines: dict[str, Any]) -> None:
    audit.path.write_text("not json\n" + "".join(json.dumps(line) + "\n" for line in lines))


STRICT = ("--accept", "epoch")
LENIENT = ("--unproven", "resume")
OVERLAP = ("--accept", "connection,epoch,overlap")
RECORDED_ALL = ("--recorded-accept", "connection,epoch,overlap")


@pytest.mark.parametrize(
    ("line", "options", "expected"),
    [
        (("divergent", "epoch_changed"), LENIENT, ("epoch_changed", "refused", False)),
        (("proven", "epoch"), STRICT, ("epoch", "resumed", False)),
        (("proven", "connection"), (), ("connection", "resumed", False)),
        (("proven", "connection"), STRICT, ("no_proof", "refused", False)),
        (("proven", "epoch"), ("--accept", "connection"), ("no_proof", "refused", False)),
        (("proven", "epoch"), ("--accept", "overlap"), ("no_proof", "refused", True)),
        (("proven", "overlap"), (), ("no_proof", "refused", False)),
        (("unproven", "no_epoch"), (), ("no_epoch", "refused", False)),
        (("unproven", "no_epoch"), OVERLAP, ("no_epoch", "refused", True)),
        (("unproven", "no_epoch"), (*OVERLAP, *RECORDED_ALL), ("no_epoch", "refused", False)),
        (("unproven", "boundary"), OVERLAP, ("boundary", "refused", False)),
        (("unproven", "no_proof"), ("--recorded-accept", ""), ("no_proof", "refused", True)),
        (("unproven", "no_epoch"), LENIENT, ("no_epoch", "resumed", False)),
        (("unproven", "unknown_cursor"), OVERLAP, ("unknown_cursor", "refused", False)),
        (("unproven", "stale_cursor"), (), ("stale_cursor", "resumed", False)),
    ],
)  # fmt: skip
def test_a_verdict_is_decided_anew(
    audit: Audit, line: tuple[str, str], options: tuple[str, ...], expected: tuple[str, str, bool]
) -> None:
    """R8 under another `accept` and `unproven`; what the log cannot tell is said to be unsure."""
    write_log(audit, opened("s", epoch=False), decided("s", *line))
    assert audit.one(*options) == expected


def test_what_is_not_known_of_the_epoch_is_unsure(audit: Audit) -> None:
    """A held connection was taken before any token was looked at."""
    write_log(audit, decided("s", "proven", "connection"))
    assert audit.one(*STRICT) == ("no_proof", "refused", True)
    write_log(audit, opened("s", epoch=True), decided("s", "proven", "connection"))
    assert audit.one(*STRICT) == ("no_proof", "refused", True)


def test_an_observing_proxy_holds_no_connection(audit: Audit) -> None:
    """Section 9: what `connection` would have proven, the log of `observe` cannot tell."""
    write_log(audit, decided("s", "unproven", "no_epoch", enforced=False))
    assert audit.one() == ("no_epoch", "refused", True)
    assert audit.one(*STRICT) == ("no_epoch", "refused", False)


def test_a_refused_session_stays_fenced_and_its_calls_count_once(audit: Audit) -> None:
    """F2: in the log of `observe` such a session goes on; under the policy it does not, until it is opened anew."""
    write_log(
        audit,
        decided("s", "divergent", "replay_gap", enforced=False),
        decided("s", "proven", "epoch", enforced=False),
        decided("s", "proven", "epoch", enforced=False, cursor="c2"),
        opened("s", epoch=True),
        decided("s", "proven", "epoch", enforced=False),
        decided("t", "unproven", "unknown_session", pending=0),
        decided("t", "unproven", "unknown_session", pending=0),
    )
    found = audit()
    assert [one["reason"] for one in found["resumes"]] == [
        "replay_gap", "fenced", "fenced", "epoch", "unknown_session", "unknown_session",
    ]  # fmt: skip
    assert found["sum"] == {"resumed": 1, "refused": 5, "unsure": 0, "rerun": 2, "rerun_unsure": 0}


def test_the_text_names_policy_place_reason_and_sum(audit: Audit, capsys: pytest.CaptureFixture[str]) -> None:
    """For a reader."""
    write_log(audit, decided("a1", "proven", "connection"), decided("b2", "unproven", "no_epoch", enforced=False))
    assert main([str(audit.path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "policy mcp: accept [connection, epoch], unproven restart",
        "line 2: session a1: resumed (proven, connection)",
        (
            "line 3: session b2: refused (unproven, no_epoch), 1 calls to run again; "
            "unless proven by connection, which the log does not tell"
        ),
        (
            "2 resumes: 1 resumed, 1 refused, 1 of all could have gone the other way; "
            "1 calls would have been run again, 1 of them perhaps not."
        ),
    ]


def test_the_policy_is_chosen_by_name(audit: Audit, tmp_path: pathlib.Path) -> None:
    """`--config`: the policy with the name in the log, else the first."""
    config = tmp_path / "c.yaml"
    config.write_text(
        "upstream: {url: http://h}\npolicies: [{name: a, resume: {unproven: resume}}, {name: mcp, match: {path: /mcp}}]"
    )
    write_log(audit, decided("s", "unproven", "no_epoch"), decided("t", "unproven", "no_epoch", policy="gone"))
    found = audit("--config", str(config))["resumes"]
    assert [one["refused"] for one in found] == [True, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", 'no line with "event": "resume.decided"'),
        ('{"event": "request.done"}', 'no line with "event": "resume.decided"'),
        ('{"log": {"entries": []}}', "no resume"),
        ('{"log": {"entries": [{}]}}', "no HAR document"),
    ],
)
def test_what_cannot_be_audited_is_named(
    audit: Audit, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, with the file and the remedy."""
    if text is not None:
        audit.path.write_text(text)
    assert main([str(audit.path)]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert str(audit.path) in errors


def test_bad_options_are_named(audit: Audit, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown proof, and a configuration without policies."""
    with pytest.raises(SystemExit):
        main([str(audit.path), "--accept", "hope"])
    assert "expected a list of connection, epoch, overlap" in capsys.readouterr().err
    config = tmp_path / "c.yaml"
    config.write_text("upstream: {url: http://h}\npolicies: []")
    with pytest.raises(ConfigurationError, match="the list is empty"):
        main([str(audit.path), "--config", str(config)])


# -- HAR captures


@dataclass
class Capture:
    """Writes a HAR document, an exchange a second."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    gap: float = 1.0
    at: float = 0.0

    def exchange(
        self, method: str, request: dict[str, str], body: Any = None, status: int = 200, answer: Any = "",
        kind: str = "text/event-stream", *, session: str = "", url: str = "http://h/mcp", encoded: bool = False,
        **headers: str,
    ) -> None:  # fmt: skip
        text = answer if isinstance(answer, str) else json.dumps(answer)
        content = (
            {"text": base64.b64encode(text.encode()).decode(), "encoding": "base64"} if encoded else {"text": text}
        )
        granted = {"Content-Type": kind} | ({"Mcp-Session-Id": session} if session else {}) | headers
        self.entries.append(
            {
                "startedDateTime": (START + timedelta(seconds=self.at)).isoformat(),
                "time": 100,
                "request": {
                    "method": method, "url": url, "headers": fields(request),
                    **({"postData": {"text": json.dumps(body)}} if body is not None else {}),
                },
                "response": {"status": status, "headers": fields(granted), "content": content},
            }
        )  # fmt: skip
        self.at += self.gap

    def open(self, session: str = "s1", epoch: int | None = 1, *, streamed: bool = False) -> None:
        meta = {} if epoch is None else {"_meta": {"session_epoch": epoch}}
        answer: Any = {"jsonrpc": "2.0", "id": 0, "result": {"protocolVersion": "2025-11-25"} | meta}
        message = {"jsonrpc": "2.0", "id": 0, "method": "initialize"}
        if streamed:
            self.exchange("POST", {}, message, answer=f"id: i\ndata: {json.dumps(answer)}\n\n", session=session)
        else:
            self.exchange("POST", {}, message, answer=answer, kind="application/json", session=session)

    def call(self, text: str, session: str = "s1", **more: Any) -> None:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
        self.exchange("POST", {"Mcp-Session-Id": session}, message, answer=text, **more)

    def resume(self, text: str, cursor: str = "2", session: str = "s1", **more: Any) -> None:
        self.exchange("GET", {"mcp-session-id": session, "last-event-id": cursor}, answer=text, **more)

    def write(self, audit: Audit) -> Audit:
        audit.path.write_text(json.dumps({"log": {"version": "1.2", "entries": self.entries}}))
        return audit


def fields(headers: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in headers.items()]


def events(*numbers: int, epoch: int | None = 1, say: str = "") -> str:
    meta = {} if epoch is None else {"_meta": {"session_epoch": epoch}}
    message = {"jsonrpc": "2.0", "method": "notifications/message"}
    return "".join(
        f"id: {n}\ndata: {json.dumps(message | {'params': {'n': n, 'say': say} | meta})}\n\n" for n in numbers
    )


@pytest.fixture(params=[False, True], ids=["json", "streamed"])
def capture(request: pytest.FixtureRequest) -> Capture:
    made = Capture(gap=100.0)  # longer than a connection is held
    made.open(streamed=request.param)
    made.call(events(1, 2))
    return made


@pytest.mark.parametrize(
    ("resumed", "expected"),
    [
        (events(3, 4), ("epoch", "resumed", False)),
        (events(3, 4, epoch=2), ("epoch_changed", "refused", False)),
        (events(3) + events(4, epoch=2), ("epoch_changed", "refused", False)),
        (events(3, epoch=None), ("epoch_missing", "refused", False)),
        (events(2, say="else"), ("replay_mismatch", "refused", False)),
        ("data: {}", ("no_event", "refused", False)),
    ],
)
def test_a_resume_in_a_capture_is_judged(
    audit: Audit, capture: Capture, resumed: str, expected: tuple[str, str, bool]
) -> None:
    """R7, R8, R9, R11: by the guard itself. The incident of section 1 is the third."""
    capture.resume(resumed)
    assert capture.write(audit).one() == expected
    assert audit()["sum"]["rerun"] == (1 if expected[1] == "refused" else 0)


@pytest.mark.parametrize(
    ("status", "kind"), [(203, "text/event-stream"), (200, "text/plain, Text/Event-Stream"), (200, "")]
)
def test_a_stream_is_what_a_client_reads_as_one(audit: Audit, capture: Capture, status: int, kind: str) -> None:
    """R6: whatever its status and label say."""
    capture.resume(events(3, epoch=2), status=status, kind=kind)
    assert capture.write(audit).one() == ("epoch_changed", "refused", False)


def test_overlap_and_boundaries_in_a_capture(audit: Audit) -> None:
    """An inclusive replay proves itself, unless the server was away; else the proxy would have asked for it."""
    capture = Capture(gap=100.0)
    capture.open(epoch=None)
    capture.call(events(1, 2, epoch=None))
    capture.resume(events(2, 3, epoch=None))
    assert capture.write(audit).one(*OVERLAP) == ("overlap", "resumed", False)
    assert audit.one() == ("no_epoch", "refused", False)
    capture.entries.pop()
    capture.resume(events(3, epoch=None))
    assert capture.write(audit).one(*OVERLAP) == ("no_epoch", "refused", True)
    capture.entries.pop()
    capture.call("", status=0, kind="")
    capture.resume(events(2, 3, epoch=None))
    assert capture.write(audit).one(*OVERLAP) == ("boundary", "refused", False)


def test_a_held_connection_is_not_in_a_capture(audit: Audit) -> None:
    """R4: within `hold.time` the proxy could have served the resume by itself."""
    capture = Capture(gap=1.0)
    capture.open(epoch=None)
    capture.call(events(1, 2, epoch=None))
    capture.resume(events(3, epoch=None))
    assert capture.write(audit).one() == ("no_epoch", "refused", True)
    assert audit.one(*STRICT) == ("no_epoch", "refused", False)


def test_cursors_and_sessions_that_are_not_on_record(audit: Audit, capture: Capture) -> None:
    """R3, L6, F2: unknown session, unknown cursor (which fences), stale cursor, deleted session."""
    capture.resume(events(3), session="other")
    capture.resume(events(3), cursor="elsewhere")
    capture.resume(events(3))
    capture.open("s2")
    capture.resume(events(9), cursor="from before", session="s2")
    capture.open("s3")
    capture.call(events(1, 2), session="s3")
    capture.exchange("DELETE", {"mcp-session-id": "s3"}, status=204, kind="")
    capture.resume(events(3), session="s3")
    found = capture.write(audit)()["resumes"]
    assert [(one["reason"], one["refused"]) for one in found] == [
        ("unknown_session", True),
        ("unknown_cursor", True),
        ("fenced", True),
        ("stale_cursor", False),
        ("fenced", True),
    ]


def test_what_is_no_guarded_resume_is_passed_over(audit: Audit, capture: Capture, tmp_path: pathlib.Path) -> None:
    """S1, R6, L1: refusals of the server, the modern era, other traffic, initialize without a session, `bypass`."""
    capture.resume("", status=404, kind="application/json")
    capture.resume("", status=0, kind="")
    capture.exchange("GET", {"mcp-session-id": "s1", "last-event-id": "2", "mcp-protocol-version": "2026-07-28"})
    capture.exchange("GET", {}, answer="<h1>", kind="text/html")
    capture.exchange("POST", {}, {"jsonrpc": "2.0", "id": 0, "method": "initialize"}, status=400)
    capture.call(json.dumps({"jsonrpc": "2.0", "id": 1, "result": {}}), kind="application/json")
    capture.resume(events(3, 4), encoded=True)
    assert len(capture.write(audit)()["resumes"]) == 1
    config = tmp_path / "c.yaml"
    config.write_text("upstream: {url: http://h}\npolicies: [{name: a, match: {path: /mcp}, mode: bypass}]")
    assert main([str(audit.path), "--config", str(config)]) == 2


def test_content_that_cannot_be_decoded_says_nothing(audit: Audit, capture: Capture) -> None:
    """A damaged capture does not end the audit."""
    capture.resume(events(3))
    capture.entries[-1]["response"]["content"] = {"text": "a", "encoding": "base64"}
    assert capture.write(audit).one() == ("no_event", "refused", False)


def test_a_file_that_is_nested_deep_or_counts_backwards_is_read_as_far_as_it_goes(audit: Audit) -> None:
    deep = b'{"event": "resume.decided", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    lines = [decided("s1", "divergent", "epoch_changed"), decided("s2", "divergent", "epoch_changed", pending=-5)]
    audit.path.write_bytes(b"\n".join([deep, *(json.dumps(line).encode() for line in lines)]))
    assert audit()["sum"]["rerun"] == 1
    audit.path.write_bytes(deep)
    assert main([str(audit.path)]) == 2
    audit.path.write_bytes(b'{"log": {"entries": ' + b"[" * 5000 + b"]" * 5000 + b"}}")
    assert main([str(audit.path)]) == 2


def test_text_from_the_file_moves_no_terminal_and_forges_no_line(
    audit: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(audit, decided("s\x1b[2J\n0 resumes\u202e", "proven", "epoch"))
    assert main([str(audit.path)]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 3
    assert not {"\x1b", "\u202e"} & set(shown)
