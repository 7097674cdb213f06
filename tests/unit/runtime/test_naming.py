"""Handlers and clients with the names of NVIDIA Dynamo's bindings share the context of a request."""

import asyncio
import contextlib

import pytest

from dynamo.base import tasks
from dynamo.runtime import Context, component, dynamo_endpoint
from waiting import PATIENT_S


class Rig:
    """Serves handlers, each at an endpoint of its own, and makes their clients."""

    def __init__(self, runtime, running):
        self._runtime, self._running = runtime, running

    async def client(self, handler, name="generate"):
        endpoint = self._runtime.namespace("ns").component("backend").endpoint(name)
        self._running.start(f"serve {name}", endpoint.serve_endpoint(handler))
        client = await endpoint.client()
        await client.wait_for_instances(PATIENT_S)
        return client


@pytest.fixture
async def rig():
    cluster = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(cluster) as runtime,
        tasks.Tasks() as running,
    ):
        yield Rig(runtime, running)


async def values(stream):
    async with asyncio.timeout(PATIENT_S):
        return [item.data() async for item in stream]


async def test_handler_with_a_context_knows_the_id_of_the_request(rig):
    async def handler(request, context):
        yield [request, context.id(), context.is_stopped()]

    client = await rig.client(handler)

    assert await values(await client.generate("hi", context=Context("r-1"))) == [
        ["hi", "r-1", False]
    ]
    assert len((await values(await client.random("hi")))[0][1]) == 36  # one that was made up


async def test_decorated_method_gets_the_context_too(rig):
    class Service:
        @dynamo_endpoint(str, str)
        async def generate(self, request, context):
            yield f"{request} {context.id()}"

    client = await rig.client(Service().generate)

    assert await values(await client.round_robin("hi", context=Context("r-1"))) == ["hi r-1"]


async def test_stopped_request_ends_behind_the_present_item(rig):
    may_go_on = asyncio.Event()

    async def handler(request, context):
        yield 1
        await context.async_killed_or_stopped()
        yield 2
        may_go_on.set()
        yield 3

    client, context, items = await rig.client(handler), Context(), []
    async for item in await client.generate("hi", context=context):
        items.append(item.data())
        context.stop_generating()

    assert items == [1, 2]
    assert not may_go_on.is_set()
    assert (context.is_stopped(), context.is_killed()) == (True, False)


async def test_context_of_a_client_that_is_gone_is_killed(rig):
    seen = asyncio.get_running_loop().create_future()

    async def handler(request, context):
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            seen.set_result((context.is_killed(), context.async_killed_or_stopped().done()))

    client = await rig.client(handler)
    async with contextlib.aclosing(await client.generate("hi")) as stream:
        await anext(stream)
    async with asyncio.timeout(PATIENT_S):
        assert await seen == (True, True)


async def test_request_that_a_stopped_one_made_is_stopped_with_it(rig):
    async def inner(request, context):
        yield "begun"
        await context.async_killed_or_stopped()
        yield f"stopped {context.id()}"

    backend = await rig.client(inner, "inner")

    async def outer(request, context):
        async for item in await backend.generate(request, context=context):
            if item.data() == "begun":
                context.stop_generating()
            last = item.data()
        yield last

    client = await rig.client(outer, "outer")

    assert await values(await client.generate("hi", context=Context("r-1"))) == ["stopped r-1"]


async def test_cancelled_wait_for_the_end_leaves_the_context_as_it_is():
    context = Context()
    context.async_killed_or_stopped().cancel()
    waiting = context.async_killed_or_stopped()
    context.stop_generating()
    context.stop_generating()

    assert await waiting
    assert await context.async_killed_or_stopped()
