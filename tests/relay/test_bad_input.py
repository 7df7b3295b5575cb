"""Bad input: each has a clear error or status, disturbs nothing else, and memory stays bounded.

The figures of a run are printed; `pytest -s` shows them.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

from relay.process import command, free_port, read_head, read_request, serving, upstream
from relay.wire import get, ok, post

MIB = 1024 * 1024
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
RESULT = b'{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-06-18","capabilities":{},"serverInfo":{}}}'
SESSION = b"Mcp-Session-Id: S1"


def answer_plainly(sock: socket.socket) -> None:
    """Every request gets the same small answer."""
    while read_request(sock):
        sock.sendall(ok(b"fine"))


# -- at the start


@LOOPS
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("upstream: {url: http://127.0.0.1:1}\nlisten: nowhere\n", "gate.yaml:2: listen: "),
        ("upstream:\n  url: http://127.0.0.1:1\n  uri: x\n", "gate.yaml:3: upstream.uri: "),
        ("upstream: {url: http://127.0.0.1:1}\nlisten: 127.0.0.1:1\nlisten: 127.0.0.1:2\n", "gate.yaml:3: listen: "),
        ("upstream: [\n", "gate.yaml:2: "),
        ("\0", "gate.yaml"),
    ],
)
def test_a_malformed_configuration(loop, text, expected, tmp_path):
    """Exit 78; the error names file, line and key."""
    (tmp_path / "gate.yaml").write_text(text)
    words = command(loop, "serve", "--config", str(tmp_path / "gate.yaml"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@LOOPS
@pytest.mark.parametrize("key", ["listen", "admin.listen"])
def test_a_port_in_use(loop, key):
    """Exit 78; the error names key, address and remedy."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen, admin = (address, f"127.0.0.1:{free_port()}")[:: 1 if key == "listen" else -1]
        words = ("serve", "--upstream", "http://127.0.0.1:1", "--listen", listen, "--admin-listen", admin)
        done = subprocess.run(command(loop, *words), capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert f"{key}: cannot listen on {address}: it is in use" in done.stderr
    assert "Traceback" not in done.stderr


@LOOPS
@pytest.mark.parametrize("key", ["listen", "admin.listen"])
def test_a_unix_socket_in_use(loop, key, tmp_path):
    """Exit 78, and who has the socket keeps it; one that was left over by a killed process is no obstacle."""
    path = tmp_path / "gate.sock"
    listen, admin = (f"unix:{path}", f"127.0.0.1:{free_port()}")[:: 1 if key == "listen" else -1]
    words = ("serve", "--upstream", "http://127.0.0.1:1", "--listen", listen, "--admin-listen", admin)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        done = subprocess.run(command(loop, *words), capture_output=True, text=True, timeout=20, check=False)
        assert (done.returncode, done.stdout) == (78, "")
        assert f"{key}: cannot listen on unix:{path}: it is in use" in done.stderr
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    popen = subprocess.Popen(command(loop, *words), stdout=subprocess.PIPE, text=True)
    with popen:
        assert "accepts connections" in popen.stdout.readline()
        popen.send_signal(signal.SIGINT)
        assert popen.wait(20) == 0


# -- while it serves


@LOOPS
def test_an_unreachable_upstream(loop, tmp_path):
    """502 at once, and all is well as soon as it is there."""
    port = free_port()
    with serving(loop, port, tmp_path) as proxy:
        for request in (get(), post(b"{}"), post(b"x" * MIB), get(b"/mcp", SESSION)):
            began = time.perf_counter()
            answer = proxy.ask(request)
            assert answer.startswith(b"HTTP/1.1 502 ")
            assert b'"message":"No connection to the upstream: connection refused"' in answer
            assert time.perf_counter() - began < 1
        with upstream(answer_plainly, port):
            assert proxy.ask(post(b"{}")).endswith(b"fine")
        assert proxy.growth() < 20 * MIB


class Stream:
    """A stream that must not be disturbed: it ticks, and somebody reads it."""

    def __init__(self) -> None:
        self.go_on = True
        self.ticks = 0

    def serve(self, sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        while self.go_on:
            sock.sendall(b"9\r\ndata: 1\n\n\r\n")
            time.sleep(0.02)
        sock.sendall(b"0\r\n\r\n")

    @contextlib.contextmanager
    def read(self, proxy):
        with proxy.connect() as sock:
            sock.sendall(get(b"/ticks"))
            assert read_head(sock).startswith(b"HTTP/1.1 200 ")
            reading = threading.Thread(target=self._count, args=(sock,))
            reading.start()
            try:
                yield
                before = self.ticks
                deadline = time.monotonic() + 5
                while self.ticks == before:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            finally:
                self.go_on = False
                reading.join(5)
            assert self.data.endswith(b"0\r\n\r\n")

    def _count(self, sock: socket.socket) -> None:
        self.data = b""
        while not self.data.endswith(b"0\r\n\r\n") and (more := sock.recv(65536)):
            self.data = self.data[-16:] + more
            self.ticks += more.count(b"data: 1")


@LOOPS
def test_an_upstream_that_speaks_garbage(loop, tmp_path):
    """502 for each request that meets it; a stream beside them goes on."""
    stream = Stream()
    garbage = bytes(range(256)) * 4096

    def handle(sock: socket.socket) -> None:
        request = read_request(sock)
        if b" /ticks " in request:
            stream.serve(sock)
        elif b" /head " in request:
            sock.sendall(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 8 * MIB)
        else:
            sock.sendall(garbage)

    with upstream(handle) as port, serving(loop, port, tmp_path) as proxy, stream.read(proxy):
        before = proxy.descriptors()
        for number in range(100):
            answer = proxy.ask(get(b"/head") if number % 2 else post(b"{}"))
            assert answer.startswith(b"HTTP/1.1 502 "), answer
        assert proxy.descriptors() <= before + 2
        growth = proxy.growth()
        print(f"\n{loop}: 100 garbage answers, 450 MB: memory grew by {growth / MIB:.1f} MiB")
        assert growth < 20 * MIB


@LOOPS
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_a_client_that_sends_half_a_request_and_leaves(loop, how, tmp_path):
    """Hundreds of them, in each state that a request can be in: nothing of them stays."""
    stream = Stream()

    def handle(sock: socket.socket) -> None:
        head = read_head(sock)
        if b" /ticks " in head:
            stream.serve(sock)
        elif b" /honest " in head:
            sock.sendall(ok(b"fine", b"Connection: close"))
        else:
            with contextlib.suppress(OSError):
                while sock.recv(65536):
                    pass

    halves = [
        b"", b"POS", b"POST /mcp HTTP/1.1\r\nHos", b"POST /mcp HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 60_000,
        get(b"/mcp", b"Content-Length: 1000000", method=b"POST") + b"x" * 100_000,
        get(b"/mcp", b"Transfer-Encoding: chunked", method=b"POST") + b"ffffff\r\n" + b"x" * 100_000,
        get(b"/mcp", b"Transfer-Encoding: chunked", b"Mcp-Session-Id: no", method=b"POST") + b"ff\r\nx",
    ]  # fmt: skip
    with upstream(handle) as port, serving(loop, port, tmp_path) as proxy, stream.read(proxy):
        before = proxy.descriptors()
        after = []
        for _ in range(3):
            for number in range(350):
                with proxy.connect() as sock:
                    sock.sendall(halves[number % len(halves)])
                    if how == "RST":
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            deadline = time.monotonic() + 10
            while proxy.descriptors() > before:
                assert time.monotonic() < deadline, "connections of clients that left are still open"
                time.sleep(0.02)
            after.append(proxy.memory() - proxy.at_start)
        assert proxy.ask(get(b"/honest")).endswith(b"fine")
        growths = ", ".join(f"{growth / MIB:.1f}" for growth in after)
        print(f"\n{loop}, {how}: 350 half requests three times: memory had grown by {growths} MiB after each")
        assert max(after) < 64 * MIB  # of the 100 MB that were sent


@LOOPS
@pytest.mark.parametrize(
    "size",
    [pytest.param(512 * MIB, id="512 MiB"), pytest.param(5 * 1024 * MIB, id="5 GiB", marks=pytest.mark.slow)],
)
def test_an_event_of_gigabytes(loop, size, tmp_path):
    """It flows through a guarded stream as fast as it can, and others are served meanwhile."""
    block = b"x" * MIB

    def handle(sock: socket.socket) -> None:
        while request := read_request(sock):
            if request.startswith(b"GET "):
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nid: 1\ndata: ")
                for _ in range(size // MIB):
                    sock.sendall(block)
                sock.sendall(b"\n\nid: 2\ndata: after\n\n")
                return
            if b"initialize" in request:
                sock.sendall(ok(RESULT, b"Content-Type: application/json", SESSION))
            else:
                sock.sendall(ok(b"fine"))

    with upstream(handle) as port, serving(loop, port, tmp_path) as proxy:
        assert b"Mcp-Session-Id" in proxy.ask(post(b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'))
        slowest = 0.0
        done = threading.Event()

        def ask_meanwhile() -> None:
            nonlocal slowest
            while not done.is_set():
                began = time.perf_counter()
                assert proxy.ask(post(b"{}", SESSION)).endswith(b"fine")
                slowest = max(slowest, time.perf_counter() - began)
                time.sleep(0.02)

        others = threading.Thread(target=ask_meanwhile)
        others.start()
        began = time.perf_counter()
        with proxy.connect() as sock:
            # HTTP/1.0, so that what arrives is the bare stream.
            sock.sendall(get(b"/mcp", SESSION, b"Accept: text/event-stream").replace(b"HTTP/1.1", b"HTTP/1.0"))
            assert read_head(sock).startswith(b"HTTP/1.1 200 ")
            received, last = 0, b""
            buffer = bytearray(MIB)
            while length := sock.recv_into(buffer):
                received += length
                last = (last + buffer[max(0, length - 64) : length])[-64:]
        seconds = time.perf_counter() - began
        done.set()
        others.join()
        assert received == len(b"id: 1\ndata: ") + size + len(b"\n\nid: 2\ndata: after\n\n")
        assert last.endswith(b"x\n\nid: 2\ndata: after\n\n")
        growth = proxy.growth()
        print(
            f"\n{loop}: an event of {size / MIB:.0f} MiB in {seconds:.1f} s ({size / MIB / seconds:.0f} MiB/s), "
            f"memory {proxy.at_start / MIB:.1f} MiB, grew by {growth / MIB:.1f} MiB, slowest other call {slowest:.3f} s"
        )
        assert growth < 40 * MIB
        assert slowest < 2
        assert seconds < size / (20 * MIB)
