"""The part of the run that compares what each side receives with and without the proxy between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path

from reliability.exchanges import Exchange, generate
from reliability.lanes import Upstream, differences, play
from reliability.part import Figure, Options, Part
from reliability.served import Served, serving

SHORT, LONG = 1_000, 10_000  # exchanges
LANES = 3  # proxies, each with an upstream and a client of its own
MOST_TOLD = 20  # differences that are written out

POLICIES = [
    {"name": "enforced", "match": {"path": "/mcp*"}, "mode": "enforce"},
    {"name": "observed", "match": {"path": "/observe*"}, "mode": "observe"},
    {"name": "bypassed", "match": {"path": "/bypass*"}, "mode": "bypass"},
]


def run(options: Options) -> list[Figure]:
    """Rows of the page."""
    count = LONG if options.long else SHORT
    start = time.monotonic()
    found = asyncio.run(compare(options.seed, range(count), options.work, LANES))
    took = time.monotonic() - start
    (options.work / "differences.txt").write_text("\n".join(found.differing))
    return [
        Figure(
            "exchanges, directly and through the proxy",
            f"{found.exchanges:,} ({found.requests:,} requests) in {took:.0f} s, {len(found.differing)} differ",
            "none differs",
            holds=not found.differing and found.exchanges == count,
        ),
        Figure(
            "of these",
            ", ".join(f"{name} {number:,}" for name, number in found.kinds.items()),
            "all kinds",
            holds=all(found.kinds.values()),
        ),
        Figure("errors in the proxies' logs", str(len(found.complaints)), "none", holds=not found.complaints),
    ]


class Found:
    """What a comparison found."""

    def __init__(self) -> None:
        self.exchanges = self.requests = 0
        self.kinds: Counter[str] = Counter()
        self.differing: list[str] = []
        self.complaints: list[str] = []

    def count(self, exchange: Exchange) -> None:
        """Take an exchange into the figures."""
        self.exchanges += 1
        self.requests += len(exchange.asked)
        answers = exchange.answers
        framings = Counter(answer.framing for answer in answers)
        self.kinds.update({
            "guarded": int(exchange.mode == b"/mcp"),
            "observed": int(exchange.mode == b"/observe"),
            "in a session": int(any(b"cp-session-id" in asked.head.lower() for asked in exchange.asked)),
            "pipelined": int(exchange.pipelined),
            "split": int(exchange.split),
            "sized": framings["sized"],
            "chunked": framings["chunked"],
            "until close": framings["close"],
            "no body": framings["none"],
            "cut short": sum(answer.cut > 0 for answer in answers),
            "interim": sum(len(answer.interims) for answer in answers),
            "Expect": sum(asked.waits for asked in exchange.asked),
            "HTTP/1.0": sum(not asked.http11 for asked in exchange.asked),
            "HEAD": sum(asked.method == b"HEAD" for asked in exchange.asked),
            "event streams": sum(b"event-stream" in b"".join(answer.fields).lower() for answer in answers),
        })  # fmt: skip


async def compare(seed: int, numbers: range, work: Path, lanes: int) -> Found:
    """Play the exchanges with these numbers, each directly and through a proxy."""
    found = Found()
    waiting = iter(numbers)
    async with contextlib.AsyncExitStack() as stack:
        stages = []
        for number in range(lanes):
            upstream = Upstream()
            await upstream.start()
            stack.push_async_callback(upstream.close)
            served = stack.enter_context(serving(upstream.address, work, f"proxy-{number}", policies=POLICIES))
            stages.append((upstream, served))
        await asyncio.gather(*(_lane(*stage, seed, waiting, found) for stage in stages))
        found.complaints = [line for _, served in stages for line in served.complaints()]
    return found


async def _lane(upstream: Upstream, served: Served, seed: int, waiting: object, found: Found) -> None:
    authority = b"%b:%d" % (upstream.address[0].encode(), upstream.address[1])
    for number in waiting:  # shared by the lanes
        exchange = generate(seed, number)
        cuts = f"{seed}:{number}"
        direct = await play(exchange, upstream.address, upstream, cuts)
        through = await play(exchange, served.address, upstream, cuts + " again")
        found.count(exchange)
        different = list(differences(direct, through, exchange, authority))
        if different:
            found.differing.append(f"exchange {number}: " + "; ".join(different))
            if len(found.differing) <= MOST_TOLD:
                print(f"    {found.differing[-1][:1000]}", flush=True)


PART = Part(
    name="transparency",
    title="Transparency",
    about="""
A generator of odd but legal HTTP/1.1 exchanges (`reliability/exchanges.py`): all framings, chunk extensions,
trailers, interim answers, `Expect`, HEAD, 204 and 304, pipelining, odd targets and methods, repeated and non-ASCII
fields, HTTP/1.0, answers that break off, sessions and event streams under all three modes, split and slow writes on
both sides. Each is played directly and through a proxy process, by raw sockets at both ends; what each side received
must be equal after the hop-by-hop rules (`reliability/hops.py`, with the numbers of the rules).
""",
    run=run,
)
