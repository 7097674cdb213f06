"""The original's example deployments as they are typed, on a laptop's cluster; the simulated engine stands for vLLM.

In these pods `python3` is a program that runs `dynamo.mocker` where `dynamo.vllm` is asked for, without the flags that
only vLLM has. `make test-kubernetes` runs all of them.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import httpx
import pytest
import yaml

import kube_articles
import kube_cluster
from dynamo.cli import manifest_forms
from dynamo.planner import profile_files
from dynamo.worker import model_source
from kube_articles import run
from planner_cases import make_profile
from waiting import PATIENT_S, eventually

ROOT = pathlib.Path(__file__).parents[2]
MANIFESTS = ROOT.parent / "shared" / "data" / "kube" / "manifests"
NAMES = ("agg_router", "agg_router-v1beta1", "disagg_router", "disagg_kvbm", "disagg_planner")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        "DYN_TEST_KUBERNETES" not in os.environ, reason="takes minutes: make test-kubernetes"
    ),
    pytest.mark.skipif(not MANIFESTS.is_dir(), reason="the original's manifests are not here"),
]
_PYTHON = """#!{python}
import os, sys
stand_ins = {{"dynamo.vllm": "dynamo.mocker", "planner_sla": "dynamo.planner.planner_sla"}}
of_vllm = ("--gpu-memory-utilization", "--disable-log-requests", "--enforce-eager", "--connector", "--kv-events-config")
argv, is_left_out = [], False
for word in sys.argv[1:]:
    is_left_out = word in of_vllm if word.startswith("--") else is_left_out
    if not is_left_out:
        argv.append(stand_ins.get(word, word))
os.execv(sys.executable, [sys.executable, *argv])
"""
_GROUPS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "leaderworkersets.leaderworkerset.x-k8s.io"},
    "spec": {
        "group": "leaderworkerset.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "LeaderWorkerSet", "plural": "leaderworkersets", "shortNames": ["lws"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


@contextlib.contextmanager
def running_operator(cluster):
    """Run an operator that may make LeaderWorkerSets, until v1beta1 is served."""
    flags = ("--enable-lws", "--metrics-bind-address=0", "--health-probe-bind-address=0")
    flags += ("--webhook-bind-address=127.0.0.1:0",)
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo.operator", *flags], env=cluster.environ
    )
    path = "/apis/nvidia.com/v1beta1"
    try:
        eventually(lambda: cluster.kubectl("get", "--raw", path).returncode == 0, what=path)
        yield
    finally:
        process.terminate()
        process.wait(PATIENT_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with the operator and the definition of LeaderWorkerSets, whose pods have the models in a cache."""
    kube_cluster.find_kubectl()
    if os.geteuid() != 0:
        pytest.skip("two pods on the same port need network namespaces, and those root")
    folder = tmp_path_factory.mktemp("cluster")
    program = folder / "bin" / "python3"
    program.parent.mkdir()
    program.write_text(_PYTHON.format(python=sys.executable))
    program.chmod(0o755)
    profile_files.write_profile(make_profile(), folder / "profile" / "profiling_results")
    names = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B")
    home = kube_articles.make_hub_cache(folder, model_source.built_in(), names)
    flags = ("--backoff-s", "1", "--no-operator", "--pod-path", str(program.parent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        with kube_cluster.running_cluster(folder, *flags) as running:
            run(running, "apply", "-f", str(ROOT / "deploy" / "crds"))
            run(running, "apply", "-f", "-", stdin=json.dumps(_GROUPS))
            with running_operator(running):
                fill_claim(running, folder / "profile")
                yield running


def fill_claim(cluster, source):
    """Make the claim of the planner's manifest, and copy a profile into it."""
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "dynamo-pvc"},
        "spec": spec,
    }
    container = {
        "name": "main",
        "image": "python:3.11",
        "command": ["cp", "-r", f"{source}/profiling_results", "/data/"],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "copy"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "dynamo-pvc"}}],
        },
    }
    for item in (claim, pod):
        run(cluster, "apply", "-f", "-", stdin=json.dumps(item))
    phase = "jsonpath={.status.phase}"
    run(cluster, "wait", f"--for={phase}=Succeeded", "pod/copy", kube_cluster.WAIT)
    run(cluster, "delete", "pod/copy")


def read_manifest(name):
    return manifest_forms.convert(yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text())).document


@pytest.mark.parametrize("name", NAMES)
def test_manifest_of_the_original_becomes_ready_and_answers(cluster, name):
    manifest = read_manifest(name)
    graph, services = manifest["metadata"]["name"], manifest["spec"]["services"]
    run(cluster, "apply", "-f", str(MANIFESTS / f"{name}.yaml"))
    ready = cluster.kubectl("wait", "--for=condition=Ready", f"dgd/{graph}", kube_cluster.WAIT)
    assert ready.returncode == 0, run(cluster, "get", "dgd,pods")
    replicas = sum(service.get("replicas", 1) for service in services.values())
    pods = run(cluster, "get", "pods", "-o", "name").split()
    model = "Qwen/Qwen3-8B" if name == "disagg_kvbm" else "Qwen/Qwen3-0.6B"
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with cluster.port_forward(f"svc/{graph}-frontend", 8000) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENT_S)
    planner_log = (
        run(cluster, "logs", f"deployment/{graph}-planner") if "Planner" in services else ""
    )
    run(cluster, "delete", f"dgd/{graph}")
    eventually(
        lambda: not run(cluster, "get", "pods", "-o", "name"), what="no pods left", every_s=0.3
    )

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert len(pods) == replicas
    assert "rror" not in planner_log, planner_log


def test_request_profiles_the_simulated_engine_and_deploys_it(cluster):
    config = {
        "sla": {"isl": 64, "osl": 16, "ttft": 200, "itl": 20},
        "sweep": {"budgetMinutes": 0.5},
        "hardware": {"num_gpus_per_node": 2},
    }
    request = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeploymentRequest",
        "metadata": {"name": "found"},
        "spec": {
            "model": "Qwen/Qwen3-0.6B",
            "useMocker": True,
            "autoApply": True,
            "profilingConfig": {"config": config},
        },
    }
    run(cluster, "apply", "-f", "-", stdin=json.dumps(request))
    state = "jsonpath={.status.state}"
    run(cluster, "wait", f"--for={state}=Ready", "dgdr/found", kube_cluster.WAIT)
    graph = json.loads(run(cluster, "get", "dgd/found", "-o", "json"))
    run(cluster, "delete", "dgdr/found", "dgd/found")

    components = graph["spec"]["components"]  # v1beta1, which kubectl prefers
    num_by_type = {entry["type"]: entry["replicas"] for entry in components}
    assert num_by_type.pop("frontend") == 1
    assert num_by_type in ({"worker": 2}, {"prefill": 1, "decode": 1})  # by what was measured


def test_manifest_of_several_nodes_stops_at_its_groups(cluster):
    """LeaderWorkerSets of two pods are made, by Ray; no controller makes pods of them here."""
    run(cluster, "apply", "-f", "-", stdin=json.dumps(read_manifest("disagg-multinode")))
    eventually(
        lambda: len(run(cluster, "get", "lws", "-o", "name").split()) == 2,
        what="a group of nodes for decode and one for prefill",
        every_s=0.3,
    )
    groups = json.loads(run(cluster, "get", "lws", "-o", "json"))["items"]
    deployments = run(cluster, "get", "deployments", "-o", "name").split()
    run(cluster, "delete", "dgd", "--all")

    assert deployments == ["deployment.apps/vllm-disagg-frontend"]
    for group in groups:
        template = group["spec"]["leaderWorkerTemplate"]
        lines = [
            template[role]["spec"]["containers"][0]["args"][0]
            for role in ("leaderTemplate", "workerTemplate")
        ]
        assert template["size"] == 2
        assert lines[0].startswith("ray start --head --port=6379 && exec python3 -m dynamo.vllm ")
        assert lines[1] == "exec ray start --address=$(LWS_LEADER_ADDRESS):6379 --block"


def test_operator_of_one_namespace_serves_it_without_rights_in_the_cluster(tmp_path):
    kube_articles.skip_without_tools()
    charts = kube_articles.package_charts(tmp_path / "charts")
    manifest = yaml.safe_load((ROOT / "deploy" / "examples" / "mocker.yaml").read_text())
    with kube_cluster.running_cluster(tmp_path, "--backoff-s", "1", "--no-operator") as cluster:
        kube_articles.install(cluster, charts, values="")
        cluster_wide = run(cluster, "get", "clusterroles,clusterrolebindings", "-o", "name")
        for namespace in (kube_articles.NAMESPACE, "default"):
            run(cluster, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
        flags = ("-n", kube_articles.NAMESPACE, kube_cluster.WAIT)
        ready = cluster.kubectl("wait", "--for=condition=Ready", "dgd/mocker", *flags)
        elsewhere = run(cluster, "get", "dgd/mocker", "-o", "jsonpath={.status}")

    assert cluster_wide == ""
    assert ready.returncode == 0, ready.stderr
    assert elsewhere == ""
