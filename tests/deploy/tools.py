"""What the tests of this folder need from the machine. On the build server nothing may be missing; elsewhere they skip."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
CHART = REPOSITORY / "helm" / "epochgate"
FILES = CHART / "files"


def leave(why: str) -> None:
    """End the test: skipped, or failed on the build server."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)


def find(program: str, remedy: str) -> str:
    """The path of a program, beside this Python or on the machine."""
    beside = pathlib.Path(sys.executable).with_name(program)
    if beside.exists():
        return str(beside)
    if (path := shutil.which(program)) is None:
        leave(f"{program} is not installed: {remedy}")
        raise AssertionError  # not reached
    return path
