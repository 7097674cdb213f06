"""The decider of a rolling update: how many workers each generation of a graph gets.

A generation is all worker services of a graph under one hash of their specs. It has a dynamo namespace of its own, so
old and new workers never exchange blocks; frontends serve both. What runs is read from the objects: a spec that is
changed again, or changed back, in the middle of an update only names another target.

Per service, `max_unavailable` and `max_surge` hold over all generations together. Workers of the target count once
every ready frontend has admitted them; decode workers serve without prefill workers, but not the reverse.

While a service with an autoscaler is updated, the number of its workers is the one that the autoscaler had set when
the update began; each generation has an autoscaler with its own part of them as both limits, so that none of them
brings back what the update takes away.
"""  # decider

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.operator import api_types, causes, objects

Replicas = dict[str, int]  # by service
AUTOSCALED_ANNOTATION = f"{api_types.GROUP}/autoscaled-replicas"  # of an update's components

_HASHED = (
    "componentType", "subComponentType", "dynamoNamespace", "globalDynamoNamespace", "resources", "envs",
    "envFromSecret", "pvc", "volumeMounts", "sharedMemory", "extraPodMetadata", "extraPodSpec", "livenessProbe",
    "readinessProbe",
)  # fmt: skip
_HASHED_OF_GRAPH = ("envs", "backendFramework")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers of one service in one generation: ordered, existing and ready ones."""

    replicas: int
    num_pods: int = 0
    num_ready: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The workers that one hash has, by service, and the instances that each ready frontend has admitted."""

    digits: str
    workers: Mapping[str, Workers]
    num_admitted: int | None = None  # of those that answer requests; None: not known

    def num_serving(self, service: str, prefill_services: frozenset[str]) -> int:
        """Return the workers of a service that requests can reach."""
        answering = [
            workers for name, workers in self.workers.items() if name not in prefill_services
        ]
        num_answering = sum(workers.num_ready for workers in answering)
        if not num_answering or (
            self.num_admitted is not None and self.num_admitted < num_answering
        ):
            return 0
        return self.workers[service].num_ready if service in self.workers else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLimits:
    """Pods beyond and below the wanted number during an update: a number, or a share such as 25%."""

    max_surge: int | str = "25%"
    max_unavailable: int | str = "25%"

    def bounds(self, num_wanted: int) -> tuple[int, int]:
        """Return the least workers that must serve and the most that may exist, for this number of wanted ones."""
        surge = math.ceil(_resolve(self.max_surge, num_wanted))
        unavailable = math.floor(_resolve(self.max_unavailable, num_wanted))
        if not surge and not unavailable:
            unavailable = 1
        return num_wanted - unavailable, num_wanted + surge


def _resolve(limit: int | str, num_wanted: int) -> float:
    if isinstance(limit, int):
        return limit
    return int(limit.removesuffix("%")) * num_wanted / 100


def plan(
    wanted: Replicas,
    generations: Sequence[Generation],
    target: str,
    limits: UpdateLimits,
    prefill_services: frozenset[str] = frozenset(),
) -> dict[str, Replicas]:
    """Return the replicas of each generation's services, the target's among them; old ones come oldest first."""
    old = [generation for generation in generations if generation.digits != target]
    present = next((entry.workers for entry in generations if entry.digits == target), {})
    planned: dict[str, Replicas] = {generation.digits: {} for generation in old}
    planned[target] = dict.fromkeys(wanted, 0)
    for services, former_services in _find_pools(wanted, old, prefill_services):
        least_serving, most = limits.bounds(sum(wanted[service] for service in services))
        num_old_pods = sum(
            max(workers.replicas, workers.num_pods)
            for generation in old
            for service in former_services
            if (workers := generation.workers.get(service))
        )
        ordered = {
            service: min(wanted[service], present[service].replicas if service in present else 0)
            for service in services
        }
        room = max(0, most - num_old_pods - sum(ordered.values()))
        for service in services:
            planned[target][service] = min(wanted[service], ordered[service] + room)
            room -= planned[target][service] - ordered[service]
        num_serving = sum(
            generation.num_serving(service, prefill_services)
            for generation in generations
            for service in {*services, *former_services}
        )
        spare = max(0, num_serving - least_serving)
        for service, generation in itertools.product(former_services, old):
            if service not in generation.workers:
                continue
            serving = generation.num_serving(service, prefill_services)
            removed = min(serving, spare)
            spare -= removed
            planned[generation.digits][service] = min(
                generation.workers[service].replicas, serving - removed
            )
    return planned


def _find_pools(
    target_replicas: Replicas, old: Sequence[Generation], prefill_services: frozenset[str]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield services of the target beside those that they replace, each in the order in which they are changed.

    A service replaces itself. Where the spec no longer has an old one, which may have got another name, all services
    of its kind replace each other: first those that are new, and first those that the spec no longer has.
    """
    old_services = {service: None for generation in old for service in generation.workers}
    for is_prefill in (False, True):
        services = [name for name in target_replicas if (name in prefill_services) == is_prefill]
        former = [
            name
            for name in old_services
            if name not in target_replicas and (name in prefill_services) == is_prefill
        ]
        if former:
            yield sorted(services, key=old_services.__contains__), [*former, *services]
        else:
            yield from (([name], [name]) for name in services)


def is_autoscaled(component: objects.Object) -> bool:
    """Return True for a component with an autoscaler, and for one whose part of an update is none."""
    autoscaling = component["spec"].get("autoscaling") or {}
    return bool(autoscaling.get("enabled")) or AUTOSCALED_ANNOTATION in objects.annotations_of(
        component
    )


def ordered_replicas(component: objects.Object, deployment: objects.Object | None) -> int:
    """Return the replicas of a component: those that its autoscaler has set, if it has one."""
    autoscaling = component["spec"].get("autoscaling") or {}
    if deployment is None or not autoscaling.get("enabled"):
        return int(component["spec"].get("replicas", 1))
    return _bound(autoscaling, deployment["spec"].get("replicas", 1))


def autoscaled_replicas(
    autoscaling: objects.Object,
    components: Sequence[objects.Object],
    deployments: Sequence[objects.Object | None],
) -> int:
    """Return how many workers a service with an autoscaler keeps during an update, over all its generations.

    The components say it from the first step on; without that, it is what the largest of them has.
    """
    notes = [objects.annotations_of(item).get(AUTOSCALED_ANNOTATION, "") for item in components]
    numbers = [int(note) for note in notes if note.isdecimal()]
    if not numbers:
        numbers = [*map(ordered_replicas, components, deployments)]
    return _bound(autoscaling, max(numbers, default=1))


def _bound(autoscaling: objects.Object, replicas: int) -> int:
    least = int(autoscaling.get("minReplicas", 1))
    return min(max(replicas, least), max(least, int(autoscaling.get("maxReplicas", least))))


def fix_autoscaler(spec: objects.Object, replicas: int) -> objects.Object:
    """Return the spec of a component whose autoscaler keeps to this number; without one for no replicas."""
    fixed = {"enabled": replicas > 0, "minReplicas": replicas, "maxReplicas": replicas}
    return {**spec, "autoscaling": {**(spec.get("autoscaling") or {}), **fixed}}


def find_unneeded(
    observed: objects.Observed,
    desired: list[objects.Object],
    leftover: list[objects.Object],
    *,
    has_generations: bool,
) -> list[objects.Object]:
    """Return the components to delete of those that the spec no longer has.

    A frontend or a worker may have got another name: it stays until all of its kind are available, but for workers of
    generations, which `plan` has counted.
    """
    waiting_types = {
        _type_of(item) for item in desired if causes.find_component_cause(item, observed)
    }
    return [
        item
        for item in leftover
        if _type_of(item) not in waiting_types & {"frontend", "worker"}
        or (has_generations and objects.HASH_LABEL in objects.labels_of(item))
    ]


def _type_of(item: objects.Object) -> str:
    return str(item["spec"].get("componentType")).lower()


def describe_update(
    resource: objects.Object, observed: objects.Observed, desired: list[objects.Object]
) -> objects.Object | None:
    """Return the progress of an update of the workers, None if there was none; for people, never read for decisions."""
    digits = {item["metadata"]["labels"].get(objects.HASH_LABEL) for item in desired} - {None}
    previous = (resource.get("status") or {}).get("rollingUpdate") or {}
    if len(digits) > 1:
        is_new = previous.get("phase") != "InProgress"
        start = observed.now if is_new else previous.get("startTime", observed.now)
        return {"phase": "InProgress", "startTime": start}
    if previous.get("phase") == "InProgress":
        return {**previous, "phase": "Completed", "endTime": observed.now}
    return previous or None


def worker_digits(resource: objects.Object, workers: list[str]) -> str:
    """Return eight digits of the hash of the worker services, as the user wrote them."""
    spec = resource["spec"]
    content = {name: _select(spec["services"][name] or {}, _HASHED) for name in sorted(workers)}
    return objects.digest([content, _select(spec, _HASHED_OF_GRAPH)])


def _select(source: objects.Object, names: tuple[str, ...]) -> objects.Object:
    return {name: _prune(source[name]) for name in names if source.get(name) not in _EMPTY}


_EMPTY: tuple[Any, ...] = (None, {}, [], "")


def _prune(value: Any) -> Any:
    """Leave out what is empty: the API server adds and drops such fields."""
    if isinstance(value, dict):
        return {key: _prune(entry) for key, entry in value.items() if entry not in _EMPTY}
    return [_prune(entry) for entry in value] if isinstance(value, list) else value
