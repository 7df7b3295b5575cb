"""What all workers of one proxy are together, for the admin side: each number added up, each session once."""

from __future__ import annotations

import asyncio
import heapq
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from epochgate.admin.snapshot import Obstacle, Readiness, Snapshot, obstacles, total
from epochgate.admin.subject import PolicyGoneError
from epochgate.admin.views import View, verdict_views
from epochgate.relay.reload import Reload, Reloaded
from epochgate.relay.telemetry import LAST_VERDICTS, Decided
from epochgate.workers.channel import (
    Fence,
    Found,
    Listed,
    ListSessions,
    Question,
    Report,
    Reported,
    ShowSession,
    ShowSessions,
    Use,
)
from epochgate.workers.process import Answer, UnansweredError, WorkerProcess

ASK_WITHIN = 2.0  # s that an answer of the admin side waits for a worker, and goes without it then


class Together:
    """See `Subject`. `draining` is set by whoever ends the proxy."""

    def __init__(self, workers: Sequence[WorkerProcess], reload: Reload) -> None:
        self.draining = False
        self.complete = False  # all of them accepted connections, once
        self._workers = workers
        self._reload = reload
        self._started_at = time.time()
        self._decided: deque[Decided] = deque(maxlen=LAST_VERDICTS)
        self._using: asyncio.Task[list[str]] | None = None

    def hear(self, decided: list[Decided]) -> None:
        """New verdicts of a worker."""
        self._decided.extend(decided)

    def use(self, settings: bytes) -> None:
        """Have all workers put these settings in force."""
        self._using = asyncio.create_task(self._ask(Use(settings), str))

    # -- Subject

    async def readiness(self) -> Readiness:
        """See `Subject`. Ready while a worker serves and lacks nothing; what others lack is a note."""
        if self.draining:
            return Readiness([Obstacle("draining", "the proxy is about to end")])
        found = {worker.number: self._trouble(worker) for worker in self._workers}
        told = _tell(found)
        if not self.complete:
            return Readiness([Obstacle("starting", "the workers have not all begun"), *told])
        return Readiness(notes=told) if None in found.values() else Readiness(told)

    async def snapshot(self) -> Snapshot:
        """See `Subject`."""
        await self._ask(Report(sessions=True), Reported)
        told = [snapshot for worker in self._workers if (snapshot := worker.snapshot()) is not None]
        snapshot = total(told, self._started_at)
        snapshot.draining = self.draining
        snapshot.sessions = len(_join(worker.known for worker in self._workers))
        snapshot.fenced = len(_join(worker.fenced for worker in self._workers))
        return snapshot

    async def decided(self) -> Sequence[Decided]:
        """See `Subject`."""
        await self._ask(Report(sessions=False), Reported)
        return sorted(self._decided, key=attrgetter("at"))

    async def sessions(self, wanted: dict[str, str], limit: int) -> tuple[int, list[View]]:
        """See `Subject`. Each worker tells which ones it has, then each is asked for those that are to be shown."""
        state = wanted.get("state")
        lists = await self._ask(ListSessions(state, wanted.get("policy"), limit), Listed)
        tags = _in_state(lists, state)
        active: dict[int, float] = {}
        for at, tag in (entry for listed in lists for entry in listed.last):
            if tag in tags:
                active[tag] = max(at, active.get(tag, at))
        last = heapq.nlargest(limit, active, key=active.__getitem__)
        views: defaultdict[int, list[View]] = defaultdict(list)
        for shown in await self._ask(ShowSessions(last), dict[int, View]):
            for tag, view in shown.items():
                views[tag].append(view)
        return len(tags), [join_views(views[tag]) for tag in last if tag in views]

    async def session(self, fingerprint: str) -> View | None:
        """See `Subject`."""
        found = await self._ask(ShowSession(fingerprint), Found)
        views = [each.session for each in found if each.session is not None]
        if not views:
            return None
        decided = [entry for entry in await self.decided() if entry.session == fingerprint]
        return {
            **join_views([{**view, "streams": len(view["streams"])} for view in views]),
            "streams": _join_streams(views),
            "verdicts": verdict_views(decided, {}, len(decided)),
        }

    async def fence(self, fingerprint: str) -> View | None:
        """See `Subject`. One worker does it; the others hear of it as they hear of every fence."""
        for worker in self._workers:
            try:
                async with asyncio.timeout(ASK_WITHIN):
                    fenced = await worker.ask(Fence(fingerprint), Found)
            except (UnansweredError, TimeoutError):
                continue
            if fenced.gone:
                raise PolicyGoneError(fenced.gone)
            if fenced.session is not None:
                return await self.session(fingerprint)
        return None

    async def reload(self) -> Reloaded:
        """See `Subject`."""
        reloaded = self._reload.apply("request")
        if self._using is not None:
            await asyncio.wait((self._using,))
        return reloaded

    def workers(self) -> list[View]:
        """See `Subject`."""
        return [worker.view() for worker in self._workers]

    # --

    async def _ask(self, question: Question, answer: type[Answer]) -> list[Answer]:
        """The answers of all workers that give one in time."""

        async def one(worker: WorkerProcess) -> list[Answer]:
            try:
                async with asyncio.timeout(ASK_WITHIN):
                    return [await worker.ask(question, answer)]
            except (UnansweredError, TimeoutError):
                return []

        found = await asyncio.gather(*(one(worker) for worker in self._workers))
        return [each for answers in found for each in answers]

    def _trouble(self, worker: WorkerProcess) -> Obstacle | None:
        if (trouble := worker.trouble()) is not None or worker.last is None:
            return trouble
        return next(iter(obstacles(worker.last, self._reload.settings.compiled())), None)


def _tell(found: dict[int, Obstacle | None]) -> list[Obstacle]:
    """What is amiss with whom; what all of them share is told once."""
    by_trouble: defaultdict[Obstacle, list[str]] = defaultdict(list)
    for number, trouble in found.items():
        if trouble is not None:
            by_trouble[trouble].append(str(number))
    return [
        Obstacle(
            trouble.code,
            trouble.message
            if len(numbers) == len(found) and trouble.code != "worker"
            else f"worker {', '.join(numbers)}: {trouble.message}",
        )
        for trouble, numbers in by_trouble.items()
    ]


def _join(tags: Iterable[bytes]) -> set[int]:
    found: set[int] = set()
    for each in tags:
        found.update(array("Q", each))
    return found


def _in_state(lists: Sequence[Listed], state: str | None) -> set[int]:
    """The sessions in a state, which is the most of what the workers say: fenced, open, held, idle."""
    if state is None:
        return _join(each for listed in lists for each in listed.tags.values())
    found: set[int] = set()
    more: set[int] = set()
    for each in ("fenced", "open", "held", "idle"):
        found = _join(listed.tags.get(each, b"") for listed in lists) - more
        if each == state:
            break
        more |= found
    return found


def join_views(views: Sequence[View]) -> View:
    """One session as several workers have it at hand, each in the form of a list: `streams` is how many."""
    latest = max(views, key=lambda view: view["active_at"])
    fenced = next((view for view in views if view["fence"] is not None), None)
    opened, held = (sum(view[key] for view in views) for key in ("open", "held"))
    state = "held" if held and opened <= held else "open" if opened else "idle"
    return {
        **latest,
        "state": state if fenced is None else "fenced",
        "fence": None if fenced is None else fenced["fence"],
        "fenced_at": None if fenced is None else fenced["fenced_at"],
        "epoch": any(view["epoch"] for view in views),
        "boundary_at": max(view["boundary_at"] or 0.0 for view in views) or None,
        "streams": max(view["streams"] for view in views),
        "open": opened,
        "held": held,
    }


def _join_streams(views: Sequence[View]) -> list[View]:
    """Of each stream what the worker says that has seen most of it."""
    found: dict[int, View] = {}
    for stream in sorted((stream for view in views for stream in view["streams"]), key=lambda each: each["events"]):
        former = found.get(stream["stream"], stream)
        found[stream["stream"]] = {**stream, **{key: stream[key] or former[key] for key in ("held", "told")}}
    return [found[key] for key in sorted(found)]
