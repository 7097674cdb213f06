"""What a process may use beside its planes, and when it becomes a member of NATS."""

import pytest

from dynamo.base import errors
from dynamo.protocols import generate
from dynamo.runtime import component, work_queue

BOUNDS = work_queue.WorkQueueBounds()
NOWHERE = component.RuntimeConfig(
    discovery_backend="mem", nats_server=("nats://127.0.0.1:1",), nats_start_timeout_secs=0.1
)


async def test_parts_of_a_process_share_queues_by_name_and_one_store():
    cluster = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output) as one,
        await component.DistributedRuntime.in_memory(cluster, item_type=generate.Output) as two,
    ):
        await (await one.services.work_queue("q", BOUNDS)).push(b"x")
        item = await (await two.services.work_queue("q", BOUNDS)).pull(5)
        other = await (await two.services.work_queue("other", BOUNDS)).pull(0)
        url = await one.services.object_store().put("k", b"y")
        body = await two.services.object_store().get(url, timeout_s=5)

    assert (item.body, other, body) == (b"x", None, b"y")


async def test_who_does_not_use_nats_needs_no_server():
    async with await component.DistributedRuntime.open(
        NOWHERE, item_type=generate.Output
    ) as runtime:
        assert runtime.services.object_store() is None


async def test_who_wants_a_queue_without_a_server_is_told_how_to_do_without():
    async with await component.DistributedRuntime.open(
        NOWHERE, item_type=generate.Output
    ) as runtime:
        with pytest.raises(
            errors.ConfigError, match=r"no NATS server at .*DYN_PREFILL_QUEUE=direct"
        ):
            await runtime.services.work_queue("q", BOUNDS)
