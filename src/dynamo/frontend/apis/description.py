"""`GET /openapi.json` and `GET /docs`: the description of the API, for programs and as one page for people.

The page shows the OpenAPI document, with a line of curl for each route. It loads nothing from elsewhere and runs no
script, so it works without a network. The document is made on the first request: few ever ask for it.
"""

import functools
import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dynamo.base import distribution
from dynamo.frontend.apis import openapi
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    HTML,
    Operation,
    Operations,
    RequestHandlers,
)
from dynamo.frontend.delivery import sse
from dynamo.runtime.http import exchange

SECURITY_HEADERS = (("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'"),)
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_UNSUPPORTED = "not supported"
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
.unsupported { opacity: .55; }
"""
Document = Mapping[str, Any]


def operations(handlers: RequestHandlers, others: Sequence[Operation]) -> Sequence[Operation]:
    """Return the operations that describe themselves and all others."""
    api = Operations(tag="Operation", errors=ACCESS_ERRORS)

    @functools.cache
    def make_document() -> dict[str, Any]:
        return openapi.make_document((*others, *api.entries), distribution.version())

    @api.get("/openapi.json", "This description", answer=dict[str, Any])
    def show_document(client: exchange.Exchange) -> None:
        client.respond(200, sse.encode(make_document()))

    @api.get("/docs", "This description as a page", answer=HTML)
    def show_page(client: exchange.Exchange) -> None:
        visible = handlers.list_visible(client)
        model = visible[0].name if visible else "MODEL"
        page = make_page(make_document(), host=client.request.headers.get("host", ""), model=model)
        client.respond(200, page, content_type=HTML, headers=SECURITY_HEADERS)

    return api.entries


def make_page(document: Document, *, host: str, model: str) -> bytes:
    """Return the page for this OpenAPI document, with curl lines for this host and model."""
    base = "http://" + (host if _HOST.fullmatch(host) else "127.0.0.1:8000")
    sections: dict[str, str] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            curl = _curl(document, method.upper(), base + path, operation, model)
            (tag,) = operation["tags"]
            section = _section(document, method.upper(), path, operation, curl)
            sections[tag] = sections.get(tag, f"<h2>{html.escape(tag)}</h2>") + section
    version = html.escape(document["info"]["version"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Dynamo API</title><style>{_STYLE}</style>"
        f"<h1>Dynamo API</h1><p>Version {version}. For programs: "
        f'<a href="/openapi.json">/openapi.json</a> (OpenAPI {document["openapi"]}).</p>'
        f"{''.join(sections.values())}</html>"
    ).encode()


def _section(
    document: Document, method: str, path: str, operation: Mapping[str, Any], curl: str
) -> str:
    parts = [
        f"<summary><b>{method}</b> <code>{path}</code> {html.escape(operation['summary'])}</summary>",
        f"<pre>{html.escape(curl)}</pre>",
    ]
    if "requestBody" in operation:
        ((_, content),) = operation["requestBody"]["content"].items()
        fields = _fields(document, _resolve(document, content["schema"]))
        parts.append(_table("Body", fields))
    parameters = operation.get("parameters", ())
    rows = ((row["name"], row["in"], row.get("description", "")) for row in parameters)
    parts.append(_table("Parameters", rows))
    answers = (
        (status, _media_types(answer), answer["description"])
        for status, answer in operation["responses"].items()
    )
    parts.append(_table("Answers", answers))
    return f"<details>{''.join(parts)}</details>"


def _curl(
    document: Document, method: str, url: str, operation: Mapping[str, Any], model: str
) -> str:
    words = ["curl", url.replace("{id}", "ID")]
    if method != "GET":
        words += ["-X", method]
    if "requestBody" in operation:
        ((media_type, content),) = operation["requestBody"]["content"].items()
        fields = _resolve(document, content["schema"])["properties"]
        if media_type == "application/json":
            chosen = {"model": model} if "model" in fields else {}
            body = json.dumps({**content.get("example", {}), **chosen})
            words += ["-H", "Content-Type: application/json", "-d", body]
        else:
            for name, value in content.get("example", {}).items():
                words += ["-F", f"{name}={value}"]
    return shlex.join(words)


def _fields(
    document: Document, schema: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each field, required ones first; the fields of an object follow its row, after a dot."""
    required = schema.get("required", ())
    fields = sorted(schema["properties"].items(), key=lambda field: field[0] not in required)
    for name, field in fields:
        phrase = _phrase(field)
        note = "required" if name in required else ""
        yield prefix + name, phrase, _UNSUPPORTED if phrase == "null" else note
        for inner in field.get("anyOf", (field,)):
            if "$ref" in inner:
                yield from _fields(document, _resolve(document, inner), f"{prefix}{name}.")


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> str:
    lines = "".join(
        f'<tr class="{"unsupported" if note == _UNSUPPORTED else ""}"><td><code>{html.escape(name)}</code>'
        f"<td>{html.escape(phrase)}<td>{html.escape(note)}"
        for name, phrase, note in rows
    )
    return f"<h4>{title}</h4><table>{lines}</table>" if lines else ""


def _media_types(answer: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{media.partition(';')[0]}: {_phrase(content['schema'])}"
        for media, content in answer["content"].items()
    )


def _resolve(document: Document, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    resolved: Mapping[str, Any] = document["components"]["schemas"][
        schema["$ref"].rpartition("/")[2]
    ]
    return resolved


def _phrase(schema: Mapping[str, Any]) -> str:
    """Return a type in words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2].rpartition(".")[2])
    if "anyOf" in schema:
        return " or ".join(_phrase(kind) for kind in schema["anyOf"] if kind != {"type": "null"})
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if schema.get("description") == openapi.EVENT:
        (data, *_) = schema["properties"]["data"]["anyOf"]
        return f"events with {_phrase(data['contentSchema'])}"
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        limit = f" of up to {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list{limit}: {_phrase(schema.get('items', {}))}"
    if "maxLength" in schema:
        return f"{kind} of up to {schema['maxLength']} characters"
    bounds = (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
    return kind + "".join(f" {word} {schema[key]}" for key, word in bounds if key in schema)
