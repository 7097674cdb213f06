"""Custom resource definitions: which are accepted, when they are established, and how they end."""

import json
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from dynamo.testing.kube import api, failures, metadata, resources, rules, store

Object = dict[str, Any]
TABLE = ("apiextensions.k8s.io", "customresourcedefinitions")
_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"


def check(item: Object) -> Iterator[failures.FieldError]:
    """Yield the mistakes of a definition."""
    spec = item.get("spec") or {}
    names = spec.get("names") or {}
    expected = f"{names.get('plural')}.{spec.get('group')}"
    if item["metadata"].get("name") != expected:
        shown = json.dumps(item["metadata"].get("name"))
        text = 'must be spec.names.plural+"."+spec.group'
        yield failures.invalid_value("metadata.name", shown, text)
    versions = spec.get("versions") or []
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
            yield from rules.find_mistakes(schema, path)


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


class Definitions:
    """Keeps the registry in step with the definitions in the store."""

    def __init__(self, served: "api.Api") -> None:
        self._api = served
        findings = served.registry.find(TABLE[0], "v1", TABLE[1])
        assert findings is not None
        self._resource: resources.ApiResource = findings

    def on_change(self, change: "store.Change") -> None:
        """Serve what a change defines; for the store."""
        if change.table != TABLE:
            return
        spec = change.item["spec"]
        if change.type == "DELETED":
            self._api.registry.remove(spec["group"], spec["names"]["plural"])
        elif _is_established(change.item):
            self._api.registry.define(change.item)

    def keys_of(self, change: "store.Change") -> Iterable[Hashable]:
        """Return the definition that changed, or the one whose object is gone."""
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
        elif not _is_established(item):
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
        if not conflicting_name:
            status["acceptedNames"] = spec["names"]
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
            remaining = [f for f in item["metadata"].get("finalizers") or () if f != _CLEANUP]
            patch = {"metadata": {"finalizers": remaining}}
            name = item["metadata"]["name"]
            await self._api.patch(self._resource, "", name, api.MERGE_PATCH, patch)


def _is_established(item: Object) -> bool:
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any(
        condition["type"] == "Established" and condition["status"] == "True"
        for condition in conditions
    )


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
