"""What describes the configuration to machines and people: the JSON Schema, and `docs/configuration.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from epochgate.settings import PENDING, Settings, Upstream
from epochgate.values import UpstreamUrl

_INTRODUCTION = """\
# Configuration

<!-- Written by `epochgate config --reference`; change the descriptions in `settings.py` instead. -->

epochgate reads one YAML file (`epochgate serve --config epochgate.yaml`), environment variables and flags. Flags win
over the environment, the environment over the file, the file over the defaults. Only `upstream.url` has no default, so
this is enough:

```
epochgate serve --upstream http://127.0.0.1:3000
```

`epochgate check --config epochgate.yaml` tells whether a file is right; unknown keys, keys given twice and bad values
are errors that name file, line and key (exit status 78). `epochgate config` prints what is in effect, without the
password of the store. [`config/epochgate.yaml`](../config/epochgate.yaml) holds every key with its default; beside it
are files for common cases, and `epochgate.schema.json` for editors.

## How values are written

| value | written as |
|---|---|
| duration | `500ms`, `30s`, `5m`, `24h`, or a number of seconds |
| size | `64KiB`, `1MiB`, `2GiB`, or a number of bytes |
| address | `host:port`, `"[::1]:port"` (in quotes), or `unix:/path`; port 0 takes any free one |
| name of a header | in any case |

YAML reads the bare words `on`, `off`, `yes` and `no` as true or false. No key takes `off`: write `mode: bypass` for a
policy that does not look, `0s` for a duration that may be none.

## Environment and flags

The variable of a key is `EPOCHGATE_`, then the key in capitals, with two underscores for each dot: `upstream.url` is
`EPOCHGATE_UPSTREAM__URL`, `limits.sessions` is `EPOCHGATE_LIMITS__SESSIONS`. `EPOCHGATE_POLICIES` takes the whole list
as JSON. A variable that begins with `EPOCHGATE_` and names no key is an error; those that Kubernetes sets for a service
of that name (`EPOCHGATE_SERVICE_HOST`, `EPOCHGATE_PORT=tcp://...` and so on) are ignored.

| flag of `serve`, `check` and `config` | key |
|---|---|
| `--config FILE` | the file |
| `--upstream URL` | `upstream.url` |
| `--listen ADDRESS` | `listen` |
| `--admin-listen ADDRESS` | `admin.listen` |
| `--mode MODE` | `mode` of every policy |

## Keys
"""


class _Generator(GenerateJsonSchema):
    """Without the titles that repeat each key in capitals."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False


Node = dict[str, Any]  # a schema


def build_schema() -> Node:
    """The JSON Schema of the file; defaults are given as they are written in it."""
    schema = Settings.model_json_schema(schema_generator=_Generator)
    for _, node, default in walk_keys(schema):
        if "default" in node:
            node["default"] = default
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "epochgate"}
    return {**head, **{key: value for key, value in schema.items() if key != "title"}}


def write_reference() -> str:
    """The text of `docs/configuration.md`."""
    schema = Settings.model_json_schema(schema_generator=_Generator)
    rows = [
        f"| `{key}` | {_kind(schema, node)} | {_default(node, default)} | {node['description']} |"
        for key, node, default in walk_keys(schema)
    ]
    lines = [_INTRODUCTION, "| key | value | default | meaning |", "|---|---|---|---|", *rows]
    if PENDING:
        lines += ["", "## Keys without effect yet", "", *(f"- `{key}`: {note}." for key, note in PENDING.items())]
    return "\n".join(lines) + "\n"


def walk_keys(schema: Node) -> Iterator[tuple[str, Node, Any]]:
    """Each key with its schema and its default as a file would have it, in the order of the models."""
    defaults = Settings(upstream=Upstream(url=UpstreamUrl("http", "upstream", 80))).model_dump(mode="json")
    return _walk_section(schema, schema, defaults, "")


def _walk_section(schema: Node, section: Node, defaults: Node, above: str) -> Iterator[tuple[str, Node, Any]]:
    for name, node in section["properties"].items():
        key = above + name
        default: Any = defaults.get(name)
        inner = _resolve(schema, node)
        if "properties" in inner:
            yield from _walk_section(schema, inner, default or {}, f"{key}.")
            continue
        yield key, node, default
        item = _resolve(schema, node.get("items", {}))
        if "properties" in item:  # the items of a list that has a default of its own have none
            yield from _walk_section(schema, item, {} if "default" in node else default[0], f"{key}[].")


def _resolve(schema: Node, node: Node) -> Node:
    target: Node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    return target


def _kind(schema: Node, node: Node) -> str:
    """What a value of `node` is, in words."""
    node = _resolve(schema, node)
    match node:
        case {"enum": choices}:
            *others, last = (f"`{choice}`" for choice in choices)
            return f"{', '.join(others)} or {last}"
        case {"properties": _}:
            return "mapping"
        case {"type": "array", "items": item}:
            return f"list of: {_kind(schema, item)}"
        case {"anyOf": [first, {"type": "null"}]}:
            return f"{_kind(schema, first)}, or null"
        case {"minimum": low, "maximum": high} if low == high:
            return f"`{low}`"
        case {"type": "integer"}:
            return f"whole number from {node['minimum']}"
        case {"type": "boolean"}:
            return "`true` or `false`"
        case _:
            return str(node.get("title", "text"))


def _default(node: Node, default: Any) -> str:
    if "default" in node:
        return f"`{json.dumps(default) if not isinstance(default, str) else default}`"
    return "one policy" if node.get("type") == "array" else "none: must be set"
