"""The configuration (section 10): values, defaults, precedence, and how each mistake is told."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from epochgate import configuration, reference, settings, values
from epochgate.admin.access import read_token
from epochgate.configuration import VARIABLES, load
from epochgate.errors import ConfigurationError
from epochgate.guard.policy import (
    EventIds,
    HeaderSource,
    LiveChange,
    MetaSource,
    Mode,
    PendingCalls,
    Policy,
    Proof,
    Unproven,
)
from epochgate.relay.tls import client_context, server_context
from epochgate.settings import Settings, Tls, UpstreamTls, iterate_keys, pending_keys
from epochgate.values import Address, StoreUrl, UpstreamUrl

ROOT = Path(__file__).parent.parent
URL = "http://127.0.0.1:3000"
UPSTREAM = f"upstream: {{url: '{URL}'}}\n"


@pytest.fixture
def write(tmp_path):
    """Writes the text as a configuration file and returns its path."""

    def write(text):
        path = tmp_path / "gate.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def complain(write):
    """Loads the text and returns the lines of the error, without the folder of the file."""

    def complain(text=UPSTREAM, environ=None, flags=None):
        path = write(text)
        with pytest.raises(ConfigurationError) as caught:
            load(path, environ or {}, flags or {})
        return [line.replace(f"{path.parent}/", "") for line in str(caught.value).splitlines()]

    return complain


def defaults():
    return Settings.model_validate({"upstream": {"url": URL}})


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30.0),
        ("5m", 300.0),
        ("24h", 86400.0),
        ("1.5s", 1.5),
        ("0.5h", 1800.0),
        ("0s", 0.0),
        ("7", 7.0),
        ("0.25", 0.25),
        (7, 7.0),
        (0, 0.0),
        (0.1, 0.1),
        ("8760h", values.LONGEST),
    ],
)
def test_durations(text, seconds):
    assert values.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "s", "5 s", "5S", "5d", "-1s", "1e3", "1h30m", "5s\n", ".5s", "5.s", "٥s", "soon", -1, -0.1, True, None, [5]]
    + [float("nan"), float("-inf")],
)
def test_durations_that_are_none(text):
    with pytest.raises(ValueError, match="is no duration; write 500ms, 30s"):
        values.parse_duration(text)


@pytest.mark.parametrize("text", ["8761h", "99999999999999s", float("inf"), 10**400])
def test_durations_that_are_too_long(text):
    with pytest.raises(ValueError, match="is too long; write at most 8760h"):
        values.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.5, "500ms"), (1.5, "1500ms"), (90.0, "90s"), (300.0, "5m"), (86400.0, "24h"), (0.00001, 0.00001)],
)
def test_durations_as_text(seconds, text):
    assert values.format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=values.LONGEST) | st.integers(0, 10**9).map(lambda ms: ms / 1000))
def test_durations_survive_the_round_trip(seconds):
    assert values.parse_duration(values.format_duration(seconds)) == seconds


@given(st.integers(0, 8760), st.sampled_from(["s", "m", "h"]))
def test_durations_grow_with_their_unit(number, unit):
    assert values.parse_duration(f"{number}{unit}") == number * {"s": 1, "m": 60, "h": 3600}[unit]


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65536), ("1MiB", 1048576), ("2GiB", 2**31), ("10B", 10), ("10", 10), (10, 10), (0, 0), ("0KiB", 0)],
)
def test_sizes(text, size):
    assert values.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "KiB", "1MB", "1 MiB", "1mib", "1.5MiB", "-1", "1KiB\n", -1, 1.0, True, None])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="is no size; write 64KiB, 1MiB"):
        values.parse_size(text)


@given(st.integers(0, 2**50) | st.integers(1, 2**20).map(lambda n: n * 1024))
def test_sizes_survive_the_round_trip(size):
    assert values.parse_size(values.format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", Address("127.0.0.1", 8080)),
        ("localhost:0", Address("localhost", 0)),
        ("mcp_server.internal:65535", Address("mcp_server.internal", 65535)),
        ("[::1]:80", Address("::1", 80)),
        ("[fe80::1%eth0]:80", Address("fe80::1%eth0", 80)),
        ("unix:/run/gate.sock", Address(path="/run/gate.sock")),
    ],
)
def test_addresses(text, address):
    assert values.parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (8080, "8080 is no address; write host:port"),
        ("8080", "needs a host and a port; write 127.0.0.1:8080, or 0.0.0.0:8080"),
        (":8080", "needs a host and a port"),
        ("a:", "'' is no port"),
        ("a:65536", "'65536' is no port; write a number up to 65535"),
        ("a:+1", "is no port"),
        ("a:٣", "is no port"),
        ("::1:80", "put an IPv6 address in brackets"),
        ("[::1:80", "put an IPv6 address in brackets"),
        ("[::g]:80", "is no IPv6 address; write one like"),
        ("a b:80", "is no host name or address"),
        ("-a:80", "is no host name or address"),
        ("unix:gate.sock", "no absolute path; write unix:/path"),
        ("unix:/" + "x" * 107, "at most 107 bytes"),
    ],
)
def test_addresses_that_are_none(text, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        values.parse_address(text)


@pytest.mark.parametrize(
    ("text", "url", "authority"),
    [
        ("http://127.0.0.1:3000", UpstreamUrl("http", "127.0.0.1", 3000), "127.0.0.1:3000"),
        ("HTTP://a", UpstreamUrl("http", "a", 80), "a"),
        ("http://a:80/", UpstreamUrl("http", "a", 80), "a"),
        ("https://a:", UpstreamUrl("https", "a", 443), "a"),
        ("https://a:80", UpstreamUrl("https", "a", 80), "a:80"),
        ("https://a/base/%7Ex/", UpstreamUrl("https", "a", 443, "/base/%7Ex"), "a"),
        ("http://[::1]:81/@v", UpstreamUrl("http", "::1", 81, "/@v"), "[::1]:81"),
        ("http://[::1]", UpstreamUrl("http", "::1", 80), "[::1]"),
        ("unix:/run/mcp.sock", UpstreamUrl("http", "localhost", 80, path="/run/mcp.sock"), "localhost"),
    ],
)
def test_upstreams(text, url, authority):
    assert values.parse_upstream(text) == url
    assert url.authority == authority
    assert values.parse_upstream(str(url)) == url


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("127.0.0.1:3000", "must begin with http://, https:// or unix:/; write it like http://127.0.0.1:3000"),
        ("ftp://a", "must begin with http://, https:// or unix:/"),
        (3000, "must begin with http://, https:// or unix:/"),
        ("http://", "names no host"),
        ("http:///x", "names no host"),
        ("http://:80", "is no host name"),
        ("http://a:0", "port 0"),
        ("http://a:99999", "is no port"),
        ("http://a/x?", "no query and no fragment"),
        ("http://a#", "no query and no fragment"),
        ("http://a b", "has a space"),
        ("http://a/\n", "has a space"),
        ("http://ä", "beyond ASCII"),
        ("http://me:hunter2@a", "no user name or password"),
        ("http://me:hun/ter2@a", "is no port"),
        ("http://a:1:2", "put an IPv6 address in brackets"),
        ("unix:mcp.sock", "no absolute path"),
        ("unix:/" + "x" * 107, "at most 107 bytes"),
    ],
)
def test_upstreams_that_are_none(text, problem):
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        values.parse_upstream(text)
    assert "hun" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "scheme", "shown"),
    [
        ("memory://", "memory", "memory://"),
        ("sqlite:///var/lib/ledger.db", "sqlite", "sqlite:///var/lib/ledger.db"),
        ("valkey://host", "valkey", "valkey://host"),
        ("redis://host:6379/0", "redis", "redis://host:6379/0"),
        ("rediss://:hunter2@host", "rediss", "rediss://:***@host"),
        ("valkeys://me:hun@ter2@[::1]:6379/1", "valkeys", "valkeys://me:***@[::1]:6379/1"),
    ],
)
def test_stores(text, scheme, shown):
    store = values.parse_store(text)
    assert (store.scheme, store.text, str(store)) == (scheme, text, shown)
    assert "hun" not in repr(store)


def test_store_path():
    assert values.parse_store("sqlite:///var/lib/ledger.db").path == "/var/lib/ledger.db"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("memory:", "must be memory://, sqlite:///abs/path or valkey://host:6379/0"),
        ("memory://x", "must be memory://"),
        ("postgres://me:hunter2@a", "must be memory://"),
        (5, "must be memory://"),
        ("sqlite://ledger.db", "must name a file by its absolute path"),
        ("sqlite:///", "must name a file"),
        ("sqlite:///a/", "must name a file"),
        ("valkey://", "what stands for the host is no host name"),
        ("valkey://me:hunter2@", "what stands for the host is no host name"),
        ("valkey://me:hun/ter2@a", "what stands for the port is no port"),
        ("valkey://a:hunter2", "what stands for the port is no port"),
        ("valkey://a/hunter2", "must end in the number of a database; write it like valkey://host:6379/0"),
        ("valkey://:hun?ter2@a", "escape those of a password"),
        ("valkey://:hun[ter2@a", "escape them as %5B and %5D"),
        ("valkey://:hun]ter2@[::1]:1", "escape them as %5B and %5D"),
    ],
)
def test_stores_that_are_none(text, problem):
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        values.parse_store(text)
    assert "hun" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------- settings


def test_defaults_are_those_of_section_10():
    found = defaults()
    assert found.version == 1
    assert found.listen == Address("127.0.0.1", 8080)
    assert found.workers == 1
    assert found.upstream.url == UpstreamUrl("http", "127.0.0.1", 3000)
    assert (found.upstream.host, found.upstream.connect_timeout, found.upstream.idle_timeout) == ("upstream", 5, 0)
    assert (found.tls.cert, found.tls.key) == (None, None)
    assert (found.upstream.tls.ca, found.upstream.tls.cert, found.upstream.tls.key) == (None, None, None)
    assert (found.admin.listen, found.admin.token_file) == (Address("127.0.0.1", 9090), None)
    assert found.tracing.enabled is False
    assert found.store.url == StoreUrl("memory", "memory://")
    assert (found.drain.grace, found.drain.window) == (5, 25)
    limits = found.limits
    assert (limits.sessions, limits.streams_per_session, limits.events_per_stream) == (100000, 256, 1024)
    assert (limits.session_idle, limits.fence, limits.held_streams) == (86400, 86400, 1024)
    assert (found.log.level, found.log.format) == ("info", "json")


def test_without_policies_one_guards_every_path():
    assert defaults().compiled() == (
        Policy(
            name="mcp",
            path=None,
            mode=Mode.ENFORCE,
            sources=(MetaSource("session_epoch"), HeaderSource(b"mcp-session-epoch")),
            instance_header=None,
            session_ttl=None,
            live_change=LiveChange.FENCE,
            credentials=(b"authorization", b"cookie", b"x-api-key"),
            accept=frozenset({Proof.CONNECTION, Proof.EPOCH}),
            unproven=Unproven.RESTART,
            event_ids=EventIds.AUTO,
            first_event_timeout=1.0,
            hold_time=60.0,
            hold_bytes=1048576,
            pending_calls=PendingCalls.ON_RETRY,
            normalize_loss=True,
            keepalive=0.0,
        ),
    )


def test_an_empty_list_of_policies_guards_nothing(write):
    assert load(write(UPSTREAM + "policies: []\n"), {}, {}).compiled() == ()


def test_a_policy_as_the_guard_reads_it(write):
    path = write(
        UPSTREAM
        + """
policies:
  - name: tools
    match: {path: /tools/*}
    mode: observe
    epoch: {sources: [{header: X-Epoch}, {meta: e}], instance_header: X-Pod, session_ttl: 5m, live_change: ignore}
    credentials: [X-Token]
    resume: {accept: [overlap], unproven: resume, event_ids: opaque, first_event_timeout: 250ms,
             hold: {time: 0s, bytes: 64KiB}}
    refusal: {pending_calls: leave, normalize_loss: false}
    keepalive: 15s
  - {name: rest}
"""
    )
    tools, rest = load(path, {}, {}).compiled()
    assert tools == Policy(
        name="tools",
        path="/tools/*",
        mode=Mode.OBSERVE,
        sources=(HeaderSource(b"x-epoch"), MetaSource("e")),
        instance_header=b"x-pod",
        session_ttl=300.0,
        live_change=LiveChange.IGNORE,
        credentials=(b"x-token",),
        accept=frozenset({Proof.OVERLAP}),
        unproven=Unproven.RESUME,
        event_ids=EventIds.OPAQUE,
        first_event_timeout=0.25,
        hold_time=0.0,
        hold_bytes=65536,
        pending_calls=PendingCalls.LEAVE,
        normalize_loss=False,
        keepalive=15.0,
    )
    assert (rest.name, rest.path) == ("rest", None)


@pytest.mark.parametrize("path", ["/mcp", "/mcp/", "/mcp/*", "/*", "/", "/a b", "/é", "/.well-known/x", "/100%"])
def test_paths_that_can_match(write, path):
    text = json.dumps({"upstream": {"url": URL}, "policies": [{"match": {"path": path}}]})
    assert load(write(text), {}, {}).policies[0].match.path == path


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("mcp", "must begin with a slash"),
        ("*", "must begin with a slash"),
        ("/a/*/b", "may have a * only at its end"),
        ("/a**", "may have a * only at its end"),
        ("/a//b", "write /a/b"),
        ("/a/../b/*", "write /b/*"),
        ("/a%20b", "without escapes"),
        ("/a?b", "without escapes, query"),
        ("", "must begin with a slash"),
    ],
)
def test_paths_that_never_match(complain, path, problem):
    (line,) = complain(UPSTREAM + f"policies: [{{match: {{path: '{path}'}}}}]\n")
    assert line.startswith("gate.yaml:2: policies[0].match.path: ")
    assert problem in line


def test_a_policy_that_is_no_mapping_is_told_beside_the_mode_flag(complain):
    (line,) = complain(UPSTREAM + "policies: [a]\n", flags={"--mode": "observe"})
    assert line.startswith("gate.yaml:2: policies[0]: must be a mapping")


def test_parsed_values_are_taken_as_they_are():
    parsed = {"listen": Address("a", 1), "upstream": {"url": UpstreamUrl("http", "a", 2)}}
    found = Settings.model_validate(parsed | {"store": {"url": StoreUrl("sqlite", "sqlite:///a")}})
    assert (found.listen, found.upstream.url) == (Address("a", 1), UpstreamUrl("http", "a", 2))
    assert found.store.url == StoreUrl("sqlite", "sqlite:///a")


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        defaults().workers = 2


# ------------------------------------------------------------------------------------------------------ precedence


def test_flags_over_environment_over_file_over_defaults(write):
    path = write("listen: a:1\nadmin: {listen: 'b:1'}\nlimits: {sessions: 1, fence: 1h}\n" + UPSTREAM)
    environ = {"EPOCHGATE_LISTEN": "a:2", "EPOCHGATE_ADMIN__LISTEN": "b:2", "EPOCHGATE_LIMITS__SESSIONS": "2"}
    found = load(path, environ | {"HOME": "/"}, {"--listen": "a:3", "--admin-listen": None})
    assert str(found.listen) == "a:3"
    assert str(found.admin.listen) == "b:2"
    assert (found.limits.sessions, found.limits.fence, found.limits.session_idle) == (2, 3600, 86400)


def test_a_layer_does_not_leak_through_an_anchor(write):
    path = write(
        f"upstream: {{url: '{URL}'}}\nadmin: &a {{listen: 'a:1'}}\nlog: {{level: debug}}\npolicies: [&p {{}}]\n"
    )
    found = load(path, {"EPOCHGATE_LOG__FORMAT": "console"}, {"--mode": "observe"})
    assert (found.log.level, found.log.format) == ("debug", "console")


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n...\n"])
def test_an_empty_file_is_the_defaults(write, text):
    assert load(write(text), {"EPOCHGATE_UPSTREAM__URL": URL}, {}) == defaults()


def test_no_file_is_needed():
    assert load(None, {}, {"--upstream": URL}) == defaults().with_flags(("--upstream",))
    assert load(None, {"EPOCHGATE_UPSTREAM__URL": URL}, {}) == defaults()


def test_every_scalar_has_a_variable():
    plain = {key for key in iterate_keys() if "[]" not in key}
    assert set(VARIABLES.values()) == plain
    assert VARIABLES["EPOCHGATE_LIMITS__STREAMS_PER_SESSION"] == ("limits", "streams_per_session")
    document = defaults().model_dump(mode="json")
    texts = {}
    for name, key in VARIABLES.items():
        value = document
        for part in key:
            value = value[part]
        texts[name] = value if isinstance(value, str) else json.dumps(value)
    assert load(None, texts, {}) == defaults()


def test_policies_from_the_environment_replace_those_of_the_file(write):
    path = write(UPSTREAM + "policies: [{name: a}, {name: b}]\n")
    found = load(path, {"EPOCHGATE_POLICIES": '[{"name": "c", "mode": "bypass"}]'}, {})
    assert [(policy.name, policy.mode) for policy in found.policies] == [("c", Mode.BYPASS)]


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("", ["observe"]),
        ("policies: []", []),
        ("policies: [{name: a, mode: bypass}, {name: b}]", ["observe", "observe"]),
    ],
)
def test_the_mode_flag_is_for_every_policy(write, text, modes):
    found = load(write(UPSTREAM + text), {}, {"--mode": "observe"})
    assert [policy.mode for policy in found.policies] == modes


def test_variables_of_a_kubernetes_service_are_ignored():
    environ = {
        "EPOCHGATE_SERVICE_HOST": "10.0.0.1",
        "EPOCHGATE_SERVICE_PORT": "8080",
        "EPOCHGATE_SERVICE_PORT_HTTP": "8080",
        "EPOCHGATE_PORT": "tcp://10.0.0.1:8080",
        "EPOCHGATE_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "EPOCHGATE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "EPOCHGATE_ADMIN_SERVICE_HOST": "10.0.0.1",
        "EPOCHGATE_ADMIN_PORT": "tcp://10.0.0.1:9090",
    }
    assert load(None, environ, {"--upstream": URL}) == defaults().with_flags(("--upstream",))


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("colour: blue", "gate.yaml:2: colour: unknown key; the keys here are version, listen, tls, workers, "),
        ("limits: {session: 5}", "gate.yaml:2: limits.session: unknown key; did you mean sessions?"),
        ("mode: observe", "gate.yaml:2: mode: unknown key here; it is a key at policies[].mode"),
        ("listen: a:1\nlisten: a:2", "gate.yaml:3: listen: given twice, first on line 2; remove one of the two"),
        ("log:\n  level: info\n  level: info", "gate.yaml:4: log.level: given twice, first on line 3"),
        ("policies:\n  - name: a\n    name: b", "gate.yaml:4: policies[0].name: given twice, first on line 3"),
        ("on: 1", "gate.yaml:2: on: YAML does not read this key as text; put it in quotes"),
        ("1: 1", "gate.yaml:2: 1: YAML does not read this key as text"),
        ("tls: {cert: a.pem}", "gate.yaml:2: tls: needs tls.cert and tls.key together; set both, or neither"),
        ("admin: {token_file: 1}", "gate.yaml:2: admin.token_file: must be text, not 1; put it in quotes"),
        ("tracing: {enabled: 1}", "gate.yaml:2: tracing.enabled: must be true or false, not 1"),
        ("workers: two", "gate.yaml:2: workers: must be a whole number, not 'two'"),
        ("workers: 1.5", "gate.yaml:2: workers: must be a whole number, not 1.5"),
        ("workers: yes", "gate.yaml:2: workers: must be a whole number; YAML reads the bare words on, off, yes"),
        ("workers: 0", "gate.yaml:2: workers: must be at least 1, not 0"),
        ("version: 2", "gate.yaml:2: version: must be at most 1, not 2"),
        ("version: null", "gate.yaml:2: version: has no value; give it one, or remove the key"),
        ("limits:\n", "gate.yaml:2: limits: has no value; give it one, or remove the key"),
        ("policies:\n  # none", "gate.yaml:2: policies: has no value"),
        ("limits: 5", "gate.yaml:2: limits: must be a mapping; write its keys below it, indented"),
        ("limits: off", "gate.yaml:2: limits: must be a mapping; write its keys below it, indented"),
        ("policies: {name: a}", "gate.yaml:2: policies: must be a list; write [a, b], or a line beginning with `- `"),
        ("policies:\n- a", "gate.yaml:3: policies[0]: must be a mapping"),
        ("limits: {fence: 0s}", "gate.yaml:2: limits.fence: must be longer than 0s"),
        ("limits:\n  session_idle: soon", "gate.yaml:3: limits.session_idle: 'soon' is no duration; write 500ms"),
        ("log: {level: loud}", "gate.yaml:2: log.level: must be debug, info, warning or error, not 'loud'"),
        ("listen: 8080", "gate.yaml:2: listen: 8080 is no address; write host:port"),
        ("store: {url: x}", "gate.yaml:2: store.url: must be memory://, sqlite:///abs/path or valkey://host:6379/0"),
        (
            "workers: 2\nstore: {url: 'sqlite:///var/x.db'}",
            "gate.yaml:2: workers: more than one worker needs a store that all of them see, and sqlite:// is private",
        ),
        ("workers: 2", "gate.yaml:2: workers: more than one worker needs a store that all of them see, and memory://"),
        ("policies: [{}, {}]", "gate.yaml:2: policies[1].name: 'mcp' is the name of policies[0] too; give each"),
    ],
)
def test_errors_name_file_line_key_and_remedy(complain, text, line):
    (found,) = complain(UPSTREAM + text)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("mode: off", "policies[0].mode: YAML reads a bare `off` or `no` as false; write bypass"),
        (
            "refusal: {pending_calls: off}",
            "policies[0].refusal.pending_calls: YAML reads a bare `off` or `no` as false; ",
        ),
        (
            "epoch: {session_ttl: off}",
            "policies[0].epoch.session_ttl: YAML reads a bare `off` or `no` as false; write null",
        ),
        (
            "resume: {hold: {time: no}}",
            "policies[0].resume.hold.time: YAML reads a bare `off` or `no` as false; write 0s",
        ),
        (
            "resume: {event_ids: off}",
            "policies[0].resume.event_ids: must be auto, consecutive, increasing or opaque, not ",
        ),
        ("mode: sometimes", "policies[0].mode: must be enforce, observe or bypass, not 'sometimes'"),
        ("name: 5", "policies[0].name: must be text, not 5; put it in quotes"),
        ("name: 'a b'", "policies[0].name: must be 1 to 63 letters, digits, dots, hyphens or underscores"),
        ("credentials: ['a b']", "policies[0].credentials[0]: is no name of a header field; write one like"),
        ("epoch: {sources: [{}]}", "policies[0].epoch.sources[0]: needs either `meta` or `header`"),
        ("epoch: {sources: [{meta: a, header: b}]}", "policies[0].epoch.sources[0]: needs either `meta` or `header`"),
        ("epoch: {sources: [{meta: ''}]}", "policies[0].epoch.sources[0].meta: must not be empty"),
        ("epoch: {sources: [{heder: a}]}", "policies[0].epoch.sources[0].heder: unknown key; did you mean header?"),
        ("resume: {accept: epoch}", "policies[0].resume.accept: must be a list; write [a, b]"),
        ("resume: {accept: [all]}", "policies[0].resume.accept[0]: must be connection, epoch or overlap, not 'all'"),
        ("resume: {accept: []}", "policies[0].resume.accept: is empty, so that nothing could prove a resume; write ["),
        ("resume: {hold: {bytes: 0}}", "policies[0].resume.hold.bytes: must be at least 1, not 0"),
        ("refusal: {normalize_loss: 1}", "policies[0].refusal.normalize_loss: must be true or false, not 1"),
    ],
)
def test_errors_inside_a_policy(complain, text, line):
    (found,) = complain(UPSTREAM + "policies:\n  -\n    " + text)
    assert found.startswith(f"gate.yaml:4: {line}")


def test_tls_to_an_upstream_without_tls_is_told(complain):
    (found,) = complain("upstream:\n  url: http://a\n  tls: {ca: ca.pem}\n")
    assert found.startswith("gate.yaml:3: upstream.tls: is for an upstream.url that begins with https://; change the")


def test_tls_to_a_store_without_tls_is_told(complain):
    (found,) = complain(UPSTREAM + "store: {url: 'valkey://a', tls: {ca: ca.pem}}\n")
    assert found.startswith("gate.yaml:2: store.tls: is for a store.url that begins with valkeys:// or rediss://; ch")
    (found,) = complain(UPSTREAM + "store: {url: 'valkeys://a', tls: {cert: a.pem}}\n")
    assert found.startswith("gate.yaml:2: store.tls: needs store.tls.cert and store.tls.key together")


def test_a_client_certificate_needs_its_key(complain):
    (found,) = complain("upstream:\n  url: https://a\n  tls: {key: a.pem}\n")
    assert found.startswith("gate.yaml:3: upstream.tls: needs upstream.tls.cert and upstream.tls.key together")


@pytest.mark.parametrize(
    ("listen", "admin"),
    [
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("0.0.0.0:1", "127.0.0.1:1"),
        ("localhost:1", "'[::1]:1'"),
        ("'[::]:1'", "'[::1]:1'"),
        ("unix:/a", "unix:/a"),
    ],
)
def test_one_address_cannot_be_listened_on_twice(complain, listen, admin):
    (found,) = complain(f"{UPSTREAM}listen: {listen}\nadmin:\n  listen: {admin}\n")
    assert found.startswith("gate.yaml:4: admin.listen: is where clients connect (listen); choose another port")


@pytest.mark.parametrize(
    ("listen", "upstream"),
    [
        ("127.0.0.1:1", "http://localhost:1"),
        ("0.0.0.0:1", "http://127.0.0.1:1/a"),
        ("a:443", "https://a"),
        ("unix:/a", "unix:/a"),
    ],
)
def test_the_proxy_cannot_guard_itself(complain, listen, upstream):
    (found,) = complain(f"listen: {listen}\nupstream:\n  url: {upstream}\n")
    assert found.startswith("gate.yaml:3: upstream.url: is the proxy's own address (listen)")


@pytest.mark.parametrize(
    ("listen", "admin", "upstream"),
    [
        ("127.0.0.1:0", "127.0.0.1:0", "http://a"),
        ("127.0.0.1:1", "'[::1]:1'", "http://a"),
        ("0.0.0.0:1", "127.0.0.1:2", "http://mcp-server:1"),
        ("unix:/a", "unix:/b", "unix:/c"),
        ("localhost:80", "localhost:81", "unix:/a"),
    ],
)
def test_places_that_differ_are_taken(write, listen, admin, upstream):
    text = f"listen: {listen}\nadmin: {{listen: {admin}}}\nupstream: {{url: '{upstream}'}}\n"
    assert load(write(text), {}, {}).flags == ()


def test_the_flags_that_were_given_are_known(write):
    """A reload names them, since they win over the file."""
    assert load(write(UPSTREAM), {}, {"--mode": "observe", "--listen": None}).flags == ("--mode",)


def test_all_problems_are_told_at_once_in_the_order_of_the_file(complain):
    found = complain(
        "workers: 0\nlisten: 5\nlisten: 6\nupstream: {hots: client}\n",
        {"EPOCHGATE_LISTEM": "x", "EPOCHGATE_LIMITS__SESSIONS": "x"},
        {"--admin-listen": "x"},
    )
    places = [line.partition(": ")[0] for line in found]
    assert [place for place in places if place.startswith("gate")] == [f"gate.yaml:{line}" for line in (1, 3, 3, 4, 4)]
    others = {"--admin-listen", "EPOCHGATE_LIMITS__SESSIONS", "EPOCHGATE_LISTEM"}
    assert {place for place in places if not place.startswith("gate")} == others


@pytest.mark.parametrize("text", ["", "listen: a:1\n", "upstream: {host: client}\n", "upstream: {}\n"])
def test_a_missing_upstream_names_all_three_ways_to_set_it(complain, text):
    (found,) = complain(text)
    assert re.match(r"gate\.yaml(:1)?: upstream\.url: is not set; ", found)
    for way in ("write it in the file", "EPOCHGATE_UPSTREAM__URL", "--upstream"):
        assert way in found


def test_a_missing_upstream_without_a_file():
    with pytest.raises(ConfigurationError, match=r"^upstream\.url: is not set; "):
        load(None, {}, {})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("EPOCHGATE_UPSTREAM_URL", "did you mean EPOCHGATE_UPSTREAM__URL?"),
        ("EPOCHGATE_LIMIT__SESSIONS", "did you mean EPOCHGATE_LIMITS__SESSIONS?"),
        ("EPOCHGATE_POLICY", "did you mean EPOCHGATE_POLICIES?"),
        ("EPOCHGATE_listen", "`epochgate config --reference` lists the keys"),
        ("EPOCHGATE_PORT", "`epochgate config --reference` lists the keys"),
        ("EPOCHGATE_", "`epochgate config --reference` lists the keys"),
    ],
)
def test_unknown_variables_are_errors(complain, name, remedy):
    assert complain(environ={name: "8080"}) == [f"{name}: there is no such setting; {remedy}"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("EPOCHGATE_LIMITS__SESSIONS", "many", "EPOCHGATE_LIMITS__SESSIONS: must be a whole number, not 'many'"),
        ("EPOCHGATE_LISTEN", "", "EPOCHGATE_LISTEN: '' needs a host and a port"),
        ("EPOCHGATE_LOG__LEVEL", "off", "EPOCHGATE_LOG__LEVEL: must be debug, info, warning or error, not 'off'"),
        ("EPOCHGATE_WORKERS", "2", "EPOCHGATE_WORKERS: more than one worker needs a store"),
        ("EPOCHGATE_POLICIES", "[{]", "EPOCHGATE_POLICIES:1: is no YAML: "),
        ("EPOCHGATE_POLICIES", "", "EPOCHGATE_POLICIES: must be a list"),
        (
            "EPOCHGATE_POLICIES",
            '[{},\n{"mod": 1}]',
            "EPOCHGATE_POLICIES:2: policies[1].mod: unknown key; did you mean mode?",
        ),
        ("EPOCHGATE_POLICIES", '[{"name": "a", "name": "b"}]', "EPOCHGATE_POLICIES:1: policies[0].name: given twice"),
    ],
)
def test_errors_of_variables_name_the_variable(complain, name, text, problem):
    (found,) = complain(environ={name: text})
    assert found.startswith(problem)


def test_errors_of_flags_name_the_flag(complain):
    found = complain(UPSTREAM + "policies: [{name: a}, {name: b}]", flags={"--mode": "off", "--listen": "80"})
    assert found == [
        "--listen: '80' needs a host and a port; write 127.0.0.1:8080, or 0.0.0.0:8080 for every interface",
        "--mode: must be enforce, observe or bypass, not 'off'",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [", "gate.yaml:1: is no YAML: "),
        ("a: 1\n\tb: 2", "gate.yaml:2: is no YAML: "),
        ("listen: [::1]:80", "gate.yaml:1: is no YAML: "),
        ("a: 1\n---\nb: 1", "gate.yaml:2: is no YAML: "),
        ("a: !!python/none", "gate.yaml:1: is no YAML: "),
        ("? [a]\n: b", "gate.yaml:1: is no YAML: "),
        ("*x : 1", "gate.yaml:1: is no YAML: "),
        ("- a", "gate.yaml:1: is no mapping; write `key: value` lines"),
        ("text", "gate.yaml:1: is no mapping"),
        (b"a: \xff", "gate.yaml: is no YAML: it holds what cannot be read; save it as plain UTF-8 text"),
        ("a: 2026-99-99", "gate.yaml: is no YAML: it holds what cannot be read"),
        ("[" * 5000, "gate.yaml: is no YAML: it holds what cannot be read"),
    ],
)
def test_files_that_are_no_configuration(complain, text, line):
    (found,) = complain(text)
    assert found.startswith(line)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        ConfigurationError, match="gone.yaml: there is no such file; check the path given with --config"
    ):
        load(tmp_path / "gone.yaml", {}, {})


@pytest.mark.parametrize(
    "read",
    [
        lambda name: load(Path(name), {}, {}),
        read_token,
        lambda name: server_context(Tls(cert=name, key=name)),
        lambda name: client_context(UpstreamTls(ca=name)),
    ],
    ids=["configuration", "token", "certificate", "authorities"],
)
def test_a_file_that_is_no_regular_one(read):
    """They are read again while the proxy serves, and a pipe would keep all waiting."""
    with pytest.raises(ConfigurationError, match="is no regular file"):
        read("/dev/null")


def test_a_file_that_cannot_be_read_does_not_hide_other_problems(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, {"EPOCHGATE_X": ""}, {})
    file, variable = str(caught.value).splitlines()
    assert file.startswith(f"{tmp_path}: cannot be read: is a directory; --config needs a file")
    assert variable.startswith("EPOCHGATE_X: ")


def test_errors_after_a_merge_name_the_line_of_the_key(complain):
    text = UPSTREAM + "limits: &base\n  sessions: 5\n  fence: never\nlog:\n  <<: *base\n  level: info\n"
    assert [line.partition(";")[0] for line in complain(text)] == [
        "gate.yaml:3: log.sessions: unknown key here",
        "gate.yaml:4: limits.fence: 'never' is no duration",
        "gate.yaml:4: log.fence: unknown key here",
    ]


def test_an_explicit_key_beside_a_merge_is_no_duplicate(write):
    text = UPSTREAM + "policies:\n- &a {name: a, mode: observe}\n- {<<: *a, name: b}\n"
    assert [(policy.name, policy.mode) for policy in load(write(text), {}, {}).policies] == [
        ("a", Mode.OBSERVE),
        ("b", Mode.OBSERVE),
    ]


def test_a_mapping_inside_itself_is_an_error(complain):
    assert complain(UPSTREAM + "log: &a\n  level: *a\n")[0].startswith("gate.yaml:3: log.level: must be ")


def test_passwords_are_in_no_error(complain):
    found = complain("upstream: {url: 'http://me:hunter2@a'}\nstore: {url: 'valkey://me:hunter2@a:b'}\n")
    assert len(found) == 2
    assert "hunter2" not in "".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "store: {url: *hunter2}\n", "store: {url: !hunter2 x}\n", "store: {url: &hunter2 x, b: &hunter2 y}\n",
        "store:\n  valkey://:hunter2@h:6379/0: x\n", "valkey://:hunter2@h:6379/0:\n", "store: {url: %hunter2}\n",
        "store: {url: 'valkey://:hunter2@h}\n", "store: {valkey://:hunter2@h: x, valkey://:hunter2@h: y}\n",
        "store: {url: ['valkey://:hunter2@h']}\n", "store: {url: {'valkey://:hunter2@h': }}\n", "store: valkey://:hunter2@h\n",
    ],
)  # fmt: skip
def test_nor_where_they_stand_in_the_wrong_place(complain, text):
    """YAML quotes aliases, tags and anchors; a key that is none is told."""
    found = complain(UPSTREAM + text)
    assert found
    assert "hunter2" not in "".join(found)


# ------------------------------------------------------------------------------------------- pending keys, documents


def test_pending_keys_are_told_when_they_are_set(monkeypatch):
    pending = {"workers": "one serves", "store.url": "in memory", "policies.resume.hold.time": "not held"}
    monkeypatch.setattr(settings, "PENDING", pending)
    assert pending_keys(defaults()) == []
    changed = {
        "upstream": {"url": URL},
        "workers": 2,
        "store": {"url": "valkey://a"},
        "policies": [{"name": "a"}, {"name": "b", "resume": {"hold": {"time": 1}}}],
    }
    assert pending_keys(Settings.model_validate(changed)) == [
        "workers has no effect yet: one serves",
        "store.url has no effect yet: in memory",
        "policies.resume.hold.time has no effect yet: not held",
    ]


def test_pending_keys_exist():
    known = {".".join(key).replace(".[]", "") for key in iterate_keys()}
    assert set(settings.PENDING) <= known


def test_the_annotated_file_holds_every_key_with_its_default():
    path = ROOT / "config/epochgate.yaml"
    assert load(path, {}, {}) == defaults()
    written = yaml.safe_load(path.read_text())
    expected = defaults().model_dump(mode="json")
    assert shape(written) == shape(expected)


def shape(node):
    """The keys of a document, without its values."""
    if isinstance(node, dict):
        return {key: shape(value) for key, value in node.items()}
    return [shape(item) for item in node] if isinstance(node, list) else None


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_committed_file_is_valid(path):
    assert load(path, {}, {}).upstream.url == UpstreamUrl("http", "127.0.0.1", 3000)


def test_committed_files_do_what_their_names_say():
    accepted = {
        name: load(ROOT / f"config/{name}.yaml", {}, {}).compiled()[0] for name in ("strict", "polling", "observe")
    }
    assert accepted["strict"].accept == {Proof.EPOCH}
    assert accepted["strict"].unproven == accepted["polling"].unproven == Unproven.RESTART
    assert Proof.OVERLAP in accepted["polling"].accept
    assert accepted["observe"].mode == Mode.OBSERVE


def test_the_schema_is_current():
    committed = (ROOT / "config/epochgate.schema.json").read_text()
    assert committed == json.dumps(reference.build_schema(), indent=2) + "\n", "run: epochgate config --schema"


def test_the_schema_describes_every_key_and_allows_no_other():
    schema = reference.build_schema()
    sections = [schema, *(node for node in schema["$defs"].values() if "properties" in node)]
    assert len(sections) == 18
    for section in sections:
        assert section["additionalProperties"] is False
        for node in section["properties"].values():
            target = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
            assert node.get("description") or target["description"]
    assert schema["required"] == ["upstream"]
    assert schema["$defs"]["Limits"]["properties"]["sessions"]["minimum"] == 1
    assert schema["$defs"]["Hold"]["properties"]["bytes"]["default"] == "1MiB"


def test_the_patterns_of_the_schema_match_the_defaults():
    for _, node, default in reference.walk_keys(reference.build_schema()):
        if "pattern" in node and "default" in node:
            assert re.search(node["pattern"], default)
        for choice in node.get("anyOf", []):
            if "pattern" in choice and isinstance(default, str):
                assert re.search(choice["pattern"], default)


def test_the_reference_is_current():
    committed = (ROOT / "docs/configuration.md").read_text()
    assert committed == reference.write_reference(), "run: epochgate config --reference > docs/configuration.md"


def test_the_reference_names_every_key_and_flag():
    text = reference.write_reference()
    for key in iterate_keys():
        assert f"| `{'.'.join(key).replace('.[]', '[]')}` |" in text
    for flag in configuration.FLAGS:
        assert f"| `{flag} " in text
