"""What a pod's specification and status say: readiness, ports, environment, phase and conditions. No I/O."""

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo.testing.kube import builtin_rules

Object = dict[str, Any]
Lookup = Callable[[str, str], Object | None]  # kind and name in the pod's namespace → object


def is_ready(pod: Object) -> bool:
    """Return whether a pod's Ready condition is true."""
    return has_condition(pod, "Ready")


def has_condition(item: Object, kind: str) -> bool:
    return any(
        condition["type"] == kind and condition["status"] == "True"
        for condition in (item.get("status") or {}).get("conditions") or ()
    )


def container_port(container: Object, port: Any) -> int | None:
    """Return the number of a port that may be given by name."""
    if isinstance(port, int) or str(port).isdigit():
        return int(port)
    for declared in container.get("ports") or ():
        if declared.get("name") == port:
            return int(declared["containerPort"])
    return None


def claim_names(pod: Object) -> list[str]:
    """Return the volume claims that a pod uses."""
    return [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"].get("volumes") or ()
        if "persistentVolumeClaim" in volume
    ]


@dataclass(slots=True)
class ContainerState:
    """The state of one container, as its status shows it."""

    spec: Object
    restarts: int = 0
    is_ready: bool = False
    is_started: bool = False
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Object = field(default_factory=dict)
    is_out_of_memory: bool = False  # it was killed for that, in this run

    @property
    def memory_limit(self) -> float:
        """Return the most bytes that it may hold, or infinity."""
        limits = (self.spec.get("resources") or {}).get("limits") or {}
        return (
            float(builtin_rules.parse_quantity(limits["memory"]))
            if "memory" in limits
            else math.inf
        )

    @property
    def is_sidecar(self) -> bool:
        """Return True for a container among those before the start that goes on beside the others."""
        return self.spec.get("restartPolicy") == "Always"

    def status(self, pod_uid: str) -> Object:
        """Return the entry of the pod's status."""
        return {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": "",
            "containerID": f"process://{pod_uid}/{self.spec['name']}-{self.restarts}",
            "restartCount": self.restarts,
            "ready": self.is_ready,
            "started": self.is_started,
            "state": self.state,
            "lastState": self.last_state,
        }


class MissingReference(Exception):
    """A container refers to a config map, secret or key that does not exist."""


def environment(pod: Object, container: Object, address: str, lookup: Lookup) -> dict[str, str]:
    """Return the variables that a container's specification sets. Raises MissingReference."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        kind = "ConfigMap" if "configMapRef" in source else "Secret"
        reference = source.get("configMapRef") or source.get("secretRef") or {}
        content = _data(kind, reference, lookup)
        prefix = source.get("prefix", "")
        variables.update({prefix + name: _text(value) for name, value in content.items()})
    for entry in container.get("env") or ():
        source = entry.get("valueFrom")
        if source is None:
            variables[entry["name"]] = expand(entry.get("value", ""), variables)
            continue
        value = _referenced(pod, container, source, address, lookup)
        if value is not None:
            variables[entry["name"]] = value
    return variables


def _referenced(
    pod: Object, container: Object, source: Object, address: str, lookup: Lookup
) -> str | None:
    if "fieldRef" in source:
        return read_field(pod, source["fieldRef"]["fieldPath"], address)
    if "resourceFieldRef" in source:
        return _count_resource(pod, source["resourceFieldRef"], container)
    kind = "ConfigMap" if "configMapKeyRef" in source else "Secret"
    reference = source.get("configMapKeyRef") or source["secretKeyRef"]
    content, key = _data(kind, reference, lookup), reference["key"]
    if key not in content:
        if reference.get("optional"):
            return None
        place = f"{kind} {reference['name']}"
        raise MissingReference(f"couldn't find key {key} in {place}")
    return _text(content[key])


def _text(value: bytes) -> str:
    """Return what stands for these bytes in the environment of a process; they need not be text."""
    return value.decode("utf-8", "surrogateescape")


def _count_resource(pod: Object, reference: Object, own: Object) -> str:
    """Return an amount of a container's resources in whole cores or bytes, or in whole divisors, rounded up.

    The container is the one that the reference names, by default its own.
    """
    containers = (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"])
    named = (each for each in containers if each["name"] == reference.get("containerName"))
    container = next(named, own)
    kind, _, name = reference["resource"].partition(".")
    amount = ((container.get("resources") or {}).get(kind) or {}).get(name, "0")
    divisor = builtin_rules.parse_quantity(reference.get("divisor") or "1") or 1
    return str(math.ceil(builtin_rules.parse_quantity(amount) / divisor))


def _data(kind: str, reference: Object, lookup: Lookup) -> dict[str, bytes]:
    item = lookup(kind, reference["name"])
    if item is None:
        if reference.get("optional"):
            return {}
        raise MissingReference(f'{kind.lower()} "{reference["name"]}" not found')
    return file_contents(item)


def file_contents(item: Object) -> dict[str, bytes]:
    """Return the entries of a config map or secret."""
    if item["kind"] == "Secret":
        return {name: base64.b64decode(text) for name, text in (item.get("data") or {}).items()}
    binary = {name: base64.b64decode(text) for name, text in (item.get("binaryData") or {}).items()}
    return {**{name: text.encode() for name, text in (item.get("data") or {}).items()}, **binary}


def read_field(pod: Object, path: str, address: str) -> str:
    """Return a field of the downward API."""
    meta = pod["metadata"]
    match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if match is not None:
        return str((meta.get(match[1]) or {}).get(match[2], ""))
    values = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.podIP": address,
        "status.podIPs": address,
        "status.hostIP": "127.0.0.1",
        "status.hostIPs": "127.0.0.1",
    }
    return str(values.get(path, ""))


def downward_file(pod: Object, item: Object) -> bytes:
    """Return the content of an item of a downward API volume: a field, all labels or annotations, or an amount."""
    if "resourceFieldRef" in item:
        return _count_resource(pod, item["resourceFieldRef"], {}).encode()
    path = item["fieldRef"]["fieldPath"]
    if path not in ("metadata.labels", "metadata.annotations"):
        return read_field(pod, path, "").encode()
    values = pod["metadata"].get(path.partition(".")[2]) or {}
    lines = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    return "\n".join(sorted(lines)).encode()


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the variable, where there is one, and `$$` by `$`."""
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))",
        lambda match: "$" if match[1] is None else variables.get(match[1], match[0]),
        text,
    )


def status_of(
    pod: Object, states: list[ContainerState], inits: list[ContainerState], address: str, now: str
) -> Object:
    """Return the status of a pod from the states of its containers."""
    steps = [state for state in inits if not state.is_sidecar]
    sidecars = [state for state in inits if state.is_sidecar]
    has_begun = any(
        state.state.keys() & {"running", "terminated"} or state.restarts for state in states
    )
    is_initialized = has_begun or (
        all(_exit_code(state) == 0 for state in steps)
        and all(state.is_started for state in sidecars)
    )
    phase = _phase_of(pod["spec"]["restartPolicy"], states, steps, has_begun=has_begun)
    unready = [state.spec["name"] for state in (*sidecars, *states) if not state.is_ready]
    reason = "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
    text = f"containers with unready status: [{' '.join(unready)}]"
    uninitialized = (
        f"containers with incomplete status: [{' '.join(s.spec['name'] for s in inits)}]"
    )
    conditions = [
        _condition(pod, "PodReadyToStartContainers", True, now),
        _condition(pod, "Initialized", is_initialized, now, "ContainersNotInitialized", uninitialized),
        _condition(pod, "Ready", not unready, now, reason, text),
        _condition(pod, "ContainersReady", not unready, now, reason, text),
        _condition(pod, "PodScheduled", True, now),
    ]  # fmt: skip
    uid, before = pod["metadata"]["uid"], pod.get("status") or {}
    status = {
        **before,
        "phase": phase,
        "startTime": before.get("startTime", now),
        "hostIP": "127.0.0.1",
        "hostIPs": [{"ip": "127.0.0.1"}],
        **({"podIP": address, "podIPs": [{"ip": address}]} if address else {}),
        "conditions": conditions,
        "containerStatuses": [state.status(uid) for state in states],
    }
    if inits:
        status["initContainerStatuses"] = [state.status(uid) for state in inits]
    return status


def _phase_of(
    policy: str,
    states: Sequence[ContainerState],
    steps: Sequence[ContainerState],
    *,
    has_begun: bool,
) -> str:
    codes = [_exit_code(state) for state in states]
    is_over = policy != "Always" and None not in codes
    if (is_over and any(codes)) or (policy == "Never" and any(map(_exit_code, steps))):
        return "Failed"
    if is_over:
        return "Succeeded"
    return "Running" if has_begun else "Pending"


def _exit_code(state: ContainerState) -> int | None:
    code: int | None = state.state.get("terminated", {}).get("exitCode")
    return code


def _condition(
    pod: Object, kind: str, is_true: bool, now: str, reason: str = "", message: str = ""
) -> Object:
    status = "True" if is_true else "False"
    condition = {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": now}
    for before in (pod.get("status") or {}).get("conditions") or ():
        if before["type"] == kind and before["status"] == status:
            condition["lastTransitionTime"] = before["lastTransitionTime"]
    return condition if is_true else {**condition, "reason": reason, "message": message}
