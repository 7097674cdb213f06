"""Handlers and clients with the names of NVIDIA Dynamo's bindings share the context of a request."""

import asyncio

import pytest

from dynamo.base import errors, tasks
from dynamo.runtime import Context, component, dynamo_endpoint
from dynamo.runtime.naming import RouterMode
from waiting import PATIENT_S, until


class Rig:
    """Serves handlers, each at an endpoint of its own, and makes their clients."""

    def __init__(self, runtime, running):
        self._runtime, self._running = runtime, running

    def endpoint(self, name):
        return self._runtime.namespace("ns").component("backend").endpoint(name)

    async def client(self, handler, name="generate"):
        endpoint = self.endpoint(name)
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


@pytest.mark.parametrize("is_kept", [True, False])
async def test_context_of_a_client_that_closes_or_drops_its_answer_is_killed(rig, is_kept):
    seen = asyncio.get_running_loop().create_future()

    async def handler(request, context):
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            seen.set_result((context.is_killed(), context.async_killed_or_stopped().done()))

    client = await rig.client(handler)
    stream = await client.generate("hi")
    await anext(stream)
    if is_kept:
        await stream.aclose()
    del stream
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


async def test_request_is_sent_before_its_answer_is_read(rig):
    requests = []

    async def handler(request):
        requests.append(request)
        yield request

    client = await rig.client(handler)
    streams = [await client.round_robin(number) for number in range(3)]
    await until(lambda: len(requests) == 3)

    assert [await values(stream) for stream in streams] == [[0], [1], [2]]
    with pytest.raises(StopAsyncIteration):
        await anext(streams[0])
    with pytest.raises(errors.NoWorkers):
        await client.direct("hi", 1)


async def test_item_has_the_parts_of_dynamos_annotated_values(rig):
    async def handler(request):
        yield request

    client = await rig.client(handler)
    (item,) = [item async for item in await client.generate({"a": 1})]

    assert (item.data(), item.is_error(), item.event(), item.comments(), item.id()) == (
        {"a": 1}, False, None, None, None,
    )  # fmt: skip
    assert repr(item) == "Annotated(data={'a': 1})"
    assert [each async for each in await client.generate("hi", annotated=False)] == ["hi"]


async def test_context_knows_the_trace_of_its_caller(rig):
    async def handler(request, context):
        yield [context.trace_id, context.span_id, context.parent_span_id]

    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    client = await rig.client(handler)

    assert await values(await client.generate("hi", context=Context(headers=trace))) == [
        ["a" * 32, None, "b" * 16]
    ]
    assert await values(await client.generate("hi")) == [[None, None, None]]
    assert Context(headers=trace).trace_headers() == trace
    assert Context().trace_headers() is None


async def test_endpoint_is_found_by_its_path_and_knows_its_component():
    async with await component.DistributedRuntime.in_memory(component.MemoryCluster()) as runtime:
        endpoint = runtime.endpoint("ns.backend.generate")

        assert runtime.endpoint("dyn://ns.backend.generate").name == endpoint.name
        assert endpoint.component().endpoint("generate").name == endpoint.name
        assert runtime.endpoint("ns.Backend.generate").name == endpoint.name  # as a service's class
        assert (
            runtime.namespace("NS").component("Backend").endpoint("Generate").name == endpoint.name
        )
        assert endpoint.connection_id() == endpoint.lease_id() == runtime.instance_id
        with pytest.raises(errors.ConfigError, match="is no endpoint"):
            runtime.endpoint("backend.generate")
        with pytest.raises(errors.ConfigError, match=r"dynamo\.router"):
            await endpoint.client(RouterMode.KV)


async def test_endpoint_leaves_discovery_and_comes_back(rig):
    async def handler(request):
        yield request

    client = await rig.client(handler)
    other = await rig.client(handler, "other")
    endpoint = rig.endpoint("generate")

    await endpoint.unregister_endpoint_instance()
    await until(lambda: not client.instance_ids())
    kept = other.instance_ids()
    await endpoint.register_endpoint_instance()
    await until(client.instance_ids)

    assert kept == client.instance_ids() == [endpoint.connection_id()]
    assert await values(await client.generate("hi")) == ["hi"]


async def test_clients_of_an_endpoint_share_what_follows_it(rig):
    async def handler(request):
        yield request

    client = await rig.client(handler)
    num_tasks = len(asyncio.all_tasks())
    others = [await rig.endpoint("generate").client() for _ in range(10)]

    assert len(asyncio.all_tasks()) == num_tasks
    assert {tuple(other.instance_ids()) for other in others} == {tuple(client.instance_ids())}
    assert await values(await others[-1].generate("hi")) == ["hi"]


def test_runtime_that_is_made_as_in_the_bindings_is_refused_with_what_to_write():
    with pytest.raises(errors.ConfigError, match=r"decorate the main function with @dynamo_worker"):
        component.DistributedRuntime(None, "etcd", False)


async def test_instance_that_leaves_at_once_is_not_waited_for_in_vain(rig):
    async def handler(request):
        yield request

    endpoint = rig.endpoint("generate")
    client = await rig.client(handler)
    await endpoint.unregister_endpoint_instance()
    await until(lambda: not client.instance_ids())
    waiting = asyncio.ensure_future(client.wait_for_instances(PATIENT_S))
    await asyncio.sleep(0)
    client._client._is_served.set()  # one came and left before the waiting task had its turn
    client._client._is_served.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    await endpoint.register_endpoint_instance()

    assert await waiting == [endpoint.connection_id()]
