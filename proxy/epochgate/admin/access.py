"""Who may change something (fence, reload, drain): whoever has the token, or is on this machine. And who may look."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

from aiohttp import web

from epochgate.errors import ConfigurationError
from epochgate.files import check_regular

_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via")


def read_token(file: str) -> bytes:
    """The token in `admin.token_file`. Raises ConfigurationError."""
    try:
        check_regular(file)
        token = Path(file).read_bytes().strip()
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ConfigurationError(
            f"admin.token_file: {file}: {reason}; name a file that this user may read, or remove the key"
        ) from None
    if not token:
        raise ConfigurationError(f"admin.token_file: {file} is empty; write a long random token into it")
    return token


def check_change(request: web.Request, token_file: str | None) -> None:
    """Raises an HTTPUnauthorized or HTTPForbidden with the reason, where `request` may change nothing."""
    authorization = request.headers.get("Authorization")
    if authorization is not None:
        _check_token(authorization, token_file)
    elif reason := _why_foreign(request):
        remedy = "send `Authorization: Bearer` with the token" if token_file else "set admin.token_file to allow others"
        raise web.HTTPForbidden(text=f"only from this machine, and {reason}; {remedy}")


def check_look(request: web.Request, token_file: str | None) -> None:
    """Raises an HTTPForbidden for a request that came by the loopback, under a name that is not the loopback's own.

    That is how a page in a browser on this machine comes here, once the name of its own site leads here. Whoever comes
    from another machine reached the listener by the operator's will.
    """
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not isinstance(peer, tuple) or not _is_loopback(peer[0]) or _is_address(host := _host_of(request.host)):
        return
    if host == "localhost":
        return
    if "Authorization" in request.headers:
        _check_token(request.headers["Authorization"], token_file)
        return
    raise web.HTTPForbidden(
        text="the name it was sent to is not one of this machine's own; ask for localhost or an address"
    )


def _check_token(authorization: str, token_file: str | None) -> None:
    if token_file is None:
        raise web.HTTPForbidden(text="no token is known here; set admin.token_file")
    try:
        token = read_token(token_file)
    except ConfigurationError as error:
        raise web.HTTPForbidden(text=str(error)) from None
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(errors="surrogateescape"), token):
        raise web.HTTPUnauthorized(
            text="that is not the token in admin.token_file", headers={"WWW-Authenticate": "Bearer"}
        )


def _why_foreign(request: web.Request) -> str:
    """Why a request does not count as one of this machine, "" if it does.

    A page in a browser on this machine, whoever made it, can send requests from here: by its own name (`Origin`), or
    with a name of its own that leads here (`Host`).
    """
    transport = request.transport
    peer = transport.get_extra_info("peername") if transport is not None else None
    if isinstance(peer, tuple):  # else a Unix socket
        if not _is_loopback(peer[0]):
            return "this came from another one"
        if not _is_loopback(_host_of(request.host)):
            return "the name it was sent to is not one of this machine's own"
    if any(name in request.headers for name in _FORWARDED):
        return "this came through a proxy"
    if any(origin.partition("://")[2] != request.host for origin in request.headers.getall("Origin", ())):
        return "this came from a page of another origin"
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return "this came from a page of another site"
    return ""


def _host_of(authority: str) -> str:
    host, _, port = authority.rpartition(":")
    return (host if host and port.isdigit() else authority).strip("[]")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
