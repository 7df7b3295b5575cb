"""Mixed load for half a minute: the whole of it is `make reliability ONLY=soak`."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

from reliability.proxy import Sample
from reliability.soak import FOR_CI, MIB, SLACK, Log, _flat, draw, figures, soak


async def test_nothing_grows_nothing_stays_and_no_verdict_is_wrong(tmp_path):
    """L5: connections, tasks and records come and go."""
    log = await soak(FOR_CI, 3, tmp_path)
    assert not log.tally.wrong
    assert not log.hung
    assert not log.left
    assert not log.complaints
    assert not log.failed_reloads
    assert min(log.restarts, log.faults, log.reloads, log.losses) > 0
    for name, slack in SLACK.items():
        _, middle, last = log.thirds(name)
        warm = 5 * MIB if name == "memory" else 30  # in so short a time not all is warm in the middle
        assert last <= middle * 1.1 + slack + warm, name
    assert len(figures(log, FOR_CI)) == 11
    ET.fromstring(draw(log))


def grown(**growth: float) -> Log:
    """What is seen of a proxy whose figures grow by so much from sample to sample."""
    first = Sample(100 * MIB, 1000, 500, 800, 900, 10, 900, 900, 0)
    log = Log()
    for number in range(300):
        values = {name: int(getattr(first, name) + each * number) for name, each in growth.items()}
        log.samples.append((float(number), replace(first, **values)))
    return log


def test_a_leak_is_seen():
    """A megabyte in ten samples, or one descriptor, task or record in each."""
    for name, each in (("memory", 0.1 * MIB), ("descriptors", 1.0), ("tasks", 1.0), ("sessions", 1.0)):
        log = grown(**{name: each})
        assert not _flat(log, name).holds
        assert all(_flat(log, other).holds for other in SLACK if other != name)
