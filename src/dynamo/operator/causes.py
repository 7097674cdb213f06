"""The first cause of a component that is not ready, in one sentence, read from its pods.

Only pods of the present template count. Of several causes the one that nothing else explains comes first: a pod that
cannot be placed says nothing of its image, and one without its image says nothing of its program.
"""  # decider

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dynamo.operator import objects
from dynamo.operator.objects import Object
from dynamo.protocols import pod_states

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_INSUFFICIENT = re.compile(r"Insufficient ([\w./-]+)")
_MAX_LOG = 300


# An earlier reason explains the later ones.
_ORDER = (
    "InvalidSpec", "PodsRefused", "VolumeMissing", "Unschedulable", "Evicted", "ImagePull", "ContainerConfig",
    "OutOfMemory", "CrashLoop", "Completed", "Downloading", "Loading", "SecretMissing", "Starting", "Waiting",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a component is not ready."""

    reason: str  # in camel case, as conditions have it
    message: str
    unready_container: str = ""  # the one that runs and is not ready, if that is why

    @property
    def rank(self) -> int:
        """Return the place of the reason: a lower one explains those of higher ranks."""
        return _ORDER.index(self.reason) if self.reason in _ORDER else len(_ORDER)


def select_first(candidates: Iterable[Cause], default: Cause) -> Cause:
    """Return the cause that explains the others, or the default if there is none."""
    return min(candidates, key=lambda cause: cause.rank, default=default)


def find_component_cause(item: Object, observed: objects.Observed) -> Cause | None:
    """Return why a component is not available in its desired form, or None if it is."""
    existing = observed.find(item["kind"], item["metadata"]["name"])
    service = item["metadata"]["labels"][objects.COMPONENT_LABEL]
    annotation = item["metadata"]["annotations"][objects.SPEC_ANNOTATION]
    metadata = (existing or {}).get("metadata", {})
    observed_generation = (existing or {}).get("status", {}).get("observedGeneration", -1)
    is_current = (metadata.get("annotations") or {}).get(objects.SPEC_ANNOTATION) == annotation
    if not is_current or observed_generation < metadata.get("generation", 0):
        return Cause("Waiting", f"service {service} is being made")
    condition = objects.find_condition(existing, "Available")
    if condition.get("status") == "True":
        return None
    message = str(condition.get("message", "")).removeprefix(f"service {service}: ")
    return Cause(condition.get("reason", "Waiting"), f"service {service}: {message}")


def first_cause(
    pods: Sequence[Object],
    *,
    template_hash: str,
    missing: Iterable[Cause] = (),
    num_wanted: int,
    starts: Mapping[str, objects.Start] = MappingProxyType({}),
) -> Cause:
    """Return the first cause among the pods of a template that is not ready, or that they only need time.

    `starts` has how far those are that tell it, by the name of their pod.
    """
    current = [
        pod
        for pod in pods
        if objects.labels_of(pod).get(objects.TEMPLATE_LABEL) == template_hash
        and "deletionTimestamp" not in pod["metadata"]
    ]
    living = [pod for pod in current if not pod_states.has_ended(pod)]
    if len(living) >= num_wanted:  # what ended has been replaced
        current = living
    causes = [*missing, *(cause for pod in current if (cause := pod_cause(pod)))]
    for pod in current:
        name = pod["metadata"]["name"]
        if name in starts and is_starting(pod):
            causes.append(_start_cause(name, starts[name]))
    num_ready = sum(map(objects.is_ready, current))
    text = f"{num_ready} of {num_wanted} pods are ready"
    if num_ready >= num_wanted:
        text = "its pods are ready, and the cluster has not counted them yet"
    waiting = Cause("Starting", text)
    return select_first(causes, waiting)


def find_refusals(workload: Object | None) -> list[Cause]:
    """Return the cause for which the cluster makes no pods of a Deployment, such as a quota or a pod security level."""
    refusal = objects.find_condition(workload, "ReplicaFailure")
    if refusal.get("status") != "True":
        return []
    return [Cause("PodsRefused", f"the cluster refuses pods: {refusal.get('message', '')}")]


def pod_cause(pod: Object) -> Cause | None:
    """Return why a pod is not ready, or None if it is."""
    if objects.is_ready(pod):
        return None
    name = pod["metadata"]["name"]
    placed = objects.find_condition(pod, "PodScheduled")
    if placed.get("status") == "False":
        return _unschedulable(name, str(placed.get("message", "")))
    status: dict[str, Any] = pod.get("status") or {}
    if status.get("reason") == "Evicted":
        return Cause("Evicted", f"pod {name} was evicted: {status.get('message', '')}")
    containers = [
        *status.get("initContainerStatuses", ()),
        *status.get("containerStatuses", ()),
    ]
    causes = [cause for entry in containers if (cause := _container_cause(name, entry))]
    return select_first(causes, Cause("Starting", f"pod {name} is starting"))


def is_starting(pod: Object) -> bool:
    """Return True for a pod that runs, is not ready, and has nothing wrong that Kubernetes knows of."""
    cause = pod_cause(pod)
    address = (pod.get("status") or {}).get("podIP")
    return cause is not None and cause.reason == "Starting" and bool(address)


def _start_cause(name: str, start: objects.Start) -> Cause:
    minutes = start.still_secs // 60
    still = f", and has not moved for {minutes} min" if minutes else ""
    if start.stage != "download":
        return Cause("Loading", f"pod {name} loads its model{still}")
    progress = f"{start.done_bytes / 1e9:.1f} GB so far"
    if start.total_bytes:
        share = start.done_bytes / start.total_bytes
        progress = f"{int(100 * share)} % of {start.total_bytes / 1e9:.1f} GB"
    return Cause("Downloading", f"pod {name} downloads {start.model}: {progress}{still}")


def _unschedulable(name: str, message: str) -> Cause:
    if "persistentvolumeclaim" in message:
        return Cause("VolumeMissing", f"pod {name} cannot be placed: {message}")
    lacking = sorted(set(_INSUFFICIENT.findall(message)))
    text = f"no node has enough {' and '.join(lacking)}" if lacking else message
    return Cause("Unschedulable", f"pod {name} cannot be placed: {text or 'no node fits'}")


def _container_cause(pod: str, entry: Object) -> Cause | None:
    state = entry.get("state") or {}
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    container = "" if entry["name"] == "main" else f" (container {entry['name']})"
    if reason in _IMAGE_REASONS:
        detail = f": {text}" if (text := waiting.get("message")) else ""
        image = entry.get("image", "")
        return Cause("ImagePull", f"pod {pod}{container} cannot pull {image}{detail}")
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return Cause("ContainerConfig", f"pod {pod}{container}: {waiting.get('message', reason)}")
    ended = state.get("terminated") or (entry.get("lastState") or {}).get("terminated")
    if ended and not entry.get("ready"):
        return _ended_cause(f"pod {pod}{container}", ended, entry.get("restartCount", 0))
    if "running" in state and not entry.get("ready"):
        if not entry.get("started", True):
            return Cause("Starting", f"pod {pod}{container} is starting")
        return Cause("Starting", f"pod {pod}{container} runs and is not ready yet", entry["name"])
    return None


def _ended_cause(pod: str, ended: Object, num_restarts: int) -> Cause:
    log_line = next(
        (line.strip() for line in reversed(str(ended.get("message", "")).splitlines()) if line.strip()),
        "",
    )[:_MAX_LOG]  # fmt: skip
    if ended.get("reason") == "OOMKilled":
        return Cause("OutOfMemory", f"{pod} was killed for using more memory than its limit allows")
    if ended.get("exitCode") == 0 and ended.get("reason") == "Completed" and not num_restarts:
        return Cause("Completed", f"{pod} has ended without an error; a service must go on")
    text = f"{pod} ended with exit code {ended.get('exitCode')}"
    if num_restarts:
        text += " and was restarted " + ("once" if num_restarts == 1 else f"{num_restarts} times")
    return Cause("CrashLoop", f"{text}: {log_line}" if log_line else text)
