"""What several workers tell becomes one: numbers are added up, a session is one session."""

from __future__ import annotations

from array import array

from epochgate.admin.snapshot import Obstacle, Snapshot, past, total
from epochgate.relay.telemetry import HISTORY
from epochgate.workers.channel import Listed
from epochgate.workers.together import _in_state, _join_streams, _tell, join_views


def snapshot(**changes) -> Snapshot:
    counted = {
        "started_at": 1.0,
        "resumes": {("mcp", "proven", "epoch", "true"): 2},
        "fences": {},
        "requests": {("mcp", "POST", 200): 5},
        "upstream_errors": {},
        "sessions_opened": {"mcp": 1},
        "pending_told": {},
        "events": 7,
        "clients_closed": {"refused": 1},
        "loans": {"lent": 1},
        "history": {60: {"epoch": 2}},
        "outage_at": None,
        "held_streams": 1,
    }
    return Snapshot(**{**counted, **changes})


def test_counters_and_gauges_are_added_up():
    other = snapshot(requests={("mcp", "POST", 200): 1, ("", "GET", 404): 2}, outage_at=5.0, problem="away")
    both = total([snapshot(), other], 9.0)
    assert both.requests == {("mcp", "POST", 200): 6, ("", "GET", 404): 2}
    assert (both.resumes, both.events, both.held_streams) == ({("mcp", "proven", "epoch", "true"): 4}, 14, 2)
    assert (both.started_at, both.outage_at, both.problem) == (9.0, 5.0, "away")
    assert both.history == {60: {"epoch": 4}}


def test_of_a_dead_worker_the_counters_stay():
    dead = past(snapshot(problem="away", draining=True, open_streams=3))
    assert (dead.events, dead.held_streams, dead.open_streams, dead.problem, dead.draining) == (7, 0, 0, None, False)


def test_the_history_stays_bounded():
    spans = [snapshot(history={60 * n + k: {"epoch": 1} for n in range(HISTORY)}) for k in (0, 1)]
    history = total(spans, 0.0).history
    assert len(history) == HISTORY
    assert max(history) == 60 * (HISTORY - 1) + 1


def tags(*numbers: int) -> bytes:
    return array("Q", numbers).tobytes()


def test_a_session_is_in_the_first_of_its_states():
    """Fenced anywhere, else open anywhere, else held anywhere."""
    lists = [
        Listed({"idle": tags(1, 2, 3, 4), "fenced": tags(5)}, []),
        Listed({"open": tags(1), "held": tags(2, 1), "fenced": tags(3), "idle": tags(5, 6)}, []),
    ]
    found = {state: _in_state(lists, state) for state in ("fenced", "open", "held", "idle")}
    assert found == {"fenced": {3, 5}, "open": {1}, "held": {2}, "idle": {4, 6}}
    assert _in_state([Listed({"": tags(1, 2)}, []), Listed({"": tags(2, 3)}, [])], None) == {1, 2, 3}


def view(**changes):
    known = {
        "fingerprint": "f", "policy": "mcp", "state": "idle", "fence": None, "fenced_at": None, "opened_at": 1.0,
        "active_at": 2.0, "epoch": False, "credentials": False, "boundary_at": None, "streams": 1, "open": 0, "held": 0,
    }  # fmt: skip
    return {**known, **changes}


def test_one_session_as_several_have_it():
    both = join_views([view(open=1, held=1, state="held"), view(active_at=3.0, streams=2, epoch=True, boundary_at=1.5)])
    assert both == view(active_at=3.0, streams=2, epoch=True, boundary_at=1.5, open=1, held=1, state="held")
    assert join_views([view(open=1, held=1), view(open=1)])["state"] == "open"
    fenced = join_views([view(active_at=9.0), view(fence="deleted", fenced_at=4.0, state="fenced")])
    assert (fenced["state"], fenced["fence"], fenced["fenced_at"]) == ("fenced", "deleted", 4.0)


def test_of_a_stream_the_one_who_has_seen_most_tells():
    stream = {"stream": 3, "events": 5, "held": True, "told": False}
    more = {"stream": 3, "events": 6, "held": False, "told": False}
    assert _join_streams([{"streams": [more]}, {"streams": [stream, {**more, "stream": 1}]}]) == [
        {**more, "stream": 1},
        {**more, "held": True},
    ]


def test_what_all_of_them_lack_is_told_once():
    away, slow = Obstacle("store", "away"), Obstacle("worker", "does not answer")
    assert _tell({1: away, 2: away}) == [away]
    assert _tell({1: away, 2: None, 3: away}) == [Obstacle("store", "worker 1, 3: away")]
    assert _tell({1: slow, 2: slow}) == [Obstacle("worker", "worker 1, 2: does not answer")]
    assert _tell({1: None}) == []
