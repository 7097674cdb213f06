"""The decider behind the operator's webhooks: reviews of DynamoGraphDeployments that the API server sends, and answers.

What the operator would refuse in the status is refused at apply instead, by the same deciders. A change that leaves
the spec as it is passes, so that an object from before a stricter operator can still be labelled and deleted.
"""  # decider

import base64
import difflib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.operator import component, graph, identity, objects, pod_template, versions
from dynamo.operator.objects import Object
from dynamo.operator.settings import OperatorConfig

_FIELDS_OF_BETA = (
    (r"extraPodSpec\.mainContainer", "podTemplate.spec.containers[name=main]"),
    (r"spec\.services\.([^. ]+)\.componentType", r"spec.components[name=\1].type"),
    (r"spec\.services\.([^. ]+)\.(?=[a-z])", r"spec.components[name=\1]."),
    (r"spec\.services: expected at least one service", "spec.components: expected at least one"),
)
_TYPES = ("frontend", "worker", "planner")
_IDLE = {  # why a field of a service has no effect
    "autoscaling": "has no effect on a multinode service; its replicas are those of the spec or the planner's",
    "autoscaling.maxReplicas": "expected a number; without it the replicas stay those of minReplicas, 1 by default",
    "scalingAdapter": "has no effect beside autoscaling, which sets the replicas",
    "dynamoNamespace": "has no effect beside globalDynamoNamespace: the namespace of all services is dynamo",
    "modelRef.revision": "has no effect: the command of the workers says which revision they serve",
    "ingress": "leads nowhere: only the Service of a frontend has a port for it",
}


class ConversionRequest(msgspec.Struct):
    """Objects that are wanted in another version."""

    uid: str
    desiredAPIVersion: str
    objects: list[dict[str, Any]]


class ConversionReview(msgspec.Struct):
    """What the API server sends for a conversion."""

    request: ConversionRequest


class AdmissionRequest(msgspec.Struct):
    """A write of one object, of which there is none in a deletion."""

    uid: str
    requestKind: dict[str, str] = msgspec.field(default_factory=dict)  # as it was written
    object: dict[str, Any] | None = None
    oldObject: dict[str, Any] | None = None


class _ScalersForm(msgspec.Struct):
    autoscaling: dict[str, Any] | None = None
    scalingAdapter: dict[str, Any] | None = None
    replicas: Any = None

    @property
    def is_scaled(self) -> bool:
        scalers = (self.autoscaling, self.scalingAdapter)
        return any((scaler or {}).get("enabled") for scaler in scalers)


class _ServicesForm(msgspec.Struct):
    services: dict[str, _ScalersForm] | None = None


class _GraphForm(msgspec.Struct):
    spec: _ServicesForm | None = None


class AdmissionReview(msgspec.Struct):
    """What the API server sends before it stores an object."""

    request: AdmissionRequest


def answer_conversion(review: ConversionReview) -> Object:
    """Return the objects of a review in the version that it asks for."""
    request, result, converted = review.request, {"status": "Success"}, []
    try:
        converted = [
            versions.convert(entry, request.desiredAPIVersion) for entry in request.objects
        ]
    except errors.ConfigError as error:
        result = {"status": "Failed", "message": str(error)}
    response = {"uid": request.uid, "result": result, "convertedObjects": converted}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "ConversionReview",
        "response": response,
    }


def answer_validation(review: AdmissionReview, settings: OperatorConfig) -> Object:
    """Refuse a deployment with a mistake that the schema cannot know."""
    request = review.request
    written, old = request.object, request.oldObject
    if written is None or (old is not None and written.get("spec") == old.get("spec")):
        return _answer(request, {"allowed": True})
    try:
        check_graph(written, settings, is_new=old is None)
        _check_replicas(written, old or {})
    except errors.ConfigError as error:
        status = {
            "code": 422,
            "reason": "Invalid",
            "message": _in_written_version(request, str(error)),
        }
        return _answer(request, {"allowed": False, "status": status})
    doubts = (*_find_doubtful_types(written), *_find_idle_fields(written))
    warnings = [_in_written_version(request, text) for text in doubts]
    return _answer(request, {"allowed": True} | ({"warnings": warnings} if warnings else {}))


def _check_replicas(written: Object, old: Object) -> None:
    """Raise ConfigError for replicas that are changed where a scaling adapter, which is there already, sets them."""
    former_services = (old.get("spec") or {}).get("services") or {}
    for name, service in written["spec"]["services"].items():
        former = former_services.get(name) or {}
        replicas = service.get("replicas")
        has_adapter, had_adapter = (
            (each.get("scalingAdapter") or {}).get("enabled")
            and not (each.get("autoscaling") or {}).get("enabled")
            for each in (service, former)
        )
        if has_adapter and had_adapter and replicas not in (None, former.get("replicas")):
            adapter = f"{written['metadata']['name']}-{name.lower()}"
            raise errors.ConfigError(
                f"spec.services.{name}.replicas: {replicas} would have no effect, since a scaling adapter sets the"
                f" replicas: kubectl scale dgdsa/{adapter} --replicas={replicas}"
            )


def _in_written_version(request: AdmissionRequest, message: str) -> str:
    """Return a message with the fields of the version that the user wrote: reviews have v1alpha1."""
    if request.requestKind.get("version") != versions.BETA_VERSION:
        return message
    for pattern, replacement in _FIELDS_OF_BETA:
        message = re.sub(pattern, replacement, message)
    return message


def _find_doubtful_types(resource: Object) -> Iterator[str]:
    """Yield a warning for each component type that looks like a known one with a typing error."""
    for name, service in (resource["spec"].get("services") or {}).items():
        given = service.get("componentType") or ""
        close = difflib.get_close_matches(given.lower(), _TYPES, 1)
        if close and given.lower() not in _TYPES:
            field = f"spec.services.{name}.componentType"
            yield f"{field}: {given} is none of {', '.join(_TYPES)}; did you mean {close[0]}?"


def _find_idle_fields(resource: Object) -> Iterator[str]:
    """Yield a warning for each field of a service that has no effect beside the others."""
    services = resource["spec"]["services"]
    is_global = any(service.get("globalDynamoNamespace") for service in services.values())
    for name, service in services.items():
        scaler, is_multinode = service.get("autoscaling") or {}, bool(service.get("multinode"))
        is_scaled = bool(scaler.get("enabled")) and not is_multinode
        is_frontend = (service.get("componentType") or "").lower() == "frontend"
        is_idle = {
            "autoscaling": scaler.get("enabled") and is_multinode,
            "autoscaling.maxReplicas": is_scaled and scaler.get("maxReplicas") is None,
            "scalingAdapter": is_scaled and (service.get("scalingAdapter") or {}).get("enabled"),
            "dynamoNamespace": is_global and service.get("dynamoNamespace") not in (None, "dynamo"),
            "modelRef.revision": (service.get("modelRef") or {}).get("revision"),
            "ingress": (service.get("ingress") or {}).get("enabled") and not is_frontend,
        }
        for field in filter(is_idle.get, is_idle):
            yield f"spec.services.{name}.{field}: {_IDLE[field]}"


def answer_defaulting(review: AdmissionReview) -> Object:
    """Write the number of replicas into services that name none and that nothing else scales."""
    request = review.request
    try:
        spec = msgspec.convert(request.object or {}, _GraphForm).spec
    except msgspec.ValidationError:  # the schema refuses it, but later
        return _answer(request, {"allowed": True})
    patch = [
        {"op": "add", "path": f"/spec/services/{_escape(name)}/replicas", "value": 1}
        for name, service in ((spec and spec.services) or {}).items()
        if service.replicas is None and not service.is_scaled
    ]
    response: Object = {"allowed": True}
    if patch:
        encoded = base64.b64encode(msgspec.json.encode(patch)).decode()
        response |= {"patchType": "JSONPatch", "patch": encoded}
    return _answer(request, response)


def _escape(name: str) -> str:
    """Return a name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _answer(request: AdmissionRequest, response: Object) -> Object:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": request.uid, **response},
    }


def check_graph(resource: Object, settings: OperatorConfig, *, is_new: bool) -> None:
    """Make the objects of a deployment as if nothing of it existed. Raises ConfigError.

    A new one is checked for its later updates as well.
    """
    metadata = resource["metadata"]
    name = metadata.get("name") or f"{metadata.get('generateName', '')}00000"  # as many follow
    resource = {**resource, "metadata": {"uid": "", "namespace": "", **metadata, "name": name}}
    nothing = objects.Observed(now="")
    read_graph = graph.read_graph(resource, nothing, settings)
    if is_new and read_graph.workers:
        identity.check_namespace(f"{read_graph.dynamo_namespace}-{'0' * 8}")
    for service, fields in resource["spec"]["services"].items():
        pod = fields.get("extraPodSpec") or {}
        names = [container.get("name") for container in pod.get("containers") or ()]
        if "mainContainer" in pod and pod_template.MAIN in names:
            raise errors.ConfigError(
                f"service {service}: extraPodSpec.containers: {pod_template.MAIN} is the main container of"
                f" {versions.BETA_VERSION}; call this one otherwise"
            )
    for item in graph.make_components(read_graph, nothing):
        item["metadata"]["uid"] = ""
        read = component.read_component(
            item, settings
        )  # whether Grove is there, only the status can say
        component.make_objects(read, item, uses_grove=not settings.enable_lws)
