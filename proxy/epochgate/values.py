"""Values that a configuration writes as text: durations, sizes, addresses and URLs.

Each `parse_...` takes what YAML, the environment or a flag gave and raises `ValueError` with what is wrong and what to
write instead. Texts that can hold a password are never repeated in an error.
"""

from __future__ import annotations

import ipaddress
import math
import re
import urllib.parse
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, StrictBool, WithJsonSchema

_HEADER_NAME = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_DURATION = rf"^{_NUMBER}(?:ms|s|m|h)?$"
_SIZE = r"^[0-9]+(?:B|KiB|MiB|GiB)?$"
LONGEST = 8760.0 * 3600
_SIZES = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024, "B": 1}
_MILLISECONDS = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_UNIX_PATH_BYTES = 107  # sun_path of Linux, without the final NUL
_PORTS = {"http": 80, "https": 443}
_SHARED_STORES = ("valkey", "valkeys", "redis", "rediss")


def parse_duration(value: object) -> float:
    """Seconds of `500ms`, `30s`, `5m`, `24h`, or of a plain number of seconds."""
    seconds = math.nan
    if isinstance(value, str) and re.match(_DURATION, value) and not value.endswith("\n"):
        number = value.rstrip("msh")
        unit = value[len(number) :] or "s"
        seconds = float(number) / 1000 if unit == "ms" else float(number) * (_MILLISECONDS[unit] // 1000)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = math.inf if value > LONGEST else float(max(value, -1))
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{_shown(value)} is no duration; write 500ms, 30s, 5m, 24h, or a number of seconds")
    if seconds > LONGEST:
        raise ValueError(f"{_shown(value)} is too long; write at most {format_duration(LONGEST)}")
    return seconds


def format_duration(seconds: float) -> str | float:
    """The shortest text that `parse_duration` reads as `seconds`; a number where a millisecond is too coarse."""
    milliseconds = round(seconds * 1000)
    if milliseconds / 1000 != seconds:
        return seconds
    if not milliseconds:
        return "0s"
    unit = next(unit for unit, size in _MILLISECONDS.items() if milliseconds % size == 0)
    return f"{milliseconds // _MILLISECONDS[unit]}{unit}"


def parse_size(value: object) -> int:
    """Bytes of `64KiB`, `1MiB`, `2GiB`, or of a plain number of bytes."""
    if isinstance(value, str) and re.match(_SIZE, value) and not value.endswith("\n"):
        number = value.rstrip("BiKMG")
        return int(number) * _SIZES[value[len(number) :] or "B"]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"{_shown(value)} is no size; write 64KiB, 1MiB, or a number of bytes")


def format_size(size: int) -> str | int:
    """The shortest text that `parse_size` reads as `size`; a number of bytes where no larger unit fits."""
    for unit, factor in _SIZES.items():
        if factor > 1 and size and size % factor == 0:
            return f"{size // factor}{unit}"
    return size


# Names and addresses of this machine that stand for others.
_REACH = {
    "localhost": {"127.0.0.1", "::1"},
    "0.0.0.0": {"127.0.0.1", "0.0.0.0"},  # noqa: S104
    "::": {"::1", "::"},
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: `host` and `port` (0: any free one), or the `path` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"{_bracketed(self.host)}:{self.port}"

    def meets(self, other: Address) -> bool:
        """Whether both are the same place on this machine, as far as their texts tell."""
        if self.path is not None or other.path is not None:
            return self.path == other.path
        here, there = (_REACH.get(host, {host}) for host in (self.host, other.host))
        return self.port == other.port != 0 and bool(here & there)


def parse_address(value: object) -> Address:
    """The address that `host:port`, `[v6]:port` or `unix:/path` names."""
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is no address; write host:port, '[::1]:port' or unix:/path")  # noqa: TRY004
    if value.startswith("unix:"):
        return Address(path=_unix_path(value))
    host, _, port = value.rpartition(":")
    if not host:
        raise ValueError(
            f"{_shown(value)} needs a host and a port; write 127.0.0.1:8080, or 0.0.0.0:8080 for every interface"
        )
    return Address(_host(host), _port(port))


def _unix_path(value: str) -> str:
    """The path of `unix:/path`."""
    path = value.removeprefix("unix:")
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"{_shown(value)} has no absolute path; write unix:/path")
    if len(path.encode(errors="replace")) > _UNIX_PATH_BYTES:
        raise ValueError(f"the path of a Unix socket has at most {_UNIX_PATH_BYTES} bytes; choose a shorter one")
    return path


@dataclass(frozen=True, slots=True)
class UpstreamUrl:
    """The upstream: `prefix` is "" or begins with a slash and does not end in one; it goes before every target.

    `path` is that of a Unix socket, which speaks http and is called `localhost`.
    """

    scheme: str
    host: str
    port: int
    prefix: str = ""
    path: str | None = None

    @property
    def authority(self) -> str:
        """The value for `Host`: the port is named unless it is the scheme's own."""
        host = _bracketed(self.host)
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_upstream(value: object) -> UpstreamUrl:
    """The parts of `http://host:port/prefix` (neither user name nor query nor fragment is allowed) or `unix:/path`."""
    if isinstance(value, UpstreamUrl):
        return value
    if isinstance(value, str) and value.startswith("unix:"):
        return UpstreamUrl("http", "localhost", _PORTS["http"], path=_unix_path(value))
    example = "write it like http://127.0.0.1:3000"
    if not isinstance(value, str) or not re.match(r"https?://", value, re.IGNORECASE):
        raise ValueError(f"must begin with http://, https:// or unix:/; {example}")
    if re.search(r"[^!-~]", value):
        raise ValueError("has a space or a character beyond ASCII; escape it as %20 and so on")
    if "?" in value or "#" in value:
        raise ValueError("must have no query and no fragment; end it before the ? or #")
    scheme, _, rest = value.partition("://")
    scheme = scheme.lower()
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        raise ValueError("must hold no user name or password; the clients' own credentials are forwarded")
    if not authority:
        raise ValueError(f"names no host; {example}")
    host, port = _split_port(authority)
    secret = "@" in path  # a password with a slash in it?
    number = _port(port, secret=secret) if port else _PORTS[scheme]
    if number == 0:
        raise ValueError("has port 0, which nothing can listen on; name the upstream's port")
    return UpstreamUrl(scheme, _host(host, secret=secret), number, (slash + path).rstrip("/"))


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Where records live. `text` is the URL as given, for the client library; `str()` shows it without a password."""

    scheme: str
    text: str = field(repr=False)

    @property
    def path(self) -> str:
        """The path of the URL: the file of `sqlite:///abs/path`."""
        return urllib.parse.urlsplit(self.text).path

    def __str__(self) -> str:
        start, at, end = self.text.rpartition("@")
        if not at:
            return self.text
        scheme, _, given = start.partition("://")
        user, colon, _ = given.partition(":")
        return f"{scheme}://{user}:***@{end}" if colon else f"{scheme}://***@{end}"  # one word may be a password


def parse_store(value: object) -> StoreUrl:
    """The store of `memory://`, `sqlite:///abs/path` or `valkey://host:6379/0` (or redis, rediss, valkeys)."""
    if isinstance(value, StoreUrl):
        return value
    if value == "memory://":
        return StoreUrl("memory", "memory://")
    scheme, _, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
    if re.search(r"[?#\s]", rest):
        raise ValueError("must have no query, no fragment and no space; escape those of a password as %3F and so on")
    if scheme == "sqlite":
        if not re.fullmatch(r"/.*[^/]", rest):
            raise ValueError(
                "must name a file by its absolute path; write it like sqlite:///var/lib/epochgate/ledger.db"
            )
    elif scheme in _SHARED_STORES:
        authority, _, database = rest.partition("/")
        login, _, place = authority.rpartition("@")
        if "[" in login or "]" in login:  # the client library takes them for those of an IPv6 address
            raise ValueError("must have no [ or ] in its password; escape them as %5B and %5D")
        host, port = _split_port(place)
        if port:
            _port(port, secret=True)
        _host(host, secret=True)
        if not re.fullmatch(r"[0-9]*", database):
            raise ValueError(f"must end in the number of a database; write it like {scheme}://host:6379/0")
    else:
        raise ValueError("must be memory://, sqlite:///abs/path or valkey://host:6379/0 (or redis, rediss, valkeys)")
    return StoreUrl(scheme, f"{scheme}://{rest}")


def _split_port(authority: str) -> tuple[str, str]:
    """Host and port of an authority; the port is "" where none is named."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::([^:]*))?", authority)
    return (found[1], found[2] or "") if found else (authority, "")


def _host(text: str, *, secret: bool = False) -> str:
    """A name or an address as the resolver takes it: IPv6 without its brackets. `secret`: do not repeat `text`."""
    shown = "what stands for the host" if secret else _shown(text)
    if text.startswith("[") and text.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(text[1:-1]))
        except ValueError:
            raise ValueError(f"{shown} is no IPv6 address; write one like [::1]") from None
    if ":" in text:
        raise ValueError(f"{shown} has several colons; put an IPv6 address in brackets, like '[::1]:8080'")
    if not _HOST.fullmatch(text):
        raise ValueError(f"{shown} is no host name or address; write one like 127.0.0.1 or mcp.internal")
    return text


def _port(text: str, *, secret: bool = False) -> int:
    if re.fullmatch(r"[0-9]{1,5}", text) and int(text) <= 65535:
        return int(text)
    raise ValueError(f"{'what stands for the port' if secret else _shown(text)} is no port; write a number up to 65535")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def reject_bool(value: object) -> object:
    """`value`, unless it is a bool; raises `ValueError` then."""
    if isinstance(value, bool):  # pydantic reads true as 1
        raise ValueError("must be a whole number")  # noqa: TRY004
    return value


def parse_switch(value: object) -> object:
    """A bool of `true` or `false` as text, which is what the environment gives; anything else as it is."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def parse_file(value: object) -> object:
    """None of `null` as text and of an empty text, which is what the environment gives; anything else as it is."""
    return None if value in ("null", "") else value


def _require_some(seconds: float) -> float:
    if not seconds:
        raise ValueError("must be longer than 0s")
    return seconds


def _check_header(name: str) -> str:
    if not re.fullmatch(_HEADER_NAME, name):
        raise ValueError("is no name of a header field; write one like Mcp-Session-Epoch")
    return name


Switch = Annotated[StrictBool, BeforeValidator(parse_switch)]
FileName = Annotated[
    str | None,
    BeforeValidator(parse_file),
    WithJsonSchema({"anyOf": [{"title": "path of a file", "type": "string"}, {"type": "null"}]}),
]
Count = Annotated[int, Field(ge=1, le=1_000_000_000), BeforeValidator(reject_bool)]
HeaderName = Annotated[
    str,
    AfterValidator(_check_header),
    WithJsonSchema({"title": "name of a header", "type": "string", "pattern": _HEADER_NAME}),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration),
    WithJsonSchema(
        {
            "title": "duration",
            "anyOf": [{"type": "string", "pattern": _DURATION}, {"type": "number", "minimum": 0}],
        }
    ),
]
PositiveDuration = Annotated[Duration, AfterValidator(_require_some)]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size),
    Field(ge=1),
    WithJsonSchema(
        {
            "title": "size",
            "anyOf": [{"type": "string", "pattern": _SIZE}, {"type": "integer", "minimum": 1}],
        }
    ),
]
ListenAddress = Annotated[
    Address,
    PlainValidator(parse_address),
    PlainSerializer(str),
    WithJsonSchema({"title": "address", "type": "string", "pattern": r"^(unix:/.+|.+:[0-9]{1,5})$"}),
]
UpstreamValue = Annotated[
    UpstreamUrl,
    PlainValidator(parse_upstream),
    PlainSerializer(str),
    WithJsonSchema(
        {"title": "URL", "type": "string", "pattern": r"^(unix:/.+|[Hh][Tt][Tt][Pp][Ss]?://[^/?#@]+(/[^?#]*)?)$"}
    ),
]
StoreValue = Annotated[
    StoreUrl,
    PlainValidator(parse_store),
    PlainSerializer(str),
    WithJsonSchema(
        {
            "title": "URL",
            "type": "string",
            "pattern": r"^(memory://|sqlite:///[^?#\s]+|(valkeys?|rediss?)://[^/?#\s]+(/[0-9]*)?)$",
        }
    ),
]
