"""How lists and maps of built-in objects are merged: merge keys, list types and atomic maps of Kubernetes' OpenAPI.

`merge_keys.json` has them by kind and path; here they become schemas like those of custom
resource definitions, so that one implementation of patches and server-side apply serves both.
"""

import json
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


@cache
def _merge_keys() -> dict[str, dict[str, Object]]:
    content = Path(__file__).with_name("merge_keys.json").read_text()
    loaded: dict[str, dict[str, Object]] = json.loads(content)
    return loaded


@cache
def load(api_version: str, kind: str) -> Object:
    """Return the schema of a built-in kind; it knows only fields that are merged in a special way."""
    schema: Object = {"type": "object"}
    common: dict[str, Object] = {
        ".metadata.finalizers": {"list-type": "set"},
        ".metadata.ownerReferences": {"list-type": "map", "list-map-keys": ["uid"]},
    }
    for path, marks in (_merge_keys().get(f"{api_version}/{kind}") or common).items():
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
