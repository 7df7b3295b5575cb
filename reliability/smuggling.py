"""The part of the run that sends what two servers could read differently, and answers with it.

The cases are in `smuggling.yaml`; each is sent whole and byte by byte, by raw sockets, through a proxy process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from reliability.part import Figure, Options, Part
from reliability.served import serving
from reliability.strict import Message, UnclearError, read_answer, read_request

PATIENCE = 10.0  # s that one case may take
LINGER = 0.05  # s that the upstream leaves a connection open after an odd answer whose end is that of the connection

CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
AFTER = b"GET /after HTTP/1.1\r\nHost: a\r\n\r\n"
OURS = {400, 501, 505}
EVIL = b"evil"


def load() -> dict[str, dict[str, list[bytes]]]:
    """The cases of each group: the bytes, and for plain ones the body."""
    groups = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        group: {
            name: [text.encode("latin-1") for text in (case if isinstance(case, list) else [case])]
            for name, case in cases.items()
        }
        for group, cases in groups.items()
    }


@dataclass(slots=True)
class Upstream:
    """Reads strictly, answers each request with its target, and `/case` with the odd answer."""

    odd: bytes = b""
    lingers: bool = False  # after the odd answer it goes on for a while
    requests: list[Message] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            await self._answer_all(reader, writer)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        except UnclearError as error:
            self.faults.append(f"the upstream got {error}")
        finally:
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unread, patience = b"", None
        while data := await asyncio.wait_for(reader.read(1 << 16), patience):
            self.received += data
            unread += data
            while (found := read_request(unread)) is not None:
                request, end = found
                unread = unread[end:]
                self.requests.append(request)
                if request.target == b"/case":
                    writer.write(self.odd)
                    if not self.lingers:
                        return
                    patience = PATIENCE if is_whole(self.odd, request.method) else LINGER
                    continue
                body = b"" if request.method == b"HEAD" else request.target
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(request.target), body))


def is_whole(odd: bytes, method: bytes) -> bool:
    """Whether an answer has an end of its own, or is none at all: the proxy waits for no more of it."""
    at, status = 0, 0
    try:
        while status < 200:
            found = read_answer(odd, at, method=method, ended=False)
            if found is None:
                return False
            status, at = found[0].status, found[1]
    except UnclearError:
        pass
    return True


async def ask(address: tuple[str, int], pieces: Iterable[bytes]) -> bytes:
    """Send this on a connection of its own, half-close, and read to the end. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(*address)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with contextlib.suppress(ConnectionError):  # a refusal may come before all is sent
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write_eof()
            received = b""
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    received += data
            return received
        finally:
            writer.close()


def answers_in(received: bytes, methods: list[bytes]) -> list[Message]:
    """The final answers, strictly; interim ones are passed over. Raises UnclearError."""
    answers: list[Message] = []
    at = 0
    while at < len(received):
        method = methods[len(answers)] if len(answers) < len(methods) else b"GET"
        found = read_answer(received, at, method=method, ended=True)
        if found is None:
            raise UnclearError(f"half an answer {received[at : at + 60]!r}")
        answer, at = found
        if answer.status >= 200:
            answers.append(answer)
    return answers


class Table:
    """Plays all cases against one proxy; `wrong` is what did not hold, in words."""

    def __init__(self, address: tuple[str, int], upstream: Upstream) -> None:
        self.played = 0
        self.wrong: list[str] = []
        self._address = address
        self._upstream = upstream

    async def play(self, groups: dict[str, dict[str, list[bytes]]]) -> None:
        """Requests first, then answers."""
        for name, (data,) in groups["refused"].items():
            await self._both(name, data, self._refused)
        for name, (body,) in groups["broken bodies"].items():
            await self._both(name, CHUNKED + body, self._refused)
        for name, (data, body) in groups["plain"].items():
            await self._both(name, data + AFTER, self._plain, body)
        for group, judge in (("bad", self._bad), ("one", self._one), ("broken", self._broken), ("head", self._head)):
            method = b"HEAD" if group == "head" else b"GET"
            for name, (odd,) in groups[f"{group} answers"].items():
                for lingers in (False, True):
                    self._upstream.odd, self._upstream.lingers = odd, lingers
                    request = method + b" /case HTTP/1.1\r\nHost: a\r\n\r\n" + (AFTER if lingers else b"")
                    await self._one_case(f"{group} answer: {name}", [request], judge, odd)

    async def _both(self, name: str, data: bytes, judge: object, *more: bytes) -> None:
        await self._one_case(name, [data], judge, *more)
        await self._one_case(f"{name}, byte by byte", (data[at : at + 1] for at in range(len(data))), judge, *more)

    async def _one_case(self, name: str, pieces: Iterable[bytes], judge: object, *more: bytes) -> None:
        upstream = self._upstream
        upstream.requests.clear()
        upstream.faults.clear()
        upstream.received.clear()
        self.played += 1
        try:
            received = await ask(self._address, pieces)
            answers = answers_in(received, [request.method for request in upstream.requests])
            wrong = judge(answers, *more) or next(iter(upstream.faults), "")
            honest = answers_in(await ask(self._address, [AFTER.replace(b"after", b"honest")]), [b"GET"])
            if [answer.body for answer in honest] != [b"/honest"]:
                wrong = wrong or f"somebody else got {honest}"
        except TimeoutError:
            wrong = "no end"
        except UnclearError as error:
            wrong = f"the client got {error}"
        if wrong:
            self.wrong.append(f"{name}: {wrong}")

    def _refused(self, answers: list[Message]) -> str:
        if self._upstream.requests or EVIL in self._upstream.received:
            return f"forwarded {bytes(self._upstream.received)!r}"
        statuses = [answer.status for answer in answers]
        return "" if len(statuses) == 1 and statuses[0] in OURS else f"answered {statuses}"

    def _plain(self, answers: list[Message], body: bytes) -> str:
        requests = self._upstream.requests
        if [answer.status for answer in answers] != [200, 200]:
            return f"answered {[answer.status for answer in answers]}"
        if len(requests) != 2 or requests[0].body != body or requests[1].target != b"/after":
            return f"the upstream got {requests}"
        return ""

    def _bad(self, answers: list[Message], _: bytes) -> str:
        return self._then_after(answers) or ("" if answers[0].status == 502 else f"passed on {answers[0]}")

    def _one(self, answers: list[Message], odd: bytes) -> str:
        for start in (b"HTTP/2.0 200 OK\r\n", b"HTTP/1.1 200\r\n"):  # tolerated, and put right
            odd = odd.replace(start, b"HTTP/1.1 200 \r\n")
        at, status = 0, 0
        while status < 200:  # what follows the first is nobody's
            found = read_answer(odd, at, method=b"GET", ended=True)
            assert found is not None
            expected, at = found
            status = expected.status
        same = (answers[0].status, answers[0].body) == (expected.status, expected.body)
        return self._then_after(answers) or ("" if same and answers[0].complete else f"passed on {answers[0]}")

    def _broken(self, answers: list[Message], _: bytes) -> str:
        if len(answers) != 1 or answers[0].complete or not b"okay".startswith(answers[0].body):
            return f"passed on {answers}"
        return ""

    def _head(self, answers: list[Message], _: bytes) -> str:
        return self._then_after(answers) or ("" if answers[0].status == 200 else f"passed on {answers[0]}")

    def _then_after(self, answers: list[Message]) -> str:
        """The request behind the odd answer, if there was one, got its own, and no more came."""
        if [answer.body for answer in answers[1:]] != [b"/after"] * self._upstream.lingers:
            return f"answered {answers}"
        return ""


async def play_all(work: Path) -> tuple[Table, list[str]]:
    """All cases through one proxy; and what it complained of."""
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    try:
        with serving(server.sockets[0].getsockname(), work, "smuggling") as served:
            table = Table(served.address, upstream)
            await table.play(load())
            return table, served.complaints()
    finally:
        server.close()


def run(options: Options) -> list[Figure]:
    """Rows of the page; the long form is the same as the short one."""
    start = time.monotonic()
    table, complaints = asyncio.run(play_all(options.work))
    took = time.monotonic() - start
    for line in table.wrong:
        print(f"    {line[:600]}", flush=True)
    groups = load()
    requests = sum(len(groups[group]) for group in ("refused", "broken bodies", "plain"))
    odd = sum(len(cases) for cases in groups.values()) - requests
    return [
        Figure(
            "requests, whole and byte by byte",
            f"{requests} cases",
            "refused, or forwarded in the plain form",
            holds=not table.wrong,
        ),
        Figure(
            "answers, with a quick and a late end", f"{odd} cases", "502, or one clear answer", holds=not table.wrong
        ),
        Figure(
            "desynchronised, or otherwise wrong",
            f"{len(table.wrong)} of {table.played} in {took:.0f} s",
            "none",
            holds=not table.wrong,
        ),
        Figure("errors in the proxy's log", str(len(complaints)), "none", holds=not complaints),
    ]


PART = Part(
    name="smuggling",
    title="Request and response smuggling",
    about="""
A table of messages that two servers could read differently (`reliability/smuggling.yaml`): lengths and transfer
codings in every combination and disguise, folds, bare CR and LF, NULs and other control characters, chunk sizes and
extensions, trailers that frame, odd request and status lines; bodies that look like requests, answers with another
answer behind them. A request is refused and its connection closed, or forwarded in one plain form, of which the
upstream, a strict reader, sees as many requests as the proxy answers. An answer becomes a 502, one clear answer, or a
broken end; the next request of that client, and one of another client, get their own answers.
""",
    run=run,
)
