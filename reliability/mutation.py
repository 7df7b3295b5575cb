"""Whole exchanges with bytes cut out, doubled, exchanged or put in, on either side, through the whole proxy.

Hypothesis chooses and shrinks; what must hold is what holds for the targets of the fuzzer.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from reliability import fuzz_answers, fuzz_requests, fuzz_resume
from reliability.part import Figure

_CHUNKS = b"5;x=y\r\nhello\r\n1\r\n!\r\n0\r\nX-Sum: 1\r\n\r\n"
_FIELDS = b"Host: a\r\nX-One: 1\r\nCookie: a=b\r\nx-one: 2\r\nAccept: */*\r\n"
_SESSION = b"Mcp-Session-Id: S\r\nMCP-Protocol-Version: 2025-06-18\r\n"
REQUESTS = (
    b"GET /a HTTP/1.1\r\n" + _FIELDS + b"\r\n",
    b"POST /mcp HTTP/1.1\r\n" + _FIELDS + b"Content-Length: 5\r\n\r\nhello",
    b"POST /mcp HTTP/1.1\r\n" + _FIELDS + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKS,
    b"DELETE /mcp HTTP/1.1\r\n" + _FIELDS + _SESSION + b"\r\n",
    b"GET /mcp HTTP/1.1\r\n" + _FIELDS + _SESSION + b"Last-Event-ID: 7\r\nAccept: text/event-stream\r\n\r\n",
    b"OPTIONS * HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"HEAD http://a/b?c HTTP/1.1\r\n" + _FIELDS + b"Connection: close, x-one\r\n\r\n",
    b"POST /mcp HTTP/1.1\r\n" + _FIELDS + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /up HTTP/1.1\r\n" + _FIELDS + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
)
_OK = b"HTTP/1.1 200 OK\r\nServer: x\r\nSet-Cookie: a\r\nset-cookie: b\r\n"
_EVENTS = b'id: 1\ndata: {"method":"n"}\n\nid: 2\r\ndata: {"id":1,"result":{}}\r\n\r\n: c\n\n'
ANSWERS = (
    _OK + b"Content-Length: 5\r\n\r\nhello",
    _OK + b"Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n" + _CHUNKS,
    _OK + b"Connection: close\r\n\r\nuntil the end",
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + _OK + b"Content-Length: 0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n",
    b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 99\r\n\r\n',
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok",
    b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    _OK
    + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(_EVENTS), _EVENTS),
    _OK + b"Content-Type: text/event-stream\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n" + _EVENTS,
)
REPLAYS = (
    b"".join(fuzz_resume.BLOCKS[at] for at in (2, 4, 5)),
    b"".join(fuzz_resume.BLOCKS[at] for at in (1, 2, 14, 16, 4, 10)),
    b"".join(fuzz_resume.BLOCKS[at] for at in (3, 15, 13, 5)),
)
PIECES = (
    b"\r\n", b"\r", b"\n", b"\0", b" ", b"\t", b",", b":", b";", b"0", b"1", b"-", b"\x0b", b"\xff", b"\r\n\r\n",
    b"\r\n ",
    b"Content-Length: 1\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n", b"chunked",
    b"Connection: close\r\n", b"Connection: Content-Length\r\n", b"HTTP/1.1", b"HTTP/1.0", b"GET / HTTP/1.1\r\n",
    b"0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n", b"id: 3\n", b"data: ", b'"session_epoch":"f"', b"e",
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, messages: tuple[bytes, ...], most: int) -> bytes:
    """One to `most` of the messages behind each other, with a few changes."""
    data = b"".join(draw(st.lists(st.sampled_from(messages), min_size=1, max_size=most)))
    for _ in range(draw(st.integers(1, 4))):
        at, size = draw(st.integers(0, len(data))), draw(st.integers(0, 12))
        match draw(st.sampled_from(("cut", "double", "put", "replace", "move", "end"))):
            case "cut":
                data = data[:at] + data[at + size :]
            case "double":
                data = data[: at + size] + data[at:]
            case "put":
                data = data[:at] + draw(st.sampled_from(PIECES)) + data[at:]
            case "replace":
                data = data[:at] + draw(st.sampled_from(PIECES)) + data[at + size :]
            case "move":
                to = draw(st.integers(0, len(data)))
                piece, rest = data[at : at + size], data[:at] + data[at + size :]
                data = rest[:to] + piece + rest[to:]
            case _:
                data = data[:at] if draw(st.booleans()) else data
    return data


SIDES: dict[str, tuple[st.SearchStrategy[bytes], Callable[[bytes], None]]] = {
    "client": (mutated(REQUESTS, 3), fuzz_requests.check),
    "upstream": (mutated(ANSWERS, 2), fuzz_answers.check),
    "replay": (mutated(REPLAYS, 1), fuzz_resume.check),
}
_MODES = st.tuples(st.integers(0, 255), st.integers(0, 255))


def check_side(side: str, count: int, number: int) -> int:
    """Examples of one side; how many were run. Raises what the first, shrunk, raised."""
    strategy, check = SIDES[side]
    ran = 0

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy, _MODES)
    def holds(data: bytes, modes: tuple[int, int]) -> None:
        nonlocal ran
        ran += 1
        first = modes[0] % fuzz_resume.GROWN if side == "replay" else modes[0]
        check(bytes([first, modes[1]]) + data)

    holds()
    return ran


def mutate(count: int, number: int) -> list[Figure]:
    """A row for each side."""
    figures = []
    for side in SIDES:
        try:
            value, holds = f"{check_side(side, count, number):,} exchanges", True
        except Exception as error:
            value, holds = f"{type(error).__name__}: {error}"[:300].replace("\n", " "), False
        figures.append(Figure(f"mutated bytes of the {side}", value, "all of the above holds", holds=holds))
    return figures
