"""What the operator knows of the cluster: the last state of each object that it watches or wrote itself.

Answers to the operator's own writes are entered at once, so that it never decides on a state from before its last
write; an event that is older than what is known is left out, and so is an answer about an object whose end a watch has
told meanwhile.
"""

from collections import defaultdict
from collections.abc import Iterator

from dynamo.operator import objects
from dynamo.operator.objects import Object

MAX_GONE = 10_000  # deleted objects that are remembered
Key = tuple[str, str, str]  # kind, namespace, name
ROOTS = (
    "DynamoGraphDeployment",
    "DynamoComponentDeployment",
    "DynamoModel",
    "DynamoGraphDeploymentRequest",
)


def key_of(resource: Object) -> Key:
    """Return the address of an object."""
    metadata = resource["metadata"]
    return resource["kind"], metadata.get("namespace", ""), metadata["name"]


class ObjectCache:
    """Objects by namespace, kind and name, and those that each object owns; pods apart."""

    def __init__(self) -> None:
        self._owned: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)  # by `_owners_of`
        self._objects: dict[str, dict[tuple[str, str], Object]] = {}
        self._pods: dict[str, dict[str, Object]] = {}
        self._roots: dict[str, set[Key]] = {kind: set() for kind in ROOTS}
        self._gone: dict[str, None] = {}  # uids of deleted objects, the oldest first
        self.has_grove = False

    def apply_event(self, event: str, resource: Object) -> bool:
        """Enter one event of a watch; return False if it told nothing new.

        Secrets are not watched: those of a namespace are forgotten, and looked up again, when a graph is gone, which
        may have owned one, and while a pod lacks one.
        """
        if (event == "DELETED" and resource["kind"] in ROOTS) or _lacks_configuration(resource):
            existing = self._objects.get(resource["metadata"].get("namespace", ""), {})
            for secret in [item for key, item in existing.items() if key[0] == "Secret"]:
                self.remove(secret)
        uid = resource["metadata"].get("uid", "")
        if event == "DELETED":
            self.remove(resource)
            self._gone[uid] = None
            if len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]
            return True
        self._gone.pop(uid, None)  # a cluster that was restored has it again
        return self.put(resource)

    def put(self, resource: Object) -> bool:
        """Enter an object, unless a newer state of it, or its end, is known."""
        kind, namespace, name = key_of(resource)
        present = self.get((kind, namespace, name))
        if present is not None and is_older(resource, present):
            return False
        if resource["metadata"].get("uid") in self._gone:
            return False
        if kind == "Pod":
            self._pods.setdefault(namespace, {})[name] = resource
        else:
            self._objects.setdefault(namespace, {})[kind, name] = resource
            if kind in ROOTS:
                self._roots[kind].add((kind, namespace, name))
            if present is not None:
                self._drop_owned(present)
            for owner in _owners_of(resource):
                self._owned[owner].add((kind, name))
        return True

    def remove(self, resource: Object) -> None:
        """Forget an object, unless another one has taken its name."""
        kind, namespace, name = key_of(resource)
        present = self.get((kind, namespace, name))
        if present is None or present["metadata"].get("uid") != resource["metadata"].get("uid"):
            return
        if kind == "Pod":
            del self._pods[namespace][name]
            if not self._pods[namespace]:
                del self._pods[namespace]
        else:
            del self._objects[namespace][kind, name]
            self._roots.get(kind, set()).discard((kind, namespace, name))
            self._owned.pop(present["metadata"].get("uid"), None)
            self._drop_owned(present)
            if not self._objects[namespace]:
                del self._objects[namespace]

    def _drop_owned(self, resource: Object) -> None:
        """Take an object from those that its owners own; an owner of nothing is forgotten."""
        for owner in _owners_of(resource):
            owned = self._owned.get(owner, set())
            owned.discard((resource["kind"], resource["metadata"]["name"]))
            if not owned:
                self._owned.pop(owner, None)

    def get(self, key: Key) -> Object | None:
        """Return an object, or None if there is none."""
        kind, namespace, name = key
        if kind == "Pod":
            return self._pods.get(namespace, {}).get(name)
        return self._objects.get(namespace, {}).get((kind, name))

    def observe(self, root: Object, now: str) -> objects.Observed:
        """Return what concerns a root object: its namespace, and the pods of its graph, or all of them."""
        namespace = root["metadata"]["namespace"]
        graph = objects.labels_of(root).get(objects.GRAPH_LABEL, root["metadata"]["name"])
        pods = [
            pod
            for pod in self._pods.get(namespace, {}).values()
            if root["kind"] in ROOTS[2:] or objects.labels_of(pod).get(objects.GRAPH_LABEL) == graph
        ]
        existing = self._objects.get(namespace, {})
        owned_keys = {
            key
            for owner in (root["metadata"]["uid"], f"{namespace}/{root['metadata']['name']}")
            for key in self._owned.get(owner, ())
        }
        return objects.Observed(
            now=now,
            objects=existing,
            owned_keys=owned_keys & existing.keys(),
            pods=pods,
            has_grove=self.has_grove,
        )

    @property
    def namespaces(self) -> set[str]:
        """Return the namespaces of which anything is known."""
        return {*self._objects, *self._pods}

    def roots(self) -> list[Key]:
        """Return the addresses of all objects that are reconciled."""
        return [key for keys in self._roots.values() for key in keys]

    def roots_of(self, resource: Object) -> Iterator[Key]:
        """Yield the addresses of the objects to reconcile that an object concerns."""
        kind, namespace, name = key_of(resource)
        if kind in ROOTS:
            yield kind, namespace, name
        metadata = resource["metadata"]
        owners = [(entry["kind"], entry["name"]) for entry in metadata.get("ownerReferences") or ()]
        owners.append(("DynamoGraphDeployment", objects.find_adopter(resource) or ""))
        yield from ((owner, namespace, name) for owner, name in owners if owner in ROOTS and name)
        labels = objects.labels_of(resource)
        if objects.REQUEST_LABEL in labels:
            yield "DynamoGraphDeploymentRequest", namespace, labels[objects.REQUEST_LABEL]
        if kind == "Pod":
            if objects.GRAPH_LABEL in labels:
                yield "DynamoGraphDeployment", namespace, labels[objects.GRAPH_LABEL]
            if objects.SELECTOR_LABEL in labels:
                yield "DynamoComponentDeployment", namespace, labels[objects.SELECTOR_LABEL]
        elif kind == "PersistentVolumeClaim":  # a component may wait for it by name alone
            yield from (key for key in self.roots() if key[1] == namespace)
        is_unloaded = kind == "DynamoModel" and "deletionTimestamp" in metadata
        if (
            kind in ("Pod", "DynamoComponentDeployment") or is_unloaded
        ):  # by name: others may need it
            yield from (key for key in self._roots["DynamoModel"] if key[1] == namespace)


def _owners_of(resource: Object) -> Iterator[str]:
    """Yield the uids of an object's owners or, without one, namespace and name of the graph that it was made for."""
    metadata = resource["metadata"]
    yield from (owner["uid"] for owner in metadata.get("ownerReferences") or ())
    if graph := objects.find_adopter(resource):
        yield f"{metadata.get('namespace', '')}/{graph}"


def _lacks_configuration(resource: Object) -> bool:
    """Return True for a pod that waits for a Secret or ConfigMap."""
    states = (resource.get("status") or {}).get("containerStatuses") or ()
    waiting = [(status.get("state") or {}).get("waiting") or {} for status in states]
    return any(entry.get("reason") == "CreateContainerConfigError" for entry in waiting)


def is_older(resource: Object, present: Object) -> bool:
    """Return True for a state of an object from before the present one."""
    metadata, present = resource["metadata"], present["metadata"]
    if metadata.get("uid") != present.get("uid"):
        return False
    return int(metadata.get("resourceVersion", 0)) < int(present.get("resourceVersion", 0))
