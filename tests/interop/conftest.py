"""The real SDKs, and what their runs came to. Each set of runs is played once, many at a time, for many tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from interop import faults, sessions
from interop.environments import SDKS, Sdk, UnavailableError, prepare, required

Need = Callable[..., None]


@pytest.fixture(scope="session")
def installed() -> dict[str, Sdk | UnavailableError]:
    """Each SDK by its name, or why this machine cannot have it."""

    def prepared(name: str) -> Sdk | UnavailableError:
        try:
            return prepare(name)
        except UnavailableError as error:
            return error

    return {name: prepared(name) for name in SDKS}


@pytest.fixture(scope="session")
def sdks(installed: dict[str, Sdk | UnavailableError]) -> list[Sdk]:
    return [sdk for sdk in installed.values() if isinstance(sdk, Sdk)]


@pytest.fixture(scope="session")
def need(installed: dict[str, Sdk | UnavailableError]) -> Need:
    """Skips the test that needs an SDK which this machine cannot have; on the build server that is a failure."""

    def check(*names: str) -> None:
        for name in names:
            if isinstance(reason := installed[name], UnavailableError):
                (pytest.fail if required() else pytest.skip)(str(reason))

    return check


@pytest.fixture(scope="session")
def documents(sdks: list[Sdk]) -> dict[sessions.Key, sessions.Document | Exception]:
    """Whole sessions, through the proxy and directly."""
    return asyncio.run(sessions.play_all(sdks))


@pytest.fixture(scope="session")
def outcomes(sdks: list[Sdk]) -> dict[faults.Key, faults.Outcome | Exception]:
    """Every fault with every SDK through the proxy."""
    return asyncio.run(faults.play_all(sdks, direct=False))
