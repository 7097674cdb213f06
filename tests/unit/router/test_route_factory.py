"""Which way leads to which model."""

import contextlib

import msgspec
import pytest

from dynamo.base import clock
from dynamo.observability import metrics
from dynamo.protocols import generate, instances, model_card
from dynamo.router import config, kv_router, route, route_factory
from dynamo.runtime import component

NAME = instances.EndpointName("dynamo", "backend", "embed")
VECTORS = model_card.EmbeddingFacts(dimensions=4)


def card(**fields):
    return model_card.ModelCard(
        display_name="m", source_path="/m", context_length=8, kv_cache_block_size=4, **fields
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, kv_router.KvRouter), ({"embedding": VECTORS}, route.PushRouter)],
)
async def test_embedding_model_gets_a_push_router_in_any_mode(fields, expected):
    async with contextlib.AsyncExitStack() as stack:
        runtime = await component.DistributedRuntime.in_memory(
            component.MemoryCluster(), item_type=generate.Output
        )
        await stack.enter_async_context(runtime)
        made = route_factory.RouteFactory(
            config.RoutingConfig(router_mode="kv"),
            runtime,
            clock.SystemClock(),
            metrics.Registry("dynamo_frontend"),
        )
        stack.push_async_callback(made.close)

        assert type(made.make_route(runtime.client(NAME), card(**fields))) is expected


@pytest.mark.parametrize(
    ("workers_size", "option", "expected"), [(4, None, 4), (4, 64, 4), (4, 4, 4), (0, 64, 64)]
)
async def test_block_size_is_that_of_the_workers(workers_size, option, expected, caplog):
    async with contextlib.AsyncExitStack() as stack:
        runtime = await component.DistributedRuntime.in_memory(
            component.MemoryCluster(), item_type=generate.Output
        )
        await stack.enter_async_context(runtime)
        made = route_factory.RouteFactory(
            config.RoutingConfig(router_mode="kv", kv_cache_block_size=option),
            runtime,
            clock.SystemClock(),
            metrics.Registry("dynamo_frontend"),
        )
        stack.push_async_callback(made.close)
        route_ = made.make_route(
            runtime.client(NAME), msgspec.structs.replace(card(), kv_cache_block_size=workers_size)
        )

        assert route_.scheduler.block_size == expected
        assert ("--kv-cache-block-size 64: the workers of 'm'" in caplog.text) is (
            option == 64 and workers_size == 4
        )
