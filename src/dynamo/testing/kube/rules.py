"""Rules of custom resource definitions (`x-kubernetes-validations`), written in CEL; the only door to its library."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import cel

from dynamo.testing.kube import failures

Object = dict[str, Any]
Schema = Mapping[str, Any]
RULES = "x-kubernetes-validations"

_FUNCTIONS: dict[
    str, Callable[..., Any]
] = {  # of Kubernetes' CEL library, which the language itself lacks
    "lowerAscii": str.lower,
    "upperAscii": str.upper,
    "trim": str.strip,
    "split": lambda text, separator: text.split(separator),
    "join": lambda items, separator="": separator.join(items),
    "replace": lambda text, old, new: text.replace(old, new),
    "indexOf": lambda items, item: items.index(item) if item in items else -1,
    "sum": sum,
    "isSorted": lambda items: items == sorted(items),
    "format": lambda template, values: template % tuple(values),
    "substring": lambda text, start, end=None: text[start:end],
}


@lru_cache(maxsize=1024)
def _compile(rule: str) -> cel.Program:
    return cel.compile(rule)


def is_true(expression: str, variables: Object) -> bool:
    """Return whether an expression holds; one that cannot be evaluated does."""
    context = cel.Context()
    for name, value in variables.items():
        context.add_variable(name, value)
    try:
        return bool(_compile(expression).execute(context))
    except (RuntimeError, ValueError, TypeError):
        return True


def check_expression(expression: str, field: str) -> Iterator[failures.FieldError]:
    """Yield the mistake of an expression that cannot be compiled."""
    try:
        _compile(expression)
    except ValueError as error:
        text = f"compilation failed: {str(error).partition('ERROR: ')[2] or error}"
        yield failures.invalid_value(field, json.dumps(expression), text)


def find_mistakes(schema: Schema, path: str) -> Iterator[failures.FieldError]:
    """Yield the rules of a schema that cannot be compiled."""
    for n, rule in enumerate(schema.get(RULES) or ()):
        for name in ("rule", "messageExpression"):
            field = f"{path}.{RULES}[{n}].{name}"
            yield from check_expression(rule.get(name) or "true", field)
    for name, child in (schema.get("properties") or {}).items():
        yield from find_mistakes(child, f"{path}.properties[{name}]")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from find_mistakes(schema[name], f"{path}.{name}")


def check_definition(item: Object) -> Iterator[failures.FieldError]:
    """Yield the mistakes of a definition."""
    spec = item.get("spec") or {}
    names = spec.get("names") or {}
    expected = f"{names.get('plural')}.{spec.get('group')}"
    if item["metadata"].get("name") != expected:
        shown = json.dumps(item["metadata"].get("name"))
        text = 'must be spec.names.plural+"."+spec.group'
        yield failures.invalid_value("metadata.name", shown, text)
    versions = spec.get("versions") or []
    for n, name in enumerate((item.get("status") or {}).get("storedVersions") or ()):
        if name not in [version["name"] for version in versions]:
            text = (
                f"missing from spec.versions; {name} was previously a storage version, and must remain in spec.versions"
                f" until a storage migration ensures no data remains persisted in {name} and removes {name} from"
                " status.storedVersions"
            )
            yield failures.invalid_value(f"status.storedVersions[{n}]", json.dumps(name), text)
    if sum(bool(version.get("storage")) for version in versions) != 1:
        shown = json.dumps(versions)[:100]
        text = "must have exactly one version marked as storage version"
        yield failures.invalid_value("spec.versions", shown, text)
    for n, version in enumerate(versions):
        path = f"spec.versions[{n}].schema.openAPIV3Schema"
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            text = "schemas are required"
            yield failures.required(path, text)
        else:
            yield from _check_types(schema, path)
            yield from find_mistakes(schema, path)


def _check_types(schema: Object, path: str) -> Iterator[failures.FieldError]:
    is_free = schema.get("x-kubernetes-int-or-string") or schema.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if not schema.get("type") and not is_free:
        yield failures.required(f"{path}.type", "must not be empty for specified object fields")
    for name, child in (schema.get("properties") or {}).items():
        yield from _check_types(child, f"{path}.properties[{name}]")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from _check_types(schema[name], f"{path}.{name}")


def has_rules(schema: Schema) -> bool:
    """Return whether a schema or one below it has rules."""
    below = [*(schema.get("properties") or {}).values()]
    below += [schema[name] for name in ("items", "additionalProperties") if name in schema]
    return bool(schema.get(RULES)) or any(
        has_rules(child) for child in below if isinstance(child, dict)
    )


def check(value: Any, old: Any, schema: Schema, path: str = "") -> Iterator[failures.FieldError]:
    """Yield the rules that a value breaks. `old` is its former value or None, which skips rules about it."""
    for rule in schema.get(RULES) or ():
        if "oldSelf" in rule["rule"] and old is None and not rule.get("optionalOldSelf"):
            continue
        error = _evaluate(rule, value, old, path)
        if error is not None:
            yield error
    if isinstance(value, dict):
        properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
        for name in sorted(value):
            below = properties.get(name, additional)
            if isinstance(below, dict):
                before = old.get(name) if isinstance(old, dict) else None
                place = f"{path}.{name}" if path else name
                yield from check(
                    value[name], before, below, place if name in properties else f"{path}[{name}]"
                )
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        keys = schema.get("x-kubernetes-list-map-keys") or ()
        for n, item in enumerate(value):
            before = _find_same(item, old, keys) if keys and isinstance(old, list) else None
            yield from check(item, before, schema["items"], f"{path}[{n}]")


def _find_same(item: Any, items: list[Any], keys: list[str]) -> Any:
    for candidate in items:
        if all(item.get(key) == candidate.get(key) for key in keys):
            return candidate
    return None


def _evaluate(rule: Object, value: Any, old: Any, path: str) -> failures.FieldError | None:
    context = cel.Context()
    for name, function in _FUNCTIONS.items():
        context.add_function(name, function)
    context.add_variable("self", value)
    context.add_variable("oldSelf", old)
    field = (path + rule.get("fieldPath", "")).lstrip(".")
    shown = "" if isinstance(value, dict | list) else f"{json.dumps(value)}: "
    try:
        if _compile(rule["rule"]).execute(context):
            return None
    except (RuntimeError, ValueError, TypeError) as error:
        text = f"rule evaluation error: {str(error).splitlines()[0]}"
        return failures.FieldError("FieldValueInvalid", field, f"Invalid value: {shown}{text}")
    message = rule.get("message") or f"failed rule: {' '.join(rule['rule'].split())}"
    if rule.get("messageExpression"):
        with contextlib.suppress(RuntimeError, ValueError, TypeError):  # else the message stays
            message = str(_compile(rule["messageExpression"]).execute(context))
    reason = rule.get("reason") or "FieldValueInvalid"
    prefix = {"FieldValueRequired": "Required value: ", "FieldValueForbidden": "Forbidden: "}.get(
        reason, f"Invalid value: {shown}"
    )
    return failures.FieldError(reason, field, f"{prefix}{message}")
