"""What discovery by the objects of a cluster promises beside `test_discovery`: pods come, go and keep their names."""

import asyncio

import httpx2
import pytest

from dynamo.base import errors
from dynamo.protocols import instances
from dynamo.runtime.backends.kubernetes import connection, discovery, pod_records
from dynamo.runtime.discovery import Delete, Put
from memory_cluster import MemoryCluster
from played_pods import NAMESPACE, PlayedPods
from waiting import PATIENT_S

KEY = f"{instances.INSTANCES}ns/c/e/1"


@pytest.fixture
async def pods():
    pods = PlayedPods()
    yield pods
    await pods.close()


async def take(watch, count):
    async with asyncio.timeout(PATIENT_S):
        return [await anext(watch) for _ in range(count)]


async def test_pod_that_returns_under_its_name_is_found_at_its_new_address(pods):
    reader = await pods.start("reader")
    old = await pods.start("worker-0")
    await old.put(KEY, b'{"address":"192.0.2.1"}')
    watch = reader.watch(instances.INSTANCES)
    await take(watch, 1)
    await old.close()
    pods.remove("worker-0")
    new = await pods.start("worker-0")
    await new.put(f"{instances.INSTANCES}ns/c/e/2", b'{"address":"192.0.2.2"}')

    assert await take(watch, 2) == [
        Delete(key=KEY),
        Put(key=f"{instances.INSTANCES}ns/c/e/2", value=b'{"address":"192.0.2.2"}'),
    ]


async def test_container_restarted_in_place_replaces_the_keys_of_the_former(pods):
    reader = await pods.start("reader")
    killed = await pods.start("worker-0")
    await killed.put(KEY, b"old")
    watch = reader.watch(instances.INSTANCES)
    await take(watch, 1)
    await killed._tasks.close()  # as by SIGKILL: its metadata stays
    pods.crash("worker-0")
    gone = await take(watch, 1)
    restarted = await pods.start_container("worker-0")
    await restarted.put(f"{instances.INSTANCES}ns/c/e/2", b"new")
    pods.set_ready("worker-0", True)

    assert gone == [Delete(key=KEY)]
    assert await take(watch, 1) == [Put(key=f"{instances.INSTANCES}ns/c/e/2", value=b"new")]
    assert await reader.get_prefix("") == {f"{instances.INSTANCES}ns/c/e/2": b"new"}


async def test_metadata_of_an_earlier_pod_of_that_name_is_not_shown(pods):
    reader = await pods.start("reader")
    earlier = await pods.start("worker-0")
    await earlier.put(KEY, b"stale")
    await earlier._tasks.close()
    pods.remove("worker-0")
    await pods.create("worker-0")
    pods.set_ready("worker-0", True)  # before its process has written anything

    assert await reader.get_prefix("") == {}
    restarted = await pods.start_container("worker-0")
    await restarted.put(KEY, b"new")
    assert await reader.get_prefix("") == {KEY: b"new"}


async def test_slices_may_be_split_and_merged_under_a_watch(pods):
    reader = await pods.start("reader")
    for number in (1, 2, 3):
        worker = await pods.start(f"worker-{number}")
        await worker.put(f"v1/x/{number}", b"")
    watch = reader.watch("v1/x/")
    await take(watch, 3)
    names = ("reader", "worker-1", "worker-2", "worker-3")
    pods.write_slices({"slice-1": dict.fromkeys(names[:2], True)})  # gone from one ...
    pods.write_slices(
        {
            "slice-1": dict.fromkeys(names[:2], True),
            "slice-2": dict.fromkeys(names[1:], True),  # ... and in another, one pod in both
        }
    )
    pods.write_slices({"slice-3": dict.fromkeys(names, True)})  # merged
    pods.set_ready("worker-2", False, slice_="slice-3")

    assert await take(watch, 1) == [Delete(key="v1/x/2")]
    assert set(await reader.get_prefix("v1/x/")) == {"v1/x/1", "v1/x/3"}


async def test_pod_that_vanishes_from_all_slices_is_gone_after_a_moment(pods, monkeypatch):
    monkeypatch.setattr(discovery, "_SETTLE_S", 0.05)
    reader, worker = await pods.start("reader"), await pods.start("worker")
    await worker.put("k", b"")
    watch = reader.watch("k")
    await take(watch, 1)
    pods.write_slices({"slice-1": {"reader": True}})

    assert await take(watch, 1) == [Delete(key="k")]


@pytest.mark.parametrize("is_alive", [True, None], ids=["answers", "unknown"])
async def test_unready_pod_is_asked_last_while_its_process_answers(pods, monkeypatch, is_alive):
    monkeypatch.setattr(discovery, "UNCONFIRMED_S", PATIENT_S)
    known = {}
    reader = await pods.start("reader", is_alive=lambda key, _value: known[key])
    worker = await pods.start("worker")
    await worker.put(KEY, b"1")
    watch = reader.watch(KEY)
    found = await take(watch, 1)
    known[KEY] = is_alive
    pods.set_ready("worker", False)
    doubted = await take(watch, 1)
    pods.set_ready("worker", True)
    trusted = await take(watch, 1)
    pods.set_ready("worker", False)
    await take(watch, 1)
    known[KEY] = False  # its connection has ended

    assert found == trusted == [Put(key=KEY, value=b"1")]
    assert doubted == [Put(key=KEY, value=b"1", is_confirmed=False)]
    assert await take(watch, 1) == [Delete(key=KEY)]


async def test_key_that_an_unready_pod_removes_vanishes_though_its_process_answers(pods):
    reader = await pods.start("reader", is_alive=lambda _key, _value: True)
    worker = await pods.start("worker")
    await worker.put(KEY, b"1")
    watch = reader.watch(KEY)
    await take(watch, 1)
    pods.set_ready("worker", False)
    await take(watch, 1)
    await worker.delete(KEY)

    assert await take(watch, 1) == [Delete(key=KEY)]


async def test_start_of_a_worker_is_shown_before_its_pod_is_ready(pods):
    reader, worker = await pods.start("reader"), await pods.start("worker", is_ready=False)
    await worker.put(f"{instances.STARTS}1", b"start")
    await worker.put(KEY, b"instance")
    watch = reader.watch("v1/")
    started = await take(watch, 1)
    pods.set_ready("worker", True)

    assert started == [Put(key=f"{instances.STARTS}1", value=b"start")]
    assert await take(watch, 1) == [Put(key=KEY, value=b"instance")]


async def test_deleted_metadata_is_written_again(pods):
    reader, worker = await pods.start("reader"), await pods.start("worker")
    await worker.put("k", b"value")
    watch = reader.watch("k")
    await take(watch, 1)
    pods.cluster.remove_object(pod_records.API_VERSION, pod_records.KIND, NAMESPACE, "worker")
    changes = await take(watch, 2)

    assert changes == [Delete(key="k"), Put(key="k", value=b"value")]


async def test_put_waits_for_a_cluster_that_is_away(pods):
    worker = await pods.start("worker")
    pods.cluster.failures += [httpx2.ConnectError("refused"), httpx2.Response(503)]
    await worker.put("k", b"value")

    assert await worker.get_prefix("") == {"k": b"value"}


async def test_refusal_of_the_cluster_ends_the_start_in_one_sentence():
    cluster = MemoryCluster()
    cluster.undefine(pod_records.API_VERSION)
    environ = {"POD_NAME": "a", "POD_UID": "u"}

    with pytest.raises(errors.ConfigError, match=r"no kind DynamoWorkerMetadata .* dynamo-crds"):
        await discovery.KubernetesDiscovery.open(cluster.connect(), environ)
    with pytest.raises(errors.ConfigError, match="needs the variable POD_NAME"):
        await discovery.KubernetesDiscovery.open(cluster.connect(), {})


async def test_records_larger_than_an_object_are_refused(pods):
    worker = await pods.start("worker")
    await worker.put("small", b"0" * discovery.DATA_LIMIT)

    with pytest.raises(errors.ConfigError, match="expected at most 1048576 bytes"):
        await worker.put("large", b"0")


async def test_value_that_the_cluster_refuses_leaves_the_former_one(pods):
    reader, worker = await pods.start("reader"), await pods.start("worker")
    await worker.put(KEY, b"former")
    for key in (KEY, "v1/new"):
        pods.cluster.failures += [httpx2.Response(422, json={"message": "no"}) for _ in range(9)]
        with pytest.raises(errors.ConfigError, match="no"):
            await worker.put(key, b"refused")
        pods.cluster.failures.clear()
    await worker.put("v1/other", b"")

    assert await reader.get_prefix("") == {KEY: b"former", "v1/other": b""}


async def test_value_that_is_no_base64_is_left_out(pods):
    reader, worker = await pods.start("reader"), await pods.start("worker")
    watch = reader.watch("v1/x/")
    await worker.put("v1/x/1", b"")
    before = await take(watch, 1)
    metadata = worker._metadata()
    metadata["spec"]["data"]["records"] |= {"v1/x/2": "base64:x", "v1/x/4": "base64:ä"}
    await worker._tasks.close()  # which would write it again
    await pods.cluster.connect(NAMESPACE).apply(metadata, discovery.FIELD_MANAGER, force=True)
    other = await pods.start("other")
    await other.put("v1/x/3", b"")

    assert [*before, *await take(watch, 1)] == [Put(key=f"v1/x/{i}", value=b"") for i in (1, 3)]


async def test_own_metadata_is_watched_once_the_cluster_allows_it(pods, monkeypatch):
    monkeypatch.setattr(discovery, "_REFUSED_S", 0.01)
    refusals, read = [errors.Forbidden("not yet")], connection.KubernetesConnection._list

    async def refuse_first(self, *args):
        if refusals and args[1] == pod_records.KIND:
            raise refusals.pop()
        return await read(self, *args)

    monkeypatch.setattr(connection.KubernetesConnection, "_list", refuse_first)
    worker, reader = await pods.start("worker"), await pods.start("reader")
    await worker.put("k", b"value")
    watch = reader.watch("k")
    await take(watch, 1)
    assert not refusals
    pods.cluster.remove_object(pod_records.API_VERSION, pod_records.KIND, NAMESPACE, "worker")

    assert await take(watch, 2) == [Delete(key="k"), Put(key="k", value=b"value")]


async def test_deleted_metadata_is_written_again_after_a_refusal(pods, monkeypatch):
    monkeypatch.setattr(discovery, "_REFUSED_S", 0.01)
    reader, worker = await pods.start("reader"), await pods.start("worker")
    await worker.put("k", b"value")
    watch = reader.watch("k")
    await take(watch, 1)
    pods.cluster.failures.append(httpx2.Response(403, json={"message": "not now"}))
    pods.cluster.remove_object(pod_records.API_VERSION, pod_records.KIND, NAMESPACE, "worker")

    assert await take(watch, 2) == [Delete(key="k"), Put(key="k", value=b"value")]


async def test_key_that_the_cluster_does_not_let_us_remove_is_no_error_of_its_owner(pods):
    worker = await pods.start("worker")
    await worker.put("k", b"value")
    pods.cluster.failures += [httpx2.Response(403, json={"message": "no"}) for _ in range(9)]
    await worker.delete("k")
    pods.cluster.failures.clear()
