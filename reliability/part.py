"""One part of the run: what it does, how it is run, and the figures that it gives."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Options:
    """How much: `long` is the full figure of the page, otherwise a few minutes; `seed` makes a run repeatable."""

    long: bool
    seed: int
    plots: pathlib.Path
    work: pathlib.Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the page: what was measured, the value, the bound as words, and whether it holds.

    `unreachable`: it does not hold because somebody else's service could not be asked, which does not fail the run.
    """

    what: str
    value: str
    bound: str
    holds: bool
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """`run` raises or gives figures; each figure that does not hold fails the run, unless it could not be asked for."""

    name: str
    title: str
    about: str  # Markdown: the method, in a few sentences
    run: Callable[[Options], list[Figure]]
    plots: tuple[str, ...] = field(default=())  # files that `run` writes into Options.plots
