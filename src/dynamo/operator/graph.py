"""The decider of one DynamoGraphDeployment: its components, generation by generation, what they share, and its status.

Each service becomes a DynamoComponentDeployment, `{graph}-{service}` in lower case. The workers of a later generation
have the digits of their hash behind that name and behind their dynamo namespace (`rollout`). The hash is that of what
the user wrote, so neither a new operator nor a new default starts an update.
"""  # decider

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.operator import api_types, causes, component, identity, objects, pod_template, rollout
from dynamo.operator.objects import Object, Observed, Reconciliation
from dynamo.operator.settings import OperatorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A graph as its spec describes it, with the replicas that scaling adapters set."""

    resource: Object
    spec: api_types.GraphSpec
    settings: OperatorConfig
    replicas: dict[str, int]
    token_renewed_at: str = ""

    @property
    def name(self) -> str:
        """Return the name of the object."""
        return str(self.resource["metadata"]["name"])

    @property
    def services(self) -> dict[str, api_types.ServiceSpec]:
        """Return the services by name."""
        return self.spec.services or {}

    @property
    def annotations(self) -> dict[str, str]:
        """Return the annotations of the object."""
        return objects.annotations_of(self.resource)

    @property
    def discovery(self) -> str:
        """Return the discovery backend of the graph's pods."""
        return component.read_discovery(self.annotations, self.settings)

    @property
    def workers(self) -> list[str]:
        """Return the services that are updated by generations: no group of nodes is."""
        workers = [name for name, service in self.services.items() if service.role == "worker"]
        is_multinode = any(self.services[name].multinode for name in workers)
        return [] if is_multinode else workers

    @property
    def dynamo_namespace(self) -> str:
        """Return the namespace in which the services find each other. Raises ConfigError if they name several."""
        if any(service.global_dynamo_namespace for service in self.services.values()):
            return "dynamo"
        names = sorted({s.dynamo_namespace for s in self.services.values() if s.dynamo_namespace})
        if len(names) > 1:
            raise errors.ConfigError(
                f"services: dynamoNamespace must be the same in all of them, got {', '.join(names)}"
            )
        return names[0] if names else f"dynamo-{self.name}"

    @property
    def frontend_urls(self) -> list[str]:
        """Return the addresses of the frontends' Services, where a planner reads the traffic."""
        return [
            f"http://{self.base_name(name)}:{pod_template.HTTP_PORT}"
            for name, service in self.services.items()
            if service.role == "frontend"
        ]

    def base_name(self, service: str) -> str:
        """Return the name of a service's component in the first generation."""
        return f"{self.name}-{service.lower()}"

    def check_names(self) -> None:
        """Raise ConfigError if a name of a component is not unique, or one, the namespace or the discovery is wrong."""
        names = [self.base_name(service) for service in self.services]
        for service, name in zip(self.services, names, strict=True):
            if names.count(name) > 1:
                raise errors.ConfigError(f"services: two are {name} in lower case: rename one")
            if len(name) > api_types.MAX_DERIVED_NAME:
                raise errors.ConfigError(
                    f"service {service}: the name {name} has {len(name)} characters; at most"
                    f" {api_types.MAX_DERIVED_NAME} fit: shorten the name of the deployment or of the service"
                )
        component.read_discovery(self.annotations, self.settings)
        identity.check_namespace(self.dynamo_namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGeneration:
    """The components of one generation of workers, as the cluster has them, by service."""

    digits: str
    suffix: str  # of names and of the dynamo namespace: "" or - and the digits
    components: Mapping[str, Object]


def decide(
    resource: Object, observed: Observed, settings: OperatorConfig, token: str
) -> Reconciliation:
    """Decide what a graph needs, and what its status is. `token` becomes the cluster token if there is none yet."""
    try:
        graph = read_graph(resource, observed, settings)
        desired = make_components(graph, observed)
    except errors.ConfigError as error:
        cause = causes.Cause("InvalidSpec", str(error))
        return Reconciliation(
            status=_render_status(resource, observed, [], cause, _FAILED, state="failed")
        )
    accounts = identity.make_accounts(
        resource,
        observed,
        graph=graph.name,
        discovers=graph.discovery == "kubernetes",
        has_planner=any(service.role == "planner" for service in graph.services.values()),
    )
    renewed_at = graph.token_renewed_at
    secret = identity.make_token_secret(resource, graph.dynamo_namespace, token, renewed_at)
    found_secret = observed.find("Secret", secret["metadata"]["name"])
    adoption = identity.adopt_secret(resource, found_secret) if found_secret else None
    adapters = [
        objects.make_adoption(adapter, [objects.owner_reference(resource)])
        for adapter in observed.owned_by(resource, _ADAPTER)
        if not objects.is_owned(adapter, resource)
    ]
    names = {item["metadata"]["name"] for item in desired}
    leftover = [
        existing
        for existing in observed.owned_by(resource, "DynamoComponentDeployment")
        if existing["metadata"]["name"] not in names
    ]
    unneeded = rollout.find_unneeded(
        observed, desired, leftover, has_generations=bool(graph.workers)
    )
    claims = [
        component.make_claim(claim, resource, {objects.GRAPH_LABEL: graph.name})
        for claim in graph.spec.pvcs or ()
        if claim.create
    ]
    needed_adapters = make_adapters(graph)
    names = {item["metadata"]["name"] for item in needed_adapters}
    unused_adapters = [
        adapter
        for adapter in observed.owned_by(resource, _ADAPTER)
        if adapter["metadata"]["name"] not in names
    ]
    created = [*claims, *needed_adapters]
    absent = [
        item for item in created if observed.find(item["kind"], item["metadata"]["name"]) is None
    ]
    return Reconciliation(
        create=(*([] if found_secret else [secret]), *absent),
        patch=(*([adoption] if adoption else []), *adapters),
        apply=(*accounts, *desired),
        delete=tuple(map(objects.reference_of, (*unneeded, *unused_adapters))),
        status=make_status(graph, observed, desired, leftover),
        other_statuses=tuple(make_adapter_statuses(graph, observed, desired)),
    )


_FAILED = "failed_to_reconcile_the_resources"


def read_graph(resource: Object, observed: Observed, settings: OperatorConfig) -> Graph:
    """Read a graph and the replicas of its services. Raises ConfigError with the field that is wrong."""
    spec = api_types.read_spec(resource, api_types.GraphSpec)
    replicas = {}
    for name, service in (spec.services or {}).items():
        adapter = observed.find(_ADAPTER, f"{resource['metadata']['name']}-{name.lower()}")
        wanted = 1 if service.replicas is None else service.replicas
        if adapter is not None and service.scaling_adapter and service.scaling_adapter.enabled:
            wanted = adapter["spec"].get("replicas", wanted)
        replicas[name] = wanted
    graph = Graph(resource=resource, spec=spec, settings=settings, replicas=replicas)
    if not graph.services:
        raise errors.ConfigError("spec.services: expected at least one service")
    graph.check_names()
    renewed_at = identity.find_renewal(resource, observed, graph.dynamo_namespace)
    return dataclasses.replace(graph, token_renewed_at=renewed_at)


_ADAPTER = "DynamoGraphDeploymentScalingAdapter"


def read_generations(graph: Graph, observed: Observed) -> list[WorkerGeneration]:
    """Return the generations of workers that the cluster has, oldest first."""
    components_by_digits: dict[str, dict[str, Object]] = {}
    suffixes: dict[str, str] = {}
    for existing in sorted(
        observed.owned_by(graph.resource, "DynamoComponentDeployment"),
        key=lambda item: (item["metadata"].get("creationTimestamp", ""), item["metadata"]["name"]),
    ):
        labels = objects.labels_of(existing)
        digits, service = labels.get(objects.HASH_LABEL), labels.get(objects.COMPONENT_LABEL)
        if not digits or not service or "deletionTimestamp" in existing["metadata"]:
            continue
        if service in graph.services and service not in graph.workers:  # it is no worker any more
            continue
        components_by_digits.setdefault(digits, {})[service] = existing
        is_first = existing["metadata"]["name"] == graph.base_name(service)
        suffixes[digits] = "" if is_first else f"-{digits}"
    return [
        WorkerGeneration(digits=digits, suffix=suffixes[digits], components=components)
        for digits, components in components_by_digits.items()
    ]


def is_updating(resource: Object, observed: Observed) -> bool:
    """Return True if workers of several generations exist."""
    owned = observed.owned_by(resource, "DynamoComponentDeployment")
    return len({objects.labels_of(item).get(objects.HASH_LABEL) for item in owned} - {None}) > 1


def make_components(graph: Graph, observed: Observed) -> list[Object]:
    """Return the components of all services, of all generations that still serve. Raises ConfigError."""
    services = [name for name in graph.services if name not in graph.workers]
    if not graph.workers:
        return [_make_component(graph, name) for name in services]
    target = rollout.worker_digits(graph.resource, graph.workers)
    generations = read_generations(graph, observed)
    current = next((entry for entry in generations if entry.digits == target), None)
    suffix = current.suffix if current else (f"-{target}" if generations else "")
    identity.check_namespace(f"{graph.dynamo_namespace}{suffix}")
    autoscaled = find_autoscaled(graph, generations, target, observed)
    wanted = {name: autoscaled.get(name, graph.replicas[name]) for name in graph.workers}
    specs = {
        service: api_types.read_spec(existing, api_types.ComponentSpec)
        for entry in generations
        for service, existing in entry.components.items()
        if service not in wanted
    } | {name: graph.services[name] for name in graph.workers}
    planned = rollout.plan(
        wanted,
        [count_workers(graph, entry, observed, target) for entry in generations],
        target,
        rollout.UpdateLimits(
            max_surge=component.read_share(graph.annotations, component.SURGE_ANNOTATION),
            max_unavailable=component.read_share(
                graph.annotations, component.UNAVAILABLE_ANNOTATION
            ),
        ),
        frozenset(name for name, spec in specs.items() if spec.is_prefill),
    )
    desired = [
        _make_component(graph, name, target, suffix, replicas, autoscaled=autoscaled.get(name))
        for name, replicas in planned[target].items()
    ]
    for entry in generations:
        if entry.digits != target and has_pods(entry, planned[entry.digits], observed):
            desired += [
                repeat_component(graph, existing, planned[entry.digits][name], wanted.get(name, 0))
                for name, existing in entry.components.items()
            ]
    serving = suffix if len(generations) < 2 else generations[0].suffix
    return [*(_make_component(graph, name, planner_suffix=serving) for name in services), *desired]


def find_autoscaled(
    graph: Graph, generations: list[WorkerGeneration], target: str, observed: Observed
) -> dict[str, int]:
    """Return the workers of each service with an autoscaler, as long as there is another generation than the target."""
    if all(entry.digits == target for entry in generations):
        return {}
    counts = {}
    for name in graph.workers:
        autoscaling = graph.resource["spec"]["services"][name].get("autoscaling") or {}
        if autoscaling.get("enabled"):
            existing = [entry.components[name] for entry in generations if name in entry.components]
            deployments = [observed.find("Deployment", e["metadata"]["name"]) for e in existing]
            counts[name] = rollout.autoscaled_replicas(autoscaling, existing, deployments)
    return counts


def count_workers(
    graph: Graph, generation: WorkerGeneration, observed: Observed, target: str
) -> rollout.Generation:
    """Count the pods of a generation; registered instances count for the target alone."""
    namespace = f"{graph.dynamo_namespace}{generation.suffix}"
    num_admitted = None
    if generation.digits == target and observed.instances is not None:
        num_admitted = observed.instances.get(namespace, 0)
    workers = {}
    for service, existing in generation.components.items():
        pods = observed.pods_of(existing["metadata"]["name"])
        num_ready = sum(
            objects.is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods
        )
        deployment = observed.find("Deployment", existing["metadata"]["name"])
        workers[service] = rollout.Workers(
            replicas=rollout.ordered_replicas(existing, deployment),
            num_pods=len(pods),
            num_ready=num_ready,
        )
    return rollout.Generation(digits=generation.digits, workers=workers, num_admitted=num_admitted)


def has_pods(generation: WorkerGeneration, planned: rollout.Replicas, observed: Observed) -> bool:
    """Return True as long as a generation has or shall have pods."""
    return any(planned.values()) or any(
        observed.pods_of(existing["metadata"]["name"]) or existing["spec"].get("replicas", 1)
        for existing in generation.components.values()
    )


def _make_component(
    graph: Graph,
    service: str,
    digits: str = "",
    suffix: str = "",
    replicas: int | None = None,
    planner_suffix: str = "",
    autoscaled: int | None = None,
) -> Object:
    """Return the component of a service; with `digits`, of that generation of workers.

    `autoscaled` has the workers of a service with an autoscaler while it is updated, `replicas` this generation's part.
    """
    service_spec = graph.services[service]
    common = graph.spec.envs
    if service_spec.role == "planner":
        suffix = planner_suffix
        variable = api_types.EnvironmentVariable(
            name="DYN_PLANNER_FRONTEND_URL", value=",".join(graph.frontend_urls)
        )
        common = [variable, *(common or ())]
    changes = {
        "dynamo_component": service,
        "service_name": service,
        "dynamo_namespace": f"{graph.dynamo_namespace}{suffix}",
        "replicas": graph.replicas[service] if replicas is None else replicas,
        "envs": pod_template.merge_environments(common, service_spec.envs),
        "scaling_adapter": None,
    }
    fields = {name: getattr(service_spec, name) for name in service_spec.__struct_fields__}
    spec = api_types.ComponentSpec(
        **{**fields, **changes}, backend_framework=graph.spec.backend_framework
    )
    name = f"{graph.base_name(service)}{suffix if digits else ''}"
    rendered = msgspec.to_builtins(spec)
    if autoscaled is not None:
        rendered = rollout.fix_autoscaler(rendered, replicas or 0)
    return _render_component(graph, name, service, digits, rendered, autoscaled)


def repeat_component(graph: Graph, existing: Object, replicas: int, num_wanted: int) -> Object:
    """Return a component of an old generation: as it is, but for its replicas."""
    name, labels = existing["metadata"]["name"], objects.labels_of(existing)
    spec = {**existing["spec"], "replicas": replicas}
    autoscaled = None
    if rollout.is_autoscaled(existing):
        spec, autoscaled = rollout.fix_autoscaler(spec, replicas), num_wanted
    service, digits = labels[objects.COMPONENT_LABEL], labels[objects.HASH_LABEL]
    return _render_component(graph, name, service, digits, spec, autoscaled)


def _render_component(
    graph: Graph, name: str, service: str, digits: str, spec: Object, autoscaled: int | None
) -> Object:
    spec = identity.mark_renewal(spec, graph.token_renewed_at)
    labels = {
        objects.GRAPH_LABEL: graph.name,
        objects.COMPONENT_LABEL: service,
        objects.NAMESPACE_LABEL: spec.get("dynamoNamespace", ""),
    }
    if digits:
        labels[objects.HASH_LABEL] = digits
    annotations = {objects.SPEC_ANNOTATION: objects.digest(spec)}
    if autoscaled is not None:
        annotations[rollout.AUTOSCALED_ANNOTATION] = str(autoscaled)
    for copied_annotation in (
        component.SURGE_ANNOTATION,
        component.UNAVAILABLE_ANNOTATION,
        component.DISCOVERY_ANNOTATION,
        component.GROVE_ANNOTATION,
    ):
        if copied_annotation in graph.annotations:
            annotations[copied_annotation] = graph.annotations[copied_annotation]
    return objects.make_object(
        api_types.API_VERSION,
        "DynamoComponentDeployment",
        name,
        graph.resource,
        labels=labels,
        annotations=annotations,
        spec=spec,
    )


def make_adapters(graph: Graph) -> list[Object]:
    """Return the scaling adapters of the services that ask for one."""
    return [
        objects.make_object(
            api_types.API_VERSION,
            _ADAPTER,
            graph.base_name(name),
            graph.resource,
            labels={objects.GRAPH_LABEL: graph.name, objects.COMPONENT_LABEL: name},
            spec={
                "replicas": graph.replicas[name],
                "dgdRef": {"name": graph.name, "serviceName": name},
            },
        )
        for name, service in graph.services.items()
        if service.scaling_adapter and service.scaling_adapter.enabled
    ]


def make_adapter_statuses(graph: Graph, observed: Observed, desired: list[Object]) -> list[Object]:
    """Return the statuses of the scaling adapters: the pods that run, and the selector that finds them."""
    statuses = []
    for adapter in observed.owned_by(graph.resource, _ADAPTER):
        service = adapter["spec"]["dgdRef"]["serviceName"]
        counts = [
            len(observed.pods_of(item["metadata"]["name"]))
            for item in desired
            if item["spec"].get("dynamoComponent") == service
        ]
        selector = f"{objects.GRAPH_LABEL}={graph.name},{objects.COMPONENT_LABEL}={service}"
        status = {"replicas": sum(counts), "selector": selector}
        statuses.append({**objects.address_of(adapter), "status": status})
    return statuses


def make_status(
    graph: Graph, observed: Observed, desired: list[Object], leftover: list[Object]
) -> Object:
    """Return the status: ready if every component is, in its present form, and no old generation is left."""
    waiting = [
        (item, cause)
        for item in desired
        if (cause := causes.find_component_cause(item, observed)) is not None
    ]
    digits = {item["metadata"]["labels"].get(objects.HASH_LABEL) for item in desired}
    num_generations = len(digits - {None})
    if not waiting and num_generations < 2 and not leftover:
        status = _render_status(
            graph.resource, observed, desired, None, "all_resources_are_ready", state="successful"
        )
        notes = [note for item in desired if (note := find_note(item, observed))]
        status["conditions"][0]["message"] = "; ".join(("all resources are ready", *notes))
        return status
    rolling = causes.Cause("Waiting", "workers of the former specification are being replaced")
    cause = causes.select_first([cause for _, cause in waiting], rolling)
    names = [item["metadata"]["name"] for item, _ in waiting]
    head = f"{len(names)} resources not ready: [{', '.join(names)}]: " if names else ""
    cause = causes.Cause(cause.reason, head + cause.message)
    return _render_status(
        graph.resource, observed, desired, cause, "some_resources_are_not_ready", state="pending"
    )


def find_note(item: Object, observed: Observed) -> str:
    """Return what an available component lacks all the same, or nothing."""
    existing = observed.find(item["kind"], item["metadata"]["name"]) or {}
    message = objects.find_condition(existing, "Available").get("message", "")
    _, _, note = message.partition(f"{component.ALL_READY}; ")
    return f"service {item['metadata']['labels'][objects.COMPONENT_LABEL]}: {note}" if note else ""


def _render_status(
    resource: Object,
    observed: Observed,
    desired: list[Object],
    cause: causes.Cause | None,
    reason: str,
    *,
    state: str,
) -> Object:
    message = "" if cause is None else cause.message
    services: dict[str, Any] = {}
    for item in desired:
        name = item["metadata"]["labels"][objects.COMPONENT_LABEL]
        pods = observed.pods_of(item["metadata"]["name"])
        entry = services.setdefault(name, {"componentNames": [], "replicas": 0, "readyReplicas": 0})
        entry["componentNames"].append(item["metadata"]["name"])
        entry["replicas"] += len(pods)
        entry["readyReplicas"] += sum(map(objects.is_ready, pods))
    status = {
        "state": state,
        "observedGeneration": resource["metadata"].get("generation", 0),
        "conditions": [
            objects.make_condition("Ready", cause is None, reason, message, resource, observed.now)
        ],
        "services": services,
    }
    update = rollout.describe_update(resource, observed, desired)
    return status | ({"rollingUpdate": update} if update else {})
