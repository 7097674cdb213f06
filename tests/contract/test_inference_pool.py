"""The manifests of the endpoint picker: their parts fit together, the schemas, and what the operator makes."""

import pathlib

import jsonschema
import pytest
import yaml

from dynamo.base import config
from dynamo.gateway.endpoint_picker import EndpointPickerConfig
from dynamo.operator import objects
from dynamo.operator.settings import OperatorConfig
from dynamo.runtime import component
from gateway_schemas import find_mistakes
from operator_cluster import DictCluster

kubernetes_validate = pytest.importorskip("kubernetes_validate")
FILE = pathlib.Path(__file__).parents[2] / "deploy" / "inference-gateway" / "inferencepool.yaml"
OBJECTS = {item["kind"]: item for item in yaml.safe_load_all(FILE.read_text())}
PORT = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "required": ["number"],
    "additionalProperties": False,
}
POOL = {  # the spec of InferencePool v1, by its published reference
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {
                "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}
            },
        },
        "targetPorts": {"type": "array", "items": PORT, "minItems": 1, "maxItems": 8},
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "port"],
            "properties": {
                "group": {"type": "string"},
                "kind": {"type": "string"},
                "name": {"type": "string"},
                "port": PORT,
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_objects_fit_their_schemas(version):
    jsonschema.validate(OBJECTS["InferencePool"]["spec"], POOL)
    assert find_mistakes(OBJECTS["HTTPRoute"]) == []
    for kind in ("Service", "Deployment"):
        kubernetes_validate.validate(OBJECTS[kind], version, strict=True)


def test_pool_selects_the_pods_that_the_operator_makes_at_the_port_of_their_frontend():
    cluster = DictCluster()
    graph = OBJECTS["DynamoGraphDeployment"]
    cluster.put({**graph, "metadata": {**graph["metadata"], "namespace": "default"}})
    cluster.settle()
    pool = OBJECTS["InferencePool"]["spec"]
    templates = {
        deployment["metadata"]["name"]: deployment["spec"]["template"]
        for deployment in cluster.of_kind("Deployment")
    }
    selected = {
        name: template
        for name, template in templates.items()
        if pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    }
    template = selected["pool-vllmworker"]
    main, sidecar = template["spec"]["containers"]

    assert list(selected) == ["pool-vllmworker"]
    assert [port["containerPort"] for port in sidecar["ports"]] == [
        port["number"] for port in pool["targetPorts"]
    ]
    variables = {entry["name"]: entry for entry in sidecar["env"]}
    of_main = {entry["name"]: entry for entry in main["env"]}
    for name in ("DYN_CLUSTER_TOKEN", "DYN_DISCOVERY_BACKEND", "DYN_TCP_RPC_HOST"):
        assert variables[name] == of_main[name]
    of_frontend = templates["pool-frontend"]["spec"]["containers"][0]["env"]
    drain = [entry for entry in of_frontend if "GRACEFUL_SHUTDOWN" in entry["name"]]
    assert len(drain) == 2
    assert [variables.get(entry["name"]) for entry in drain] == drain
    assert objects.NAMESPACE_LABEL in variables["DYN_NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"]  # fmt: skip


def test_all_processes_use_the_same_planes_beside_the_nats_of_the_chart():
    cluster = DictCluster(OperatorConfig(etcd_addr="etcd:2379", nats_addr="nats://nats:4222"))
    graph = OBJECTS["DynamoGraphDeployment"]
    cluster.put({**graph, "metadata": {**graph["metadata"], "namespace": "default"}})
    cluster.settle()
    planes = set()
    for deployment in cluster.of_kind("Deployment"):
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
            settings = config.load(component.RuntimeConfig, prog="x", argv=[], environ=environ)
            planes.add((settings.request_plane, settings.event_plane))

    assert planes == {("tcp", "zmq")}


def test_picker_is_where_the_pool_looks_for_it_and_asks_the_frontend():
    reference = OBJECTS["InferencePool"]["spec"]["endpointPickerRef"]
    service, deployment = OBJECTS["Service"], OBJECTS["Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    settings = config.load(EndpointPickerConfig, prog="picker", argv=container["args"])
    backend = OBJECTS["HTTPRoute"]["spec"]["rules"][0]["backendRefs"][0]

    assert reference["name"] == service["metadata"]["name"]
    assert [port["port"] for port in service["spec"]["ports"]] == [reference["port"]["number"]]
    assert settings.port == container["ports"][0]["containerPort"] == reference["port"]["number"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert settings.frontend == "pool-frontend:8000"
    assert settings.target_port == OBJECTS["InferencePool"]["spec"]["targetPorts"][0]["number"]
    assert backend["name"] == OBJECTS["InferencePool"]["metadata"]["name"]
