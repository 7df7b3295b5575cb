"""The files that a configuration names, and it itself."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


def check_regular(path: str | Path) -> None:
    """Raises OSError for what is no regular file: reading a pipe, say, could keep everybody waiting for good."""
    if not stat.S_ISREG(mode := Path(path).stat().st_mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "is no regular file")
