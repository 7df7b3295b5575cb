"""The admin listener: health, metrics, what was decided and why, and who may change something (section 11)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml
from aiohttp import ClientSession, UnixConnector
from prometheus_client.parser import text_string_to_metric_families

from admin.stage import Client, get_json, play_divergent, play_proven, proxy, walk
from epochgate.admin.snapshot import obstacles
from epochgate.settings import Settings


async def test_health_answers(gate, http):
    for path in ("/livez", "/readyz"):
        async with http.get(gate.admin + path) as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
    async with http.get(gate.admin + "/readyz", headers={"Accept": "application/json"}) as answer:
        assert await answer.json() == {"ready": True, "obstacles": []}


async def test_not_ready_while_draining_but_alive(server, tmp_path, http):
    async with (
        server.listening() as upstream,
        proxy(upstream, tmp_path, drain={"grace": "30s", "window": "1s"}) as gate,
    ):
        async with http.post(gate.admin + "/-/drain") as answer:
            assert (answer.status, await answer.json()) == (202, {"draining": True, "grace": "30s", "window": "1s"})
        async with http.get(gate.admin + "/readyz") as answer:
            assert answer.status == 503
            assert (await answer.text()).startswith("draining: ")
        async with http.get(gate.admin + "/readyz", headers={"Accept": "application/json"}) as answer:
            assert [obstacle["code"] for obstacle in (await answer.json())["obstacles"]] == ["draining"]
        async with http.get(gate.admin + "/livez") as answer:
            assert answer.status == 200
        assert await Client(http, gate.url).initialize()  # the grace time


async def test_a_verdict_is_told_with_what_was_expected_and_what_came(client, server, gate, http):
    await play_proven(client)
    await play_divergent(Client(http, gate.url), server)
    found = (await get_json(http, gate.admin + "/api/verdicts"))["verdicts"]
    assert [(entry["verdict"], entry["reason"], entry["proof"], entry["enforced"]) for entry in found] == [
        ("divergent", "epoch_changed", None, True),
        ("proven", "epoch", "epoch", True),
    ]
    assert found[0]["expected"] == "the epoch of the session"
    assert found[0]["came"] == "another epoch"
    assert found[0]["pending"] == 1
    for query, count in [
        ({"verdict": "divergent"}, 1),
        ({"verdict": "unproven"}, 0),
        ({"reason": "epoch"}, 1),
        ({"policy": "mcp"}, 2),
        ({"policy": "other"}, 0),
        ({"enforced": "true", "limit": "1"}, 1),
        ({"session": found[1]["session"]}, 1),
    ]:
        assert len((await get_json(http, gate.admin + "/api/verdicts", **query))["verdicts"]) == count, query


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("verdict=wrong", "verdict: write one of proven, unproven, divergent"),
        ("colour=red", "colour: there is no such filter; there are verdict, reason, enforced, policy, session, limit"),
        ("limit=0", "limit: write a number from 1 to 500"),
        ("limit=all", "limit: write a number from 1 to 500"),
    ],
)
async def test_a_wrong_filter_is_told(gate, http, query, said):
    async with http.get(f"{gate.admin}/api/verdicts?{query}") as answer:
        assert (answer.status, await answer.json()) == (400, {"error": said})


async def test_sessions_and_their_streams(client, server, gate, http):
    session = await play_proven(client)
    await play_divergent(Client(http, gate.url), server)
    listed = await get_json(http, gate.admin + "/api/sessions")
    assert listed["total"] == 2
    assert [entry["state"] for entry in listed["sessions"]] == ["fenced", "idle"]
    fenced, idle = listed["sessions"]
    assert (fenced["fence"], fenced["epoch"], idle["fence"]) == ("epoch_changed", True, None)
    detail = await get_json(http, f"{gate.admin}/api/sessions/{idle['fingerprint']}")
    assert [(stream["origin"], stream["events"], stream["owes"]) for stream in detail["streams"]] == [("call", 4, 1)]
    assert [entry["reason"] for entry in detail["verdicts"]] == ["epoch"]
    assert session not in list(walk(detail))
    assert (await get_json(http, gate.admin + "/api/sessions", state="fenced"))["total"] == 1
    async with http.get(f"{gate.admin}/api/sessions/{session}") as answer:
        assert answer.status == 404
        assert "no session at hand has this fingerprint" in (await answer.json())["error"]


async def test_an_operator_fences_a_session(client, gate, http):
    await client.initialize()
    assert await client.list_tools() == 200
    (entry,) = (await get_json(http, gate.admin + "/api/sessions"))["sessions"]
    async with http.post(f"{gate.admin}/api/sessions/{entry['fingerprint']}/fence") as answer:
        assert (answer.status, (await answer.json())["fence"]) == (200, "fenced_by_operator")
    assert await client.list_tools() == 404
    async with http.post(f"{gate.admin}/api/sessions/ffffffffffff/fence") as answer:
        assert answer.status == 404
    async with http.get(f"{gate.admin}/api/sessions/{entry['fingerprint']}/fence") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")


async def test_status_sums_it_up(client, server, gate, http):
    await play_proven(client)
    await play_divergent(Client(http, gate.url), server)
    status = await get_json(http, gate.admin + "/api/status")
    assert (status["ready"], status["draining"]) == (True, False)
    assert status["sessions"] == {"known": 2, "fenced": 1, "opened": 2}
    assert status["policies"][0]["mode"] == "enforce"
    counts = status["timeline"]["counts"]
    assert sum(entry.get("epoch", 0) for entry in counts) == 1
    assert sum(entry.get("divergent", 0) for entry in counts) == 1
    assert status["fences"] == [{"policy": "mcp", "reason": "epoch_changed", "enforced": True, "count": 1}]


async def test_metrics_count_verdicts_and_exist_before_the_first(client, server, gate, http):
    async def read() -> dict[tuple[str, ...], float]:
        async with http.get(gate.admin + "/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            text = await answer.text()
        return {
            (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    key = ("epochgate_resumes_total", "true", "mcp", "epoch_changed", "divergent")
    assert (await read())[key] == 0
    await play_divergent(client, server)
    after = await read()
    assert after[key] == 1
    assert after["epochgate_fences_total", "true", "mcp", "epoch_changed"] == 1
    assert after["epochgate_sessions_fenced",] == 1
    async with http.get(gate.admin + "/metrics", headers={"Accept": "application/openmetrics-text"}) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await answer.text()).endswith("# EOF\n")


async def test_a_client_cannot_make_labels(gate, http):
    for method in ("PROPFIND", "PURGE", "MKCOL", "LINK"):
        async with http.request(method, gate.url) as answer:
            await answer.read()
    async with http.get(gate.admin + "/metrics") as answer:
        text = await answer.text()
    assert 'epochgate_requests_total{method="other",policy="mcp",status="200"} 4.0' in text
    assert "PROPFIND" not in text


async def test_the_configuration_in_force_without_its_secrets(server, tmp_path, http):
    store = f"sqlite://{tmp_path}/ledger.db"
    async with server.listening() as upstream, proxy(upstream, tmp_path, store={"url": store}) as gate:
        async with http.get(gate.admin + "/config") as answer:
            shown = yaml.safe_load(await answer.text())
        assert (shown["upstream"]["url"], shown["store"]["url"]) == (upstream, store)
        assert shown["policies"][0]["resume"]["accept"] == ["connection", "epoch"]
        gate.write(store={"url": "valkey://me:hunter2@127.0.0.1:1/0"})
        await gate.heard("reload.done")
        async with http.get(gate.admin + "/config") as answer:
            text = await answer.text()
        assert yaml.safe_load(text)["store"]["url"] == "valkey://me:***@127.0.0.1:1/0"
        assert "hunter2" not in text + "".join(gate.said)


async def test_what_changes_something_is_refused_to_pages_of_others(gate, http):
    """A page in a browser on this machine counts as this machine, unless it says where it is from."""
    for headers, why in [
        ({"Origin": "https://evil.example"}, "a page of another origin"),
        ({"Origin": "null"}, "a page of another origin"),
        ({"Host": "evil.example"}, "the name it was sent to is not one of this machine's own"),
        ({"Sec-Fetch-Site": "cross-site"}, "a page of another site"),
        ({"X-Forwarded-For": "192.0.2.1"}, "through a proxy"),
        ({"Authorization": "Bearer guess"}, "no token is known here; set admin.token_file"),
    ]:
        for path in ("/-/drain", "/-/reload", "/api/sessions/ffffffffffff/fence"):
            async with http.post(gate.admin + path, headers=headers) as answer:
                assert answer.status == 403
                assert why in (await answer.json())["error"]
    async with http.get(gate.admin + "/readyz") as answer:
        assert answer.status == 200
    async with http.post(gate.admin + "/-/reload", headers={"Origin": gate.admin}) as answer:
        assert answer.status == 200


async def test_the_token_opens_from_anywhere(server, tmp_path, http):
    secret = tmp_path / "token"
    secret.write_text("correct horse battery staple\n")
    async with server.listening() as upstream, proxy(upstream, tmp_path) as gate:
        gate.write(admin={**gate.config["admin"], "token_file": str(secret)})
        await gate.heard("reload.done")
        far = {"X-Forwarded-For": "192.0.2.1"}  # as one that is not on this machine
        for given, status in [("correct horse battery staple", 200), ("correct horse", 401), ("", 401)]:
            headers = {**far, "Authorization": f"Bearer {given}"}
            async with http.post(gate.admin + "/-/reload", headers=headers) as answer:
                assert answer.status == status
        async with http.post(gate.admin + "/-/reload", headers=far) as answer:
            assert answer.status == 403
        secret.unlink()
        headers = {"Authorization": "Bearer correct horse battery staple"}
        async with http.post(gate.admin + "/-/reload", headers=headers) as answer:
            assert answer.status == 403
            assert "no such file" in (await answer.json())["error"]
        assert "horse" not in "".join(gate.said)


async def test_a_token_file_that_is_missing_is_told_at_the_start(server, tmp_path):
    admin = {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "none")}
    async with server.listening() as upstream, proxy(upstream, tmp_path, admin=admin, fails=True) as gate:
        assert await gate.ended() == 78
        assert "admin.token_file: " in gate.said[-1]
        assert "no such file or directory; name a file" in gate.said[-1]


async def test_the_admin_side_on_a_unix_socket(server, tmp_path):
    path = tmp_path / "admin.sock"
    async with server.listening() as upstream, proxy(upstream, tmp_path, admin={"listen": f"unix:{path}"}):
        http = ClientSession(connector=UnixConnector(str(path)))
        async with http, http.get("http://admin/livez") as alive, http.post("http://admin/-/reload") as reloaded:
            assert (alive.status, reloaded.status) == (200, 200)


async def test_answers_are_not_stored_guessed_or_framed(gate, http):
    for path in ("/status", "/api/status", "/metrics", "/nothing"):
        async with http.get(gate.admin + path) as answer:
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    async with http.get(gate.admin + "/", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (302, "/status")


@pytest.mark.parametrize(
    ("mode", "problem", "codes"),
    [
        ("enforce", "the store does not answer", ["store"]),
        ("observe", "the store does not answer", []),
        ("bypass", "the store does not answer", []),
        ("enforce", None, []),
    ],
)
def test_a_store_that_is_down_matters_where_it_is_needed(mode, problem, codes):
    """Where nothing is refused, a server without a ledger is better than none."""
    settings = Settings.model_validate({"upstream": {"url": "http://a"}, "policies": [{"mode": mode}]})
    snapshot = SimpleNamespace(draining=False, problem=problem)
    assert [obstacle.code for obstacle in obstacles(snapshot, settings.compiled())] == codes
