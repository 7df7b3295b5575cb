"""A peer that vanishes without a word on a silent stream does not stay for ever: the kernel asks it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from relay.process import PATIENCE, read_head, read_request, serving, upstream
from relay.wire import get

KEEPALIVE = "02"  # of the timers in /proc/net/tcp
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def timers() -> dict[tuple[int, int], str]:
    """The timer of each connection, by its port here and the port of its peer."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(int(row[1][9:], 16), int(row[2][9:], 16)): row[5].partition(":")[0] for row in rows}


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_kernel_asks_both_peers_of_a_silent_stream(loop, tmp_path):
    peers: list[int] = []

    def answer(sock: socket.socket) -> None:
        peers.append(sock.getpeername()[1])
        read_request(sock)
        sock.sendall(HEAD)
        sock.recv(1)

    with upstream(answer) as port, serving(loop, port, tmp_path) as proxy, proxy.connect() as client:
        client.settimeout(PATIENCE)
        client.sendall(get())
        assert read_head(client).startswith(b"HTTP/1.1 200")
        found = timers()
        assert found[proxy.port, client.getsockname()[1]] == KEEPALIVE
        assert found[peers[0], port] == KEEPALIVE
