"""One deployment of the simulated engine on a laptop's cluster: adapters, changes under load, scaling, deletion."""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys

import httpx
import pytest
import yaml

import kube_cluster
from kube_articles import run
from waiting import PATIENT_S, eventually

pytestmark = pytest.mark.system
ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "examples" / "mocker.yaml"
OUR_KINDS = (
    "dgd,dcd,dwm,dm,deployments,replicasets,pods,services,roles,rolebindings,serviceaccounts"
)
MODEL = "storyteller"
ANNOTATION = "nvidia.com/deployment-rolling-update-max-"
WORKERS = "nvidia.com/dynamo-component=Worker"
REQUESTS_PER_S = 20


def make_deployment(flags=""):
    """Return the example with two workers that are looked at every second and replaced one by one."""
    manifest = yaml.safe_load(EXAMPLE.read_text())
    limits = {f"{ANNOTATION}surge": "0", f"{ANNOTATION}unavailable": "1"}
    manifest["metadata"]["annotations"] = limits
    for name, service in manifest["spec"]["services"].items():
        main = service["extraPodSpec"]["mainContainer"]
        main["readinessProbe"] = {"periodSeconds": 1}
        if name == "Worker":
            main["startupProbe"] = {"periodSeconds": 1}
            main["command"] += ["--speedup-ratio", "0", *flags.split()]
            service |= {
                "replicas": 2,
                "modelRef": {"name": MODEL},
                "scalingAdapter": {"enabled": True},
            }
    return json.dumps(manifest)


def make_model(name, directory):
    """Return a LoRA adapter of the example's model."""
    spec = {"modelName": name, "baseModelName": MODEL, "modelType": "lora"}
    return json.dumps(
        {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoModel",
            "metadata": {"name": name},
            "spec": {**spec, "source": {"uri": directory.as_uri()}},
        }
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with the operator and a deployment that is ready; at the end nothing of it may be left."""
    kube_cluster.find_kubectl()
    if os.geteuid() != 0:
        pytest.skip("two pods on the same port need network namespaces, and those root")
    folder = tmp_path_factory.mktemp("cluster")
    with kube_cluster.running_cluster(folder, "--backoff-s", "1") as running:
        before = run(running, "get", OUR_KINDS, "-o", "name")
        apply(running, make_deployment())
        await_ready(running)
        yield running
        run(running, "delete", "dgd/mocker")
        eventually(
            lambda: run(running, "get", OUR_KINDS, "-o", "name") == before,
            what="all objects of the deployment gone",
            every_s=0.3,
        )
        of_pods = kube_cluster.pod_processes(running)
    assert not [pid for pid in of_pods if pathlib.Path(f"/proc/{pid}/exe").exists()]


@pytest.fixture(scope="module")
def url(cluster):
    """The address of the frontend's pod."""
    label, column = "nvidia.com/dynamo-component=Frontend", "jsonpath={.items[0].status.podIP}"
    return f"http://{run(cluster, 'get', 'pods', '-l', label, '-o', column)}:8000"


def apply(cluster, *documents):
    run(cluster, "apply", "-f", "-", stdin="\n---\n".join(documents))


def await_ready(cluster):
    run(cluster, "wait", "--for=condition=Ready", "dgd/mocker", kube_cluster.WAIT)


def make_body(model=MODEL):
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def worker_pods(cluster):
    """Return the names of the workers' pods that are not being deleted."""
    listed = json.loads(run(cluster, "get", "pods", "-l", WORKERS, "-o", "json"))["items"]
    metadata = [pod["metadata"] for pod in listed]
    return {entry["name"] for entry in metadata if "deletionTimestamp" not in entry}


def test_adapter_of_a_model_is_loaded_by_every_worker_and_unloaded_with_it(cluster, url, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    apply(cluster, make_model("poet", tmp_path), make_model("lost", tmp_path / "absent"))
    run(cluster, "wait", "--for=condition=EndpointsReady", "dm/poet", kube_cluster.WAIT)
    status = json.loads(run(cluster, "get", "dm/poet", "-o", "json"))["status"]
    message = "jsonpath={.status.conditions[0].message}"
    eventually(
        lambda: str(tmp_path / "absent") in run(cluster, "get", "dm/lost", "-o", message),
        what="the adapter that is not there is named",
        every_s=0.2,
    )
    answer = httpx.post(f"{url}/v1/chat/completions", json=make_body("poet"), timeout=PATIENT_S)
    changed = make_model("poet", tmp_path / "other")
    refused = cluster.kubectl("apply", "-f", "-", stdin=changed)
    run(cluster, "delete", "dm", "--all")
    eventually(
        lambda: "poet" not in httpx.get(f"{url}/v1/models", timeout=PATIENT_S).text,
        what="the adapter is unlisted",
    )

    assert {entry["podName"] for entry in status["endpoints"]} == worker_pods(cluster)
    assert (status["readyEndpoints"], status["totalEndpoints"]) == (2, 2)
    assert (answer.status_code, answer.json()["model"]) == (200, "poet")
    assert "a model is immutable" in refused.stderr


def test_scale_of_the_adapter_sets_the_workers_and_ready_comes_back(cluster):
    counts = "jsonpath={.spec.replicas} {.status.replicas}"
    seen = []
    for replicas in (3, 2):
        run(cluster, "scale", "dgdsa/mocker-worker", f"--replicas={replicas}")
        eventually(
            lambda replicas=replicas: len(worker_pods(cluster)) == replicas,
            what=f"{replicas} workers",
            every_s=0.2,
        )
        await_ready(cluster)
        eventually(
            lambda replicas=replicas: (
                run(cluster, "get", "dgdsa/mocker-worker", "-o", counts) == f"{replicas} {replicas}"
            ),
            what="the adapter's status",
            every_s=0.2,
        )
        apply(cluster, make_deployment())  # as a GitOps tool does: replicas are the adapter's
        seen.append(len(worker_pods(cluster)))

    assert seen == [3, 2]


def test_planner_sets_the_workers_and_shows_its_metrics_to_others(cluster):
    """Its port is asked from outside of its pod, as by a Prometheus."""
    manifest = yaml.safe_load(EXAMPLE.read_text())
    command = ["python3", "-m", "dynamo.planner", "--environment=kubernetes", "--mode=agg"]
    command += ["--min-endpoint=2", "--adjustment-interval=1", "--model-name", MODEL]
    services = manifest["spec"]["services"]
    container = {"image": "dynamo-serving/frontend:0.1.0", "command": command}
    services["Planner"] = {
        "componentType": "planner",
        "extraPodSpec": {"mainContainer": container},
    }
    for service in services.values():
        service["dynamoNamespace"] = "planned"
    manifest["metadata"]["name"] = "planned"
    apply(cluster, json.dumps(manifest))
    label = "nvidia.com/selector=planned-planner"
    address = "jsonpath={.items[0].status.podIP}"
    eventually(
        lambda: len(run(cluster, "get", "pods", "-l", "nvidia.com/selector=planned-worker", "-o", "name").split()) == 2,
        what="two workers",
        every_s=0.3,
    )  # fmt: skip
    host = run(cluster, "get", "pods", "-l", label, "-o", address)
    metrics = httpx.get(f"http://{host}:9085/metrics", timeout=PATIENT_S).text
    run(cluster, "delete", "dgd/planned")

    assert "is_leader 1" in metrics


@contextlib.asynccontextmanager
async def steady_load(url, body, *, per_s=REQUESTS_PER_S, read=lambda answer: answer.status_code):
    """Send requests at a steady rate, each over its own connection, so that a service chooses a pod for each.

    Yield the list of their outcomes, as `read` makes them of answers; it is whole at the end.
    """
    outcomes, open_requests, stop = [], set(), asyncio.Event()
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=PATIENT_S, limits=limits) as client:

        async def ask():
            try:
                outcomes.append(read(await client.post(url, json=body)))
            except httpx.HTTPError as error:
                outcomes.append(repr(error))

        async def send():
            while not stop.is_set():
                task = asyncio.create_task(ask())
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)
                await asyncio.sleep(1 / per_s)

        sending = asyncio.create_task(send())
        try:
            yield outcomes
        finally:
            stop.set()
            await sending
            await asyncio.gather(*open_requests)


async def test_change_of_arguments_and_its_reversal_lose_no_request(cluster, url):
    def change():
        apply(cluster, make_deployment("--max-num-seqs 64"))
        await_ready(cluster)
        return worker_pods(cluster)

    def change_and_revert():
        apply(cluster, make_deployment("--max-num-seqs 32"))
        eventually(
            lambda: worker_pods(cluster) - changed,
            what="a worker of the third specification",
            every_s=0.2,
        )
        apply(cluster, make_deployment("--max-num-seqs 64"))
        await_ready(cluster)
        eventually(lambda: len(worker_pods(cluster)) == 2, what="two workers", every_s=0.2)
        return worker_pods(cluster)

    first = worker_pods(cluster)
    async with steady_load(f"{url}/v1/chat/completions", make_body()) as outcomes:
        changed = await asyncio.to_thread(change)
        reverted = await asyncio.to_thread(change_and_revert)

    assert {outcome: outcomes.count(outcome) for outcome in set(outcomes)} == {200: len(outcomes)}
    assert len(outcomes) > 5 * REQUESTS_PER_S
    assert not changed & first
    assert changed & reverted  # what served went on
    components = run(cluster, "get", "dcd", "-o", "name").split()
    assert len(components) == 2  # one generation of workers


@contextlib.asynccontextmanager
async def deployed_graph(cluster, example, *arguments):
    """Deploy a graph of an example by the command.

    Yield its address, and what updates it by further arguments and returns when the former pods have gone.
    """
    name = example.replace("_", "-")

    def dynamo(action, *more):
        subprocess.run(
            [sys.executable, "-m", "dynamo.cli", "deployment", action, *more],
            cwd=ROOT / "examples" / example,
            env=cluster.environ,
            check=True,
            timeout=PATIENT_S,
        )

    def pods():
        label = f"nvidia.com/dynamo-graph-deployment-name={name}"
        return set(run(cluster, "get", "pods", "-l", label, "-o", "name").split())

    def update(*changes):
        before = pods()
        dynamo("update", *arguments, "-n", name, *changes)
        assert pods() - before
        eventually(lambda: len(pods()) == len(before), what="former pods gone", every_s=0.3)

    await asyncio.to_thread(dynamo, "create", *arguments, "-n", name)
    service = ("get", f"svc/{name}-frontend", "-o", "jsonpath={.spec.clusterIP}")
    yield f"http://{run(cluster, *service)}:8000", update
    await asyncio.to_thread(dynamo, "delete", name)


async def test_update_of_commands_by_the_command_loses_no_request(cluster):
    graph = (
        "graphs.agg:Frontend", "--image", "dynamo-serving/vllm-runtime:0.1.0",
        f"--Frontend.served-model-name={MODEL}", "--Frontend.port=8000",
        "--VllmWorker.ServiceArgs.module=dynamo.mocker", "--VllmWorker.speedup-ratio=0",
    )  # fmt: skip
    async with (
        deployed_graph(cluster, "llm", *graph) as (url, update),
        steady_load(f"{url}/v1/chat/completions", make_body()) as outcomes,
    ):
        await asyncio.to_thread(update, "--VllmWorker.max-num-seqs=32")

    assert {outcome: outcomes.count(outcome) for outcome in set(outcomes)} == {200: len(outcomes)}


async def test_update_of_classes_by_the_command_loses_no_request(cluster):
    graph = ("hello_world:Frontend", "--with-sources", "-f", "config.yaml")
    body, read = {"text": "test"}, lambda answer: answer.text
    async with (
        deployed_graph(cluster, "hello_world", *graph) as (url, update),
        steady_load(f"{url}/generate", body, per_s=5, read=read) as outcomes,
    ):
        await asyncio.to_thread(update, "--Backend.message=end")

    # of both versions, and all whole
    expected = {f"Frontend: Middle: Backend: test-mid-{end}\n" for end in ("back", "end")}
    assert set(outcomes) == expected
