"""The table of smuggling.yaml through a proxy process; and the strict reader that judges it."""

from __future__ import annotations

import pytest

from reliability.smuggling import answers_in, load, play_all
from reliability.strict import UnclearError, read_answer, read_requests


async def test_nothing_is_desynchronised(tmp_path):
    """Requests are refused or forwarded in one plain form; answers become a 502 or one clear answer."""
    table, complaints = await play_all(tmp_path)
    assert table.wrong == []
    assert complaints == []
    assert table.played >= 300


def test_there_are_enough_cases():
    assert sum(len(cases) for cases in load().values()) >= 250


def test_what_is_refused_is_unclear_or_refused_by_a_rule():
    """The strict reader shares no code with the proxy: what it reads at once is refused for another reason."""
    clear = {name for name, (data,) in load()["refused"].items() if read_requests(data)[2] is None}
    assert clear == {"CONNECT", "method in lower case"}


def test_what_is_forwarded_is_clear():
    for name, (data, body) in load()["plain"].items():
        requests, rest, error = read_requests(data, tolerant=True)
        assert (rest, error, [request.body for request in requests]) == (b"", None, [body]), name


@pytest.mark.parametrize("group", ["bad answers", "broken answers"])
def test_answers_that_are_not_passed_on_are_unclear_or_not_whole(group):
    for name, (data,) in load()[group].items():
        if "101" in name:
            continue
        with pytest.raises((UnclearError, AssertionError)):
            assert all(answer.complete for answer in answers_in(data, [b"GET"])), name
            assert answers_in(data, [b"GET"]), name


def test_an_answer_ends_where_its_framing_says():
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 204 No\r\n\r\n"
    first, at = read_answer(data, method=b"GET", ended=False)
    assert (first.body, at) == (b"ok", data.index(b"HTTP/1.1 204"))
    second, at = read_answer(data, at, method=b"GET", ended=False)
    assert (second.status, at) == (204, len(data))
    assert read_answer(b"HTTP/1.1 200 OK\r\n\r\nsome", method=b"GET", ended=False) is None
    assert read_answer(b"HTTP/1.1 200 OK\r\n\r\nsome", method=b"GET", ended=True)[0].body == b"some"
    assert read_answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", method=b"HEAD", ended=False)[0].complete
