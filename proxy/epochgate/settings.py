"""Every key of the configuration, its default and its bounds: the only place that knows them (section 10)."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from epochgate.guard.policy import (
    EventIds,
    HeaderSource,
    LiveChange,
    MetaSource,
    Mode,
    PendingCalls,
    Policy,
    Proof,
    Source,
    Unproven,
    normalize_path,
)
from epochgate.values import (
    Address,
    Count,
    Duration,
    FileName,
    HeaderName,
    ListenAddress,
    PositiveDuration,
    Size,
    StoreUrl,
    StoreValue,
    Switch,
    UpstreamValue,
    reject_bool,
)

# Keys that are accepted and checked but do nothing yet, with what that means for the user.
PENDING: dict[str, str] = {}


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise ValueError("must be 1 to 63 letters, digits, dots, hyphens or underscores; write one like mcp")
    return name


def _check_path(path: str) -> str:
    """Policies see decoded, normalised paths only: refuse a pattern that could never match one."""
    if not path.startswith("/"):
        raise ValueError("must begin with a slash; write one like /mcp, or /mcp/* for all below")
    if "*" in path[:-1]:
        raise ValueError("may have a * only at its end; write one policy for each path")
    plain = path.removesuffix("*")
    if re.search(r"[?#]|%[0-9A-Fa-f]{2}", plain):
        raise ValueError("is compared with the decoded path alone; write it without escapes, query and fragment")
    normal = normalize_path(urllib.parse.quote(plain).encode())
    if normal != plain:
        raise ValueError(f"is compared with the normalised path; write {normal}{path[len(plain) :]}")
    return path


class Section(BaseModel):
    """A mapping of the configuration; keys that it does not know are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tls(Section):
    """TLS on the listener: with both files, clients speak https."""

    cert: FileName = Field(
        default=None,
        description="PEM file with the certificate and its chain; clients then connect by https. null: plain http.",
    )
    key: FileName = Field(default=None, description="PEM file with the private key of `tls.cert`.")

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        _check_pair("tls", self.cert, self.key)
        return self


class UpstreamTls(Section):
    """TLS to the upstream, where its URL begins with https."""

    ca: FileName = Field(
        default=None,
        description="PEM file with the authorities that may sign the upstream's certificate. null: the system's.",
    )
    cert: FileName = Field(default=None, description="PEM file with a client certificate and its chain.")
    key: FileName = Field(default=None, description="PEM file with the private key of `upstream.tls.cert`.")

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        _check_pair("upstream.tls", self.cert, self.key)
        return self


def _check_pair(above: str, cert: str | None, key: str | None) -> None:
    if (cert is None) != (key is None):
        raise ValueError(f"needs {above}.cert and {above}.key together; set both, or neither")


class Upstream(Section):
    """The server that is guarded."""

    url: UpstreamValue = Field(
        description="Scheme and authority of the upstream, optionally a path prefix that goes before each path; "
        "or `unix:/path`."
    )
    host: Literal["upstream", "client"] = Field(
        default="upstream", description="Whose `Host` the upstream sees: its own authority, or what the client sent."
    )
    connect_timeout: PositiveDuration = Field(
        default=5.0, description="How long a connection may take before the answer is 504."
    )
    idle_timeout: Duration = Field(
        default=0.0,
        description="Silence of the upstream, before and after the response head, that ends an exchange. 0s: none.",
    )
    tls: UpstreamTls = Field(default_factory=UpstreamTls)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.url.scheme != "https" and self.tls != UpstreamTls():
            raise PydanticCustomError(
                "relation",
                "is for an upstream.url that begins with https://; change the URL, or remove upstream.tls",
                {"key": ("upstream", "tls")},
            )
        return self


class Admin(Section):
    """The second listener."""

    listen: ListenAddress = Field(
        default=Address("127.0.0.1", 9090),
        description="Where health, metrics and the status page are served. Keep it private.",
    )
    token_file: FileName = Field(
        default=None,
        description="File with the token that allows fencing, reload and drain from other machines "
        "(`Authorization: Bearer ...`). null: from this machine only.",
    )


class StoreTls(Section):
    """TLS to a shared store, where its URL begins with valkeys or rediss."""

    ca: FileName = Field(
        default=None,
        description="PEM file with the authorities that may sign the store's certificate. null: the system's.",
    )
    cert: FileName = Field(default=None, description="PEM file with a client certificate and its chain.")
    key: FileName = Field(default=None, description="PEM file with the private key of `store.tls.cert`.")

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        _check_pair("store.tls", self.cert, self.key)
        return self


class Store(Section):
    """Where records live."""

    url: StoreValue = Field(
        default=StoreUrl("memory", "memory://"),
        description="`memory://`, `sqlite:///abs/path` or `valkey://host:6379/0` (also `redis`, `rediss`, `valkeys`).",
    )
    prefix: Annotated[str, AfterValidator(_check_name)] = Field(
        default="epochgate",
        description="What the keys in a shared store begin with. Proxies of other servers need another one.",
    )
    tls: StoreTls = Field(default_factory=StoreTls)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.url.scheme not in ("valkeys", "rediss") and self.tls != StoreTls():
            raise PydanticCustomError(
                "relation",
                "is for a store.url that begins with valkeys:// or rediss://; change the URL, or remove store.tls",
                {"key": ("store", "tls")},
            )
        return self


class Drain(Section):
    """How the proxy ends."""

    grace: Duration = Field(
        default=5.0, description="After SIGTERM: how long it is not ready but still serves every request."
    )
    window: Duration = Field(
        default=25.0, description="Then: over how long the open streams are ended, after whole events."
    )


class Limits(Section):
    """What is kept, and for how long. Whatever was evicted is unknown, so its resumes are unproven."""

    sessions: Count = Field(default=100_000, description="Sessions on record; as many fenced ones beside them.")
    streams_per_session: Count = Field(default=256, description="Streams on record in one session.")
    events_per_stream: Count = Field(default=1024, description="Events on record in one stream.")
    session_idle: PositiveDuration = Field(
        default=24 * 3600.0, description="Idle time after which a session is forgotten."
    )
    fence: PositiveDuration = Field(default=24 * 3600.0, description="How long a refused session stays refused.")
    held_streams: Count = Field(default=1024, description="Streams that are held for absent clients at the same time.")
    copies: Size = Field(
        default=128 * 1024**2,
        description="Bytes of unfinished requests, answers and events that are kept to be read and checked, of all "
        "together; 64 KiB of each do not count. Beyond it one passes unread, as one above 4 MiB does, or a resume is "
        "put off by a 503.",
    )
    connections: Count = Field(
        default=16384,
        description="Connections of clients at the same time; fewer where descriptors run short. Beyond it the one "
        "that has been without a complete request for the longest time is closed, and a new one if all are at work.",
    )
    connection_idle: PositiveDuration = Field(
        default=75.0, description="How long a client's connection may wait for its next request."
    )
    head_time: PositiveDuration = Field(
        default=30.0, description="How long the head of a request, or a TLS handshake, may take."
    )
    body_time: PositiveDuration = Field(
        default=60.0,
        description="How long the body of a request may stall, or fall behind 500 bytes a second, before it is "
        "answered 408.",
    )


class Log(Section):
    """What is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least level that is written."
    )
    format: Literal["json", "console"] = Field(default="json", description="JSON lines, or lines for people.")


class Tracing(Section):
    """Spans by OpenTelemetry."""

    enabled: Switch = Field(
        default=False,
        description="Whether a span is sent for each request. Needs the extra `otel`; where to is told by the "
        "variables of OpenTelemetry, such as `OTEL_EXPORTER_OTLP_ENDPOINT`.",
    )


class Match(Section):
    """Which requests a policy is for."""

    path: Annotated[str, AfterValidator(_check_path)] | None = Field(
        default=None,
        description="A path, or a prefix when it ends in `*`; compared with the decoded, normalised path, "
        "case included. null: every path.",
    )


class EpochSource(Section):
    """One place where the epoch token can stand; exactly one of the two keys."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    meta: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A key in `params._meta`, `result._meta` or the message's own `_meta`."
    )
    header: HeaderName | None = Field(default=None, description="A response header.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.meta is None) == (self.header is None):
            raise ValueError("needs either `meta` or `header`; write one list item for each source")
        return self

    @model_serializer
    def _dump(self) -> dict[str, str]:
        return {key: value for key, value in (("meta", self.meta), ("header", self.header)) if value is not None}

    def compiled(self) -> Source:
        """The source as the guard reads it."""
        if self.meta is not None:
            return MetaSource(self.meta)
        assert self.header is not None  # by _check_one
        return HeaderSource(self.header.lower().encode())


class Epoch(Section):
    """What tells one life of a session from the next."""

    sources: tuple[EpochSource, ...] = Field(
        default=(EpochSource(meta="session_epoch"), EpochSource(header="Mcp-Session-Epoch")),
        description="Where the epoch token is looked for; the first that is present counts.",
    )
    instance_header: HeaderName | None = Field(
        default=None,
        description="A response header whose change is a sign that the session may have ended; where the platform sets "
        "one (a pod's name, say), it shows restarts to `overlap`. Only 2xx answers count: a gateway gives others too.",
    )
    session_ttl: PositiveDuration | None = Field(
        default=None,
        description="The server's session lifetime: a longer gap is a sign that the session may have ended.",
    )
    live_change: LiveChange = Field(
        default=LiveChange.FENCE, description="What a token change on traffic that was not resumed does to the session."
    )


class Hold(Section):
    """How long a stream waits for its client."""

    time: Duration = Field(
        default=60.0,
        description="How long the upstream connection is kept for an absent client. 0s: not at all. An observing "
        "policy keeps none, and counts a client that is back within this time as one that would have been served.",
    )
    bytes: Size = Field(default=1024**2, description="How much is buffered meanwhile; a full buffer ends the hold.")


class Resume(Section):
    """When a resumed stream is let through."""

    accept: tuple[Proof, ...] = Field(
        default=(Proof.CONNECTION, Proof.EPOCH),
        json_schema_extra={"minItems": 1},
        description="The proofs that suffice; at least one. `overlap` suits servers without epochs that close streams "
        "on purpose. It is void after a refused or reset new connection, an answer that the session is lost, another "
        "`epoch.instance_header`, or a gap above `epoch.session_ttl`. It does not see a server that was restarted in "
        "between and repeats the same events.",
    )
    unproven: Unproven = Field(
        default=Unproven.RESTART, description="What becomes of a resume that nothing proves or contradicts."
    )
    event_ids: EventIds = Field(
        default=EventIds.AUTO, description="The order of the server's event ids. `auto`: learn it per stream."
    )
    first_event_timeout: Duration = Field(
        default=1.0, description="How long a response head waits for the first message before it is passed on."
    )
    hold: Hold = Field(default_factory=Hold)

    @field_validator("accept")
    @classmethod
    def _check_some(cls, accept: tuple[Proof, ...]) -> tuple[Proof, ...]:
        if not accept:
            raise ValueError("is empty, so that nothing could prove a resume; write [connection, epoch]")
        return accept


class Refusal(Section):
    """How a client is told to start over."""

    pending_calls: PendingCalls = Field(
        default=PendingCalls.ON_RETRY,
        description="When the calls that a refused stream owes are answered with an error.",
    )
    normalize_loss: StrictBool = Field(
        default=True, description="Whether the server's own ways to say that a session is lost become the standard 404."
    )


class PolicySettings(Section):
    """One policy, as it is written."""

    name: Annotated[str, AfterValidator(_check_name)] = Field(
        default="mcp", description="The name in logs and metrics; each policy has its own."
    )
    match: Match = Field(default_factory=Match)
    mode: Mode = Field(default=Mode.ENFORCE, description="Refuse, only count what would be refused, or do not look.")
    epoch: Epoch = Field(default_factory=Epoch)
    credentials: tuple[HeaderName, ...] = Field(
        default=("Authorization", "Cookie", "X-API-Key"),
        description="Request headers that tell one caller from another.",
    )
    resume: Resume = Field(default_factory=Resume)
    refusal: Refusal = Field(default_factory=Refusal)
    keepalive: Duration = Field(
        default=0.0,
        description="Silence after which an enforced stream gets a bare SSE comment, so that nothing on the way takes "
        "it for dead. 0s: never.",
    )

    def compiled(self) -> Policy:
        """The policy as the guard reads it."""
        return Policy(
            name=self.name,
            path=self.match.path,
            mode=self.mode,
            sources=tuple(source.compiled() for source in self.epoch.sources),
            instance_header=self.epoch.instance_header.lower().encode() if self.epoch.instance_header else None,
            session_ttl=self.epoch.session_ttl,
            live_change=self.epoch.live_change,
            credentials=tuple(name.lower().encode() for name in self.credentials),
            accept=frozenset(self.resume.accept),
            unproven=self.resume.unproven,
            event_ids=self.resume.event_ids,
            first_event_timeout=self.resume.first_event_timeout,
            hold_time=self.resume.hold.time,
            hold_bytes=self.resume.hold.bytes,
            pending_calls=self.refusal.pending_calls,
            normalize_loss=self.refusal.normalize_loss,
            keepalive=self.keepalive,
        )


class Settings(Section, BaseSettings):  # type: ignore[misc]  # a narrower model_config
    """The whole configuration.

    `configuration.load` lays flags over the environment over the file and knows the place of each value, so that every
    error can name it; what it hands over is the only source.
    """

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """See `BaseSettings`."""
        return (init_settings,)

    version: Annotated[int, Field(ge=1, le=1), BeforeValidator(reject_bool)] = Field(
        default=1, description="The version of this format."
    )
    listen: ListenAddress = Field(
        default=Address("127.0.0.1", 8080),
        description="Where clients connect: `host:port`, `[v6]:port` or `unix:/path`.",
    )
    tls: Tls = Field(default_factory=Tls)
    workers: Count = Field(
        default=1,
        description="Processes that serve, on the same address. More than one need a shared store (`valkey://`), and "
        "a process more that supervises them; limits are of each.",
    )
    upstream: Upstream
    admin: Admin = Field(default_factory=Admin)
    store: Store = Field(default_factory=Store)
    drain: Drain = Field(default_factory=Drain)
    limits: Limits = Field(default_factory=Limits)
    log: Log = Field(default_factory=Log)
    tracing: Tracing = Field(default_factory=Tracing)
    policies: tuple[PolicySettings, ...] = Field(
        default_factory=lambda: (PolicySettings(),),
        description="The first that matches a request decides; one that none matches is forwarded and not guarded. "
        "Without this key one policy with the defaults guards every path; an empty list guards nothing.",
    )

    @field_validator("policies")
    @classmethod
    def _check_names(cls, policies: tuple[PolicySettings, ...]) -> tuple[PolicySettings, ...]:
        names = [policy.name for policy in policies]
        for index, name in enumerate(names):
            if (first := names.index(name)) < index:
                raise PydanticCustomError(
                    "relation",
                    "{name} is the name of policies[{first}] too; give each policy its own",
                    {"key": ("policies", index, "name"), "name": repr(name), "first": first},
                )
        return policies

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        scheme = self.store.url.scheme
        if self.workers > 1 and scheme in ("memory", "sqlite"):
            raise PydanticCustomError(
                "relation",
                "more than one worker needs a store that all of them see, and {scheme}:// is private to one process; "
                "set store.url to valkey://host:6379/0, or workers to 1",
                {"key": ("workers",), "scheme": scheme},
            )
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if self.listen.meets(self.admin.listen):
            raise PydanticCustomError(
                "relation",
                "is where clients connect (listen); choose another port, such as 127.0.0.1:9090",
                {"key": ("admin", "listen")},
            )
        url = self.upstream.url
        if self.listen.meets(Address(path=url.path) if url.path is not None else Address(url.host, url.port)):
            raise PydanticCustomError(
                "relation",
                "is the proxy's own address (listen), so requests would go round for ever; name the server's, or set "
                "listen to another port",
                {"key": ("upstream", "url")},
            )
        return self

    _flags: tuple[str, ...] = PrivateAttr(default=())

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the command line that won over the file, such as `--mode`."""
        return self._flags

    def with_flags(self, flags: tuple[str, ...]) -> Self:
        """The same settings, which know that `flags` were given."""
        self._flags = flags
        return self

    def compiled(self) -> tuple[Policy, ...]:
        """The policies as the guard reads them, in order: the first match wins."""
        return tuple(policy.compiled() for policy in self.policies)


def iterate_keys(section: type[Section] = Settings) -> Iterator[tuple[str, ...]]:
    """Every key that holds a value, as a path from `section`; `[]` stands for the index of a list's item."""
    for name, field in section.model_fields.items():
        if inner := find_section(section, name):
            listed = get_origin(field.annotation) is tuple
            if listed:
                yield (name,)
            for key in iterate_keys(inner):
                yield (name, "[]", *key) if listed else (name, *key)
        else:
            yield (name,)


def find_section(section: type[Section], name: str) -> type[Section] | None:
    """The section under the key `name` of `section`, or that of its list's items; None if the key is a plain value."""
    annotation: Any = section.model_fields[name].annotation
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def pending_keys(settings: Settings) -> list[str]:
    """A line for each key of `PENDING` that is set to something else than its default."""
    defaults = Settings(upstream=settings.upstream)
    lines = []
    for key, note in PENDING.items():
        usual = list(_values_at(defaults, key.split(".")))
        if any(value not in usual for value in _values_at(settings, key.split("."))):
            lines.append(f"{key} has no effect yet: {note}")
    return lines


def _values_at(node: object, key: list[str]) -> Iterator[object]:
    """What stands at `key` below `node`; once for each item of a list of sections on the way."""
    if isinstance(node, tuple) and key:
        for item in node:
            yield from _values_at(item, key)
    elif key:
        yield from _values_at(getattr(node, key[0]), key[1:])
    else:
        yield node
