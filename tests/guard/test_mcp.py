"""What a request or a message is: the era (S1), what a POST asks for (L1, L3), tokens and answers (L1, R7)."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochgate.guard.mcp import (
    Call,
    Messages,
    Tokens,
    answers_nothing,
    carries_only,
    error_code,
    header_value,
    holds_initialize_result,
    is_session_era,
    may_initialize,
    method_of,
    read_call,
    read_messages,
    tokens_of,
)
from guard.scene import HEADER, META, batch, note, result

NAME = "session_epoch"
PLAIN = Tokens((NAME,), None)
ENORMOUS = b"9" * 5000
DEEP = b'{"params":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("version", "guarded"),
    [
        (None, True),
        (b"2025-03-26", True),
        (b"2025-06-18", True),
        (b"2025-11-25", True),
        (b"2024-11-05", False),
        (b"2026-07-28", False),
        (b"", False),
        (b"2025-06-18 ", False),
    ],
)
def test_only_the_era_of_sessions_is_guarded(version: bytes | None, guarded: bool) -> None:
    """S1: by the protocol version of each request."""
    assert is_session_era(version) is guarded


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}', Call(initialize=True, owes=(0,))),
        (b'{"jsonrpc":"2.0","id":"a","method":"tools/call"}', Call(owes=("a",))),
        (b'{"jsonrpc":"2.0","id":"5","method":"x"}', Call(owes=("5",))),
        (b'{"jsonrpc":"2.0","method":"notifications/initialized"}', Call()),
        (b'{"jsonrpc":"2.0","id":null,"method":"x"}', Call()),
        (b'{"jsonrpc":"2.0","id":5,"method":null,"result":{}}', Call()),
        (b'{"jsonrpc":"2.0","id":5,"method":null,"result":NaN}', Call()),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', Call(owes=(1.5,))),
        (b'{"jsonrpc":"2.0","id":5.0,"method":"x"}', Call(owes=(5,))),
        (b'{"jsonrpc":"2.0","id":3,"result":{}}', Call()),
        (b'[{"id":1,"method":"a"},{"method":"n"},{"id":2,"method":"b"},{"id":9,"result":{}}]', Call(owes=(1, 2))),
        (MARK + b'{"id":1,"method":"a"}', Call(owes=(1,))),
        (b"[]", Call()),
        (b"[1]", Call()),
        (b'[{"id":1,"method":"a"},null]', Call(owes=(1,))),
        (b'"initialize"', Call()),
        (b'{"id":0,"method":"\\u0069nitialize"}', Call(initialize=True, owes=(0,))),
        (b'{"id":0,"\\u006dethod":"initialize"}', Call(initialize=True, owes=(0,))),
        (b'{"id":0,"method":"\\u0069nitialized"}', Call(owes=(0,))),
        (b'{"id":0,"method":"ping","method":"initialize"}', Call(initialize=True, owes=(0,))),
        # as a lenient server would read it
        (b'{"id":5,"method":"a","params":{"text":"\\ud83d"}}', Call(owes=(5,))),
        (b'{"id":5.0,"method":"initialize","params":NaN}', Call(initialize=True, owes=(5,))),
        (b'{"\\u0069d":5,"method":"initializ\\u0065"}', Call(initialize=True, owes=(5,))),
        (b'{"id":5,"method":"initialize\\n"}', Call(owes=(5,))),
        (b'[{"id":"a","result":NaN},{"id":"b","method":"x\t"},{"method":"n"}]', Call(owes=("b",))),
        # what it asks for is not known, or not all of it
        (b"", Call(readable=False)),
        (b"\xff\xfe", Call(readable=False)),
        (gzip.compress(b'{"id":5,"method":"a"}', mtime=0), Call(readable=False)),
        (DEEP, Call(readable=False)),
        (b'{"id":' + ENORMOUS + b',"method":"x"}', Call(readable=False)),
        (b'{"id":NaN,"method":"x"}', Call(readable=False)),
        (b'{"id":true,"method":"x"}', Call(readable=False)),
        (b'{"id":"\\ud83d","method":"x"}', Call(readable=False)),
        (b'[{"id":{},"method":"x"},{"id":1,"method":"initialize"}]', Call(initialize=True, owes=(1,), readable=False)),
        (b'{"id":12345678901234567890123,"method":"x"}', Call(owes=(12345678901234567890123,))),
    ],
)
def test_a_post_tells_what_it_asks_for(body: bytes, expected: Call) -> None:
    """L3: a batch owes several responses; what cannot be read may ask for anything."""
    assert read_call(body) == expected


@pytest.mark.parametrize(
    ("body", "readable"),
    [
        ([{"id": n, "method": "x"} for n in range(1024)], True),
        ([{"id": n, "method": "x"} for n in range(1025)], False),
        ({"id": "a" * 64 * 1024, "method": "initialize"}, True),
        ({"id": "a" * (64 * 1024 + 1), "method": "initialize"}, False),
        ([{"id": f"{n}" + "a" * 40_000, "method": "x"} for n in range(2)], False),
        ({"id": 1, "method": "x", "params": {"text": "a" * 100_000}}, True),
    ],
)
def test_what_a_post_owes_is_bounded(body: object, readable: bool) -> None:
    """L5: too many ids, or too long ones, are not remembered; what they owe is unknown then."""
    call = read_call(json.dumps(body).encode())
    assert call.readable is readable
    assert bool(call.owes) is readable
    assert call.initialize is ("initialize" in str(body))


# -- tokens


@pytest.mark.parametrize(
    ("sources", "headers", "expected"),
    [
        ((META, HEADER), [(b"Mcp-Session-Epoch", b"7")], Tokens((NAME,), "7")),
        ((META, HEADER), [], Tokens((NAME,), None)),
        ((META, HEADER), [(b"mcp-session-epoch", b"")], Tokens((NAME,), None)),
        ((HEADER,), [(b"mcp-session-epoch", b" \t")], Tokens((), None)),
        ((HEADER,), [(b"mcp-session-epoch", b"\t7 ")], Tokens((), "7")),
        ((HEADER, META), [(b"MCP-SESSION-EPOCH", b"7")], Tokens((), "7")),
        ((HEADER, META), [(b"other", b"7")], Tokens((NAME,), None)),
        ((HEADER,), [(b"mcp-session-epoch", b"a"), (b"mcp-session-epoch", b"b")], Tokens((), "a")),
        ((), [(b"mcp-session-epoch", b"a")], Tokens((), None)),
    ],
)
def test_the_first_source_that_is_present_counts(
    sources: tuple[object, ...], headers: list[tuple[bytes, bytes]], expected: Tokens
) -> None:
    """Section 10: sources in their order, in each order."""
    assert tokens_of(sources, headers) == expected  # type: ignore[arg-type]


def test_a_header_is_text() -> None:
    assert header_value([(b"Mcp-Session-Epoch", b"\xe9")], HEADER) == "é"
    assert header_value([], HEADER) is None


@pytest.mark.parametrize(
    ("data", "token"),
    [
        (note("x", 1), "1"),
        (note("x", "1"), "1"),
        (note("x", "a b"), "a b"),
        (note("x", 2**70), str(2**70)),
        (note("x", -1), "-1"),
        (result(1, 4), "4"),
        (b'{"_meta":{"session_epoch":5},"method":"x"}', "5"),
        (b'{"params":{"_meta":{"session_epoch":1}},"_meta":{"session_epoch":2}}', "1"),
        (b'{"params":{"_meta":{}},"result":{"_meta":{"session_epoch":3}}}', "3"),
        (b'{"params":{"_meta":{"session_\\u0065poch":6}}}', "6"),
        (MARK + note("x", 1), "1"),
        # other types: their JSON text
        (note("x", True), "true"),
        (note("x", 2.0), "2.0"),
        (note("x", ["1"]), '["1"]'),
        (note("x", {"a": 1}), '{"a":1}'),
        (b'{"params":{"_meta":{"session_epoch":' + ENORMOUS + b"}}}", "Infinity"),
        (b'{"_meta":{"session_epoch":false}}', "false"),
        # as a lenient client would read it
        (b'{"params":{"_meta":{"session_epoch":"\xff"}}}', "\ufffd"),
        (b'{"params":{"_meta":{"session_epoch":"\\ud83d"}}}', '"\\ud83d"'),
        (b'{"params":{"text":"\\ud83d","_meta":{"session_epoch":2}}}', "2"),
        (b'{"params":{"text":"a\tb","_meta":{"session_epoch":"2"}}}', "2"),
        (b'{"params":{"text":"a\xff","_meta":{"session_epoch":2}}}', "2"),
        (b'{"params":{"_meta":{"session_epoch":2,"k\xff":1}}}', "2"),
        (b'{"params":{"x":NaN},"result":{"_meta":{"session_epoch":2}}}', "2"),
        (b'[{"params":{"_meta":{"session_epoch":2}}},null]', "2"),
        (MARK + b'{"params":{"x":Infinity},"_meta":{"session_epoch":2}}', "2"),
        (b'{"params":{"x":NaN,"_meta":{"session_epoch":""}},"_meta":{"session_epoch":2}}', "2"),
        (b'{"params":{"x":NaN,"_meta":{"session_epoch":null}},"_meta":[]}', None),
        (b"[null]", None),
        # none
        (note("x"), None),
        (note("x", ""), None),
        (b'{"params":{"_meta":{"session_epoch":null}}}', None),
        (b'{"params":{"_meta":"session_epoch"}}', None),
        (b'{"params":{"session_epoch":1}}', None),
        (b'{"_meta":"session_epoch"}', None),
        (b'{"_meta":{"other":1}}', None),
        (b'{"params":["session_epoch"]}', None),
        (b'{"params":{"arguments":{"_meta":{"session_epoch":1}}}}', None),
        # no JSON, or nested too deep
        (b"session_epoch: 1", None),
        (DEEP, None),
        (b"", None),
    ],
)
def test_a_token_is_text(data: bytes, token: str | None) -> None:
    """Section 2, L1, R7: looked for in params, then in result, then in the message itself, as some client reads it."""
    assert read_messages(data, PLAIN).tokens == (token,)


@pytest.mark.parametrize(
    ("data", "readable"),
    [(DEEP, False), (None, False), (b"session_epoch: 1", True), (b"", True), (b'{"x":NaN}', True), (note(1), True)],
)
def test_what_is_no_json_says_nothing_to_anybody(data: bytes | None, readable: bool) -> None:
    """R7, T8: what is too deep, or too long, may say something to somebody."""
    assert read_messages(data, Tokens((NAME,), "h")) == Messages(("1" if data == note(1, 1) else "h",), (), readable)


def test_a_key_may_be_written_with_escapes() -> None:
    """L1: PHP, for one, writes `/` as `\\/`."""
    key = Tokens(("example.com/epoch",), None)
    for holder in (b'{"params":{"_meta":%b}}', b'{"result":{"_meta":%b}}', b'{"_meta":%b}'):
        assert read_messages(holder % rb'{"example.com\/epoch":3}', key).tokens == ("3",)
    assert read_messages(rb'{"params":{"text":"a\nb"}}', key).tokens == (None,)


def test_of_several_keys_the_first_that_is_present_counts() -> None:
    """Section 10: an empty token is not present."""
    both = b'{"params":{"_meta":{"b":2}},"result":{"_meta":{"a":1}}}'
    assert read_messages(both, Tokens(("a", "b"), None)).tokens == ("1",)
    assert read_messages(both, Tokens(("b", "a"), None)).tokens == ("2",)
    assert read_messages(b'{"_meta":{"a":"","b":2}}', Tokens(("a", "b"), "h")).tokens == ("2",)
    assert read_messages(b'{"_meta":{"a":""}}', Tokens(("a", "b"), "h")).tokens == ("h",)


def test_a_long_token_is_remembered_by_its_digest() -> None:
    """L5: nothing that a server says makes a record grow without bound; and it tells epochs apart all the same."""
    sources = (META, HEADER)

    def told(token: bytes, *, odd: bool = False) -> str | None:
        text = b'{"method":"n","_meta":{"session_epoch":%b}%b}' % (token, b',"x":NaN' if odd else b"")
        (found,) = read_messages(text, PLAIN).tokens
        return found

    one, two = (b'"%b"' % (letter * 100_000) for letter in (b"a", b"b"))
    for odd in (False, True):
        assert told(one, odd=odd) == told(one) != told(two, odd=odd)
        assert len(told(one, odd=odd) or "") < 256
    assert len(told(b"[%b]" % one) or "") < 256
    assert told(b'"%b"' % (b"a" * 256)) == "a" * 256
    by_header = tokens_of(sources, [(b"Mcp-Session-Epoch", b"a" * 60_000)])
    assert by_header.default == told(b'"%b"' % (b"a" * 60_000))


def test_the_header_counts_where_a_message_has_no_token() -> None:
    assert read_messages(batch(note(1, "m"), note(2)), Tokens((NAME,), "h")).tokens == ("m", "h")
    assert read_messages(note(1), Tokens((), "h")).tokens == ("h",)
    assert read_messages(note(1, "m"), Tokens((), "h")).tokens == ("h",)
    assert read_messages(b"?", Tokens((NAME,), "h")).tokens == ("h",)
    assert read_messages(b"?", Tokens((), None)) == Messages()


# -- answers


@pytest.mark.parametrize("tokens", [PLAIN, Tokens((), None), Tokens((), "h")])
@pytest.mark.parametrize(
    ("data", "answers"),
    [
        (result(5), (5,)),
        (result("5"), ("5",)),
        (b'{"id":6,"error":{"code":-1}}', (6,)),
        (b'{"id":6,"result":null}', (6,)),
        (b'{"id":6,"result":{},"method":null,"params":null,"error":null,"_meta":null}', (6,)),
        (b'{"jsonrpc":"2.0","method":null,"id":6,"result":{}}', (6,)),
        (b'{"id":6,"result":{},"method":5}', (6,)),
        (b'{"id":6,"result":{"x":NaN},"method":null}', (6,)),
        (b'{"id":6,"method":"x","result":{}}', ()),
        (b'{"id":6,"error":null}', ()),
        (b'{"id":6,"error":null,"x":NaN}', ()),
        (b'{"id":null,"result":{}}', ()),
        (b'{"id":5.0,"result":{}}', (5,)),
        (b'{"id":5,"result":{"text":"\\ud83d"}}', (5,)),
        (b'[{"id":5,"error":NaN},{"id":"7","result":{}},{"id":8,"method":"x","result":1},null]', (5, "7")),
        (b'{"\\u0069d":5,"re\\u0073ult":{}}', (5,)),
        (b'{"id":[],"result":{}}', ()),
        (batch(result(1), note(2), result("b")), (1, "b")),
        (b'{"id":7,"method":"ping"}', ()),
        (b'{"id":null,"error":{"code":-1}}', ()),
        (b'{"id":8}', ()),
        (note("x"), ()),
    ],
)
def test_answers_are_responses_with_an_id(data: bytes, answers: tuple[object, ...], tokens: Tokens) -> None:
    """R7: a request of the server answers nothing."""
    assert read_messages(data, tokens).answers == answers


@pytest.mark.parametrize(
    ("data", "tokens", "known", "nothing"),
    [
        (note("x"), PLAIN, None, True),
        (note("x"), PLAIN, "1", True),
        (note("x", 1), PLAIN, "1", True),
        (note("x", "1"), PLAIN, "1", True),
        (note("x", 1), PLAIN, None, False),
        (note("x", 2), PLAIN, "1", False),
        (note("x", 11), PLAIN, "1", False),
        (note("x", [1]), PLAIN, "1", False),
        (batch(note("x", 1), note("y", 2)), PLAIN, "1", False),
        (result(5), PLAIN, "1", False),
        (b'{"id":6,"error":{}}', PLAIN, "1", False),
        (b'{"id":6,"\\u0072esult":{}}', PLAIN, "1", False),
        (note("x"), Tokens((), "h"), "h", True),
        (note("x"), Tokens((), "h"), "1", False),
        (note("x"), Tokens((), "h"), None, False),
        (note("x", 2), Tokens((NAME,), "1"), "1", False),
        (b'{"method":"m","_meta":{"a\\"b":2}}', Tokens(('a"b',), None), "1", False),
    ],
)
def test_most_events_say_nothing_new(data: bytes, tokens: Tokens, known: str | None, nothing: bool) -> None:
    """L1, R12: seen without decoding."""
    assert says_nothing(data, tokens, known) is nothing


def says_nothing(data: bytes, tokens: Tokens, known: str | None) -> bool:
    return carries_only(data, tokens, known) and answers_nothing(data)


MEMBERS = st.dictionaries(
    st.sampled_from([NAME, "a/b", "other", 'a"b', "a\\b", "a\tb", "é"]),
    st.sampled_from([1, 2, 11, "1", "2", "11", "", None, True, 1.5, [1], {}, "x\n", "/", '"', "é"]),
    max_size=2,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from([1, "a", None]),
        "method": st.sampled_from(["m", None, 5]),
        "params": st.fixed_dictionaries({}, optional={"_meta": MEMBERS, NAME: st.just("2"), "text": st.just("result")}),
        "result": st.fixed_dictionaries({}, optional={"_meta": MEMBERS}),
        "error": st.sampled_from([{"code": 1}, None]),
        "_meta": MEMBERS,
    },
)


@given(
    message=MESSAGE | st.lists(MESSAGE, max_size=2),
    default=st.sampled_from([None, "1", "2"]),
    known=st.sampled_from([None, "1", '"', "é"]),
    keys=st.sampled_from([(), (NAME,), ("a/b",), (NAME, "a/b"), ('a"b',), ("a\\b",), ("a\tb", "é")]),
    escapes=st.booleans(),
    spaces=st.booleans(),
)
def test_what_says_nothing_says_nothing(
    message: object, default: str | None, known: str | None, keys: tuple[str, ...], escapes: bool, spaces: bool
) -> None:
    """L1, L3, R12: the quick look never overlooks what a decoder sees."""
    text = json.dumps(message, indent=1 if spaces else None, ensure_ascii=escapes)
    data = (text.replace("/", "\\/") if escapes else text).encode()
    tokens = Tokens(keys, default)
    if says_nothing(data, tokens, known):
        seen = read_messages(data, tokens)
        assert not seen.answers
        assert set(seen.tokens) <= {None, known}


@given(st.binary(max_size=200) | st.from_regex(r'\{("(id|result|error|method|params|_meta)":[\[\]{}"a-z0-9,:]*,?)*\}'))
def test_no_bytes_are_too_strange(data: bytes | str) -> None:
    """T1: a peek that fails says nothing, and never raises."""
    raw = data.encode() if isinstance(data, str) else data
    read_call(raw)
    read_messages(raw, PLAIN)
    holds_initialize_result(raw)
    error_code(raw)


# -- the handshake, and errors


@pytest.mark.parametrize(
    ("data", "holds"),
    [
        ({"id": 0, "result": {"protocolVersion": "2025-06-18", "capabilities": {}}}, True),
        ([{"id": 0, "error": {}}, {"id": 0, "result": {"protocolVersion": "x"}}], True),
        ({"id": 0, "result": {"tools": []}}, False),
        ({"id": 0, "result": {"protocolVersion": 1}}, False),
        ({"id": 0, "result": []}, False),
        ({"id": 0, "error": {"code": -32602, "message": "protocolVersion"}}, False),
        (
            {"id": 0, "result": {"protocolVersion": "x", "serverInfo": {"name": "\ud83d", "version": float("nan")}}},
            True,
        ),
        (5, False),
    ],
)
def test_an_initialize_result_opens_a_session(data: object, holds: bool) -> None:
    """L1."""
    assert holds_initialize_result(json.dumps(data).encode()) is holds


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"code":-32001,"message":"m"},"id":null}', -32001),
        (b'[{"result":{}},{"error":{"code":5}}]', 5),
        (b'{"error":{"code":null}}', None),
        (b'{"error":{"code":"-32001"}}', None),
        (b'{"error":{"code":' + ENORMOUS + b"}}", None),
        (b'{"error":{}}', None),
        (b'[{"error":null,"result":{}},{"error":{"code":5},"result":null}]', 5),
        (b'{"error":"no such session"}', None),
        (b'{"result":{}}', None),
        (b"not found", None),
    ],
)
def test_the_code_of_an_error(body: bytes, code: int | None) -> None:
    """N1."""
    assert error_code(body) == code


@pytest.mark.parametrize(
    ("body", "method"),
    [
        (b'{"method":"tools/call","id":1}', "tools/call"),
        (b'[{"result":{},"id":1},{"method":"ping"}]', "ping"),
        (b'{"result":{},"id":1}', None),
        (b'{"method":5}', None),
        (b'[{"method":null,"result":{},"id":1},{"method":"ping"}]', "ping"),
        (b"no JSON", None),
    ],
)
def test_the_method_that_a_span_names(body: bytes, method: str | None) -> None:
    """Tracing reads a copy, and what it cannot read it leaves out."""
    assert method_of(body) == method


CALL = '{"jsonrpc":"2.0","id":5,"method":"initialize"}'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_call_is_read_in_each_encoding_of_unicode(encoding: str) -> None:
    """L2, L3."""
    assert read_call(CALL.encode(encoding)) == Call(initialize=True, owes=(5,))
    assert may_initialize(CALL.encode(encoding))
    assert not may_initialize(CALL.replace("initialize", "ping").encode(encoding))


@pytest.mark.parametrize("before", ['"method":"ping",', '"METHOD":"initialize",', ""])
@pytest.mark.parametrize("after", [',"method":"ping"', ',"m\\u0065thod":"ping"', ""])
def test_an_initialize_beside_other_methods_may_be_one(before: str, after: str) -> None:
    """L2: which of equal keys counts is up to the reader."""
    body = f'{{{before}"method":"initialize"{after}}}'.encode()
    assert may_initialize(body)
    assert may_initialize(b"[" + body + b"]")


@pytest.mark.parametrize("body", [DEEP, b"", b"{", b"hello", b'{"method":"ping"} {}', b"\0", CALL.encode("utf-7")[1:]])
def test_what_cannot_be_read_may_be_an_initialize(body: bytes) -> None:
    """L2."""
    assert may_initialize(body)


@pytest.mark.parametrize(
    "body",
    [b"[]", b'"initialize"', b'["initialize"]', b'{"params":{"method":"initialize"}}', b'{"method":["initialize"]}'],
)
def test_other_json_is_none(body: bytes) -> None:
    """L2."""
    assert not may_initialize(body)
