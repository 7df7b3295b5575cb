"""What is remembered of requests to save time does not grow with what strangers make up."""

from __future__ import annotations

import gc

import pytest

from epochgate.relay import headers
from epochgate.relay.context import Policies
from epochgate.relay.forward import Forwarder
from epochgate.settings import Settings
from relay.wire import get
from resume.story import STREAM, began, part


def size_of(names) -> int:
    return sum(map(len, names))


@pytest.mark.parametrize("length", [8, 256, 257, 60_000])
def test_targets(length):
    """A thousand long targets took 64 MiB for ever."""
    policies = Policies(Settings.model_validate({"upstream": {"url": "http://a"}}).compiled())
    for number in range(5000):
        policies.match(b"/%d" % number + b"x" * (length - 6))
    assert size_of(policies._by_target) <= 1024 * 256


@pytest.mark.parametrize("length", [8, 64, 65, 60_000])
def test_names_of_fields(length):
    """So did a thousand long names; and the usual ones find room again."""
    for number in range(3000):
        assert headers.lower_case(b"X-%d-" % number + b"Y" * (length - 7)).startswith(b"x-")
    assert size_of(headers._LOWER) <= 1024 * 64
    headers.lower_case(b"Content-Type")
    assert headers._LOWER[b"Content-Type"] == b"content-type"


@pytest.mark.parametrize("session", [b"Mcp-Session-Id: S1", b"Mcp-Session-Id: made-up", b"X-None: 1"])
async def test_the_body_of_a_request_is_not_kept_while_its_answer_streams(guarded, session):
    """Nor is what was read ahead to see whether it is an `initialize`."""
    body = b'{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"x":"' + b"x" * 900_000 + b'"}}'
    async with guarded() as relay:
        await began(relay)
        client = await relay.connect()
        head = get(b"/mcp", session, b"Content-Length: %d" % len(body), method=b"POST")
        await client.send(head + body)
        server = await relay.accept()
        await server.request()
        await server.send(STREAM + part(b": here\n\n"))
        await client.until(b": here")
        kept = [sum(map(len, found._sent)) for found in gc.get_objects() if isinstance(found, Forwarder)]
        assert kept
        assert max(kept) < 1000
