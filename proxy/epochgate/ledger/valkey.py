"""Valkey or Redis as the store (`valkey://host:6379/0` and the like), shared by any number of processes.

A session is one hash under one key, so that it is read, written, expired and evicted as a whole, and lies in one slot
of a cluster. The key is a keyed digest of the session id: no id can be another's key, a pattern or a path. Event ids
stand in it as they are, since they are sent again (R5); of credentials there are fingerprints only (L7).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from epochgate.errors import StoreError
from epochgate.ledger import problems
from epochgate.ledger.base import Written
from epochgate.ledger.bundle import Bundle, Command
from epochgate.ledger.loans import Append
from epochgate.ledger.state import NEVER, Change, Kept, KeptStream

CONNECT_WITHIN = 2.0  # s
ANSWER_WITHIN = 5.0  # s
KEEP_KEY = 4  # the key of the fingerprints is kept for this many lifetimes of a record after the last process has gone
OLDEST = (6, 2)  # the first Redis that knows XTRIM MINID and ZADD GT
AT_ONCE = 16  # commands under way in a cluster, whose slots share no pipeline

OUTAGE = "outage"  # in the place of a session's tag: the upstream had one

_UPSTREAM = "upstream"
_encode = msgspec.msgpack.Encoder().encode
_NO_SESSION = "WRONGTYPE"


class ValkeyStore:
    """See `Store`. `lifetime`: of the record that lives longest, in s. `tls`: the files of `store.tls`."""

    def __init__(self, url: str, *, prefix: str, lifetime: float, tls: Mapping[str, str | None] | None = None) -> None:
        self.who = secrets.token_hex(8)  # names this process among those that share the store
        self.in_cluster = False
        self._prefix = prefix
        self._outage = f"{prefix}:{OUTAGE}"
        self._lifetime = lifetime
        self._url = url.replace("valkey", "redis", 1)
        self._tls = _tls(tls or {}) if self._url.startswith("rediss:") else {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._key = b""
        self._slots = asyncio.Semaphore(AT_ONCE)
        folder = resources.files("epochgate.ledger")
        self._scripts = {name: (folder / f"{name}.lua").read_text() for name in ("read", "write", "append", "follow")}
        self._shas = {
            name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in self._scripts.items()
        }
        self._bundle: Bundle | None = None
        self._single: Redis | None = None
        self._client: Redis | RedisCluster | None = None

    # -- what a ledger asks for

    async def open(self, key: bytes) -> bytes:
        """See `Store`."""
        await self._disconnect()
        async with _store_errors():
            self._single = Redis.from_url(self._url, **_patience(), **self._tls)
            info = await self._single.info("server")
            if _version(info) < OLDEST:
                raise StoreError(problems.TOO_OLD)
            info = await self._single.info("cluster")
            self.in_cluster = bool(info.get("cluster_enabled"))
            if self.in_cluster:
                self._client = RedisCluster.from_url(self._url, **_patience(), **self._tls)
                await self._client.initialize()
            else:
                self._client = self._single
                self._bundle = Bundle(self._single)  # in a cluster slots share no pipeline
            for script in self._scripts.values():
                await self._client.script_load(script)
        self._key = await self._keep_key(key)
        self._digest = hashlib.blake2b(key=self._key, digest_size=16, person=b"epochgate-sess")
        return self._key

    async def write(self, changes: Sequence[Change], removed: Sequence[bytes]) -> list[Written]:
        """See `Store`."""
        commands: list[Command] = [("UNLINK", self._name(session_id)) for session_id in removed]
        commands += [self._command(change) for change in changes]
        answers = (await self._execute(commands))[len(removed) :]
        for answer in answers:
            if isinstance(answer, RedisError) and not str(answer).startswith(_NO_SESSION):
                raise _as_store_error(answer)
        return [Written.KEPT if answer == 1 else Written.STALE for answer in answers]

    async def read(self, session_id: bytes, life: str, head_rev: int, revs: dict[int, int]) -> Kept | None:  # noqa: ARG002
        """See `Store`."""
        known = [item for pair in revs.items() for item in pair]
        step: Command = ("EVALSHA", self._shas["read"], 1, self._name(session_id), self.who, life, *known)
        (answer,) = await self._execute([step])
        if isinstance(answer, RedisError):
            if _NO_SESSION in str(answer):
                raise ValueError("there is something else under its key")
            raise _as_store_error(answer)
        fields = dict(zip(answer[::2], answer[1::2], strict=True))
        return _kept(fields) if fields else None

    async def outage_at(self) -> float:
        """See `Store`."""
        (answer,) = _checked(await self._execute([("ZSCORE", self._outage, _UPSTREAM)]))
        return NEVER if answer is None else float(answer)

    async def keep_outage(self, at: float) -> None:
        """See `Store`."""
        lifetime = int(self._lifetime * KEEP_KEY) + 1
        (changed,) = _checked(await self._execute([("ZADD", self._outage, "GT", "CH", at, _UPSTREAM)]))
        _checked(await self._execute([("EXPIRE", self._outage, lifetime)]))
        if changed:  # whoever hears of it finds it
            _checked(await self._execute([("PUBLISH", f"{self._prefix}:changed", f"{self.who}:{OUTAGE}")]))

    async def caught_up(self) -> None:
        """See `Store`. A process that ends before has not said that it ended in an orderly way."""

    async def tidy(self) -> None:
        """See `Store`. Records expire by themselves; the key of the fingerprints outlives them."""
        if await self._keep_key(self._key) != self._key:
            raise StoreError("the key of the fingerprints was replaced; all processes have to use the new one")

    async def close(self, *, complete: bool) -> None:
        """See `Store`."""
        try:
            if complete and self._client is not None:
                async with _store_errors():
                    await self._client.set(f"{self._prefix}:ended:{self.who}", 1, ex=int(self._lifetime) + 1)
        finally:
            await self._disconnect()

    # -- what processes tell each other

    def tag(self, session_id: bytes) -> str:
        """Names a session among the processes that share the store."""
        digest = self._digest.copy()
        digest.update(session_id)
        return digest.hexdigest()

    async def publish(self, to: str, message: bytes) -> int:
        """Tell a process something. Returns how many heard it; in a cluster 0 says nothing."""
        (answer,) = _checked(await self._execute([("PUBLISH", f"{self._prefix}:to:{to}", message)]))
        return int(answer)

    async def listen(
        self, began: Callable[[], None], changed: Callable[[str], None], told: Callable[[bytes], None]
    ) -> None:
        """Hear of what others announce (`changed`), and of what they tell this process (`told`).

        Raises StoreError when that ends.
        """
        everyone, me = f"{self._prefix}:changed", f"{self._prefix}:to:{self.who}"
        async with _store_errors():
            patience = {**_patience(), **self._tls, "socket_timeout": None, "health_check_interval": 5}
            client = Redis.from_url(self._url, **patience)
            pubsub: PubSub = client.pubsub()
            try:
                await pubsub.subscribe(everyone, me)
                left = 2
                while True:
                    message = await pubsub.get_message(timeout=ANSWER_WITHIN)
                    if message is None:
                        continue
                    if message["type"] == "subscribe":
                        left -= 1
                        if not left:
                            began()
                    elif message["channel"] == everyone.encode():
                        who, _, tag = message["data"].decode("ascii", "replace").partition(":")
                        if who != self.who:
                            changed(tag)
                    elif message["type"] == "message":
                        told(message["data"])
            finally:
                await pubsub.aclose()  # type: ignore[no-untyped-call]
                await client.aclose()

    async def ended(self, who: str) -> bool:
        """Whether a process has ended in an orderly way: all that it recorded is here."""
        (answer,) = _checked(await self._execute([("EXISTS", f"{self._prefix}:ended:{who}")]))
        return bool(answer)

    # -- streams that are lent

    def loan_key(self, tag: str, loan: str) -> str:
        """Where a loan lies: in the slot of its session."""
        return f"{self._prefix}:held:{{{tag}}}:{loan}"

    async def append(self, appends: Sequence[Append]) -> list[bool]:
        """Append to loans, each in one step; False for one whose beginning is not there (any more)."""
        commands: list[Command] = []
        for each in appends:
            channel = f"{self._prefix}:to:{each.reader}"
            step: Command = (int(each.lease * 1000), each.read, each.first, channel, each.notice)
            commands.append(("EVALSHA", self._shas["append"], 1, each.key, *step, *each.entries))
        return [answer == 1 for answer in _checked(await self._execute(commands))]

    async def follow(self, follows: Sequence[tuple[str, int]], most: int) -> list[list[tuple[int, bytes]] | None]:
        """Of each loan the entries from a number on, at most so many; None for one that is not there (any more)."""
        sha = self._shas["follow"]
        answers = await self._execute([("EVALSHA", sha, 1, key, number, most) for key, number in follows])
        return [
            [(int(number.partition(b"-")[0]), fields[1]) for number, fields in answer]
            if isinstance(answer, list)
            else None
            for answer in _checked(answers)
        ]

    async def unlink(self, key: str) -> None:
        """Remove a loan."""
        _checked(await self._execute([("UNLINK", key)]))

    # -- commands

    def _name(self, session_id: bytes) -> str:
        return f"{self._prefix}:session:{{{self.tag(session_id)}}}"

    def _command(self, change: Change) -> Command:
        """See write.lua."""
        head = change.head or b""
        data = [head]
        streams = []
        for key, stream in change.streams.items():
            data.append(stream.state)
            data += stream.blocks.values()
            blocks = [(number, len(block)) for number, block in stream.blocks.items()]
            streams.append((str(key), stream.base, len(stream.state), stream.oldest, blocks))
        packed = _encode((
            change.life, self.who, self.tag(change.session_id), change.whole, change.fenced,
            max(int(change.expires_in * 1000), 1), change.active_at, change.head_base, len(head),
            tuple(change.left), tuple(map(str, change.gone)), streams,
        ))  # fmt: skip
        name = self._name(change.session_id)
        return ("EVALSHA", self._shas["write"], 1, name, f"{self._prefix}:changed", packed, b"".join(data))

    async def _execute(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to some commands; an error answer stands in the list."""
        if not commands:
            return []
        async with _store_errors():
            client = self._connected()
            if isinstance(client, RedisCluster):
                return await asyncio.gather(*(self._execute_one(client, command) for command in commands))
            assert self._bundle is not None  # as the client
            return await self._bundle.execute(commands)

    async def _execute_one(self, client: RedisCluster, command: Command) -> Any:
        async with self._slots:
            try:
                return await client.execute_command(*command)
            except ResponseError as error:
                return error

    async def _keep_key(self, key: bytes) -> bytes:
        async with _store_errors():
            client = self._connected()
            name = f"{self._prefix}:key"
            await client.set(name, key, nx=True)
            await client.expire(name, int(self._lifetime * KEEP_KEY) + 1)
            kept = await client.get(name)
        if not isinstance(kept, bytes) or not 16 <= len(kept) <= 64:
            raise StoreError(f"{name} holds no key of fingerprints; remove it, or choose another prefix")
        return kept

    def _connected(self) -> Redis | RedisCluster:
        if self._client is None:
            raise StoreError("there is no connection")
        return self._client

    async def _disconnect(self) -> None:
        clients = {client for client in (self._client, self._single) if client is not None}
        if self._bundle is not None:
            self._bundle.close()
        self._client = self._single = self._bundle = None
        for client in clients:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()


def _checked(answers: list[Any]) -> list[Any]:
    """The answers, None where there is something else under the key. Raises StoreError for any other error."""
    for number, answer in enumerate(answers):
        if isinstance(answer, RedisError):
            if not str(answer).startswith(_NO_SESSION):
                raise _as_store_error(answer)
            answers[number] = None
    return answers


def _version(info: Mapping[str, Any]) -> tuple[int, ...]:
    """As far as the server tells one; for Valkey it is the one of the Redis that it is compatible with."""
    numbers = re.findall(r"\d+", str(info.get("redis_version")))
    return tuple(map(int, numbers[:2])) or OLDEST


def _patience() -> dict[str, Any]:
    """A failure is dealt with by the ledger, which does not wait for one command to be tried again."""
    return {
        "socket_connect_timeout": CONNECT_WITHIN,
        "socket_timeout": ANSWER_WITHIN,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # logs in by AUTH, which every server knows; HELLO may be unknown, or renamed
    }


def _tls(files: Mapping[str, str | None]) -> dict[str, Any]:
    """The server's certificate and name are checked, whatever the client library takes for its default."""
    return {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": files.get("ca"),
        "ssl_certfile": files.get("cert"),
        "ssl_keyfile": files.get("key"),
    }


def _kept(fields: dict[bytes, bytes]) -> Kept:
    """A session from its hash. Raises ValueError where it is none."""
    revs: dict[int, int] = {}
    states: dict[int, bytes] = {}
    blocks: dict[int, dict[int, bytes]] = {}
    writers: set[str] = set()
    try:
        for name, value in fields.items():
            kind, _, rest = name.partition(b":")
            if kind == b"rev":
                revs[int(rest)] = int(value)
            elif kind == b"state":
                states[int(rest)] = value
            elif kind == b"events":
                key, _, number = rest.partition(b":")
                blocks.setdefault(int(key), {})[int(number)] = value
            elif kind == b"by":
                writers.add(rest.decode("ascii"))
        return Kept(
            life=fields[b"life"].decode("ascii"),
            active_at=float(fields[b"active"]),
            head_rev=int(fields[b"head_rev"]),
            head=fields[b"head"],
            streams={key: KeptStream(revs[key], state, blocks.get(key, {})) for key, state in states.items()},
            unchanged=frozenset(revs.keys() - states.keys()),
            writers=frozenset(writers),
        )
    except KeyError as error:
        raise ValueError("it lacks a field") from error


@contextlib.asynccontextmanager
async def _store_errors() -> AsyncIterator[None]:
    """Whatever the client library raises becomes a StoreError, and that is much.

    Besides its own errors and those of sockets a connection that breaks at the wrong moment gives the RuntimeError of
    the event loop, or an AttributeError of the library.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001
        raise _as_store_error(error) from None


def _as_store_error(error: Exception) -> StoreError:
    return StoreError(problems.of_server(error))
