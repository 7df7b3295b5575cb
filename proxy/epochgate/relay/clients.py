"""The connections of clients: how many there may be, who gives way to others, and how long a request may take to come.

A client costs a descriptor and some memory before it has asked for anything. So whoever waits, or dribbles a request,
holds a place only as long as nobody needs it: a flood of connections drives out its own.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from epochgate.relay.known import Room
from epochgate.settings import Limits

if TYPE_CHECKING:
    from epochgate.relay.client import ClientConnection

SPARE_FILES = 64  # descriptors that are left for listeners, the store, logs and the admin side
BODY_RATE = 500  # bytes a second that the body of a request has to come with; Apache's mod_reqtimeout asks for that too


class Clients:
    """The connections, and the limits in force. `others`: what takes descriptors, too; `files`: how many there are."""

    def __init__(self, limits: Limits, others: Collection[object] = (), files: int | None = None) -> None:
        self.limits = limits
        self.closed: Counter[str] = Counter(gave_way=0, refused=0, slow_head=0, slow_body=0)
        self.heads = Room()
        self._files = open_files() if files is None else files
        self._others = others
        self._all: set[ClientConnection] = set()
        self._waiting: dict[ClientConnection, None] = {}  # without a complete request, by since when

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self._all)

    @property
    def most(self) -> int:
        """How many there may be now."""
        return min(self.limits.connections, self._files - SPARE_FILES - len(self._others))

    def admit(self, client: ClientConnection) -> bool:
        """Take a new connection; False where there is no room, and none that waits."""
        self._all.add(client)
        self.make_room()
        if len(self._all) > self.most:
            self._all.discard(client)
            self.closed["refused"] += 1
            return False
        self._waiting[client] = None
        return True

    def make_room(self) -> None:
        """Where there are too many, those that have waited longest give way."""
        while len(self._all) > self.most and self._waiting:
            longest = next(iter(self._waiting))
            if longest.reply is not None and longest.reply.started:  # before the end of its request
                self.begin(longest)
                continue
            self.remove(longest)
            self.closed["gave_way"] += 1
            longest.abort()

    def begin(self, client: ClientConnection) -> None:
        """A complete request of it is being worked on."""
        self._waiting.pop(client, None)

    def finish(self, client: ClientConnection) -> None:
        """It waits for a request again."""
        if client in self._all:
            self._waiting[client] = None

    def remove(self, client: ClientConnection) -> None:
        """It is no more."""
        self._all.discard(client)
        self._waiting.pop(client, None)


def open_files() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Allow as many descriptors as may be had: the lower, soft limit is there for programs that use `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems have a hard limit that cannot be reached
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
