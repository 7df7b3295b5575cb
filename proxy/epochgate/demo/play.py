"""`epochgate demo`: plays the incident without the proxy, then with it, and checks what it claims."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from epochgate.demo.client import CallFailedError, Client, Exchange, Received, SessionLostError
from epochgate.demo.page import Page
from epochgate.demo.server import CUT_AFTER, PATH, ROWS, STALL_AFTER, Stamp, StatementServer, amount, money
from epochgate.demo.stage import StageError, proxy_before

LIFETIME = 1.0  # of an idle session of the server, in seconds; 300 in the incident
LIMIT = 30.0  # of the whole demo, in seconds: a guard against hanging, it takes about six
TRUTH = sum(amount(row) for row in range(1, ROWS + 1))


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that an act says it shows, and whether it did."""

    text: str
    held: bool


@dataclass(slots=True)
class Act:
    """One client, one server, one call. Keeps what was seen."""

    page: Page
    server: StatementServer
    exchanges: list[Exchange] = field(default_factory=list)
    messages: list[Received] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # reasons of JSON-RPC errors that ended a call
    result: int | None = None  # in cents
    failure: str = ""  # why the client gave up
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def play(self, url: str) -> None:
        """Let the client call the tool at `url`, once more if the call fails, while the server breaks down."""
        trouble = asyncio.create_task(self._trouble())
        try:
            async with Client(url + PATH, self._exchange, self._message) as client:
                try:
                    result = await client.call_tool("add_up")
                except CallFailedError as error:
                    self.refusals.append(str(error))
                    self.page.tell("The call failed. The client calls again.")
                    result = await client.call_tool("add_up")
            self.result = result["structuredContent"]["balance"]
        except (aiohttp.ClientError, CallFailedError, SessionLostError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            trouble.cancel()
            await asyncio.gather(trouble, return_exceptions=True)

    async def _trouble(self) -> None:
        await self.reached.wait()
        self.page.trouble(
            f"the connection breaks; the server is paused for {self.server.pause:g} s "
            f"(sessions live {self.server.lifetime:g} s)"
        )
        await self.server.break_down()

    def _exchange(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        self.page.exchange(exchange)

    def _message(self, message: Received) -> None:
        self.messages.append(message)
        self.page.message(message)
        if not message.resumed and message.message.get("params", {}).get("progress") == CUT_AFTER:
            self.reached.set()

    @property
    def resumes(self) -> list[Exchange]:
        """The requests that resumed a stream."""
        return [each for each in self.exchanges if each.method == "GET"]

    @property
    def sessions(self) -> int:
        """How many sessions the client opened."""
        return sum(each.what == "initialize" for each in self.exchanges)

    def executions(self, session: int) -> set[int | None]:
        """The epochs of the messages that the client got in one of its sessions."""
        return {each.epoch for each in self.messages if each.session == session and "error" not in each.message}

    def resumed_rows(self, session: int) -> list[int]:
        """The rows that a resume brought to the client in one of its sessions."""
        resumed = [each.message for each in self.messages if each.session == session and each.resumed]
        return [message["params"]["progress"] for message in resumed if "params" in message]

    def outcome(self) -> None:
        """Print what the client ended with, beside the truth."""
        self.page.say()
        if self.result is None:
            self.page.tell(f"the client has no result: {self.failure}", "bad")
            return
        right = self.result == TRUTH
        self.page.say(f"  the client has   {money(self.result):>14}", "good" if right else "bad")
        self.page.say(
            f"  the truth is     {money(TRUTH):>14}   {'right' if right else 'WRONG'}", "" if right else "bad"
        )


async def direct(page: Page) -> list[Claim]:
    """Act 1: nothing between the two. The client accepts a result of two executions."""
    page.head(1, "Without a proxy")
    page.columns()
    async with StatementServer(LIFETIME, Stamp.BUFFERED) as server:
        act = Act(page, server)
        await act.play(server.url)
    act.outcome()
    ids = [int(each.id or 0) for each in act.messages]
    checks = [
        Claim(
            "the resume was answered 200 text/event-stream",
            [(each.status, each.content_type) for each in act.resumes] == [(200, "text/event-stream")],
        ),
        Claim("event ids go up by one, across the resume as well", ids == list(range(1, ROWS + 2))),
        Claim("every message is JSON-RPC 2.0", all(each.message.get("jsonrpc") == "2.0" for each in act.messages)),
        Claim("the response came, and it is no error", act.result is not None and not act.refusals),
    ]
    page.say()
    page.say("  what the client can check", "bold")
    for check in checks:
        page.check(check.text, held=check.held, told=("passes", "fails"))
    spliced = act.executions(1) == {1, 2} and act.sessions == 1
    return [
        Claim("1  direct: every check passes, and the client accepts the result", all(check.held for check in checks)),
        Claim("1  direct: the result is spliced of two executions and wrong", spliced and act.result != TRUTH),
    ]


async def guarded(page: Page, number: int, stamp: Stamp, mode: str) -> list[Claim]:
    """Acts 2 and 3: the same through the proxy. The client starts over and gets the right result."""
    if stamp is Stamp.BUFFERED:
        page.head(number, "The same through epochgate")
    else:
        page.head(number, "Through epochgate, a server that stamps the epoch when it sends")
    async with StatementServer(LIFETIME, stamp) as server, proxy_before(server.url, mode) as proxy:
        page.tell(f"`epochgate serve` at {proxy.url}, process {proxy.pid}, mode {mode}", "dim")
        page.say()
        page.columns()
        act = Act(page, server)
        await act.play(proxy.url)
        act.outcome()
        if act.failure and proxy.said:
            page.tell("The end of what the proxy said:")
            for line in proxy.said:
                page.tell(line, "dim", indent=4)
    lost = any(each.status == 404 for each in act.exchanges)
    if stamp is Stamp.BUFFERED:  # the first 50 events are right; the next one has another epoch
        where, right = "at the first wrong event", list(range(CUT_AFTER + 1, STALL_AFTER + 1))
    else:
        where, right = "before any event", []
    stopped = act.resumed_rows(1) == right and act.executions(1) == {1} and (lost or bool(act.refusals))
    return [
        Claim(f"{number}  proxy: the resume is stopped {where}", stopped),
        Claim(f"{number}  proxy: the old session is refused, a new one opened", lost and act.sessions == 2),
        Claim(f"{number}  proxy: the result is right", act.result == TRUTH),
    ]


async def play(page: Page, mode: str) -> int:
    """Play all acts. Returns 0 when every claim held, else 1."""
    page.say("epochgate demo: one tool call, one broken connection", "bold")
    page.say()
    page.tell(
        f"The tool adds up a bank statement of {ROWS} rows and reports each row as an event. Server, client and "
        f"proxy run on this machine and compute all that is shown; the truth, {money(TRUTH)}, was added up apart."
    )
    claims = await direct(page)
    page.say()
    page.tell(
        "Nothing in the transport tells. The buffer outlived the session: the new session went on at the row that the "
        "buffer had reached, with a running total of zero. Only the epoch, that nobody looks at, gives it away."
    )
    claims += await guarded(page, 2, Stamp.BUFFERED, mode)
    claims += await guarded(page, 3, Stamp.SENT, mode)
    page.say()
    page.say("Verdict", "bold")
    page.say()
    for claim in claims:
        page.check(claim.text, held=claim.held)
    failed = sum(not claim.held for claim in claims)
    page.say()
    if failed:
        page.tell(f"{failed} of {len(claims)} claims did not hold.", "bad")
        return 1
    page.tell(
        "All claims held: a call was executed again, which is visible; no wrong result reached the client.", "good"
    )
    return 0


@contextlib.asynccontextmanager
async def ended_by_signals() -> AsyncIterator[None]:
    """SIGINT and SIGTERM cancel the current task, so that everything is cleaned up."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def run(page: Page, mode: str) -> int:
    """Play, within `LIMIT`. Returns the exit status."""
    async with ended_by_signals():
        try:
            async with asyncio.timeout(LIMIT):
                return await play(page, mode)
        except StageError as error:
            page.say(str(error), "bad")
        except TimeoutError:
            page.say(f"The demo was not finished within {LIMIT:g} s: is this machine very busy? Try again.", "bad")
        except asyncio.CancelledError:
            page.say("Interrupted.", "bad")
    return 1


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns the exit status: 0 when every claim held, 1 when not, 2 (by argparse) for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="epochgate demo", description="Play a spliced stream, without epochgate and with it."
    )
    parser.add_argument("--no-color", action="store_true", help="no colours (so also with NO_COLOR, and to a file)")
    parser.add_argument(
        "--verbose", action="store_true", help="show every HTTP exchange, with the session that it names"
    )
    parser.add_argument(
        "--mode",
        choices=("enforce", "observe", "bypass"),
        default="enforce",
        help="the proxy's mode; the claims of acts 2 and 3 hold in enforce only",
    )
    options = parser.parse_args(argv)
    color = sys.stdout.isatty() and not options.no_color and not os.environ.get("NO_COLOR")
    return asyncio.run(run(Page(color=color, verbose=options.verbose), options.mode))
