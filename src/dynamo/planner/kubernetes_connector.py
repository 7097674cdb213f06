"""The Kubernetes connector: orders replicas of a DynamoGraphDeployment, and tells its pods apart.

The operator names the deployment to the planner's pod. A service of it whose `subComponentType`, or name, is prefill is
the prefill pool, the other worker service the decode pool. An order sets the replicas of the service, or of its scaling
adapter where it has one; the operator carries it out, so nothing waits here. A pod serves when it is ready, drains
while it is deleted, and starts otherwise; one that cannot be scheduled or start says why.
"""

import datetime
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any
from urllib import parse

from dynamo.base import addresses, errors
from dynamo.base import clock as clocks
from dynamo.planner.observation import PoolState
from dynamo.planner.scaling_pipeline import Decision
from dynamo.protocols import pod_states
from dynamo.runtime.backends.kubernetes import connection

Object = dict[str, Any]
API_VERSION = "nvidia.com/v1alpha1"
GRAPH = "DynamoGraphDeployment"
ADAPTER = "DynamoGraphDeploymentScalingAdapter"
_COMPONENT = "nvidia.com/dynamo-component"
_OF_GRAPH = "nvidia.com/dynamo-graph-deployment-name"
_SELECTOR = "nvidia.com/selector"  # has the name of the Service
_SERVICE_HOST = re.compile(r"([a-z][-a-z0-9]*)(?:\.([-a-z0-9]+)(?:\.svc(?:\..*)?)?)?")
_LONGEST_START_S = 3600.0
_HARMLESS = ("ContainerCreating", "PodInitializing")  # reasons for which a container waits


class KubernetesConnector:
    """The worker services of one DynamoGraphDeployment."""

    def __init__(
        self,
        kubernetes: connection.KubernetesConnection,
        environ: Mapping[str, str],
        *,
        clock: clocks.Clock,
    ) -> None:
        """Raises ConfigError if the environment does not name the deployment."""
        self._kubernetes = kubernetes
        self._graph_name = environ.get("DYN_PARENT_DGD_K8S_NAME", "")
        if not self._graph_name:
            raise errors.ConfigError(
                "--environment kubernetes needs DYN_PARENT_DGD_K8S_NAME: the operator sets it in pods of a"
                " DynamoGraphDeployment; elsewhere use --environment local or virtual"
            )
        self._namespace = environ.get("DYN_PARENT_DGD_K8S_NAMESPACE") or kubernetes.namespace
        self._clock = clock
        # by service: when the last order was given, or no pod was missing
        self._complete_at: dict[str, float] = {}
        self._startups_s: dict[str, dict[str, float]] = {}  # by service and uid of a pod

    async def observe(self) -> tuple[PoolState, PoolState]:
        """Return the prefill pool and the decode pool. Raises Unavailable, ConfigError."""
        services = await self._read_services()
        prefill, decode = [await self._observe_service(service) for service in services]
        return prefill, decode

    async def scale(self, decision: Decision) -> None:
        """Set the replicas of both services where they differ. Raises Unavailable; ConfigError if one is missing."""
        services = await self._read_services()
        for service, replicas in zip(services, decision.replicas, strict=True):
            if service is None or replicas == service[1].get("replicas", 1):
                continue
            name, spec = service
            self._complete_at[name] = self._clock.now()
            if has_scaling_adapter(spec):
                adapter = self._adapter_name(name)
                await self._kubernetes.scale(
                    API_VERSION, ADAPTER, adapter, replicas, self._namespace
                )
            else:
                changes = {"spec": {"services": {name: {"replicas": replicas}}}}
                await self._kubernetes.patch(
                    API_VERSION, GRAPH, self._graph_name, changes, self._namespace
                )
        for pool, service, replicas in zip(
            ("prefill", "decode"), services, decision.replicas, strict=True
        ):
            if service is None and replicas:
                raise errors.ConfigError(
                    f"{self._graph_name} has no {pool} service, of which {replicas} workers are wanted: add one, or"
                    " choose another --mode"
                )

    async def find_frontends(self, url: str) -> Sequence[str]:
        """Return the URLs of the ready pods behind a Service of this deployment; another URL as it is.

        Raises Unavailable.
        """
        parts = parse.urlsplit(url)
        host = _SERVICE_HOST.fullmatch(parts.hostname or "")
        if host is None or host[2] not in (None, self._namespace):
            return (url,)
        labels = f"{_OF_GRAPH}={self._graph_name},{_SELECTOR}={host[1]}"
        pods = await self._kubernetes.list("v1", "Pod", self._namespace, labels=labels)
        ready = [pod for pod in pods if is_present(pod) and _ready_at(pod) is not None]
        hosts = sorted(pod["status"]["podIP"] for pod in ready if pod["status"].get("podIP"))
        port = parts.port or 80
        return [f"{parts.scheme}://{addresses.join(each, port)}" for each in hosts] or (url,)

    async def close(self) -> None:
        """Leave the workers as they are."""
        await self._kubernetes.close()

    async def _read_services(self) -> tuple["Service | None", "Service | None"]:
        graph = await self._kubernetes.get(API_VERSION, GRAPH, self._graph_name, self._namespace)
        if graph is None:
            raise errors.Unavailable(
                f"there is no {GRAPH} {self._graph_name} in namespace {self._namespace}"
            )
        prefill, decode = [await self._with_adapted(each) for each in worker_services(graph)]
        return prefill, decode

    async def _with_adapted(self, service: "Service | None") -> "Service | None":
        """Return a service with the replicas of its scaling adapter, where it has one; the graph keeps its own."""
        if service is None or not has_scaling_adapter(service[1]):
            return service
        name, spec = service
        adapter = await self._kubernetes.get(
            API_VERSION, ADAPTER, self._adapter_name(name), self._namespace
        )
        if adapter is None:  # the operator is about to make it
            return service
        return name, {**spec, "replicas": adapter["spec"]["replicas"]}

    def _adapter_name(self, service: str) -> str:
        return f"{self._graph_name}-{service.lower()}"

    async def _observe_service(self, service: "Service | None") -> PoolState:
        if service is None:
            return PoolState()
        name, spec = service
        labels = f"{_OF_GRAPH}={self._graph_name},{_COMPONENT}={name}"
        listed = await self._kubernetes.list("v1", "Pod", self._namespace, labels=labels)
        pods = [pod for pod in listed if not pod_states.is_follower(pod)]
        now, num_ordered = self._clock.now(), spec.get("replicas", 1)
        if sum(map(is_present, pods)) >= num_ordered:
            self._complete_at[name] = now
        return pool_state(
            pods,
            num_ordered=num_ordered,
            ordered_at=self._complete_at.setdefault(name, now),
            started_at=now - self._clock.wall(),
            startups_s=self._startups_s.setdefault(name, {}),
        )


def open_connector(clock: clocks.Clock) -> KubernetesConnector:
    """Open the connector of the deployment that this pod belongs to. Raises ConfigError."""
    return KubernetesConnector(connection.KubernetesConnection.open(), os.environ, clock=clock)


Service = tuple[str, Object]  # its name in the deployment, and its spec


def worker_services(graph: Object) -> tuple[Service | None, Service | None]:
    """Return the prefill service and the decode service; None for one that is not there. Raises ConfigError."""
    prefill: list[Service] = []
    decode: list[Service] = []
    for name, spec in (graph["spec"].get("services") or {}).items():
        if str(spec.get("componentType") or "").lower() == "worker":
            kind = (spec.get("subComponentType") or name).lower()
            (prefill if "prefill" in kind else decode).append((name, spec))
    for pool in (prefill, decode):
        if len(pool) > 1:
            names = ", ".join(name for name, _ in pool)
            raise errors.ConfigError(
                f"{graph['metadata']['name']}: expected one prefill and one decode service, got {names};"
                " tell them apart by subComponentType"
            )
    return prefill[0] if prefill else None, decode[0] if decode else None


def has_scaling_adapter(spec: Object) -> bool:
    """Return True if the replicas of a service belong to its scaling adapter."""
    adapter = spec.get("scalingAdapter")
    return isinstance(adapter, dict) and bool(adapter.get("enabled"))


def is_present(pod: Object) -> bool:
    """Return True for a pod that runs or will, and is not being deleted."""
    return "deletionTimestamp" not in pod["metadata"] and not pod_states.has_ended(pod)


def pool_state(
    pods: Sequence[Object],
    *,
    num_ordered: int,
    ordered_at: float,
    started_at: float,
    startups_s: dict[str, float],
) -> PoolState:
    """Tell the pods of a service apart.

    `started_at` is the planner's clock at 1970, to bring the times of pods to it. Ordered replicas that have no pod yet
    are starting since `ordered_at`; pods above the order, which are about to be deleted, count as draining. Pods that
    have ended hold nothing. A pod that was ready and failed a probe is starting since then. `startups_s` keeps the
    seconds in which each ready pod has started, by its uid: the time at which it is ready again, after a failed probe,
    says nothing of a start. Where that was before the first observation, it is mostly too late for a start. While none
    is ready, the pods that were there before count.
    """
    present = [pod for pod in pods if is_present(pod)]
    starting = [pod for pod in present if _ready_at(pod) is None]
    for pod in present:
        if (ready_at := _ready_at(pod)) is not None:
            startup_s = ready_at - _created_at(pod)
            if startup_s <= _LONGEST_START_S:
                startups_s.setdefault(pod["metadata"]["uid"], startup_s)
    present_uids = {pod["metadata"]["uid"] for pod in present}
    if not present_uids.isdisjoint(startups_s):
        for uid in startups_s.keys() - present_uids:
            del startups_s[uid]
    num_ready = min(len(present) - len(starting), num_ordered)
    unready_since = sorted(
        started_at + (_transition_at(pod, "False") or _created_at(pod)) for pod in starting
    )
    num_starting = max(0, num_ordered - num_ready)
    missing = [ordered_at] * (num_starting - len(unready_since))
    return PoolState(
        num_ready=num_ready,
        starting_since=tuple(sorted([*unready_since[:num_starting], *missing])),
        num_draining=sum(not pod_states.has_ended(pod) for pod in pods)
        - min(len(present), num_ordered),
        startup_s=statistics.median(startups_s.values()) if startups_s else None,
        failure=next((text for pod in starting if (text := _failure(pod))), ""),
    )


def _failure(pod: Object) -> str:
    """Return why a pod does not become ready, as far as the cluster says; empty if it is just starting."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return (
                f"{name} cannot be scheduled: {condition.get('message', condition.get('reason'))}"
            )
    fields = ("initContainerStatuses", "containerStatuses")
    for container in (each for field in fields for each in status.get(field) or ()):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _HARMLESS:
            return f"{name}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return ""


def _ready_at(pod: Object) -> float | None:
    """Return the time since 1970 at which a pod became ready; None if it is not."""
    return _transition_at(pod, "True")


def _transition_at(pod: Object, status: str) -> float | None:
    """Return since when the condition Ready of a pod has this status; None if it has not."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "Ready" and condition["status"] == status:
            return _seconds(condition.get("lastTransitionTime")) or _created_at(pod)
    return None


def _created_at(pod: Object) -> float:
    return _seconds(pod["metadata"].get("creationTimestamp"))


def _seconds(time: str | None) -> float:
    return datetime.datetime.fromisoformat(time).timestamp() if time else 0.0
