"""T3: the request target is forwarded as it was received."""

from __future__ import annotations

import pytest

from relay.wire import get, ok, running

TARGETS = [
    b"/mcp", b"/", b"//", b"/mcp/", b"/mcp?", b"/mcp??", b"/?&&=", b"/mcp//a///b/", b"/a/../mcp", b"/./mcp/.", b"/..",
    b"/%2e%2e/mcp",
    b"/mcp/a%2Fb/%41/%7E/c%3Ad/%C3%A9/%zz/%", b"/mcp?b=2&a=1&b=3&e&sig=%E9%FF&p=%28&s=1;2&q=a%20b+c&u=%2F",
    b"/mcp#fragment",
    b"/mcp;v=1", b'/"<>{}|\\^`', b"/a:b@c", b"http://other.test/mcp?x", b"http://other.test", b"http://[::1]:80/a//b?",
    b"https://user@other.test:443/..//", b"/mcp?url=http://a/b", b"/%00", b"/:", b"/~", b"/'()*!$,",
]  # fmt: skip


async def test_t3_targets_pass_as_received(relay):
    client = await relay.connect()
    server = None
    for target in TARGETS:
        await client.send(get(target))
        server = server or await relay.accept()
        assert (await server.request()).start == b"GET " + target + b" HTTP/1.1"
        await server.send(ok())
        assert (await client.message()).status == 200


async def test_t3_the_whole_server_is_a_target(relay):
    client, server, request = await relay.asked(get(b"*", method=b"OPTIONS"))
    assert request.start == b"OPTIONS * HTTP/1.1"
    await server.send(b"HTTP/1.1 204 No Content\r\nAllow: GET\r\n\r\n")
    assert (await client.message()).get(b"allow") == b"GET"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"/mcp", b"/base/mcp"),
        (b"//mcp?a", b"/base//mcp?a"),
        (b"*", b"*"),
        (b"http://other.test/mcp?a", b"http://other.test/base/mcp?a"),
        (b"http://other.test", b"http://other.test/base"),
        (b"http://other.test?a=/b", b"http://other.test/base?a=/b"),
    ],
)
async def test_t3_a_path_prefix_goes_before_the_path(target, expected):
    """Where the upstream has a path prefix: also in absolute form, so that nobody gets around it."""
    async with running() as relay:
        relay.context.prefix = b"/base"
        client, server, request = await relay.asked(get(target, method=b"OPTIONS"))
        assert request.start == b"OPTIONS " + expected + b" HTTP/1.1"
        await server.send(ok())
        assert (await client.message()).status == 200


@pytest.mark.parametrize("target", [b"mcp", b"?a", b"/a b", b"/\xff", b"/a\tb", b"/a\x00b", b"/a\x7fb", b""])
async def test_t3_what_is_no_target_gets_400(relay, target):
    client = await relay.connect()
    await client.send(get(target))
    assert (await client.message()).status == 400
    assert await client.gone()
    assert await relay.unasked()
