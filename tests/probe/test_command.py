"""The command line of `epochgate probe`: exit statuses, output, errors, progress."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys

import pytest
import yaml
from aiohttp import web

from epochgate.probe.command import main
from probe.scripted import Knobs, ScriptedServer

CODE = "import sys; from epochgate.probe.command import main; sys.exit(main(sys.argv[1:]))"
PACKAGE = pathlib.Path(__file__).parents[2] / "proxy"
QUICK = ("--idle", "0.1", "--timeout", "10")


async def run(*arguments: str) -> tuple[int | None, str, str]:
    """The command as a process of its own: status, output, errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(PACKAGE)},
    )  # fmt: skip
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_a_safe_server_ends_with_0() -> None:
    """The report has the policy to paste, standard error the progress."""
    async with ScriptedServer(Knobs()).running() as server:
        status, output, errors = await run(server.url, *QUICK)
    assert status == 0, output + errors
    assert "No risk was found." in output
    assert "replay" in errors
    _, _, rest = output.partition("Recommended configuration:\n\n")
    configuration = yaml.safe_load(rest.rpartition("\n\n")[0])
    assert configuration["upstream"]["url"] == server.url.removesuffix("/mcp")
    assert configuration["policies"][0]["match"] == {"path": "/mcp"}


async def test_risks_end_with_1_and_json_has_all_of_the_report() -> None:
    """`--json` is for machines."""
    async with ScriptedServer(Knobs(scoped=False, outlives=True)).running() as server:
        status, output, _ = await run(server.url, "--json", *QUICK)
    report = json.loads(output)
    assert status == report["status"] == 1
    risks = {finding["check"] for finding in report["findings"] if finding["level"] == "risk"}
    assert risks == {"cursor of another session", "resume after DELETE"}
    assert report["recommended"]["policies"][0]["resume"]["unproven"] == "restart"
    assert report["event_id_form"] == "<text>_<n>"


async def test_a_tool_is_called_with_its_arguments_and_headers_are_sent() -> None:
    """`--tool`, `--arguments`, `--header`: the value of a header is never printed."""
    async with ScriptedServer(Knobs()).running() as server:
        status, output, errors = await run(
            server.url,
            "--tool",
            "count",
            "--arguments",
            '{"steps": 8, "pause": 0.1}',
            "--header",
            "X-Key: geheim",
            *QUICK,
        )
        assert server.tools_called == ["count", "count"]
        assert all(headers["X-Key"] == "geheim" for headers in server.headers)
    assert status == 0, output + errors
    assert "reconnect in a call: continued" in output
    assert "geheim" not in output + errors


async def test_what_is_no_mcp_server_cannot_be_told() -> None:
    """Exit status 2: nobody listens, another service, a redirect, a server that hangs."""
    status, output, _ = await run("http://127.0.0.1:1/mcp", *QUICK)
    assert status == 2
    assert "no answer to POST" in output
    assert "Recommended" not in output
    assert "risk" not in output
    assert output.endswith("\nCould not tell: nothing was found out about this server.\n")

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/moved":
            return web.Response(status=307, headers={"Location": "/mcp"})
        if request.path == "/hangs":
            await asyncio.Event().wait()
        return web.Response(text="<h1>hello</h1>", content_type="text/html")

    runner = web.ServerRunner(web.Server(serve, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        for path, words in (("/", "HTTP 200, text/html"), ("/moved", "redirects"), ("/hangs", "the time was up")):
            status, output, _ = await run(base + path, "--idle", "0.1", "--timeout", "2")
            assert (status, words in output) == (2, True), output
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "url"),
        (["localhost:3000"], "expected http://"),
        (["http://h/mcp", "--arguments", "{"], "no JSON"),
        (["http://h/mcp", "--arguments", "[1]"], "expected a JSON object"),
        (["http://h/mcp", "--header", "geheim"], "expected 'NAME: VALUE'"),
        (["http://h/mcp", "--header", "bad name: geheim"], "expected 'NAME: VALUE'"),
        (["http://h/mcp", "--header", "Mcp-Session-Id: geheim"], "set by the probe itself"),
        (["http://h/mcp", "--header", "X-Key: geheim\nX: y"], "line break"),
        (["http://h/mcp", "--timeout", "soon"], "number of seconds"),
        (["http://h/mcp", "--timeout", "0"], "number of seconds"),
        (["http://h/mcp", "--timeout", "5", "--idle", "5"], "--idle must be shorter than --timeout"),
    ],
)
def test_a_bad_argument_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, a remedy, and no secret in it."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert "geheim" not in errors


async def test_a_terminal_sees_one_line_of_progress() -> None:
    """The line is rewritten, and gone at the end."""
    reader, writer = os.openpty()
    async with ScriptedServer(Knobs(session_ids="none")).running() as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CODE, server.url, *QUICK,
            stdout=asyncio.subprocess.PIPE, stderr=writer, env=os.environ | {"PYTHONPATH": str(PACKAGE)},
        )  # fmt: skip
        os.close(writer)
        output, _ = await process.communicate()
    progress = os.read(reader, 65536).decode()
    os.close(reader)
    assert "\r\x1b[K[" in progress
    assert progress.endswith("\r\x1b[K")
    assert "\n" not in progress
    assert b"stateless" in output
