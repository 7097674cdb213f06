"""The versions of a DynamoGraphDeployment: v1alpha1, which is stored, and v1beta1, with pod templates.

`convert` loses nothing in either direction: a field of v1alpha1 that pod templates do not express stands in v1beta1
under its own name. So an object that is read and written back in the other version has the workers that it had, and no
update starts. Annotations keep the order of v1beta1's components, which v1alpha1's map has not, and the names that
v1alpha1 gives to main containers, which are called `main` in v1beta1.
"""  # decider

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from dynamo.base import errors
from dynamo.operator import api_types

Object = dict[str, Any]
BETA_VERSION = "v1beta1"
BETA_API_VERSION = f"{api_types.GROUP}/{BETA_VERSION}"
ORDER_ANNOTATION = f"{api_types.GROUP}/component-order"
MAIN_NAMES_ANNOTATION = f"{api_types.GROUP}/main-container-names"  # Decode=engine,Prefill=engine
_MAIN = "main"
_ROLES = ("prefill", "decode")
_RENAMED_OF_GRAPH = {"env": "envs"}  # v1beta1 → v1alpha1

PodTemplate = Annotated[dict[str, Any], Meta(extra_json_schema=api_types.POD_TEMPLATE_SCHEMA)]
ComponentName = Annotated[str, Meta(pattern="^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$", max_length=63)]


class BetaComponent(api_types.ServiceFields, kw_only=True):
    """One component of a graph: its role, its pods and what leads to them."""

    name: ComponentName
    type: api_types.Name | None = None
    shared_memory_size: api_types.Quantity | None = None
    pod_template: PodTemplate | None = None


class BetaGraphSpec(api_types.Resource, kw_only=True):
    """A graph of components that serve models together."""

    RULES: ClassVar = (
        (
            "!has(self.components) || self.components.all(a, self.components.all(b, !has(a.dynamoNamespace)"
            " || !has(b.dynamoNamespace) || a.dynamoNamespace == b.dynamoNamespace))",
            "all components need the same dynamoNamespace: processes of different namespaces do not find each other",
        ),
        (
            "!has(self.components) || self.components.all(a, self.components.exists_one(b,"
            " a.name.lowerAscii() == b.name.lowerAscii()))",
            "names of components must differ by more than upper and lower case, which names of Deployments have not",
        ),
    )
    dynamo_graph: api_types.Name | None = None
    components: (
        Annotated[
            list[BetaComponent],
            Meta(
                max_length=api_types.MAX_SERVICES,
                extra_json_schema={
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                },
            ),
        ]
        | None
    ) = None
    env: Annotated[list[api_types.EnvironmentVariable], Meta(max_length=256)] | None = None
    pvcs: Annotated[list[api_types.GraphVolumeClaim], Meta(max_length=100)] | None = None
    backend_framework: api_types.Framework | None = None


class _ContainersForm(msgspec.Struct):
    containers: list[dict[str, Any]] | None = None


class _TemplateForm(msgspec.Struct):
    metadata: dict[str, Any] | None = None
    spec: _ContainersForm | None = None


class _ComponentForm(msgspec.Struct):
    name: str
    podTemplate: _TemplateForm | None = None


class _SpecForm(msgspec.Struct):
    components: list[_ComponentForm] | None = None


class _BetaForm(msgspec.Struct):
    """What a conversion reads of v1beta1; the API server converts before it checks by the schema."""

    spec: _SpecForm | None = None


def convert(resource: Object, api_version: str) -> Object:
    """Return a DynamoGraphDeployment in a version. Raises ConfigError for no such version, or not such a form."""
    given = resource.get("apiVersion")
    versions = (api_types.API_VERSION, BETA_API_VERSION)
    if given not in versions or api_version not in versions:
        raise errors.ConfigError(
            f"expected versions {' and '.join(versions)}, got {given} and {api_version}"
        )
    if given == api_version:
        return resource
    change = _to_beta if api_version == BETA_API_VERSION else _to_alpha
    return change({**resource, "apiVersion": api_version})


def _to_beta(resource: Object) -> Object:
    metadata, annotations = _split_annotations(resource)
    order = annotations.pop(ORDER_ANNOTATION, "").split(",")
    if annotations:
        metadata["annotations"] = annotations
    if not resource.get("spec"):
        return {**resource, "metadata": metadata}
    spec = {key: value for key, value in resource["spec"].items() if key != "services"}
    for later, earlier in _RENAMED_OF_GRAPH.items():
        if earlier in spec:
            spec[later] = spec.pop(earlier)
    if "services" in resource["spec"]:
        services = resource["spec"]["services"] or {}
        places = {name: n for n, name in enumerate(order)}
        names = sorted(services, key=lambda name: (places.get(name, len(places)), name))
        spec["components"] = [_make_component(name, services[name] or {}) for name in names]
        mains = {name: (_main_container(services[name]) or {}).get("name") for name in names}
        if pairs := [f"{name}={main}" for name, main in mains.items() if main is not None]:
            metadata.setdefault("annotations", {})[MAIN_NAMES_ANNOTATION] = ",".join(pairs)
    return {**resource, "metadata": metadata, "spec": spec}


def _main_container(service: Object | None) -> Object | None:
    container: Object | None = ((service or {}).get("extraPodSpec") or {}).get("mainContainer")
    return container


def check_form(resource: Object) -> None:
    """Raise ConfigError for a deployment of v1beta1 with components of another form."""
    try:
        msgspec.convert(resource, _BetaForm)
    except msgspec.ValidationError as error:
        raise errors.ConfigError(
            f"expected components as `kubectl explain dgd.spec.components` shows them: {error}"
        ) from error


def _to_alpha(resource: Object) -> Object:
    check_form(resource)
    metadata, annotations = _split_annotations(resource)
    annotations.pop(ORDER_ANNOTATION, None)
    pairs = [pair.split("=") for pair in annotations.pop(MAIN_NAMES_ANNOTATION, "").split(",")]
    given_spec = resource.get("spec") or {}
    components = given_spec.get("components") or ()
    names = [component["name"] for component in components]
    if names != sorted(names):
        annotations[ORDER_ANNOTATION] = ",".join(names)
    if annotations:
        metadata["annotations"] = annotations
    if not given_spec:
        return {**resource, "metadata": metadata}
    spec = {key: value for key, value in given_spec.items() if key != "components"}
    for later, earlier in _RENAMED_OF_GRAPH.items():
        if later in spec:
            spec[earlier] = spec.pop(later)
    if "components" in given_spec:
        services = spec["services"] = {entry["name"]: _make_service(entry) for entry in components}
        for name, *main in pairs:
            if main and (container := _main_container(services.get(name))) is not None:
                container["name"] = main[0]
    return {**resource, "metadata": metadata, "spec": spec}


def _split_annotations(resource: Object) -> tuple[Object, dict[str, str]]:
    """Return the metadata without its annotations, and these."""
    metadata = dict(resource.get("metadata") or {})
    return metadata, dict(metadata.pop("annotations", None) or {})


def _make_component(name: str, service: Mapping[str, Any]) -> Object:
    """Return the component of v1beta1 for a service of v1alpha1."""
    fields, component = dict(service), {"name": name}
    if "componentType" in fields:
        component["type"] = fields.pop("componentType")
        if component["type"] == "worker" and fields.get("subComponentType") in _ROLES:
            component["type"] = fields.pop("subComponentType")
    if (fields.get("sharedMemory") or {}).keys() == {"size"}:
        component["sharedMemorySize"] = fields.pop("sharedMemory")["size"]
    template: Object = {}
    if "extraPodMetadata" in fields:
        template["metadata"] = fields.pop("extraPodMetadata")
    if "extraPodSpec" in fields:
        pod = dict(fields.pop("extraPodSpec") or {})
        if "mainContainer" in pod:
            main = {**(pod.pop("mainContainer") or {}), "name": _MAIN}
            match main.get("envFrom"):
                case None if "envFromSecret" in fields:
                    main["envFrom"] = [{"secretRef": {"name": fields.pop("envFromSecret")}}]
                case [{"secretRef": {"name": secret, **more}}] if not more:
                    main["envFrom"] = [{"secretRef": {"name": secret, "optional": False}}]
            pod["containers"] = [main, *(pod.get("containers") or ())]
        template["spec"] = pod
    return {**component, **fields, **({"podTemplate": template} if template else {})}


def _make_service(component: Mapping[str, Any]) -> Object:
    """Return the service of v1alpha1 for a component of v1beta1."""
    fields = {key: value for key, value in component.items() if key != "name"}
    service: Object = {}
    if "type" in fields:
        kind = fields.pop("type")
        service["componentType"] = "worker" if kind in _ROLES else kind
        if kind in _ROLES:
            service["subComponentType"] = kind
    if "sharedMemorySize" in fields:
        service["sharedMemory"] = {"size": fields.pop("sharedMemorySize")}
    template = fields.pop("podTemplate", None) or {}
    if "metadata" in template:
        service["extraPodMetadata"] = template["metadata"]
    if "spec" in template:
        pod = dict(template["spec"] or {})
        containers = pod.pop("containers", None) or []
        main = next((dict(item) for item in containers if item.get("name") == _MAIN), None)
        if main is not None:
            del main["name"]
            match main.get("envFrom"):
                case [{"secretRef": {"name": secret, **more}}] if not more:  # may be absent
                    del main["envFrom"]
                    service["envFromSecret"] = secret
                case [{"secretRef": {"name": secret, "optional": False, **more}}] if not more:
                    main["envFrom"] = [{"secretRef": {"name": secret}}]
            pod["mainContainer"] = main
        if sidecars := [item for item in containers if item.get("name") != _MAIN]:
            pod["containers"] = sidecars
        service["extraPodSpec"] = pod
    return {**fields, **service}
