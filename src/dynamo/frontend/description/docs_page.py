"""`GET /docs`: the description of our API as one page for people.

It is made from the same document as `/openapi.json`, with a line of curl for each route. Nothing is loaded from
elsewhere and nothing runs, so it works where there is no network.
"""

import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dynamo.frontend.description import openapi
from dynamo.frontend.operations import Operation

SECURITY = (("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'"),)
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_REFUSED = "not supported"
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: #3b7a2a; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; } summary b { display: inline-block; min-width: 4.2rem; color: var(--accent); }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--soft); border-radius: 4px; padding: .6rem; white-space: pre-wrap; word-break: break-word; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top;
border-top: 1px solid var(--line); padding: .2rem .6rem .2rem 0; } td:first-child { width: 16rem; }
.refused { opacity: .55; }
"""


def page(
    document: Mapping[str, Any],
    table: Mapping[tuple[str, str], Operation],
    *,
    host: str,
    model: str,
) -> bytes:
    """The page, with curl lines for this host and this model."""
    base = "http://" + (host if _HOST.fullmatch(host) else "127.0.0.1:8000")
    tags = dict.fromkeys(operation.tag for operation in table.values())
    sections = "".join(
        f"<h2>{html.escape(tag)}</h2>"
        + "".join(
            _section(document, method, pattern, operation, base, model)
            for (method, pattern), operation in table.items()
            if operation.tag == tag
        )
        for tag in tags
    )
    version = html.escape(document["info"]["version"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Dynamo API</title><style>{_STYLE}</style>"
        f"<h1>Dynamo API</h1><p>Version {version}. For programs: "
        f'<a href="/openapi.json">/openapi.json</a> (OpenAPI {document["openapi"]}).</p>{sections}</html>'
    ).encode()


def _section(
    document: Mapping[str, Any],
    method: str,
    pattern: str,
    operation: Operation,
    base: str,
    model: str,
) -> str:
    path = openapi.path_of(pattern)
    described = document["paths"][path][method.lower()]
    parts = [
        f"<summary><b>{method}</b> <code>{path}</code> {html.escape(operation.summary)}</summary>",
        f"<pre>{html.escape(_curl(method, path, operation, base, model))}</pre>",
    ]
    if "requestBody" in described:
        schema = _resolve(document, _schema_of(described["requestBody"]))
        parts.append(_table("Body", _fields(document, schema)))
    parameters = described.get("parameters", ())
    rows = ((p["name"], p["in"], p.get("description", "")) for p in parameters)
    parts.append(_table("Parameters", rows))
    answers = (
        (code, _kinds(one), one["description"]) for code, one in described["responses"].items()
    )
    parts.append(_table("Answers", answers))
    return f"<details>{''.join(parts)}</details>"


def _curl(method: str, path: str, operation: Operation, base: str, model: str) -> str:
    words = ["curl", base + path.replace("{id}", "ID")]
    if method != "GET":
        words += ["-X", method]
    if operation.request is not None:
        body = json.dumps({"model": model, **operation.example})
        words += ["-H", "Content-Type: application/json", "-d", body]
    return shlex.join(words)


def _fields(
    document: Mapping[str, Any], schema: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """A row for each field; those of an object in it stand behind a dot."""
    required = schema.get("required", ())
    for name, field in sorted(
        schema["properties"].items(), key=lambda item: item[0] not in required
    ):
        kind = _phrase(field)
        note = "required" if name in required else ""
        yield prefix + name, kind, _REFUSED if kind == "null" else note
        for inner in field.get("anyOf", (field,)):
            if "$ref" in inner:
                yield from _fields(document, _resolve(document, inner), f"{prefix}{name}.")


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> str:
    lines = "".join(
        f'<tr class="{"refused" if note == _REFUSED else ""}"><td><code>{html.escape(name)}</code>'
        f"<td>{html.escape(kind)}<td>{html.escape(note)}"
        for name, kind, note in rows
    )
    return f"<h4>{title}</h4><table>{lines}</table>" if lines else ""


def _kinds(answer: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{media.partition(';')[0]}: {_phrase(content['schema'])}"
        for media, content in answer["content"].items()
    )


def _schema_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = body["content"]["application/json"]["schema"]
    return schema


def _resolve(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema["$ref"].rpartition("/")[2]
    found: Mapping[str, Any] = document["components"]["schemas"][name]
    return found


def _phrase(schema: Mapping[str, Any]) -> str:
    """A type, in words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2].rpartition(".")[2])
    if "anyOf" in schema:
        kinds = [one for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(map(_phrase, kinds))
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if schema.get("description") == openapi.AN_EVENT:
        (kinds, *_) = schema["properties"]["data"]["anyOf"]
        return f"events with {_phrase(kinds['contentSchema'])}"
    kind = schema.get("type", "anything")
    if kind == "array":
        most = schema.get("maxItems")
        limit = f" of up to {most}" if most is not None else ""
        return f"list{limit}: {_phrase(schema.get('items', {}))}"
    if "maxLength" in schema:
        return f"{kind} of up to {schema['maxLength']} characters"
    return f"{kind}{_range(schema)}"


def _range(schema: Mapping[str, Any]) -> str:
    words = (
        f" {word} {schema[key]}"
        for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
        if key in schema
    )
    return "".join(words)
