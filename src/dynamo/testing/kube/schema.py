"""Structural schemas of custom resources: pruning, defaults and validation, in the words of a real API server."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dynamo.testing.kube import failures, resources, rules

Object = dict[str, Any]
Schema = Mapping[str, Any]
FieldError = failures.FieldError

_INT32 = 2**31
_FREE = "\0"  # marks a map key in a path
_BLOCKING = frozenset(  # such an error keeps rules from being evaluated
    (
        *("FieldValueNotSupported", "FieldValueTypeInvalid", "FieldValueRequired"),
        *("FieldValueTooLong", "FieldValueTooMany"),
    )
)
_NOT_CHECKED = (
    "some validation rules were not checked because the object was invalid;"
    " correct the existing errors to complete validation"
)
_JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer",
               float: "number", type(None): "null"}  # fmt: skip


def keeps_unknown(schema: Schema) -> bool:
    """Return whether fields that the schema does not name are kept."""
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))


def prune(
    value: Any, schema: Schema, path: str = "", *, is_root: bool = False
) -> tuple[Any, list[str]]:
    """Return a value without the fields that the schema does not know, and their paths."""
    unknown: list[str] = []
    if isinstance(value, list):
        items = []
        for n, item in enumerate(value):
            pruned, findings = prune(
                item,
                schema.get("items") or {"x-kubernetes-preserve-unknown-fields": True},
                f"{path}[{n}]",
            )
            items.append(pruned)
            unknown += findings
        return items, unknown
    if not isinstance(value, dict):
        return value, unknown
    properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
    result = {}
    for name, child in value.items():
        below = f"{path}.{name}" if path else name
        if is_root and name in ("apiVersion", "kind", "metadata"):
            result[name] = child
        elif name in properties or isinstance(additional, dict):
            result[name], findings = prune(child, properties.get(name, additional) or {}, below)
            unknown += findings
        elif (
            keeps_unknown(schema)
            or schema.get("x-kubernetes-embedded-resource")
            or additional is True
        ):
            result[name] = child
        else:
            unknown.append(below)
    return result, unknown


def fill_defaults(value: Any, schema: Schema) -> Any:
    """Return a value with defaults filled in; null where it is not allowed counts as absent."""
    if isinstance(value, list):
        return [fill_defaults(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
    result = {}
    for name, child in value.items():
        below = properties.get(name, additional if isinstance(additional, dict) else None)
        if child is None and below is not None and not below.get("nullable"):
            if isinstance(additional, dict) and name not in properties:
                result[name] = fill_defaults({} if below.get("type") == "object" else None, below)
            continue
        result[name] = fill_defaults(child, below) if below else child
    for name, below in properties.items():
        if name not in result and "default" in below:
            result[name] = fill_defaults(json.loads(json.dumps(below["default"])), below)
    return result


def validate(item: Object, old: Object | None, schema: Schema) -> list[FieldError]:
    """Return the mistakes of an object, with those of rules if the schema itself is fulfilled."""
    checked = {name: value for name, value in item.items() if name != "metadata"}
    findings = [_shown(error) for error in _check(checked, schema, "")]
    if any(error.reason in _BLOCKING for error in findings):
        if rules.has_rules(schema):
            findings.append(failures.invalid_value("<nil>", "null", _NOT_CHECKED))
        return findings
    return findings + list(rules.check(item, old, schema))


def _shown(error: FieldError) -> FieldError:
    """Write map keys as a field, or in brackets where an item comes twice, as a real server does."""
    if error.reason == "FieldValueDuplicate":
        field = re.sub(rf"\.{_FREE}([^.\[]+)", r"[\1]", error.field)
        return FieldError(error.reason, field, error.message)
    return FieldError(
        error.reason, error.field.replace(_FREE, ""), error.message.replace(_FREE, "")
    )


def _type_of(value: Any) -> str:
    return _JSON_TYPES[type(value)]


def _fits_type(value: Any, schema: Schema) -> bool:
    name = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
    if name is None or (value is None and schema.get("nullable")):
        return True
    actual = _type_of(value)
    if name == "number":
        return actual in ("number", "integer")
    if name == "integer":
        return actual == "integer" or (isinstance(value, float) and value.is_integer())
    return bool(actual == name)


def _check(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    if not _fits_type(value, schema):
        yield from _refuse_type(value, schema, path)
        return
    if value is None:
        return
    if schema.get("enum") and value not in schema["enum"]:
        yield _unsupported(value, schema, path)
    if isinstance(value, dict):
        yield from _check_object(value, schema, path)
    elif isinstance(value, list):
        yield from _check_list(value, schema, path)
    elif isinstance(value, str):
        yield from _check_string(value, schema, path)
    elif not isinstance(value, bool):
        yield from _check_number(value, schema, path)


def _refuse_type(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    name = "integer,string" if schema.get("x-kubernetes-int-or-string") else schema["type"]
    actual, is_fraction = _type_of(value), name == "integer" and isinstance(value, float)
    if is_fraction:
        name, actual = schema.get("format", name), "float64"
    text = f'{path} in body must be of type {name}: "{actual}"'
    yield FieldError("FieldValueTypeInvalid", path, f'Invalid value: "{actual}": {text}')
    if is_fraction and schema.get("format"):
        yield _out_of_format(schema, path)
    if schema.get("enum"):
        yield _unsupported(value, schema, path)


def _unsupported(value: Any, schema: Schema, path: str) -> FieldError:
    return failures.unsupported(path, json.dumps(value), ", ".join(map(json.dumps, schema["enum"])))


def _out_of_format(schema: Schema, path: str) -> FieldError:
    text = f"Checked value must be of type integer with format {schema['format']} in {path}"
    return failures.invalid_value("<nil>", '""', text)


def _check_object(value: Object, schema: Schema, path: str) -> Iterator[FieldError]:
    limit = schema.get("maxProperties")
    if limit is not None and len(value) > limit:
        message = f"Too many: {len(value)}: must have at most {limit} items"
        yield FieldError("FieldValueTooMany", path, message)
    if len(value) < schema.get("minProperties", 0):
        text = f"{path} in body should have at least {schema['minProperties']} properties"
        yield failures.invalid_value(path, str(len(value)), text)
    properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
    for name in schema.get("required") or ():
        if name not in value:
            yield failures.required(f"{path}.{name}" if path else name)
    for name in sorted(value):
        below = properties.get(name, additional if isinstance(additional, dict) else None)
        if below is not None:
            place = name if name in properties else f"{_FREE}{name}"
            yield from _check(value[name], below, f"{path}.{place}" if path else place)


def _check_list(value: list[Any], schema: Schema, path: str) -> Iterator[FieldError]:
    limit = schema.get("maxItems")
    if limit is not None and len(value) > limit:
        message = f"Too many: {len(value)}: must have at most {limit} items"
        yield FieldError("FieldValueTooMany", path, message)
    if len(value) < schema.get("minItems", 0):
        text = f"{path} in body should have at least {schema['minItems']} items"
        yield failures.invalid_value(path, str(len(value)), text)
    for n, item in enumerate(value):
        yield from _check(item, schema.get("items") or {}, f"{path}[{n}]")
    kind, identities = schema.get("x-kubernetes-list-type"), []
    for n, item in enumerate(value):
        keys = schema.get("x-kubernetes-list-map-keys") or ()
        if kind == "map" and isinstance(item, dict):
            identity: Any = {key: item[key] for key in keys if key in item}
        elif kind == "set":
            identity = item
        else:
            continue
        if identity in identities:
            message = f"Duplicate value: {json.dumps(identity, separators=(',', ':'))}"
            yield FieldError("FieldValueDuplicate", f"{path}[{n}]", message)
        identities.append(identity)


def _check_string(value: str, schema: Schema, path: str) -> Iterator[FieldError]:
    limit, shown = schema.get("maxLength"), json.dumps(value)
    if limit is not None and len(value) > limit:
        message = f"Too long: may not be more than {limit} bytes"
        yield FieldError("FieldValueTooLong", path, message)
    if len(value) < schema.get("minLength", 0):
        text = f"{path} in body should be at least {schema['minLength']} chars long"
        yield failures.invalid_value(path, shown, text)
    pattern = schema.get("pattern")
    if pattern and not re.search(pattern.replace(r"\z", r"\Z"), value):
        text = f"{path} in body should match '{pattern}'"
        yield failures.invalid_value(path, shown, text)
    if schema.get("format") == "date-time" and not re.match(
        r"^\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)$", value
    ):
        text = f"{path} in body must be of type date-time: {shown}"
        yield failures.invalid_value(path, shown, text)


def _check_number(value: float, schema: Schema, path: str) -> Iterator[FieldError]:
    shown = json.dumps(value)
    if schema.get("format") == "int32" and not -_INT32 <= value < _INT32:
        yield _out_of_format(schema, path)
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and (value < least or (value == least and schema.get("exclusiveMinimum"))):
        words = "greater than" if schema.get("exclusiveMinimum") else "greater than or equal to"
        yield failures.invalid_value(path, shown, f"{path} in body should be {words} {least}")
    if most is not None and (value > most or (value == most and schema.get("exclusiveMaximum"))):
        words = "less than" if schema.get("exclusiveMaximum") else "less than or equal to"
        yield failures.invalid_value(path, shown, f"{path} in body should be {words} {most}")
    multiple = schema.get("multipleOf")
    if multiple and value % multiple:
        text = f"{path} in body should be a multiple of {multiple}"
        yield failures.invalid_value(path, shown, text)


def blocked_rules(findings: list[FieldError], schema: Schema) -> list[FieldError]:
    """Return the note that rules were not checked, if these errors keep them from being evaluated."""
    if rules.has_rules(schema) and any(error.reason in _BLOCKING for error in findings):
        return [failures.invalid_value("<nil>", "null", _NOT_CHECKED)]
    return []


def check_scale(
    resource: resources.ApiResource, item: Object, checked: list[failures.FieldError]
) -> list[failures.FieldError]:
    """Return the schema's errors with those of the scale subresource's field, before the errors of rules."""
    if resource.scale is None:
        return checked
    value: Any = item
    for name in resource.scale.spec.strip(".").split("."):
        value = value.get(name) if isinstance(value, dict) else None
    field, shown, text = resource.scale.spec, json.dumps(value), ""
    if isinstance(value, str | float):
        found = f"{value:g}" if isinstance(value, float) else value
        kind = "float64" if isinstance(value, float) else "string"
        shown, text = "0", f"{field} accessor error: {found} is of the type {kind}, expected int64"
    elif isinstance(value, int) and value < 0:
        text = "should be a non-negative integer"
    elif isinstance(value, int) and value >= _INT32:
        text = f"should be less than or equal to {_INT32 - 1}"
    extra = [failures.invalid_value(field, shown, text)] if text else []
    position = len(checked)
    for n, error in enumerate(checked):
        is_rule = error.reason == "FieldValueInvalid" and " in body " not in error.message
        if is_rule and "Checked value" not in error.message:
            position = n
            break
    return checked[:position] + extra + checked[position:]
