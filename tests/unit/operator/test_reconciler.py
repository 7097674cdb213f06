"""One look at an object: what a refusal becomes in the status, and what is read again after a conflict."""

import asyncio

import httpx2
import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.operator import objects, pod_calls, reconciler, service
from dynamo.operator.object_cache import ObjectCache, key_of
from dynamo.operator.settings import OperatorConfig
from dynamo.runtime.backends.kubernetes import connection
from memory_cluster import MemoryCluster
from operator_cluster import frontend, make_graph, worker

API, DCD = "nvidia.com/v1alpha1", "DynamoComponentDeployment"
SECRET = ("v1", "Secret", "dynamo-g-cluster-token")


def refuse(server, method, ending, code, message):
    """Let the server refuse the requests whose path ends so."""
    answer = server.handle_async_request

    async def handle(request):
        if request.method == method and request.url.path.endswith(ending):
            return httpx2.Response(code, json={"message": message})
        return await answer(request)

    server.handle_async_request = handle


def looking(cluster, cache):
    settings = OperatorConfig(etcd_addr="etcd:2379")
    return reconciler.Reconciler(cluster, cache, settings, clocks.SystemClock())


async def test_secret_that_has_changed_is_read_again_and_no_failure_is_said(cluster):
    cache = ObjectCache()
    graph = await cluster.create(make_graph())
    head = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET[2]}}
    for item in (graph, await cluster.create({**head, "type": "Opaque"})):
        cache.put(item)
    await cluster.patch(*SECRET, {"metadata": {"labels": {"backup": "yes"}}})
    look = looking(cluster, cache)
    with pytest.raises(errors.Conflict):
        await look.reconcile(key_of(graph))

    assert "status" not in await cluster.get(API, graph["kind"], "g")
    await look.reconcile(key_of(graph))
    (owner,) = (await cluster.get(*SECRET))["metadata"]["ownerReferences"]
    assert owner["name"] == "g"


async def test_adapter_stays_while_another_object_names_it(cluster, monkeypatch):
    cache, calls, kind = ObjectCache(), [], "DynamoModel"
    look = looking(cluster, cache)
    base = {"modelName": "poet", "baseModelName": "base", "modelType": "lora"}
    for name, uri in (("a", "file:///1"), ("b", "file:///1"), ("c", "file:///2")):
        head = {"apiVersion": API, "kind": kind, "metadata": {"name": name}}
        cache.put(await cluster.create({**head, "spec": {**base, "source": {"uri": uri}}}))
    services = {"Decode": worker(modelRef={"name": "base"})}
    cache.put(await cluster.create(make_graph(services=services)))
    await look.reconcile(("DynamoGraphDeployment", "default", "g"))
    component = await cluster.get(API, DCD, "g-decode")
    pod = ready_pod(component)
    pod["metadata"]["labels"][objects.TYPE_LABEL] = "worker"
    pod["status"]["podIP"] = "10.0.0.1"
    cache.put({**pod, "spec": {"containers": []}})

    async def change_adapter(address, port, name, uri):
        calls.append(uri)
        return ""

    monkeypatch.setattr(pod_calls, "change_adapter", change_adapter)
    for name, expected in (("a", []), ("b", [None])):
        await look.reconcile((kind, "default", name))
        await cluster.delete(API, kind, name)
        cache.put(await cluster.get(API, kind, name))
        calls.clear()
        await look.reconcile((kind, "default", name))

        assert calls == expected
        assert await cluster.get(API, kind, name) is None


async def message_of(cluster, kind, name):
    conditions = ((await cluster.get(API, kind, name)).get("status") or {}).get("conditions")
    return conditions[0]["message"] if conditions else ""


@pytest.mark.parametrize("kind", ["Service", "Deployment"])
async def test_object_of_others_with_the_name_of_a_service_is_left_alone(cluster, kind):
    cache, labels = ObjectCache(), {"app": "mine"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    api_version, spec = {
        "Service": ("v1", {"selector": labels, "ports": [{"port": 80}]}),
        "Deployment": ("apps/v1", {"selector": {"matchLabels": labels}, "template": pod}),
    }[kind]
    head = {"apiVersion": api_version, "kind": kind, "metadata": {"name": "g-frontend"}}
    theirs = await cluster.create({**head, "spec": spec})
    graph = await cluster.create(make_graph(services={"Frontend": frontend()}))
    cache.put(graph)
    look = looking(cluster, cache)
    await look.reconcile(key_of(graph))
    component = (DCD, "default", "g-frontend")
    with pytest.raises(errors.InvalidRequest):
        await look.reconcile(component)

    assert await cluster.get(api_version, kind, "g-frontend") == theirs
    assert f"there is a {kind} g-frontend already" in await message_of(cluster, *component[::2])
    await cluster.delete(api_version, kind, "g-frontend")
    await look.reconcile(component)
    assert await cluster.get(api_version, kind, "g-frontend") != theirs


@pytest.mark.parametrize("first", ["a", "a-b"])
async def test_two_deployments_do_not_take_a_component_from_each_other(cluster, first):
    cache = ObjectCache()
    looks = looking(cluster, cache)
    services = {"a": {"b-Frontend": frontend()}, "a-b": {"Frontend": frontend()}}
    for name in sorted(services, key=lambda name: name != first):
        graph = await cluster.create(make_graph(name, services[name]))
        cache.put(graph)
        if name == first:
            await looks.reconcile(key_of(graph))
            continue
        before = await cluster.get(API, DCD, "a-b-frontend")
        with pytest.raises(errors.InvalidRequest):
            await looks.reconcile(key_of(graph))

        assert await cluster.get(API, DCD, "a-b-frontend") == before
        assert f"{graph['kind']} {first})" in await message_of(cluster, graph["kind"], name)


async def test_component_of_a_deployment_that_was_made_again_is_kept():
    server, cache = MemoryCluster(), ObjectCache()  # whose garbage collector is late
    async with server.connect() as cluster:
        look = looking(cluster, cache)
        for _ in range(2):
            graph = await cluster.create(make_graph())
            cache.put(graph)
            await look.reconcile(key_of(graph))
            (owner,) = (await cluster.get(API, DCD, "g-decode"))["metadata"]["ownerReferences"]
            assert owner["uid"] == graph["metadata"]["uid"]
            server.remove_object(API, graph["kind"], "default", "g")
            cache.remove(graph)


async def test_object_under_the_label_of_another_tool_is_labelled_again(cluster):
    cache = ObjectCache()
    look = looking(cluster, cache)
    graph = await cluster.create(make_graph())
    cache.put(graph)
    for key in (key_of(graph), (DCD, "default", "g-frontend")):
        await look.reconcile(key)
    service, label = ("v1", "Service", "g-frontend"), {objects.MANAGED_BY: "Helm"}
    cache.remove(await cluster.patch(*service, {"metadata": {"labels": label}}))
    await look.reconcile((DCD, "default", "g-frontend"))

    assert objects.labels_of(await cluster.get(*service))[objects.MANAGED_BY] == "dynamo-operator"


def ready_pod(component):
    name = component["metadata"]["name"]
    labels = {**component["metadata"]["labels"], objects.SELECTOR_LABEL: name}
    metadata = {"name": name, "uid": name, "namespace": "default", "labels": labels}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {"kind": "Pod", "metadata": metadata, "status": ready}


async def test_worker_that_dies_while_frontends_are_asked_replaces_no_other(cluster, monkeypatch):
    cache, kind = ObjectCache(), "DynamoComponentDeployment"
    graph = await cluster.create(make_graph(services={"Decode": worker("--seed 1")}))
    cache.put(graph)
    look = looking(cluster, cache)
    await look.reconcile(key_of(graph))
    (old,) = await cluster.list(API, kind)
    cache.put(ready_pod(old))
    changed = make_graph(services={"Decode": worker("--seed 2")})
    cache.put(await cluster.patch(API, graph["kind"], "g", {"spec": changed["spec"]}))
    await look.reconcile(key_of(graph))
    new = max(await cluster.list(API, kind), key=lambda item: len(item["metadata"]["name"]))
    cache.put(ready_pod(new))

    async def count_admitted(*_):
        cache.apply_event("DELETED", ready_pod(new))

    monkeypatch.setattr(pod_calls, "count_admitted", count_admitted)
    await look.reconcile(key_of(graph))

    assert (await cluster.get(API, kind, old["metadata"]["name"]))["spec"]["replicas"] == 1


async def test_job_that_the_cluster_refuses_is_said_in_its_request(server, cluster):
    cache = ObjectCache()
    kind = "DynamoGraphDeploymentRequest"
    resource = {"apiVersion": API, "kind": kind, "metadata": {"name": "r"}, "spec": {"model": "m"}}
    request = await cluster.create(resource)
    cache.put(request)
    refuse(server, "POST", "/jobs", 403, "exceeded quota: gpus")
    with pytest.raises(errors.Forbidden):
        await looking(cluster, cache).reconcile(key_of(request))

    status = (await cluster.get(API, kind, "r"))["status"]
    assert status["state"] == "Failed"
    assert status["conditions"][-1]["type"] == "Profiling"
    assert "exceeded quota: gpus" in status["conditions"][-1]["message"]


async def test_kind_that_the_cluster_lacks_is_said_in_the_status(cluster):
    """Such as LeaderWorkerSets for --enable-lws, whose controller was never installed."""
    cache = ObjectCache()
    spec = {**worker(), "multinode": {"nodeCount": 2}}
    head = {"apiVersion": API, "kind": "DynamoComponentDeployment"}
    component = await cluster.create({**head, "metadata": {"name": "w"}, "spec": spec})
    cache.put(component)
    settings = OperatorConfig(etcd_addr="etcd:2379", enable_lws=True)
    look = reconciler.Reconciler(cluster, cache, settings, clocks.SystemClock())
    with pytest.raises(connection.KindMissing):
        await look.reconcile(key_of(component))

    status = (await cluster.get(API, component["kind"], "w"))["status"]
    assert status["conditions"][0]["reason"] == "Refused"
    assert "no kind LeaderWorkerSet" in status["conditions"][0]["message"]


def istio():
    names = {"kind": "VirtualService", "plural": "virtualservices", "singular": "virtualservice"}
    schema = {"openAPIV3Schema": {"x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": schema}
    names["listKind"] = "VirtualServiceList"
    group = {"group": "networking.istio.io", "scope": "Namespaced", "names": names}
    return {"spec": {**group, "versions": [version]}}


async def test_kind_that_the_operator_may_not_read_is_one_that_it_does_without(server, cluster):
    """The chart gives rights to VirtualServices only with istio.enabled; clusters have Istio all the same."""
    server.define(istio())
    refuse(server, "GET", "/virtualservices", 403, "virtualservices is forbidden")
    clock, metrics = clocks.SystemClock(), service.OperatorMetrics()
    controller = service.Controller(cluster, OperatorConfig(), clock, metrics, None)
    kind = "VirtualService", "networking.istio.io/v1beta1"
    watching = asyncio.create_task(controller._watch(*kind))
    while kind[0] in controller._unsynced and not watching.done():
        await asyncio.sleep(0)

    assert not watching.done()
    watching.cancel()
    await asyncio.wait([watching])


async def test_pods_of_grove_are_seen_although_it_names_itself_their_manager(server, cluster):
    """It lays its default labels over those of a clique: `getLabels` of its PodCliques."""
    labels = {"app.kubernetes.io/managed-by": "grove-operator", objects.SELECTOR_LABEL: "g-decode"}
    spec = {"containers": [{"name": "main", "image": "none.invalid/none"}]}
    metadata = {"name": "g-decode-0-ldr-x", "labels": labels}
    pod = await cluster.create(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    )
    clock, metrics = clocks.SystemClock(), service.OperatorMetrics()
    controller = service.Controller(cluster, OperatorConfig(), clock, metrics, None)
    watching = asyncio.create_task(controller._watch("Pod", "v1"))
    while "Pod" in controller._unsynced and not watching.done():
        await asyncio.sleep(0)
    watching.cancel()
    await asyncio.wait([watching])

    assert controller.cache.get(key_of(pod)) is not None
