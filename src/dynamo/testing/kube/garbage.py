"""Garbage collection by owner references, the end of namespaces, and that of events."""

import collections
from collections.abc import Hashable, Iterable
from datetime import datetime
from typing import Any, cast

from dynamo.testing.kube import api, builtin_rules, failures, metadata, resources, store

Object = dict[str, Any]
_NAMESPACES = ("", "namespaces")
_EVENTS = ("", "events")
_EVENT_S = 3600.0  # as an API server keeps them by default
_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"


Place = tuple[store.Table, store.Name]


class GarbageCollector:
    """Deletes dependents of owners that are gone, and finishes foreground and orphaning deletions.

    A key is the table and name of an object.
    """

    def __init__(self, served: api.Api) -> None:
        self._api = served
        self._dependents: dict[str, set[Place]] = {}
        self._owners: dict[str, Place] = {}

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Index the change; return its object and the owners and dependents that may have to go."""
        meta = change.item["metadata"]
        place = (change.table, (meta.get("namespace", ""), meta["name"]))
        before = (change.previous or {"metadata": {}})["metadata"].get("ownerReferences") or ()
        after = () if change.type == "DELETED" else meta.get("ownerReferences") or ()
        for owner in before:
            self._dependents.get(owner["uid"], set()).discard(place)
        for owner in after:
            self._dependents.setdefault(owner["uid"], set()).add(place)
        if change.type == "DELETED":
            self._owners.pop(meta["uid"], None)
            yield from self._dependents.get(meta["uid"], ())
        else:
            self._owners[meta["uid"]] = place
            yield place
        for owner in before:
            if owner["uid"] in self._owners:
                yield self._owners[owner["uid"]]

    async def reconcile(self, key: Hashable) -> float | None:
        """Look at one object: at its owners, and at its own deletion."""
        table, name = cast("Place", key)
        item = self._api.store.get(table, name)
        findings = self._api.registry.resources_of(table)
        if item is None or not findings:
            return None
        if item["metadata"].get("deletionTimestamp"):
            await self._finish(findings[0], item)
        owners = item["metadata"].get("ownerReferences") or ()
        if owners:
            await self._check_owners(findings[0], item, owners)
        return None

    async def _check_owners(
        self, resource: resources.ApiResource, item: Object, owners: Iterable[Object]
    ) -> None:
        meta = item["metadata"]
        present = [owner for owner in owners if self._is_present(owner, meta.get("namespace", ""))]
        if present and len(present) < len(list(owners)):
            change = {"metadata": {"ownerReferences": present}}
            await self._api.merge(resource, item, change)
        waits = [owner for owner in present if self._waits_for_dependents(owner)]
        is_unowned = not present or (len(waits) == len(present) and bool(waits))
        if is_unowned and not meta.get("deletionTimestamp"):
            policy = "Foreground" if waits and self._dependents.get(meta["uid"]) else "Background"
            options = api.DeleteOptions(policy=policy, uid=meta["uid"])
            await self._api.delete(resource, meta.get("namespace", ""), meta["name"], options)

    def _is_present(self, owner: Object, namespace: str) -> bool:
        place = self._owners.get(owner["uid"])
        return place is not None and place[1][0] in ("", namespace)

    def _waits_for_dependents(self, owner: Object) -> bool:
        table, name = self._owners[owner["uid"]]
        item = self._api.store.get(table, name)
        return item is not None and _FOREGROUND in (item["metadata"].get("finalizers") or ())

    async def _finish(self, resource: resources.ApiResource, item: Object) -> None:
        meta = item["metadata"]
        finalizers = meta.get("finalizers") or []
        remaining = [name for name in finalizers if name not in (_FOREGROUND, _ORPHAN)]
        released = {"metadata": {"finalizers": remaining}}
        places = list(self._dependents.get(meta["uid"], ()))
        if _ORPHAN in finalizers:
            for table, name in places:
                await self._orphan(table, name, meta["uid"])
            await self._api.merge(resource, item, released)
        elif _FOREGROUND in finalizers:
            blocking = 0
            for table, name in places:
                child = self._api.store.get(table, name)
                for owner in (child or {"metadata": {}})["metadata"].get("ownerReferences") or ():
                    blocking += owner["uid"] == meta["uid"] and bool(
                        owner.get("blockOwnerDeletion")
                    )
                if child is not None and not child["metadata"].get("deletionTimestamp"):
                    await self.reconcile((table, name))
            still = [
                place
                for place in self._dependents.get(meta["uid"], ())
                if self._api.store.get(*place)
            ]
            if not still or not blocking:
                await self._api.merge(resource, item, released)

    async def _orphan(self, table: store.Table, name: store.Name, uid: str) -> None:
        child = self._api.store.get(table, name)
        findings = self._api.registry.resources_of(table)
        if child is None or not findings:
            return
        owners = child["metadata"].get("ownerReferences") or ()
        remaining = [owner for owner in owners if owner["uid"] != uid]
        await self._api.merge(findings[0], child, {"metadata": {"ownerReferences": remaining}})


class Namespaces:
    """Fills new namespaces with what each has, and empties those that are deleted. A key is a namespace."""

    def __init__(self, served: api.Api) -> None:
        self._api = served

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the namespace itself, and the ending one that has lost an object."""
        if change.table == _NAMESPACES:
            return (change.item["metadata"]["name"],)
        if change.type == "DELETED":
            return (change.item["metadata"].get("namespace", ""),)
        return ()

    async def reconcile(self, key: Hashable) -> float | None:
        """Complete a new namespace, or take an ending one a step further."""
        name = str(key)
        item = self._api.store.get(_NAMESPACES, ("", name))
        if item is None:
            return None
        if not item["metadata"].get("deletionTimestamp"):
            await self._fill(name)
            return None
        resource = self._api.registry.require(*_NAMESPACES)
        for table in self._api.store.tables():
            for child in self._api.store.list_items(table, name):
                findings = self._api.registry.resources_of(table)
                if findings and not child["metadata"].get("deletionTimestamp"):
                    options = api.DeleteOptions(policy="Background")
                    await self._api.delete(findings[0], name, child["metadata"]["name"], options)
        remaining = self._count_remaining(name)
        if remaining:
            before = item["status"].get("conditions") or ()
            conditions = _ending_conditions(remaining, self._count_finalizers(name), before)
            await self._api.merge(resource, item, {"status": {"conditions": conditions}}, "status")
        else:
            await self._api.merge(resource, item, {"spec": {"finalizers": None}}, "finalize")
        return None

    def _count_remaining(self, namespace: str) -> dict[str, int]:
        """Return how many objects of each resource a namespace still has."""
        counts = {}
        for table in self._api.store.tables():
            items = self._api.store.list_items(table, namespace)
            if items:
                counts[f"{table[1]}.{table[0]}"] = len(items)
        return counts

    def _count_finalizers(self, namespace: str) -> dict[str, int]:
        """Return how many objects of a namespace each finalizer holds."""
        return collections.Counter(
            name
            for table in self._api.store.tables()
            for item in self._api.store.list_items(table, namespace)
            for name in item["metadata"].get("finalizers") or ()
        )

    async def _fill(self, name: str) -> None:
        for plural, body in (
            ("serviceaccounts", {"metadata": {"name": "default"}}),
            ("configmaps", {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}),
        ):
            resource = self._api.registry.find("", "v1", plural)
            place = (name, body["metadata"]["name"])
            if resource is not None and self._api.store.get(resource.key, place) is None:
                try:
                    options = api.WriteOptions(manager=api.CONTROLLERS)
                    await self._api.create(resource, name, body, options)
                except failures.ApiError as error:
                    if error.code != 409:
                        raise


class Events:
    """Deletes events an hour after their last write. A key is an event."""

    def __init__(self, served: api.Api) -> None:
        self._api = served

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the event that was written."""
        if change.table == _EVENTS and change.type != "DELETED":
            yield change.item["metadata"]["namespace"], change.item["metadata"]["name"]

    async def reconcile(self, key: Hashable) -> float | None:
        """Delete one event, or return after how many seconds it is to be."""
        namespace, name = cast("store.Name", key)
        item = self._api.store.get(_EVENTS, (namespace, name))
        if item is None:
            return None
        meta, limit = item["metadata"], builtin_rules.timestamp_after(-_EVENT_S)
        writes = [entry.get("time") or "" for entry in meta.get("managedFields") or ()]
        written_at = max(meta["creationTimestamp"], *writes, "")
        if written_at > limit:
            age = datetime.fromisoformat(written_at) - datetime.fromisoformat(limit)
            return age.total_seconds()
        await self._api.delete(self._api.registry.require(*_EVENTS), namespace, name)
        return None


def _ending_conditions(
    remaining: dict[str, int], finalizers: dict[str, int], before: Iterable[Object]
) -> list[Object]:
    """Return what the status of an ending namespace says of what it still has."""
    contents = ", ".join(
        f"{name} has {n} resource instances" for name, n in sorted(remaining.items())
    )
    holders = ", ".join(
        f"{name} in {n} resource instances" for name, n in sorted(finalizers.items())
    )
    states = [
        ("NamespaceDeletionDiscoveryFailure", False, "ResourcesDiscovered",
         "All resources successfully discovered"),
        ("NamespaceDeletionGroupVersionParsingFailure", False, "ParsedGroupVersions",
         "All legacy kube types successfully parsed"),
        ("NamespaceDeletionContentFailure", False, "ContentDeleted",
         "All content successfully deleted, may be waiting on finalization"),
        ("NamespaceContentRemaining", True, "SomeResourcesRemain",
         f"Some resources are remaining: {contents}"),
    ]  # fmt: skip
    if finalizers:
        text = f"Some content in the namespace has finalizers remaining: {holders}"
        states.append(("NamespaceFinalizersRemaining", True, "SomeFinalizersRemain", text))
    times = {(old["type"], old["status"]): old["lastTransitionTime"] for old in before}
    return [
        {
            "type": kind,
            "status": str(is_true),
            "lastTransitionTime": times.get((kind, str(is_true)), metadata.timestamp()),
            "reason": reason,
            "message": message,
        }
        for kind, is_true, reason, message in states
    ]


def new_namespace(name: str) -> Object:
    """Return a namespace to begin with."""
    return {"metadata": {"name": name, "creationTimestamp": metadata.timestamp()}}
