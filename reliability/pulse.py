"""A caller of good will, beside an attack. `python -m reliability.pulse PORT`: a line in, a line out.

It calls each 20 ms on a connection that it keeps, and each fifth time on a new one. Each line read from stdin is
answered by what became of the calls since the last: their number, the failed ones, the median, the 99th percentile and
the slowest, in s.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from reliability.wire import Wire

EVERY = 0.02  # s
PATIENCE = 10.0  # s
FRESH = 5

CALL = b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}'
INITIALIZE = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'


class Pulse:
    """The caller, and how long its calls took."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._took: list[float] = []
        self._failed: list[str] = []
        self._fields: dict[str, str] = {}
        self._kept: Wire | None = None

    async def open(self) -> None:
        """Its session. A record of it is made, which no attack made."""
        wire = await Wire.to(self._port)
        await wire.ask("POST", "/mcp", {}, INITIALIZE)
        await wire.read_all()
        self._fields = {"Mcp-Session-Id": wire.fields["mcp-session-id"]}
        wire.close()

    async def beat(self) -> None:
        number = 0
        while True:
            number += 1
            began = time.perf_counter()
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._call(fresh=number % FRESH == 0)
                self._took.append(time.perf_counter() - began)
            except (OSError, TimeoutError, ValueError) as error:
                self._failed.append(str(error) or type(error).__name__)
                self._kept = None
            await asyncio.sleep(max(EVERY - (time.perf_counter() - began), 0))

    async def _call(self, *, fresh: bool) -> None:
        if fresh or self._kept is None or not self._kept.usable:
            wire = await Wire.to(self._port)
        else:
            wire = self._kept
        status = await wire.ask("POST", "/mcp", self._fields, CALL)
        if status != 200 or b'"result"' not in await wire.read_all():
            raise ValueError(f"answered {status}")
        if fresh and wire is not self._kept:
            wire.close()
        else:
            self._kept = wire

    def tell(self) -> str:
        took, self._took = sorted(self._took), []
        failed, self._failed = self._failed, []
        figures = {"calls": len(took), "failed": len(failed), "why": failed[:1]}
        for name, share in (("median", 0.5), ("p99", 0.99), ("slowest", 1.0)):
            figures[name] = took[min(int(len(took) * share), len(took) - 1)] if took else PATIENCE
        return json.dumps(figures)


async def main(port: int) -> None:
    pulse = Pulse(port)
    await pulse.open()
    beating = asyncio.create_task(pulse.beat())
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        if beating.done():
            beating.result()
        print(pulse.tell(), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
