"""The environments of the real SDKs: built once from the pin files beside this module, used again while those stand."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

HERE = pathlib.Path(__file__).parent
CACHE = HERE / ".env"
SDKS = ("python1", "python2", "typescript1")


class UnavailableError(Exception):
    """An SDK cannot be used on this machine; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Sdk:
    """One SDK: how its scripts are run."""

    name: str
    interpreter: str
    suffix: str

    def command(self, role: str, *arguments: str) -> list[str]:
        """The argument vector of its server or client script; `role` is `servers` or `clients`."""
        return [self.interpreter, str(HERE / role / f"{self.name}{self.suffix}"), *arguments]


def required() -> bool:
    """Whether nothing may be left out: on the build server."""
    return os.environ.get("CI") == "true"


def prepare(name: str) -> Sdk:
    """The SDK `name`, its environment built if need be.

    Raises `UnavailableError` where Node is missing, and `CalledProcessError` where an installation fails.
    """
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:  # test workers come here at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if name == "typescript1":
            return _prepare_node(name)
        return _prepare_python(name)


def _prepare_python(name: str) -> Sdk:
    home = CACHE / name
    python = home / "bin" / "python"
    pins = HERE / f"requirements-{name}.txt"

    def install() -> None:
        shutil.rmtree(home, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(home)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(pins)])

    _once(name, pins, sys.version, python, install)
    return Sdk(name, str(python), ".py")


def _prepare_node(name: str) -> Sdk:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise UnavailableError("Node is not installed: install Node 20 or newer, with npm, to run the TypeScript SDK")
    modules = HERE / "node_modules"

    def install() -> None:
        shutil.rmtree(modules, ignore_errors=True)
        flags = ["--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        try:
            _run([npm, "install", *flags, "--prefix", str(HERE)])
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise UnavailableError("npm could not install the TypeScript SDK: its registry is out of reach") from error

    _once(name, HERE / "package.json", node, modules, install)
    return Sdk(name, node, ".mjs")


def _once(name: str, pins: pathlib.Path, runtime: str, product: pathlib.Path, install: Callable[[], None]) -> None:
    """Runs `install` unless it ran for these very pins."""
    stamp = CACHE / f"{name}.pins"
    wanted = hashlib.sha256(pins.read_bytes() + runtime.encode()).hexdigest()
    if product.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    install()
    stamp.write_text(wanted)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=180)
