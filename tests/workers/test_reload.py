"""One configuration for all workers: what is in force at one is in force at all, replacements included."""

from __future__ import annotations

import os
import signal

import pytest

OBSERVE = [{"name": "mcp", "mode": "observe"}]


async def is_observed(crew, server, pid: int) -> bool:
    """Whether a spliced resume is let through by this worker."""
    async with crew.client(pid) as client:
        await client.initialize()
        await client.call()
        server.epoch = "2"
        status, _ = await client.resume("3")
        server.epoch = "1"
        return status == 200


@pytest.mark.parametrize("how", ["file", "signal", "request"])
async def test_a_reload_is_for_all(crew, server, http, how):
    pids = await crew.serving()
    if how == "file":
        crew.gate.write(policies=OBSERVE)
        await crew.gate.heard("reload.done")
        await crew.samples()  # every worker has answered since
    else:
        crew.gate.config["policies"] = OBSERVE
        text = crew.gate.file.read_text()
        crew.gate.file.write_text(text + "policies: [{name: mcp, mode: observe}]\n")
        if how == "signal":
            crew.gate.process.send_signal(signal.SIGHUP)
            await crew.gate.heard("reload.done")
            await crew.samples()
        else:
            async with http.post(crew.gate.admin + "/-/reload") as answer:
                assert (answer.status, (await answer.json())["ok"]) == (200, True)
    assert [await is_observed(crew, server, pid) for pid in pids] == [True, True]
    assert (await crew.samples())['epochgate_policy_info{mode="observe",policy="mcp"}'] == 1


async def test_a_replacement_has_what_is_in_force(crew, server):
    """The policies of the last reload; of what needs a restart, what the others started with; a bad file is no reason
    to be without a worker."""
    crew.gate.write(policies=OBSERVE, upstream={"url": "http://127.0.0.1:1"}, limits={"sessions": 5})
    line = await crew.gate.heard("reload.done")
    assert line["needs_restart"] == ["upstream.url", "limits.sessions"]
    crew.gate.file.write_text("colour: blue\n")
    await crew.gate.heard("reload.failed")
    for pid in await crew.serving():
        os.kill(pid, signal.SIGKILL)
    for pid in await crew.serving(restarts=2):
        assert await is_observed(crew, server, pid)
    config = await crew.text("/config")
    assert "mode: observe" in config[1]


async def test_a_bad_file_changes_nothing_for_anybody(crew, server, http):
    pids = await crew.serving()
    crew.gate.file.write_text(crew.gate.file.read_text() + "colour: blue\n")
    async with http.post(crew.gate.admin + "/-/reload") as answer:
        assert answer.status == 422
    assert [await is_observed(crew, server, pid) for pid in pids] == [False, False]
    samples = await crew.samples()
    assert samples["epochgate_config_reload_successful"] == 0


async def test_the_log_names_the_worker(crew):
    for pid in await crew.serving():
        async with crew.client(pid) as client:
            await client.initialize()
    await crew.gate.heard("request.done", 2)
    assert {line["worker"] for line in crew.gate.lines("request.done")} == {1, 2}
