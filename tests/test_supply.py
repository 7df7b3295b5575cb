"""What is installed: all of it pinned with digests, all of it argued, and nothing that is not used."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
try:
    from reliability import supply
finally:
    sys.path.remove(str(HERE))

PAGE = (HERE / "docs" / "adr" / "0008-dependencies.md").read_text()
IMPORTED_AS = {
    "aiohttp-sse-client": "aiohttp_sse_client",
    "prometheus-client": "prometheus_client",
    "pydantic-settings": "pydantic_settings",
    "pyyaml": "yaml",
    "opentelemetry-api": "opentelemetry.trace",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
}


@pytest.mark.parametrize("path", supply.PINNED, ids=lambda path: str(path.relative_to(HERE)))
def test_every_requirement_is_pinned_with_its_digests(path):
    pins = supply.pins(path)
    assert pins
    assert [pin for pin in pins if not pin.hashes or not pin.version] == []
    assert "://" not in path.read_text(), "no address of where they came from"


def test_no_file_of_requirements_is_left_out():
    """Whatever is called requirements, and what the Dockerfile, the Makefile and the tests install."""
    found = {path for path in HERE.rglob("*requirements*.txt") if not {".venv", ".env"} & set(path.parts)}
    found |= set((HERE / "requirements").glob("*.txt")) | set((HERE / "deploy").rglob("*.txt"))
    hidden = {path for path in found if any(part.startswith(".") for part in path.relative_to(HERE).parts)}
    assert {path for path in found - hidden if "node_modules" not in path.parts} == set(supply.PINNED)


def test_every_direct_dependency_is_argued():
    declared, missing = supply.unargued()
    assert len(declared) > 10
    assert missing == []


def test_nothing_is_installed_that_is_not_named():
    """What dependencies bring with them stands in the second table; what is gone does not stay in it."""
    named = {
        supply.normal(name) for row in re.findall(r"^\| ([^|]+) \|", PAGE, re.MULTILINE) for name in row.split(", ")
    }
    named -= {"package", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}
    assert {pin.name for pin in supply.pins(supply.RUN)} == named


@pytest.mark.parametrize("name", supply.unargued()[0])
def test_every_direct_dependency_is_used(name):
    module = re.escape(IMPORTED_AS.get(name, name))
    pattern = re.compile(rf"^\s*(?:import|from) {module}\b", re.MULTILINE)
    parent = re.compile(
        rf"^\s*from {re.escape(module.rpartition('.')[0])} import .*\b{module.rpartition('.')[2]}\b", re.MULTILINE
    )
    sources = [path.read_text() for path in (HERE / "proxy").rglob("*.py")]
    assert any(pattern.search(text) or ("." in module and parent.search(text)) for text in sources)


@pytest.mark.parametrize(
    ("answered", "vulns", "value", "holds", "unreachable"),
    [
        (None, [], "could not ask: no advisory database was reached", False, True),
        (0, [], "could not ask: no advisory database was reached", False, True),
        (1, [], "0 (", False, True),
        (2, [], "0 (", True, True),
        (2, [{"id": "PYSEC-1"}], "1 (", False, False),
        (1, [{"id": "PYSEC-1"}], "1 (", False, False),
    ],
)
def test_what_could_not_be_asked_about_is_no_good_news(
    monkeypatch, tmp_path, answered, vulns, value, holds, unreachable
):
    """pip-audit ends with 0 and "no known vulnerabilities" where it skipped every package."""
    packages = [
        {"name": name, "version": "1", "vulns": vulns if number == 0 else []}
        if answered is not None and number < answered
        else {"name": name, "skip_reason": "not found"}
        for number, name in enumerate(("a", "b"))
    ]

    def audit(*_, **__) -> None:
        if answered is not None:
            (tmp_path / "audit.json").write_text(supply.json.dumps({"dependencies": packages}))

    monkeypatch.setattr(supply.subprocess, "run", audit)
    monkeypatch.setattr(supply, "tools_of", lambda _: tmp_path)
    figure = supply.audited(tmp_path)
    assert figure.value.startswith(value)
    assert (figure.holds, figure.unreachable) == (holds, unreachable)
