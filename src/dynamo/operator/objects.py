"""Plain Kubernetes objects: names, owners, labels, digests and merges, without any I/O."""  # decider

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from dynamo.operator import api_types
from dynamo.protocols import pod_states

Object = dict[str, Any]
FIELD_MANAGER = "dynamo-operator"
MANAGED_BY = "app.kubernetes.io/managed-by"
_PREFIX = f"{api_types.GROUP}/"
GRAPH_LABEL = f"{_PREFIX}dynamo-graph-deployment-name"
SELECTOR_LABEL = f"{_PREFIX}selector"
COMPONENT_LABEL = f"{_PREFIX}dynamo-component"
NAMESPACE_LABEL = f"{_PREFIX}dynamo-namespace"
TYPE_LABEL = f"{_PREFIX}dynamo-component-type"
SUBTYPE_LABEL = f"{_PREFIX}dynamo-sub-component-type"
CLASS_LABEL = f"{_PREFIX}dynamo-component-class"
METRICS_LABEL = f"{_PREFIX}metrics-enabled"
DISCOVERY_LABEL = f"{_PREFIX}dynamo-discovery-backend"
HASH_LABEL = f"{_PREFIX}dynamo-worker-hash"
REQUEST_LABEL = f"{_PREFIX}dgdr-name"
TEMPLATE_LABEL = f"{_PREFIX}dynamo-template-hash"
SPEC_ANNOTATION = f"{_PREFIX}dynamo-spec-hash"
TOKEN_ANNOTATION = f"{_PREFIX}cluster-token-renewed-at"
_LIST_KEYS = {
    "env": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
    "ports": "name",
    "containers": "name",
    "initContainers": "name",
}


_PROBE_HANDLERS = {"exec", "grpc", "httpGet", "tcpSocket"}


@dataclass(frozen=True, slots=True)
class Reference:
    """The address of an object within a namespace."""

    api_version: str
    kind: str
    name: str


class Start(msgspec.Struct, frozen=True, rename="camel"):
    """How far the start of a worker is, as its system port tells it."""

    stage: str
    model: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None
    still_secs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the cluster has of a namespace, as far as one root object concerns it, and the time of looking."""

    now: str  # RFC 3339
    objects: Mapping[tuple[str, str], Object] = field(default_factory=dict)  # by kind and name
    owned_keys: Collection[tuple[str, str]] | None = None  # of the root; None: look at all objects
    pods: Sequence[Object] = ()
    instances: Mapping[str, int] | None = (
        None  # registered instances by dynamo namespace; None: not asked
    )
    starts: Mapping[str, Start] = field(default_factory=dict)  # of starting workers, by pod
    has_grove: bool = False  # whether the cluster serves Grove's sets

    def find(self, kind: str, name: str) -> Object | None:
        """Return the object, or None if there is none."""
        return self.objects.get((kind, name))

    def owned_by(self, owner: Object, kind: str) -> list[Object]:
        """Return the objects of a kind that this object owns or, if it is a graph, has to adopt, by name."""
        keys = self.objects if self.owned_keys is None else self.owned_keys
        # one of them may have gone while the pods were asked
        found = [
            self.objects[key] for key in sorted(keys) if key[0] == kind and key in self.objects
        ]
        graph = owner["metadata"]["name"] if owner["kind"] == "DynamoGraphDeployment" else ""
        return [
            item
            for item in found
            if is_owned(item, owner) or (graph and find_adopter(item) == graph)
        ]

    def pods_of(self, component: str, *, is_each: bool = False) -> list[Object]:
        """Return the pods that are replicas of a component; with `is_each` those that have ended or follow, too."""
        return [
            pod
            for pod in self.pods
            if labels_of(pod).get(SELECTOR_LABEL) == component
            and (is_each or pod_states.is_replica(pod))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """What brings the cluster nearer to a spec, in this order; `create` is for objects that must not be overwritten."""

    status: Object
    create: tuple[Object, ...] = ()
    patch: tuple[Object, ...] = ()  # merged, at the revision that they name
    apply: tuple[Object, ...] = ()
    delete: tuple[Reference, ...] = ()
    other_statuses: tuple[Object, ...] = ()  # of further objects


def labels_of(resource: Object) -> dict[str, str]:
    """Return the labels of an object."""
    return resource["metadata"].get("labels") or {}


def annotations_of(resource: Object) -> dict[str, str]:
    """Return the annotations of an object."""
    return resource["metadata"].get("annotations") or {}


def reference_of(resource: Object) -> Reference:
    """Return the address of an object."""
    return Reference(resource["apiVersion"], resource["kind"], resource["metadata"]["name"])


def address_of(resource: Object) -> Object:
    """Return apiVersion, kind, name and namespace of an object, as a patch needs them."""
    metadata = {key: resource["metadata"][key] for key in ("name", "namespace")}
    return {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "metadata": metadata,
    }


def explain_scaling(existing: Object, desired: Object) -> str | None:
    """Return the message for a manager whose number of replicas an apply puts back, or None if there is none."""
    replicas, present = (
        (item.get("spec") or {}).get("replicas") for item in (desired, existing)
    )  # a ConfigMap or an account has no spec
    if replicas is None or present in (None, replicas):
        return None
    for manager in managers_of_replicas(existing):
        if manager != FIELD_MANAGER:
            labels = labels_of(desired)
            graph, service = labels.get(GRAPH_LABEL), labels.get(COMPONENT_LABEL, "")
            return (
                f"{manager} set replicas to {present}, and the operator put back {replicas}:"
                f" change spec.services.{service}.replicas of DynamoGraphDeployment {graph}, which v1beta1 has in"
                f" spec.components, or give the service"
                f" `scalingAdapter: {{enabled: true}}` and kubectl scale dgdsa/{graph}-{service.lower()}"
                f" --replicas={present}"
            )
    return None


def managers_of_replicas(existing: Object) -> list[str]:
    """Return the field managers that set the replicas of an object."""
    return [
        str(entry.get("manager"))
        for entry in existing["metadata"].get("managedFields") or ()
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]


def make_object(
    api_version: str,
    kind: str,
    name: str,
    owner: Object,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **content: Any,
) -> Object:
    """Return an object of the owner's namespace that is deleted with its owner."""
    metadata: Object = {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": {**(labels or {}), MANAGED_BY: FIELD_MANAGER},
        "ownerReferences": [owner_reference(owner)],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def owner_reference(owner: Object) -> Object:
    """Return the entry of ownerReferences that names a controlling owner."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_owned(resource: Object, owner: Object) -> bool:
    """Return True if `owner`, this very object and not one of the same name, owns the other."""
    uid = owner["metadata"]["uid"]
    return any(entry["uid"] == uid for entry in resource["metadata"].get("ownerReferences") or ())


def find_adopter(resource: Object) -> str | None:
    """Return the name of the graph that an object was made for if nothing owns it; None for other objects.

    A backup may be restored without owners, and a graph may be deleted without what it owns.
    """
    metadata = resource["metadata"]
    labels = metadata.get("labels") or {}
    if metadata.get("ownerReferences") or labels.get(MANAGED_BY) != FIELD_MANAGER:
        return None
    return labels.get(GRAPH_LABEL)


def make_adoption(existing: Object, owners: list[Object]) -> Object:
    """Return the patch that gives an object these owners, unless it has changed meanwhile."""
    address = address_of(existing)
    revision = {"resourceVersion": existing["metadata"]["resourceVersion"]}
    return {**address, "metadata": {**address["metadata"], **revision, "ownerReferences": owners}}


def digest(content: Any, length: int = 8) -> str:
    """Return the first hexadecimal digits of the SHA-256 of a value, whatever the order of its keys."""
    encoded = msgspec.json.encode(content, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:length]


def merge(defaults: Any, overrides: Any, key: str = "") -> Any:
    """Return `overrides` laid over `defaults`: mappings field by field, lists with a merge key item by item.

    What a probe asks is replaced whole: a pod with two ways to ask is refused.
    """
    if isinstance(defaults, dict) and isinstance(overrides, dict):
        if key.endswith("Probe") and not _PROBE_HANDLERS.isdisjoint(overrides):
            handlers = _PROBE_HANDLERS - overrides.keys()
            defaults = {name: value for name, value in defaults.items() if name not in handlers}
        return {
            name: merge(defaults[name], overrides[name], name)
            if name in defaults and name in overrides
            else overrides.get(name, defaults.get(name))
            for name in [*defaults, *(name for name in overrides if name not in defaults)]
        }
    if key in _LIST_KEYS and isinstance(defaults, list) and isinstance(overrides, list):
        return merge_lists(defaults, overrides, _LIST_KEYS[key])
    return overrides


def merge_lists(defaults: Iterable[Object], overrides: Iterable[Object], key: str) -> list[Object]:
    """Return the items of both lists; of two with the same key the second replaces the first, in its place."""
    # by the form of the key, which may be of any type: the cluster refuses it
    merged = {repr(item.get(key)): item for item in defaults}
    for item in overrides:
        merged[repr(item.get(key))] = item
    return list(merged.values())


def name_ports(ports: Iterable[Object], named_ports: Iterable[Object]) -> list[Object]:
    """Return ports, nameless ones with the name of their number, under which a merged list would hold a second one."""
    name_by_number = {
        repr(entry["containerPort"]): {"name": entry["name"]} for entry in named_ports
    }
    return [
        {**name_by_number.get(repr(entry.get("containerPort")), {}), **entry} for entry in ports
    ]


def format_time(wall: float) -> str:
    """Return seconds since 1970 as objects have times: RFC 3339, in UTC."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def state_of(resource: Object | None) -> str:
    """Return the state that an object's status has, else ready, not_ready or unknown by its first condition."""
    status = (resource or {}).get("status") or {}
    first = (status.get("conditions") or [{}])[0].get("status")
    by_condition = {"True": "ready", "False": "not_ready"}
    return str(status.get("state") or by_condition.get(first, "unknown"))


def find_condition(resource: Object | None, kind: str) -> Object:
    """Return the condition of this type of an object's status, or an empty one."""
    conditions = ((resource or {}).get("status") or {}).get("conditions") or ()
    return next((entry for entry in conditions if entry.get("type") == kind), {})


def is_ready(pod: Object) -> bool:
    """Return whether a pod is ready."""
    return find_condition(pod, "Ready").get("status") == "True"


def is_available(workload: Object, num_wanted: int) -> bool:
    """Return True if a workload has all its pods, in the present form of its template."""
    status = workload.get("status") or {}
    generation = workload["metadata"].get("generation", 0)
    # the controllers of earlier LeaderWorkerSets do not say which one they have seen
    unsaid = generation if workload["kind"] == "LeaderWorkerSet" else 0
    num_available = status.get("availableReplicas", status.get("readyReplicas", 0))
    num_updated = status.get("updatedReplicas", 0)
    return bool(
        status.get("observedGeneration", unsaid) >= generation
        and min(num_updated, num_available) >= num_wanted
        and status.get("replicas", 0)
        <= num_updated  # else those of the former form may be what is available
    )


def make_condition(
    kind: str, is_true: bool, reason: str, message: str, owner: Object, now: str
) -> Object:
    """Return a condition for the owner's generation; the time of transition stays while the status does."""
    status = "True" if is_true else "False"
    previous = find_condition(owner, kind)
    is_same = previous.get("status") == status and "lastTransitionTime" in previous
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message[:32_768],
        "lastTransitionTime": previous["lastTransitionTime"] if is_same else now,
        "observedGeneration": owner["metadata"].get("generation", 0),
    }
