"""`epochgate demo` from outside: what it prints, its status, and that nothing of it stays behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from epochgate.demo.client import Client
from epochgate.demo.page import Page
from epochgate.demo.play import TRUTH, Act, direct
from epochgate.demo.server import PATH, ROWS, Stamp, StatementServer, amount, money

COMMAND = [sys.executable, "-m", "epochgate", "demo"]
LIMIT = 60


def demo(*options, **environment):
    return subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=LIMIT, check=False, env=os.environ | environment
    )


def acts(text):
    """The demo's output, cut at the heads of the acts and of the verdict."""
    return re.split(r"^(?:[123]  .+|Verdict)$", text, flags=re.MULTILINE)


def test_the_client_is_deceived_without_the_proxy_and_right_with_it():
    """Section 1, R11, F2, F5: direct the spliced result is accepted; through the proxy the resume is refused."""
    run = demo()
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    _, direct_act, buffered, sent, verdict = acts(run.stdout)

    assert re.search(r"id 950 .* 1   from the buffer", direct_act)
    assert re.search(r"id 951 .* 2   from a new handler", direct_act)
    assert direct_act.count(" passes\n") == 4
    assert re.search(rf"the truth is +{money(TRUTH)} +WRONG", direct_act)

    assert re.search(r"id 950 .* 1   from the buffer", buffered)
    assert "epoch_changed" in buffered
    assert re.search(r"404 epoch_changed", buffered)
    assert re.search(rf"the truth is +{money(TRUTH)} +right", buffered)

    assert "from the buffer" not in sent
    assert re.search(r"Last-Event-ID: 900 +404 epoch_changed", sent)
    assert re.search(rf"the truth is +{money(TRUTH)} +right", sent)

    for act in (buffered, sent):
        assert "from a new handler" not in act
        assert act.count("POST initialize") == 2
    assert verdict.count(" yes\n") == 8
    assert "NO\n" not in verdict


def test_lines_fit_a_terminal_and_have_no_colour_in_a_file():
    run = demo("--verbose", NO_COLOR="")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "\x1b" not in run.stdout
    assert [line for line in run.stdout.splitlines() if len(line) > 80] == []
    assert "Mcp-Session-Id: (session 2)" in run.stdout


def test_the_claims_fail_when_the_proxy_does_not_look():
    """Section 9: in bypass the proxy changes nothing, so the client is deceived again and the demo says so."""
    run = demo("--mode", "bypass")
    assert run.returncode == 1, run.stdout + run.stderr
    _, _, buffered, sent, verdict = acts(run.stdout)
    assert "from a new handler" in buffered
    assert "from a new handler" in sent
    assert verdict.count(" NO\n") == 6
    assert "6 of 8 claims did not hold." in verdict


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_its_proxy(number):
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        found = None
        for line in process.stdout:
            if found := re.search(r"process (\d+), mode enforce", line):
                break
        assert found, process.stderr.read()
        proxy = Path("/proc") / found[1]
        assert proxy.exists()
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "Interrupted." in out
    assert err == ""
    assert not proxy.exists()


def test_wrong_usage_is_told():
    run = demo("--mode", "maybe")
    assert run.returncode == 2
    assert "enforce" in run.stderr


async def test_act_one_holds_by_itself():
    """Section 1: both claims of the direct act come out of what the client received."""
    claims = await direct(Page(color=False, verbose=False))
    assert [claim.held for claim in claims] == [True, True]


async def test_once_mended_the_same_server_is_right():
    """The wrong result is the fault of the splice, not of the tool: it breaks down once only."""
    async with StatementServer(0.2, Stamp.BUFFERED) as server:
        act = Act(Page(color=False, verbose=False), server)
        await act.play(server.url)
        async with Client(server.url + PATH, act.exchanges.append, act.messages.append) as client:
            result = await client.call_tool("add_up")
    assert act.result != TRUTH
    assert result["structuredContent"]["balance"] == TRUTH == sum(amount(row) for row in range(1, ROWS + 1))
