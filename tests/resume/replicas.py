"""Several proxies in front of one scripted upstream, with one Valkey: whichever gets a resume has to serve it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from epochgate.relay.client import ClientConnection
from epochgate.relay.exchange import work_on
from epochgate.relay.server import build_context, build_ledger, connect_ledger
from epochgate.settings import Settings
from ledger.servers import Server
from relay.wire import PATIENCE, Relay, free_listener, settle
from resume.story import Story, until


class Replica(Relay):
    """One of them. All of them share the upstream's listener."""

    ledger: Any
    server: asyncio.Server
    killed = False

    async def start(self, store: str, policy: dict[str, Any]) -> None:
        upstream = {"url": f"http://127.0.0.1:{self.listener.getsockname()[1]}"}
        settings = Settings.model_validate({"upstream": upstream, "store": {"url": store}, "policies": [policy]})
        self.ledger = build_ledger(settings)
        await self.ledger.start()
        self.context = build_context(settings, self.ledger)
        connect_ledger(self.ledger, self.context)

        loop = asyncio.get_running_loop()
        handle = partial(work_on, self.context)
        self.server = await loop.create_server(lambda: ClientConnection(handle, self.context.clients), "127.0.0.1", 0)
        self.address = self.server.sockets[0].getsockname()
        await until(lambda: self.ledger._hearing_since < float("inf"))

    @property
    def lending(self) -> Any:
        return self.ledger.lending

    @property
    def flows(self) -> list[Any]:
        """The streams that this one reads from the upstream, or has a buffer of."""
        return list(self.context.holds._flows.values())

    def loans(self) -> dict[str, int]:
        return dict(self.context.telemetry.loans)

    async def kill(self) -> None:
        """As by SIGKILL: nobody is told anything, and the kernel closes its connections."""
        self.killed = True
        tasks = [*self.ledger._tasks, *self.ledger._working]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.ledger._store._disconnect()
        for flow in self.flows:
            flow.downstream = None  # nothing of what follows is its doing
        self.server.close()
        for connection in list(self.context.clients):
            connection.abort()
        self.context.holds.close_all()
        for connection in list(self.context.upstream.connections):
            connection.abort()

    async def close(self) -> None:
        self.server.close()
        self.context.holds.close_all()
        await until(lambda: not self.context.clients and not self.context.upstream.connections)
        await until(lambda: not self.lending._lent and not self.lending._borrowed)
        self.context.upstream.close()
        assert not self.context.streams, "a stream that nobody has any more"
        assert not self.flows
        assert all(session.open_flows == 0 for session in self.ledger.sessions())
        await self.ledger.close()


def at(replica: Replica, story: Story) -> Story:
    """The same story, where the client has another replica to speak with."""
    there = Story(replica, story.fields)
    there.answer, there.server = story.answer, story.server
    return there


def loans_in(server: Server) -> dict[bytes, int]:
    """The loans that lie in the store, and how long they would (ms)."""
    with server.client() as client:
        return {name: client.pttl(name) for name in client.scan_iter("*:held:*")}


@contextlib.asynccontextmanager
async def replicas(server: Server, number: int = 2, **policy: Any) -> AsyncIterator[list[Replica]]:
    """That many proxies with this policy; in the end nothing may be left over in any of them, nor in the store."""
    loop = asyncio.get_running_loop()
    faults: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, fault: faults.append(fault))
    with free_listener() as listener:
        started = [Replica(listener) for _ in range(number)]
        for replica in started:
            await replica.start(server.url, policy)
        try:
            yield started
        finally:
            while not await started[0].unasked():
                pass
            for replica in started:
                for peer in replica.peers:
                    peer.close()
            await settle()
            async with asyncio.timeout(2 * PATIENCE):
                for replica in started:
                    if not replica.killed:
                        await replica.close()
    assert not faults
    await until(lambda: not loans_in(server))
