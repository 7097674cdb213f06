"""The objects of one DynamoComponentDeployment: Deployment, Service, Ingress, autoscaler; and its status."""  # decider

import re
from collections.abc import Sequence
from typing import Any

from dynamo.base import errors
from dynamo.operator import api_types, causes, identity, objects, pod_template
from dynamo.operator.objects import Object, Observed, Reconciliation
from dynamo.operator.pod_template import ServiceComponent
from dynamo.operator.settings import OperatorConfig

SURGE_ANNOTATION = f"{api_types.GROUP}/deployment-rolling-update-max-surge"
UNAVAILABLE_ANNOTATION = f"{api_types.GROUP}/deployment-rolling-update-max-unavailable"
DISCOVERY_ANNOTATION = f"{api_types.GROUP}/dynamo-discovery-backend"
ALL_READY = "all pods are ready"  # the message of a component that is available, before what is absent all the same
GROVE_ANNOTATION = f"{api_types.GROUP}/enable-grove"
_PRUNED = ("Deployment", "Service", "Ingress", "VirtualService", "HorizontalPodAutoscaler",
           "LeaderWorkerSet", "PodCliqueSet")  # fmt: skip
_SERVICE_NAME = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")
_CPU_PERCENT = 80
_MAX_GROVE_NAME = 42  # Grove allows 45 characters of a set and a clique together
_MAX_SET_NAME = 52  # of a StatefulSet: its pods have it with eleven characters more as a label


def find_token_name(resource: Object) -> str | None:
    """Return the name of the Secret with the token of a component that stands alone; a graph has that of its own."""
    if objects.GRAPH_LABEL in objects.labels_of(resource):
        return None
    return pod_template.token_secret_name(identity.find_namespace(resource))


def read_discovery(annotations: dict[str, str], settings: OperatorConfig) -> str:
    """Return the discovery backend of pods: etcd or kubernetes. Raises ConfigError for another annotation."""
    name = annotations.get(DISCOVERY_ANNOTATION, settings.used_discovery)
    if name not in ("etcd", "kubernetes"):
        raise errors.ConfigError(
            f"annotation {DISCOVERY_ANNOTATION}: expected etcd or kubernetes, got {name!r}"
        )
    return name


def decide(
    resource: Object, observed: Observed, settings: OperatorConfig, token: str
) -> Reconciliation:
    """Decide what a component needs, and what its status is. `token` is for one that stands alone and has none yet."""
    token_name = find_token_name(resource)
    renewed_at = ""
    if token_name:
        renewed_at = identity.find_renewal(resource, observed, identity.find_namespace(resource))
    spec = identity.mark_renewal(resource["spec"], renewed_at)
    try:
        component = read_component({**resource, "spec": spec}, settings)
        uses_grove = can_use_grove(component, resource, observed)
        needed = make_objects(component, resource, uses_grove=uses_grove)
    except errors.ConfigError as error:
        cause = causes.Cause("InvalidSpec", str(error))
        return Reconciliation(status=_status(resource, observed, None, cause, ()))
    desired = [item for item in needed if not must_be_made_anew(item, observed)]
    created = [item for item in desired if item["kind"] == "PersistentVolumeClaim"]
    applied = [
        keep_replicas(item, observed) for item in desired if item["kind"] != "PersistentVolumeClaim"
    ]
    names = {(item["kind"], item["metadata"]["name"]) for item in desired}
    leftover = tuple(
        objects.reference_of(existing)
        for kind in _PRUNED
        for existing in observed.owned_by(resource, kind)
        if (kind, existing["metadata"]["name"]) not in names
    )
    workload = next((item for item in applied if item["kind"] in _WORKLOADS), None)
    waits_for = find_cause(component, observed, workload)
    notes = [entry.message for entry in find_missing(component, observed)]
    adoptions: list[Object | None] = []
    if token_name:
        applied[:0] = identity.make_accounts(
            resource,
            observed,
            graph=component.graph,
            discovers=component.discovery == "kubernetes",
            has_planner=component.spec.role == "planner",
        )
        secret = observed.find("Secret", token_name)
        namespace = component.dynamo_namespace
        created.append(identity.make_token_secret(resource, namespace, token, renewed_at))
        adoptions = [identity.adopt_secret(resource, secret)] if secret else []
    return Reconciliation(
        status=_status(resource, observed, workload, waits_for, notes),
        apply=tuple(applied),
        patch=tuple(filter(None, adoptions)),
        create=tuple(
            item
            for item in created
            if observed.find(item["kind"], item["metadata"]["name"]) is None
        ),
        delete=leftover,
    )


_WORKLOADS = ("Deployment", "LeaderWorkerSet", "PodCliqueSet")


def must_be_made_anew(item: Object, observed: Observed) -> bool:
    """Return True for a Service that changes between headless and not, which the cluster refuses: it goes first."""
    existing = observed.find(item["kind"], item["metadata"]["name"])
    if item["kind"] != "Service" or existing is None:
        return False
    address = existing["spec"].get("clusterIP")
    is_headless, shall_be = (each == "None" for each in (address, item["spec"].get("clusterIP")))
    return bool(address) and is_headless != shall_be


def keep_replicas(item: Object, observed: Observed) -> Object:
    """Return a Deployment with its present replicas until its autoscaler sets them: what nobody sets becomes 1."""
    existing = observed.find(item["kind"], item["metadata"]["name"])
    if item["kind"] != "Deployment" or existing is None or "replicas" in item["spec"]:
        return item
    if objects.managers_of_replicas(existing) != [objects.FIELD_MANAGER]:
        return item
    return {**item, "spec": {**item["spec"], "replicas": existing["spec"]["replicas"]}}


def _annotations(resource: Object, spec: api_types.ServiceFields) -> dict[str, str]:
    """Return the annotations of a component's object, and beyond them those of its spec."""
    return {**objects.annotations_of(resource), **(spec.annotations or {})}


def can_use_grove(component: ServiceComponent, resource: Object, observed: Observed) -> bool:
    """Return True where Grove is, unless the user refuses it or LeaderWorkerSets from before it serve already."""
    return (
        observed.has_grove
        and _annotations(resource, component.spec).get(GROVE_ANNOTATION, "").lower() != "false"
        and not observed.owned_by(resource, "LeaderWorkerSet")
    )


def read_component(resource: Object, settings: OperatorConfig) -> ServiceComponent:
    """Return the component that an object describes. Raises ConfigError with the field that is wrong."""
    spec = api_types.read_spec(resource, api_types.ComponentSpec)
    metadata = resource["metadata"]
    labels = objects.labels_of(resource)
    graph = labels.get(objects.GRAPH_LABEL, metadata["name"])
    discovery = read_discovery(_annotations(resource, spec), settings)
    return ServiceComponent(
        name=metadata["name"],
        namespace=metadata["namespace"],
        graph=graph,
        dynamo_namespace=identity.find_namespace(resource),
        spec=spec,
        settings=settings,
        discovery=discovery,
        generation=labels.get(objects.HASH_LABEL, ""),
    )


def make_objects(
    component: ServiceComponent, owner: Object, *, uses_grove: bool = False
) -> list[Object]:
    """Return the objects of a component. Raises ConfigError for a spec that cannot run."""
    spec = component.spec
    desired: list[Object] = []
    has_service = spec.role == "frontend" or component.discovery == "kubernetes"
    if (has_service or spec.multinode) and not _SERVICE_NAME.fullmatch(component.name):
        raise errors.ConfigError(
            f"service {component.service}: {component.name} cannot be the name of a Service, which has letters, digits"
            " and - and begins with a letter: rename the deployment"
        )
    if spec.pvc is not None and spec.pvc.create:
        desired.append(make_claim(spec.pvc, owner, component.labels))
    if spec.multinode is not None:
        make_groups = make_pod_clique_set if uses_grove else make_leader_worker_set
        desired.append(make_groups(component, owner, spec.multinode.node_count))
    else:
        desired.append(make_deployment(component, owner))
        if spec.autoscaling is not None and spec.autoscaling.enabled:
            desired.append(make_autoscaler(component, owner, spec.autoscaling))
    if has_service:
        desired.append(_make_service(component, owner))
    if spec.ingress is not None and spec.ingress.enabled:
        make = _make_virtual_service if spec.ingress.use_virtual_service else _make_ingress
        desired.append(make(component, owner, spec.ingress))
    return desired


def make_claim(
    claim: api_types.ServiceVolumeClaim | api_types.GraphVolumeClaim,
    owner: Object,
    labels: dict[str, str],
) -> Object:
    """Return a PersistentVolumeClaim, without owner: models and profiles outlive a deployment."""
    spec: Object = {
        "accessModes": [claim.volume_access_mode or "ReadWriteOnce"],
        "resources": {"requests": {"storage": str(claim.size)}},
    }
    if claim.storage_class:
        spec["storageClassName"] = claim.storage_class
    desired = objects.make_object(
        "v1", "PersistentVolumeClaim", claim.name or "", owner, labels=labels, spec=spec
    )
    del desired["metadata"]["ownerReferences"]
    return desired


def _make(
    component: ServiceComponent, owner: Object, api_version: str, kind: str, **content: Any
) -> Object:
    """Return an object with the component's name, labels and annotations."""
    return objects.make_object(
        api_version,
        kind,
        component.name,
        owner,
        labels=component.labels,
        annotations=component.spec.annotations,
        **content,
    )


def make_deployment(component: ServiceComponent, owner: Object) -> Object:
    """Return the Deployment; an autoscaler sets its replicas where there is one."""
    annotations = _annotations(owner, component.spec)
    surge, unavailable = (
        read_share(annotations, name) for name in (SURGE_ANNOTATION, UNAVAILABLE_ANNOTATION)
    )
    if surge in (0, "0%") and unavailable in (0, "0%"):
        raise errors.ConfigError(
            f"annotations {SURGE_ANNOTATION} and {UNAVAILABLE_ANNOTATION}: one of them must be above 0, or no pod can"
            " be replaced"
        )
    spec: Object = {
        "selector": {"matchLabels": {objects.SELECTOR_LABEL: component.name}},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
        },
        "template": pod_template.make_template(component),
    }
    autoscaling = component.spec.autoscaling
    if autoscaling is None or not autoscaling.enabled:
        spec["replicas"] = _num_replicas(component)
    return _make(component, owner, "apps/v1", "Deployment", spec=spec)


def read_share(annotations: dict[str, str], name: str) -> int | str:
    """Return a number of pods or a share such as 25%, the default. Raises ConfigError."""
    value = annotations.get(name, "25%")
    number = value.removesuffix("%")
    if not number.isdecimal():
        raise errors.ConfigError(f"annotation {name}: expected 1 or 25%, got {value!r}")
    return f"{int(number)}%" if value.endswith("%") else int(number)


def make_leader_worker_set(component: ServiceComponent, owner: Object, num_nodes: int) -> Object:
    """Return the groups of pods of a multinode service. Raises ConfigError where none can be made."""
    if not component.settings.enable_lws:
        raise errors.ConfigError(
            f"service {component.service}: multinode needs Grove or LeaderWorkerSets; install Grove, or the controller"
            " of LeaderWorkerSets, and start the operator with --enable-lws"
        )
    num_replicas = _num_replicas(component)
    most = _MAX_SET_NAME - len(f"-{max(0, num_replicas - 1)}")  # a StatefulSet for each group
    if len(component.name) > most:
        raise errors.ConfigError(
            f"service {component.service}: {num_replicas} LeaderWorkerSet groups take at most {most} characters of"
            f" {component.name}: shorten the name of the deployment or of the service"
        )
    templates = _make_node_templates(component, num_nodes, pod_template.LEADER_WORKER_SET)
    spec = {
        "replicas": num_replicas,
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
        },
        "leaderWorkerTemplate": {
            "size": num_nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": templates[0],
            "workerTemplate": templates[1],
        },
    }
    return _make(component, owner, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", spec=spec)


def _num_replicas(component: ServiceComponent) -> int:
    return 1 if component.spec.replicas is None else component.spec.replicas


def _make_node_templates(
    component: ServiceComponent, num_nodes: int, join: pod_template.Join
) -> list[Object]:
    """Return the pod templates of the leader and of the other nodes of a replica."""
    template = pod_template.make_template(component)
    main = template["spec"]["containers"][0]  # whatever name the user gives it
    containers = pod_template.spread_over_nodes(component, main, num_nodes, join)
    return [
        objects.merge(template, {"spec": {"containers": [container]}}) for container in containers
    ]


def make_pod_clique_set(component: ServiceComponent, owner: Object, num_nodes: int) -> Object:
    """Return the gangs of a multinode service, each of them a replica of a Grove set. Raises ConfigError.

    The original puts a scaling group into one set for the whole graph. Grove takes the replicas of such a group
    from the set only when it makes the group, while those of a set can be changed.
    """
    if len(component.name) > _MAX_GROVE_NAME:
        raise errors.ConfigError(
            f"service {component.service}: Grove takes at most {_MAX_GROVE_NAME} characters of {component.name}:"
            f' shorten the name of the deployment or of the service, or set the annotation {GROVE_ANNOTATION}: "false"'
        )
    templates = _make_node_templates(component, num_nodes, pod_template.GROVE)
    cliques = [
        {
            "name": name,
            **template["metadata"],
            "spec": {
                "roleName": name,
                "replicas": count,
                "minAvailable": count,
                "podSpec": template["spec"],
            },
        }
        for name, count, template in zip(("ldr", "wkr"), (1, num_nodes - 1), templates, strict=True)
    ]
    spec = {
        "replicas": _num_replicas(component),
        "template": {
            "terminationDelay": component.settings.grove_termination_delay,
            "headlessServiceConfig": {
                "publishNotReadyAddresses": True
            },  # nodes join while they start
            "cliques": cliques,
        },
    }
    return _make(component, owner, "grove.io/v1alpha1", "PodCliqueSet", spec=spec)


def _make_service(component: ServiceComponent, owner: Object) -> Object:
    """Return the Service of a frontend or, so that others discover the pods by its slices, a headless one."""
    ports = [
        {"name": entry["name"], "port": entry["containerPort"], "targetPort": entry["name"], "protocol": "TCP"}
        for entry in pod_template.make_ports(component.spec.role)
    ]  # fmt: skip
    spec: Object = {"selector": {objects.SELECTOR_LABEL: component.name}}
    if ports:
        spec["ports"] = ports
    if component.spec.role != "frontend":
        spec["clusterIP"] = "None"
    return _make(component, owner, "v1", "Service", spec=spec)


def make_autoscaler(
    component: ServiceComponent, owner: Object, autoscaling: api_types.Autoscaling
) -> Object:
    """Return the HorizontalPodAutoscaler of a component."""
    least = 1 if autoscaling.min_replicas is None else autoscaling.min_replicas
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": component.name}
    utilization = {"type": "Utilization", "averageUtilization": _CPU_PERCENT}
    by_cpu = {"type": "Resource", "resource": {"name": "cpu", "target": utilization}}
    spec: Object = {
        "scaleTargetRef": target,
        "minReplicas": least,
        "maxReplicas": max(least, autoscaling.max_replicas or least),
        "metrics": autoscaling.metrics or [by_cpu],
    }
    if autoscaling.behavior:
        spec["behavior"] = autoscaling.behavior
    return _make(component, owner, "autoscaling/v2", "HorizontalPodAutoscaler", spec=spec)


def _make_ingress(
    component: ServiceComponent, owner: Object, ingress: api_types.IngressSpec
) -> Object:
    settings = component.settings
    host = pod_template.ingress_host(component)
    backend = {"service": {"name": component.name, "port": {"number": pod_template.HTTP_PORT}}}
    path = {"path": "/", "pathType": "Prefix", "backend": backend}
    spec: Object = {"rules": [{"host": host, "http": {"paths": [path]}}]}
    name = ingress.ingress_controller_class_name or settings.ingress_controller_class_name
    if name:
        spec["ingressClassName"] = name
    secret = (ingress.tls and ingress.tls.secret_name) or (
        settings.ingress_controller_tls_secret_name
    )
    if secret:
        spec["tls"] = [{"hosts": [host], "secretName": secret}]
    desired = _make(component, owner, "networking.k8s.io/v1", "Ingress", spec=spec)
    return _decorate(desired, ingress)


def _make_virtual_service(
    component: ServiceComponent, owner: Object, ingress: api_types.IngressSpec
) -> Object:
    gateway = ingress.virtual_service_gateway or component.settings.istio_virtual_service_gateway
    if not gateway:
        raise errors.ConfigError(
            f"service {component.service}: ingress.useVirtualService: expected virtualServiceGateway, or"
            " --istio-virtual-service-gateway of the operator"
        )
    address = {"host": component.name, "port": {"number": pod_template.HTTP_PORT}}
    spec = {
        "hosts": [pod_template.ingress_host(component)],
        "gateways": [gateway],
        "http": [{"match": [{"uri": {"prefix": "/"}}], "route": [{"destination": address}]}],
    }
    desired = _make(component, owner, "networking.istio.io/v1beta1", "VirtualService", spec=spec)
    return _decorate(desired, ingress)


def _decorate(desired: Object, ingress: api_types.IngressSpec) -> Object:
    metadata = {"labels": ingress.labels or {}, "annotations": ingress.annotations or {}}
    return objects.merge(desired, {"metadata": {key: v for key, v in metadata.items() if v}})  # type: ignore[no-any-return]


def find_cause(
    component: ServiceComponent, observed: Observed, workload: Object | None
) -> causes.Cause | None:
    """Return why the component is not available, or None if it is."""
    if workload is None:
        return None
    existing = observed.find(workload["kind"], component.name)
    num_wanted = int({**(existing or {}).get("spec", {}), **workload["spec"]}.get("replicas", 1))
    template_hash = _template_labels(workload)[objects.TEMPLATE_LABEL]
    # what is about to be changed says nothing of its new form
    is_current = existing is not None and (
        _template_labels(existing).get(objects.TEMPLATE_LABEL) == template_hash
    )
    if existing is not None and is_current and objects.is_available(existing, num_wanted):
        return None
    cause = causes.first_cause(
        observed.pods_of(component.name, is_each=True),
        template_hash=template_hash,
        missing=[*causes.find_refusals(existing), *find_missing(component, observed)],
        num_wanted=num_wanted,
        starts=observed.starts,
    )
    # not a container that prepares the frontend or stands beside it
    main = component.main_overrides.get("name", pod_template.MAIN)
    if component.spec.role == "frontend" and cause.unready_container == main:
        return causes.Cause("Waiting", "the frontend waits for the first worker of a model")
    return cause


def _template_labels(workload: Object) -> dict[str, str]:
    """Return the labels of a workload's pods, of the leaders where there are groups of nodes."""
    spec = workload["spec"]
    if workload["kind"] == "PodCliqueSet":
        return dict(spec["template"]["cliques"][0]["labels"])
    template = spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"]
    return dict(template["metadata"]["labels"])


def find_missing(component: ServiceComponent, observed: Observed) -> list[causes.Cause]:
    """Return the causes that lie in objects which the pods name and which do not exist."""
    claims = {mount.name for mount in component.spec.volume_mounts or ()}
    missing = [
        causes.Cause("VolumeMissing", f"the PersistentVolumeClaim {name} does not exist: create it")
        for name in sorted(claims)
        if observed.find("PersistentVolumeClaim", name) is None
    ]
    secret = component.spec.env_from_secret
    if secret and observed.find("Secret", secret) is None:
        text = f"the Secret {secret} does not exist; only models that need its values cannot start"
        missing.append(causes.Cause("SecretMissing", text))
    return missing


def _status(
    resource: Object,
    observed: Observed,
    workload: Object | None,
    cause: causes.Cause | None,
    notes: Sequence[str],
) -> Object:
    """Return the status of a component: available if nothing keeps it from being so; `notes` are of what is absent."""
    kind = workload["kind"] if workload else "Deployment"
    status = (observed.find(kind, resource["metadata"]["name"]) or {}).get("status") or {}
    is_available = cause is None
    reason = "MinimumReplicasAvailable" if cause is None else cause.reason
    message = "; ".join((ALL_READY, *notes)) if cause is None else cause.message
    now = observed.now
    return {
        "observedGeneration": resource["metadata"].get("generation", 0),
        "conditions": [
            objects.make_condition("Available", is_available, reason, message, resource, now),
            objects.make_condition(
                "DynamoComponentReady", is_available, reason, message, resource, now
            ),
        ],
        "podSelector": {objects.SELECTOR_LABEL: resource["metadata"]["name"]},
        "replicas": status.get("replicas", 0),
        "readyReplicas": status.get("readyReplicas", status.get("availableReplicas", 0)),
    }
