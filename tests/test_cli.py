"""The command line (section 10): verbs, exit statuses, and what is printed where."""

import os
import subprocess
import sys
import types

import pytest
import yaml

from epochgate import __version__, cli, reference
from epochgate.errors import ConfigurationError, StoreError

URL = "http://127.0.0.1:3000"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("EPOCHGATE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def install(monkeypatch):
    """Puts a module with the function `run` in the place of one that `cli` imports when it needs it."""

    def install(name, attribute, run):
        module = types.ModuleType(name)
        setattr(module, attribute, run)
        monkeypatch.setitem(sys.modules, name, module)

    return install


def test_version(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"epochgate {__version__}\n"


def test_version_and_help_load_no_library():
    """They answer at once: neither the models nor the server is imported."""
    code = (
        "import sys, epochgate.cli as cli; cli.main(['version']); "
        "print(sorted({'pydantic', 'yaml', 'aiohttp', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines()[1] == "[]"


def test_a_proxy_that_keeps_its_records_in_memory_loads_no_client_of_a_store():
    """8 MB and a part of its start."""
    code = "import sys, epochgate.relay.server; print(sorted({'redis', 'hiredis'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "[]\n"


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "epochgate", "check"], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("epochgate: upstream.url: is not set; ")


def test_check_says_ok_and_a_line_for_each_policy(capsys, tmp_path):
    path = tmp_path / "gate.yaml"
    path.write_text(
        "policies:\n- {name: a, match: {path: /a}, mode: observe}\n- {name: b, resume: {accept: [epoch]}}\n"
    )
    assert cli.main(["check", "--config", str(path), "--upstream", URL]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"OK: 127.0.0.1:8080 guards {URL}",
        "policy a: /a, observe, resumes need connection or epoch, unproven ones restart",
        "policy b: every path, enforce, resumes need epoch, unproven ones restart",
    ]
    assert said.err == ""


def test_check_says_that_nothing_is_guarded(capsys, monkeypatch):
    monkeypatch.setenv("EPOCHGATE_POLICIES", "[]")
    assert cli.main(["check", "--upstream", URL]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "no policies: nothing is guarded"


def test_check_tells_every_problem(capsys, tmp_path):
    path = tmp_path / "gate.yaml"
    path.write_text("colour: blue\nworkers: 0\n")
    assert cli.main(["check", "--config", str(path), "--upstream", URL, "--listen", "x"]) == 78
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("epochgate: ")
    for line, place in zip(
        said.err.splitlines(), ("--listen: ", f"{path}:1: colour: ", f"{path}:2: workers: "), strict=True
    ):
        assert line.startswith(f"epochgate: {place}")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "policies: [{resume: {accept: [connection], hold: {time: 0s}}}]",
            "policies[0].resume: accepts only connection",
        ),
        ("policies: [{name: a}, {name: b, match: {path: /b}}]", "policies[1].match: policy b never applies"),
        (
            "policies: [{name: a, match: {path: /m*}}, {name: b, match: {path: /mcp}}]",
            "policies[1].match: policy b never applies, because policies[0] (a)",
        ),
        ("upstream: {url: 'http://h:3000/mcp'}", "upstream.url: its path goes before that of each request, so /mcp is"),
        (
            "{upstream: {url: 'http://h:3000/mcp'}, policies: [{match: {path: /mcp*}}]}",
            "upstream.url: its path goes before that of each request",
        ),
    ],
)
def test_check_and_serve_tell_what_is_hardly_meant(capsys, install, tmp_path, text, advice):
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    install("epochgate.relay.server", "serve", lambda settings, load, config: 0)
    upstream = [] if "upstream" in text else ["--upstream", URL]
    for verb in ("check", "serve"):
        assert cli.main([verb, "--config", str(path), *upstream]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"epochgate: {advice}")


@pytest.mark.parametrize(
    "text",
    [
        "policies: [{name: a, match: {path: /mcp}}, {name: b, match: {path: /mcp*}}, {name: c}]",
        "policies: [{resume: {accept: [connection, epoch], hold: {time: 0s}}}]",
        "policies: [{mode: bypass, resume: {accept: [connection], hold: {time: 0s}}}]",
        "{upstream: {url: 'http://h:3000/base'}, policies: [{match: {path: /mcp}}]}",
    ],
)
def test_check_has_no_doubt_without_need(capsys, tmp_path, text):
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    upstream = [] if "upstream" in text else ["--upstream", URL]
    assert cli.main(["check", "--config", str(path), *upstream]) == 0
    assert capsys.readouterr().err == ""


def test_check_and_serve_tell_keys_without_effect(capsys, monkeypatch, install):
    monkeypatch.setattr("epochgate.settings.PENDING", {"log.level": "all is written"})
    install("epochgate.relay.server", "serve", lambda settings, load, config: 0)
    monkeypatch.setenv("EPOCHGATE_LOG__LEVEL", "error")
    for verb in ("check", "serve"):
        assert cli.main([verb, "--upstream", URL]) == 0
        assert capsys.readouterr().err == "epochgate: log.level has no effect yet: all is written\n"


def test_serve_gets_the_settings_and_can_read_them_again(install, tmp_path):
    path = tmp_path / "gate.yaml"
    path.write_text("limits: {sessions: 1}\n")
    seen = []

    def serve(settings, load, config):
        path.write_text("limits: {sessions: 2}\n")
        seen.extend([settings, load()])
        assert config == path
        return 3

    install("epochgate.relay.server", "serve", serve)
    flags = ["--upstream", URL, "--listen", "a:0", "--admin-listen", "b:0", "--mode", "bypass"]
    assert cli.main(["serve", "--config", str(path), *flags]) == 3
    assert [settings.limits.sessions for settings in seen] == [1, 2]
    for settings in seen:
        assert (str(settings.listen), str(settings.admin.listen), str(settings.upstream.url)) == ("a:0", "b:0", URL)
        assert [policy.mode for policy in settings.policies] == ["bypass"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigurationError("port 80 is taken; choose another"), 78), (StoreError("it does not answer"), 69)],
)
def test_errors_of_the_product_end_with_a_line_and_a_status(install, capsys, error, status):
    def serve(settings, load, config):
        raise error

    install("epochgate.relay.server", "serve", serve)
    assert cli.main(["serve", "--upstream", URL]) == status
    assert capsys.readouterr().err == f"epochgate: {error}\n"


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["serve", "--port", "1"], ["check", "--conf", "x"], ["config", "--schema", "--reference"]]
)
def test_wrong_usage_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: epochgate" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "module"), [("probe", "epochgate.probe.command"), ("demo", "epochgate.demo.play")])
def test_probe_and_demo_own_their_arguments(install, verb, module):
    seen = []

    def run(words):
        seen.append(words)
        return 5

    install(module, "main", run)
    assert cli.main([verb, "--help", URL, "--", "-x"]) == 5
    assert seen == [["--help", URL, "--", "-x"]]


def test_help_names_every_verb(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for verb in ("serve", "check", "probe", "demo", "config", "version"):
        assert f"\n    {verb} " in text


def test_config_prints_what_is_in_effect_and_can_be_read_again(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EPOCHGATE_LIMITS__FENCE", "90s")
    assert cli.main(["config", "--upstream", URL, "--mode", "observe"]) == 0
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)
    assert (printed["limits"]["fence"], printed["policies"][0]["mode"]) == ("90s", "observe")
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    monkeypatch.delenv("EPOCHGATE_LIMITS__FENCE")
    assert cli.main(["config", "--config", str(path)]) == 0
    assert capsys.readouterr().out == text


def test_config_shows_no_password(capsys, monkeypatch):
    monkeypatch.setenv("EPOCHGATE_STORE__URL", "valkey://me:hunter2@host:6379/0")
    assert cli.main(["config", "--upstream", URL]) == 0
    text = capsys.readouterr().out
    assert "url: valkey://me:***@host:6379/0\n" in text
    assert "hunter2" not in text


def test_config_prints_schema_and_reference_without_any_configuration(capsys):
    assert cli.main(["config", "--schema"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == reference.build_schema()
    assert cli.main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == reference.write_reference()
