"""The operator's process against an API server in memory: what it writes, when it writes nothing, and who may write."""

import asyncio
import contextlib
import importlib.resources
import json
import os
import random

import httpx2
import hypothesis
import pytest
from hypothesis import strategies as st

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.operator import component, election, objects, pod_calls, reconciler, service, work_queue
from dynamo.operator.settings import OperatorConfig
from dynamo.testing import clock as virtual
from memory_cluster import MemoryCluster
from operator_cluster import frontend, make_graph, worker

DGD, DCD = "DynamoGraphDeployment", "DynamoComponentDeployment"
ADAPTER = "DynamoGraphDeploymentScalingAdapter"
API = "nvidia.com/v1alpha1"
DEFINITIONS = importlib.resources.files("dynamo.operator").joinpath("definitions.json")
SETTINGS = {
    "etcd_addr": "etcd:2379",
    "metrics_bind_address": "0",
    "health_probe_bind_address": "0",
}


@contextlib.asynccontextmanager
async def running(server, identity="one", **settings):
    """Run an operator against the server."""
    stop = asyncio.Event()
    async with server.connect() as cluster:
        config = OperatorConfig(**{**SETTINGS, "leader_elect": False, **settings})
        operator = service.OperatorService(cluster, config, clocks.SystemClock(), identity=identity)
        task = asyncio.create_task(operator.run(stop))
        try:
            yield operator
        finally:
            stop.set()
            await task


MOST_LOOKS = 6_000  # a minute where nothing else runs; on a busy machine looks come as late as what they wait for


async def until(condition):
    """Look until an awaitable condition holds; the bound is a number of looks, since the operator shares our loop."""
    for _ in range(MOST_LOOKS):
        if found := await condition():
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"it does not hold after {MOST_LOOKS} looks")


async def play_deployments(cluster):
    """Make the pods of all Deployments ready at once."""
    for deployment in await cluster.list("apps/v1", "Deployment"):
        spec, metadata = deployment["spec"], deployment["metadata"]
        replicas = spec.get("replicas", 1)
        wanted = {f"{metadata['name']}-{number}" for number in range(replicas)}
        pods = {
            pod["metadata"]["name"]: pod
            for pod in await cluster.list("v1", "Pod")
            if pod["metadata"]["labels"].get(objects.SELECTOR_LABEL) == metadata["name"]
        }
        labels = spec["template"]["metadata"]["labels"]
        for name, pod in pods.items():
            if name not in wanted or pod["metadata"]["labels"] != labels:
                await cluster.delete("v1", "Pod", name)
        for name in wanted - pods.keys():
            owner = objects.owner_reference(deployment)
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
                "spec": {"containers": [{"name": "main", "image": "none.invalid/none"}]},
            }
            await cluster.create(pod)
            ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
            await cluster.patch("v1", "Pod", name, ready, subresource="status")
        numbers = dict.fromkeys(
            ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), replicas
        )
        status = {"observedGeneration": metadata["generation"], **numbers}
        if deployment.get("status") != status:
            changes = {"status": status}
            await cluster.patch(
                "apps/v1", "Deployment", metadata["name"], changes, subresource="status"
            )


async def is_ready(cluster, name="g"):
    """Let Deployments become ready; return the graph if it is ready for its present generation."""
    with contextlib.suppress(errors.DynamoError):
        await play_deployments(cluster)
        graph = await cluster.get(API, DGD, name)
        ready = objects.find_condition(graph, "Ready")
        is_current = ready.get("observedGeneration") == graph["metadata"]["generation"]
        if ready.get("status") == "True" and is_current:
            return graph
    return None


GROVE = {
    "spec": {
        "group": "grove.io",
        "scope": "Namespaced",
        "names": {
            "kind": "PodCliqueSet",
            "listKind": "PodCliqueSetList",
            "plural": "podcliquesets",
            "singular": "podcliqueset",
        },
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    }
}


@pytest.mark.parametrize("has_grove", [True, False])
async def test_grove_is_found_in_what_the_cluster_serves(server, cluster, has_grove):
    async def is_right():
        if has_grove:
            return await cluster.list("grove.io/v1alpha1", "PodCliqueSet")
        graph = await cluster.get(API, DGD, "g")
        return "install Grove" in objects.find_condition(graph, "Ready").get("message", "")

    if has_grove:
        server.define(GROVE)
    services = {"Decode": worker(multinode={"nodeCount": 2})}
    async with running(server):
        await cluster.create(make_graph(services=services))

        assert await until(is_right)


async def test_graph_becomes_ready_and_an_idle_operator_sends_nothing(server, cluster):
    requests = []

    async with running(server, resync_s=3600) as operator:
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))
        await until(lambda: settled(server, operator))
        before = server.store.revision
        answer = server.handle_async_request

        async def count(request):
            requests.append((request.method, request.url.path))
            return await answer(request)

        server.handle_async_request = count
        for key in operator.controller.cache.roots():
            operator.controller.queue.add(key)  # as a resync does
        await until(lambda: settled(server, operator))

        assert server.store.revision == before
        assert requests == []
    events = await cluster.list("v1", "Event")
    assert {"all_resources_are_ready", "some_resources_are_not_ready"} <= {
        event["reason"] for event in events
    }


async def settled(server, operator):
    """Return True if nothing was queued or written for a few turns of the loop."""
    before = server.store.revision
    for _ in range(20):
        await asyncio.sleep(0)
        if operator.controller.queue:
            return False
    await asyncio.sleep(0.05)
    return server.store.revision == before and not operator.controller.queue


class Page:
    """A request for the metrics, and its answer."""

    def respond(self, status, body, *, content_type):
        self.lines = body.decode().splitlines()


async def read_samples(operator, family):
    """Return the samples of a family of metrics by their labels, as they are written."""
    page = Page()
    operator._answer_metrics(page)
    samples = (line.rsplit(" ", 1) for line in page.lines if line.startswith(f"{family}{{"))
    return {labels.removeprefix(family): float(value) for labels, value in samples}


async def test_metrics_count_objects_by_their_state(server, cluster):
    family, graphs = "dynamo_operator_resources_total", f'resource_type="{DGD}"'
    async with running(server) as operator:
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))
        ready = await read_samples(operator, family)
        await cluster.delete(API, DGD, "g")

        async def forgets_the_graph():
            return graphs not in "".join(await read_samples(operator, family))

        await until(forgets_the_graph)

    assert ready[f'{{namespace="default",{graphs},status="successful"}}'] == 1


async def test_metrics_count_looks_by_their_result_and_failed_ones_by_their_error(
    server, cluster, monkeypatch
):
    async def refuse(_):
        raise errors.Conflict("changed meanwhile")

    async with running(server) as operator:
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))
        monkeypatch.setattr(operator.controller._reconciler, "reconcile", refuse)
        operator.controller.queue.add((DGD, "default", "g"))
        failures = await until(
            lambda: read_samples(operator, "dynamo_operator_reconcile_errors_total")
        )
        looks = await read_samples(operator, "dynamo_operator_reconcile_total")

    assert list(failures) == [f'{{error_type="conflict",resource_type="{DGD}"}}']
    assert looks[f'{{resource_type="{DGD}",result="error"}}'] > 0
    assert looks[f'{{resource_type="{DGD}",result="success"}}'] > 0


async def test_drift_is_repaired_and_what_users_add_stays(server, cluster):
    async with running(server):
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))
        changes = {
            "metadata": {"annotations": {"mine": "x"}},
            "spec": {"replicas": 7, "paused": True},
        }
        await cluster.patch("apps/v1", "Deployment", "g-decode", changes)

        async def repaired():
            found = await cluster.get("apps/v1", "Deployment", "g-decode")
            return found if found["spec"]["replicas"] == 1 else None

        found = await until(repaired)
        assert found["spec"]["paused"] is True
        assert found["metadata"]["annotations"]["mine"] == "x"
        await cluster.delete("v1", "Service", "g-frontend")
        await until(lambda: cluster.get("v1", "Service", "g-frontend"))


@pytest.mark.parametrize("kinds", [(frontend, worker), (worker, frontend)])
async def test_service_is_made_anew_when_its_component_becomes_of_another_kind(
    server, cluster, kinds
):
    async with running(server, etcd_addr=""):  # workers have headless Services then
        for make in kinds:
            graph = make_graph(services={"Frontend": frontend(), "Own": make()})
            await cluster.apply(graph, "kubectl", force=True)
            await until(lambda: is_ready(cluster))
            address = (await cluster.get("v1", "Service", "g-own"))["spec"]["clusterIP"]

            assert (address == "None") == (make is worker)


async def test_replicas_that_kubectl_set_are_put_back_with_an_event_once(server, cluster):
    async def events():
        found = await cluster.list("v1", "Event")
        return [entry for entry in found if entry["reason"] == "ReplicasPutBack"]

    async def scale(replicas):
        changes = {"spec": {"replicas": replicas}}
        await cluster.patch("apps/v1", "Deployment", "g-decode", changes)

    async def is_put_back():
        found = await cluster.get("apps/v1", "Deployment", "g-decode")
        return found["spec"]["replicas"] == 1

    async with running(server) as operator:
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))
        assert await events() == []
        for replicas in (3, 3, 4):
            await scale(replicas)
            await until(is_put_back)
        await until(lambda: settled(server, operator))

    by_kind = {}
    for entry in await events():
        by_kind.setdefault(entry["involvedObject"]["kind"], []).append(entry["message"])
    assert by_kind.keys() == {"Deployment", "DynamoGraphDeployment"}
    first, second = sorted(by_kind[DGD])
    assert "set replicas to 3, and the operator put back 1" in first
    assert "spec.services.Decode.replicas of DynamoGraphDeployment g" in first
    assert "kubectl scale dgdsa/g-decode --replicas=4" in second


async def test_operator_that_was_installed_before_its_definitions_waits_for_them(
    server, cluster, monkeypatch, caplog
):
    monkeypatch.setattr(service, "_MISSING_DEFINITION_S", 0.0)
    server.undefine(API)

    async def is_said():
        return "the operator waits for a definition: the cluster at" in caplog.text

    async with running(server):
        await until(is_said)
        for definition in json.loads(DEFINITIONS.read_text()):
            server.define(definition)
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))


async def test_deletion_leaves_nothing_without_the_operator(server, cluster):
    async with running(server):
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))
    await cluster.delete(API, DGD, "g")

    await until(lambda: is_empty(cluster))


EXPORTED = (
    ("v1", "Secret"),
    ("v1", "Service"),
    ("apps/v1", "Deployment"),
    (API, DCD),
    (API, ADAPTER),
    (API, DGD),
)
OF_THE_OBJECT = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")


def of_kubectl(item):
    """Return what `kubectl apply` creates of what `kubectl get -o yaml` has printed."""
    metadata = {k: v for k, v in item["metadata"].items() if k != "resourceVersion"}
    return {**item, "metadata": metadata}


def of_velero(item):
    """Return what Velero restores: nothing of the former object's identity, owners or status."""
    removed = (*OF_THE_OBJECT, "ownerReferences")
    metadata = {k: v for k, v in item["metadata"].items() if k not in removed}
    return {**{k: v for k, v in item.items() if k != "status"}, "metadata": metadata}


@pytest.mark.parametrize(
    ("kinds", "restore"),
    [((DGD,), of_kubectl), (None, of_kubectl), (None, of_velero)],
    ids=["the deployment by kubectl", "everything by kubectl", "everything by Velero"],
)
async def test_exported_deployment_becomes_ready_with_equal_objects(
    server, cluster, kinds, restore
):
    spec = {"seed": 1, "replicas": 2, "has_prefill": True}
    async with running(server):
        graph = graph_of(**spec | {"seed": 0})
        graph["spec"]["services"]["Decode"]["scalingAdapter"] = {"enabled": True}
        await cluster.create(graph)
        await until(lambda: is_ready(cluster))
        await cluster.patch(API, DGD, "g", {"spec": graph_of(**spec)["spec"]})
        await until(lambda: is_ready(cluster))
        await until(lambda: has_one_generation(cluster, spec))
        before = await specs_of(cluster)
        exported = [item for kind in EXPORTED for item in await cluster.list(*kind)]
        await cluster.delete(API, DGD, "g")
        await until(lambda: gone(cluster, DGD, "g"))
        await until(lambda: is_empty(cluster))

        for item in exported:
            if kinds is None or item["kind"] in kinds:
                await cluster.create(restore(item))

        await until(lambda: is_ready(cluster))
        await until(lambda: has_one_generation(cluster, spec))
        assert await specs_of(cluster) == before
        for kind in EXPORTED[:-1]:
            for item in await cluster.list(*kind):
                assert item["metadata"]["ownerReferences"], item["metadata"]["name"]
    await cluster.delete(API, DGD, "g")
    await until(lambda: is_empty(cluster))


async def is_empty(cluster):
    """Return True if nothing is left that the operator makes."""
    return not any([await cluster.list(*kind) for kind in EXPORTED[:-1]])


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        (422, "no such field"),
        (500, 'Internal error occurred: failed calling webhook "policy.example.com": refused'),
    ],
)
async def test_refused_write_is_said_and_tried_again_while_others_go_on(
    server, cluster, code, refusal
):
    answer, is_refusing = server.handle_async_request, True

    async def handle(request):
        is_bad = request.url.path.endswith("/deployments/bad-decode")
        if is_refusing and is_bad and request.method == "PATCH":
            return httpx2.Response(code, json={"message": refusal})
        return await answer(request)

    server.handle_async_request = handle
    async with running(server):
        await cluster.create(make_graph("bad"))
        await cluster.create(make_graph("good"))
        await until(lambda: is_ready(cluster, "good"))

        async def said():
            message = objects.find_condition(await cluster.get(API, DGD, "bad"), "Ready")
            return refusal in message.get("message", "")

        await until(said)
        is_refusing = False
        await until(lambda: is_ready(cluster, "bad"))


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        ({"env": [{"name": "A", "valu": "1"}]}, ".valu: field not declared in schema"),
        ({"ports": [{"name": "api", "containerPort": 9090}]}, "duplicate entries for key"),
    ],
)
async def test_pod_that_the_schema_refuses_is_said_in_the_status(server, cluster, mistake, reason):
    main = worker()["extraPodSpec"]["mainContainer"] | mistake
    async with running(server):
        await cluster.create(make_graph("g", {"W": worker(extraPodSpec={"mainContainer": main})}))

        async def is_said():
            graph = await cluster.get(API, DGD, "g")
            return reason in objects.find_condition(graph, "Ready").get("message", "")

        await until(is_said)


async def test_unforeseen_fault_of_one_object_ends_nothing_for_others(
    server, cluster, monkeypatch, caplog
):
    decide = component.decide

    def fail(resource, *observed):
        if resource["metadata"]["name"].startswith("odd"):
            raise KeyError("name")
        return decide(resource, *observed)

    monkeypatch.setattr(component, "decide", fail)
    async with running(server):
        await cluster.create(make_graph("odd"))
        await until(lambda: asyncio.sleep(0, "cannot be reconciled" in caplog.text))
        await cluster.create(make_graph("good"))
        await until(lambda: is_ready(cluster, "good"))


async def test_container_with_a_field_that_kubernetes_refuses_ends_nothing(server, cluster):
    main = worker()["extraPodSpec"]["mainContainer"] | {"env": [{"value": "1"}]}
    async with running(server):
        await cluster.create(make_graph("odd", {"W": worker(extraPodSpec={"mainContainer": main})}))
        await cluster.create(make_graph("good"))
        await until(lambda: is_ready(cluster, "good"))


async def test_operator_keeps_to_its_namespace(server, cluster):
    async with running(server, restricted_namespace="default"):
        other = make_graph("other")
        other["metadata"]["namespace"] = "elsewhere"
        server.connect("elsewhere")
        await cluster.create(other)
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))

        assert await cluster.list(API, DCD, "elsewhere") == []


async def test_token_is_made_again_when_a_pod_lacks_it(server, cluster):
    async with running(server):
        await cluster.create(make_graph())
        await until(lambda: is_ready(cluster))
        await cluster.delete("v1", "Secret", "dynamo-g-cluster-token")
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "p",
                "namespace": "default",
                "labels": {objects.GRAPH_LABEL: "g", objects.MANAGED_BY: objects.FIELD_MANAGER},
            },
            "status": {
                "containerStatuses": [
                    {"name": "main", "state": {"waiting": {"reason": "CreateContainerConfigError"}}}
                ]
            },
        }
        server.put_object(pod)
        await until(lambda: cluster.get("v1", "Secret", "dynamo-g-cluster-token"))


async def test_absent_secret_of_the_user_is_named_until_it_comes(server, cluster, monkeypatch):
    monkeypatch.setattr(reconciler, "ABSENT_SECRET_POLL_S", 0.1)
    async with running(server):
        graph = make_graph(services={"Decode": worker(envFromSecret="hf-token-secret")})
        await cluster.create(graph)

        async def says(text):
            found = objects.find_condition(await cluster.get(API, DGD, "g"), "Ready")
            return text in found.get("message", "")

        async def is_all(text):
            return await says(text) and not await says(";")

        await until(lambda: says("the Secret hf-token-secret does not exist"))
        await until(lambda: is_ready(cluster))
        await until(lambda: says("all resources are ready; service Decode: the Secret hf-token-"))
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hf-token-secret"}}
        await cluster.create(secret)
        await until(lambda: is_all("all resources are ready"))


async def test_one_operator_acts_and_another_takes_over(server, cluster):
    async with running(server, "one", leader_elect=True) as first:
        await until(lambda: lease_of(cluster))
        async with running(server, "two", leader_elect=True) as second:
            await cluster.create(make_graph())
            await until(lambda: is_ready(cluster))
            assert first.controller.cache.roots()
            assert second.controller is None
    lease = await lease_of(cluster)
    assert lease["spec"]["holderIdentity"] == ""


async def lease_of(cluster):
    return await cluster.get("coordination.k8s.io/v1", "Lease", "dynamo-operator")


async def test_failed_key_comes_later_after_each_failure():
    clock = virtual.VirtualClock()
    queue = work_queue.KeyQueue(clock)
    key = "Kind", "default", "name"
    delays = []
    queue.add(key)
    for _ in range(12):
        started_at = clock.now()
        taken = asyncio.create_task(queue.take())
        for _ in range(200):
            if taken.done():
                break
            await clock.advance(0.5)
        delays.append(clock.now() - started_at)
        queue.release(await taken, has_failed=True)

    assert delays == sorted(delays)
    assert 59 <= delays[-1] <= 61


async def test_key_added_during_work_is_worked_on_again():
    queue = work_queue.KeyQueue(clocks.SystemClock())
    key = "Kind", "default", "name"
    queue.add(key)
    taken = await queue.take()
    queue.add(key)
    assert len(queue) == 1
    queue.release(taken, has_failed=False)

    assert await queue.take() == key


@contextlib.asynccontextmanager
async def played_frontend(body):
    """Yield the port of a server that answers each request with this body."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


async def test_frontend_tells_the_instances_of_each_namespace():
    rows = [{"endpoint": name, "namespace": "a"} for name in ("generate", "other")]
    async with played_frontend(json.dumps({"instances": rows}).encode()) as port:
        assert await pod_calls.read_instances("127.0.0.1", port) == {"a": 1}
    assert await pod_calls.read_instances("127.0.0.1", port) is None


async def test_worker_that_a_frontend_cannot_reach_is_not_admitted():
    rows = [{"endpoint": "generate", "namespace": "a", "state": each} for each in ("down", "ready")]
    async with played_frontend(json.dumps({"instances": rows}).encode()) as port:
        assert await pod_calls.read_instances("127.0.0.1", port) == {"a": 1}


async def test_frontend_tells_workers_of_embeddings_too():
    rows = [{"endpoint": "embed", "namespace": "a"}]
    async with played_frontend(json.dumps({"instances": rows}).encode()) as port:
        assert await pod_calls.read_instances("127.0.0.1", port) == {"a": 1}


@pytest.mark.parametrize("body", [b'"\xff"', b"[" * 100_000, b"7", b'{"instances": [7]}'])
async def test_frontend_that_answers_something_else_tells_nothing(body):
    async with played_frontend(body) as port:
        assert await pod_calls.read_instances("127.0.0.1", port) is None


async def test_frontend_that_answered_before_and_is_slow_now_has_admitted_nothing(monkeypatch):
    counts = {"10.0.0.1": {"a": 2}, "10.0.0.2": {"a": 2}, "10.0.0.3": None}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    pods = [
        {
            "metadata": {"uid": address, "labels": {objects.TYPE_LABEL: "frontend"}},
            "status": {**ready, "podIP": address},
        }
        for address in counts
    ]

    async def read(address):
        return counts[address]

    monkeypatch.setattr(pod_calls, "read_instances", read)
    heard = set()
    assert await pod_calls.count_admitted(pods, heard) == {"a": 2}
    counts["10.0.0.2"] = None
    assert await pod_calls.count_admitted(pods, heard) == {"a": 0}
    counts["10.0.0.1"] = None
    assert await pod_calls.count_admitted(pods, heard) == {}
    assert await pod_calls.count_admitted(pods, set()) is None


async def test_download_of_a_worker_is_shown_while_it_goes_on(server, cluster):
    reports = [{"stage": "download", "model": "org/m", "doneBytes": 10, "totalBytes": 100}]

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"status": "notready", "startup": reports[-1]})
        writer.write(f"HTTP/1.0 503 x\r\n\r\n{body}".encode())
        writer.close()

    async def says(text):
        found = await cluster.get(API, DGD, "g")
        return text in objects.find_condition(found, "Ready").get("message", "")

    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0) as listening,
        running(server),
    ):
        port = listening.sockets[0].getsockname()[1]
        await cluster.create(make_graph(services={"Decode": worker()}))
        deployment = await until(lambda: cluster.get("apps/v1", "Deployment", "g-decode"))
        container = {"name": "main", "ports": [{"name": "system", "containerPort": port}]}
        running_state = {"name": "main", "started": True, "state": {"running": {}}}
        server.put_object(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": "p",
                    "namespace": "default",
                    "labels": deployment["spec"]["template"]["metadata"]["labels"],
                },
                "spec": {"containers": [container]},
                "status": {"podIP": "127.0.0.1", "containerStatuses": [running_state]},
            }
        )
        await until(lambda: says("pod p downloads org/m: 10 %"))
        reports.append({**reports[0], "doneBytes": 55})
        await until(lambda: says("pod p downloads org/m: 55 %"))
        reports.append({"stage": "load"})
        await until(lambda: says("pod p loads its model"))


async def test_pods_that_do_not_answer_hold_up_no_other_deployment(server, cluster, monkeypatch):
    has_ended = asyncio.Event()

    async def call_pod(*_, **__):
        await has_ended.wait()
        raise errors.Unavailable("no answer")

    monkeypatch.setattr(pod_calls, "call_pod", call_pod)
    async with running(server):
        for number in range(12):
            await cluster.create(make_graph(f"g{number}", services={"Decode": worker()}))
            name = f"g{number}-decode"
            deployment = await until(lambda name=name: cluster.get("apps/v1", "Deployment", name))
            labels = deployment["spec"]["template"]["metadata"]["labels"]
            main = {"name": "main", "started": True, "state": {"running": {}}}
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": "default", "labels": labels},
                "spec": {"containers": [{"name": "main"}]},
                "status": {"podIP": "10.0.0.1", "containerStatuses": [main]},
            }
            server.put_object(pod)
        await cluster.create(make_graph())

        assert await until(lambda: cluster.get("apps/v1", "Deployment", "g-decode"))
        has_ended.set()


@contextlib.asynccontextmanager
async def played_worker(adapters, refusals):
    """Serve the routes of a worker's adapters; yield the port. `refusals` hold as long as there are any."""

    async def answer(reader, writer):
        method, path, _ = (await reader.readline()).decode().split()
        length = int((await reader.readuntil(b"\r\n\r\n")).split(b"content-length: ")[1].split()[0])
        body = json.loads(await reader.readexactly(length) or b"{}")
        code, text = refusals[0] if refusals else (200, "")
        if code == 200 and method == "POST":
            adapters[body["lora_name"]] = body["source"]["uri"]
        elif code == 200:
            del adapters[path.rpartition("/")[2]]
        error = json.dumps({"error": {"message": text}})
        writer.write(f"HTTP/1.0 {code} x\r\n\r\n{error}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


async def test_adapter_is_loaded_until_it_holds_and_unloaded_before_its_model_goes(server, cluster):
    adapters, refusals = {}, [(409, "the worker does not serve now")]
    spec = {"modelName": "poet", "baseModelName": "base", "source": {"uri": "file:///poet"}}
    model = {"apiVersion": API, "kind": "DynamoModel", "metadata": {"name": "m"}, "spec": spec}

    async def says(text):
        found = await cluster.get(API, "DynamoModel", "m")
        return text in objects.find_condition(found, "EndpointsReady").get("message", "")

    async with played_worker(adapters, refusals) as port, running(server):
        await cluster.create(model)
        await until(lambda: says("expected a service with modelRef.name base"))
        decode = worker(modelRef={"name": "base"})
        await cluster.create(make_graph(services={"Decode": decode}))
        await until(lambda: is_ready(cluster))
        [pod] = await cluster.list("v1", "Pod")
        ports = [{"name": "system", "containerPort": port}]
        pod["spec"] = {"containers": [{"name": "main", "ports": ports}]}
        pod["status"]["podIP"] = "127.0.0.1"
        server.put_object(pod)
        await until(lambda: says("does not serve now"))
        refusals.clear()
        await until(lambda: says("1 workers have the model"))
        found = await cluster.get(API, "DynamoModel", "m")

        assert adapters == {"poet": "file:///poet"}
        assert found["status"]["endpoints"] == [
            {"podName": "g-decode-0", "address": f"http://127.0.0.1:{port}", "ready": True}
        ]
        refusals.append((500, "busy"))
        await cluster.delete(API, "DynamoModel", "m")
        model = await until(lambda: cluster.get(API, "DynamoModel", "m"))
        assert model["metadata"]["finalizers"]
        assert adapters
        refusals.clear()
        await until(lambda: gone(cluster, "DynamoModel", "m"))
        assert adapters == {}


PROFILED = (
    '{"mode":"disagg","num_prefill":1,"num_decode":3,"requests_per_s":2.5,"ttft_ms":90,"itl_ms":9}'
)


def make_request(**spec):
    config = {"config": {"sla": {"isl": 64, "ttft": 150.5}, "hardware": {"num_gpus_per_node": 4}}}
    spec = {"model": "m", "useMocker": True, "profilingConfig": config, **spec}
    kind = "DynamoGraphDeploymentRequest"
    return {"apiVersion": API, "kind": kind, "metadata": {"name": "r"}, "spec": spec}


async def profile(server, cluster, phase="Succeeded", condition="Complete"):
    """Let the profiler's Job end; return its container."""
    job = await until(lambda: cluster.get("batch/v1", "Job", "r-profile"))
    template = job["spec"]["template"]
    metadata = {
        "name": "r-profile-x",
        "namespace": "default",
        "labels": template["metadata"]["labels"],
    }
    ended = {"exitCode": 2, "reason": "Error", "message": "no such model"}
    states = [{"name": "main", "ready": False, "state": {"terminated": ended}}]
    status = {"phase": phase} | ({"containerStatuses": states} if phase == "Failed" else {})
    server.log_by_pod["r-profile-x"] = f"starting\n{PROFILED}\nwrote /tmp/profile\n"
    server.put_object({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})
    changes = {"status": {"conditions": [{"type": condition, "status": "True"}]}}
    await cluster.patch("batch/v1", "Job", "r-profile", changes, subresource="status")
    return template["spec"]["containers"][0]


async def test_request_profiles_writes_its_deployment_once_and_follows_it(server, cluster):
    async def is_in(state):
        found = await cluster.get(API, "DynamoGraphDeploymentRequest", "r")
        return found if (found.get("status") or {}).get("state") == state else None

    async with running(server) as operator:
        await cluster.create(make_request(autoApply=True, deploymentOverrides={"name": "g"}))
        container = await profile(server, cluster)
        await until(lambda: is_ready(cluster))
        await until(lambda: is_in("Ready"))
        deployment = await cluster.get(API, DGD, "g")
        await until(lambda: settled(server, operator))
        await cluster.delete(API, DGD, "g")
        request = await until(lambda: is_in("DeploymentDeleted"))

    flags = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    services = deployment["spec"]["services"]
    assert (flags["--ttft"], flags["--isl"], flags["--workers"]) == ("150.5", "64", "4")
    assert {name: service["replicas"] for name, service in services.items()} == {
        "Frontend": 1,
        "PrefillWorker": 1,
        "Worker": 3,
    }
    assert request["status"]["generatedDeployment"]["spec"] == deployment["spec"]
    assert [entry["type"] for entry in request["status"]["conditions"]] == [
        "Validation",
        "Profiling",
        "SpecGenerated",
        "DeploymentReady",
    ]


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        ({}, "Profiling", "no such model"),
        ({"profilingConfig": {"config": {"sla": {"isl": "x"}}}}, "Validation", "config.sla.isl"),
        ({"deploymentOverrides": {"name": 1}}, "Validation", "deploymentOverrides.name"),
    ],
)
async def test_request_that_fails_says_where(server, cluster, spec, kind, message):
    async def has_failed():
        found = await cluster.get(API, "DynamoGraphDeploymentRequest", "r")
        status = found.get("status") or {}
        return status["conditions"][-1] if status.get("state") == "Failed" else None

    async with running(server):
        await cluster.create(make_request(**spec))
        if kind == "Profiling":
            await profile(server, cluster, "Failed", "Failed")
        condition = await until(has_failed)

    assert (condition["type"], condition["status"]) == (kind, "False")
    assert message in condition["message"]


async def gone(cluster, kind, name):
    return await cluster.get(API, kind, name) is None


NUM_CHAOS_RUNS = int(os.environ.get("DYN_TEST_CHAOS_RUNS", "3"))  # make test-operator-chaos: 200
SPECS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2), "replicas": st.integers(1, 4), "has_prefill": st.booleans()}
)
EVENTS = st.sampled_from(["cut", "forget", "replace", "revert", "fail", "depose", "settle"])


@hypothesis.settings(
    max_examples=NUM_CHAOS_RUNS,
    database=None,
    derandomize=NUM_CHAOS_RUNS < 10,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(
    specs=st.lists(SPECS, min_size=2, max_size=4),
    lives=st.lists(st.lists(EVENTS, min_size=1, max_size=4), min_size=2, max_size=6),
    seed=st.integers(0, 2**16),
)
async def test_chaos_of_the_cluster_ends_as_an_undisturbed_run(specs, lives, seed):
    """Operators die or lose their Lease, watches break, a tenth of the calls fails, specs change and revert."""
    rng = random.Random(seed)
    server = MemoryCluster()
    answer, is_failing = server.handle_async_request, True

    async def fail_sometimes(request):
        if is_failing and rng.random() < 0.1:
            return httpx2.Response(rng.choice((429, 500, 503)), json={"message": "chaos"})
        return await answer(request)

    spec = specs[0]
    async with server, server.connect() as cluster:
        await cluster.create(graph_of(**spec))
        server.handle_async_request = fail_sometimes
        for life in lives:
            async with running_with_lease(server) as operator:
                for event in life:
                    if event in ("replace", "revert"):
                        spec = specs[0] if event == "revert" else rng.choice(specs)
                        with contextlib.suppress(errors.DynamoError):
                            changes = {"spec": graph_of(**spec)["spec"]}
                            await cluster.patch(API, DGD, "g", changes)
                    elif event == "settle":
                        await is_ready(cluster)
                    else:
                        await disturb(event, server, operator, rng)
                    await asyncio.sleep(rng.random() * 0.02)
        is_failing = False
        server.failures.clear()
        server.put_object({**await cluster.get(API, DGD, "g"), "spec": graph_of(**spec)["spec"]})
        async with running(server):
            await until(lambda: is_ready(cluster))
            await until(lambda: has_one_generation(cluster, spec))
        found = await specs_of(cluster)
    undisturbed = MemoryCluster()
    async with undisturbed, undisturbed.connect() as cluster:
        await cluster.create(graph_of(**spec))
        async with running(undisturbed):
            await until(lambda: is_ready(cluster))
        assert await specs_of(cluster) == found


@contextlib.asynccontextmanager
async def running_with_lease(server):
    """Run an operator that looks at its Lease all the time."""
    with pytest.MonkeyPatch.context() as patch:
        for pause in ("RENEW_S", "_RETRY_S"):
            patch.setattr(election, pause, 0.02)
        async with running(server, leader_elect=True) as operator:
            yield operator


async def disturb(event, server, operator, rng):
    """Break watches or calls, or let another operator have the Lease for a while."""

    async def is_deposed():
        return operator.controller is None

    match event:
        case "cut":
            server.cut_watches()
        case "forget":
            server.forget_history()
        case "fail":
            server.failures += [httpx2.ReadError("cut")] * rng.randint(1, 3)
        case "depose":
            server.put_object(lease_held_by("another"))
            await until(is_deposed)
            server.put_object(lease_held_by(""))


def lease_held_by(identity):
    metadata = {"name": "dynamo-operator", "namespace": "default"}
    head = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    return {**head, "spec": {"holderIdentity": identity}}


def graph_of(seed, replicas, has_prefill):
    services = {"Frontend": frontend(), "Decode": worker(f"--seed {seed}", replicas)}
    if has_prefill:
        services["Prefill"] = worker(f"--is-prefill-worker --seed {seed}")
    return make_graph(services=services)


async def has_one_generation(cluster, spec):
    await is_ready(cluster)
    return len(await cluster.list("apps/v1", "Deployment")) == 2 + spec["has_prefill"]


async def specs_of(cluster):
    """Return arguments and replicas of the Deployments, without the digits of generations."""
    return sorted(
        (
            deployment["metadata"]["labels"][objects.COMPONENT_LABEL],
            deployment["spec"]["replicas"],
            str(deployment["spec"]["template"]["spec"]["containers"][0].get("args")),
        )
        for deployment in await cluster.list("apps/v1", "Deployment")
    )
