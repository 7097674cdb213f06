"""Custom resource definitions: which are accepted, when they are established, and how they end."""

from collections.abc import Hashable, Iterable
from typing import Any

from dynamo.testing.kube import api, metadata, pods, store

Object = dict[str, Any]
TABLE = ("apiextensions.k8s.io", "customresourcedefinitions")


class Definitions:
    """Keeps the registry in step with the definitions in the store."""

    def __init__(self, served: api.Api) -> None:
        self._api = served
        self._resource = served.registry.require(*TABLE)

    async def define(self, definitions: Iterable[Object]) -> None:
        """Create and establish definitions, before anything else does."""
        for body in definitions:
            await self._api.create(self._resource, "", body)
            await self.reconcile(body["metadata"]["name"])

    def on_change(self, change: store.Change) -> None:
        """Serve what a change defines; for the store."""
        if change.table != TABLE:
            return
        spec = change.item["spec"]
        if change.type == "DELETED":
            self._api.registry.remove(spec["group"], spec["names"]["plural"])
        elif pods.has_condition(change.item, "Established"):
            self._api.registry.define(change.item)

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the definition that changed, or that of an object that is gone."""
        if change.table == TABLE:
            return (change.item["metadata"]["name"],)
        if change.type == "DELETED" and change.table[0]:
            return (f"{change.table[1]}.{change.table[0]}",)
        return ()

    async def reconcile(self, key: Hashable) -> float | None:
        """Bring one definition a step further: establish it, or remove its objects and then itself."""
        item = self._api.store.get(TABLE, ("", str(key)))
        if item is None:
            return None
        if item["metadata"].get("deletionTimestamp"):
            await self._terminate(item)
        elif not pods.has_condition(item, "Established"):
            await self._establish(item)
        return None

    async def _establish(self, item: Object) -> None:
        spec, now = item["spec"], metadata.timestamp()
        conflicting_name = self._taken_name(spec)
        if conflicting_name:
            text = f'"{conflicting_name}" is already in use'
            conditions = [
                _condition("NamesAccepted", "False", "ShortNamesConflict", text, now),
                _condition("Established", "False", "NotAccepted", "not all names are accepted", now),
            ]  # fmt: skip
        else:
            text = "the initial names have been accepted"
            conditions = [
                _condition("NamesAccepted", "True", "NoConflicts", "no conflicts found", now),
                _condition("Established", "True", "InitialNamesAccepted", text, now),
            ]
        status = {**item["status"], "conditions": conditions}
        accepted = ("kind", "listKind", "plural", "singular") if conflicting_name else spec["names"]
        status["acceptedNames"] = {name: spec["names"][name] for name in accepted}
        before = [_without_time(condition) for condition in item["status"].get("conditions") or ()]
        if before != [_without_time(condition) for condition in conditions]:
            options = api.WriteOptions(manager="kube-apiserver", subresource="status")
            name = item["metadata"]["name"]
            await self._api.update(self._resource, "", name, {**item, "status": status}, options)

    def _taken_name(self, spec: Object) -> str:
        names = set(spec["names"].get("shortNames") or ()) | {spec["names"]["plural"]}
        for resource in self._api.registry:
            if resource.group == spec["group"] and resource.plural != spec["names"]["plural"]:
                conflicting_name = names & {resource.plural, *resource.short_names}
                if conflicting_name:
                    return str(min(conflicting_name))
        return ""

    async def _terminate(self, item: Object) -> None:
        spec = item["spec"]
        table = (spec["group"], spec["names"]["plural"])
        findings = self._api.registry.resources_of(table)
        for child in self._api.store.list_items(table):
            if findings and not child["metadata"].get("deletionTimestamp"):
                meta = child["metadata"]
                await self._api.delete(findings[0], meta.get("namespace", ""), meta["name"])
        if not self._api.store.list_items(table):
            remaining = [f for f in item["metadata"].get("finalizers") or () if f != api.CLEANUP]
            patch = {"metadata": {"finalizers": remaining}}
            await self._api.merge(self._resource, item, patch, manager="kube-apiserver")


def _without_time(condition: Object) -> Object:
    return {name: value for name, value in condition.items() if name != "lastTransitionTime"}


def _condition(kind: str, status: str, reason: str, message: str, now: str) -> Object:
    return {
        "type": kind,
        "status": status,
        "lastTransitionTime": now,
        "reason": reason,
        "message": message,
    }
