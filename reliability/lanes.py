"""A raw-socket client and a raw-socket upstream that play one exchange after the other, directly or through a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from reliability.exchanges import Answer, Asked, Exchange
from reliability.strict import Message, UnclearError, read_answer, read_head, read_request

PATIENCE = 15.0  # s that one exchange may take

Address = tuple[str, int]


@dataclass(slots=True)
class Play:
    """What each side received. `faults`: what was not as it should, in words."""

    requests: list[Message] = field(default_factory=list)
    interims: list[list[Message]] = field(default_factory=list)
    answers: list[Message] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def pieces(data: bytes, choose: Random, *, split: bool) -> list[bytes]:
    """The bytes, cut at random places where asked for."""
    if not split or len(data) < 2:
        return [data] if data else []
    cuts = sorted(choose.randrange(1, len(data)) for _ in range(choose.choice((1, 2, 5, 20))))
    return [piece for piece in (data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)) if piece]


class Upstream:
    """Answers the requests of the exchange that is being played, in their order, whatever connection they come on."""

    def __init__(self) -> None:
        self.address: Address
        self._exchange: Exchange
        self._play = Play()
        self._choose = Random(0)
        self._next = 0
        self._server: asyncio.Server

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.address = self._server.sockets[0].getsockname()

    async def close(self) -> None:
        self._server.close()

    def begin(self, exchange: Exchange, play: Play, choose: Random) -> None:
        self._exchange, self._play, self._choose, self._next = exchange, play, choose, 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self._answer_all(reader, writer)
        except ConnectionError:
            pass
        except UnclearError as error:
            self._play.faults.append(f"the upstream cannot read {error}")
        except asyncio.CancelledError:
            pass  # the run is over
        finally:
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unread = b""
        while True:
            while (head := read_head(unread, is_request=True)) is None:
                data = await reader.read(1 << 16)
                if not data:
                    if unread:
                        self._play.faults.append(f"half a head: {unread[:100]!r}")
                    return
                unread += data
            play, exchange, at = self._play, self._exchange, self._next
            self._next += 1
            if at >= len(exchange.answers):
                play.faults.append(f"a request too many: {head.start!r}")
                return
            answer = exchange.answers[at]
            if answer.refuses:
                play.requests.append(Message(head.start, head.fields, b"", "expected"))
                await self._write(writer, answer, head.start)
                return
            if exchange.asked[at].waits:
                await self._send(writer, b"HTTP/1.1 100 Continue\r\n\r\n")
            while (found := read_request(unread)) is None:
                data = await reader.read(1 << 18)
                if not data:
                    play.faults.append(f"half a request: {head.start!r}")
                    return
                unread += data
            request, end = found
            unread = unread[end:]
            play.requests.append(request)
            if await self._write(writer, answer, request.start, continued=exchange.asked[at].waits):
                return

    async def _write(
        self, writer: asyncio.StreamWriter, answer: Answer, start: bytes, *, continued: bool = False
    ) -> bool:
        """Write an answer as this request has to be answered; whether the connection ends with it."""
        http11, is_head = start.endswith(b"HTTP/1.1"), start.startswith(b"HEAD ")
        interims = answer.interims[1:] if continued else answer.interims
        data = b"".join(interims) if http11 else b""
        fields, wire, closes = list(answer.fields), answer.wire, answer.closes
        if answer.framing == "chunked" and not http11:  # as every server does
            fields = [line for line in fields if not line.lower().startswith(b"transfer-encoding")]
            wire, closes = answer.plain, True
            fields.append(b"Connection: close")
        data += b"\r\n".join([answer.start, *fields, b"", b""])
        if not is_head:
            data += wire[: max(0, len(wire) - answer.cut)] if answer.cut else wire
        await self._send(writer, data)
        return closes

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for piece in pieces(data, self._choose, split=self._exchange.split):
            writer.write(piece)
            await writer.drain()
            if self._exchange.split:
                await asyncio.sleep(self._choose.random() * 0.004 if self._exchange.slow else 0)


class Client:
    """Sends the requests of one exchange to an address, and reads their answers."""

    def __init__(self, address: Address, exchange: Exchange, play: Play, choose: Random) -> None:
        self._address = address
        self._exchange = exchange
        self._play = play
        self._choose = choose
        self._unread = b""
        self._ended = True  # no connection, or one that carries no more
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                asked = self._exchange.asked
                if self._exchange.pipelined:
                    await self._connect()
                    sending = asyncio.ensure_future(self._send(b"".join(one.head + one.body for one in asked)))
                    try:
                        for one in asked:
                            await self._read(one)
                    finally:
                        sending.cancel()
                        await asyncio.gather(sending, return_exceptions=True)
                else:
                    for one in asked:
                        await self._ask(one)
                await self._leave()
        except TimeoutError:
            self._play.faults.append(f"no end after {PATIENCE} s")
        except (UnclearError, ConnectionError) as error:
            self._play.faults.append(f"the client: {error!r}")
        finally:
            if self._writer is not None:
                self._writer.close()

    async def _ask(self, asked: Asked) -> None:
        if self._ended:
            await self._leave()
            await self._connect()
        if not asked.waits:
            sending = asyncio.ensure_future(self._send(asked.head + asked.body))
        else:
            await self._send(asked.head)
            if not await self._is_continued(asked):
                await self._read(asked)
                self._ended = True
                return
            sending = asyncio.ensure_future(self._send(asked.body))
        try:
            await self._read(asked)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        self._ended = self._ended or asked.closes

    async def _is_continued(self, asked: Asked) -> bool:
        """Wait for the first answer: whether it is a 100."""
        while (head := read_head(self._unread, is_request=False)) is None:
            await self._receive()
        return head.start.startswith(b"HTTP/1.1 100")

    async def _read(self, asked: Asked) -> None:
        interims: list[Message] = []
        while True:
            while (found := read_answer(self._unread, method=asked.method, ended=self._ended)) is None:
                await self._receive()
            message, end = found
            self._unread = self._unread[end:]
            if message.status >= 200:
                break
            interims.append(message)
        self._play.interims.append(interims)
        self._play.answers.append(message)
        closing = any(b"close" in value.lower() for value in message.all(b"connection"))
        self._ended = self._ended or closing or message.framing == "close"

    async def _receive(self) -> None:
        data = b"" if self._ended and not self._unread else await self._reader.read(1 << 18)
        if data:
            self._unread += data
        elif self._ended:
            raise ConnectionError(f"no answer; unread {self._unread[:100]!r}")
        else:
            self._ended = True

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        self._writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ended = False

    async def _leave(self) -> None:
        """FIN; nothing may come any more."""
        if self._writer is None:
            return
        with contextlib.suppress(OSError):
            self._writer.write_eof()
        with contextlib.suppress(ConnectionError):
            self._unread += await self._reader.read()
        if self._unread:
            self._play.faults.append(f"bytes behind the last answer: {self._unread[:100]!r}")
        self._writer.close()
        self._writer, self._unread = None, b""

    async def _send(self, data: bytes) -> None:
        assert self._writer is not None
        for piece in pieces(data, self._choose, split=self._exchange.split):
            self._writer.write(piece)
            await self._writer.drain()
            if self._exchange.split:
                await asyncio.sleep(self._choose.random() * 0.004 if self._exchange.slow else 0)


async def play(exchange: Exchange, address: Address, upstream: Upstream, seed: str) -> Play:
    """Play it once; `address` is that of the upstream itself, or of a proxy in front of it."""
    made = Play()
    upstream.begin(exchange, made, Random(f"{seed} upstream"))
    await Client(address, exchange, made, Random(f"{seed} client")).run()
    return made


def differences(direct: Play, through: Play, exchange: Exchange, authority: bytes) -> Iterator[str]:
    """What the proxy changed against the rules; an exchange that fails without it is a fault of the generator."""
    from reliability.hops import Seen, answer_seen, answer_through, request_seen, request_through

    def compare(what: str, expected: Seen, seen: Seen) -> Iterator[str]:
        for name in ("start", "fields", "framing", "body", "complete"):
            one, two = getattr(expected, name), getattr(seen, name)
            if one != two:
                yield f"{what}: {name} {_short(one, two)}"

    yield from (f"directly: {fault}" for fault in direct.faults)
    yield from through.faults
    if (len(direct.requests), len(direct.answers)) != (len(through.requests), len(through.answers)):
        yield (
            f"{len(direct.requests)} requests and {len(direct.answers)} answers became "
            f"{len(through.requests)} and {len(through.answers)}: {[answer.start for answer in through.answers]}"
        )
        return
    for number, (one, two) in enumerate(zip(direct.requests, through.requests, strict=True)):
        yield from compare(f"request {number}", request_through(one, authority), request_seen(two))
    for number, (one, two) in enumerate(zip(direct.answers, through.answers, strict=True)):
        http11 = exchange.asked[number].http11
        yield from compare(f"answer {number}", answer_through(one, http11=http11), answer_seen(two))
        interims = [answer_through(each, http11=True) for each in direct.interims[number]]
        seen = [answer_seen(each) for each in through.interims[number]]
        if interims != seen:
            yield f"answer {number}: interim answers {_short(interims, seen)}"


def _short(one: object, two: object) -> str:
    if isinstance(one, tuple) and isinstance(two, tuple):
        missing, more = [x for x in one if x not in two], [x for x in two if x not in one]
        if missing or more:
            return f"lacks {str(missing)[:300]}, has {str(more)[:300]}"
    return f"{str(one)[:300]} became {str(two)[:300]}"
