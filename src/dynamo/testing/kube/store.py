"""The objects of a cluster in memory, with one revision counter and a history of changes, as etcd keeps them.

Stored objects are shared with all readers and must never be changed: a writer stores a new one. Every change gets the
next revision and is told to subscribers before the write returns, in order of revisions. The history is bounded, so a
watch from an older revision is refused and its client lists again.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dynamo.testing.kube import failures

Object = dict[str, Any]
Table = tuple[str, str]  # group and plural
Name = tuple[str, str]  # namespace, empty for objects of the cluster, and name


class Change(NamedTuple):
    """One write: ADDED has no previous object, DELETED carries the last state with its own revision."""

    revision: int
    table: Table
    type: str
    item: Object
    previous: Object | None


Subscriber = Callable[[Change], None]


class Store:
    """All objects, by table and name."""

    def __init__(self, *, max_history: int = 20_000) -> None:
        self.revision = 1
        self._tables: dict[Table, dict[Name, Object]] = {}
        self._history: deque[Change] = deque(maxlen=max_history)
        self._subscribers: list[Subscriber] = []
        self._oldest = 1  # a watch may begin after this revision, or later

    def get(self, table: Table, name: Name) -> Object | None:
        """Return an object, or None."""
        return self._tables.get(table, {}).get(name)

    def list_items(self, table: Table, namespace: str = "") -> list[Object]:
        """Return the objects of a table, of one namespace or of all, ordered as `_sort` does."""
        return _sort(self._tables.get(table, {}), namespace)

    def list_at(self, table: Table, namespace: str, revision: int) -> list[Object]:
        """Return the objects of a table as they were. Raises ApiError (410) if the history is too short."""
        if revision < self._oldest:
            raise failures.expired("The resourceVersion for the provided list is too old.")
        items = dict(self._tables.get(table, {}))
        for change in reversed(self._history):
            if change.revision <= revision:
                break
            if change.table == table:
                name = _name(change.item)
                if change.previous is None:
                    items.pop(name, None)
                else:
                    items[name] = change.previous
        return _sort(items, namespace)

    def tables(self) -> list[Table]:
        """Return the tables that hold objects."""
        return [table for table, items in self._tables.items() if items]

    def put(self, table: Table, item: Object) -> Object:
        """Store an object under its name, with the next revision, and return it as stored."""
        previous = self.get(table, _name(item))
        item = self._stamp(item)
        self._tables.setdefault(table, {})[_name(item)] = item
        self._publish(table, "MODIFIED" if previous is not None else "ADDED", item, previous)
        return item

    def delete(self, table: Table, name: Name, last: Object | None = None) -> Object:
        """Remove an object; `last` is its final state, by default the stored one. Return it with a new revision."""
        previous = self._tables[table].pop(name)
        item = self._stamp(last if last is not None else previous)
        self._publish(table, "DELETED", item, previous)
        return item

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with each change from now on; the returned function ends it."""
        self._subscribers.append(subscriber)
        return lambda: (
            self._subscribers.remove(subscriber) if (subscriber in self._subscribers) else None
        )

    def changes_after(self, revision: int, table: Table) -> Iterator[Change]:
        """Return the changes of a table after a revision. Raises ApiError (410) if they are no longer kept."""
        if revision < self._oldest:
            raise failures.expired(f"too old resource version: {revision} ({self._oldest})")
        return (
            change
            for change in tuple(self._history)
            if change.revision > revision and change.table == table
        )

    def compact(self) -> None:
        """Forget the history, so that older watches and lists are refused."""
        self._history.clear()
        self._oldest = self.revision

    def _stamp(self, item: Object) -> Object:
        self.revision += 1
        metadata = {**item["metadata"], "resourceVersion": str(self.revision)}
        return {**item, "metadata": metadata}

    def _publish(self, table: Table, kind: str, item: Object, previous: Object | None) -> None:
        if len(self._history) == self._history.maxlen:
            self._oldest = self._history[0].revision
        change = Change(self.revision, table, kind, item, previous)
        self._history.append(change)
        for subscriber in tuple(self._subscribers):
            subscriber(change)


def _sort(items: dict[Name, Object], namespace: str) -> list[Object]:
    """Return the objects of a namespace or of all, ordered by `namespace/name`, by which pages of lists go on."""
    names = [name for name in items if not namespace or name[0] == namespace]
    return [items[name] for name in sorted(names, key="/".join)]


def _name(item: Object) -> Name:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
