"""Reading the configuration: flags over environment over file over defaults, and every problem with its place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from epochgate.errors import ConfigurationError
from epochgate.files import check_regular
from epochgate.settings import Section, Settings, find_section, iterate_keys

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Key = tuple[str | int, ...]

PREFIX = "EPOCHGATE_"
VARIABLES: dict[str, tuple[str, ...]] = {
    PREFIX + "__".join(key).upper(): key for key in iterate_keys() if "[]" not in key
}
FLAGS: dict[str, tuple[str, ...]] = {
    "--upstream": ("upstream", "url"),
    "--listen": ("listen",),
    "--admin-listen": ("admin", "listen"),
    "--mode": ("policies", "[]", "mode"),
}

# A Kubernetes service named epochgate (or epochgate-admin) puts these into the environment of every pod beside it.
_SERVICE_LINK = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_PORT = re.compile(rf"{PREFIX}(\w+_)?PORT=(tcp|udp|sctp)://")

# What to write where somebody wrote `off`, which YAML reads as false.
_OFF = {
    "mode": "bypass",
    "pending_calls": "leave",
    "live_change": "ignore",
    "instance_header": "null",
    "session_ttl": "null",
    "idle_timeout": "0s",
    "time": "0s",
}


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong, and where: a file or variable with its line (0: no line), or a flag."""

    source: str
    line: int
    text: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (f"{self.source}:{self.line}" if self.line else self.source, self.text)))


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML text as data, with its node tree, which knows the lines."""

    source: str
    data: object
    root: yaml.Node | None

    def line(self, key: Key) -> int:
        """The line of `key`, or of the nearest key above it that is there; 0 if there is none."""
        node, line = self.root, 0
        for part in key:
            if isinstance(node, yaml.MappingNode):
                # The last one counts: where a merge (`<<`) brought the key too, the explicit one comes later.
                pairs = [(name, value) for name, value in node.value if name.value == part]
                if not pairs:
                    break
                name, node = pairs[-1]
                line = name.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            else:
                break
        return line


@dataclass(frozen=True, slots=True)
class Layer:
    """A value that a variable or flag lays over the file."""

    source: str
    key: Key
    value: object
    document: Document | None = None  # of a value that is itself YAML


_QUOTED = re.compile(r"'(?!<)[^']{3,}'")  # what YAML quotes of a file, but for the names of tokens and single letters
_BEHIND_SCHEME = re.compile(r"://.*", re.DOTALL)


def load(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Settings:
    """The settings from the file at `path` (None: no file), `environ`, and `flags` (those of `FLAGS`; None: not given).

    Raises:
        ConfigurationError: with one line for each problem.
    """
    problems: list[Problem] = []
    document = _read_file(path, problems) if path else Document("", {}, None)
    given = list(_read_flags(flags))
    layers = [*_read_variables(environ, problems), *given]
    settings = None
    if document and isinstance(document.data, dict):
        data = document.data
        placed = []
        for layer in layers:
            for key in _places(data, layer.key):
                data = _lay_over(data, key, layer.value)
                placed.append(Layer(layer.source, key, layer.value, layer.document))
        try:
            # Keys that YAML did not read as text are problems already.
            settings = Settings.model_validate({key: value for key, value in data.items() if isinstance(key, str)})
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems += [_locate(detail, document, placed) for detail in details if detail["type"] != "invalid_key"]
    elif document:
        problems.append(
            Problem(document.source, 1, "is no mapping; write `key: value` lines, such as `listen: 127.0.0.1:8080`")
        )
    if problems or settings is None:
        raise ConfigurationError("\n".join(map(str, sorted(set(problems)))))
    return settings.with_flags(tuple(layer.source for layer in given))


def _read_file(path: Path, problems: list[Problem]) -> Document | None:
    try:
        check_regular(path)
        text = path.read_bytes()
    except FileNotFoundError:
        problems.append(Problem(str(path), 0, "there is no such file; check the path given with --config"))
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        problems.append(
            Problem(str(path), 0, f"cannot be read: {reason}; --config needs a file that this user may read")
        )
    else:
        return _read_yaml(str(path), text, problems)
    return None


def _read_yaml(source: str, text: str | bytes, problems: list[Problem], above: Key = ()) -> Document | None:
    """The document in `text`; keys that are given twice or are no text become problems. None if it cannot be parsed."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":  # nothing, or comments only
            return Document(source, {}, None)
        problems += _check_mappings(source, root, above)
        return Document(source, loader.construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "is no YAML: " + _QUOTED.sub("'...'", str(error.problem))
        remedy = "check the indentation, and quote a value that begins with [ { * & ! % @ ` or holds `: `"
        problems.append(Problem(source, mark.line + 1 if mark else 0, f"{what}; {remedy}"))
    except (yaml.YAMLError, ValueError, RecursionError):  # bytes that are no text, a date such as 2026-99-99, [[[[...
        problems.append(Problem(source, 0, "is no YAML: it holds what cannot be read; save it as plain UTF-8 text"))
    return None


def _check_mappings(source: str, root: yaml.Node, above: Key) -> Iterator[Problem]:
    """Must see the tree before it is constructed, because that merges what `<<` names into each mapping."""
    waiting: list[tuple[Key, yaml.Node]] = [(above, root)]
    seen: set[int] = set()  # an anchor makes one node appear in many places, even inside itself
    while waiting:
        above, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [((*above, index), item) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for name, value in node.value:
                if not isinstance(name, yaml.ScalarNode):
                    continue  # the constructor refuses it
                key, line = (*above, name.value), name.start_mark.line + 1
                waiting.append((key, value))
                if name.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                    yield Problem(
                        source, line, f"{_dotted(key)}: YAML does not read this key as text; put it in quotes"
                    )
                elif first := lines.get(name.value):
                    yield Problem(
                        source, line, f"{_dotted(key)}: given twice, first on line {first}; remove one of the two"
                    )
                lines.setdefault(name.value, line)


def _read_variables(environ: Mapping[str, str], problems: list[Problem]) -> Iterator[Layer]:
    for name, text in environ.items():
        if not name.startswith(PREFIX) or _SERVICE_LINK.fullmatch(name) or _SERVICE_PORT.match(f"{name}={text}"):
            continue
        key = VARIABLES.get(name)
        if key is None:
            near = _nearest(name.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in VARIABLES])
            remedy = f"did you mean {PREFIX}{near}?" if near else "`epochgate config --reference` lists the keys"
            problems.append(Problem(name, 0, f"there is no such setting; {remedy}"))
        elif find_section(Settings, key[0]) and len(key) == 1:  # a list, written as JSON, which is YAML too
            if document := _read_yaml(name, text, problems, key):
                yield Layer(name, key, document.data, document)
        else:
            yield Layer(name, key, text)


def _read_flags(flags: Mapping[str, object]) -> Iterator[Layer]:
    return (Layer(flag, FLAGS[flag], value) for flag, value in flags.items() if value is not None)


def _places(data: Mapping[str, object], key: Key) -> list[Key]:
    """Where in `data` the key of a layer belongs: `[]` stands for each policy, or for the default one."""
    if "[]" not in key:
        return [key]
    name, _, *rest = key
    items = data.get(str(name), [{}])
    return [(name, index, *rest) for index in range(len(items))] if isinstance(items, list) else []


def _lay_over(data: dict[str, object], key: Key, value: object) -> dict[str, object]:
    """A copy of `data` with `value` at `key`; as it was where the file has no mapping on the way, which is an error."""
    name, rest = str(key[0]), key[1:]
    if not rest:
        return {**data, name: value}
    if isinstance(rest[0], int):
        items = list(data.get(name, [{}]))  # type: ignore[call-overload]  # _places saw a list
        if isinstance(items[rest[0]], dict):
            items[rest[0]] = _lay_over(items[rest[0]], rest[1:], value)
        return {**data, name: items}
    inner = data.get(name, {})
    return {**data, name: _lay_over(inner, rest, value)} if isinstance(inner, dict) else data


def _locate(detail: ErrorDetails, document: Document, layers: list[Layer]) -> Problem:
    """The problem that pydantic's `detail` tells, at the layer that brought the value, or else in the file."""
    key: Key = detail.get("ctx", {}).get("key") or detail["loc"]
    text = _explain(detail)
    for layer in reversed(layers):
        if key[: len(layer.key)] == layer.key:
            rest = key[len(layer.key) :]
            line = layer.document.line(rest) if layer.document else 0
            return Problem(layer.source, line, f"{_dotted(key)}: {text}" if rest else text)
    if key == ("upstream",):
        key = ("upstream", "url") if detail["type"] == "missing" else key
    return Problem(document.source, document.line(key), f"{_dotted(key)}: {text}")


def _explain(detail: ErrorDetails) -> str:
    """What is wrong and what to do, without repeating values that can hold a secret."""
    kind, value, key = detail["type"], detail["input"], detail["loc"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _explain_unknown(key)
    if kind == "missing":  # upstream.url is the only key without a default
        return "is not set; write it in the file, set EPOCHGATE_UPSTREAM__URL, or give --upstream http://127.0.0.1:3000"
    if value is None:
        return "has no value; give it one, or remove the key"
    if value is False and (instead := _OFF.get(str(key[-1]))):
        return f"YAML reads a bare `off` or `no` as false; write {instead}"
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    match kind:
        case "enum" | "literal_error":
            text = f"must be {context['expected'].replace(chr(39), '')}, not {shown}"
        case "value_error":
            text = str(context["error"])
        case "relation":
            text = detail["msg"]
        case "model_type":
            text = "must be a mapping; write its keys below it, indented"
        case "tuple_type":
            text = "must be a list; write [a, b], or a line beginning with `- ` for each item"
        case "string_type":
            text = f"must be text, not {shown}; put it in quotes"
        case "string_too_short":
            text = "must not be empty; write a name or remove the key"
        case "bool_type":
            text = f"must be true or false, not {shown}"
        case "greater_than_equal":
            text = f"must be at least {context['ge']}, not {shown}"
        case "less_than_equal":
            text = f"must be at most {context['le']}, not {shown}"
        case _ if kind.startswith("int_"):
            text = f"must be a whole number, not {shown}"
        case _:
            text = detail["msg"]
    if isinstance(value, bool) and kind != "model_type":
        text += "; YAML reads the bare words on, off, yes and no as true or false, so put such a word in quotes"
    return text


def _explain_unknown(key: Key) -> str:
    section: type[Section] = Settings
    for part in key[:-1]:
        if isinstance(part, str):
            section = find_section(section, part) or section
    name = str(key[-1])
    if near := _nearest(name, list(section.model_fields)):
        return f"unknown key; did you mean {near}?"
    if homes := [_dotted(known) for known in iterate_keys() if known[-1] == name]:
        return f"unknown key here; it is a key at {' and '.join(homes)}"
    return f"unknown key; the keys here are {', '.join(section.model_fields)}"


def _nearest(name: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _dotted(key: Key) -> str:
    """`policies[0].mode` for `("policies", 0, "mode")`. A URL in the place of a key may hold a password."""
    words = [part if isinstance(part, int) else _BEHIND_SCHEME.sub("://***", part) for part in key]
    text = "".join(f"[{part}]" if isinstance(part, int) else part if part == "[]" else f".{part}" for part in words)
    return text.removeprefix(".")
