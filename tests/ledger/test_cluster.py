"""A cluster of three nodes: what holds for one server holds there, wherever a session lies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import pytest
import redis

from epochgate.ledger.base import Resume
from ledger.places import WHO, Valkey, facts, say, story
from ledger.servers import Server, free_port
from ledger.test_contract import (  # noqa: F401  # run here with the fixtures of this module
    test_a_fence_outlives_its_process,
    test_a_granted_id_does_not_come_back_in_its_old_life,
    test_a_record_outlives_its_process,
    test_after_a_kill_the_record_is_torn,
    test_any_one_call_may_fail,
    test_odd_contents_are_kept,
    test_what_was_forgotten_stays_forgotten,
    test_work_goes_on_after_a_restart,
)
from ledger.test_valkey import (  # noqa: F401
    NOBODY,
    test_a_fence_holds_at_the_other_within_100_ms,
    test_a_killed_replica_is_waited_for_once,
    test_a_late_write_of_an_old_epoch_is_void,
    test_a_new_grant_is_heard_of,
    test_a_process_that_lives_is_waited_for_beside_one_that_was_killed,
    test_a_resume_elsewhere_is_told,
    test_a_resume_sees_what_a_mere_reader_has_just_recorded,
    test_a_resume_sees_what_the_other_has_just_recorded,
    test_a_session_that_was_opened_is_waited_for,
    test_both_go_on_with_a_session,
    test_the_same_stream_at_both,
    until,
)

# The client library forgets to close the connections by which it learns of the nodes.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

NODES = 3
SLOTS = 16384


class Cluster:
    def __init__(self, kind: str, directory) -> None:
        self.nodes = [self._node(kind, directory / f"node-{number}") for number in range(NODES)]
        self.url = self.nodes[0].url

    def _node(self, kind: str, directory) -> Server:
        directory.mkdir()
        options = {"enabled": "yes", "config-file": "nodes.conf", "port": str(free_port()), "node-timeout": "1000"}
        return Server(
            kind, directory, *(word for key, value in options.items() for word in (f"--cluster-{key}", value))
        )

    def start(self) -> None:
        """All slots spread over all nodes, as `--cluster create` does it."""
        for number, node in enumerate(self.nodes):
            node.start()
            with node.client() as client:
                first, last = (SLOTS * each // NODES for each in (number, number + 1))
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        bus = [node._command[node._command.index("--cluster-port") + 1] for node in self.nodes]
        with self.nodes[0].client() as client:
            for node, port in list(zip(self.nodes, bus, strict=True))[1:]:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, port)
        self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + 30
        for node in self.nodes:
            with node.client() as client:
                while True:
                    info = client.execute_command("CLUSTER", "INFO")
                    if b"cluster_state:ok" in info and b"cluster_known_nodes:%d" % NODES in info:
                        break
                    assert time.monotonic() < deadline, info
                    time.sleep(0.05)

    def keys(self) -> list[int]:
        """How many keys each node has."""
        sizes = []
        for node in self.nodes:
            with node.client() as client:
                sizes.append(client.dbsize())
        return sizes

    def flush(self) -> None:
        for node in self.nodes:
            with node.client() as client:
                client.flushall()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


@pytest.fixture(scope="module", params=["valkey", "redis"])
def cluster(request, tmp_path_factory):
    cluster = Cluster(request.param, tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def common(cluster):
    cluster.flush()
    place = Valkey(cluster.nodes[0])
    yield place
    await place.aclose()
    gc.collect()


@pytest.fixture
def durable(common):
    return common


async def test_sessions_are_spread_over_the_nodes(common, cluster):
    """One hash each, in one slot: two processes agree on all of them, and no node has all."""
    one, two = await common.ledger(), await common.ledger()
    assert one._store.in_cluster
    sessions = [story(one, b"session-%d" % number) for number in range(60)]
    await one.flush()
    assert min(cluster.keys()) > 5
    for number, session in enumerate(sessions):
        say(session, session.locate(b"4")[0], 5)
        found = await two.find(b"session-%d" % number, time.time(), Resume(b"5", WHO))
        assert facts(found) == facts(session)
        assert not any(stream.torn for stream in found)


async def test_a_node_that_goes_and_comes_back(common, cluster, quick):
    """Nobody waits for it, readiness tells, and all is written when it is back."""
    ledger = await common.ledger()
    sessions = [story(ledger, b"session-%d" % number) for number in range(20)]
    await ledger.flush()
    cluster.nodes[1].stop()
    for session in sessions:
        say(session, session.locate(b"4")[0], 5)
    await until(lambda: ledger.problem is not None, 10.0)
    began = time.monotonic()
    for number, session in enumerate(sessions):
        assert await ledger.find(b"session-%d" % number, time.time(), Resume(b"5", WHO)) is session
    assert time.monotonic() - began < 1.0
    cluster.nodes[1].start()
    await asyncio.to_thread(cluster.wait)
    await until(lambda: ledger.problem is None, 20.0)
    await asyncio.wait_for(ledger.flush(), 10.0)
    other = await common.ledger()
    for number, session in enumerate(sessions):
        found = await other.find(b"session-%d" % number, time.time(), NOBODY)
        assert facts(found)["streams"] == facts(session)["streams"]


async def test_a_session_is_found_where_its_slot_went(common, cluster):
    """Slots move from node to node while sessions go on."""
    one = await common.ledger()
    session = story(one)
    await one.flush()
    (key,) = [name for node in cluster.nodes for name in _sessions(node)]
    source = next(node for node in cluster.nodes if key in _sessions(node))
    target = next(node for node in cluster.nodes if node is not source)
    _move(source, target, key)
    try:
        say(session, session.locate(b"4")[0], 5)
        await asyncio.wait_for(one.flush(), 5.0)
        assert one.problem is None
        assert key in _sessions(target)
        two = await common.ledger()
        assert facts(await two.find(b"session", time.time(), Resume(b"5", WHO))) == facts(session)
    finally:
        _move(target, source, key)


def _sessions(node: Server) -> list[bytes]:
    with node.client() as client:
        return [name for name in client.keys("*") if b":session:" in name]


def _move(source: Server, target: Server, key: bytes) -> None:
    with contextlib.ExitStack() as stack:
        old, new = (stack.enter_context(redis.Redis(port=node.port)) for node in (source, target))
        slot = old.execute_command("CLUSTER", "KEYSLOT", key)
        here, there = (client.execute_command("CLUSTER", "MYID").decode() for client in (old, new))
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", here)
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", there)
        for name in old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            old.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 2000)
        for client in (new, old):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", there)
