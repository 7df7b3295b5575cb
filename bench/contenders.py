"""Who is measured: how each is found, configured and started. Each listens on one port and relays to one other."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench import machine

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
ENVIRONMENTS = ROOT / ".bench"

_NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr crit; worker_rlimit_nofile 20000;
events {{ worker_connections 30000; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder}; keepalive_requests 100000000;
  upstream server {{ server 127.0.0.1:{upstream}; keepalive 256; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 1h;
    }}
  }}
}}
"""
_HAPROXY = """
global
  nbthread 1
  maxconn 9900
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  http-reuse always
frontend clients
  bind 127.0.0.1:{port}
  default_backend server
backend server
  server one 127.0.0.1:{upstream}
"""
_ENVOY = (HERE / "envoy.yaml").read_text()
_EPOCHGATE = """
version: 1
listen: 127.0.0.1:{port}
upstream: {{url: "http://127.0.0.1:{upstream}"}}
admin: {{listen: 127.0.0.1:{admin}}}
drain: {{grace: 0s, window: 0s}}
log: {{level: warning}}
policies:
  - {{name: epoch, match: {{path: /resume/epoch}}, mode: {mode}, resume: {{accept: [epoch]}}}}
  - {{name: overlap, match: {{path: /resume/overlap}}, mode: {mode}, resume: {{accept: [overlap]}}}}
  - {{name: mcp, mode: {mode}}}
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """`command` makes the argument vector from the folder for its files, its port and the upstream's.

    `missing` says why it cannot run here ("" if it can), `version` is the command that tells its version.
    `spread`: it may use all CPUs; `says`: what it prints when it is ready, if to accept connections is not enough.
    """

    name: str
    missing: Callable[[], str]
    command: Callable[[pathlib.Path, int, int], list[str]]
    version: list[str]
    source: str = ""  # the source root of another version of epochgate
    spread: bool = False
    says: bytes = b""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _write(folder: pathlib.Path, name: str, template: str, **values: object) -> str:
    path = folder / name
    path.write_text(template.format(folder=folder, **values))
    return str(path)


def _program(*places: str) -> str:
    return next((found for place in places if (found := shutil.which(place))), "")


def _needs(what: str, *places: str) -> Callable[[], str]:
    return lambda: "" if _program(*places) else f"{what} is not installed"


_PEERS = ENVIRONMENTS / "peers" / "bin"
PEER_PYTHON = str(_PEERS / "python")
NGINX, HAPROXY = "/usr/sbin/nginx", "/usr/sbin/haproxy"
ENVOY = str(_PEERS / "envoy")
GATE = str(pathlib.Path(sys.executable).with_name("epochgate"))
MITMPROXY = str(ENVIRONMENTS / "mitmproxy" / "bin" / "mitmdump")
MCP_PROXY = str(ENVIRONMENTS / "mcp-proxy" / "bin" / "mcp-proxy")


def _nginx(folder: pathlib.Path, port: int, upstream: int) -> list[str]:
    return [NGINX, "-p", str(folder), "-c", _write(folder, "nginx.conf", _NGINX, port=port, upstream=upstream)]


def _haproxy(folder: pathlib.Path, port: int, upstream: int) -> list[str]:
    return [HAPROXY, "-db", "-q", "-f", _write(folder, "haproxy.cfg", _HAPROXY, port=port, upstream=upstream)]


def _envoy(folder: pathlib.Path, port: int, upstream: int) -> list[str]:
    path = _write(folder, "envoy.yaml", _ENVOY, port=port, upstream=upstream)
    return [ENVOY, "-c", path, "--concurrency", "1", "--log-level", "off", "--disable-hot-restart"]


def _mcp_proxy(_: pathlib.Path, port: int, upstream: int) -> list[str]:
    """It speaks HTTP on one side only, so two of them stand back to back."""
    towards = [MCP_PROXY, "--log-level", "ERROR", "--transport", "streamablehttp", f"http://127.0.0.1:{upstream}/mcp"]
    return [MCP_PROXY, "--log-level", "ERROR", "--port", str(port), "--", *towards]


def _gate(mode: str, *interpreter: str) -> Callable[[pathlib.Path, int, int], list[str]]:
    def command(folder: pathlib.Path, port: int, upstream: int) -> list[str]:
        path = _write(folder, "epochgate.yaml", _EPOCHGATE, port=port, upstream=upstream, admin=free_port(), mode=mode)
        return [*(interpreter or (GATE,)), "serve", "--config", path]

    return command


def _workers(number: int) -> Callable[[pathlib.Path, int, int], list[str]]:
    """With a Valkey beside it, whose CPU time counts as its own."""

    def command(folder: pathlib.Path, port: int, upstream: int) -> list[str]:
        environment = ["env", f"EPOCHGATE_WORKERS={number}"]
        return [*environment, sys.executable, str(HERE / "with_store.py"), *_gate("enforce")(folder, port, upstream)]

    return command


def _with_store(url: str) -> Callable[[pathlib.Path, int, int], list[str]]:
    """`{folder}` in the URL is that of its files."""

    def command(folder: pathlib.Path, port: int, upstream: int) -> list[str]:
        return ["env", f"EPOCHGATE_STORE__URL={url.format(folder=folder)}", *_gate("enforce")(folder, port, upstream)]

    return command


def _aiohttp(*loop: str) -> Callable[[pathlib.Path, int, int], list[str]]:
    return lambda _, port, upstream: [
        sys.executable,
        str(HERE / "baseline_aiohttp.py"),
        str(port),
        str(upstream),
        *loop,
    ]


_WITHOUT_UVLOOP = "import sys; sys.modules['uvloop'] = None; from epochgate.cli import main; sys.exit(main())"
_ALWAYS = _needs("Python", sys.executable)
_READY = b" accepts connections on "

CONTENDERS = (
    Contender("nginx", _needs("nginx", NGINX), _nginx, [NGINX, "-v"]),
    Contender("haproxy", _needs("HAProxy", HAPROXY), _haproxy, [HAPROXY, "-v"]),
    Contender("envoy", _needs("Envoy", ENVOY), _envoy, [ENVOY, "--version"]),
    Contender("aiohttp", _ALWAYS, _aiohttp(), [sys.executable, "-c", "import aiohttp; print(aiohttp.__version__)"]),
    Contender(
        "aiohttp-uvloop",
        _ALWAYS,
        _aiohttp("uvloop"),
        [sys.executable, "-c", "import aiohttp; print(aiohttp.__version__)"],
    ),
    Contender("epochgate", _needs("epochgate", GATE), _gate("enforce"), [GATE, "version"]),
    Contender("epochgate-bypass", _needs("epochgate", GATE), _gate("bypass"), [GATE, "version"]),
    Contender(
        "epochgate-asyncio",
        _needs("epochgate", GATE),
        _gate("enforce", sys.executable, "-c", _WITHOUT_UVLOOP),
        [GATE, "version"],
    ),
)
WORKERS = tuple(
    Contender(
        f"epochgate-{number}-worker{'s' * (number > 1)}",
        _needs("epochgate", GATE),
        _workers(number),
        [GATE, "version"],
        spread=True,
        says=_READY,
    )
    for number in (1, 2)
)
STORES = tuple(
    Contender(f"epochgate-{name}", _needs("epochgate", GATE), command, [GATE, "version"], spread=True, says=_READY)
    for name, command in (
        ("memory", _with_store("memory://")),
        ("sqlite", _with_store("sqlite://{folder}/ledger.db")),
        ("valkey", _workers(1)),
    )
)
PEERS = (
    Contender(
        "mitmproxy",
        _needs("mitmproxy", MITMPROXY),
        lambda folder, port, upstream: [
            *(MITMPROXY, "--mode", f"reverse:http://127.0.0.1:{upstream}", "--listen-host", "127.0.0.1"),
            *("-p", str(port), "-q", "--set", "stream_large_bodies=1", "--set", f"confdir={folder}"),
        ],
        [MITMPROXY, "--version"],
    ),
    Contender(
        "uvicorn-httpx",
        _needs("uvicorn", str(_PEERS / "uvicorn")),
        lambda _, port, upstream: [PEER_PYTHON, str(HERE / "relay_httpx.py"), str(port), str(upstream)],
        [str(_PEERS / "uvicorn"), "--version"],
    ),
    Contender(
        "fastmcp-proxy",
        _needs("FastMCP", str(_PEERS / "fastmcp")),
        lambda _, port, upstream: [PEER_PYTHON, str(HERE / "relay_fastmcp.py"), str(port), str(upstream)],
        [PEER_PYTHON, "-c", "import fastmcp; print(fastmcp.__version__)"],
    ),
    Contender("mcp-proxy", _needs("mcp-proxy", MCP_PROXY), _mcp_proxy, [MCP_PROXY, "--version"]),
)


def earlier(source: pathlib.Path) -> Contender:
    """Another version of epochgate, to compare a change with what was before."""
    return Contender("epochgate-before", _ALWAYS, _gate("enforce"), [GATE, "version"], str(source.resolve()))


@dataclass(frozen=True, slots=True)
class Running:
    """A contender that accepts connections. `pid` is None for the direct way."""

    name: str
    port: int
    pid: int | None
    start_seconds: float


@contextmanager
def started(contender: Contender | None, upstream: int) -> Iterator[Running]:
    """Run it for as long as the context lasts; None stands for no proxy at all."""
    if contender is None:
        yield Running("direct", upstream, None, 0.0)
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = pathlib.Path(name)
        port = free_port()
        with (folder / "output").open("wb") as output:
            began = time.perf_counter()
            process = subprocess.Popen(
                machine.pinned(
                    machine.ALL_CPUS if contender.spread else machine.PROXY_CPU,
                    contender.command(folder, port, upstream),
                ),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | ({"PYTHONPATH": contender.source} if contender.source else {}),
            )
        try:
            wait_for(port, process, folder / "output", contender.says)
            yield Running(contender.name, port, process.pid, time.perf_counter() - began)
        finally:
            stop(process)


def wait_for(
    port: int, process: subprocess.Popen[bytes], output: pathlib.Path | None = None, says: bytes = b""
) -> None:
    """Wait until the process accepts connections, and has said `says`. Raises RuntimeError with what it said if not."""
    deadline = time.perf_counter() + 30
    while time.perf_counter() < deadline and process.poll() is None:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0 and (output is None or says in output.read_bytes()):
                return
        time.sleep(0.005)
    said = output.read_text(errors="replace")[-2000:] if output else ""
    raise RuntimeError(f"{process.args!r} does not accept connections\n{said}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that this one started."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def upstream() -> Iterator[Running]:
    """The upstream of the benchmark."""
    port = free_port()
    command = machine.pinned(machine.LOAD_CPU, [sys.executable, "-m", "bench.upstream", str(port)])
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(port, process)
        yield Running("upstream", port, process.pid, 0.0)
    finally:
        stop(process)
