"""Reading the configuration again while the proxy runs (section 9): validated whole, swapped at once, or not at all."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import watchfiles

from epochgate.errors import ConfigurationError
from epochgate.files import check_regular
from epochgate.relay.telemetry import log
from epochgate.settings import Section, Settings

APPLIED = ("policies", "drain", "admin.token_file")  # keys, and what is below them, that need no restart
STEP = 250  # ms between two looks of the watcher, for each of which the traffic has to give way
DEBOUNCE = 200  # ms: a swap of several files is one change
LOOK_EVERY = 5000  # ms: what the kernel does not tell (a file that is mounted alone, a network) is seen then


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What became of one reading. `at` in s since 1970; `error` is "" where it is in force."""

    at: float
    error: str = ""
    needs_restart: tuple[str, ...] = ()  # keys that differ from those that the process started with
    flags_win: tuple[str, ...] = ()  # flags of the command line, such as `--mode`: the file does not change their keys


class Reload:
    """The settings in force, and how they change.

    `use` puts new ones in force, and reads the files of `tls` and `upstream.tls` again. Where it cannot, it changes
    nothing and raises ConfigurationError.
    """

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings],
        use: Callable[[Settings], None],
        *,
        config: Path | None,
    ) -> None:
        self.settings = settings
        self.last = Reloaded(time.time(), flags_win=settings.flags)
        self.results: Counter[str] = Counter(success=0, failure=0)
        self._started = settings
        self._load = load
        self._use = use
        tls, upstream = settings.tls, settings.upstream.tls
        names = (config, tls.cert, tls.key, upstream.ca, upstream.cert, upstream.key)
        self._files = [Path(name) for name in names if name is not None]
        self._seen = self._digest()

    def apply(self, source: str) -> Reloaded:
        """Read everything again; where anything is wrong, all stays as it was. `source` is for the log."""
        self._seen = self._digest()
        try:
            settings = self._load()
            self._use(settings)
        except ConfigurationError as error:
            self.results["failure"] += 1
            self.last = Reloaded(time.time(), str(error), self.last.needs_restart, self.last.flags_win)
            log.error("reload.failed", source=source, message=str(error))
            return self.last
        self.settings = settings
        self.results["success"] += 1
        self.last = Reloaded(time.time(), "", tuple(changed_keys(self._started, settings)), settings.flags)
        log.info(
            "reload.done",
            source=source,
            policies=len(settings.policies),
            needs_restart=list(self.last.needs_restart),
            flags_win=list(self.last.flags_win),
        )
        return self.last

    async def watch(self) -> None:
        """Apply whenever the content of a file has changed, until cancelled.

        The directories are watched, not the files: a ConfigMap is swapped by a link beside them. What happens there is
        only a reason to look at the content.
        """
        try:
            await self._watch(polling=False)
        except (OSError, RuntimeError) as error:  # a kernel that has no watch to spare, as in a crowded pod
            log.warning("reload.polls", why=str(error))
            await self._watch(polling=True)

    async def _watch(self, *, polling: bool) -> None:
        directories = {file.absolute().parent for file in self._files}
        if not directories:
            return
        async for _ in watchfiles.awatch(
            *directories,
            watch_filter=None,
            recursive=False,
            debounce=DEBOUNCE,
            step=STEP,
            rust_timeout=LOOK_EVERY,
            yield_on_timeout=True,
            force_polling=polling,
            poll_delay_ms=LOOK_EVERY,
        ):
            if self._digest() != self._seen:
                self.apply("file")

    def _digest(self) -> bytes:
        digest = hashlib.sha256()
        for file in self._files:
            try:
                check_regular(file)
                content = file.read_bytes()
            except OSError:
                content = b""
            digest.update(b"%d:%b" % (len(content), content))
        return digest.digest()


def changed_keys(old: Settings, new: Settings) -> Iterator[str]:
    """The keys that differ and are not in `APPLIED`, in order, such as `upstream.url`."""

    def walk(above: str, left: object, right: object) -> Iterator[str]:
        if left == right or above in APPLIED:
            return
        if isinstance(left, Section) and isinstance(right, Section):
            for key in type(left).model_fields:
                yield from walk(f"{above}.{key}" if above else key, getattr(left, key), getattr(right, key))
        else:
            yield above

    return walk("", old, new)
