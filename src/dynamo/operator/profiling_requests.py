"""The decider of one DynamoGraphDeploymentRequest: profile a model's worker, then write the deployment for its targets.

A Job runs `python -m dynamo.profiler`, whose last line is its recommendation in JSON; the operator reads it from the
log, so the pod needs no rights. From it follows a DynamoGraphDeployment, which stands in the status and, with
`autoApply`, is created once. The deployment is the user's from then on: it outlives its request, and is neither
changed nor made again.
"""  # decider

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from dynamo.base import errors
from dynamo.operator import api_types, causes, objects, pod_template, reviews
from dynamo.operator.objects import Object, Observed, Reconciliation
from dynamo.operator.settings import OperatorConfig
from dynamo.protocols import graph_deployment, pod_states

_LARGEST = graph_deployment.ProfiledSize(mode="disagg", num_prefill=1, num_decode=1)
_MEASURED_FIELDS = ("model", "backend", "useMocker", "profilingConfig")
_MEASURED_ANNOTATION = f"{api_types.GROUP}/profiled-spec-hash"  # of the Job and its pods
_CONDITIONS = ("Validation", "Profiling", "SpecGenerated", "DeploymentReady")
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_ObjectName = Annotated[str, msgspec.Meta(pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


class _Targets(msgspec.Struct):
    """The expected request, and the times that it may take in milliseconds."""

    isl: _Count = 3000
    osl: _Count = 150
    ttft: _Positive = 200.0
    itl: _Positive = 20.0


class _Sweep(msgspec.Struct, rename="camel"):
    """How long the profiler may measure."""

    budget_minutes: _Positive = 30.0


class _Hardware(msgspec.Struct):
    """What the deployment may use; each worker has one GPU."""

    num_gpus_per_node: _Count = 1


class _ProfilerSettings(msgspec.Struct):
    """The part of `profilingConfig.config` that the profiler has; a condition names the other fields."""

    sla: _Targets = msgspec.field(default_factory=_Targets)
    sweep: _Sweep = msgspec.field(default_factory=_Sweep)
    hardware: _Hardware = msgspec.field(default_factory=_Hardware)


class _ProfilingConfig(msgspec.Struct, rename="camel"):
    """The `profilingConfig` of a request."""

    profiler_image: str | None = None
    resources: dict[str, Any] = {}
    tolerations: list[dict[str, Any]] = []
    config: _ProfilerSettings = msgspec.field(default_factory=_ProfilerSettings)


class _Overrides(msgspec.Struct, rename="camel"):
    """The `deploymentOverrides` of a request."""

    name: _ObjectName | None = None
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    workers_image: str | None = None


def find_finished_pod(resource: Object, observed: Observed) -> str | None:
    """Return the name of the pod with a recommendation in its log that was not read yet."""
    if (resource.get("status") or {}).get("generatedDeployment"):
        return None
    name = resource["metadata"]["name"]
    for pod in observed.pods:
        phase = (pod.get("status") or {}).get("phase")
        is_own = objects.labels_of(pod).get(objects.REQUEST_LABEL) == name
        if is_own and phase == "Succeeded" and not _is_of_former_spec(pod, resource):
            return str(pod["metadata"]["name"])
    return None


def _digest_measured(resource: Object) -> str:
    """Return the digest of the part of a request that its Job measures."""
    spec = resource.get("spec") or {}
    return objects.digest({name: spec.get(name) for name in _MEASURED_FIELDS})


def _is_of_former_spec(item: Object, resource: Object) -> bool:
    """Return True for a Job, or a pod of one, that measures what the request asked for before a change."""
    digest = _digest_measured(resource)
    return objects.annotations_of(item).get(_MEASURED_ANNOTATION, digest) != digest


def decide(
    resource: Object, observed: Observed, settings: OperatorConfig, log: str
) -> Reconciliation:
    """Decide what a request needs next, and what its status is; `log` is that of the finished profiler, if any."""
    status: Object = resource.get("status") or {}
    try:
        spec = api_types.read_spec(resource, api_types.RequestSpec)
        job = make_job(resource, spec, settings)
        _check_deployment(resource, spec, settings)
    except errors.ConfigError as error:
        return _report(resource, observed, "Failed", ("Validation", "InvalidSpec", str(error)))
    generated = status.get("generatedDeployment")
    try:
        if generated is None and (log or find_finished_pod(resource, observed)):
            generated = make_deployment(resource, spec, read_size(log))
    except errors.ConfigError as error:
        return _report(resource, observed, "Failed", ("SpecGenerated", "Unreadable", str(error)))
    found_job = observed.find("Job", job["metadata"]["name"])
    if generated is None:
        failure = _find_failure(found_job, observed, resource)
        if failure is not None:
            return _report(resource, observed, "Failed", ("Profiling", "ProfilingFailed", failure))
        state = "Profiling" if found_job else "Pending"
        step = ("Profiling", *_describe_profiler(observed, resource))
        created = () if found_job else (job,)
        return _report(resource, observed, state, step, create=created)
    status_change = {"generatedDeployment": generated}
    if not spec.auto_apply:
        text = "the deployment stands in status.generatedDeployment; apply it"
        waiting = ("DeploymentReady", "NotApplied", text)
        return _report(resource, observed, "Ready", waiting, **status_change)
    found = observed.find(graph_deployment.KIND, generated["metadata"]["name"])
    was_made = status.get("state") in ("Deploying", "Ready", "DeploymentDeleted")
    name = resource["metadata"]["name"]
    is_own = found and objects.labels_of(found).get(objects.REQUEST_LABEL) == name
    if found is not None and not (was_made or is_own):
        text = (
            f"there is another deployment {generated['metadata']['name']}: delete it, or apply"
            " status.generatedDeployment under another name"
        )
        taken = ("DeploymentReady", "NameTaken", text)
        return _report(resource, observed, "Failed", taken, **status_change)
    if found is None and was_made:
        text = f"the deployment {generated['metadata']['name']} was deleted"
        gone = ("DeploymentReady", "DeploymentDeleted", text)
        return _report(resource, observed, "DeploymentDeleted", gone, **status_change)
    ready = objects.find_condition(found, "Ready")
    if ready.get("status") == "True":
        return _report(resource, observed, "Ready", None, **status_change)
    cause = ("DeploymentReady", "Deploying", str(ready.get("message") or "the deployment is made"))
    create = (generated,) if found is None else ()
    return _report(resource, observed, "Deploying", cause, create=create, **status_change)


def read_size(log: str) -> graph_deployment.ProfiledSize:
    """Return the recommendation in a profiler's log. Raises ConfigError."""
    lines = [line for line in log.splitlines() if line.startswith("{")]
    try:
        return msgspec.json.decode(lines[-1] if lines else "", type=graph_deployment.ProfiledSize)
    except msgspec.MsgspecError as error:
        raise errors.ConfigError(f"the profiler's log has no recommendation: {error}") from error


def _find_idle_fields(resource: Object) -> list[str]:
    """Return the fields of a request that have no effect here, most of them the original's."""
    spec = resource.get("spec") or {}
    kinds = {"profilingConfig": _ProfilingConfig, "deploymentOverrides": _Overrides}
    idle = [
        field
        for name, kind in kinds.items()
        for field in _find_unknown(spec.get(name) or {}, kind, f"spec.{name}")
    ]
    return [*(["spec.enableGpuDiscovery"] if spec.get("enableGpuDiscovery") else []), *idle]


def _find_unknown(part: Mapping[str, Any], kind: type[Any], place: str) -> Iterator[str]:
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in part.items():
        if name not in kinds:
            yield f"{place}.{name}"
        elif isinstance(value, Mapping) and hasattr(kinds[name], "__struct_fields__"):
            yield from _find_unknown(value, kinds[name], f"{place}.{name}")


def _read_part(part: Mapping[str, Any] | None, kind: type[Any], name: str) -> Any:
    try:
        return msgspec.convert(part or {}, kind)
    except msgspec.ValidationError as error:
        raise errors.ConfigError(str(error).replace("`$", f"`spec.{name}", 1)) from error


def make_job(resource: Object, spec: api_types.RequestSpec, settings: OperatorConfig) -> Object:
    """Return the Job that profiles one worker. Raises ConfigError."""
    profiling = _read_part(spec.profiling_config, _ProfilingConfig, "profilingConfig")
    config, name = profiling.config, resource["metadata"]["name"]
    flags = {
        "--backend": _engine(spec),
        "--model": spec.model,
        "--isl": config.sla.isl,
        "--osl": config.sla.osl,
        "--ttft": f"{config.sla.ttft:g}",
        "--itl": f"{config.sla.itl:g}",
        "--workers": config.hardware.num_gpus_per_node,
        "--budget-minutes": f"{config.sweep.budget_minutes:g}",
        "--output": "/tmp/profile",
        "--report": "json",
    }
    image = profiling.profiler_image or pod_template.FRAMEWORK_IMAGES[spec.backend or "vllm"]
    container: Object = {
        "name": pod_template.MAIN,
        "image": settings.substitute_image(image),
        "command": ["python3", "-m", "dynamo.profiler"],
        "args": [str(word) for pair in flags.items() for word in pair],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: Object = {"restartPolicy": "Never", "containers": [container]}
    device: Object = {} if spec.use_mocker else {"limits": {"nvidia.com/gpu": "1"}}
    if resources := objects.merge(device, profiling.resources):
        container["resources"] = resources
    if profiling.tolerations:
        pod["tolerations"] = profiling.tolerations
    if settings.restricted_security_context:
        pod["securityContext"] = pod_template.RESTRICTED_POD
        container["securityContext"] = pod_template.RESTRICTED_CONTAINER
    labels = {objects.REQUEST_LABEL: name, objects.MANAGED_BY: objects.FIELD_MANAGER}
    marks = {"labels": labels, "annotations": {_MEASURED_ANNOTATION: _digest_measured(resource)}}
    job_spec = {"backoffLimit": 1, "template": {"metadata": marks, "spec": pod}}
    return objects.make_object(
        "batch/v1", "Job", f"{name}-profile", resource, **marks, spec=job_spec
    )


def _engine(spec: api_types.RequestSpec) -> str:
    return "mocker" if spec.use_mocker else spec.backend or "vllm"


def make_deployment(
    resource: Object, spec: api_types.RequestSpec, size: graph_deployment.ProfiledSize
) -> Object:
    """Return the deployment of a size. Raises ConfigError."""
    overrides = _read_part(spec.deployment_overrides, _Overrides, "deploymentOverrides")
    metadata = resource["metadata"]
    own: Object = {
        "name": overrides.name or metadata["name"],
        "namespace": metadata["namespace"],
        "labels": {**overrides.labels, objects.REQUEST_LABEL: metadata["name"]},
    }
    if overrides.annotations:
        own["annotations"] = overrides.annotations
    worker = graph_deployment.WorkerTemplate(
        engine=_engine(spec),
        framework=spec.backend or "vllm",
        model=spec.model,
        image=overrides.workers_image,
        has_gpus=not spec.use_mocker,
    )
    return graph_deployment.make_graph(own, worker, size)


def _check_deployment(
    resource: Object, spec: api_types.RequestSpec, settings: OperatorConfig
) -> None:
    """Raise ConfigError if no recommendation could be applied, as under this name: it need not be measured."""
    largest = make_deployment(resource, spec, _LARGEST)
    if (resource.get("status") or {}).get("generatedDeployment"):
        return
    overrides = _read_part(spec.deployment_overrides, _Overrides, "deploymentOverrides")
    own_namespace = resource["metadata"]["namespace"]
    if overrides.namespace not in (None, own_namespace):
        raise errors.ConfigError(
            f"spec.deploymentOverrides.namespace: expected {own_namespace}, that of the request,"
            f" got {overrides.namespace}"
        )
    try:
        reviews.check_graph(largest, settings, is_new=True)
    except errors.ConfigError as error:
        text = f"{error}; spec.deploymentOverrides.name gives the deployment another name"
        raise errors.ConfigError(text) from error


def _find_pods(observed: Observed, resource: Object) -> list[Object]:
    """Return the pods of a request's profiler."""
    name = resource["metadata"]["name"]
    return [
        pod for pod in observed.pods if objects.labels_of(pod).get(objects.REQUEST_LABEL) == name
    ]


def _describe_profiler(observed: Observed, resource: Object) -> tuple[str, str]:
    """Return reason and message for a profiler that has not ended: what keeps its pod from starting, if anything."""
    running = causes.Cause("ProfilingRunning", "the profiler measures a worker")
    pods = [pod for pod in _find_pods(observed, resource) if not pod_states.has_ended(pod)]
    found = [cause for pod in pods if (cause := causes.pod_cause(pod)) is not None]
    cause = causes.select_first([each for each in found if each.reason != "Starting"], running)
    return cause.reason, cause.message


def _find_failure(job: Object | None, observed: Observed, resource: Object) -> str | None:
    """Return why profiling has failed, or None if it has not."""
    pods = _find_pods(observed, resource)
    if job and _is_of_former_spec(job, resource):
        return (
            "the profiler measured the request before it was changed;"
            f" after kubectl delete job {job['metadata']['name']} it measures it as it is"
        )
    if job and not pods and objects.find_condition(job, "Complete").get("status") == "True":
        job_name = job["metadata"]["name"]
        return (
            "the pod of the profiler has gone, and its recommendation with it;"
            f" after kubectl delete job {job_name} it measures again"
        )
    if objects.find_condition(job, "Failed").get("status") != "True":
        return None
    found = [cause for pod in pods if (cause := causes.pod_cause(pod)) is not None]
    return causes.select_first(found, causes.Cause("Failed", "the profiler has failed")).message


def _report(
    resource: Object,
    observed: Observed,
    state: str,
    cause: tuple[str, str, str] | None,
    *,
    create: tuple[Object, ...] = (),
    **status: Any,
) -> Reconciliation:
    """Return the decision with conditions: true before that of the cause, which is the first that is not.

    The message of the first, which is of the spec, names the fields without effect.
    """
    conditions = []
    for kind in _CONDITIONS:
        if cause is not None and kind == cause[0]:
            _, reason, message = cause
            conditions.append(
                objects.make_condition(kind, False, reason, message, resource, observed.now)
            )
            break
        idle = _find_idle_fields(resource) if kind == "Validation" else ()
        note = f"no effect: {', '.join(idle)}" if idle else ""
        conditions.append(
            objects.make_condition(kind, True, "Succeeded", note, resource, observed.now)
        )
    status |= {"observedGeneration": resource["metadata"].get("generation", 0)}
    status |= {"state": state, "conditions": conditions}
    return Reconciliation(status=status, create=create)
