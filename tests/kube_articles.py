"""What the first article types on a cluster: its two charts and its two manifests, for tests of `dynamo kube up`."""

import importlib
import os
import pathlib
import re
import runpy
import shutil

import httpx
import pytest
import yaml

import kube_cluster
from waiting import PATIENT_S, eventually

NAMESPACE = "dynamo-kubernetes"
_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.4.1"
_WORKERS = {"VllmDecodeWorker": "", "VllmPrefillWorker": " --is-prefill-worker"}


def skip_without_tools():
    """Skip the test by name if something is missing that the article's lines need here."""
    if os.geteuid() != 0:
        pytest.skip("two pods on the same port need network namespaces, and those root")
    pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    for program in ("etcd", "nats-server"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: as root on Debian, tests/install_services.sh")


def package_charts(folder):
    """Return the packages that `make charts RELEASE_VERSION=0.4.1` writes, by name."""
    packaging = runpy.run_path(str(pathlib.Path("deploy", "helm", "package.py")))
    return {
        path.name.removesuffix("-0.4.1.tgz"): path for path in packaging["package"]("0.4.1", folder)
    }


def connect(cluster, namespace):
    """Return Helm's own library, connected to a cluster."""
    helm = importlib.import_module("helm_python")
    return helm.Config(kubeconfig_path=cluster.kubeconfig, namespace=namespace)


def install(cluster, charts, values="dynamo-operator.namespaceRestriction.enabled=false"):
    """Install both charts, by default as the article does, and wait until all pods are ready."""
    connect(cluster, "default").install(charts["dynamo-crds"], "dynamo-crds", namespace="default")
    run(cluster, "create", "namespace", NAMESPACE)
    helm = importlib.import_module("helm_python")
    connect(cluster, NAMESPACE).install(
        charts["dynamo-platform"],
        "dynamo-platform",
        helm.parse_set_string(values) if values else {},
        namespace=NAMESPACE,
    )
    await_pods(cluster, NAMESPACE, 4)


def await_pods(cluster, namespace, num_pods):
    """Wait until a namespace has so many pods, and all are ready."""
    flags = ("-n", namespace, kube_cluster.WAIT)
    eventually(
        lambda: len(run(cluster, "get", "pods", "-n", namespace, "-o", "name").split()) == num_pods,
        what=f"{num_pods} pods in {namespace}",
        every_s=0.2,
    )
    run(cluster, "wait", "--for=condition=Ready", "pod", "--all", *flags)


def run(cluster, *arguments, **options):
    """Run kubectl and return what it prints; a failure fails the test."""
    result = cluster.kubectl(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def manifest(name, *, workers=("VllmDecodeWorker",), module="dynamo.vllm", flags="", environ=None):
    """Return the article's manifest `vllm-agg` or `vllm-disagg`.

    `module` may be another engine's, which is probed every second; `flags` are added to the workers' commands, and
    `environ` to the variables of all pods.
    """
    kinds = ("readinessProbe", "startupProbe")
    often = {
        kind: {"periodSeconds": 1, "timeoutSeconds": 30, "failureThreshold": 600} for kind in kinds
    }
    of_frontend = {} if module == "dynamo.vllm" else {"readinessProbe": often["readinessProbe"]}
    probes = {} if module == "dynamo.vllm" else often
    services = {
        "Frontend": {
            "dynamoNamespace": name,
            "componentType": "frontend",
            "replicas": 1,
            "extraPodSpec": {"mainContainer": {"image": _IMAGE} | of_frontend},
        }
    }
    for worker in workers:
        line = f"python3 -m {module} --model Qwen/Qwen3-0.6B{_WORKERS[worker]}{flags}"
        services[worker] = {
            "dynamoNamespace": name,
            "componentType": "worker",
            "replicas": 1,
            "resources": {"limits": {"gpu": "1"}},
            "extraPodSpec": {
                "mainContainer": {
                    "image": _IMAGE,
                    "workingDir": "/workspace/components/backends/vllm",
                    "command": ["/bin/sh", "-c"],
                    "args": [line],
                    **probes,
                }
            },
        }
    return yaml.safe_dump(
        {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": name},
            "spec": {
                "services": services,
                "envs": [{"name": key, "value": text} for key, text in (environ or {}).items()],
            },
        }
    )


def ask(url, *, prompt="Tell me a story about a cowardly cat"):
    """Send the article's request; return the answer."""
    body = {
        "model": "Qwen/Qwen3-0.6B",
        "messages": [{"role": "user", "content": prompt}],
        "stream": False,
        "max_tokens": 30,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENT_S)


def make_hub_cache(folder, checkpoint, names=("Qwen/Qwen3-0.6B",)):
    """Put a checkpoint into a cache of the hub under names that the articles type; return HF_HOME."""
    home = folder / "hub-home"
    for name in names:
        model = home / "hub" / f"models--{name.replace('/', '--')}"
        commit = "0" * 40
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text(commit)
        shutil.copytree(checkpoint, model / "snapshots" / commit)
    return home


def shown_rows(table):
    """Return the rows of a kubectl table, with generated parts of names and times replaced by …"""
    rows = []
    for line in table.splitlines():
        cells = line.split()
        if cells and cells[0] != "NAME":
            cells[0] = re.sub(r"-[a-z0-9]{8,12}(-[a-z0-9]{5})?$", "-…", cells[0])
            rows.append(cells[:-1])
    return rows
