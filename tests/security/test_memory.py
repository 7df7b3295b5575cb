"""What is remembered of requests to save time does not grow with what strangers make up."""

from __future__ import annotations

import pytest

from epochgate.relay import headers
from epochgate.relay.context import Policies
from epochgate.settings import Settings


def size_of(names) -> int:
    return sum(map(len, names))


@pytest.mark.parametrize("length", [8, 256, 257, 60_000])
def test_targets(length):
    """A thousand long targets took 64 MiB for ever."""
    policies = Policies(Settings.model_validate({"upstream": {"url": "http://a"}}).compiled())
    for number in range(5000):
        policies.match(b"/%d" % number + b"x" * (length - 6))
    assert size_of(policies._by_target) <= 1024 * 256


@pytest.mark.parametrize("length", [8, 64, 65, 60_000])
def test_names_of_fields(length):
    """So did a thousand long names; and the usual ones find room again."""
    for number in range(3000):
        assert headers.lower_case(b"X-%d-" % number + b"Y" * (length - 7)).startswith(b"x-")
    assert size_of(headers._LOWER) <= 1024 * 64
    headers.lower_case(b"Content-Type")
    assert headers._LOWER[b"Content-Type"] == b"content-type"
