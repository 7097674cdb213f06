"""A router and scripted workers in one process, over the memory planes."""

import asyncio

import msgspec

from dynamo.base import clock as clocks
from dynamo.observability import metrics
from dynamo.protocols import blocks, generate, instances, model_card
from dynamo.router import config, route, route_factory
from dynamo.runtime import component
from waiting import until

NAME = instances.EndpointName("dynamo", "backend", "generate")
BLOCK = 4
_decode = msgspec.msgpack.Decoder(generate.Request).decode


def card(**facts):
    return model_card.ModelCard(
        display_name="m",
        source_path="",
        context_length=4096,
        kv_cache_block_size=BLOCK,
        runtime_config=model_card.ModelRuntimeConfig(**{"total_kv_blocks": 10_000} | facts),
    )


def request(*token_ids, **fields):
    return generate.Request(
        id="r", model="m", token_ids=blocks.pack(token_ids or range(16)), **fields
    )


class Receiver:
    """Who gets an answer."""

    def __init__(self):
        self.outputs = []
        self.over = asyncio.get_running_loop().create_future()

    def receive(self, output):
        self.outputs.append(output)

    def replied(self, body):
        raise AssertionError(body)

    def ended(self, error):
        self.over.set_result(error)


class Worker:
    """Takes calls and keeps them open until told."""

    def __init__(self, runtime, facts):
        self.runtime, self.facts = runtime, facts
        self.id = runtime.instance_id
        self.calls, self.requests = [], []

    async def join(self):
        await self.runtime.register(NAME, self.take)

    def take(self, call):
        self.calls.append(call)
        self.requests.append(_decode(call.body))

    def answer(self, number=-1, *, cached=0):
        """The first token of a call."""
        self.calls[number].send(generate.Output((1,), cached_tokens=cached))

    def finish(self, number=-1):
        self.calls[number].send(generate.Output((2,), generate.FinishReason.LENGTH))
        self.calls[number].finish()


class World:
    """One router, the workers that it knows."""

    def __init__(self, stack):
        self._stack = stack
        self.cluster = component.MemoryCluster()
        self.workers = []

    async def runtime(self):
        runtime = await component.DistributedRuntime.in_memory(
            self.cluster, item_type=generate.Output
        )
        return await self._stack.enter_async_context(runtime)

    async def route(self, num_workers=2, facts=None, **settings):
        """A route to so many workers."""
        wanted = config.RoutingConfig(**{"router_mode": "kv"} | settings)
        self.runtime_of_router = await self.runtime()
        self.registry = metrics.Registry("dynamo_frontend")
        self.routes = route_factory.RouteFactory(
            wanted, self.runtime_of_router, clocks.SystemClock(), self.registry
        )
        self._stack.push_async_callback(self.routes.close)
        self.client = self.runtime_of_router.client(NAME)
        self.made = self.routes.make_route(self.client, card())
        for _ in range(num_workers):
            self.workers.append(Worker(await self.runtime(), facts or {}))
            await self.workers[-1].join()
        await self.until(lambda: len(self.client.instances) == num_workers)
        self.made.set_model_cards({worker.id: card(**worker.facts) for worker in self.workers})
        return self.made

    async def open(self, *token_ids, instance_id=None, **fields):
        """Open a stream, and wait for the worker that has it."""
        before = self.num_calls
        receiver = Receiver()
        stream = await self.made.open_stream(
            request(*token_ids, **fields), receiver, route.RoutingOptions(instance_id=instance_id)
        )
        await self.until(lambda: self.num_calls == before + 1)
        return stream, receiver

    @property
    def num_calls(self):
        return sum(len(worker.calls) for worker in self.workers)

    def metric(self, name):
        """The sum of its rows."""
        rows = [row for row in self.registry.render().decode().splitlines() if row.startswith(name)]
        assert rows, name
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    until = staticmethod(until)
