"""Where clients connect: listeners, their errors with place and remedy, and addresses that several processes share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epochgate.errors import ConfigurationError
from epochgate.values import Address

BACKLOG = 4096
SILENT = 60  # s without a byte, and a peer is asked whether it is there; as long again without an answer, and it is not

Protocol = Callable[[], asyncio.Protocol]


async def listen(
    address: Address, protocol: Protocol, key: str, tls: ssl.SSLContext | None, handshake_time: float
) -> asyncio.Server:
    """Listen at `address` alone; `handshake_time`: for TLS, in s. Raises ConfigurationError that names the key."""
    loop = asyncio.get_running_loop()
    within = None if tls is None else handshake_time
    try:
        if address.path is not None:
            make_way(address.path)
            return await loop.create_unix_server(
                protocol, address.path, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=within
            )
        return _noticing(
            await loop.create_server(
                protocol, address.host or None, address.port, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=within
            )
        )
    except OSError as error:
        raise cannot_listen(key, address, error) from None


@dataclass(frozen=True, slots=True)
class Reserved:
    """An address that is kept for processes which listen on it together: the supervisor has it, its workers get it.

    TCP: `sockets` hold the port and do not listen; each process has a socket of its own (SO_REUSEPORT), which ends with
    it, so that no connection waits for a process that is dead. A Unix socket cannot be bound twice: there is one, it
    listens, and all processes inherit it.
    """

    address: Address
    sockets: tuple[socket.socket, ...]

    @property
    def inherited(self) -> socket.socket | None:
        """What a process of it inherits."""
        return self.sockets[0] if self.address.path is not None else None

    def close(self) -> None:
        """Nobody listens here any more."""
        for sock in self.sockets:
            sock.close()
        if self.address.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)  # noqa: PTH108


def reserve(address: Address, key: str) -> Reserved:
    """Keep `address` for several processes; port 0 becomes a free one. Raises ConfigurationError as `listen` does."""
    try:
        if address.path is not None:
            return Reserved(address, (_listening_unix_socket(address.path),))
        return _reserve_port(address)
    except OSError as error:
        raise cannot_listen(key, address, error) from None


async def listen_together(
    address: Address,
    inherited: socket.socket | None,
    protocol: Protocol,
    key: str,
    tls: ssl.SSLContext | None,
    handshake_time: float,
) -> asyncio.Server:
    """Listen at a `Reserved` address, beside other processes. Otherwise as `listen`."""
    loop = asyncio.get_running_loop()
    within = None if tls is None else handshake_time
    try:
        if inherited is None:
            return _noticing(
                await loop.create_server(
                    protocol,
                    address.host or None,
                    address.port,
                    backlog=BACKLOG,
                    ssl=tls,
                    ssl_handshake_timeout=within,
                    reuse_port=True,
                )
            )
        # From Python 3.13 on the first to end would remove it for all.
        kept: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        return await loop.create_unix_server(
            protocol, sock=inherited, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=within, **kept
        )
    except OSError as error:
        raise cannot_listen(key, address, error) from None


def _noticing(server: asyncio.Server) -> asyncio.Server:
    """What it accepts inherits the options of its sockets."""
    for sock in server.sockets:
        notice_death(sock)
    return server


def notice_death(sock: Any, silent: int = SILENT, again: int = SILENT // 4) -> None:
    """Have the kernel ask a peer that is silent for so many s whether it is there, and `again`: one may just vanish."""
    if sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silent)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, again)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def cannot_listen(key: str, address: Address, error: OSError) -> ConfigurationError:
    """What to tell the user, with the key that is to be changed."""
    if error.errno == errno.EADDRINUSE:
        remedy = "it is in use; choose another, or end the process that has it"
    elif error.errno == errno.EACCES:
        remedy = "it is not allowed; choose a port above 1023, or a directory that can be written"
    else:
        remedy = (error.strerror or str(error)).lower()
    return ConfigurationError(f"{key}: cannot listen on {address}: {remedy}")


def make_way(path: str) -> None:
    """Remove the socket file of a process that was killed. Raises OSError where somebody listens on it.

    The event loop would take it away from whoever does.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # noqa: PTH108
        except OSError:
            pass
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _listening_unix_socket(path: str) -> socket.socket:
    make_way(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _reserve_port(address: Address) -> Reserved:
    found = socket.getaddrinfo(
        address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )  # more than one for a name, or for every interface
    port = address.port
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, place in dict.fromkeys(found):
            here = (place[0], port, *place[2:])
            # A port that somebody shares already would be shared with us too, and the clients divided between both.
            with _bound(family, here):
                pass
            sockets.append(_bound(family, here, socket.SO_REUSEPORT))
            port = sockets[-1].getsockname()[1]
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return Reserved(Address(address.host, port), tuple(sockets))


def _bound(family: int, place: tuple[object, ...], *options: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, *options):
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
    except OSError:
        sock.close()
        raise
    return sock
