"""The decider of one DynamoModel: which workers are to have the adapter, and what its status is.

Workers say by `modelRef` in their service which base model they serve; a DynamoModel with that `baseModelName` is
theirs. An adapter is loaded by every ready worker, again after a container has restarted, and unloaded before the
object goes: so this is the one kind with a finalizer, since an adapter is what no owner reference removes.
"""  # decider

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.base import addresses
from dynamo.operator import api_types, objects
from dynamo.operator.objects import Object, Observed
from dynamo.operator.pod_template import SYSTEM_PORT
from dynamo.protocols import pod_states

FINALIZER = f"{api_types.GROUP}/unload-adapter"


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """The system port of a worker that serves a base model."""

    pod: str
    address: str
    port: int
    is_ready: bool


def needs_adapter(spec: api_types.ModelSpec) -> bool:
    """Return True for an adapter, which workers have to load; a base model is what they serve anyway."""
    return spec.source is not None and spec.model_type != "base"


def is_shared(resource: Object, observed: Observed) -> bool:
    """Return True if an object that is not being deleted names the adapter of one that is."""
    fields = ("modelName", "baseModelName", "source")
    return any(
        item["kind"] == resource["kind"]
        and "deletionTimestamp" not in item["metadata"]
        and all(item["spec"].get(field) == resource["spec"].get(field) for field in fields)
        for item in observed.objects.values()
    )


def find_endpoints(base_model: str, observed: Observed) -> list[ModelEndpoint]:
    """Return the workers of the components that refer to a base model, by the name of their pod."""
    components = {
        name
        for (kind, name), item in observed.objects.items()
        if kind == "DynamoComponentDeployment"
        and (item["spec"].get("modelRef") or {}).get("name") == base_model
    }
    return [
        ModelEndpoint(
            pod=pod["metadata"]["name"],
            address=pod["status"]["podIP"],
            port=find_system_port(pod),
            is_ready=objects.is_ready(pod),
        )
        for pod in sorted(observed.pods, key=lambda pod: str(pod["metadata"]["name"]))
        if objects.labels_of(pod).get(objects.SELECTOR_LABEL) in components
        and pod["metadata"]["labels"].get(objects.TYPE_LABEL) == "worker"
        and "deletionTimestamp" not in pod["metadata"]
        and pod_states.is_replica(pod)
        and (pod.get("status") or {}).get("podIP")
    ]


def find_system_port(pod: Object) -> int:
    """Return the number of the port `system` of a pod."""
    ports = (port for entry in pod["spec"]["containers"] for port in entry.get("ports") or ())
    numbers = (int(port["containerPort"]) for port in ports if port.get("name") == "system")
    return next(numbers, SYSTEM_PORT)


def make_status(resource: Object, failures: Mapping[ModelEndpoint, str], now: str) -> Object:
    """Return the status for endpoints with the reason why each has not got the model, empty if it has."""
    num_ready = sum(not failure for failure in failures.values())
    reason, message = "AllEndpointsReady", f"{num_ready} workers have the model"
    if not failures:
        base = resource["spec"]["baseModelName"]
        reason = "NoEndpoints"
        message = f"no worker serves {base}: expected a service with modelRef.name {base}"
    elif num_ready < len(failures):
        endpoint, failure = next(item for item in failures.items() if item[1])
        reason, message = "EndpointsNotReady", f"pod {endpoint.pod}: {failure}"
    is_ready = reason == "AllEndpointsReady"
    condition = objects.make_condition("EndpointsReady", is_ready, reason, message, resource, now)
    return {
        "endpoints": [
            {
                "podName": endpoint.pod,
                "address": f"http://{addresses.join(endpoint.address, endpoint.port)}",
                "ready": not failure,
            }
            for endpoint, failure in failures.items()
        ],
        "readyEndpoints": num_ready,
        "totalEndpoints": len(failures),
        "conditions": [condition],
    }
