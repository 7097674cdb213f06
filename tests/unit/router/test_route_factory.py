"""Which way leads to which model."""

import contextlib

import msgspec
import pytest
import routing_rig

from dynamo.base import clock
from dynamo.disagg import config as prefill_config
from dynamo.disagg import prefill_route
from dynamo.observability import metrics
from dynamo.protocols import blocks, generate, instances, kv_events, kv_transfer, model_card
from dynamo.router import api, config, kv_router, route, route_factory
from dynamo.runtime import component
from dynamo.worker import kv_event_publisher
from waiting import until

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


async def join(stack, cluster):
    """A process in the cluster, until the stack ends."""
    runtime = component.DistributedRuntime.in_memory(cluster, item_type=generate.Output)
    return await stack.enter_async_context(await runtime)


async def test_end_of_a_request_leaves_those_of_another_model_counted_at_the_other_routers():
    async with contextlib.AsyncExitStack() as stack:
        cluster = component.MemoryCluster()

        workers = [routing_rig.Worker(await join(stack, cluster), {}) for _ in range(2)]
        cards = [routing_rig.card(), msgspec.structs.replace(routing_rig.card(), display_name="n")]
        for worker in workers:
            await worker.join()

        async def open_routes():
            runtime = await join(stack, cluster)
            made = route_factory.RouteFactory(
                config.RoutingConfig(router_mode="kv", router_replica_sync=True),
                runtime,
                clock.SystemClock(),
                metrics.Registry("dynamo_frontend"),
            )
            stack.push_async_callback(made.close)
            client = runtime.client(routing_rig.NAME)
            await until(lambda: len(client.instances) == len(workers))
            routes = [made.make_route(client, card) for card in cards]
            for route_, worker, card in zip(routes, workers, cards, strict=True):
                route_.set_model_cards({worker.id: card})
            return routes

        here, there = await open_routes(), await open_routes()
        receivers = [routing_rig.Receiver() for _ in here]
        for route_, receiver in zip(here, receivers, strict=True):
            await route_.open_stream(routing_rig.request(), receiver)
        await until(lambda: [route_.min_active_requests() for route_ in there] == [1, 1])
        await until(lambda: all(worker.calls for worker in workers))
        workers[0].finish()
        await receivers[0].over
        await until(lambda: there[0].min_active_requests() == 0)

        assert there[1].min_active_requests() == 1


async def make_prefill_routes(stack):
    """Return a factory of routes by way of prefill workers, and its runtime."""
    runtime = await join(stack, component.MemoryCluster())
    settings = prefill_config.PrefillRoutingConfig()
    registry, time = metrics.Registry("dynamo_frontend"), clock.SystemClock()
    kv = config.RoutingConfig(router_mode="kv")
    plain = route_factory.RouteFactory(kv, runtime, time, registry)
    stack.push_async_callback(plain.close)
    made = prefill_route.PrefillRouteFactory(plain, settings, runtime.discovery, registry, time)
    stack.push_async_callback(made.close)
    return made, runtime


async def test_limit_of_local_prefill_is_that_of_the_endpoint_that_came_last():
    """Such as of workers that replace others, in a namespace of their own."""
    async with contextlib.AsyncExitStack() as stack:
        made, runtime = await make_prefill_routes(stack)
        limits = []
        for namespace, length in (("a", 20), ("b", 9)):
            data = {kv_transfer.LOCAL_LENGTH_KEY: length}
            facts = model_card.ModelRuntimeConfig(runtime_data=data)
            described = msgspec.structs.replace(card(), runtime_config=facts)
            name = instances.EndpointName(namespace, "backend", "generate")
            made.make(runtime.client(name), described).set_model_cards({1: described})
            limits.append(made._lengths[card().display_name].limits.max_local_prefill_length)

        assert limits == [20, 9]


async def test_model_that_comes_back_has_the_route_that_it_had():
    async with contextlib.AsyncExitStack() as stack:
        made, runtime = await make_prefill_routes(stack)
        client = runtime.client(NAME)
        others = {"weights": "w"}, {"kv_cache_block_size": 8}, {"display_name": "n"}
        cards = [card(), *(msgspec.structs.replace(card(), **fields) for fields in others)]

        for make in (made.make, made.make_prefill_router):
            routes = [make(client, each) for each in cards]
            assert len(set(routes)) == len(routes)
            assert [make(client, each) for each in cards] == routes


async def test_worker_that_leaves_one_route_for_another_keeps_its_blocks_in_the_index():
    async with contextlib.AsyncExitStack() as stack:
        cluster = component.MemoryCluster()

        worker = routing_rig.Worker(await join(stack, cluster), {})
        await worker.join()
        names = await offer_blocks(worker.runtime)
        runtime = await join(stack, cluster)
        made = route_factory.RouteFactory(
            config.RoutingConfig(router_mode="kv"),
            runtime,
            clock.SystemClock(),
            metrics.Registry("dynamo_frontend"),
        )
        stack.push_async_callback(made.close)
        client = runtime.client(routing_rig.NAME)
        await until(lambda: client.instances)
        known = {"device": {f"{worker.id:x}": len(names)}}

        former = made.make_route(client, routing_rig.card())
        former.set_model_cards({worker.id: routing_rig.card()})
        await until(lambda: made.find_matches(names) == known)
        former.set_model_cards({})  # as before the route of another block size is made
        larger = msgspec.structs.replace(routing_rig.card(), kv_cache_block_size=8)
        made.make_route(client, larger).set_model_cards({worker.id: larger})

        assert made.find_matches(names) == known


async def test_blocks_of_a_worker_are_those_of_its_rank_with_the_most():
    async with contextlib.AsyncExitStack() as stack:
        runtime = await join(stack, component.MemoryCluster())
        kv, registry = config.RoutingConfig(router_mode="kv"), metrics.Registry("dynamo_frontend")
        made = route_factory.RouteFactory(kv, runtime, clock.SystemClock(), registry)
        stack.push_async_callback(made.close)
        made.make_route(runtime.client(NAME), card())
        (state,) = made._components.values()
        for worker in (api.Worker(1), api.Worker(255, 0), api.Worker(255, 1)):
            state.index.add_blocks(worker, kv_events.DEVICE, [7, 8, 9])
        for rank, num_blocks in enumerate((2, 1)):
            evicted = [7, 8, 9][num_blocks:]
            state.index.remove_blocks(api.Worker(255, rank), kv_events.DEVICE, evicted)

        assert made.find_matches([7, 8, 9]) == {"device": {"1": 3, "ff": 2}}


async def offer_blocks(runtime):
    """Have a worker answer that it has two blocks, one behind the other; return their names."""
    local = [11, 12]
    names = blocks.sequence_hashes(local)
    name = routing_rig.NAME
    publisher = kv_event_publisher.KvEventPublisher(
        runtime.events,
        namespace=name.namespace,
        component=name.component,
        worker_id=runtime.instance_id,
        epoch=1,
    )
    pairs = tuple(map(kv_events.StoredBlock, names, local))
    publisher.publish_kv_events([kv_events.Stored(parent_hash=None, blocks=pairs)])

    def replay(call):
        for part in publisher.replay(kv_events.ReplayRequest()):
            call.reply(part)
        call.finish()

    endpoint = instances.EndpointName(name.namespace, name.component, instances.KV_EVENTS_REPLAY)
    await runtime.register(endpoint, replay)
    return names
