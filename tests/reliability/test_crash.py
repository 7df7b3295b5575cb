"""kill -9 under load, a few times: the whole of it is `make reliability ONLY=crash`."""

from __future__ import annotations

import pytest

from reliability import crash
from reliability.crash import Crashes, Measure


@pytest.mark.parametrize("store", ["sqlite", "valkey"])
async def test_the_store_opens_and_no_verdict_is_wrong(store, tmp_path, monkeypatch):
    """F2, R3, R7: what was written is known again, fences included; what was not accuses nobody."""
    monkeypatch.setattr(crash, "STORE_KILLED", 0.4)
    outcome = await Crashes(Measure(3, 10, store, 11, tmp_path)).play()
    assert outcome.kills == 3
    assert not outcome.broken
    assert len(outcome.starts) == 3
    assert outcome.tally.resumes > 10
    assert not outcome.tally.wrong
    assert not outcome.hung
    assert not outcome.complaints
    assert max(outcome.missing, default=0.0) < crash.WRITTEN_AFTER


async def test_lost_records_would_be_seen(tmp_path, monkeypatch):
    """With the store in memory a kill loses all of them: healthy sessions are refused, and the check says so."""
    monkeypatch.setattr(crash, "WRITTEN_AFTER", 0.05)
    outcome = await Crashes(Measure(2, 10, "memory", 11, tmp_path)).play()
    assert any("unknown_session" in line for line in outcome.tally.wrong)
