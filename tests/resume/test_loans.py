"""Held streams that are lent (docs/adr/0009): how that ends, and a store that does not do what it should."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from epochgate.errors import StoreError
from epochgate.ledger import loans
from epochgate.relay.drain import drain
from ledger.servers import free_port, running
from relay.wire import get, post
from resume.replicas import at, loans_in, replicas
from resume.story import (
    LAST_CHUNK,
    SESSION,
    STREAM,
    Answer,
    Story,
    began,
    event,
    note,
    notes,
    part,
    reply,
    response,
    until,
)

MINE, OTHER = (b"Authorization: Bearer mine",), (b"Authorization: Bearer other",)


BOTH = pytest.mark.parametrize("valkey", ["valkey", "redis"], indirect=True)


async def never(*_):
    await asyncio.Event().wait()


@pytest.mark.usefixtures("quick")
async def test_r5_the_owner_is_killed(several):
    """No clean end, and the next resume is an ordinary one, from the last event that was delivered here (L4)."""
    async with several() as (a, b):
        story = await began(a, epoch=1)
        await story.leave()
        there = at(b, story)
        client = await there.resume(3)
        await client.begin()
        a.ledger._store.write = never  # what comes now is delivered, and its owner does not live to write it
        await story.server.send(part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        await a.kill()
        await client.rest()
        assert client.end == "aborted"
        await until(lambda: b.ledger.records.get(b"S1", time.time()).locate(b"4"))
        client, server, request = await there.resumed(4)
        assert request.get(b"Last-Event-ID") == b"4"
        await server.send(STREAM + part(notes(5, epoch=1)))
        await client.until(notes(5, epoch=1))
        assert there.verdicts() == ["connection", "epoch"]
        assert b.loans() == {"served": 1, "lost": 1}


@pytest.mark.usefixtures("quick")
async def test_h1_the_reader_is_killed(several):
    """Its owner holds it again, and has what the reader may not have delivered."""
    async with several(3) as (a, b, c):
        story = await began(a)
        await story.leave()
        await story.server.send(part(notes(4)))
        client = await at(b, story).resume(3)
        await client.until(notes(4))
        await b.kill()
        await until(lambda: story.held == 1)
        client = await at(c, story).resume(3)
        await client.until(notes(4))
        assert c.loans() == {"served": 1}


@pytest.mark.usefixtures("quick")
async def test_h1_an_offer_that_nobody_takes(several):
    """The process that got the resume dies before it begins to read."""
    async with several(3) as (a, b, c):
        story = await began(a)
        await story.leave()
        there = at(b, story)
        b.ledger._take_answer = lambda _: None
        await there.resume(3)
        await until(a.loans)
        await b.kill()
        await until(lambda: story.held == 1)
        client = await at(c, story).resume(3)
        await story.server.send(part(notes(4)))
        await client.until(notes(4))


async def test_h2_the_buffer_overflows_and_hold_time_passes(several):
    """As where nobody else is; and in the store nothing is left."""
    async with several(resume={"hold": {"bytes": 1000, "time": "300ms"}}) as (a, b):
        story = await began(a, epoch=1)
        await story.leave()
        long = event(4, note("x" * 2000, 1))
        await story.server.send(part(long))
        assert await story.server.gone()
        client, server, _ = await at(b, story).resumed(3, STREAM + part(long))
        await client.until(long)
        client.peer.reset()
        await until(lambda: len(b.context.holds) == 1)
        await b.ledger.flush()
        client = await story.resume(4)  # b holds it now
        await client.begin()
        assert b.loans() == {"lent": 1}
        client.peer.reset()
        assert await server.gone(), "hold.time has passed"
        await until(lambda: not b.flows)


@pytest.mark.parametrize("at_reader", [False, True])
async def test_l6_deleted_elsewhere(several, at_reader):
    """(9), F6: what is held is closed; what somebody reads runs to its end."""
    async with several(3) as (a, b, c):
        story = await began(a)
        await story.leave()
        client = await (await at(b, story).resume(3)).begin() if at_reader else None
        there = at(c, story)
        delete = get(b"/mcp", SESSION, method=b"DELETE")
        answer, server, _ = await there.ask(delete)
        await server.send(reply(200))
        await answer.rest()
        if client is None:
            assert await story.server.gone()
            await until(lambda: not a.flows)
        else:
            await until(
                lambda: getattr(story.session, "fence", None) == "deleted"
            )  # while it is read anew it is not at hand
            await story.server.send(part(notes(4) + response(5)), LAST_CHUNK)
            assert await client.rest() == notes(4) + response(5)
        refused = await at(b, story).resume(3)
        assert (await refused.error())["data"] == {"reason": "deleted"}


async def test_r2_fenced_between_the_offer_and_its_use(several, monkeypatch):
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        borrow = b.lending.borrow

        async def late(session_id, offer):
            began = await borrow(session_id, offer)
            b.ledger.records.get(session_id, time.time()).close("deleted", time.time())
            return began

        monkeypatch.setattr(b.lending, "borrow", late)
        client = await at(b, story).resume(3)
        assert (await client.error())["data"] == {"reason": "deleted"}
        assert await story.server.gone()


async def test_r11_f5_another_epoch_on_a_stream_that_is_read_elsewhere(several):
    """The owner checks it; the reader's client is told, and nothing of the other epoch comes through."""
    async with several() as (a, b):
        story = await began(a, epoch=1)
        await story.leave()
        there = at(b, story)
        client = await there.resume(3)
        await client.begin()
        await story.server.send(part(notes(4, epoch=1) + notes(5, epoch=2)))
        await client.rest()
        assert bytes(client.data).startswith(notes(4, epoch=1))
        assert b'"n":5' not in client.data
        assert await client.told() == [(5, "epoch_changed")]
        assert client.end == "clean"
        await until(lambda: there.session and there.session.fence == "epoch_changed")


async def test_r12_another_epoch_while_it_is_held(several):
    async with several() as (a, b):
        story = await began(a, epoch=1)
        await story.leave()
        await story.server.send(part(notes(4, epoch=2)))
        assert await story.server.gone()
        client = await at(b, story).resume(3)
        assert (await client.error())["data"] == {"reason": "epoch_changed"}


@pytest.mark.parametrize("draining", ["owner", "reader"])
async def test_h2_drain(several, draining):
    """The stream ends cleanly after a whole event; where the reader drains, the owner holds it for the next one."""
    async with several(3) as (a, b, c):
        story = await began(a)
        await story.leave()
        client = await (await at(b, story).resume(3)).begin()
        await story.server.send(part(notes(4) + notes(5)[:10]))
        await client.until(notes(4))
        (flowing,) = (a if draining == "owner" else b).context.streams
        flowing.end_at_boundary()
        assert await client.rest() == notes(4)
        assert client.end == "clean"
        if draining == "owner":
            assert await story.server.gone()
        else:
            await until(lambda: story.held == 1)
            client = await at(c, story).resume(4)
            await story.server.send(part(notes(5)[10:]))
            await client.until(notes(5))


async def test_h2_drain_spreads_the_ends_of_what_is_lent(several, monkeypatch):
    """The owner has no client of its own to wait for; the reader's gets whole events, and a clean end in its turn."""
    monkeypatch.setattr("random.uniform", lambda _, longest: longest / 4)
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        client = await (await at(b, story).resume(3)).begin()
        await story.server.send(part(notes(4) + notes(5)[:10]))
        await client.until(notes(4))
        began_at = time.monotonic()
        draining = asyncio.create_task(drain(a.context, a.server, grace=0.0, window=2.0))
        assert await client.rest() == notes(4)
        assert (client.end, time.monotonic() - began_at > 0.35) == ("clean", True)
        await draining


async def test_a_proxy_that_ends_leaves_the_end_of_what_it_lent(several):
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        client = await (await at(b, story).resume(3)).begin()
        await story.server.send(part(notes(4)))
        await client.until(notes(4))
        a.flows[0].end_at_boundary()
        await a.ledger.close()
        a.killed = True
        a.server.close()
        await client.rest()
        assert client.end == "clean"


async def test_l1_granted_anew_between(several):
    """The offer is of the former epoch of the id: it is not taken."""
    async with several() as (a, b):
        story = await began(a, epoch=1)
        await story.leave()
        await at(b, story).resume(3)
        await until(lambda: b.loans() == {"served": 1})
        await at(b, story).open(2)
        await until(lambda: story.session and story.session.token == "2")
        client, server, request = await at(b, story).ask(at(b, story).again(3))
        assert request.get(b"Last-Event-ID") is None  # R3: the session has delivered nothing yet
        await server.send(reply(405))
        await client.rest()


# -- bounds, and a store that does not do what it should


@BOTH
async def test_t6_a_slow_reader_stops_the_upstream(several, valkey):
    """Little of it lies in the store, nothing is lost, and in the end all of it arrives."""
    size, number = 100_000, 120
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        there = at(b, story)
        peer = await b.connect(receive_buffer=4096)
        await peer.send(there.again(3))
        client = Answer(peer)
        await client.begin()
        blocks = [event(n, note(str(n) * (size // len(str(n))))) for n in range(4, 4 + number)]
        sending = asyncio.create_task(story.server.send(part(b"".join(blocks))))
        most = 0
        stalled = 0
        before = -1
        with valkey.client() as inside:
            while stalled < 20:  # until nothing moves any more
                await asyncio.sleep(0.05)
                sizes = [inside.memory_usage(key) or 0 for key in loans_in(valkey)]
                most = max([most, *sizes])
                stalled = stalled + 1 if (ends := a.flows[0].stream.end) == before else 0
                before = ends
        assert not sending.done(), "the upstream did not have to wait"
        assert most < 2 * loans.WINDOW, most
        await client.until(blocks[-1])
        await sending
        assert bytes(client.data) == b"".join(blocks)


def damage(store, key, fault):
    """The last entry of a loan, or all of it, is not what it should be."""
    ((number, fields),) = store.xrevrange(key, count=1)
    if fault == "missing":
        store.xdel(key, number)
        store.xadd(key, fields, id=b"%d-0" % (int(number.partition(b"-")[0]) + 1))
    elif fault == "evicted":
        store.delete(key)
    elif fault == "emptied":
        store.flushall()
    elif fault == "garbage":
        store.delete(key)
        store.xadd(key, {"e": b"\xff"}, id=number)
    elif fault == "foreign":
        store.delete(key)
        store.xadd(key, fields, id="900-0")
    else:
        store.set(key, b"x", px=500)


@BOTH
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", ["missing", "evicted", "foreign", "garbage", "another type", "emptied"])
async def test_no_splice_whatever_becomes_of_the_loan(several, valkey, monkeypatch, fault):
    """What is not exactly the next entry is not delivered: the client is cut off, and resumes again."""
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        there = at(b, story)
        client = await there.resume(3)
        await story.server.send(part(notes(4)))
        await client.until(notes(4))
        (key,) = loans_in(valkey)
        append = a.ledger._store.append
        meddled = []

        async def meddle(appends):
            done = await append(appends)
            if any(each.entries for each in appends) and not meddled:
                with valkey.client() as inside:
                    meddled.append(damage(inside, key, fault))
            return done

        with monkeypatch.context() as patch:
            patch.setattr(a.ledger._store, "append", meddle)
            patch.setattr(b.lending, "_read_on", lambda _: None)  # so that it is read afterwards
            await story.server.send(part(notes(5)))
            await until(lambda: meddled)
        await client.rest()
        assert (client.end, bytes(client.data)) == ("aborted", notes(4))
        await until(lambda: story.held == 1)
        if fault == "emptied":
            return  # nobody knows any more who held it: whether the next resume finds it is a matter of luck
        client = await there.resume(4)
        await client.until(notes(5))
        await story.server.send(part(notes(6)))
        await client.until(notes(6))
        assert bytes(client.data) == notes(5, 6)
        assert there.verdicts() == ["connection", "connection"]


@pytest.mark.parametrize("late", [False, True])
@BOTH
async def test_an_append_that_fails_is_made_again(several, late):
    """`late`: it had worked all the same, and comes twice."""
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        client = await (await at(b, story).resume(3)).begin()
        store = a.ledger._store
        append = store.append
        failed = []

        async def fail_once(appends):
            if not failed and any(each.entries for each in appends):
                failed.append(len(appends))
                if late:
                    await append(appends)
                raise StoreError("it fails on demand")
            return await append(appends)

        store.append = fail_once
        for number in range(4, 10):
            await story.server.send(part(notes(number)))
        await client.until(notes(9))
        await until(lambda: failed and not client.end)
        await story.server.send(part(notes(10)))
        await client.until(notes(10))
        assert bytes(client.data) == notes(*range(4, 11))


async def test_an_append_that_comes_late_brings_nothing_back(several, valkey):
    """Another one has the stream since; what was under way for the former lies under a name that nobody reads."""
    async with several(3) as (a, b, c):
        story = await began(a)
        await story.leave()
        first = await (await at(b, story).resume(3)).begin()
        store = a.ledger._store
        append, kept = store.append, []

        async def keep(appends):
            kept.extend(appends)
            return [True] * len(appends)

        store.append = keep
        await story.server.send(part(notes(4)))
        await until(lambda: any(each.entries for each in kept))
        store.append = append
        first.peer.reset()
        await until(lambda: story.held == 1)
        second = await at(c, story).resume(3)
        await second.until(notes(4))
        assert await append(kept) == [False] * len(kept)
        await story.server.send(part(notes(5)))
        await second.until(notes(5))
        assert bytes(second.data) == notes(4, 5)
        assert len(loans_in(valkey)) == 1


async def test_r5_the_loan_cannot_be_read(several):
    """The offer came, but the store does not answer for it: an ordinary resume, and it is counted."""
    async with several() as (a, b):
        story = await began(a, epoch=1)
        await story.leave()
        there = at(b, story)

        async def fail(*_):
            raise StoreError("it fails on demand")

        b.ledger._store.follow = fail
        client, server, request = await there.resumed(3)
        assert request.get(b"Last-Event-ID") == b"3"
        assert await story.server.gone(), "the held one is closed before the upstream has answered (R4)"
        await server.send(STREAM + part(notes(4, epoch=1)))
        await client.until(notes(4, epoch=1))
        assert (there.verdicts(), b.loans()) == (["epoch"], {"failed": 1})


@pytest.mark.usefixtures("quick")
async def test_the_store_goes_away(tmp_path):
    """Who reads from it is cut off; the owner holds the stream, and the next resume elsewhere is an ordinary one."""
    with running("valkey", tmp_path) as server:
        async with replicas(server, 2) as (a, b):
            story = await began(a, epoch=1)
            await story.leave()
            there = at(b, story)
            client = await (await there.resume(3)).begin()
            server.stop()
            await client.rest()
            assert client.end == "aborted"
            await until(lambda: story.held == 1)
            client, upstream, request = await there.resumed(3)
            assert request.get(b"Last-Event-ID") == b"3"
            await upstream.send(STREAM + part(notes(4, epoch=1)))
            await client.until(notes(4, epoch=1))
            assert (there.verdicts(), b.loans()) == (["connection", "epoch"], {"served": 1, "lost": 1})
            assert b.ledger.problem
            server.start()
            await until(lambda: not a.ledger.problem and not b.ledger.problem)
            await until(lambda: a.ledger._hearing_since < float("inf"))


async def test_h1_what_is_held_costs_the_store_nothing(several, valkey):
    """A hundred held streams; then each is resumed elsewhere, and what lies in the store is bounded."""
    number = 100
    async with several() as (a, b):
        stories = []
        for _ in range(number):
            story = Story(a)
            await story.open(session=b"Mcp-Session-Id: S%d" % len(stories))
            stories.append(story)
        for n, story in enumerate(stories):
            name = b"Mcp-Session-Id: S%d" % n
            body = b'{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{}}'
            story.answer, story.server, _ = await story.ask(post(body, name))
            await story.server.send(STREAM + part(notes(1, 2, 3)))
            await story.answer.until(notes(3))
            story.answer.peer.reset()
        await until(lambda: len(a.context.holds) == number)
        assert not loans_in(valkey)
        long = [event(n, note("x" * 10_000)) for n in range(4, 24)]
        for story in stories:
            await story.server.send(part(b"".join(long)))
        await until(lambda: all(flow._tail.waiting > 190_000 for flow in a.flows))
        assert not loans_in(valkey)
        clients = []
        for n in range(number):
            resume = get(b"/mcp", b"Mcp-Session-Id: S%d" % n, b"Last-Event-ID: 3")
            clients.append(await at(b, stories[n]).send(resume))
        for story, client in zip(stories, clients, strict=True):
            await client.until(long[-1])
            await story.server.send(part(response(5)), LAST_CHUNK)
        for client in clients:
            assert await client.rest() == b"".join(long) + response(5)
        assert (b.loans(), a.loans()) == ({"served": number}, {"lent": number})
    with valkey.client() as inside:
        assert inside.info("memory")["used_memory"] < 40 * 1024 * 1024


@BOTH
async def test_every_loan_has_a_lifetime(several, valkey):
    """It is set in the step that makes it; and it says nothing of the session (L7)."""
    async with several() as (a, b):
        story = await began(a)
        await story.leave()
        client = await (await at(b, story).resume(3)).begin()
        ((key, left),) = loans_in(valkey).items()
        assert 0 < left <= loans.LEASE * 1000
        assert b"S1" not in key
        with valkey.client() as inside:
            (session,) = inside.scan_iter("*:session:*")
        assert key.partition(b"{")[2].partition(b"}")[0] == session.partition(b"{")[2].partition(b"}")[0]
        client.peer.reset()
        await until(lambda: not loans_in(valkey))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_cluster(tmp_path):
    """A loan lies in the slot of its session."""
    files = ("--cluster-config-file", str(tmp_path / "nodes.conf"))
    with running("valkey", tmp_path, "--cluster-enabled", "yes", *files, "--cluster-port", str(free_port())) as server:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            await until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        async with replicas(server) as (a, b):
            assert a.ledger._store.in_cluster
            story = await began(a)
            await story.leave()
            there = at(b, story)
            client = await there.resume(3)
            await story.server.send(part(notes(4)))
            await client.until(notes(4))
            with server.client() as inside:
                slots = {
                    inside.cluster("keyslot", key) for key in [*loans_in(server), *inside.scan_iter("*:session:*")]
                }
            assert len(slots) == 1
            await story.server.send(part(response(5)), LAST_CHUNK)
            assert await client.rest() == notes(4) + response(5)
        gc.collect()  # the client library forgets to close the connection by which it learns of the nodes


@pytest.mark.parametrize("resumes_at", ["the same", "the other, later"])
async def test_r3_a_cursor_that_was_delivered_while_the_store_did_not_tell_is_not_a_stale_one(several, resumes_at):
    """The session was not found, its call passed unrecorded; nobody can say that nothing was delivered."""
    async with several() as (a, b):
        story = Story(a)
        await story.open(1)
        await a.ledger.flush()
        there = Story(b)
        read, b.ledger._store.read = b.ledger._store.read, never
        call, server, _ = await there.ask(there.call(5))
        await server.send(STREAM + part(notes(1, 2, 3, epoch=1)))
        await call.until(notes(3, epoch=1))
        server.reset()
        b.ledger._store.read = read
        await until(lambda: not b.ledger._reads and b.ledger.works)
        resume = there
        if resumes_at == "the other, later":
            await (await there.other(reply(204))).begin()  # it is found here, which is told
            await b.ledger.flush()
            resume = story
        client = await resume.resume(3)
        assert (await client.error())["data"] == {"reason": "unknown_cursor"}
        assert await b.unasked()


async def test_r3_a_session_that_is_opened_after_that_is_not_touched_by_it(several, monkeypatch):
    monkeypatch.setattr("epochgate.ledger.kept.CLOCKS_DIFFER", 0.0)
    async with several() as (a, b):
        read, b.ledger._store.read = b.ledger._store.read, never
        call, server, _ = await Story(b).ask(Story(b).call(5))
        await server.send(reply(200))
        await call.rest()
        b.ledger._store.read = read
        await until(lambda: not b.ledger._reads and b.ledger.works)
        story = Story(a)
        await story.open(1)
        await a.ledger.flush()
        _, _, request = await Story(b).resumed("old", STREAM + part(notes(1, epoch=1)))
        assert request.get(b"Last-Event-ID") is None
