"""The objects that a watch has told of, to find what changed when they must be listed again. No I/O."""

from collections.abc import Iterable, Iterator
from typing import Any

Object = dict[str, Any]
WatchEvent = tuple[str, Object]  # ADDED, MODIFIED, DELETED or SYNCED, and the object


class WatchedObjects:
    """The last state of each living object of one watch."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], Object] = {}

    def replace(self, objects: Iterable[Object]) -> Iterator[WatchEvent]:
        """Take a list of all objects, and tell the difference: what is gone, what is new, what is changed.

        An object that was deleted and made again under its name is told as DELETED and ADDED.
        """
        living = {_name(obj): obj for obj in objects}
        for name, obj in list(self._by_name.items()):
            if name not in living or living[name]["metadata"].get("uid") != obj["metadata"].get(
                "uid"
            ):
                del self._by_name[name]
                yield "DELETED", obj
        for obj in living.values():
            if (event := self.apply("MODIFIED", obj)) is not None:
                yield event

    def apply(self, type_: str, obj: Object) -> WatchEvent | None:
        """Take one event of the cluster; return the change, or None if there is none (a bookmark, a repeat)."""
        if type_ == "BOOKMARK":
            return None
        known = self._by_name.get(_name(obj))
        if type_ == "DELETED":
            self._by_name.pop(_name(obj), None)
            return None if known is None else ("DELETED", obj)
        self._by_name[_name(obj)] = obj
        if known is None:
            return "ADDED", obj
        is_same = known["metadata"].get("resourceVersion") == obj["metadata"].get("resourceVersion")
        return None if is_same else ("MODIFIED", obj)


def _name(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
