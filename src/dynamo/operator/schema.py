"""Structural schemas for custom resources, made from msgspec types.

A type is written once (`api_types`); the schema that the API server checks and `kubectl explain` shows is derived from
it. What msgspec cannot say stands in `Meta(extra_json_schema=...)` and is copied: formats, Kubernetes's extensions
(`x-kubernetes-...`), and rules in CEL.
"""

from typing import Any

import msgspec
from msgspec import inspect

Schema = dict[str, Any]
_BOUNDS = {"ge": "minimum", "le": "maximum", "pattern": "pattern"}


def schema_of(kind: Any) -> Schema:
    """Return the structural schema of a msgspec type."""
    return _render(inspect.type_info(kind))


def _render(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.Metadata():
            extra = kind.extra_json_schema or {}
            return {**_without_any(_render(kind.type), extra), **extra}
        case inspect.UnionType():
            return _render_union(kind)
        case inspect.StructType():
            return _render_struct(kind)
        case inspect.DictType():
            return _sized(
                {"type": "object", "additionalProperties": _render(kind.value_type)},
                kind,
                "Properties",
            )
        case inspect.ListType() | inspect.VarTupleType():
            return _sized({"type": "array", "items": _render(kind.item_type)}, kind, "Items")
        case _:
            return _render_scalar(kind)


def _render_scalar(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.LiteralType():
            return {"type": "string", "enum": list(kind.values)}
        case inspect.StrType():
            return _sized({"type": "string"}, kind, "Length")
        case inspect.IntType():
            return _sized({"type": "integer"}, kind, "")
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.AnyType():
            return {"x-kubernetes-preserve-unknown-fields": True}
        case _:
            raise TypeError(f"{kind!r} has no structural schema: use one of those above")


def _render_union(kind: inspect.UnionType) -> Schema:
    """Render `X | None` as X: a field that is null is one that is absent; int or str is Kubernetes's int-or-string."""
    kinds = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    if len(kinds) == 1:
        return _render(kinds[0])
    return {"x-kubernetes-int-or-string": True, "anyOf": [_render(member) for member in kinds]}


def _render_struct(kind: inspect.StructType) -> Schema:
    schema: Schema = {"type": "object"}
    if text := kind.cls.__doc__:
        schema["description"] = " ".join(text.split())
    schema["properties"] = {
        field.encode_name: _render(field.type)
        | ({"default": field.default} if isinstance(field.default, int) else {})
        for field in kind.fields
    }
    if required := [field.encode_name for field in kind.fields if field.required]:
        schema["required"] = required
    if rules := getattr(kind.cls, "RULES", ()):
        schema["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} for rule, message in rules
        ]
    return schema


def _sized(schema: Schema, kind: Any, noun: str) -> Schema:
    for attribute, keyword in _BOUNDS.items():
        if (value := getattr(kind, attribute, None)) is not None:
            schema[keyword] = value
    for attribute in ("min", "max"):
        if (value := getattr(kind, f"{attribute}_length", None)) is not None:
            schema[f"{attribute}{noun}"] = value
    return schema


def _without_any(schema: Schema, extra: Schema) -> Schema:
    """Leave out the schema of arbitrary values where `extra` says more: properties, or that unknown ones are kept."""
    if extra.keys() & {"properties", "x-kubernetes-preserve-unknown-fields"}:
        return {key: value for key, value in schema.items() if key != "additionalProperties"}
    return schema


class Resource(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=True):
    """A part of a custom resource, in camel case; absent fields are None."""
