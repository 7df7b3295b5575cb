"""Reading the configuration again while the proxy runs (section 9)."""

from __future__ import annotations

import asyncio
import os
import signal

import structlog.testing
import yaml

from admin.stage import get_json, play_divergent, proxy, rpc
from epochgate.configuration import load
from epochgate.relay.reload import Reload, changed_keys
from epochgate.settings import Settings

OBSERVE = [{"name": "mcp", "mode": "observe"}]


async def test_the_file_is_watched(gate, server, client, http):
    gate.write(policies=OBSERVE)
    line = await gate.heard("reload.done")
    assert (line["source"], line["needs_restart"]) == ("file", [])
    await client.initialize()
    await client.call()
    server.epoch = "2"
    assert (await client.resume("3"))[0] == 200  # observed: not refused
    (entry,) = (await get_json(http, gate.admin + "/api/verdicts"))["verdicts"]
    assert (entry["reason"], entry["enforced"]) == ("epoch_changed", False)


async def test_sighup_and_a_request_do_the_same(gate, http):
    gate.process.send_signal(signal.SIGHUP)
    assert (await gate.heard("reload.done"))["source"] == "signal"
    async with http.post(gate.admin + "/-/reload") as answer:
        assert (answer.status, (await answer.json())["ok"]) == (200, True)
    assert (await gate.heard("reload.done", 2))["source"] == "request"


async def test_a_config_map_is_swapped_by_a_link_beside_the_file(server, tmp_path, http):
    """Kubernetes: the file is a link into `..data`, itself a link to a directory, that is replaced."""
    async with server.listening() as upstream:
        home = tmp_path / "config"
        home.mkdir()
        async with proxy(upstream, home) as gate:
            pass  # only for the file that it wrote
        text = gate.file.read_text()
        gate.file.unlink()
        for name, content in (("..1", text), ("..2", yaml.safe_dump({**gate.config, "policies": OBSERVE}))):
            (home / name).mkdir()
            (home / name / gate.file.name).write_text(content)
        (home / "..data").symlink_to("..1")
        gate.file.symlink_to(f"..data/{gate.file.name}")
        gate.write = lambda: None  # type: ignore[method-assign]
        await gate.start()
        try:
            (home / "..data_tmp").symlink_to("..2")
            (home / "..data_tmp").rename(home / "..data")
            await gate.heard("reload.done")
            status = await get_json(http, gate.admin + "/api/status")
            assert [policy["mode"] for policy in status["policies"]] == ["observe"]
        finally:
            await gate.kill()


async def test_a_bad_file_changes_nothing_and_is_told(gate, server, client, http):
    good = gate.file.read_text()
    gate.file.write_text(good + "colour: blue\n")
    line = await gate.heard("reload.failed")
    assert line["level"] == "error"
    assert "colour: unknown key" in line["message"]
    async with http.post(gate.admin + "/-/reload") as answer:
        assert answer.status == 422
        assert "colour: unknown key" in (await answer.json())["error"]
    async with http.get(gate.admin + "/metrics") as answer:
        text = await answer.text()
    assert "epochgate_config_reload_successful 0.0" in text
    assert 'epochgate_config_reloads_total{result="failure"} 2.0' in text
    await play_divergent(client, server)  # still enforced
    gate.file.write_text(good)
    await gate.heard("reload.done")
    async with http.get(gate.admin + "/metrics") as answer:
        assert "epochgate_config_reload_successful 1.0" in await answer.text()


async def test_a_pipe_in_the_place_of_the_file_keeps_nobody_waiting(gate, server, client, http):
    good = gate.file.read_text()
    pipe = gate.file.with_name("pipe")
    os.mkfifo(pipe)
    pipe.replace(gate.file)
    assert "is no regular file" in (await gate.heard("reload.failed"))["message"]
    await play_divergent(client, server)
    gate.file.unlink()
    gate.file.write_text(good)
    await gate.heard("reload.done")


async def test_keys_that_need_a_restart_are_named(gate, http):
    gate.write(limits={"sessions": 5}, log={"level": "warning"}, drain={"grace": "1s", "window": "2s"})
    assert (await gate.heard("reload.done"))["needs_restart"] == ["limits.sessions", "log.level"]
    async with http.post(gate.admin + "/-/reload") as answer:
        assert (await answer.json())["needs_restart"] == ["limits.sessions", "log.level"]
    async with http.get(gate.admin + "/metrics") as answer:
        assert "epochgate_config_restart_needed 2.0" in await answer.text()


def test_flags_that_win_over_the_file_are_named(tmp_path):
    """Whoever turns `mode` in the file, and gave it as a flag, is told why nothing changes."""
    file = tmp_path / "epochgate.yaml"
    file.write_text("upstream: {url: 'http://a'}")

    def read() -> Settings:
        return load(file, {}, {"--upstream": None, "--mode": "observe"})

    reload = Reload(read(), read, lambda settings: None, config=file)
    assert reload.last.flags_win == ("--mode",)
    file.write_text("{upstream: {url: 'http://a'}, policies: [{mode: enforce}]}")
    with structlog.testing.capture_logs() as lines:
        assert reload.apply("request").flags_win == ("--mode",)
    assert lines[-1]["flags_win"] == ["--mode"]
    assert reload.settings.policies[0].mode == "observe"


async def test_a_running_stream_keeps_its_policy(gate, server, client, http):
    server.cut = False
    await client.initialize()
    async with http.post(client.url, json=rpc("tools/call"), headers=client.headers) as stream:
        read = await stream.content.readuntil(b"id: 3")
        gate.write(policies=[{"name": "other", "mode": "bypass"}])
        await gate.heard("reload.done")
        (entry,) = (await get_json(http, gate.admin + "/api/sessions"))["sessions"]
        assert (entry["policy"], entry["open"]) == ("mcp", 1)
        server.more.set()
        read += await stream.content.read()
    assert read.count(b"data: ") == 3
    assert stream.status == 200
    async with http.get(gate.admin + "/metrics") as answer:
        assert 'epochgate_requests_total{method="POST",policy="mcp",status="200"}' in await answer.text()


async def test_many_swaps_under_load_lose_no_request(gate, server, client):
    await client.initialize()
    done = asyncio.Event()

    async def call() -> list[int]:
        statuses = []
        while not done.is_set():
            statuses.append(await client.list_tools())
        return statuses

    calls = asyncio.create_task(call())
    for number in range(1, 6):
        gate.write(policies=[{"name": f"p{number}"}])
        await gate.heard("reload.done", number)
    done.set()
    assert set(await calls) == {200}


async def test_without_a_watch_to_spare_the_files_are_polled(tmp_path, monkeypatch):
    """inotify has few watches for each user, and a node has many pods."""
    file = tmp_path / "epochgate.yaml"
    file.write_text("one")
    settings = Settings.model_validate({"upstream": {"url": "http://a"}})
    asked = []

    async def awatch(*directories, force_polling, **options):
        asked.append(force_polling)
        if not force_polling:
            raise OSError(24, "Too many open files")
        file.write_text("two")
        yield set()

    monkeypatch.setattr("epochgate.relay.reload.watchfiles.awatch", awatch)
    reload = Reload(settings, lambda: settings, lambda settings: None, config=file)
    await reload.watch()
    assert asked == [False, True]
    assert reload.results["success"] == 1


def test_a_changed_password_of_the_store_needs_a_restart():
    def settings(password: str) -> Settings:
        return Settings.model_validate(
            {"upstream": {"url": "http://a"}, "store": {"url": f"valkey://:{password}@a"}, "drain": {"grace": 1}}
        )

    assert list(changed_keys(settings("one"), settings("two"))) == ["store.url"]
    assert list(changed_keys(settings("one"), settings("one"))) == []
