"""The custom resources of the group nvidia.com, version v1alpha1, as Python types.

`make crds` writes the definitions, which the API server checks, from them; the operator reads stored objects by the
same types (`read_spec`), so an object from before a stricter definition is refused with the field. Rules in CEL
(`RULES`) check what concerns several fields. Names and meaning are those of NVIDIA Dynamo 0.4.1 and later.

The fields of Kubernetes's PodSpec and Container are one level deep: they let the API server refuse a mistyped field of
`extraPodSpec`; what is in a field is checked when the operator applies the Deployment. The complete schema of a pod
would make each custom resource definition twenty times as large.
"""  # decider

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from dynamo.base import errors

_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "number": {"type": "integer", "format": "int64"},
    "object": {"type": "object", **_OPEN},
    "objects": {"type": "array", "items": {"type": "object", **_OPEN}},
    "texts": {"type": "array", "items": {"type": "string"}},
}
_CONTAINER = {
    "text": "image imagePullPolicy name restartPolicy terminationMessagePath terminationMessagePolicy workingDir",
    "flag": "stdin stdinOnce tty",
    "object": "lifecycle livenessProbe readinessProbe resources securityContext startupProbe",
    "objects": "env envFrom ports resizePolicy restartPolicyRules volumeDevices volumeMounts",
    "texts": "args command",
}
_POD = {
    "text": "dnsPolicy hostname hostnameOverride nodeName preemptionPolicy priorityClassName restartPolicy"
    " runtimeClassName schedulerName serviceAccount serviceAccountName subdomain",
    "flag": "automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID hostUsers setHostnameAsFQDN"
    " shareProcessNamespace",
    "number": "activeDeadlineSeconds priority terminationGracePeriodSeconds",
    "object": "affinity dnsConfig nodeSelector os overhead resources securityContext",
    "objects": "containers ephemeralContainers hostAliases imagePullSecrets initContainers readinessGates"
    " resourceClaims schedulingGates tolerations topologySpreadConstraints volumes",
}


def _properties(names_by_kind: dict[str, str]) -> dict[str, Any]:
    return {
        name: _SCHEMAS[kind]
        for kind, names in sorted(names_by_kind.items())
        for name in names.split()
    }


CONTAINER_SCHEMA = {"type": "object", "properties": _properties(_CONTAINER)}
EXTRA_POD_SCHEMA = {
    "type": "object",
    "properties": {**_properties(_POD), "mainContainer": CONTAINER_SCHEMA},
}
_TEXTS_BY_NAME = {
    "type": "object",
    "additionalProperties": {"type": "string"},
    "maxProperties": 256,
}
POD_TEMPLATE_SCHEMA = {
    "type": "object",
    "properties": {
        "metadata": {
            "type": "object",
            "properties": {"labels": _TEXTS_BY_NAME, "annotations": _TEXTS_BY_NAME},
        },
        "spec": {"type": "object", "properties": _properties(_POD)},
    },
}
PROBE_SCHEMA = _SCHEMAS["object"]


GROUP, VERSION = "nvidia.com", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
MAX_SERVICES = 25
MAX_DERIVED_NAME = 54  # 63 characters of a label, less "-" and the eight digits of a generation
QUANTITY = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
_PREFILL_FLAG = re.compile("--is-prefill-worker|--(disaggregation-mode|worker-type)[ =]prefill")
S = TypeVar("S", bound="Resource")

Texts = Annotated[dict[str, str], Meta(max_length=256)]
Name = Annotated[str, Meta(max_length=253)]
Namespace = Annotated[str, Meta(pattern="^[a-z0-9-_]+$", max_length=63)]
Amount = Annotated[str, Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, le=100_000, extra_json_schema={"format": "int32"})]
Quantity = Annotated[int | str, Meta(extra_json_schema={"pattern": QUANTITY})]
OpenObject = Annotated[
    dict[str, Any], Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})
]
Probe = Annotated[dict[str, Any], Meta(extra_json_schema=PROBE_SCHEMA)]
ExtraPodSpec = Annotated[dict[str, Any], Meta(extra_json_schema=EXTRA_POD_SCHEMA)]
OpenObjects = Annotated[list[OpenObject], Meta(max_length=256)]
Framework = Literal["sglang", "vllm", "trtllm"]


class Resource(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=True):
    """A part of a custom resource, in camel case; absent fields are None."""


class EnvironmentVariable(Resource):
    """A variable of the environment, as in a container."""

    name: Annotated[str, Meta(max_length=256)]
    value: str | None = None
    value_from: OpenObject | None = None

    def render(self) -> dict[str, Any]:
        """Return the entry of a container's env."""
        if self.value_from is not None:
            return {"name": self.name, "valueFrom": self.value_from}
        return {"name": self.name, "value": self.value or ""}


class ResourceAmounts(Resource):
    """Amounts of resources; `gpu` counts devices of nvidia.com/gpu, `custom` names any other resource."""

    cpu: Amount | None = None
    memory: Amount | None = None
    gpu: Amount | None = None
    custom: Texts | None = None


class ResourceDemand(Resource):
    """Resources of the main container."""

    requests: ResourceAmounts | None = None
    limits: ResourceAmounts | None = None


class Autoscaling(Resource):
    """A HorizontalPodAutoscaler for the service; without metrics it follows 80 % of the requested CPU."""

    RULES: ClassVar = (
        (
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas must not be greater than maxReplicas",
        ),
    )
    enabled: bool | None = None
    min_replicas: Count | None = None
    max_replicas: Count | None = None
    behavior: OpenObject | None = None
    metrics: OpenObjects | None = None


class ServiceVolumeClaim(Resource):
    """A PersistentVolumeClaim, made by the operator if `create` is true, mounted at `mountPoint`."""

    RULES: ClassVar = (
        (
            "!has(self.create) || !self.create || (has(self.name) && has(self.size))",
            "a claim that is to be created needs a name and a size, such as size: 50Gi",
        ),
    )
    create: bool | None = None
    name: Name | None = None
    storage_class: Name | None = None
    size: Quantity | None = None
    volume_access_mode: Name | None = None
    mount_point: Annotated[str, Meta(max_length=1024)] | None = None

    def __post_init__(self) -> None:
        if self.mount_point and not self.name:
            raise ValueError("expected the name of the claim beside mountPoint")


class VolumeMountPoint(Resource):
    """Where a claim of `pvcs` is mounted; as compilation cache of the engine with `useAsCompilationCache`."""

    name: Name
    mount_point: Annotated[str, Meta(max_length=1024)] | None = None
    use_as_compilation_cache: bool | None = None


class IngressTls(Resource):
    """The certificate of an Ingress."""

    secret_name: Name | None = None


class IngressSpec(Resource):
    """An Ingress, or a VirtualService of Istio, before the frontend."""

    enabled: bool | None = None
    host: Name | None = None
    use_virtual_service: bool | None = None
    virtual_service_gateway: Name | None = None
    host_prefix: Name | None = None
    annotations: Texts | None = None
    labels: Texts | None = None
    tls: IngressTls | None = None
    host_suffix: Name | None = None
    ingress_controller_class_name: Name | None = None


class ExtraPodMetadata(Resource):
    """Labels and annotations that are added to the pods."""

    annotations: Texts | None = None
    labels: Texts | None = None


class Multinode(Resource):
    """Nodes over which one replica of the engine is spread."""

    node_count: Annotated[int, Meta(ge=2, le=1024, extra_json_schema={"format": "int32"})] = 2


class SharedMemorySpec(Resource):
    """The size of /dev/shm, or that there is none."""

    disabled: bool | None = None
    size: Quantity | None = None


class ScalingAdapterSpec(Resource):
    """With `enabled`, a DynamoGraphDeploymentScalingAdapter sets the replicas: the target of an HPA or of KEDA."""

    enabled: bool | None = None


class ServedModelReference(Resource):
    """The model that the workers serve, by which DynamoModels find them."""

    name: Name
    revision: Name | None = None


class ServiceFields(Resource):
    """The fields of one service that all versions spell alike."""

    annotations: Texts | None = None
    labels: Texts | None = None
    service_name: Name | None = None
    sub_component_type: Literal["prefill", "decode"] | None = None
    dynamo_namespace: Namespace | None = None
    global_dynamo_namespace: bool | None = None
    resources: ResourceDemand | None = None
    autoscaling: Autoscaling | None = None
    envs: Annotated[list[EnvironmentVariable], Meta(max_length=256)] | None = None
    env_from_secret: Name | None = None
    pvc: ServiceVolumeClaim | None = None
    volume_mounts: Annotated[list[VolumeMountPoint], Meta(max_length=100)] | None = None
    ingress: IngressSpec | None = None
    model_ref: ServedModelReference | None = None
    shared_memory: SharedMemorySpec | None = None
    scaling_adapter: ScalingAdapterSpec | None = None
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    replicas: Count | None = None
    multinode: Multinode | None = None


class ServiceSpec(ServiceFields):
    """One service of a graph: its role, its pods and what leads to them."""

    component_type: Name | None = None
    extra_pod_metadata: ExtraPodMetadata | None = None
    extra_pod_spec: ExtraPodSpec | None = None

    @property
    def role(self) -> str:
        """Return `frontend`, `worker`, `planner`, or another component type in lower case."""
        return (self.component_type or "").lower()

    @property
    def is_prefill(self) -> bool:
        """Return True for a worker that computes prompts for others."""
        main = (self.extra_pod_spec or {}).get("mainContainer") or {}
        words = " ".join([*main.get("command", ()), *main.get("args", ())])
        return self.sub_component_type == "prefill" or bool(_PREFILL_FLAG.search(words))


class ComponentSpec(ServiceSpec):
    """One component: the service of a graph, or one that stands alone."""

    dynamo_component: Name | None = None
    dynamo_tag: Name | None = None
    backend_framework: Framework | None = None


class GraphVolumeClaim(Resource):
    """A claim that services mount by `volumeMounts`; made by the operator if `create` is true."""

    RULES: ClassVar = (
        (
            "!has(self.create) || !self.create || has(self.size)",
            "a claim that is to be created needs a size, such as size: 50Gi",
        ),
    )
    name: Name
    create: bool | None = None
    storage_class: Name | None = None
    size: Quantity | None = None
    volume_access_mode: Name | None = None


class GraphSpec(Resource):
    """A graph of services that serve models together."""

    RULES: ClassVar = (
        (
            "!has(self.services) || self.services.all(a, self.services.all(b, !has(self.services[a].dynamoNamespace)"
            " || !has(self.services[b].dynamoNamespace)"
            " || self.services[a].dynamoNamespace == self.services[b].dynamoNamespace))",
            "all services need the same dynamoNamespace: processes of different namespaces do not find each other",
        ),
        (
            "!has(self.services) || self.services.all(a, a.matches('^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$'))",
            "names of services consist of letters, digits and -, since names of Deployments are made from them",
        ),
        (
            "!has(self.services) || self.services.all(a, self.services.exists_one(b,"
            " a.lowerAscii() == b.lowerAscii()))",
            "names of services must differ by more than upper and lower case, which names of Deployments have not",
        ),
    )
    dynamo_graph: Name | None = None
    services: Annotated[dict[str, ServiceSpec], Meta(max_length=MAX_SERVICES)] | None = None
    envs: Annotated[list[EnvironmentVariable], Meta(max_length=256)] | None = None
    pvcs: Annotated[list[GraphVolumeClaim], Meta(max_length=100)] | None = None
    backend_framework: Framework | None = None


class StatusCondition(Resource):
    """A condition, as Kubernetes defines it."""

    type: Annotated[
        str,
        Meta(
            max_length=316,
            pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
        ),
    ]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[
        str,
        Meta(min_length=1, max_length=1024, pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"),
    ]
    message: Annotated[str, Meta(max_length=32768)]
    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    observed_generation: (
        Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})] | None
    ) = None


class RollingUpdateStatus(Resource):
    """The progress of an update of the workers."""

    phase: Literal["Pending", "InProgress", "Completed"] | None = None
    start_time: str | None = None
    end_time: str | None = None
    updated_services: list[str] | None = None


class ServiceStatus(Resource):
    """The pods of a service, of all its generations."""

    component_names: list[str] | None = None
    replicas: Count | None = None
    ready_replicas: Count | None = None


class GraphStatus(Resource):
    """What the operator sees of a graph."""

    state: Name | None = None
    observed_generation: int | None = None
    conditions: list[StatusCondition] | None = None
    services: dict[str, ServiceStatus] | None = None
    rolling_update: RollingUpdateStatus | None = None


class ComponentStatus(Resource):
    """What the operator sees of a component."""

    conditions: list[StatusCondition]
    observed_generation: int | None = None
    pod_selector: Texts | None = None
    replicas: Count | None = None
    ready_replicas: Count | None = None


class GraphReference(Resource):
    """A service of a DynamoGraphDeployment of the same namespace."""

    name: Name
    service_name: Name


class ScalingSpec(Resource):
    """The replicas of one service of a graph, as an autoscaler sets them."""

    RULES: ClassVar = (("self.dgdRef == oldSelf.dgdRef", "dgdRef is immutable: make another one"),)
    replicas: Count
    dgd_ref: GraphReference


class ScalingStatus(Resource):
    """What an autoscaler reads."""

    replicas: Count | None = None
    selector: str | None = None


class ModelSource(Resource):
    """Where an adapter's files are, such as file:///adapters/poet, seen from the workers."""

    uri: Annotated[str, Meta(max_length=2048)]


class ModelSpec(Resource):
    """A model, or a LoRA adapter that the workers of its base model load."""

    RULES: ClassVar = (
        (
            "!has(self.modelType) || self.modelType == 'base' || has(self.source)",
            "an adapter needs source.uri",
        ),
        (
            "self == oldSelf",
            "a model is immutable: make another one under a new name, since KV blocks are cached by the name",
        ),
    )
    model_name: Name
    base_model_name: Name
    model_type: Literal["base", "lora", "adapter"] | None = None
    source: ModelSource | None = None


class ModelStatus(Resource):
    """Which workers have the model."""

    endpoints: list[OpenObject] | None = None
    ready_endpoints: Count | None = None
    total_endpoints: Count | None = None
    conditions: list[StatusCondition] | None = None


class RequestSpec(Resource):
    """A deployment that is found by profiling: a model and targets in, a DynamoGraphDeployment out."""

    model: Name
    backend: Framework | None = None
    use_mocker: bool | None = None
    enable_gpu_discovery: bool | None = None
    profiling_config: OpenObject | None = None
    auto_apply: bool | None = None
    deployment_overrides: OpenObject | None = None


class RequestStatus(Resource):
    """How far the profiling is."""

    state: (
        Literal["Pending", "Profiling", "Deploying", "Ready", "DeploymentDeleted", "Failed"] | None
    ) = None
    observed_generation: int | None = None
    conditions: list[StatusCondition] | None = None
    generated_deployment: OpenObject | None = None


class WorkerMetadataSpec(Resource):
    """What one pod registers: its endpoints and model cards, as `runtime.discovery` keeps them."""

    data: OpenObject | None = None


def read_spec(resource: dict[str, Any], kind: type[S]) -> S:
    """Return the spec of an object. Raises ConfigError with the field that is wrong."""
    try:
        return msgspec.convert(resource.get("spec") or {}, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("$.", "spec.")
        raise errors.ConfigError(f"{resource['metadata']['name']}: {text}") from error
