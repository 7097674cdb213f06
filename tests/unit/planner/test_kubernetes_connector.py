"""What the Kubernetes connector reads from a deployment and its pods."""

import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.planner import kubernetes_connector as connectors
from dynamo.planner.observation import Replicas
from dynamo.planner.scaling_pipeline import Decision
from dynamo.testing import clock as virtual
from memory_cluster import MemoryCluster

WORKER = {"componentType": "worker"}


def pod(name, *conditions, created="1970-01-01T00:01:40Z", waiting=None, **metadata):
    status = {"conditions": list(conditions)}
    if waiting:
        status["containerStatuses"] = [{"state": {"waiting": waiting}}]
    return {
        "metadata": {"name": name, "uid": name, "creationTimestamp": created, **metadata},
        "status": status,
    }


READY = {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:02:10Z"}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}


def state(*pods, num_ordered, startups_s=None):
    return connectors.pool_state(
        pods,
        num_ordered=num_ordered,
        ordered_at=7.0,
        started_at=-90.0,
        startups_s={} if startups_s is None else startups_s,
    )


def test_ready_starting_and_draining_pods_are_told_apart():
    found = state(
        pod("a", READY),
        pod("b"),
        pod("c", READY, deletionTimestamp="1970-01-01T00:03:00Z"),
        num_ordered=3,
    )

    assert (found.num_ready, found.starting_since, found.num_draining) == (1, (7.0, 10.0), 1)
    assert found.startup_s == 30.0


def test_pods_above_the_order_count_as_draining():
    found = state(pod("a", READY), pod("b", READY), pod("c"), num_ordered=1)

    assert (found.num_ready, found.num_starting, found.num_draining) == (1, 0, 2)


def test_pods_that_have_ended_hold_nothing():
    """An evicted pod stays as an object for days, beside the one that replaced it."""
    gone = pod("gone", created="1970-01-01T00:00:01Z")
    gone["status"]["phase"] = "Failed"
    found = state(gone, pod("a", READY), pod("b"), num_ordered=2)

    assert (found.num_ready, found.starting_since, found.num_draining) == (1, (10.0,), 0)


def test_pod_that_is_ready_again_after_a_failed_probe_has_not_started_so_long():
    known = {}
    state(pod("a", READY), num_ordered=1, startups_s=known)
    later = {**READY, "lastTransitionTime": "1970-01-02T00:00:00Z"}
    found = state(pod("a", later), num_ordered=1, startups_s=known)

    assert found.startup_s == 30.0


def test_pool_that_has_no_pod_left_keeps_the_time_that_its_last_ones_took():
    """A start after a sleep would else be given up after three times `--startup-time`, however long it takes."""
    known = {}
    state(pod("a", READY), num_ordered=1, startups_s=known)
    asleep = state(num_ordered=0, startups_s=known)
    starting = state(pod("b"), num_ordered=1, startups_s=known)
    slower = READY | {"lastTransitionTime": "1970-01-01T00:02:50Z"}
    ready = state(pod("b", slower), num_ordered=1, startups_s=known)

    assert [each.startup_s for each in (asleep, starting, ready)] == [30.0, 30.0, 70.0]
    assert known.keys() == {"b"}


def test_time_since_a_failed_probe_before_the_first_observation_is_no_start():
    later = {**READY, "lastTransitionTime": "1970-01-02T00:00:00Z"}

    assert state(pod("a", later), num_ordered=1).startup_s is None
    assert state(pod("a", later), pod("b", READY), num_ordered=2).startup_s == 30.0


def test_pod_that_failed_a_probe_is_starting_since_then():
    """A planner that took it for one that has started since its creation would give it up at once."""
    unready = {**READY, "status": "False", "lastTransitionTime": "1970-01-02T00:00:00Z"}
    found = state(pod("a", unready), pod("b"), num_ordered=2)

    assert found.starting_since == (10.0, 86_400 - 90.0)


def with_download(waiting):
    """Return a pod whose first container cannot start, so that the others wait for it."""
    unstarted = pod("a", waiting={"reason": "PodInitializing"})
    unstarted["status"]["initContainerStatuses"] = [{"state": {"waiting": waiting}}]
    return unstarted


@pytest.mark.parametrize(
    ("broken", "failure"),
    [
        (pod("a", UNSCHEDULABLE), "a cannot be scheduled: 0/3 nodes"),
        (
            pod("a", waiting={"reason": "ImagePullBackOff", "message": "no x"}),
            "a: ImagePullBackOff: no x",
        ),
        (pod("a", waiting={"reason": "ContainerCreating"}), ""),
        (with_download({"reason": "ErrImagePull", "message": "no y"}), "a: ErrImagePull: no y"),
        (with_download({"reason": "PodInitializing"}), ""),
    ],
)
def test_pod_that_cannot_start_says_why(broken, failure):
    found = state(broken, num_ordered=1)

    assert found.num_starting == 1
    assert found.failure.startswith(failure)
    assert bool(found.failure) == bool(failure)


def graph(services):
    return {"metadata": {"name": "g"}, "spec": {"services": services}}


def test_services_are_found_by_their_type_or_name():
    decode = WORKER | {"subComponentType": "decode"}
    named = graph(
        {"Frontend": {"componentType": "frontend"}, "VllmPrefillWorker": WORKER, "D": decode}
    )

    assert connectors.worker_services(named) == (("VllmPrefillWorker", WORKER), ("D", decode))
    assert connectors.worker_services(graph({"A": WORKER})) == (None, ("A", WORKER))


def test_type_of_a_service_is_read_as_the_operator_reads_it():
    spec = {"componentType": "Worker"}

    assert connectors.worker_services(graph({"A": spec, "B": {}})) == (None, ("A", spec))


def test_two_services_of_a_pool_are_refused():
    with pytest.raises(errors.ConfigError, match=r"got A, B; tell them apart by subComponentType"):
        connectors.worker_services(graph({"A": WORKER, "B": WORKER}))


async def test_scaling_adapter_is_scaled_in_place_of_the_service():
    cluster = MemoryCluster()
    kubernetes = cluster.connect("k8s")
    head = {"apiVersion": connectors.API_VERSION}
    decode = WORKER | {"replicas": 1, "scalingAdapter": {"enabled": True}}
    deployment = graph({"Decode": decode}) | head | {"kind": connectors.GRAPH}
    adapter = head | {"kind": connectors.ADAPTER, "metadata": {"name": "g-decode"}}
    await kubernetes.create(deployment)
    target = {"name": "g", "serviceName": "Decode"}
    await kubernetes.create(adapter | {"spec": {"replicas": 1, "dgdRef": target}})
    environ = {"DYN_PARENT_DGD_K8S_NAME": "g"}
    connector = connectors.KubernetesConnector(kubernetes, environ, clock=clocks.SystemClock())
    await connector.scale(
        Decision(at=0, present=Replicas(0, 1), replicas=Replicas(0, 3), outcome="", reason="")
    )
    scaled = await kubernetes.get(connectors.API_VERSION, connectors.ADAPTER, "g-decode")
    untouched = await kubernetes.get(connectors.API_VERSION, connectors.GRAPH, "g")

    assert scaled["spec"]["replicas"] == 3
    assert untouched["spec"]["services"]["Decode"]["replicas"] == 1
    assert (await connector.observe())[1].num_starting == 3

    await connector.scale(
        Decision(at=0, present=Replicas(0, 3), replicas=Replicas(0, 1), outcome="", reason="")
    )
    scaled = await kubernetes.get(connectors.API_VERSION, connectors.ADAPTER, "g-decode")

    assert scaled["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("adapter", "is_used"), [({"enabled": True}, True), ({"enabled": False}, False), ({}, False)]
)
def test_scaling_adapter_is_used_where_the_operator_makes_one(adapter, is_used):
    assert connectors.has_scaling_adapter(WORKER | {"scalingAdapter": adapter}) == is_used


async def test_workers_of_a_service_that_is_not_there_are_said_after_the_others_are_scaled():
    kubernetes = MemoryCluster().connect("k8s")
    head = {"apiVersion": connectors.API_VERSION, "kind": connectors.GRAPH}
    await kubernetes.create(graph({"Decode": WORKER | {"replicas": 1}}) | head)
    environ = {"DYN_PARENT_DGD_K8S_NAME": "g"}
    connector = connectors.KubernetesConnector(kubernetes, environ, clock=clocks.SystemClock())
    order = Decision(at=0, present=Replicas(0, 1), replicas=Replicas(2, 3), outcome="", reason="")
    with pytest.raises(errors.ConfigError, match="g has no prefill service, of which 2 workers"):
        await connector.scale(order)

    _, decode = await connector.observe()
    assert decode.num_starting == 3


async def test_pods_of_a_deployment_with_a_longer_name_are_not_counted():
    """Both have a service of this name, and the dynamo namespace of `g` is the beginning of the other's."""
    kubernetes = MemoryCluster().connect("k8s")
    head = {"apiVersion": connectors.API_VERSION, "kind": connectors.GRAPH}
    await kubernetes.create(graph({"Decode": WORKER | {"replicas": 2}}) | head)
    for name, number in (("g", 1), ("g-70b", 2)):
        labels = {
            "nvidia.com/dynamo-component": "Decode",
            "nvidia.com/dynamo-graph-deployment-name": name,
            "nvidia.com/dynamo-namespace": f"dynamo-{name}",
        }
        spec = {"containers": [{"name": "main", "image": "none.invalid/none"}]}
        for each in range(number):
            metadata = {"name": f"{name}-{each}", "labels": labels}
            await kubernetes.create(
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            )
    environ = {"DYN_PARENT_DGD_K8S_NAME": "g"}
    connector = connectors.KubernetesConnector(kubernetes, environ, clock=clocks.SystemClock())
    _, decode = await connector.observe()

    assert (decode.num_starting, decode.num_draining) == (2, 0)


async def test_pod_that_is_missing_for_a_moment_is_not_missing_since_the_last_order():
    """A pod was evicted, and its successor is not made yet."""
    clock = virtual.VirtualClock()
    server = MemoryCluster()
    kubernetes = server.connect("k8s")
    head = {"apiVersion": connectors.API_VERSION, "kind": connectors.GRAPH}
    await kubernetes.create(graph({"Decode": WORKER | {"replicas": 1}}) | head)
    labels = {
        "nvidia.com/dynamo-component": "Decode",
        "nvidia.com/dynamo-graph-deployment-name": "g",
    }
    spec = {"containers": [{"name": "main", "image": "none.invalid/none"}]}
    metadata = {"name": "g-1", "labels": labels}
    await kubernetes.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    environ = {"DYN_PARENT_DGD_K8S_NAME": "g"}
    connector = connectors.KubernetesConnector(kubernetes, environ, clock=clock)
    await connector.observe()
    await clock.advance(3600)
    await connector.observe()
    server.remove_object("v1", "Pod", "k8s", "g-1")
    last_seen_at = clock.now()
    await clock.advance(10)
    _, decode = await connector.observe()

    assert decode.starting_since == (last_seen_at,)


async def test_nodes_of_a_group_are_one_worker():
    """A further node has no probe, and would be counted as ready, or as one that drains, for ever."""
    server = MemoryCluster()
    kubernetes = server.connect("k8s")
    head = {"apiVersion": connectors.API_VERSION, "kind": connectors.GRAPH}
    spec = WORKER | {"replicas": 2, "multinode": {"nodeCount": 2}}
    await kubernetes.create(graph({"Decode": spec}) | head)
    index, clique = "leaderworkerset.sigs.k8s.io/worker-index", "grove.io/podclique"
    groups = [{index: "0"}, {index: "1"}, {clique: "g-decode-1-ldr"}, {clique: "g-decode-1-wkr"}]
    for number, labels in enumerate(groups):
        own = {
            "nvidia.com/dynamo-component": "Decode",
            "nvidia.com/dynamo-graph-deployment-name": "g",
        }
        metadata = {"name": f"p{number}", "namespace": "k8s", "labels": {**own, **labels}}
        status = {"conditions": [READY] if number != 2 else []}
        server.put_object(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
        )
    environ = {"DYN_PARENT_DGD_K8S_NAME": "g"}
    connector = connectors.KubernetesConnector(kubernetes, environ, clock=clocks.SystemClock())
    _, decode = await connector.observe()

    assert (decode.num_ready, decode.num_starting, decode.num_draining) == (1, 1, 0)


async def test_service_of_frontends_leads_to_each_of_their_pods():
    server = MemoryCluster()
    kubernetes = server.connect("k8s")
    for number, labels in enumerate(("g-frontend", "g-frontend", "g-frontend", "g-other")):
        metadata = {
            "name": f"p{number}",
            "namespace": "k8s",
            "labels": {
                "nvidia.com/dynamo-graph-deployment-name": "g",
                "nvidia.com/selector": labels,
            },
        }
        conditions = [READY] if number else []
        status = {"conditions": conditions, "podIP": f"10.0.0.{number}"}
        server.put_object(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
        )
    environ = {"DYN_PARENT_DGD_K8S_NAME": "g"}
    connector = connectors.KubernetesConnector(kubernetes, environ, clock=clocks.SystemClock())
    pods = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    for host in ("g-frontend", "g-frontend.k8s", "g-frontend.k8s.svc.cluster.local"):
        assert await connector.find_frontends(f"http://{host}:8000") == pods
    for host in ("g-frontend.elsewhere", "llm.example.com", "127.0.0.1", "[::1]", "g-absent"):
        assert await connector.find_frontends(f"http://{host}:8000") == (f"http://{host}:8000",)


async def test_missing_deployment_and_missing_variable_are_named():
    kubernetes = MemoryCluster().connect("k8s")
    clock = clocks.SystemClock()
    with pytest.raises(errors.ConfigError, match="needs DYN_PARENT_DGD_K8S_NAME"):
        connectors.KubernetesConnector(kubernetes, {}, clock=clock)
    environ = {"DYN_PARENT_DGD_K8S_NAME": "gone"}
    connector = connectors.KubernetesConnector(kubernetes, environ, clock=clock)
    with pytest.raises(errors.Unavailable, match="no DynamoGraphDeployment gone in namespace k8s"):
        await connector.observe()
