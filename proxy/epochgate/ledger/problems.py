"""What is told of a Valkey or Redis that fails: a fixed text for each kind of error, with what to do about it.

A server or the client library may quote in an error what it was sent, or what it has: the password, ids, contents
(L7). So nothing of their texts is passed on; they only tell the kind.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator

from redis import exceptions as redis

UNREACHABLE = "there is no connection to it; look whether it runs and is reachable"
TOO_OLD = "it is older than Redis 6.2; use that or a newer one, or Valkey"

_OURS = {
    "ASKING", "AUTH", "CLIENT", "CLUSTER", "COMMAND", "DEL", "EVALSHA", "EXISTS", "EXPIRE", "GET", "HDEL", "HGET",
    "HGETALL", "HSET", "HSETNX", "INFO", "PEXPIRE", "PING", "PUBLISH", "SCRIPT", "SELECT", "SET", "SUBSCRIBE", "UNLINK",
    "XADD", "XRANGE", "XREVRANGE", "XTRIM", "ZADD", "ZSCORE",
}  # fmt: skip
_LOGIN = "it refuses the login; look at the user and the password in store.url"
_QUOTED = re.compile(r"[`'\"](\w+)")

# By class of the client library: the first that fits.
_CLASSES: tuple[tuple[type[Exception], str], ...] = (
    (redis.AuthenticationError, _LOGIN),
    (redis.AuthenticationWrongNumberOfArgsError, _LOGIN),
    (redis.BusyLoadingError, "it is loading its data; wait"),
    (redis.MaxConnectionsError, "it takes no more connections; raise its maxclients"),
    (redis.TimeoutError, "no answer in time; look whether it hangs, or is reachable"),
    (redis.InvalidResponse, "what answers is neither Valkey nor Redis; look at the port and the scheme in store.url"),
    (redis.OutOfMemoryError, "it is out of memory; give it more (maxmemory)"),
    (redis.ReadOnlyError, "it is a replica and takes no writes; name the primary in store.url"),
    (redis.NoScriptError, "it has lost its scripts, as after a restart; they are loaded again"),
    (redis.ClusterDownError, "its cluster is down, or its primary is; look at its nodes"),
    (redis.ClusterError, "its cluster is not reachable as a whole; look at its nodes"),
    (redis.MovedError, "it is a node of a cluster that changes; wait"),
    (redis.AskError, "it is a node of a cluster that changes; wait"),
    (redis.TryAgainError, "it is a node of a cluster that changes; wait"),
)  # fmt: skip

# By what the answer begins with.
_CODES: tuple[tuple[str, str], ...] = (
    ("MISCONF", "it takes no writes, since it cannot save its data; look at its disk"),
    ("NOREPLICAS", "it takes no writes, since too few replicas follow it; look at them"),
    ("BUSY", "a script keeps it busy; look at what else uses it"),
    ("WRONGTYPE", "something else lies under a key of epochgate's; remove that, or choose another store.prefix"),
    ("DENIED", "it is in protected mode, for its own machine alone; give it a password or a bind address"),
    ("max number of clients reached", "it takes no more connections; raise its maxclients"),
    ("DB index is out of range", "it has no database of that number; look at the end of store.url"),
    ("SELECT is not allowed", "a cluster has the database 0 alone; look at the end of store.url"),
)


def of_server(error: Exception) -> str:
    """What is wrong with a Valkey or Redis."""
    for kind, text in _CLASSES:
        if isinstance(error, kind):
            return text
    if isinstance(error, redis.ResponseError):
        return _of_answer(error)
    return next(filter(None, map(_of_connection, _chain(error))), None) or (
        UNREACHABLE
        if isinstance(error, redis.RedisError | OSError)
        else f"its client library failed ({type(error).__name__}); look whether it runs and is reachable"
    )


def _of_answer(error: redis.ResponseError) -> str:
    said = str(error)
    command = next((f" {word.upper()}" for word in _QUOTED.findall(said) if word.upper() in _OURS), "")
    if isinstance(error, redis.NoPermissionError):
        return f"its user may not do all that is needed{command and ', as'}{command}; look at its rights (ACL)"
    if "unknown command" in said.lower() or "unknown redis command" in said.lower():
        return f"it does not know a command{command and ':'}{command}; it may be too old, or have commands renamed"
    fitting = (text for begin, text in _CODES if said.startswith(begin))
    return next(fitting, "it refuses a command; look into its own log")


def _of_connection(error: BaseException) -> str | None:
    """What a socket tells."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not accepted; look at store.tls.ca, and at the name in store.url"
    if isinstance(error, ssl.SSLError):
        return "there is no TLS connection to it; look at store.tls, and whether its port speaks TLS"
    if isinstance(error, socket.gaierror):
        return "its name is not known; look at the host in store.url"
    if isinstance(error, TimeoutError):
        return "no answer in time; look whether it hangs, or is reachable"
    if isinstance(error, OSError) and error.errno:
        why = os.strerror(error.errno).lower()
        return f"there is no connection to it ({why}); look whether it runs and is reachable"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it came from."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
