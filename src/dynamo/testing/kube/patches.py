"""JSON patch, merge patch and strategic merge patch. All return a new value and leave their arguments as they are."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.testing.kube import builtin_schemas

Schema = Mapping[str, Any]
MAX_OPERATIONS = 10_000


class PatchFailed(Exception):
    """A patch that does not fit the object."""


def merge(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def apply_operations(target: Any, operations: Sequence[Mapping[str, Any]]) -> Any:
    """Apply a JSON patch (RFC 6902). Raises PatchFailed."""
    document = {"": copy.deepcopy(target)}
    for operation in operations:
        try:
            _apply_operation(document, operation)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            text = f"doc is missing path: {operation.get('path')}: missing value"
            raise PatchFailed(f"{operation.get('op')} operation does not apply: {text}") from error
    return document[""]


def _apply_operation(document: dict[str, Any], operation: Mapping[str, Any]) -> None:
    name, path = operation["op"], operation["path"]
    if name in ("move", "copy"):
        value = copy.deepcopy(_read(document, operation["from"]))
        if name == "move":
            _remove(document, operation["from"])
        _add(document, path, value)
    elif name == "add":
        _add(document, path, copy.deepcopy(operation["value"]))
    elif name == "remove":
        _remove(document, path)
    elif name == "replace":
        _read(document, path)
        _remove(document, path)
        _add(document, path, copy.deepcopy(operation["value"]))
    elif name == "test":
        if _read(document, path) != operation.get("value"):
            raise ValueError(path)
    else:
        raise ValueError(name)


def _parent(document: dict[str, Any], path: str) -> tuple[Any, str]:
    if path and not path.startswith("/"):
        raise ValueError(path)
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]
    node: Any = document
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node, last


def _read(document: dict[str, Any], path: str) -> Any:
    node, last = _parent(document, path)
    return node[int(last)] if isinstance(node, list) else node[last]


def _remove(document: dict[str, Any], path: str) -> None:
    node, last = _parent(document, path)
    if isinstance(node, list):
        node.pop(int(last))
    else:
        del node[last]


def _add(document: dict[str, Any], path: str, value: Any) -> None:
    node, last = _parent(document, path)
    if not isinstance(node, list):
        node[last] = value
    elif last == "-":
        node.append(value)
    elif 0 <= int(last) <= len(node):
        node.insert(int(last), value)
    else:
        raise IndexError(last)


def child_schema(schema: Schema, name: str) -> Schema:
    """Return the schema of a field or map entry; an empty one if nothing is known of it."""
    child = (schema.get("properties") or {}).get(name)
    if child is None:
        child = schema.get("additionalProperties")
    return child if isinstance(child, dict) else {}


def merge_key(schema: Schema) -> str | None:
    """Return the field by which strategic patches match the items of this list."""
    key: str | None = schema.get("x-kubernetes-patch-merge-key")
    keys: list[str] = schema.get("x-kubernetes-list-map-keys") or []
    return key or (keys[0] if len(keys) == 1 else None)


def strategic(target: Any, patch: Any, schema: Schema) -> Any:
    """Apply a strategic merge patch to a built-in object. Raises PatchFailed."""
    if not isinstance(patch, dict):
        return patch
    directive = patch.get("$patch")
    if directive == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    if directive == "delete":
        return {}
    retained = patch.get("$retainKeys")
    result = {
        name: value
        for name, value in (target if isinstance(target, dict) else {}).items()
        if retained is None or name in retained
    }
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.partition("/")[2]
            result[field] = [item for item in result.get(field) or [] if item not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            result.pop(name, None)
        else:
            order = patch.get(f"$setElementOrder/{name}")
            result[name] = _merge_field(result.get(name), value, child_schema(schema, name), order)
    return _sort_untouched_lists(result, patch, schema)


def _sort_untouched_lists(result: dict[str, Any], patch: Any, schema: Schema) -> dict[str, Any]:
    for name, order in patch.items():
        field = name.removeprefix("$setElementOrder/")
        if field != name and field not in patch and isinstance(result.get(field), list):
            key = merge_key(child_schema(schema, field))
            result[field] = _sort_items(result[field], order, key)
    return result


def _merge_field(target: Any, value: Any, schema: Schema, order: list[Any] | None) -> Any:
    if isinstance(value, dict):
        return strategic(target, value, schema)
    if not isinstance(value, list):
        return value
    key = merge_key(schema)
    if schema.get("x-kubernetes-list-type") == "set":
        remaining = [item for item in target or [] if item not in value]
        return _sort_items(remaining + value, order, None)
    if key is None:
        return [item for item in value if item != {"$patch": "replace"}]
    return _sort_items(_merge_items(list(target or []), value, key, schema), order, key)


def _merge_items(
    target: list[Any], changes: list[Any], key: str, schema: Schema
) -> list[dict[str, Any]]:
    if any(item == {"$patch": "replace"} for item in changes):
        return [item for item in changes if item != {"$patch": "replace"}]
    added: list[Any] = []
    for change in changes:
        if key not in change:
            shown = " ".join(f"{name}:{value}" for name, value in sorted(change.items()))
            raise PatchFailed(f"map: map[{shown}] does not contain declared merge key: {key}")
        index = next(
            (n for n, item in enumerate(target) if item.get(key) == change[key]),
            None,
        )
        if change.get("$patch") == "delete":
            target = [item for item in target if item.get(key) != change[key]]
        elif index is None:
            added.append(strategic({}, change, schema.get("items") or {}))
        else:
            target[index] = strategic(target[index], change, schema.get("items") or {})
    return added + target


def _sort_items(items: list[Any], order: list[Any] | None, key: str | None) -> list[Any]:
    if not order:
        return items
    desired = [entry.get(key) if isinstance(entry, dict) else entry for entry in order]
    positions = {str(entry): n for n, entry in enumerate(desired)}

    def position(item: Any) -> int:
        identity = item.get(key) if isinstance(item, dict) else item
        return positions.get(str(identity), len(positions))

    return sorted(items, key=position)


def is_map(schema: Schema, name: str) -> bool:
    """Return whether `name` is a free key of a map here, and not a field of a structure."""
    if name in (schema.get("properties") or {}):
        return False
    return isinstance(schema.get("additionalProperties"), dict)


def map_schema(schema: Schema, name: str, *, is_custom: bool) -> Schema:
    """Return the schema of a field; the maps of built-in objects are recognised by their names."""
    child = child_schema(schema, name)
    if not is_custom and builtin_schemas.is_map_field(name):
        return {"additionalProperties": {}, **child}
    return child
