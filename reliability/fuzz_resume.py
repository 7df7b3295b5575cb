"""Whatever the upstream replays on a resume, through the whole proxy: no unchecked event is released (R5 to R11).

The session has the epoch token `e`, and the client has read the events 1 and 2 of a call that is to be answered; the
proxy has read event 3 as well. The first byte of an input chooses the policy, and whether the stream is still held:
then the rest comes on it, in part before the resume. The second chooses how it is cut. The rest is what the upstream
sends, or the choices by which that is put together.
"""

from __future__ import annotations

import asyncio
import json

from epochgate.settings import Settings
from reliability.fuzz_peek import Number, Read, _answers, _tokens, reference
from reliability.fuzz_sse import pieces
from reliability.fuzz_sse import reference as read_stream
from reliability.inside import Inside, LeapingLoop, Pipe, settings
from reliability.strict import read_answer, read_requests

DICTIONARY = (
    "id: 3\\x0a", "id: 4\\x0a", "data: ", '{"params":{"_meta":{"session_epoch":"e"}}}',
    '{"_meta":{"session_epoch":"f"}}',
    '"session_epoch"', '{"id":5,"result":{}}', '{"id":6,"result":{}}', "\\x0a\\x0a", "\\x0d\\x0a\\x0d\\x0a",
    "event: x\\x0a",
    ": c\\x0a\\x0a", "retry: 5\\x0a",
)  # fmt: skip
GROWN = 128
HELD = 64
KEY = "session_epoch"

NOTE = b'{"jsonrpc":"2.0","method":"n","params":{"n":%d,"_meta":{"session_epoch":"e"}}}'
RECORDED = {b"%d" % number: NOTE % number for number in (1, 2, 3)}
BLOCKS = (
    *(b"id: %b\ndata: %b\n\n" % one for one in RECORDED.items()),
    b"id: 3\r\ndata: %b\r\n\r\n" % RECORDED[b"3"],
    b"id: 4\ndata: " + NOTE % 4 + b"\n\n",
    b"id: 5\nevent: message\ndata: " + NOTE % 5 + b"\n\n",
    b'id: 4\ndata: {"method":"n","params":{"_meta":{"session_epoch":"f"}}}\n\n',
    b'id: 4\ndata: {"method":"n"}\n\n',
    b'data: {"method":"n","_meta":{"session_epoch":"e"}}\n\n',
    (
        b'id: 4\ndata: [{"method":"n","_meta":{"session_epoch":"e"}},\n'
        b'data: {"method":"n","_meta":{"session_epoch":"f"}}]\n\n'
    ),
    b'id: 4\ndata: {"id":5,"result":{"_meta":{"session_epoch":"e"}}}\n\n',
    b'id: 5\ndata: {"id":6,"result":{"_meta":{"session_epoch":"e"}}}\n\n',
    b'id: 6\ndata: {"id":5,"result":{"_meta":{"\\u0073ession_epoch":"f"}}}\n\n',
    b"id: 4\ndata:\n\n",
    b"id\n\n",
    b"id: 4\n",
    b": c\n\n",
    b"retry: 1\n\n",
    b"\n",
    b"\r",
    b"data: x\n\n",
    b"data: ",
    b"\xef\xbb\xbf",
    b'id: 7\ndata: {"method":"n","_meta":{"session_epoch":null}}\n\n',
    b"id: 3\ndata: " + NOTE % 9 + b"\n\n",
    b'id: 8\ndata: {"method":"n","params":{"_meta":{"session_epoch":"e"}},"_meta":{"session_epoch":"f"}}\n\n',
)

CALL = b'{"jsonrpc":"2.0","id":5,"method":"tools/call"}'
OPEN = b'{"jsonrpc":"2.0","id":0,"method":"initialize"}'
OPENED = b'{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"x","_meta":{"session_epoch":"e"}}}'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
RESUME = b"GET /mcp HTTP/1.1\r\nHost: a\r\nMcp-Session-Id: S\r\nLast-Event-ID: 2\r\nAccept: text/event-stream\r\n\r\n"

_loop = LeapingLoop()
_policies = [
    settings(policies=[{"name": "mcp", "keepalive": "0s", "resume": resume, "refusal": {"pending_calls": pending}}])
    for resume in ({"accept": ["epoch"]}, {"accept": ["connection", "epoch"]}, {"accept": ["epoch", "overlap"]})
    for pending in ("leave", "at-once")
]


def check(data: bytes) -> None:
    """Raises AssertionError where the proxy does what it must not with this input."""
    if len(data) > 2:
        replay = b"".join(BLOCKS[byte % len(BLOCKS)] for byte in data[2:]) if data[0] >= GROWN else data[2:]
        if data[0] & HELD:
            _loop.run(_resume_held(replay, data[1], _policies[2 + data[0] % 2]))
        else:
            _loop.run(_resume(replay, data[1], data[0] % len(_policies)))


class _Upstream:
    """Opens the session, answers the call by three events and then silence, and each resume by the replay."""

    def __init__(self, replay: list[bytes]) -> None:
        self.replay = replay
        self.call: Pipe | None = None
        self._read: dict[Pipe, int] = {}

    def serve(self, pipe: Pipe) -> None:
        found, _, error = read_requests(bytes(pipe.written))
        if error is not None:
            raise error
        for request in found[self._read.get(pipe, 0) :]:
            if request.method == b"GET":
                pipe.send(STREAM, *self.replay, b"0\r\n\r\n")
            elif request.body == OPEN:
                pipe.send(_sized(OPENED))
            else:
                self.call = pipe
                pipe.send(STREAM + b"".join(_chunk(b"id: %b\ndata: %b\n\n" % one) for one in RECORDED.items()))
        self._read[pipe] = len(found)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _sized(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nMcp-Session-Id: S\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def _post(body: bytes, *fields: bytes) -> bytes:
    lines = [b"POST /mcp HTTP/1.1", b"Host: a", *fields, b"Content-Length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


async def _left(replay: list[bytes], policy: Settings) -> tuple[Inside, _Upstream, Pipe]:
    """The session and its call, whose client has gone."""
    upstream = _Upstream(replay)
    proxy = Inside(policy, upstream.serve)
    client = proxy.client()
    client.send(_post(OPEN))
    await proxy.settle()
    client.send(_post(CALL, b"Mcp-Session-Id: S"))
    await proxy.settle()
    client.break_off()
    await proxy.settle()
    assert upstream.call is not None
    return proxy, upstream, upstream.call


async def _resume(replay: bytes, how: int, policy: int) -> None:
    proxy, _, call = await _left([_chunk(piece) for piece in pieces(replay, how) if piece], _policies[policy])
    if not call.closed:
        call.break_off()
    await asyncio.sleep(120)  # longer than the stream is held
    client = proxy.client()
    client.send(RESUME)
    await asyncio.sleep(60)
    client.finish()
    await proxy.settle()
    assert client.written
    _check(bytes(client.written), overlap=policy >= 4)
    await proxy.end()


async def _resume_held(sent: bytes, how: int, policy: Settings) -> None:
    """What the client gets is what came on the connection, block for block, up to another epoch (R4, R11, R12)."""
    chunks = [_chunk(piece) for piece in pieces(sent, how) if piece]
    proxy, _, call = await _left([], policy)
    call.send(*chunks[: len(chunks) // 2])
    await proxy.settle()
    client = proxy.client()
    client.send(RESUME)
    await proxy.settle()
    call.send(*chunks[len(chunks) // 2 :], b"0\r\n\r\n")
    await asyncio.sleep(60)
    client.finish()
    await proxy.settle()
    found = read_answer(bytes(client.written), 0, method=b"GET", ended=True)
    assert found is not None
    if found[0].status != 404:
        whole = b"".join(b"id: %b\ndata: %b\n\n" % one for one in RECORDED.items()) + sent
        messages, expected = _messages(found[0].body), _messages(whole)
        if messages and _is_told(messages[-1][1]):
            messages.pop()
        starts = _after(whole, b"2")
        assert any(messages == expected[start : start + len(messages)] for start in starts), (messages, expected)
        assert all(texts == {"e"} for _, data in messages for texts in _tokens(reference(data), (KEY,))), messages
    await proxy.end()


def _messages(stream: bytes) -> list[tuple[bytes | None, bytes]]:
    """The messages of a stream: the id where it is their own, and the data."""
    blocks = read_stream(stream, 1 << 30).blocks
    return [(event_id if own else None, data or b"") for event_id, own, data, _, kind, _ in blocks if kind == "MESSAGE"]


def _after(stream: bytes, cursor: bytes) -> list[int]:
    """How many messages are before what may follow a cursor: where its id came again, the last event counts (R3)."""
    starts, messages = [], 0
    for event_id, _, _, _, kind, _ in read_stream(stream, 1 << 30).blocks:
        messages += kind == "MESSAGE"
        if event_id == cursor and kind != "OTHER":
            starts.append(messages)
    return starts


def _check(written: bytes, *, overlap: bool) -> None:
    found = read_answer(written, 0, method=b"GET", ended=True)
    assert found is not None
    answer, _ = found
    assert answer.status in (200, 404), answer
    if answer.status == 404:
        assert answer.complete
        return
    read = read_stream(answer.body, 1 << 30)
    messages = [(event_id, data) for event_id, _, data, _, kind, _ in read.blocks if kind == "MESSAGE"]
    if messages and _is_told(messages[-1][1]):
        messages.pop()
    expected = [RECORDED[b"3"]]
    for number, (event_id, data) in enumerate(messages):
        said = reference(data)
        tokens = _tokens(said, (KEY,))
        assert all(texts == {"e"} for texts in tokens), (number, data)
        assert (event_id, data) not in list(RECORDED.items())[:2], "the client had it"
        assert all(answer == 5 for answer in _answers(said)), data
        if number == 0:
            assert tokens or overlap, data
        if number < len(expected):
            assert data == expected[number], data


def _is_told(data: bytes) -> bool:
    """Whether it is the proxy's own error for the call (F5)."""
    try:
        said: Read = reference(data)
    except RecursionError:
        return False
    error = said.objects[0].get("error") if said.objects else None
    code = error.get("code") if isinstance(error, dict) else None
    return type(code) is Number and json.loads(code) == -32000
