"""What the tests of the guard have in common: policies, messages as a server writes them, and a session on stage."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from epochgate.guard.judge import Cursor, Judge, Step
from epochgate.guard.mcp import Headers, tokens_of
from epochgate.guard.policy import HeaderSource, MetaSource, Policy, Proof, Unproven
from epochgate.guard.record import Limits, Origin, Session, Stream
from epochgate.guard.sse import Block, Framer
from epochgate.guard.watch import Watch
from epochgate.settings import PolicySettings

META = MetaSource("session_epoch")
HEADER = HeaderSource(b"mcp-session-epoch")
ALL_PROOFS = frozenset(Proof)
STRICT = frozenset({Proof.CONNECTION, Proof.EPOCH})

Told = tuple[str | None, bytes]  # an event: its own id (None: no `id` line) and its data


DEFAULTS = PolicySettings().compiled()


def policy(**changes: Any) -> Policy:
    """The defaults of section 10, with changes."""
    return replace(DEFAULTS, **changes)


TOO_DEEP = b'{"result":' + b"[" * 100_000 + b"]" * 100_000 + b',"_meta":{"session_epoch":1}}'
LENIENT = {"unproven": Unproven.RESUME}
OVERLAP = {"accept": ALL_PROOFS}


def note(text: object, epoch: object = None) -> bytes:
    """A notification; with an epoch token in its `params._meta`."""
    params: dict[str, object] = {"level": "info", "data": text}
    if epoch is not None:
        params["_meta"] = {"session_epoch": epoch}
    return json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": params}).encode()


def result(request: int | str, epoch: object = None) -> bytes:
    """The response to a request."""
    body: dict[str, object] = {"value": str(request)}
    if epoch is not None:
        body["_meta"] = {"session_epoch": epoch}
    return json.dumps({"jsonrpc": "2.0", "id": request, "result": body}).encode()


def batch(*messages: bytes) -> bytes:
    return b"[" + b",".join(messages) + b"]"


def sse(name: str | None, data: bytes) -> bytes:
    """One block as a server writes it."""
    head = b"" if name is None else b"id: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def blocks(*told: Told | bytes) -> list[Block]:
    """The blocks of one connection; bytes are taken as they are."""
    framer = Framer(keep_raw=1 << 20)
    return framer.feed(b"".join(item if isinstance(item, bytes) else sse(*item) for item in told))


def notes(*names: object, epoch: object = None) -> list[Told]:
    """One notification under each id, which says its id."""
    return [(str(name), note(str(name), epoch)) for name in names]


class Scene:
    """A session as the relay keeps it: time goes on by one second with each block."""

    def __init__(self, *, epoch: object = 1, limits: Limits | None = None, **changes: Any) -> None:
        self.policy = policy(**changes)
        self.now = 1000.0
        token = None if epoch is None else str(epoch)
        self.session = Session(b"s-1", b"owner", token, limits or Limits(streams=8, events=1024), self.now)

    def call(self, *owes: int | str) -> Stream:
        return self.session.open_stream(Origin.CALL, owes, b"owner")

    def standalone(self) -> Stream:
        return self.session.open_stream(Origin.STANDALONE, (), b"owner")

    def live(self, stream: Stream, *told: Told | bytes, headers: Headers = ()) -> bool:
        """Un-resumed traffic of a stream; whether it shows another epoch (R12)."""
        watch = Watch(self.policy, self.session, headers, stream)
        changed = False
        for block in blocks(*told):
            self.now += 1
            changed = watch.see(block, self.now) or changed
        return changed

    def resume(self, cursor: str, *, headers: Headers = (), **changes: Any) -> "Resume":
        found = self.session.locate(cursor.encode())
        assert found is not None
        judge = Judge(self.policy, self.session, Cursor(*found), **changes)
        return Resume(self, judge, headers)

    def resume_unknown(self, verdict: Any, *, headers: Headers = ()) -> "Resume":
        judge = Judge(self.policy, self.session, None, verdict=verdict)
        judge.open()
        return Resume(self, judge, headers)

    def outage(self) -> float:
        """The upstream refuses a connection now."""
        self.now += 1
        return self.now


class Resume:
    """One resume: what its judge makes of the blocks that come."""

    def __init__(self, scene: Scene, judge: Judge, headers: Headers) -> None:
        self.scene = scene
        self.judge = judge
        judge.tokens = tokens_of(scene.policy.sources, headers)

    def feed(self, *told: Told | bytes) -> list[Step]:
        steps: list[Step] = []
        for block in blocks(*told):
            self.scene.now += 1
            steps.append(self.judge.check(block, self.scene.now))
            if steps[-1] is Step.REFUSE:
                break
        return steps

    def released(self, *told: Told) -> list[str | None]:
        """The ids of the blocks that go to the client, up to a refusal."""
        steps = self.feed(*told)
        return [item[0] for item, step in zip(told, steps, strict=False) if step is Step.RELEASE]

    @property
    def outcome(self) -> str:
        """The verdict in two words."""
        verdict = self.judge.verdict
        return "none" if verdict is None else f"{verdict.kind} {verdict.reason}"


def outcome(scene: Scene, cursor: str, told: Sequence[Told | bytes], **changes: Any) -> str:
    """The verdict on a resume that brings these blocks."""
    resume = scene.resume(cursor, **changes)
    resume.feed(*told)
    return resume.outcome
