"""docs/THREAT_MODEL.md: every promise names tests, and every test that is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
PAGE = (HERE / "docs" / "THREAT_MODEL.md").read_text()
PROMISES = dict(re.findall(r"^\| (P\d+) \| .*? \| (.*?) \|$", PAGE, re.MULTILINE))
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)?test_[a-z_]+\.py::test_[a-z0-9_]+)`", PAGE)))


def test_the_promises_are_numbered_without_a_gap():
    assert list(PROMISES) == [f"P{number}" for number in range(1, len(PROMISES) + 1)]
    assert len(PROMISES) > 10


@pytest.mark.parametrize("promise", PROMISES)
def test_each_promise_is_shown_by_a_test(promise):
    assert set(re.findall(r"`([^`]+)`", PROMISES[promise])) & set(NAMED)


@pytest.mark.parametrize("named", NAMED)
def test_each_test_that_is_named_exists(named):
    path, _, name = named.partition("::")
    text = (HERE / "tests" / path).read_text()
    assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE)


def test_what_is_referred_to_is_a_promise():
    assert set(re.findall(r"\bP\d+\b", PAGE)) == set(PROMISES)


@pytest.mark.parametrize("page", ["docs/THREAT_MODEL.md", "SECURITY.md"])
def test_links_lead_somewhere(page):
    """To files that exist, and to headings in them."""
    path = HERE / page
    for target in re.findall(r"\]\(([^)#:]*(?:#[a-z0-9-]+)?)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        if found.name == "reliability.md":
            continue  # written by `make reliability`
        assert found.exists(), target
        headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs or f'name="{anchor}"' in found.read_text(), target
