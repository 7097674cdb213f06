"""The health checks for Argo CD and Flux, asked about statuses that the operator's deciders write."""

import pathlib
import shutil
import subprocess

import pytest
import yaml

from dynamo.operator import models, objects, profiling_requests
from dynamo.operator.settings import OperatorConfig
from operator_cluster import NOW, DictCluster, make_graph, worker
from waiting import PATIENT_S

FOLDER = pathlib.Path(__file__).parents[3] / "deploy" / "gitops"
CHECKS = yaml.safe_load((FOLDER / "argocd-health.yaml").read_text())["data"]
EXPRESSIONS = yaml.safe_load((FOLDER / "flux-health.yaml").read_text())["spec"]["healthCheckExprs"]


def ask_argo_cd(resource):
    """Run the check of a kind as Argo CD does: Lua 5.1, the object as `obj`, no files and no modules."""
    lua51 = pytest.importorskip("lupa.lua51", reason="lupa is not installed")
    runtime = lua51.LuaRuntime(register_eval=False, register_builtins=False)
    names = ("os", "io", "require", "package", "string", "math", "debug")
    runtime.execute("\n".join(f"{name} = nil" for name in names))
    runtime.globals().obj = runtime.table_from(resource, recursive=True)
    health = runtime.execute(
        CHECKS[f"resource.customizations.health.nvidia.com_{resource['kind']}"]
    )
    return health.status, health.message


def ask_flux(resource):
    """Evaluate the expressions of a kind: failed goes before current, and an error is no answer yet."""
    cel = pytest.importorskip("cel", reason="common-expression-language is not installed")
    (checks,) = (entry for entry in EXPRESSIONS if entry["kind"] == resource["kind"])
    context = cel.Context(resource)
    for name in ("failed", "current"):
        try:
            if cel.evaluate(checks[name], context):
                return name
        except (RuntimeError, TypeError, ValueError):
            continue
    return "in progress"


def graph_and_component(*, is_ready=True, **fields):
    cluster = DictCluster()
    cluster.put(make_graph(services={"Decode": worker(**fields)}))
    cluster.settle(becomes_ready=lambda pod: is_ready)
    return cluster, cluster.get("DynamoComponentDeployment", "g-decode")


def test_graph_and_component_are_healthy_when_their_pods_are_ready():
    cluster, component = graph_and_component()

    assert ask_argo_cd(cluster.get("DynamoGraphDeployment", "g")) == (
        "Healthy",
        "all resources are ready",
    )
    assert ask_argo_cd(component) == ("Healthy", "all pods are ready")


def test_graph_and_component_that_wait_say_for_what():
    cluster, component = graph_and_component(is_ready=False)

    for resource in (cluster.get("DynamoGraphDeployment", "g"), component):
        status, message = ask_argo_cd(resource)
        assert status == "Progressing"
        assert "is starting" in message


def test_changed_graph_is_not_healthy_by_the_status_of_its_former_generation():
    cluster, _ = graph_and_component()
    cluster.put(make_graph(services={"Decode": worker("--seed 1")}))
    changed = cluster.get("DynamoGraphDeployment", "g")

    assert objects.find_condition(changed, "Ready")["status"] == "True"
    assert ask_argo_cd(changed)[0] == "Progressing"
    assert ask_argo_cd({**changed, "status": {}})[0] == "Progressing"


def test_graph_that_the_operator_refuses_is_degraded():
    cluster, name = DictCluster(), "g" * 48
    cluster.put(make_graph(name, services={"Decode": worker()}))
    cluster.settle()

    status, message = ask_argo_cd(cluster.get("DynamoGraphDeployment", name))

    assert status == "Degraded"
    assert "at most 54 fit" in message


ENDPOINT = models.ModelEndpoint("p", "10.0.0.1", 9090, is_ready=True)


@pytest.mark.parametrize(
    ("failures", "health", "state"),
    [
        ({ENDPOINT: ""}, ("Healthy", "1 workers have the model"), "current"),
        ({ENDPOINT: "busy"}, ("Progressing", "pod p: busy"), "in progress"),
    ],
)
def test_model_is_healthy_when_every_worker_has_it(failures, health, state):
    spec = {"modelName": "poet", "baseModelName": "m"}
    resource = {"kind": "DynamoModel", "metadata": {"name": "poet", "generation": 1}, "spec": spec}
    assert ask_flux(resource) == "in progress"
    resource["status"] = models.make_status(resource, failures, NOW)

    assert ask_argo_cd(resource) == health
    assert ask_flux(resource) == state


LOG = '{"mode":"agg","num_prefill":0,"num_decode":2}\n'


@pytest.mark.parametrize(
    ("spec", "log", "state", "health", "flux"),
    [
        ({}, "", None, "Progressing", "in progress"),
        ({}, LOG, None, "Suspended", "current"),
        ({"autoApply": True}, LOG, None, "Progressing", "in progress"),
        ({"autoApply": True}, LOG, "Deploying", "Degraded", "failed"),
        ({}, "starting\n", None, "Degraded", "failed"),
        ({"deploymentOverrides": {"name": 1}}, "", None, "Degraded", "failed"),
    ],
    ids=["profiling", "not applied", "deploying", "deleted", "unreadable", "invalid"],
)
def test_request_is_as_healthy_as_its_state(spec, log, state, health, flux):
    resource = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeploymentRequest",
        "metadata": {"name": "r", "namespace": "default", "uid": "u", "generation": 1},
        "spec": {"model": "m", **spec},
        "status": {"state": state},
    }
    decision = profiling_requests.decide(resource, objects.Observed(now=NOW), OperatorConfig(), log)
    resource["status"] = decision.status

    assert ask_argo_cd(resource)[0] == health
    assert ask_flux(resource) == flux


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed: tests/install_services.sh"
)
def test_patch_gives_each_kind_its_check_and_keeps_what_stands_beside(tmp_path):
    path = tmp_path / "argocd-cm.yaml"
    metadata = {"name": "argocd-cm", "namespace": "argocd"}
    data = {"admin.enabled": "true"}
    path.write_text(
        yaml.safe_dump(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    )
    patch = ["--type", "merge", "--patch-file", FOLDER / "argocd-health.yaml"]
    patched = subprocess.run(
        ["kubectl", "patch", "--local", "-f", path, *patch, "-o", "yaml"],
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )

    assert patched.returncode == 0, patched.stderr
    assert yaml.safe_load(patched.stdout)["data"] == {**data, **CHECKS}
    assert len(CHECKS) == 4
