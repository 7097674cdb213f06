"""The keys of discovery as a cluster has them: written by pods, shown while a pod is ready. No I/O.

A pod's process writes its keys into one DynamoWorkerMetadata of the pod's name, owned by the pod. They are shown while
an EndpointSlice names the same pod, by its uid, as ready: so what an earlier pod of that name left behind is not shown,
and a pod that crashed or is terminating is not found. One that is not ready any more is not found either, unless its
process answers all the same (`discovery.KeyRetention`). A start is shown before the pod is ready, since
it tells of a worker that loads.

A pod may stand in several slices at once, and while slices are split or merged in none for a moment: a pod that
vanishes from all of them without being told unready is taken to be there for a moment more (`Slices.settle`).
"""  # decider

import base64
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dynamo.protocols import instances

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


API_VERSION = "nvidia.com/v1alpha1"
KIND = "DynamoWorkerMetadata"
SLICE_LABELS = "nvidia.com/dynamo-discovery-backend=kubernetes"
_BINARY = "base64:"
_SECTIONS = {instances.INSTANCES: "endpoints", instances.CARDS: "model_cards"}
_OTHERS = "records"


def describe_pod(name: str, namespace: str, uid: str, keys: Mapping[str, bytes]) -> Object:
    """Return the DynamoWorkerMetadata of a pod with these keys."""
    data: dict[str, dict[str, str]] = {name: {} for name in (*_SECTIONS.values(), _OTHERS)}
    for key, value in keys.items():
        section = next((s for prefix, s in _SECTIONS.items() if key.startswith(prefix)), _OTHERS)
        data[section][key] = _to_text(value)
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace, "ownerReferences": [owner]},
        "spec": {"data": data},
    }


class PodKeys(NamedTuple):
    """The keys that one pod wrote; `uid` is None if its metadata names no pod."""

    uid: str | None
    value_by_key: dict[str, bytes]


def read_keys(metadata: Object) -> PodKeys:
    """Return the keys of a DynamoWorkerMetadata; what others wrote there and is no key is left out."""
    owners = metadata["metadata"].get("ownerReferences", ())
    sections = (metadata.get("spec") or {}).get("data") or {}
    value_by_key: dict[str, bytes] = {}
    for section in (*_SECTIONS.values(), _OTHERS):
        for key, text in (sections.get(section) or {}).items():
            if isinstance(text, str):
                with contextlib.suppress(ValueError):
                    value_by_key[key] = _to_bytes(text)
    uid = next((owner["uid"] for owner in owners if owner["kind"] == "Pod"), None)
    return PodKeys(uid, value_by_key)


def living_keys(pods: Iterable[PodKeys], slices: "Slices") -> dict[str, bytes]:
    """Return the keys of all pods that are ready, and the starts of those that are not ready yet."""
    living: dict[str, bytes] = {}
    for pod in pods:
        is_ready = slices.readiness(pod.uid)
        if is_ready:
            living |= pod.value_by_key
        elif is_ready is False:
            living |= {
                key: value
                for key, value in pod.value_by_key.items()
                if key.startswith(instances.STARTS)
            }
    return living


def unready_keys(pods: Iterable[PodKeys], slices: "Slices") -> set[str]:
    """Return the keys of the pods that are there and not ready."""
    return {key for pod in pods if slices.readiness(pod.uid) is False for key in pod.value_by_key}


class Slices:
    """The pods that the EndpointSlices of a cluster name, by uid, and which of them are ready."""

    def __init__(self) -> None:
        self._pods_by_slice: dict[str, dict[str, bool]] = {}
        self._vanished: dict[str, bool] = {}  # from all slices, until `settle`

    def set(self, slice_: Object) -> bool:
        """Take the state of a slice; return True if a pod has vanished from all slices, until `settle`."""
        pods: dict[str, bool] = {}
        terminating = set()
        for endpoint in slice_.get("endpoints") or ():
            target, conditions = endpoint.get("targetRef") or {}, endpoint.get("conditions") or {}
            if target.get("kind") != "Pod":
                continue
            if conditions.get("terminating"):
                terminating.add(target["uid"])
            else:
                pods[target["uid"]] = conditions.get("ready", True) is not False
        before = self._pods_by_slice.get(slice_["metadata"]["name"], {})
        self._pods_by_slice[slice_["metadata"]["name"]] = pods
        for uid in before.keys() - terminating:
            if self._told(uid) is None:
                self._vanished[uid] = before[uid]
        for uid in pods.keys() | terminating:
            self._vanished.pop(uid, None)
        return bool(self._vanished)

    def remove(self, slice_: Object) -> bool:
        """Take the deletion of a slice; return True if a pod has vanished from all slices, until `settle`."""
        return self.set({"metadata": slice_["metadata"]})

    def settle(self) -> None:
        """Take it that the vanished pods are gone."""
        self._vanished.clear()

    def readiness(self, uid: str | None) -> bool | None:
        """Return True if any slice names the pod as ready, False if it is not ready, None if no slice names it."""
        if uid is None:
            return None
        is_ready = self._told(uid)
        return self._vanished.get(uid) if is_ready is None else is_ready

    def _told(self, uid: str) -> bool | None:
        mentions = [pods[uid] for pods in self._pods_by_slice.values() if uid in pods]
        return any(mentions) if mentions else None


def _to_text(value: bytes) -> str:
    """Return a value as text that people can read in the object, if it is text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return _BINARY + base64.b64encode(value).decode()
    return _BINARY + base64.b64encode(value).decode() if text.startswith(_BINARY) else text


def _to_bytes(text: str) -> bytes:
    if text.startswith(_BINARY):
        return base64.b64decode(text.removeprefix(_BINARY))
    return text.encode()
