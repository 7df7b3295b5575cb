"""What the tests of this folder need from the machine. Where it is missing they skip, but not on the build server."""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
import sys
from types import ModuleType

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


def bring(module: str, package: str) -> ModuleType:
    """A module that only these tests use."""
    try:
        return importlib.import_module(module)
    except ImportError:
        leave(f"{package} is not installed: pip install {package}")
        raise AssertionError from None  # not reached
