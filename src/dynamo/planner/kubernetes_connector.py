"""The Kubernetes connector: orders replicas of a DynamoGraphDeployment, and tells its pods apart.

The operator names the deployment to the planner's pod. A service of it whose `subComponentType`, or name, is prefill is
the prefill pool, the other worker service the decode pool. An order sets the replicas of the service, or of its scaling
adapter where it has one; the operator carries it out, so nothing waits here. A pod serves when it is ready, drains
while it is deleted, and starts otherwise; one that cannot be scheduled or start says why.
"""

import datetime
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.planner.observation import PoolState
from dynamo.planner.scaling_pipeline import Decision
from dynamo.runtime.backends.kubernetes import connection

Object = dict[str, Any]
API_VERSION = "nvidia.com/v1alpha1"
GRAPH = "DynamoGraphDeployment"
ADAPTER = "DynamoGraphDeploymentScalingAdapter"
_COMPONENT = "nvidia.com/dynamo-component"
_OF_GRAPH = "nvidia.com/dynamo-graph-deployment-name"
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
        self._ordered_at: dict[str, float] = {}  # by service: the last order

    async def observe(self) -> tuple[PoolState, PoolState]:
        """Return the prefill pool and the decode pool. Raises Unavailable, ConfigError."""
        services = await self._read_services()
        prefill, decode = [await self._observe_service(service) for service in services]
        return prefill, decode

    async def scale(self, decision: Decision) -> None:
        """Set the replicas of both services where they differ. Raises Unavailable, ConfigError."""
        services = await self._read_services()
        for service, replicas in zip(services, decision.replicas, strict=True):
            if service is None or replicas == service[1].get("replicas", 1):
                continue
            name, spec = service
            self._ordered_at[name] = self._clock.now()
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
        pods = await self._kubernetes.list("v1", "Pod", self._namespace, labels=labels)
        now = self._clock.now()
        return pool_state(
            pods,
            num_ordered=spec.get("replicas", 1),
            ordered_at=self._ordered_at.setdefault(name, now),
            started_at=now - self._clock.wall(),
        )


def open_connector(clock: clocks.Clock) -> KubernetesConnector:
    """Open the connector of the deployment that this pod belongs to. Raises ConfigError."""
    return KubernetesConnector(
        connection.KubernetesConnection.open(),
        os.environ,
        clock=clock,
    )


Service = tuple[str, Object]  # its name in the deployment, and its spec


def worker_services(graph: Object) -> tuple[Service | None, Service | None]:
    """Return the prefill service and the decode service; None for one that is not there. Raises ConfigError."""
    prefill: list[Service] = []
    decode: list[Service] = []
    for name, spec in (graph["spec"].get("services") or {}).items():
        if spec.get("componentType") == "worker":
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


def pool_state(
    pods: Sequence[Object], *, num_ordered: int, ordered_at: float, started_at: float
) -> PoolState:
    """Tell the pods of a service apart.

    `started_at` is the planner's clock at 1970, to bring the times of pods to it. Ordered replicas that have no pod yet
    are starting since `ordered_at`; pods above the order, which are about to be deleted, count as draining.
    """
    present = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    startups_s = [at - _created_at(pod) for pod in present if (at := _ready_at(pod)) is not None]
    starting = [pod for pod in present if _ready_at(pod) is None]
    num_ready = min(len(startups_s), num_ordered)
    created_at = sorted(started_at + _created_at(pod) for pod in starting)
    num_starting = max(0, num_ordered - num_ready)
    missing = [ordered_at] * (num_starting - len(created_at))
    return PoolState(
        num_ready=num_ready,
        starting_since=tuple(sorted([*created_at[:num_starting], *missing])),
        num_draining=len(pods) - min(len(present), num_ordered),
        startup_s=statistics.median(startups_s) if startups_s else None,
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
    for container in status.get("containerStatuses", ()):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _HARMLESS:
            return f"{name}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return ""


def _ready_at(pod: Object) -> float | None:
    """Return the time since 1970 at which a pod became ready; None if it is not."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "Ready" and condition["status"] == "True":
            return _seconds(condition.get("lastTransitionTime")) or _created_at(pod)
    return None


def _created_at(pod: Object) -> float:
    return _seconds(pod["metadata"].get("creationTimestamp"))


def _seconds(time: str | None) -> float:
    return datetime.datetime.fromisoformat(time).timestamp() if time else 0.0
