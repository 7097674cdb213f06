"""Workers export the same metric families with the same labels, whatever their engine."""

import pytest
from test_engine import checkpoint, make_engine  # noqa: F401 (fixtures)

import worker_families
from dynamo.base import clock as clocks
from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import component
from dynamo.worker import host as hosts


class Call:
    """A call that no worker can decode."""

    body = b"\x01"

    def fail(self, error):
        self.error = error


@pytest.mark.parametrize("make_engine", ["mock", "native"], indirect=True)
async def test_worker_exports_the_families_of_every_worker(make_engine):  # noqa: F811
    runtime = await component.DistributedRuntime.in_memory(
        component.MemoryCluster(), item_type=generate.Output
    )
    worker = hosts.Host(
        make_engine(),
        runtime,
        instances.EndpointName("ns", "backend", "generate"),
        make_card=lambda facts: model_card.ModelCard(
            display_name="m",
            source_path="/m",
            context_length=facts.context_length,
            kv_cache_block_size=facts.kv_block_size,
        ),
        options=hosts.HostOptions(request_limit=8),
        clock=clocks.SystemClock(),
    )
    await worker.start()
    try:
        worker._requests.handle(Call())  # so that a failure is counted
        worker_families.check(worker.render_metrics().decode())
    finally:
        await worker.stop(0)
        await runtime.close()
