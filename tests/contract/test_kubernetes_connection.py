"""What a connection to a Kubernetes cluster promises, run over the cluster in memory and over API servers."""

import asyncio
import contextlib
import gc
import itertools
import json
import pathlib

import httpx2
import pytest

import kube_cluster
from dynamo.base import errors
from dynamo.runtime.backends.kubernetes import connection
from memory_cluster import MemoryCluster
from waiting import PATIENT_S

GROUP = "nvidia.com/v1alpha1"


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    with kube_cluster.running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "emulator"])
async def kubernetes(request):
    if request.param == "memory":
        async with MemoryCluster() as cluster, cluster.connect("test") as opened:
            yield opened
        return
    async with connection.KubernetesConnection.open(
        request.getfixturevalue("emulator").environ
    ) as opened:
        opened.namespace = await prepare_namespace(opened)
        yield opened


async def prepare_namespace(kubernetes):
    """Make a namespace of this test's own, and the definition of our kind."""
    definition = pathlib.Path("deploy/crds/dynamographdeployments.yaml").read_text()
    with contextlib.suppress(errors.Conflict):
        await kubernetes.create(json.loads(definition))
    namespace = f"test-{next(_numbers)}"
    metadata = {"name": namespace}
    await kubernetes.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    return namespace


_numbers = itertools.count(1)


def config_map(name, data, **metadata):
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **metadata},
        "data": data,
    }


async def take(watch, count):
    async with asyncio.timeout(PATIENT_S):
        return [await anext(watch) for _ in range(count)]


def told(events):
    return [(type_, obj.get("metadata", {}).get("name")) for type_, obj in events]


async def test_created_object_is_read_back(kubernetes):
    created = await kubernetes.create(config_map("a", {"k": "v"}))
    read = await kubernetes.get("v1", "ConfigMap", "a")

    assert read == created
    assert read["data"] == {"k": "v"}
    assert read["metadata"]["uid"]


async def test_object_without_namespace_is_created_in_that_of_the_connection(kubernetes):
    obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}

    assert (await kubernetes.create(obj))["metadata"]["namespace"] == kubernetes.namespace


async def test_missing_object_is_none_and_its_deletion_false(kubernetes):
    assert await kubernetes.get("v1", "ConfigMap", "absent") is None
    assert await kubernetes.delete("v1", "ConfigMap", "absent") is False


async def test_second_creation_is_a_conflict(kubernetes):
    await kubernetes.create(config_map("a", {}))

    with pytest.raises(errors.Conflict, match="already exists"):
        await kubernetes.create(config_map("a", {}))


async def test_unknown_kind_is_named_with_what_to_install(kubernetes):
    with pytest.raises(connection.KindMissing, match=r"no kind Foo in nvidia\.com/v9: install"):
        await kubernetes.get("nvidia.com/v9", "Foo", "a")
    with pytest.raises(connection.KindMissing, match="no kind Foo in v1"):
        await kubernetes.list("v1", "Foo")


async def test_list_selects_by_labels_and_fills_in_the_kind(kubernetes):
    for name, labels in (("a", {"x": "1"}), ("b", {"x": "2"}), ("c", {})):
        await kubernetes.create(config_map(name, {}, labels=labels))

    async def names(labels):
        found = await kubernetes.list("v1", "ConfigMap", kubernetes.namespace, labels=labels)
        assert {obj["kind"] for obj in found} <= {"ConfigMap"}
        return [obj["metadata"]["name"] for obj in found if len(obj["metadata"]["name"]) == 1]

    assert await names("x") == ["a", "b"]
    assert await names("x=1") == ["a"]
    assert await names("x!=1") == ["b", "c"]
    assert await names("!x") == ["c"]


async def test_list_reads_all_pages(kubernetes, monkeypatch):
    monkeypatch.setattr(connection, "PAGE_OBJECTS", 2)
    for name in "abcde":
        await kubernetes.create(config_map(name, {}, labels={"paged": "yes"}))
    found = await kubernetes.list("v1", "ConfigMap", kubernetes.namespace, labels="paged")

    assert [obj["metadata"]["name"] for obj in found] == list("abcde")


async def test_list_of_all_namespaces_reads_all_pages(kubernetes, monkeypatch):
    monkeypatch.setattr(connection, "PAGE_OBJECTS", 1)
    homes = [kubernetes.namespace, f"{kubernetes.namespace}-b"]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": homes[1]}}
    await kubernetes.create(namespace)
    for home in homes:
        await kubernetes.create(config_map("c", {}, labels={"everywhere": "yes"}, namespace=home))
    found = await kubernetes.list("v1", "ConfigMap", labels="everywhere")

    assert {obj["metadata"]["namespace"] for obj in found} == set(homes)


async def test_watch_tells_the_objects_and_then_every_change(kubernetes):
    await kubernetes.create(config_map("a", {}, labels={"w": "1"}))
    watch = kubernetes.watch("v1", "ConfigMap", kubernetes.namespace, labels="w")
    events = await take(watch, 2)
    await kubernetes.create(config_map("b", {}, labels={"w": "1"}))
    events += await take(watch, 1)
    await kubernetes.patch("v1", "ConfigMap", "a", {"data": {"k": "v"}})
    events += await take(watch, 1)
    await kubernetes.delete("v1", "ConfigMap", "a")
    events += await take(watch, 1)
    await watch.aclose()

    assert told(events) == [
        ("ADDED", "a"),
        ("SYNCED", None),
        ("ADDED", "b"),
        ("MODIFIED", "a"),
        ("DELETED", "a"),
    ]


async def test_object_that_leaves_the_selection_is_told_as_deleted(kubernetes):
    await kubernetes.create(config_map("a", {}, labels={"w": "1"}))
    watch = kubernetes.watch("v1", "ConfigMap", kubernetes.namespace, labels="w=1")
    await take(watch, 2)
    await kubernetes.patch("v1", "ConfigMap", "a", {"metadata": {"labels": {"w": "2"}}})

    assert told(await take(watch, 1)) == [("DELETED", "a")]
    await watch.aclose()


async def test_apply_creates_and_removes_what_it_no_longer_names(kubernetes):
    await kubernetes.apply(config_map("a", {"one": "1", "two": "2"}), "us")
    first = await kubernetes.apply(config_map("a", {"one": "1"}), "us")
    again = await kubernetes.apply(config_map("a", {"one": "1"}), "us")

    assert first["data"] == {"one": "1"}
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_apply_leaves_the_fields_of_others_alone(kubernetes):
    await kubernetes.apply(config_map("a", {"ours": "1"}), "us")
    await kubernetes.patch("v1", "ConfigMap", "a", {"data": {"theirs": "2"}})
    applied = await kubernetes.apply(config_map("a", {"ours": "3"}), "us")

    assert applied["data"] == {"ours": "3", "theirs": "2"}


async def test_apply_over_a_field_of_another_needs_force(kubernetes):
    await kubernetes.apply(config_map("a", {"k": "theirs"}), "them")

    with pytest.raises(errors.Conflict, match=r'conflict with "them".*data\.k'):
        await kubernetes.apply(config_map("a", {"k": "ours"}), "us")
    forced = await kubernetes.apply(config_map("a", {"k": "ours"}), "us", force=True)
    assert forced["data"] == {"k": "ours"}


async def test_status_is_applied_apart_from_the_spec(kubernetes):
    graph = {
        "apiVersion": GROUP,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"services": {"A": {"replicas": 1}}},
    }
    with pytest.raises(connection.ObjectMissing):
        await kubernetes.apply_status(graph | {"status": {"state": "pending"}}, "us")
    created = await kubernetes.apply(graph, "us")
    status = {"state": "pending"}
    applied = await kubernetes.apply_status(graph | {"spec": {}, "status": status}, "us")
    assert applied["status"]["state"] == "pending"
    assert applied["spec"] == created["spec"]
    assert applied["metadata"]["generation"] == 1

    changed = await kubernetes.apply(graph | {"spec": {"services": {"A": {"replicas": 2}}}}, "us")
    assert changed["metadata"]["generation"] == 2
    assert changed["status"]["state"] == "pending"


async def test_scale_sets_the_replicas(kubernetes):
    labels = {"app": "d"}
    await kubernetes.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "d"},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [{"name": "main", "image": "none.invalid/none"}]},
                },
            },
        }
    )
    scale = await kubernetes.scale("apps/v1", "Deployment", "d", 2)
    deployment = await kubernetes.get("apps/v1", "Deployment", "d")

    assert scale["spec"]["replicas"] == 2
    assert deployment["spec"]["replicas"] == 2
    await kubernetes.delete("apps/v1", "Deployment", "d", propagation="Background")


async def test_patch_with_an_old_revision_is_a_conflict(kubernetes):
    old = await kubernetes.create(config_map("a", {}))
    await kubernetes.patch("v1", "ConfigMap", "a", {"data": {"k": "v"}})
    changes = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}, "data": None}

    with pytest.raises(errors.Conflict):
        await kubernetes.patch("v1", "ConfigMap", "a", changes)
    with pytest.raises(connection.ObjectMissing, match="not found"):
        await kubernetes.patch("v1", "ConfigMap", "absent", {"data": {}})


async def test_deletion_holds_its_preconditions(kubernetes):
    created = await kubernetes.create(config_map("a", {}))

    with pytest.raises(errors.Conflict):
        await kubernetes.delete("v1", "ConfigMap", "a", preconditions={"uid": "of-another"})
    uid = created["metadata"]["uid"]
    assert await kubernetes.delete("v1", "ConfigMap", "a", preconditions={"uid": uid})
    assert await kubernetes.get("v1", "ConfigMap", "a") is None


async def test_finalizer_holds_a_deleted_object(kubernetes):
    await kubernetes.create(config_map("a", {}, finalizers=["example.com/held"]))
    await kubernetes.delete("v1", "ConfigMap", "a")
    held = await kubernetes.get("v1", "ConfigMap", "a")
    await kubernetes.patch("v1", "ConfigMap", "a", {"metadata": {"finalizers": None}})

    assert held["metadata"]["deletionTimestamp"]
    assert await kubernetes.get("v1", "ConfigMap", "a") is None


async def test_what_a_deleted_object_owns_is_deleted(kubernetes):
    owner = await kubernetes.create(config_map("owner", {}))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner"}
    reference["uid"] = owner["metadata"]["uid"]
    await kubernetes.create(config_map("owned", {}, ownerReferences=[reference]))
    watch = kubernetes.watch("v1", "ConfigMap", kubernetes.namespace, fields="metadata.name=owned")
    await take(watch, 2)
    await kubernetes.delete("v1", "ConfigMap", "owner", propagation="Background")

    assert told(await take(watch, 1)) == [("DELETED", "owned")]
    await watch.aclose()


# What only the cluster in memory can be made to do.


@pytest.fixture
def cluster():
    return MemoryCluster()


async def test_cut_watch_is_resumed_without_repeating(cluster):
    kubernetes = cluster.connect("test")
    await kubernetes.create(config_map("a", {}))
    watch = kubernetes.watch("v1", "ConfigMap", "test")
    await take(watch, 2)
    pending = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    cluster.cut_watches()
    await kubernetes.create(config_map("b", {}))

    assert told([await pending]) == [("ADDED", "b")]


async def test_watch_after_lost_history_tells_the_difference(cluster):
    kubernetes = cluster.connect("test")
    for name in "abc":
        await kubernetes.create(config_map(name, {}))
    watch = kubernetes.watch("v1", "ConfigMap", "test")
    await take(watch, 4)
    await kubernetes.delete("v1", "ConfigMap", "a")
    await kubernetes.delete("v1", "ConfigMap", "b")
    await kubernetes.create(config_map("b", {}))
    cluster.forget_history()
    events = await take(watch, 4)

    assert told(events) == [("DELETED", "a"), ("DELETED", "b"), ("ADDED", "b"), ("SYNCED", None)]


async def test_watch_waits_for_a_cluster_that_is_away(cluster):
    kubernetes = cluster.connect("test")
    cluster.failures += [httpx2.ConnectError("refused"), httpx2.Response(503, text="starting")]
    watch = kubernetes.watch("v1", "ConfigMap", "test")

    assert told(await take(watch, 1)) == [("SYNCED", None)]


async def test_unreachable_cluster_is_said_in_one_sentence(cluster):
    cluster.failures.append(httpx2.ConnectError("connection refused"))

    with pytest.raises(errors.Unavailable, match="memory-kubernetes does not answer: connection"):
        await cluster.connect().check()


async def test_busy_cluster_is_asked_again(cluster):
    cluster.failures.append(httpx2.Response(429, headers={"Retry-After": "0"}))

    assert await cluster.connect().check() == "v1.33.0+dynamo"


@pytest.mark.parametrize(
    ("code", "error"), [(401, errors.Unauthenticated), (403, errors.Forbidden)]
)
async def test_refusal_is_told_by_its_kind(cluster, code, error):
    cluster.failures.append(httpx2.Response(code, json={"message": 'User "x" cannot list'}))

    with pytest.raises(error, match='refuses: User "x" cannot list'):
        await cluster.connect().check()


async def test_kind_that_is_undefined_is_missing(cluster):
    kubernetes = cluster.connect("test")
    await kubernetes.list(GROUP, "DynamoModel")
    cluster.undefine(GROUP)

    with pytest.raises(connection.KindMissing, match=r"does not serve /apis/nvidia\.com"):
        await kubernetes.list(GROUP, "DynamoModel")


async def test_call_that_is_cancelled_at_any_moment_leaves_no_error_and_no_watch(cluster):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    num_subscribers = len(cluster.store._subscribers)
    kubernetes = cluster.connect("test")
    for num_turns in range(20):
        watch = kubernetes.watch("v1", "ConfigMap", "test")
        pending = asyncio.ensure_future(anext(watch))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        pending.cancel()
        await asyncio.wait([pending])
        await watch.aclose()
    for _ in range(10):
        await asyncio.sleep(0)
    gc.collect()

    assert problems == []
    assert len(cluster.store._subscribers) == num_subscribers


async def test_cancelled_handshake_closes_its_connection(tmp_path):
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def never_welcome(reader, writer):
        await reader.read(1)
        has_begun.set()
        await reader.read()
        has_ended.set()
        writer.close()

    async with await asyncio.start_server(never_welcome, "127.0.0.1", 0) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        cluster = {"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {"token": "t"}}]
        config = {"clusters": [cluster], "contexts": [context], "users": users}
        (tmp_path / "config").write_text(json.dumps(config | {"current-context": "c"}))
        environ = {"KUBECONFIG": str(tmp_path / "config")}
        async with connection.KubernetesConnection.open(environ) as opened:
            asking = asyncio.create_task(opened.check())
            await asyncio.wait_for(has_begun.wait(), PATIENT_S)
            gc.disable()  # it would close the connection, too
            try:
                asking.cancel()
                await asyncio.wait_for(has_ended.wait(), PATIENT_S)
            finally:
                gc.enable()
