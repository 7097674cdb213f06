"""Server-side apply: which manager owns which field, conflicts between them, and the merge.

A field set is a set of paths. An element of a path is written as in `fieldsV1`: `f:name` for a field or map key,
`k:{…}` for the item of a list with keys, `v:…` for a member of a set. A path in the set stands for the field itself;
the fields below it are paths of their own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.testing.kube import failures, patches

Object = dict[str, Any]
Path = tuple[str, ...]
FieldSet = frozenset[Path]
Schema = Mapping[str, Any]

_IDENTITY = frozenset(
    (
        *("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"),
        *("deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink"),
    )
)


_METADATA: Object = {
    "properties": {
        "finalizers": {"x-kubernetes-list-type": "set"},
        "ownerReferences": {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["uid"],
            "items": {"x-kubernetes-map-type": "atomic"},
        },
    }
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A schema, and whether it is complete: that of a built-in kind names only what is merged in a special way."""

    schema: Schema
    is_custom: bool

    def child(self, name: str) -> "Shape":
        """Return the shape of a field or map entry."""
        if (
            name == "metadata"
            and self.is_custom
            and not self.schema.get("properties", {}).get(name, {}).get("properties")
        ):
            return Shape(_METADATA, is_custom=False)
        return Shape(
            patches.map_schema(self.schema, name, is_custom=self.is_custom), self.is_custom
        )

    def item(self) -> "Shape":
        """Return the shape of a list's items."""
        return Shape(self.schema.get("items") or {}, self.is_custom)

    def is_leaf(self, value: Any) -> bool:
        """Return whether a value has one owner as a whole."""
        if isinstance(value, dict):
            return not value or self.schema.get("x-kubernetes-map-type") == "atomic"
        if isinstance(value, list):
            return self.schema.get("x-kubernetes-list-type") not in ("map", "set")
        return True

    def is_free_key(self, name: str) -> bool:
        """Return whether `name` is a map key or unknown to the schema, and so owned as an entry."""
        if name in (self.schema.get("properties") or {}):
            return False
        return self.is_custom or patches.is_map(self.schema, name)

    def element(self, item: Any) -> str:
        """Return the path element of an item of a list with keys or of a set."""
        if self.schema.get("x-kubernetes-list-type") == "set":
            return "v:" + _dump(item)
        defaults = (self.schema.get("items") or {}).get("properties") or {}
        keys = {}
        for key in self.schema.get("x-kubernetes-list-map-keys") or ():
            default = (defaults.get(key) or {}).get("default")
            if key == "protocol" and not self.is_custom:
                default = "TCP"
            value = item.get(key, default) if isinstance(item, dict) else None
            if value is not None:
                keys[key] = value
        return "k:" + _dump(keys)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _children(value: Any, shape: Shape) -> Iterator[tuple[str, Any, Shape, bool]]:
    """Yield (path element, value, shape, whether the entry itself is owned) of a map or list that is no leaf."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield f"f:{name}", child, shape.child(name), shape.is_free_key(name)
    else:
        for item in value:
            yield shape.element(item), item, shape.item(), True


def applied_fields(value: Any, shape: Shape, path: Path = ()) -> set[Path]:
    """Return the field set of a configuration that was applied."""
    if shape.is_leaf(value):
        return {path}
    fields: set[Path] = set()
    for element, child, child_shape, is_entry in _children(value, shape):
        if is_entry:
            fields.add((*path, element))
        if not (isinstance(child, list) and not child and not child_shape.is_leaf(child)):
            fields |= applied_fields(child, child_shape, (*path, element))
    return fields


@dataclass(slots=True)
class Comparison:
    """The paths that differ between two objects."""

    changed: set[Path]  # added or with another value
    removed: set[Path]


def compare(old: Any, new: Any, shape: Shape) -> Comparison:
    """Compare two objects field by field; new maps, lists and structures count themselves."""
    result = Comparison(set(), set())
    _compare(old, new, shape, (), result)
    return result


_ABSENT = object()
_GO_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "array": ("list", (list,)),
    "object": ("map", (dict,)),
    "integer": ("numeric (int or float)", (int, float)),
    "number": ("numeric (int or float)", (int, float)),
}


def _compare(old: Any, new: Any, shape: Shape, path: Path, result: Comparison) -> None:
    if old is _ABSENT or new is _ABSENT:
        value, paths = (new, result.changed) if old is _ABSENT else (old, result.removed)
        paths.add(path)
        if not shape.is_leaf(value):
            for element, child, child_shape, _ in _children(value, shape):
                sides = (_ABSENT, child) if old is _ABSENT else (child, _ABSENT)
                _compare(*sides, child_shape, (*path, element), result)
        return
    if shape.is_leaf(old) or shape.is_leaf(new) or type(old) is not type(new):
        if shape.is_leaf(old) and shape.is_leaf(new):
            if old != new:
                result.changed.add(path)
            return
        empty: Any = {} if isinstance(new if isinstance(new, dict) else old, dict) else []
        old = empty if shape.is_leaf(old) else old
        new = empty if shape.is_leaf(new) else new
    before = {element: (child, below) for element, child, below, _ in _children(old, shape)}
    after = {element: (child, below) for element, child, below, _ in _children(new, shape)}
    for element in before.keys() | after.keys():
        below = (after.get(element) or before[element])[1]
        sides = before.get(element, (_ABSENT,))[0], after.get(element, (_ABSENT,))[0]
        _compare(*sides, below, (*path, element), result)


def own_fields(item: Object) -> Object:
    """Return an object without what no manager owns: its identity, kind and bookkeeping."""
    result = {name: value for name, value in item.items() if name not in ("apiVersion", "kind")}
    metadata = {
        name: value for name, value in item.get("metadata", {}).items() if name not in _IDENTITY
    }
    result.pop("metadata", None)
    return {**result, "metadata": metadata} if metadata else result


def encode(fields: Iterable[Path]) -> Object:
    """Return a field set as `fieldsV1`."""
    tree: Object = {}
    for path in sorted(fields):
        node = tree
        for element in path:
            node = node.setdefault(element, {})
        node["."] = {}
    return _fold(tree, is_root=True)


def _fold(node: Object, *, is_root: bool = False) -> Object:
    if set(node) == {"."} and not is_root:
        return {}
    return {
        element: {} if element == "." else _fold(child) for element, child in sorted(node.items())
    }


def decode(tree: Object, path: Path = ()) -> set[Path]:
    """Return the field set of `fieldsV1`."""
    if not tree:
        return {path} if path else set()
    fields: set[Path] = set()
    for element, child in tree.items():
        fields |= {path} if element == "." else decode(child, (*path, element))
    return fields


@dataclass(frozen=True, slots=True)
class Writer:
    """The author of a write, and through which version and subresource."""

    manager: str
    operation: str
    api_version: str
    subresource: str = ""
    time: str = ""

    def is_of(self, entry: Object) -> bool:
        """Return whether a managedFields entry is this writer's."""
        return (
            entry.get("manager", "") == self.manager
            and entry.get("operation") == self.operation
            and entry.get("apiVersion") == self.api_version
            and entry.get("subresource", "") == self.subresource
        )


def _entry(writer: Writer, fields: Iterable[Path], time: str) -> Object:
    entry: Object = {
        "manager": writer.manager,
        "operation": writer.operation,
        "apiVersion": writer.api_version,
    }
    if time:
        entry["time"] = time
    entry |= {"fieldsType": "FieldsV1", "fieldsV1": encode(fields)}
    return {**entry, "subresource": writer.subresource} if writer.subresource else entry


def _sorted(entries: Iterable[Object]) -> list[Object]:
    return sorted(
        entries,
        key=lambda entry: (
            entry["operation"],
            entry.get("time", ""),
            entry.get("manager", ""),
            entry["apiVersion"],
            entry.get("subresource", ""),
        ),
    )


def _without(entries: list[Object], writer: Writer, lost: set[Path]) -> list[Object]:
    """Take fields from all managers but the writer; entries that own nothing more are dropped."""
    result = []
    for entry in entries:
        if writer.is_of(entry):
            continue
        fields = decode(entry["fieldsV1"])
        remaining = fields - lost
        if remaining == fields:
            result.append(entry)
        elif remaining:
            result.append({**entry, "fieldsV1": encode(remaining)})
    return result


def _find(entries: list[Object], writer: Writer) -> Object | None:
    return next((entry for entry in entries if writer.is_of(entry)), None)


def record_update(old: Object | None, new: Object, shape: Shape, writer: Writer) -> list[Object]:
    """Return managedFields after a write that is no apply: the writer alone owns what it changed."""
    entries = list(new["metadata"].get("managedFields") or ())
    difference = compare(own_fields(old or {}), own_fields(new), shape)
    structures = frozenset() if shape.is_custom else _STRUCTURES
    changed = {path for path in difference.changed if path and path not in structures}
    changed.discard(("f:metadata",))
    removed = difference.removed
    if not changed and not removed:
        return _sorted(entries)
    own_entry = _find(entries, writer)
    fields = (decode(own_entry["fieldsV1"]) if own_entry else set()) | changed
    entries = _without(entries, writer, changed | removed)
    fields -= removed
    if fields:
        time = (
            own_entry.get("time", "")
            if own_entry and decode(own_entry["fieldsV1"]) == fields
            else writer.time
        )
        entries.append(_entry(writer, fields, time if not changed else writer.time))
    return _sorted(entries)


_TEMPLATE = ("f:spec", "f:template")
_STRUCTURES: FieldSet = frozenset(  # that every built-in object has, so that no manager owns them
    [
        ("f:metadata",), ("f:spec",), ("f:status",), _TEMPLATE, (*_TEMPLATE, "f:metadata"),
        (*_TEMPLATE, "f:spec"), (*_TEMPLATE, "f:spec", "f:containers"), ("f:spec", "f:containers"),
        ("f:spec", "f:strategy"), ("f:spec", "f:updateStrategy"), ("f:spec", "f:names"), ("f:spec", "f:resources"),
        ("f:spec", "f:scaleTargetRef"), ("f:source",),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of an apply: the merged object, and its managedFields."""

    item: Object
    entries: list[Object]


def apply(
    live: Object, config: Object, shape: Shape, writer: Writer, *, is_forced: bool
) -> Applied:
    """Merge a configuration into the live object. Raises ApiError (409) if other managers own what it changes."""
    entries = _with_initial_owner(live, shape, writer)
    own_entry = _find(entries, writer)
    before = decode(own_entry["fieldsV1"]) if own_entry else set()
    own_config = own_fields(config)
    fields = {path for path in applied_fields(own_config, shape) if path}
    merged = _merge(live, config, shape)
    changed = compare(own_fields(live), own_fields(merged), shape).changed
    _check_conflicts(entries, writer, changed & fields, is_forced=is_forced)
    entries = _without(entries, writer, changed & fields if is_forced else set())
    foreign_fields = {path for entry in entries for path in decode(entry["fieldsV1"])}
    remaining = fields | foreign_fields
    prefixes = {path[:length] for path in remaining for length in range(len(path) + 1)}
    abandoned = before - fields - prefixes
    if abandoned:  # a structure without any owner left goes with what defaults have put in
        around = {path[:length] for path in abandoned for length in range(1, len(path))}
        abandoned |= {*_named_fields(around, merged, shape)} - prefixes
    merged = remove(merged, abandoned, shape)
    if fields:
        is_same = before == fields and not changed
        time = writer.time if changed or abandoned or own_entry else ""
        time = own_entry.get("time", "") if own_entry and is_same else time
        entries.append(_entry(writer, fields, time))
    return Applied(merged, _sorted(entries))


def _named_fields(around: set[Path], value: Any, shape: Shape, path: Path = ()) -> Iterator[Path]:
    """Yield which of these paths are fields that a schema names, and no keys of maps or items of lists."""
    for element, child, child_shape, is_entry in _children(value, shape):
        if (below := (*path, element)) in around:
            if not is_entry:
                yield below
            yield from _named_fields(around, child, child_shape, below)


def _with_initial_owner(live: Object, shape: Shape, writer: Writer) -> list[Object]:
    """Return the entries of an object; one without any gets an owner for what it had before the first apply."""
    entries = list(live["metadata"].get("managedFields") or ())
    if entries or "uid" not in live["metadata"]:
        return entries
    fields = {
        path
        for path in compare({}, own_fields(live), shape).changed
        if path and path not in _STRUCTURES
    }
    first = Writer("before-first-apply", "Update", writer.api_version, "", writer.time)
    return [_entry(first, fields, writer.time)] if fields else []


def _check_conflicts(
    entries: list[Object], writer: Writer, changed: set[Path], *, is_forced: bool
) -> None:
    findings = []
    for entry in entries:
        if writer.is_of(entry) or is_forced:
            continue
        owner = f'conflict with "{entry.get("manager", "")}"'
        if entry.get("subresource"):
            owner += f' with subresource "{entry["subresource"]}"'
        if entry["operation"] == "Update":
            owner += f" using {entry['apiVersion']}"
        findings += [
            (owner, _show(path))
            for path in sorted(decode(entry["fieldsV1"]) & changed, key=_reading_order)
        ]
    if not findings:
        return
    if len(findings) == 1:
        text = f"1 conflict: {findings[0][0]}: {findings[0][1]}"
    else:
        by_owner: dict[str, list[str]] = {}
        for owner, path in findings:
            by_owner.setdefault(owner, []).append(path)
        shown = (f"{owner.replace('conflict', 'conflicts', 1)}:\n" + "\n".join(f"- {p}" for p in paths)
                 for owner, paths in by_owner.items())  # fmt: skip
        text = f"{len(findings)} conflicts: " + "\n".join(shown)
    causes = [
        {"reason": "FieldManagerConflict", "message": owner, "field": path}
        for owner, path in findings
    ]
    raise failures.ApiError(409, "Conflict", f"Apply failed with {text}", {"causes": causes})


def _reading_order(path: Path) -> list[tuple[bool, str]]:
    """Sort the fields of a structure before what lies deeper in it."""
    return [(n < len(path) - 1, element) for n, element in enumerate(path)]


def _show(path: Path) -> str:
    text = ""
    for element in path:
        kind, _, additional = element.partition(":")
        if kind == "f":
            text += f".{additional}"
        elif kind == "k":
            keys = json.loads(additional).items()
            text += "[" + ",".join(f"{key}={_dump(value)}" for key, value in keys) + "]"
        else:
            text += f"[={additional}]"
    return text


def _merge(live: Any, config: Any, shape: Shape) -> Any:
    if isinstance(config, dict) and isinstance(live, dict) and not shape.is_leaf(config):
        if shape.schema.get("x-kubernetes-map-type") == "atomic":
            return config
        result = dict(live)
        for name, value in config.items():
            result[name] = _merge(live[name], value, shape.child(name)) if name in live else value
        return result
    if isinstance(config, dict) and not config and isinstance(live, dict):
        return live if shape.schema.get("x-kubernetes-map-type") != "atomic" else config
    if isinstance(config, list) and isinstance(live, list) and not shape.is_leaf(config):
        return _merge_list(live, config, shape)
    return config


def _merge_list(live: list[Any], config: list[Any], shape: Shape) -> list[Any]:
    """Merge by key; applied items keep their order, and items of the live object stand before what followed them."""
    live_by_element = {shape.element(item): item for item in live}
    applied = {shape.element(item): item for item in config}
    result: list[Any] = []
    waiting = list(live_by_element)
    for element, item in applied.items():
        while waiting and waiting[0] not in applied:
            result.append(live_by_element[waiting.pop(0)])
        if element in live_by_element:
            waiting.remove(element)
            item = _merge(live_by_element[element], item, shape.item())
        result.append(item)
    return result + [live_by_element[element] for element in waiting]


def remove(item: Any, paths: set[Path], shape: Shape) -> Any:
    """Return a value without the fields at these paths."""
    if not paths or shape.is_leaf(item):
        return item
    below: dict[str, set[Path]] = {}
    for path in paths:
        if path:
            below.setdefault(path[0], set()).add(path[1:])
    remaining: list[Any] = []
    result: Object = {}
    for element, child, child_shape, _ in _children(item, shape):
        additional = below.get(element, set())
        if () in additional:
            continue
        is_emptied = child
        child = remove(child, additional, child_shape)
        if is_emptied and isinstance(child, dict | list) and not child:
            continue
        remaining.append(child)
        result[element.removeprefix("f:")] = child
    return result if isinstance(item, dict) else remaining


def find_mistakes(value: Any, shape: Shape, path: Path = ()) -> Iterator[str]:
    """Yield what an apply refuses: values of another type than the schema's, and two items with one key."""
    expected = _GO_TYPES.get(shape.schema.get("type", ""))
    if expected and value is not None and not isinstance(value, expected[1]):
        text = json.dumps(value) if isinstance(value, dict | list) else value
        found = "string" if expected[0].startswith("numeric") else f"&{{{text}}}"
        yield f"{_show(path)}: expected {expected[0]}, got {found}"
        return
    if shape.is_leaf(value):
        return
    identities: set[str] = set()
    for element, child, child_shape, _ in _children(value, shape):
        if isinstance(value, list):
            if element in identities:
                words = "duplicate entries for key " + _show((element,))
                yield f"{_show(path)}: {words}"
            identities.add(element)
        yield from find_mistakes(child, child_shape, (*path, element))
