"""What a process may use beside its planes, and when it becomes a member of NATS."""

import pytest

from dynamo.base import errors
from dynamo.protocols import generate
from dynamo.runtime import component, services
from waiting import PATIENT_S

BOUNDS = services.WorkQueueBounds()
NOWHERE = component.RuntimeConfig(
    discovery_backend="mem", nats_server=("nats://127.0.0.1:1",), nats_start_timeout_secs=0.1
)


async def test_runtimes_of_a_cluster_share_queues_and_the_object_store():
    cluster = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output) as one,
        await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output) as two,
    ):
        await (await one.services.work_queue("q", BOUNDS)).push(b"x")
        item = await (await two.services.work_queue("q", BOUNDS)).pull(PATIENT_S)
        other = await (await two.services.work_queue("other", BOUNDS)).pull(0)
        url = await one.services.object_store().put("k", b"y")
        body = await two.services.object_store().get(url, timeout_s=PATIENT_S)

    assert (item.body, other, body) == (b"x", None, b"y")


async def test_runtime_without_nats_opens_without_an_object_store():
    async with await component.DistributedRuntime.open(
        NOWHERE, item_type=generate.Output
    ) as runtime:
        assert runtime.services.object_store() is None


async def test_error_for_a_queue_without_nats_names_the_alternative():
    async with await component.DistributedRuntime.open(
        NOWHERE, item_type=generate.Output
    ) as runtime:
        with pytest.raises(
            errors.ConfigError, match=r"no NATS server at .*DYN_PREFILL_QUEUE=direct"
        ):
            await runtime.services.work_queue("q", BOUNDS)
