"""Run as a program in namespaces of its own (network and mounts): starts the built image as an orchestrator would.

The root is read-only, the user the image's own. One request goes through it, its health check is run, it is ended.
What was seen is printed as JSON.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import urllib.request
from typing import Any, ClassVar

UPSTREAM = 3000
DEADLINE = 30.0  # s, on a busy machine


class Answer(http.server.BaseHTTPRequestHandler):
    """The server behind the proxy: what it was asked for, as a body."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers["Via"])
        body = f"asked for {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=DEADLINE)


def mount(root: str) -> None:
    """The image's files, read only; /proc and /dev as every container has them."""
    run(["mount", "--bind", root, root])
    run(["mount", "-o", "remount,bind,ro", root])
    run(["mount", "-t", "proc", "proc", f"{root}/proc"])
    run(["mount", "--rbind", "/dev", f"{root}/dev"])


def main(root: str, config: dict[str, Any]) -> dict[str, Any]:
    run(["ip", "link", "set", "lo", "up"])
    mount(root)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", UPSTREAM), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    environment["EPOCHGATE_UPSTREAM__URL"] = f"http://127.0.0.1:{UPSTREAM}"
    environment["EPOCHGATE_DRAIN__GRACE"] = "0s"
    inside = ["chroot", f"--userspec={config['User']}", root]
    path = os.environ["PATH"]  # of this machine, to find chroot by

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        whole = [*inside, "/usr/bin/env", "-i", *(f"{key}={value}" for key, value in environment.items()), *command]
        return subprocess.Popen(whole, text=True, env={"PATH": path}, **options)

    container = start(
        [*config["Entrypoint"], *config["Cmd"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        assert container.stdout is not None
        assert container.stderr is not None
        seen: dict[str, Any] = {"line": container.stdout.readline()}
        if not seen["line"]:
            raise RuntimeError(f"the container ended at once: {container.stderr.read()}")
        health = config["Healthcheck"]["Test"]
        assert health[0] == "CMD"
        seen["health"] = start(health[1:]).wait(DEADLINE)
        with urllib.request.urlopen("http://127.0.0.1:8080/mcp?x=1", timeout=DEADLINE) as answer:
            seen["body"] = answer.read().decode()
        seen["via"] = Answer.seen
        connection = http.client.HTTPConnection("127.0.0.1", 9090, timeout=DEADLINE)
        connection.request("GET", "/readyz")
        seen["ready"] = connection.getresponse().status
        connection.close()
        with pathlib.Path(f"/proc/{container.pid}/status").open() as status:
            seen["uid"] = next(line.split()[1] for line in status if line.startswith("Uid:"))
        container.terminate()
        _, log = container.communicate(timeout=DEADLINE)
        seen["status"] = container.returncode
        seen["log"] = log
        seen["health_after"] = start(health[1:], stderr=subprocess.DEVNULL).wait(DEADLINE)
    finally:
        if container.poll() is None:
            container.kill()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
