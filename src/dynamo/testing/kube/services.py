"""Endpoint slices of services, and volume claims, which are bound at once."""

from collections.abc import Hashable, Iterable
from typing import Any, cast

from dynamo.testing.kube import api, metadata, pods, selectors, store

Object = dict[str, Any]
_PODS, _SERVICES, _CLAIMS = ("", "pods"), ("", "services"), ("", "persistentvolumeclaims")
_PROTECTION = "kubernetes.io/pvc-protection"


class EndpointSlices:
    """Keeps one slice for each service with a selector."""

    def __init__(self, served: api.Api) -> None:
        self._api = served

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the service itself, or all services that choose a pod."""
        meta = change.item["metadata"]
        if change.table == _SERVICES:
            yield meta["namespace"], meta["name"]
        elif change.table == _PODS:
            for service in self._api.store.list_items(_SERVICES, meta["namespace"]):
                chosen = {"matchLabels": service["spec"].get("selector") or {}}
                labels = [
                    (item or {"metadata": {}})["metadata"].get("labels") or {}
                    for item in (change.item, change.previous)
                ]
                if any(selectors.matches(chosen, each) for each in labels):
                    yield meta["namespace"], service["metadata"]["name"]

    async def reconcile(self, key: Hashable) -> float | None:
        """Write the slice of one service."""
        namespace, name = cast("store.Name", key)
        service = self._api.store.get(_SERVICES, (namespace, name))
        slices = self._api.registry.require("discovery.k8s.io", "endpointslices")
        if (
            service is None
            or service["metadata"].get("deletionTimestamp")
            or not service["spec"].get("selector")
        ):
            return None
        meta = service["metadata"]
        owner = metadata.owner_reference(service)
        labels = {**(meta.get("labels") or {}), "kubernetes.io/service-name": name,
                  "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"}  # fmt: skip
        chosen = self._chosen_pods(service)
        body: Object = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{name}-{meta['uid'][:5]}", "labels": labels, "ownerReferences": [owner]},
            "addressType": "IPv4",
            "endpoints": [_endpoint(pod, service["spec"]) for pod in chosen],
            "ports": [_port(port, chosen) for port in service["spec"].get("ports") or ()],
        }  # fmt: skip
        place = (namespace, body["metadata"]["name"])
        current = self._api.store.get(slices.key, place)
        options = api.WriteOptions(manager="endpointslice-controller")
        if current is None:
            await self._api.create(slices, namespace, body, options)
        else:
            await self._api.update(slices, namespace, place[1], body, options)
        return None

    def _chosen_pods(self, service: Object) -> list[Object]:
        chosen = {"matchLabels": service["spec"]["selector"]}
        return [
            pod
            for pod in self._api.store.list_items(_PODS, service["metadata"]["namespace"])
            if selectors.matches(chosen, pod["metadata"].get("labels") or {})
            and (pod.get("status") or {}).get("podIP")
            and pod["status"].get("phase") in ("Pending", "Running")
        ]


def _endpoint(pod: Object, service: Object) -> Object:
    meta, is_ready = pod["metadata"], pods.is_ready(pod)
    is_ending = "deletionTimestamp" in meta
    is_published = bool(service.get("publishNotReadyAddresses"))
    conditions = {
        "ready": is_published or (is_ready and not is_ending),
        "serving": is_ready,
        "terminating": is_ending,
    }
    target = {
        "kind": "Pod",
        "namespace": meta["namespace"],
        "name": meta["name"],
        "uid": meta["uid"],
    }
    endpoint = {
        "addresses": [pod["status"]["podIP"]],
        "conditions": conditions,
        "targetRef": target,
    }
    if pod["spec"].get("hostname") and pod["spec"].get("subdomain"):
        endpoint["hostname"] = pod["spec"]["hostname"]
    return {**endpoint, "nodeName": pod["spec"].get("nodeName")}


def _port(port: Object, chosen: list[Object]) -> Object:
    target = port.get("targetPort", port["port"])
    if isinstance(target, str):
        numbers = [
            pods.container_port(c, target) for pod in chosen for c in pod["spec"]["containers"]
        ]
        target = next(filter(None, numbers), None)  # fmt: skip
    return {"name": port.get("name", ""), "port": target, "protocol": port.get("protocol", "TCP")}


class Claims:
    """Binds each volume claim at once to a folder of the node, and releases those that no pod uses any more."""

    def __init__(self, served: api.Api) -> None:
        self._api = served
        self._resource = served.registry.require(*_CLAIMS)

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the claim itself, or the claims of a pod that is gone."""
        meta = change.item["metadata"]
        if change.table == _CLAIMS:
            yield meta["namespace"], meta["name"]
        elif change.table == _PODS and change.type == "DELETED":
            for name in pods.claim_names(change.item):
                yield meta["namespace"], name

    async def reconcile(self, key: Hashable) -> float | None:
        """Bind or release one claim."""
        namespace, name = cast("store.Name", key)
        item = self._api.store.get(_CLAIMS, (namespace, name))
        if item is None:
            return None
        meta = item["metadata"]
        if meta.get("deletionTimestamp"):
            present = self._api.store.list_items(_PODS, namespace)
            if _PROTECTION in (meta.get("finalizers") or ()) and not any(
                name in pods.claim_names(pod) for pod in present
            ):
                remaining = [
                    finalizer for finalizer in meta["finalizers"] if finalizer != _PROTECTION
                ]
                change = {"metadata": {"finalizers": remaining}}
                await self._api.merge(self._resource, item, change)
        elif item["status"].get("phase") != "Bound":
            bound = {"spec": {"volumeName": f"pvc-{meta['uid']}"}}
            await self._api.merge(self._resource, item, bound)
            requests = (item["spec"].get("resources") or {}).get("requests") or {}
            status = {
                "phase": "Bound",
                "accessModes": item["spec"].get("accessModes") or [],
                "capacity": requests,
            }
            await self._api.merge(self._resource, item, {"status": status}, "status")
        return None
