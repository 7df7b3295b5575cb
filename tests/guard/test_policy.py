"""Which policy is for a request (section 10)."""

import pytest

from epochgate.guard.policy import normalize_path
from guard.scene import policy


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/mcp", "/mcp"),
        (b"/mcp?x=/../y", "/mcp"),
        (b"/mcp?", "/mcp"),
        (b"/", "/"),
        (b"/mcp/", "/mcp/"),
        (b"//mcp", "/mcp"),
        (b"/a//b///mcp", "/a/b/mcp"),
        (b"/a/../mcp", "/mcp"),
        (b"/a/./mcp/", "/a/mcp/"),
        (b"/../../mcp", "/mcp"),
        (b"/a/..", "/"),
        (b"//", "/"),
        (b"/%6dcp", "/mcp"),
        (b"/a%2Fmcp", "/a/mcp"),
        (b"/%2e%2e/mcp", "/mcp"),
        (b"/%C3%A9", "/é"),
        (b"/%ff", "/\ufffd"),
        (b"/.well-known/oauth", "/.well-known/oauth"),
        (b"http://h/mcp?x", "/mcp"),
        (b"http://h", "/"),
        (b"http://h?x=/mcp", "/"),
        (b"/mcp#x", "/mcp"),
        (b"/mcp?a#/x?b", "/mcp"),
        (b"*", "*"),
    ],
)
def test_a_target_has_one_path(target: bytes, path: str) -> None:
    """T3 leaves the target alone; policies see its decoded, normalised path."""
    assert normalize_path(target) == path


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        (None, "/anything", True),
        ("/mcp", "/mcp", True),
        ("/mcp", "/mcp/", False),
        ("/mcp", "/mcpx", False),
        ("/mcp*", "/mcp", True),
        ("/mcp*", "/mcp/a", True),
        ("/mcp*", "/mc", False),
        ("*", "/", True),
    ],
)
def test_a_pattern_is_exact_or_a_prefix(pattern: str | None, path: str, matches: bool) -> None:
    """Section 10."""
    assert policy(path=pattern).matches(path) is matches
