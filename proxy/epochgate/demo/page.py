"""What the demo prints: a story in 80 columns, with aligned columns."""

from __future__ import annotations

import textwrap

from epochgate.demo.client import Exchange, Received
from epochgate.demo.server import CUT_AFTER, STALL_AFTER, money

WIDTH = 80
LANDMARKS = {CUT_AFTER, CUT_AFTER + 1, STALL_AFTER, STALL_AFTER + 1}
STYLES = {"bold": "1", "dim": "2", "bad": "1;31", "good": "1;32", "trouble": "33"}


class Page:
    """Prints to stdout. Exchanges and messages come in as they happen; most messages are left out."""

    def __init__(self, *, color: bool, verbose: bool) -> None:
        self._color = color
        self._verbose = verbose
        self._fresh = False  # the next message is the first of its connection
        self._skipped = 0

    def say(self, text: str = "", style: str = "") -> None:
        """Print one line, perhaps in a style."""
        self._elide()
        print(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self._color and style else text, flush=True)

    def tell(self, text: str, style: str = "", indent: int = 2) -> None:
        """Print a paragraph, filled."""
        margin = " " * indent
        for line in textwrap.wrap(text, WIDTH - indent):
            self.say(margin + line, style)

    def head(self, number: int, title: str) -> None:
        """Begin an act."""
        self.say()
        self.say(f"{number}  {title}", "bold")
        self.say()

    def columns(self) -> None:
        """Print the heads of the columns that `exchange` and `message` fill."""
        self._row(("sent and received", "row", "balance", "epoch", ""), "dim")

    def exchange(self, it: Exchange) -> None:
        """Print a request and the status that it got."""
        self._fresh = True
        if it.what == "notifications/initialized" and not self._verbose:
            return
        told = f"{it.status} {it.reason}" if it.reason else str(it.status)
        self.say(f"  {it.method:<4} {it.what:<28}{told}", "bad" if it.status >= 400 else "")
        if self._verbose:
            session = f"Mcp-Session-Id: (session {it.session})" if it.what != "initialize" else "no session yet"
            self.say(f"       {session:<28}{it.content_type}", "dim")

    def message(self, it: Received) -> None:
        """Print a message if it is one of the few that matter, else `...` for all that come between."""
        params = it.message.get("params")
        if params and not self._fresh and not (it.session == 1 and params["progress"] in LANDMARKS):
            self._skipped += 1
            return
        self._fresh = False
        name = f"     id {it.id}" if it.id else "     no id"
        epoch = str(it.epoch) if it.epoch is not None else ""
        if params:
            note = _origin(params["progress"]) if it.resumed else ""
            style = "bad" if it.resumed and params["progress"] > STALL_AFTER else ""
            self._row((name, str(params["progress"]), params["message"], epoch, note), style)
        elif "result" in it.message:
            balance = money(it.message["result"]["structuredContent"]["balance"])
            self._row((name, "all", balance, epoch, "the result"), "bold")
        else:
            error = it.message["error"]
            told = f"error {error['code']} {error.get('data', {}).get('reason', '')}"
            self.say(f"{name:<33}{told}", "bad")

    def trouble(self, text: str) -> None:
        """Print what happens to the server."""
        self.tell(f"~~ {text}", "trouble")

    def check(self, text: str, *, held: bool, told: tuple[str, str] = ("yes", "NO")) -> None:
        """Print a claim and whether it held."""
        self.say(f"  {text:<66}{told[0] if held else told[1]:>10}", "good" if held else "bad")

    def _row(self, cells: tuple[str, str, str, str, str], style: str) -> None:
        name, row, balance, epoch, note = cells
        self.say(f"  {name:<22}{row:>8}{balance:>16}{epoch:>8}   {note}".rstrip(), style)

    def _elide(self) -> None:
        if self._skipped:
            self._skipped = 0
            print("       ...", flush=True)


def _origin(row: int) -> str:
    return "from the buffer" if row <= STALL_AFTER else "from a new handler"
