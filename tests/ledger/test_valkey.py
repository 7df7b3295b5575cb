"""A store that processes share: what one records counts at the other; a server that is away, full, empty or odd."""

from __future__ import annotations

import asyncio
import gc
import random
import time

import pytest

from epochgate.errors import StoreError
from epochgate.guard.record import Origin
from epochgate.ledger import kept
from epochgate.ledger.base import Resume
from epochgate.ledger.loans import Head
from epochgate.ledger.messages import Offer
from ledger.places import WHO, Faulty, Valkey, facts, say, story
from ledger.servers import free_port, running


@pytest.fixture
async def add(monkeypatch):
    """Places to be closed in the end, after their server has gone."""
    monkeypatch.setattr(kept, "FLUSH_WITHIN", 0.2)
    places = []
    yield lambda place: places.append(place) or place
    for place in places:
        await place.aclose()


NOBODY = Resume(b"", b"")


async def until(condition, within: float = 2.0) -> float:
    """Wait for a condition; how long it took, in s."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, "it did not come about"
        await asyncio.sleep(0.002)
    return time.monotonic() - began


def ids(stream) -> list[bytes | None]:
    return [event.id for event in stream.events]


async def test_a_resume_sees_what_the_other_has_just_recorded(common):
    """Whoever gets the resume asks the others for what they have not written yet."""
    one, two = await common.ledger(), await common.ledger()
    session = story(one)
    await one.flush()
    say(session, session.locate(b"4")[0], 5, 6, answers=("eight",))
    found = await two.find(b"session", time.time(), Resume(b"6", WHO))
    assert facts(found) == facts(session)
    assert not any(stream.torn for stream in found)


async def test_a_resume_sees_what_a_mere_reader_has_just_recorded(common):
    """A call may come to a process that has not written anything of its session: it is asked as well."""
    one, two = await common.ledger(), await common.ledger()
    story(one)
    await one.flush()
    session = await two.find(b"session", time.time())
    stream = session.open_stream(Origin.CALL, (9,), WHO)
    say(session, stream, 1, 2, prefix=b"two-")
    found = await one.find(b"session", time.time(), Resume(b"two-2", WHO))
    assert ids(found.locate(b"two-2")[0]) == [b"two-1", b"two-2"]


async def test_a_session_that_was_opened_is_waited_for(common):
    """Who tells the client of it waits until others can find it, and for no more than a moment if they cannot."""
    one, two = await common.ledger(), await common.ledger()
    session = one.open(b"session", WHO, "1", "mcp", time.time())
    await one.spread(session)
    assert (await two.find(b"session", time.time())).token == "1"
    stuck = await common.ledger(Faulty)
    stuck._store.latency = 1.0
    session = stuck.open(b"other", WHO, "1", "mcp", time.time())
    began = time.monotonic()
    await stuck.spread(session)
    assert time.monotonic() - began < 0.9
    await stuck.flush()


async def test_many_at_the_same_time(common):
    """500 clients come to a process that has none of their sessions at hand: each is found, on a few connections."""
    one, two = await common.ledger(), await common.ledger()
    names = [b"session-%d" % number for number in range(500)]
    for name in names:
        story(one, name)
    await one.flush()
    before = connected(common)
    await asyncio.gather(*(two.read(name, within=10.0) for name in names))
    assert {two.get(name, time.time()).token for name in names} == {"1"}
    assert (one.problem, two.problem) == (None, None)
    assert connected(common) - before < 100


def connected(place) -> int:
    with place.server.client() as client:
        return client.info("clients")["connected_clients"]


async def test_both_go_on_with_a_session(common):
    """B118: streams of either are on the record of both, whatever the order of the writes."""
    one, two = await common.ledger(), await common.ledger()
    a = story(one)
    await one.flush()
    b = await two.find(b"session", time.time(), NOBODY)
    at_two = b.open_stream(Origin.CALL, (20,), WHO)
    at_one = a.open_stream(Origin.CALL, (30,), WHO)
    for number in range(40):
        say(b, at_two, number, prefix=b"two-")
        say(a, at_one, number, prefix=b"one-")
        if number % 7 == 0:
            await asyncio.sleep(0.02)
    b.mark_boundary(5.0)
    a.see_instance(b"i-1", 6.0)
    for ledger in (one, two):
        await ledger.flush()
    for ledger in (one, two):
        found = await ledger.find(b"session", time.time(), NOBODY)
        assert ids(found.locate(b"two-39")[0]) == [b"two-%d" % n for n in range(40)]
        assert ids(found.locate(b"one-39")[0]) == [b"one-%d" % n for n in range(40)]
        assert (found.boundary_at, found.instance, found.next_key > 2) == (5.0, b"i-1", True)
        assert len(list(found)) == 4
    assert (
        facts(await one.find(b"session", time.time(), NOBODY))["streams"]
        == facts(await two.find(b"session", time.time(), NOBODY))["streams"]
    )


async def test_two_streams_with_random_latency(common):
    """B118: two streams, 500 events each, interleaved; both cursors are right in the end, nothing went backwards."""
    dice = random.Random(5)

    class Jumpy(Faulty):
        async def _call(self, work):
            await asyncio.sleep(dice.uniform(0, 0.02))
            return await work

    one, two = await common.ledger(Jumpy), await common.ledger(Jumpy)
    a = story(one)
    await one.flush()
    b = await two.find(b"session", time.time(), NOBODY)
    streams = [(a, a.open_stream(Origin.CALL, (1,), WHO)), (b, b.open_stream(Origin.CALL, (2,), WHO))]
    for number in range(500):
        for name, (session, stream) in zip((b"x-", b"y-"), streams, strict=True):
            say(session, stream, number, prefix=name)
        if number % 10 == 0:
            await asyncio.sleep(0.003)
    for ledger in (one, two):
        await ledger.flush()
    third = await common.ledger()
    found = await third.find(b"session", time.time(), NOBODY)
    for name in (b"x-", b"y-"):
        assert ids(found.locate(name + b"499")[0]) == [name + b"%d" % n for n in range(500)]


async def test_the_same_stream_at_both(common):
    """The former reader of a stream gets an event that the resume at the other replays as well: it is one event."""
    one, two = await common.ledger(), await common.ledger()
    a = story(one)
    await one.flush()
    b = await two.find(b"session", time.time(), Resume(b"4", WHO))
    say(a, a.locate(b"4")[0], 5, 6)
    say(b, b.locate(b"4")[0], 5, 6, 7)
    for ledger in (one, two):
        await ledger.flush()
    for ledger in (one, two):
        found = await ledger.find(b"session", time.time(), NOBODY)
        stream = found.locate(b"4")[0]
        assert ids(stream) == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
        assert not stream.torn


async def test_a_stream_that_forked_accuses_nobody(common):
    one, two = await common.ledger(), await common.ledger()
    a = story(one)
    await one.flush()
    b = await two.find(b"session", time.time(), Resume(b"4", WHO))
    say(a, a.locate(b"4")[0], 5, 6)
    say(b, b.locate(b"4")[0], 8)
    for ledger in (one, two):
        await ledger.flush()
    for ledger in (one, two):
        stream = (await ledger.find(b"session", time.time(), NOBODY)).locate(b"4")[0]
        assert set(ids(stream)) == {b"1", b"2", b"3", b"4", b"5", b"6", b"8"}
        assert stream.torn


async def test_a_fence_holds_at_the_other_within_100_ms(common):
    """F2, L6: and what the other holds for the session is given up."""
    one, two = await common.ledger(), await common.ledger()
    heard = []
    two.on_fenced = heard.append
    for number in range(20):
        name = b"session-%d" % number
        a = story(one, name)
        await one.flush()
        b = await two.find(name, time.time(), NOBODY)
        assert two.get(name, time.time()) is b
        a.close("epoch_changed", time.time())
        # From here on a request at the other is refused, or waits until it is known whether it is.
        took = await until(lambda name=name, b=b: two.get(name, time.time()) is not b or b.fence is not None)
        assert took < 0.1
        assert (await two.find(name, time.time())).fence == "epoch_changed"
        await until(lambda b=b: heard == [b])
        heard.clear()


async def test_an_outage_of_the_upstream_is_told_to_the_others(common):
    """R8: a boundary signal counts, whoever saw it. What goes on is told again, and not each time that it is felt."""
    one, two = await common.ledger(), await common.ledger()
    heard = {one: 0, two: 0}

    def count(ledger):
        heard[ledger] += 1

    for ledger in (one, two):
        ledger.on_outage = lambda ledger=ledger: count(ledger)
    now = time.time()
    for number in range(50):
        one.tell_outage(now + number / 1000)
    await until(lambda: heard[two] == 1)
    one.tell_outage(now + 1.0)
    await until(lambda: heard[two] == 2)
    assert heard[one] == 0  # it knows
    assert (await common.ledger()).outage_at == now + 1.0, "a process that starts later"


async def test_an_outage_that_was_announced_while_nobody_heard_is_found(common):
    """R8: a process whose connection for announcements broke reads it when it hears again."""
    one, two = await common.ledger(), await common.ledger()
    now = time.time()
    two._changed = lambda tag: None  # it hears of nothing
    one.tell_outage(now)
    await one.flush()
    two._begin_hearing()
    await until(lambda: two.outage_at == now)


async def test_an_outage_that_the_store_lost_is_told_again(common, monkeypatch):
    """R8: a server may evict it, and a process that starts later has to find it."""
    monkeypatch.setattr(kept, "TIDY_EVERY", 0.05)
    one = await common.ledger()
    now = time.time()
    one.tell_outage(now)
    await one.flush()
    with common.server.client() as client:
        client.delete("test:outage")
    deadline = time.monotonic() + 5.0
    while (found := (await common.ledger()).outage_at) != now:
        assert time.monotonic() < deadline, found


async def test_a_new_grant_is_heard_of(common):
    """L1: the other replica's record of the old epoch is void."""
    one, two = await common.ledger(), await common.ledger()
    story(one)
    await one.flush()
    await two.find(b"session", time.time(), NOBODY)
    one.open(b"session", WHO, "2", "mcp", time.time())
    await until(lambda: (found := two.get(b"session", time.time())) is not None and found.token == "2")


async def test_a_late_write_of_an_old_epoch_is_void(common):
    """B110: what a replica still records for the old epoch does not come into the new one."""
    one, two = await common.ledger(), await common.ledger()
    story(one)
    await one.flush()
    b = await two.find(b"session", time.time(), NOBODY)
    two._mirrors.clear()  # it hears of nothing
    one.open(b"session", WHO, "2", "mcp", time.time())
    await one.flush()
    say(b, b.locate(b"4")[0], 5)
    await two.flush()
    for ledger in (one, two):
        found = await ledger.find(b"session", time.time(), NOBODY)
        assert (found.token, list(found)) == ("2", [])


async def test_a_killed_replica_is_waited_for_once(common):
    """B114: it is given up within a second, and what it may not have written proves nothing."""
    one, two = await common.ledger(), await common.ledger()
    story(one)
    story(one, b"other")
    await one.flush()
    await common.kill(one)
    began = time.monotonic()
    found = await two.find(b"session", time.time(), Resume(b"4", WHO))
    assert time.monotonic() - began < 0.9
    assert all(stream.torn for stream in found)
    began = time.monotonic()
    assert all(stream.torn for stream in await two.find(b"other", time.time(), Resume(b"4", WHO)))
    assert time.monotonic() - began < 0.1, "it is waited for once"
    await two.flush()
    third = await common.ledger()
    assert all(stream.torn for stream in await third.find(b"session", time.time(), NOBODY))


async def test_a_process_that_lives_is_waited_for_beside_one_that_was_killed(common):
    """Who cannot be reached is nobody else's fault: the others write what they have, and nothing of it is torn."""
    one, two, three = [await common.ledger() for _ in range(3)]
    for name in (b"first", b"second"):
        story(one, name)
    await one.flush()
    sessions = [await three.find(name, time.time()) for name in (b"first", b"second")]
    await common.kill(one)
    assert await two.find(b"first", time.time(), Resume(b"4", WHO))  # in vain; from now on it counts as gone
    stream = sessions[1].open_stream(Origin.CALL, (9,), WHO)
    say(sessions[1], stream, 1, 2, prefix=b"three-")
    found = await two.find(b"second", time.time(), Resume(b"three-2", WHO))
    assert ids(found.locate(b"three-2")[0]) == [b"three-1", b"three-2"]
    assert three._store.who in found.watcher.writers
    assert two._silent.keys() == {one._store.who}


async def test_a_resume_elsewhere_is_told(common):
    """R4: who holds the stream for the same caller lets go of it."""
    one, two = await common.ledger(), await common.ledger()
    told = []
    one.lending.on_resumed = lambda session, asked: told.append(
        (session, asked.cursor, asked.credentials, asked.stream)
    )
    session = story(one)
    await one.flush()
    await two.find(b"session", time.time(), Resume(b"4", WHO))
    assert told == [(session, b"4", WHO, session.locate(b"4")[0].key)]


async def test_an_offer_of_another_epoch_goes_back(common):
    """L1: what the owner holds belongs to a former grant of the id, of which it has not heard that it is void."""
    one, two = await common.ledger(), await common.ledger()
    story(one)
    await one.flush()
    loans = []

    def lend(session, asked):
        loan = one.lending.lend(session.id, asked.asker)
        loan.put(Head(200, b"OK", [], "CHUNKED"))
        loans.append(loan)
        stream, position = session.locate(asked.cursor)
        return Offer(loan.name, one.lending.who, lives.pop(), stream.key, position, decided=True)

    one.lending.on_resumed = lend
    lives = ["another", kept.mirror_of(one.get(b"session", time.time())).life]
    for offered in (1, 0):
        resume = Resume(b"4", WHO, serves=True)
        await two.find(b"session", time.time(), resume)
        assert len(resume.offers) == offered
    await until(lambda: loans[1].over)
    assert not loans[0].over


async def test_traffic_that_goes_on_does_not_keep_others_waiting(common):
    """What was recorded before the question is written; what comes after it is another matter."""
    one, two = await common.ledger(), await common.ledger()
    session = story(one)
    await one.flush()
    stream = session.locate(b"4")[0]
    number = 4

    async def talk():
        nonlocal number
        while True:
            number += 1
            say(session, stream, number)
            await asyncio.sleep(0)

    talking = asyncio.create_task(talk())
    try:
        found = await asyncio.wait_for(two.find(b"session", time.time(), Resume(b"4", WHO)), 1.5)
    finally:
        talking.cancel()
    assert not any(stream.torn for stream in found)


async def test_fences_are_not_missed_while_nobody_tells(common, quick):
    """Without the channel each request asks the store."""
    one, two = await common.ledger(), await common.ledger()
    a = story(one)
    await one.flush()
    await two.find(b"session", time.time(), NOBODY)
    two._tasks[-1].cancel()  # its ear
    await asyncio.gather(two._tasks[-1], return_exceptions=True)
    two._hearing_since = float("inf")
    a.close("epoch_changed", time.time())
    await one.flush()
    assert two.get(b"session", time.time()) is None
    assert (await two.find(b"session", time.time())).fence == "epoch_changed"


# -- the server


def keys(place):
    with place.server.client() as client:
        return {name: client.pttl(name) for name in client.keys("*")}


async def test_every_key_has_a_lifetime_and_says_nothing(common):
    """B117, B120, L7."""
    ledger = await common.ledger(idle=1000.0, fence=5000.0)
    story(ledger, b"hunter2")
    story(ledger, b"hunter3").close("deleted", time.time())
    await ledger.flush()
    found = keys(common)
    assert all(left > 0 for left in found.values())
    assert not any(b"hunter" in name for name in found)
    sessions = sorted(left for name, left in found.items() if b":session:" in name)
    assert 990_000 < sessions[0] <= 1_000_000
    assert 4_990_000 < sessions[1] <= 5_000_000
    with common.server.client() as client:
        values = [client.hgetall(name) for name in found if b":session:" in name]
    assert b"hunter" not in repr(values).encode()


async def test_what_the_server_evicted_is_written_again(common):
    ledger = await common.ledger()
    session = story(ledger)
    await ledger.flush()
    with common.server.client() as client:
        client.delete(*[name for name in keys(common) if b":session:" in name])
    say(session, session.locate(b"4")[0], 5)
    await ledger.flush()
    before = facts(session)
    other = await common.ledger()
    assert facts(await other.find(b"session", time.time(), Resume(b"5", WHO))) == before


async def test_another_key_in_the_way(common):
    """Garbage under a session's key is removed, and the record written."""
    ledger = await common.ledger()
    session = story(ledger)
    await ledger.flush()
    (name,) = [name for name in keys(common) if b":session:" in name]
    with common.server.client() as client:
        client.set(name, b"garbage", ex=100)
    say(session, session.locate(b"4")[0], 5)
    await asyncio.wait_for(ledger.flush(), 3.0)
    other = await common.ledger()
    assert facts(await other.find(b"session", time.time(), Resume(b"5", WHO))) == facts(session)


@pytest.mark.parametrize("field", [b"head", b"life", b"active", b"head_rev", b"rev:0", b"nonsense"])
async def test_a_garbled_hash(common, field):
    ledger = await common.ledger()
    story(ledger)
    await ledger.flush()
    (name,) = [name for name in keys(common) if b":session:" in name]
    with common.server.client() as client:
        client.hset(name, field, b"\xff\x00")
    other = await common.ledger()
    found = await other.find(b"session", time.time(), NOBODY)
    assert (found is None) == (field != b"nonsense")
    await asyncio.wait_for(other.flush(), 3.0)
    assert other.problem is None


async def test_a_full_server(common, quick):
    """Writes are refused: readiness says so, traffic goes on, and all is kept when there is room again."""
    ledger = await common.ledger()
    session = story(ledger)
    await ledger.flush()
    with common.server.client() as client:
        client.config_set("maxmemory", "1")
        try:
            say(session, session.locate(b"4")[0], 5)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ledger.flush(), 0.5)
            assert "maxmemory" in ledger.problem
            assert await ledger.find(b"session", time.time(), Resume(b"5", WHO)) is session
        finally:
            client.config_set("maxmemory", "0")
    await asyncio.wait_for(ledger.flush(), 5.0)
    assert ledger.problem is None
    other = await common.ledger()
    assert facts(await other.find(b"session", time.time(), Resume(b"5", WHO))) == facts(session)


@pytest.mark.parametrize(
    "error", [RuntimeError("the handler is closed"), AttributeError("'NoneType' object has no attribute 'write'")]
)
async def test_a_client_library_that_fails_in_odd_ways(common, quick, monkeypatch, caplog, error):
    """A connection that breaks at the wrong moment: the store has failed, nobody's request has."""
    one, two = await common.ledger(), await common.ledger()
    session = story(one)
    await one.flush()

    async def fail(*args: object, **options: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("redis.asyncio.client.Pipeline.execute", fail)
        assert await two.find(b"session", time.time()) is None
        assert two.problem is not None
        assert type(error).__name__ in two.problem
    await until(lambda: two.problem is None)
    assert facts(await two.find(b"session", time.time())) == facts(session)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_many_unknown_sessions_at_once(common, monkeypatch):
    """They take a few connections to the store, wait for their turn, and do not make it look as if it were away."""
    monkeypatch.setattr(kept, "MOST_READS", 200)
    one, two = await common.ledger(), await common.ledger()
    session = story(one)
    await one.flush()
    with common.server.client() as client:
        before = len(client.client_list())
        for _ in range(3):
            found = await asyncio.gather(*(two.find(b"%d" % number, time.time()) for number in range(1000)))
            assert found == [None] * 1000
            assert len(two._reads) <= 200
        assert len(client.client_list()) <= before + 2 * 32
    await until(lambda: not two._reads, 10.0)
    assert two.problem is None
    assert facts(await two.find(b"session", time.time(), Resume(b"4", WHO))) == facts(session)


async def test_a_late_failure_on_a_former_connection_says_nothing_of_the_store(common, quick, monkeypatch):
    """It was opened anew since: nothing is taken to be away, and nobody has to wait for another try."""
    ledger = await common.ledger()
    late = asyncio.Event()

    async def fail_late(*known: object) -> None:
        await late.wait()
        raise StoreError("the former connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(ledger._store, "read", fail_late)
        reading = asyncio.create_task(ledger.read(b"session", within=5.0))
        await until(lambda: ledger._reads)
    ledger._failed(StoreError("it breaks"))
    await until(lambda: ledger.problem is None)
    failures = ledger.failures
    late.set()
    await reading
    assert (ledger.problem, ledger.failures, ledger.works) == (None, failures, True)


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_a_server_that_goes_and_comes_back_empty(kind, tmp_path, quick, add):
    """B115: it is noticed without traffic, nobody waits, and all records at hand that change are kept again."""
    with running(kind, tmp_path) as server:
        place = add(Valkey(server))
        ledger = await place.ledger()
        session = story(ledger)
        await ledger.flush()
        server.stop()
        await until(lambda: ledger.problem is not None)
        began = time.monotonic()
        say(session, session.locate(b"4")[0], 5)
        assert await ledger.find(b"session", time.time(), Resume(b"5", WHO)) is session
        assert await ledger.find(b"other", time.time()) is None
        assert ledger.get(b"session", time.time()) is session
        assert time.monotonic() - began < 0.05
        server.start()
        await until(lambda: ledger.problem is None, 5.0)
        await asyncio.wait_for(ledger.flush(), 5.0)
        other = await place.ledger()
        assert facts(await other.find(b"session", time.time(), Resume(b"5", WHO))) == facts(session)


async def test_password_and_database(tmp_path, add):
    with running("valkey", tmp_path) as server:
        with server.client() as client:
            client.config_set("requirepass", "p@ss:w/rd")
        place = add(Valkey(server, f"valkey://:p%40ss%3Aw%2Frd@127.0.0.1:{server.port}/3"))
        ledger = await place.ledger()
        story(ledger)
        await ledger.flush()
        assert ledger.problem is None
        wrong = Valkey(server, f"valkey://:wrong@127.0.0.1:{server.port}/3")
        refused = await wrong.ledger()
        assert refused.problem is not None
        assert "wrong" not in refused.problem
        await wrong.kill(refused)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_cluster(tmp_path, add):
    """A session lies in one slot; processes ask each other there as well."""
    options = (
        "--cluster-enabled",
        "yes",
        "--cluster-config-file",
        str(tmp_path / "nodes.conf"),
        "--cluster-port",
        str(free_port()),
    )
    with running("valkey", tmp_path, *options) as server:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            await until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"), 5.0)
        place = add(Valkey(server))
        one, two = await place.ledger(), await place.ledger()
        assert one._store.in_cluster
        sessions = [story(one, b"session-%d" % number) for number in range(30)]
        await one.flush()
        for number, session in enumerate(sessions):
            say(session, session.locate(b"4")[0], 5)
            found = await two.find(b"session-%d" % number, time.time(), Resume(b"5", WHO))
            assert facts(found) == facts(session)
        sessions[3].close("deleted", time.time())
        await until(lambda: (found := two.get(b"session-3", time.time())) is not None and found.fence == "deleted")
        assert (one.problem, two.problem) == (None, None)
        for ledger in (one, two):
            await ledger.close()
        place._ledgers.clear()
        gc.collect()  # the client library forgets to close the connection by which it learns of the nodes
