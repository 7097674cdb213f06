"""The metrics API and the controller of HorizontalPodAutoscalers.

`metrics.k8s.io` says what the processes of each container use, from /proc; it is measured when it is asked for, so a
cluster without autoscalers pays nothing. `count_replicas` is the rule of Kubernetes: pods without a figure neither
cause a change nor hinder one. `ScalingHistory` follows the stabilization windows and policies of `behavior`.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.base import clock as clocks
from dynamo.testing.kube import (
    api,
    builtin_rules,
    container_usage,
    metadata,
    pods,
    resources,
    selectors,
    tables,
    workloads,
)

Object = dict[str, Any]
GROUP = "metrics.k8s.io"
_TABLE = (GROUP, "pods")
_DEFINITION: Object = {
    "group": GROUP,
    "scope": "Namespaced",
    "names": {"kind": "PodMetrics", "plural": "pods", "singular": "", "listKind": "PodMetricsList"},
    "versions": [{"name": "v1beta1", "served": True}],
}
_RESOLUTION_S = (
    2.0  # between two measurements, and two looks of the controller; 15 s on a real cluster
)
_OLDEST_S = 60.0  # an earlier measurement says too little about the present
_WINDOW_S = 1.0  # of a measurement that has no recent one before it
_TOLERANCE = 0.1
_DOWN_WINDOW_S = 300
_KEPT_S = 3600.0  # the longest window and period
_DOUBLE = {"type": "Percent", "value": 100, "periodSeconds": 15}
_POLICIES = {
    "scaleUp": (_DOUBLE, {"type": "Pods", "value": 4, "periodSeconds": 15}),
    "scaleDown": (_DOUBLE,),
}


@dataclass(frozen=True, slots=True)
class PodLoad:
    """What a pod uses of a resource, None if that is unknown, and what it should use."""

    usage: float | None
    target: float
    is_ready: bool = True


def count_replicas(loads: Sequence[PodLoad], current: int) -> int | None:
    """Return how many pods bring the usage of a resource to its target; None if nothing is known of them."""
    measured = [(load.usage, load.target) for load in loads if load.usage is not None and load.is_ready]  # fmt: skip
    if not measured:
        return None
    ratio = _ratio(measured)
    for load in loads:  # what is not known is taken to speak against the change
        if load.usage is None or not load.is_ready:
            if ratio > 1:
                measured.append((0.0, load.target))
            elif load.usage is None:
                measured.append((load.target, load.target))
    cautious = _ratio(measured)
    if abs(cautious - 1) <= _TOLERANCE or (ratio > 1) != (cautious > 1):
        return current
    replicas = math.ceil(cautious * len(measured) - 1e-9)
    return max(replicas, current) if ratio > 1 else min(replicas, current)


def _ratio(measured: Sequence[tuple[float, float]]) -> float:
    return sum(usage for usage, _ in measured) / sum(target for _, target in measured)


class ScalingHistory:
    """What one autoscaler has recommended and changed, as far as its `behavior` looks back."""

    def __init__(self, now: float, current: int) -> None:
        self._recommended = [(now, current)]
        self._changes: list[tuple[float, int]] = []  # replicas that were added

    def record_change(self, now: float, added: int) -> None:
        """Note that replicas were added, or taken away for a negative number."""
        self._changes = [entry for entry in self._changes if entry[0] > now - _KEPT_S]
        self._changes.append((now, added))

    def limit(self, behavior: Object, now: float, current: int, desired: int) -> int:
        """Return the replicas that the windows and policies of `behavior` let through now."""
        kept = [entry for entry in self._recommended if entry[0] > now - _KEPT_S]
        self._recommended = [*kept, (now, desired)]

        def recent(direction: str, default_s: float) -> list[int]:
            window_s = (behavior.get(direction) or {}).get("stabilizationWindowSeconds", default_s)
            return [desired, *(count for at, count in kept if at > now - window_s)]

        least, most = min(recent("scaleUp", 0)), max(recent("scaleDown", _DOWN_WINDOW_S))
        settled = min(max(current, least), most)
        direction = "scaleUp" if settled > current else "scaleDown"
        rule = behavior.get(direction) or {}
        choice = rule.get("selectPolicy", "Max")
        if settled == current or choice == "Disabled":
            return current
        sign = 1 if settled > current else -1
        steps = [
            self._step_of(policy, now, current, sign)
            for policy in rule.get("policies") or _POLICIES[direction]
        ]
        step = max(steps) if choice == "Max" else min(steps)
        return current + sign * min(abs(settled - current), max(step, 0))

    def _step_of(self, policy: Object, now: float, current: int, sign: int) -> int:
        """Return how many replicas a policy lets be added now, or taken away for the sign -1."""
        changed = sum(n for at, n in self._changes if at > now - policy["periodSeconds"])
        at_start = current - changed
        allowed = policy["value"]
        if policy["type"] == "Percent":
            allowed = math.ceil(at_start * policy["value"] / 100)
        return int(allowed - sign * changed)


class PodMetrics:
    """The metrics API. `processes_of` returns the first process of each running container of a pod."""

    def __init__(
        self, served: api.Api, processes_of: Callable[[Object], dict[str, int]], clock: clocks.Clock
    ) -> None:  # fmt: skip
        served.registry.define({"spec": _DEFINITION})
        self._store = served.store
        self._processes_of = processes_of
        self._clock = clock
        self._lock = asyncio.Lock()
        self._measured_at = -_OLDEST_S * 2 + clock.now()
        self._cpu_s: dict[tuple[str, str], float] = {}

    async def refresh(self) -> None:
        """Measure all pods and store a PodMetrics for each, unless this was done just before."""
        async with self._lock:
            age_s = self._clock.now() - self._measured_at
            if age_s < _RESOLUTION_S:
                return
            if age_s > _OLDEST_S:
                self._measure()
                await self._clock.sleep(_WINDOW_S)
            self._measure()

    def _measure(self) -> None:
        now, processes = self._clock.now(), container_usage.read_processes()
        before, window_s = self._cpu_s, max(now - self._measured_at, 1e-3)
        self._cpu_s, self._measured_at = {}, now
        for pod in self._store.list_items(("", "pods")):
            meta = pod["metadata"]
            containers = []
            for name, pid in self._processes_of(pod).items():
                cpu_s, num_bytes = container_usage.sum_usage(pid, processes)
                self._cpu_s[meta["uid"], name] = cpu_s
                earlier_s = before.get((meta["uid"], name))
                if earlier_s is not None:
                    cores = max(cpu_s - earlier_s, 0) / window_s
                    usage = {"cpu": f"{cores * 1e9:.0f}n", "memory": f"{num_bytes // 1024}Ki"}
                    containers.append({"name": name, "usage": usage})
            if containers:
                owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}  # fmt: skip
                kept = ("name", "namespace", "uid", "creationTimestamp", "labels")
                head = {name: meta[name] for name in kept if name in meta}
                item = {
                    "kind": "PodMetrics",
                    "apiVersion": f"{GROUP}/v1beta1",
                    "metadata": {**head, "uid": f"{meta['uid']}-usage", "ownerReferences": [owner]},
                    "timestamp": metadata.timestamp(),
                    "window": f"{window_s:.3f}s",
                    "containers": containers,
                }
                self._store.put(_TABLE, item)

    def usage_of(self, pod: Object, resource: str) -> float | None:
        """Return what a pod used when it was measured last, in cores or bytes; None if it was not."""
        meta = pod["metadata"]
        item = self._store.get(_TABLE, (meta["namespace"], meta["name"]))
        if item is None or item["metadata"]["ownerReferences"][0]["uid"] != meta["uid"]:
            return None
        amounts = [entry["usage"].get(resource) for entry in item["containers"]]
        return None if None in amounts else float(sum(map(builtin_rules.parse_quantity, amounts)))


class Autoscalers(workloads.Workload):
    """Sets the replicas of scale targets by the CPU and memory of their pods."""

    plural = "horizontalpodautoscalers"
    dependents = ""
    group = "autoscaling"
    version = "v2"

    def __init__(self, served: api.Api, metrics: PodMetrics, clock: clocks.Clock) -> None:
        super().__init__(served)
        self._metrics = metrics
        self._clock = clock
        self._histories: dict[str, ScalingHistory] = {}  # by uid

    async def step(self, item: Object) -> float | None:
        """Measure, and scale the target if that is due."""
        meta, reference = item["metadata"], item["spec"]["scaleTargetRef"]
        version, kind = reference.get("apiVersion", ""), reference["kind"]
        resource = self.api.registry.find_kind(version, kind)
        target = self.api.find(version, kind, meta["namespace"], reference["name"])
        if resource is None or resource.scale is None or target is None:
            text = f"there is no {reference['kind']} {reference['name']} that can be scaled"
            await self._report(item, {}, "AbleToScale", "FailedGetScale", text)
            return _RESOLUTION_S
        scale = tables.scale_of(target, resource.scale)
        current = scale["spec"]["replicas"]
        counts = {"currentReplicas": scale["status"]["replicas"], "desiredReplicas": current}
        if not current:
            text = "scaling is disabled since the replica count of the target is zero"
            await self._report(item, counts, "ScalingActive", "ScalingDisabled", text)
            return _RESOLUTION_S
        spec = item["spec"]
        bounded = int(min(max(current, spec["minReplicas"]), spec["maxReplicas"]))
        if bounded != current:  # no metric is needed for that
            limit = "below Spec.MinReplicas" if bounded > current else "above Spec.MaxReplicas"
            reason = f"Current number of replicas {limit}"
            await self._rescale(item, target, resource, counts, bounded, reason)
            return _RESOLUTION_S
        await self._metrics.refresh()
        has_label = selectors.parse_labels(scale["status"].get("selector", ""))
        all_pods = self.api.store.list_items(("", "pods"), meta["namespace"])
        live = workloads.live_pods([pod for pod in all_pods if has_label(pod)])
        shown, counted, problem = self._evaluate(spec.get("metrics") or [], live, current)
        if not counted:
            await self._report(item, counts, "ScalingActive", "FailedGetResourceMetric", problem)
            return _RESOLUTION_S
        desired = self._stabilize(item, current, max(counted))
        counts["currentMetrics"] = shown
        if desired == current:
            await self._report(item, counts)
        else:
            side = "above" if desired > current else "below"
            reason = f"usage of resources is {side} its target"
            await self._rescale(item, target, resource, counts, desired, reason)
        return _RESOLUTION_S

    async def _rescale(
        self,
        item: Object,
        target: Object,
        resource: resources.ApiResource,
        counts: Object,
        desired: int,
        reason: str,
    ) -> None:
        """Set the replicas of the target, and say why."""
        assert resource.scale is not None
        await self.api.merge(resource, target, resource.scale.change(desired))
        await self.tell(item, "SuccessfulRescale", f"New size: {desired}; reason: {reason}")
        changed = {"desiredReplicas": desired, "lastScaleTime": metadata.timestamp()}
        await self._report(item, {**counts, **changed})

    def _evaluate(
        self, metrics: list[Object], live: list[Object], current: int
    ) -> tuple[list[Object], list[int], str]:
        """Return the metrics as the status shows them, the replicas that each asks for, and what is wrong with one."""
        shown, counted, problem = [], [], "no metrics returned from resource metrics API"
        for metric in metrics:
            if metric["type"] != "Resource":
                problem = f"metrics of type {metric['type']} have no source here, only Resource has"
                continue
            name, target = metric["resource"]["name"], metric["resource"]["target"]
            usages = [self._metrics.usage_of(pod, name) for pod in live]
            if "averageValue" not in target:
                amounts = [_requested(pod, name) for pod in live]
                if not all(amounts):
                    problem = f"failed to get {name} utilization: missing request for {name} in a container of its pods"
                    continue
                share = target["averageUtilization"] / 100
            else:
                amounts = [float(builtin_rules.parse_quantity(target["averageValue"]))] * len(live)
                share = 1.0
            loads = [
                PodLoad(usage, amount * share, pods.is_ready(pod))
                for pod, usage, amount in zip(live, usages, amounts, strict=True)
            ]
            replicas = count_replicas(loads, current)
            if replicas is None:
                continue
            counted.append(replicas)
            known = [(use, amount) for use, amount in zip(usages, amounts, strict=True) if use is not None]  # fmt: skip
            mean = sum(use for use, _ in known) / len(known)
            average = f"{mean * 1000:.0f}m" if name == "cpu" else f"{mean:.0f}"
            value: Object = {"averageValue": average}
            if "averageValue" not in target:
                value["averageUtilization"] = int(100 * _ratio(known))
            shown.append({"type": "Resource", "resource": {"name": name, "current": value}})
        return shown, counted, problem

    def _stabilize(self, item: Object, current: int, desired: int) -> int:
        """Return the replicas within the limits, and within what `behavior` lets through."""
        spec, now, uid = item["spec"], self._clock.now(), item["metadata"]["uid"]
        history = self._histories.setdefault(uid, ScalingHistory(now, current))
        settled = history.limit(spec.get("behavior") or {}, now, current, desired)
        settled = int(min(max(settled, spec["minReplicas"]), spec["maxReplicas"]))
        if settled != current:
            history.record_change(now, settled - current)
        return settled

    async def _report(
        self, item: Object, counts: Object, failed: str = "", reason: str = "", message: str = ""
    ) -> None:
        """Write the status; `failed` names the condition that is false, for a reason."""
        conditions = []
        for kind, usual in (
            ("AbleToScale", "SucceededGetScale"),
            ("ScalingActive", "ValidMetricFound"),
        ):
            why = (False, reason, message) if kind == failed else (True, usual, "")
            conditions.append(workloads.make_condition(item, kind, *why))
        status = dict(item.get("status") or {})
        await self.write_status(item, {**status, **counts, "conditions": conditions})


def _requested(pod: Object, resource: str) -> float:
    """Return what the containers of a pod request of a resource; 0 if one of them requests nothing."""
    requests = [
        ((container.get("resources") or {}).get("requests") or {}).get(resource)
        for container in pod["spec"]["containers"]
    ]
    if None in requests:
        return 0.0
    return float(sum(map(builtin_rules.parse_quantity, requests)))
