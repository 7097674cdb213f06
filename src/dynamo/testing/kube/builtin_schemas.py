"""What Kubernetes' OpenAPI says of built-in objects: their fields, and how their lists and maps are merged.

`merge_keys.json` has merge keys, list types and atomic maps by kind and path; here they become schemas like those of
custom resource definitions, so that one implementation of patches and server-side apply serves both.
`builtin_fields.json` has the fields of each type, with their types as Go writes them: they are part of its messages.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

Object = dict[str, Any]

# Fields that are maps from free names to values, where all other objects have fields of fixed names.
_MAP_FIELDS = frozenset(
    (
        *("labels", "annotations", "matchLabels", "nodeSelector", "limits", "requests", "capacity"),
        *("data", "binaryData", "stringData", "allocatable", "volumeAttributes", "parameters"),
    )
)
_SCALARS = {"string": str, "bool": bool, "int32": int, "int64": int, "float64": (int, float)}
_GO_TYPES = {dict: "object", list: "array", str: "string", int: "number", float: "number",
             bool: "bool"}  # fmt: skip


_BASE64 = re.compile(r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


class WrongType(Exception):
    """A value that does not fit its field, in the words of Go's decoder."""


@cache
def _read(name: str) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name(name).read_bytes())
    return loaded


@cache
def load(api_version: str, kind: str) -> Object:
    """Return the schema of a built-in kind; it knows only fields that are merged in a special way."""
    schema: Object = {"type": "object"}
    common: dict[str, Object] = {
        ".metadata.finalizers": {"list-type": "set"},
        ".metadata.ownerReferences": {"list-type": "map", "list-map-keys": ["uid"]},
    }
    for path, marks in (_read("merge_keys.json").get(f"{api_version}/{kind}") or common).items():
        node = schema
        for name in path.replace("[]", ".[]").strip(".").split("."):
            node = (
                node.setdefault("items", {})
                if name == "[]"
                else node.setdefault("properties", {}).setdefault(name, {})
            )
        node |= {
            "default" if name == "default" else f"x-kubernetes-{name}": v
            for name, v in marks.items()
        }
    return schema


def is_map_field(name: str) -> bool:
    """Return whether a field of a built-in object is a map with free names."""
    return name in _MAP_FIELDS


def go_type(value: Any) -> str:
    """Return what Go's decoder calls a value."""
    return _GO_TYPES.get(type(value), "null")


def keep_known(api_version: str, item: Object, kind: str) -> tuple[Object, list[str]]:
    """Return a built-in object without the fields that its kind does not have, and their paths. Raises WrongType."""
    unknown: list[str] = []
    type_ = f"{api_version.rpartition('/')[2]}.{kind}"
    content = {name: value for name, value in item.items() if name != "metadata"}
    kept = _decode(content, type_, kind, "", unknown)
    return {name: item[name] if name == "metadata" else kept[name] for name in item
            if name == "metadata" or name in kept}, unknown  # fmt: skip


def check_metadata(metadata: Object | None) -> None:
    """Refuse metadata with a value of a wrong type. Raises WrongType."""
    _decode(metadata, "v1.ObjectMeta", "ObjectMeta", "", [])


def _decode(value: Any, type_: str, struct: str, path: str, unknown: list[str]) -> Any:
    """Return a value of this type, at this path of a Go struct; map keys stand in brackets there."""
    if value is None or not type_:
        return value
    is_list, is_map = type_.startswith("[]"), type_.startswith("map[")
    expected: Any = list if is_list else _SCALARS.get(type_, dict)
    if not isinstance(value, expected) or (isinstance(value, bool) and type_ != "bool"):
        field = re.sub(r"\[[^]]*\]", "", path)
        shown = re.sub(r"\b[a-z0-9]+/", "", type_)
        found = (
            f"number {value}" if isinstance(value, float) and expected is int else go_type(value)
        )
        raise WrongType(
            f"json: cannot unmarshal {found} into Go struct field {struct}.{field} of type {shown}"
        )
    if is_list:
        below = type_[2:]
        empty: Any = {"": None, "string": ""}.get(below, 0 if below in _SCALARS else {})
        return [
            _decode(empty if item is None else item, below, struct, f"{path}[{n}]", unknown)
            for n, item in enumerate(value)
        ]
    if is_map:
        below = type_.removeprefix("map[string]")
        has_bytes = not below and path in ("data", "binaryData")
        if has_bytes:
            _check_bytes(value, f"{struct}.{path}")
        empty = "" if has_bytes or below == "string" else None
        return {
            key: empty
            if child is None
            else _decode(child, below, struct, f"{path}[{key}]", unknown)
            for key, child in value.items()
        }
    fields = _read("builtin_fields.json").get(type_)
    if fields is None:
        return value
    unknown += [f"{path}.{name}".lstrip(".") for name in value if name not in fields]
    name_of_type = type_.rpartition(".")[2]
    return {
        name: _decode(child, fields[name], name_of_type, f"{path}.{name}".lstrip("."), unknown)
        for name, child in value.items()
        if name in fields and child is not None
    }


def _check_bytes(values: Object, field: str) -> None:
    """Refuse what is no base64 in a secret or config map. Raises WrongType."""
    for value in values.values():
        if not isinstance(value, str | None):
            found = f"{go_type(value)} into Go struct field {field} of type []uint8"
            raise WrongType(f"json: cannot unmarshal {found}")
        plain = re.sub(r"[\r\n]", "", value or "")
        if not _BASE64.fullmatch(plain):
            begin = re.match(r"[A-Za-z0-9+/]*", plain)
            raise WrongType(f"illegal base64 data at input byte {begin.end() if begin else 0}")
