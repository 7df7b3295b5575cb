"""L7: of the errors of a store only their kind is told; their texts may quote passwords, ids and contents."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import sqlite3
import ssl

import msgspec
import pytest
from redis import exceptions as redis
from redis._parsers.base import BaseParser

from epochgate.errors import StoreError, told
from epochgate.ledger import problems
from epochgate.ledger.shared import SharedLedger
from epochgate.ledger.sqlite import what_fails
from epochgate.ledger.valkey import ValkeyStore
from ledger.places import DAY, Sqlite, Valkey, facts, records, story
from ledger.servers import running

ANSWERS = {
    "WRONGPASS invalid username-password pair or user is disabled. hunter2": "refuses the login",
    "ERR invalid password": "refuses the login",
    "NOAUTH Authentication required.": "refuses the login",
    "ERR unknown command `PUBLISH`, with args beginning with: `hunter2`": "does not know a command: PUBLISH;",
    "ERR unknown command 'hunter2', with args beginning with: 'x'": "does not know a command;",
    "ERR Unknown Redis command called from script script: hunter2, on @user_script:1.": "does not know a command;",
    "NOPERM User hunter2 has no permissions to run the 'evalsha' command": "as EVALSHA; look at its rights",
    "NOPERM No permissions to access a key hunter2": "may not do all that is needed; look",
    "OOM command not allowed when used memory > 'maxmemory'. hunter2": "out of memory",
    "READONLY You can't write against a read only replica. hunter2": "takes no writes; name the primary",
    "MISCONF Redis is configured to save RDB snapshots hunter2": "cannot save its data",
    "NOREPLICAS Not enough good replicas to write. hunter2": "too few replicas",
    "LOADING Redis is loading the dataset in memory hunter2": "is loading",
    "BUSY Redis is busy running a script hunter2": "a script keeps it busy",
    "NOSCRIPT No matching script. hunter2": "lost its scripts",
    "CLUSTERDOWN Hash slot not served hunter2": "cluster is down",
    "MASTERDOWN Link with MASTER is down hunter2": "cluster is down",
    "MOVED 3999 127.0.0.1:6381": "a cluster that changes",
    "WRONGTYPE Operation against a key hunter2": "something else lies under a key",
    "DENIED Redis is running in protected mode hunter2": "protected mode",
    "ERR DB index is out of range": "no database of that number",
    "ERR hunter2": "refuses a command; look into its own log",
}


@pytest.mark.parametrize(("answer", "told"), ANSWERS.items(), ids=[answer.partition(" ")[0] for answer in ANSWERS])
def test_an_answer_is_told_by_its_kind(answer, told):
    found = problems.of_server(BaseParser.parse_error(answer))
    assert told in found
    assert "hunter2" not in found.lower()


def broken(cause: Exception) -> Exception:
    """As the client library wraps it."""
    error = redis.ConnectionError(f"Error connecting to hunter2. {cause}")
    error.__context__ = cause
    return error


CONNECTIONS = {
    "refused": (ConnectionRefusedError(errno.ECONNREFUSED, "hunter2"), "no connection to it (connection refused)"),
    "name": (socket.gaierror(-2, "hunter2"), "its name is not known"),
    "certificate": (ssl.SSLCertVerificationError(1, "not valid for hunter2"), "certificate is not accepted"),
    "TLS": (ssl.SSLError(1, "hunter2"), "no TLS connection"),
    "time": (TimeoutError("hunter2"), "no answer in time"),
    "several": (OSError("Multiple exceptions: hunter2"), problems.UNREACHABLE),
}


@pytest.mark.parametrize(("cause", "told"), CONNECTIONS.values(), ids=CONNECTIONS)
def test_a_connection_is_told_by_its_kind(cause, told):
    for error in (cause, broken(cause)):
        found = problems.of_server(error)
        assert told in found
        assert "hunter2" not in found


def test_what_a_library_says_is_not_told():
    assert "(AttributeError)" in problems.of_server(AttributeError("hunter2"))
    assert "hunter2" not in problems.of_server(AttributeError("hunter2"))
    assert told(msgspec.ValidationError("Invalid enum value 'hunter2'")) == "it failed (ValidationError)"
    assert told(StoreError("our own words")) == "our own words"


async def test_nor_what_sqlite_says(tmp_path):
    """It quotes a text that it cannot decode."""
    place = Sqlite(tmp_path)
    ledger = await place.ledger()
    story(ledger)
    await ledger.flush()
    await place.aclose()
    with contextlib.closing(sqlite3.connect(place.path)) as file, file:
        file.execute("UPDATE sessions SET life = CAST(? AS TEXT)", (b"hunter2\xff",))
    with contextlib.closing(sqlite3.connect(place.path)) as file, pytest.raises(sqlite3.Error) as caught:
        file.execute("SELECT life FROM sessions").fetchall()
    assert "hunter2" in str(caught.value)
    assert "hunter2" not in what_fails(caught.value)
    assert what_fails(OSError(errno.ENOSPC, "hunter2")) == "no space left on device"


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that knows no command, and says so in the words of Redis."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while count := (await reader.readline())[1:]:
            words = []
            for _ in range(int(count)):
                length = int((await reader.readline())[1:])
                words.append((await reader.readexactly(length + 2))[:-2])
            quoted = b", ".join(b"`%b`" % word for word in words[1:])
            writer.write(b"-ERR unknown command `%b`, with args beginning with: %b\r\n" % (words[0], quoted))
    writer.close()


@pytest.mark.parametrize("user", ["", "someone"])
async def test_a_server_that_quotes_what_it_was_sent(user, capfd):
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = ValkeyStore(f"valkey://{user}:hunter2@127.0.0.1:{port}/0", prefix="test", lifetime=DAY)
    ledger = SharedLedger(records(), store)
    await ledger.start()
    assert ledger.problem == "store: it does not know a command: AUTH; it may be too old, or have commands renamed"
    for task in ledger._tasks:
        task.cancel()
    await asyncio.wait(ledger._tasks)
    await store._disconnect()
    server.close()
    assert "hunter2" not in json.dumps(capfd.readouterr())


async def test_a_server_without_hello_is_logged_in_to(tmp_path):
    """HELLO quotes the password where it is unknown, as before Redis 6, in proxies, and where it was renamed."""
    with running("redis", tmp_path, "--rename-command", "HELLO", "") as server:
        with server.client() as client:
            client.config_set("requirepass", "hunter2")
        place = Valkey(server, server.url.replace("//", "//:hunter2@"))
        one, two = await place.ledger(), await place.ledger()
        session = story(one)
        await one.flush()
        await two.read(b"session")
        assert facts(two.get(b"session", 0.0)) == facts(session)
        assert one.problem is None
        await place.aclose()


async def test_a_server_that_is_too_old_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr("epochgate.ledger.valkey.OLDEST", (99, 0))
    with running("redis", tmp_path) as server:
        store = Valkey(server).store()
        with pytest.raises(StoreError, match="older than Redis"):
            await store.open(b"k" * 32)
        await store._disconnect()
