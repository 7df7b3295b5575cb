"""What every ledger does, wherever it keeps its records (section 5; issue of the stores)."""

from __future__ import annotations

import asyncio
import functools
import gc
import time

import pytest

from epochgate.errors import StoreError
from epochgate.guard.record import Event, Origin, Session
from epochgate.ledger import kept
from epochgate.ledger.base import Resume
from ledger.places import WHO, Faulty, facts, note, records, say, story

ODD = [b"a:b", b"a", b"*", b"../x", b"{tag}", b"%0d%0a", b"A:B", b"x" * 8192, b"\x80\xff", b"a:b:c", b"test:key"]


async def test_a_session_is_found_as_it_was_recorded(place):
    """L1, L3."""
    ledger = await place.ledger()
    session = story(ledger)
    assert ledger.get(b"session", time.time()) is session
    assert await ledger.find(b"session", time.time()) is session
    assert await ledger.find(b"other", time.time()) is None
    await ledger.flush()
    assert ledger.problem is None


async def test_a_new_grant_voids_the_old_record_and_lifts_the_fence(place):
    """L1."""
    ledger = await place.ledger()
    story(ledger).close("epoch_changed", time.time())
    await ledger.flush()
    session = ledger.open(b"session", WHO, "2", "mcp", time.time())
    await ledger.flush()
    found = await ledger.find(b"session", time.time())
    assert found is session
    assert (found.fence, found.token, list(found)) == (None, "2", [])


async def test_idle_sessions_and_old_fences_are_forgotten(place):
    """L5."""
    ledger = await place.ledger(idle=100.0, fence=200.0)
    now = time.time()
    for name in (b"live", b"open", b"fenced"):
        story(ledger, name, now=now)
    ledger.get(b"open", now).open_flows = 1
    ledger.get(b"fenced", now).close("deleted", now)
    assert ledger.get(b"live", now + 101) is None
    assert ledger.get(b"open", now + 101) is not None
    assert ledger.get(b"fenced", now + 199).fence == "deleted"
    assert ledger.get(b"fenced", now + 201) is None


@pytest.mark.parametrize("how", ["asked for", "swept", "evicted", "granted anew"])
async def test_what_was_forgotten_is_freed_at_once(place, how):
    """L5: a record and what writes it know each other; they must not wait for the collector, which is rare."""
    ledger = await place.ledger(idle=100.0, fence=100.0, sessions=2)
    now = time.time()
    for name in (b"live", b"fenced"):
        session = story(ledger, name, now=now)
        session.policy = f"of the first ones in {id(ledger)}"
    session.close("deleted", now)
    ledger.get(b"fenced", now)
    del session
    await ledger.flush()
    gc.disable()
    try:
        if how == "asked for":
            assert ledger.get(b"live", now + 101) is None
            assert ledger.get(b"fenced", now + 101) is None
        elif how == "swept":
            (ledger._records if hasattr(ledger, "_records") else ledger.records).sweep(now + 101)
        else:
            for number in range(5):
                name = b"%d" % number if how == "evicted" else (b"live", b"fenced")[number % 2]
                story(ledger, name, now=now).close("deleted", now)
                ledger.get(name, now)
                story(ledger, b"l" + name if how == "evicted" else name, now=now)
        await ledger.flush()
        await asyncio.sleep(0)
        sessions = [found for found in gc.get_objects() if type(found) is Session]
        assert not [found.id for found in sessions if found.policy == f"of the first ones in {id(ledger)}"]
    finally:
        gc.enable()


async def test_evicted_sessions_are_unknown_everywhere(place):
    """L5."""
    ledger = await place.ledger(sessions=2)
    for name in (b"one", b"two", b"three"):
        story(ledger, name)
        await ledger.flush()
    assert await ledger.find(b"one", time.time()) is None
    assert await ledger.find(b"three", time.time()) is not None


async def test_odd_session_ids_do_not_collide(place):
    """B120."""
    ledger = await place.ledger()
    for number, name in enumerate(ODD):
        story(ledger, name, token=f"epoch {number}")
    await ledger.flush()
    other = await place.ledger() if place.shared else ledger
    for number, name in enumerate(ODD):
        found = await other.find(name, time.time())
        assert (found.id, found.token) == (name, f"epoch {number}")
    assert await other.find(b"b", time.time()) is None


# -- what outlives the process


async def reopened(place, ledger, **limits):
    await ledger.close()
    place._ledgers.remove(ledger)
    return await place.ledger(**limits)


async def test_a_record_outlives_its_process(durable):
    ledger = await durable.ledger()
    session = story(ledger)
    session.see_instance(b"i-1", 5.0)
    session.mark_boundary(7.0)
    session.streams[0 + session.key_base].told = True
    session.stream_changed(session.streams[0 + session.key_base])
    before = facts(session)
    active_at = session.active_at
    again = await reopened(durable, ledger)
    assert again.key == ledger.key, "L7: the fingerprints stay comparable"
    found = await again.find(b"session", time.time())
    assert found is not session
    assert facts(found) == before
    assert found.active_at == pytest.approx(active_at)
    assert found.order_of(found.locate(b"4")[0]) == session.order_of(session.locate(b"4")[0])


async def test_a_fence_outlives_its_process(durable):
    """F2."""
    ledger = await durable.ledger()
    story(ledger).close("epoch_changed", time.time())
    again = await reopened(durable, ledger)
    assert (await again.find(b"session", time.time())).fence == "epoch_changed"


async def test_a_fence_whose_reason_is_not_known_is_a_fence(durable):
    """F2: of another version, or damaged: it stays shut, and is told by a reason that there is."""
    ledger = await durable.ledger()
    story(ledger).close("delated", time.time())
    again = await reopened(durable, ledger)
    assert (await again.find(b"session", time.time())).fence == "session_lost"


@pytest.mark.parametrize("end", ["in order", "killed"])
async def test_an_outage_of_the_upstream_outlives_its_process(durable, end):
    """R8: records live on, and so do the signs that void an overlap with them. The last one counts."""
    ledger = await durable.ledger()
    assert ledger.outage_at == float("-inf")
    at = time.time()
    for number in range(50):
        ledger.tell_outage(at + number)
    if end == "in order":
        again = await reopened(durable, ledger)
    else:
        await ledger.flush()
        await durable.kill(ledger)
        again = await durable.ledger()
    assert again.outage_at == at + 49


async def test_an_outage_while_the_store_is_away_is_kept_afterwards(durable, quick):
    """R8, T8."""
    ledger = await durable.ledger(lambda store: Faulty(store, fail=2))
    ledger.tell_outage(7.0)
    await asyncio.wait_for(ledger.flush(), 5.0)
    assert (ledger.failures, ledger.problem) == (1, None)
    assert (await reopened(durable, ledger)).outage_at == 7.0


async def test_work_goes_on_after_a_restart(durable):
    """Streams that were opened after a restart do not take the place of older ones."""
    ledger = await durable.ledger()
    story(ledger)
    for round_ in range(3):
        ledger = await reopened(durable, ledger)
        session = await ledger.find(b"session", time.time())
        stream = session.locate(b"4")[0]
        say(session, stream, 10 + round_)
        say(session, session.open_stream(Origin.STANDALONE, (), WHO), round_, prefix=b"c-")
        before = facts(session)
    ledger = await reopened(durable, ledger)
    found = await ledger.find(b"session", time.time())
    assert facts(found) == before
    assert len(list(found)) == 5
    assert [event.id for event in found.locate(b"4")[0].events] == [b"1", b"2", b"3", b"4", b"10", b"11", b"12"]


async def test_what_was_forgotten_stays_forgotten(durable):
    """L5: events beyond the limit, and streams beyond theirs."""
    ledger = await durable.ledger(streams=3, events=70)
    session = ledger.open(b"session", WHO, None, "mcp", time.time())
    for number in range(5):
        stream = session.open_stream(Origin.STANDALONE, (), WHO)
        say(session, stream, *range(5), prefix=b"%d-" % number)
        await ledger.flush()
    for number in range(5, 200):
        say(session, stream, number, prefix=b"4-")
        if number % 13 == 0:
            await ledger.flush()
    before = facts(session)
    again = await reopened(durable, ledger, streams=3, events=70)
    found = await again.find(b"session", time.time())
    assert facts(found) == before
    assert found.locate(b"4-199") is not None
    assert found.locate(b"4-100") is None
    assert found.locate(b"0-1") is None


async def test_odd_contents_are_kept(durable):
    ledger = await durable.ledger()
    session = ledger.open(b"session", b"", "\udcff \u20ac", "mcp", time.time())
    owes = (1, -(2**80), 2**70, 1.5, "1", "\u20ac", "")
    stream = session.open_stream(Origin.CALL, owes, b"")
    session.add(stream, Event(None, b"d", 1.0), (), learn=True)
    session.add(stream, Event(b"\x80\xff", b"", 2.0), (2**70,), learn=True)
    session.add(stream, Event(b"", b"e", 3.0), (), learn=True)
    before = facts(session)
    again = await reopened(durable, ledger)
    assert facts(await again.find(b"session", time.time())) == before


async def test_after_a_kill_the_record_is_torn(durable):
    """What may be missing proves nothing any more; a process that ended in order left nothing out."""
    ledger = await durable.ledger()
    for name in (b"before", b"apart"):
        story(ledger, name)
    ledger = await reopened(durable, ledger)
    story(ledger, b"after")
    await ledger.flush()
    await ledger.find(b"before", time.time())
    await durable.kill(ledger)
    ledger = await durable.ledger()
    for name in (b"after", b"before"):
        found = await ledger.find(name, time.time(), Resume(b"4", WHO))
        assert all(stream.torn for stream in found)
    if durable.shared:  # there each session tells who had it at hand
        apart = await ledger.find(b"apart", time.time(), Resume(b"4", WHO))
        assert not any(stream.torn for stream in apart)
    ledger = await reopened(durable, ledger)
    found = await ledger.find(b"after", time.time(), Resume(b"4", WHO))
    assert all(stream.torn for stream in found), "it does not heal"
    say(found, found.open_stream(Origin.STANDALONE, (), WHO), 1, prefix=b"c-")
    assert [stream.torn for stream in found] == [True, True, False]


async def test_a_granted_id_does_not_come_back_in_its_old_life(durable):
    """L1, after a kill."""
    ledger = await durable.ledger()
    story(ledger)
    await ledger.flush()
    ledger.open(b"session", WHO, "2", "mcp", time.time() - 3600)  # the clock was set back
    await ledger.flush()
    await durable.kill(ledger)
    ledger = await durable.ledger()
    found = await ledger.find(b"session", time.time())
    assert (found.token, list(found)) == ("2", [])


async def test_a_grant_that_follows_at_once(durable):
    """L1: both epochs of the id would have been in one batch."""
    ledger = await durable.ledger()
    story(ledger)
    ledger.open(b"session", WHO, "2", "mcp", time.time())
    story(ledger, b"session", token="3")
    before = facts(ledger.get(b"session", time.time()))
    again = await reopened(durable, ledger)
    assert ledger.failures == 0
    assert facts(await again.find(b"session", time.time())) == before


async def test_nothing_is_left_of_what_expired(durable):
    """L5: an idle session and an old fence are gone from the store as well."""
    ledger = await durable.ledger(idle=0.3, fence=0.6)
    story(ledger, b"idle")
    story(ledger, b"fenced").close("deleted", time.time())
    await ledger.flush()
    await asyncio.sleep(0.4)
    again = await durable.ledger() if durable.shared else await reopened(durable, ledger)
    assert await again.find(b"idle", time.time()) is None
    assert (await again.find(b"fenced", time.time())).fence == "deleted"


# -- a store that fails


def script(ledger):
    """Steps with a flush after each."""
    session = story(ledger)
    yield
    say(session, session.locate(b"4")[0], *range(5, 50), answers=("eight",))
    yield
    story(ledger, b"fenced").close("deleted", time.time())
    yield
    story(ledger, b"anew", token="1")
    yield
    ledger.open(b"anew", WHO, "2", "mcp", time.time() + 1)
    yield
    say(session, session.locate(b"b-1")[0], 3, 4, prefix=b"b-")
    yield


@pytest.mark.parametrize("late", [False, True], ids=["refused", "done-and-failed"])
async def test_any_one_call_may_fail(durable, quick, late, tmp_path):
    """B115, B117: each call fails once; traffic goes on, and in the end everything is kept, once."""
    number = 0
    while True:
        number += 1
        if durable.shared:
            with durable.server.client() as client:
                client.flushall()
        else:
            durable.path = tmp_path / f"{late}-{number}.db"
        ledger = await durable.ledger(functools.partial(Faulty, fail=number, late=late))
        for _ in script(ledger):
            await asyncio.wait_for(ledger.flush(), 5.0)
        names = (b"session", b"fenced", b"anew")
        before = {name: facts(ledger.get(name, time.time()) or await ledger.find(name, time.time())) for name in names}
        assert ledger.problem is None
        calls = ledger._store.calls
        assert ledger.failures == (1 if number <= calls else 0)
        again = await reopened(durable, ledger)
        assert {name: facts(await again.find(name, time.time())) for name in names} == before
        assert before[b"session"]["streams"]
        assert before[b"anew"]["token"] == "2"
        if number > calls:
            break
    assert number > 6


async def test_a_store_that_is_away_from_the_start(durable, quick):
    """B115: what is recorded meanwhile is kept when it comes."""

    class Away(Faulty):
        async def _call(self, work):
            if self.calls < 5:
                self.calls += 1
                work.close()
                raise StoreError("away")
            return await work

    ledger = await durable.ledger(Away)
    assert "away" in ledger.problem
    session = story(ledger)
    assert await ledger.find(b"nobody", time.time()) is None, "a store that is away knows nothing"
    await asyncio.wait_for(ledger.flush(), 5.0)
    assert ledger.problem is None
    before = facts(session)
    again = await reopened(durable, ledger)
    assert facts(await again.find(b"session", time.time())) == before


async def test_a_slow_store_is_never_in_the_way(durable):
    """With 50 ms of latency an event costs no wait, and the last cursor is kept within 1 s of the stream's end."""
    ledger = await durable.ledger(lambda store: Faulty(store, latency=0.05))
    session = story(ledger)
    stream = session.locate(b"4")[0]
    longest = 0.0
    for number in range(5, 205):
        began = time.perf_counter()
        say(session, stream, number)
        await asyncio.sleep(0.002)
        longest = max(longest, time.perf_counter() - began)
    assert longest < 0.1
    ended = time.monotonic()
    await ledger.flush()
    assert time.monotonic() - ended < 1.0


async def test_a_store_that_hangs_is_given_up(durable, monkeypatch):
    """B115: who asks meanwhile waits a little; once it counts as away nobody waits, until it is back."""
    hanging = asyncio.Event()

    class Hanging(Faulty):
        async def _call(self, work):
            if hanging.is_set():
                work.close()
                await asyncio.sleep(30)
            return await work

    monkeypatch.setattr(kept, "WRITE_WITHIN", 0.2)
    monkeypatch.setattr(kept, "OPEN_WITHIN", 0.2)
    monkeypatch.setattr(kept, "GIVE_UP_AFTER", 0.4)
    ledger = await durable.ledger(Hanging)
    hanging.set()
    began = time.monotonic()
    assert await ledger.find(b"nobody", time.time()) is None
    assert time.monotonic() - began < kept.READ_WITHIN + 2.0, "and not the 30 s that it hangs"
    assert await ledger.find(b"nobody", time.time(), Resume(b"1", b"")) is None
    assert ledger.problem is not None
    began = time.monotonic()
    for _ in range(20):
        assert await ledger.find(b"nobody", time.time(), Resume(b"1", b"")) is None
    assert time.monotonic() - began < 10 * kept.READ_WITHIN, "nobody waits"
    hanging.clear()
    await asyncio.wait_for(ledger.flush(), 5.0)
    assert ledger.problem is None


async def test_what_has_to_be_removed_while_the_store_is_away_is_bounded(durable, quick, monkeypatch):
    """L5: the last ones are remembered; they go in batches when it is back."""
    monkeypatch.setattr(kept, "BATCH", 3)

    class Away(Faulty):
        away = False

        async def _call(self, work):
            if self.away:
                work.close()
                raise StoreError("away")
            return await work

    ledger = await durable.ledger(Away, sessions=8)
    for number in range(8):
        story(ledger, b"old-%d" % number)
    await ledger.flush()
    Away.away = True
    for number in range(40):
        story(ledger, b"new-%d" % number)
        assert len(ledger._removed) <= 8
    Away.away = False
    await asyncio.wait_for(ledger.flush(), 5.0)
    assert not ledger._removed


def test_records_are_bounded_by_kind():
    """L5: live sessions do not drive out fences, nor the other way round."""
    kept_records = records(sessions=2)
    for number in range(4):
        session = Session(b"live-%d" % number, b"", None, kept_records.limits, 0.0)
        kept_records.put(session, 0.0)
        fenced = Session(b"fenced-%d" % number, b"", None, kept_records.limits, 0.0)
        fenced.close("deleted", 0.0)
        kept_records.put(fenced, 0.0)
    assert {session.id for session in kept_records.all()} == {b"live-2", b"live-3", b"fenced-2", b"fenced-3"}
    assert note(1).priming is False
