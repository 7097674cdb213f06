"""The operator's Lease on a virtual clock: who has it, who may write, and what goes on without it."""

import asyncio
import contextlib

import httpx2
import pytest

import ports
from dynamo.base import errors
from dynamo.operator import election, service
from dynamo.operator.settings import OperatorConfig
from dynamo.runtime.http import client
from dynamo.testing import clock as virtual
from operator_cluster import make_graph, worker
from waiting import PATIENT_S, until

API = "nvidia.com/v1alpha1"
LEASE = ("coordination.k8s.io/v1", "Lease")


def make_election(cluster, clock, identity="one"):
    return election.Election(cluster, clock, identity=identity, name="l", namespace="default")


async def write_lease(cluster, name, **spec):
    await cluster.patch(*LEASE, name, {"spec": spec})


async def test_lease_is_taken_after_its_duration_and_its_former_holder_stops(cluster):
    clock = virtual.VirtualClock()
    first, second = (make_election(cluster, clock, name) for name in ("one", "two"))
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await clock.advance(election.LEASE_S - 1)
    assert not waiting.done()
    assert not first.is_held
    await clock.advance(2 * election.RENEW_S)
    await waiting
    keeping = asyncio.create_task(first.keep())
    await clock.advance(election.RENEW_S)
    await until(keeping.done)

    assert (first.is_held, second.is_held) == (False, True)


async def test_lease_that_another_operator_has_had_meanwhile_is_not_renewed(cluster):
    clock = virtual.VirtualClock()
    holder = make_election(cluster, clock)
    await holder.acquire()
    keeping = asyncio.create_task(holder.keep())
    await write_lease(cluster, "l", holderIdentity="", leaseTransitions=2)
    await clock.advance(election.RENEW_S)

    await until(keeping.done)


@contextlib.asynccontextmanager
async def keeping_lease(cluster):
    """Hold a lease; yield the clock, the holder and the task that keeps it."""
    clock = virtual.VirtualClock()
    holder = make_election(cluster, clock)
    await holder.acquire()
    keeping = asyncio.create_task(holder.keep())
    yield clock, holder, keeping
    keeping.cancel()


async def test_holder_that_cannot_renew_its_lease_may_not_write_until_it_can(server, cluster):
    async with keeping_lease(cluster) as (clock, holder, keeping):
        server.failures += [httpx2.ConnectError("away")] * 1000
        await clock.advance(election.LEASE_S - 2 * election.RENEW_S + 1)  # before others take it
        with pytest.raises(election.LeaseLost, match="does not write"):
            holder.check_held()
        await clock.advance(10 * election.LEASE_S)
        server.failures.clear()
        await clock.advance(election.RENEW_S)
        await holder.wait_until_held()
        holder.check_held()

        assert not keeping.done()


async def test_lease_outlives_calls_without_answer(server, cluster):
    """A client waits 30 s for an answer: a call that hangs must not be the only one within a lease."""
    answer, num_hanging = server.handle_async_request, 2

    async def hang(request):
        nonlocal num_hanging
        num_hanging -= 1
        return await (answer(request) if num_hanging < 0 else asyncio.Event().wait())

    async with keeping_lease(cluster) as (clock, holder, keeping):
        server.handle_async_request = hang
        for _ in range(8):
            await clock.advance(election.RENEW_S)
            assert holder.is_held

        assert num_hanging < -2
        assert not keeping.done()


async def test_lease_that_changed_under_its_holder_is_read_again(server, cluster):
    """A renewal without an answer may be stored late, between the reading and the writing of the next."""
    answer, num_refused = server.handle_async_request, 0

    async def refuse_first(request):
        nonlocal num_refused
        if request.method == "PATCH" and not num_refused:
            num_refused = 1
            return httpx2.Response(409, json={"message": "the object has been modified"})
        return await answer(request)

    async with keeping_lease(cluster) as (clock, _, keeping):
        server.handle_async_request = refuse_first
        await clock.advance(3 * election.RENEW_S)

        assert num_refused == 1
        assert not keeping.done()


@contextlib.asynccontextmanager
async def running(server, **settings):
    """Run an operator that leads on a virtual clock; yield both."""
    addresses = {"metrics_bind_address": "0", "health_probe_bind_address": "0", **settings}
    config = OperatorConfig(etcd_addr="etcd:2379", **addresses)
    clock, stop = virtual.VirtualClock(), asyncio.Event()
    async with server.connect() as cluster:
        operator = service.OperatorService(cluster, config, clock, identity="one")
        task = asyncio.create_task(operator.run(stop))
        try:
            await until(lambda: operator.controller)
            yield operator, clock
        finally:
            stop.set()
            await task


async def has_component(cluster, graph):
    return await cluster.get(API, "DynamoComponentDeployment", f"{graph}-decode")


async def pass_turns():
    """Let the operator do what it would do without time going on."""
    for _ in range(200):
        await asyncio.sleep(0)


async def test_operator_whose_lease_was_taken_serves_on_and_leads_again(server, cluster):
    health, numbers = ports.reserve(), ports.reserve()

    async def read(port, path):
        return await client.request(
            "GET", f"http://127.0.0.1:{port}{path}", b"", timeout_s=PATIENT_S, max_bytes=1 << 20
        )

    addresses = {
        "health_probe_bind_address": f"127.0.0.1:{health}",
        "metrics_bind_address": f"127.0.0.1:{numbers}",
        "webhook_bind_address": "127.0.0.1:0",
    }
    async with running(server, **addresses) as (operator, clock):
        await cluster.create(make_graph("first"))
        await until(lambda: has_component(cluster, "first"))
        await until(lambda: configuration_of(cluster))
        await write_lease(cluster, "dynamo-operator", holderIdentity="another")
        await clock.advance(election.RENEW_S)
        await until(lambda: operator.controller is None)
        await cluster.create(make_graph("second"))
        await clock.advance(election.RENEW_S)
        await pass_turns()

        assert not await has_component(cluster, "second")
        assert b"dynamo_operator_is_leader 0" in (await read(numbers, "/metrics"))[1]
        assert (await read(health, "/readyz"))[0] == 200
        with pytest.raises(
            errors.RequestError, match="needs its command"
        ):  # the webhook still answers
            await cluster.create(make_graph("mistaken", {"Decode": worker(extraPodSpec={})}))

        await write_lease(cluster, "dynamo-operator", holderIdentity="")
        await clock.advance(election.RENEW_S)
        await until(lambda: has_component(cluster, "second"))
        assert b"dynamo_operator_is_leader 1" in (await read(numbers, "/metrics"))[1]


async def test_namespace_is_left_to_the_operator_that_is_restricted_to_it(server, cluster):
    head = {
        "apiVersion": LEASE[0],
        "kind": LEASE[1],
        "metadata": {"name": "dynamo-operator-default"},
    }
    await cluster.create({**head, "spec": {"holderIdentity": "another"}})
    async with running(server) as (_, clock):
        await cluster.create(make_graph("first"))
        for number in range(10):  # for longer than a Lease lasts
            await write_lease(cluster, "dynamo-operator-default", leaseTransitions=number)
            await clock.advance(election.RENEW_S)
            await pass_turns()
        assert not await has_component(cluster, "first")

        for _ in range(10):
            await clock.advance(election.RENEW_S)
            await pass_turns()
        await until(lambda: has_component(cluster, "first"))


async def test_nothing_of_a_namespace_is_kept_when_its_objects_are_gone(server, cluster):
    async with running(server) as (operator, _):
        cache, kept_leases = operator.controller.cache, operator._election._restricted
        for namespace in ("first", "second"):
            server.connect(namespace)
            graph = make_graph("graph")
            graph["metadata"]["namespace"] = namespace
            created = await cluster.create(graph)
            key = ("DynamoComponentDeployment", namespace, "graph-decode")
            await until(lambda key=key: cache.get(key))
            await cluster.delete(API, created["kind"], "graph", namespace)
            await until(lambda namespace=namespace: namespace not in cache.namespaces)
        await until(lambda: not operator.controller.queue)

        assert not cache.namespaces
        assert not kept_leases


async def configuration_of(cluster):
    kind = "ValidatingWebhookConfiguration"
    return await cluster.get("admissionregistration.k8s.io/v1", kind, "dynamo-operator")


async def test_nothing_is_written_while_the_lease_is_not_renewed_and_the_term_goes_on(
    server, cluster
):
    """An operator without processor time, or whose API server does not answer, may have been succeeded."""
    answer, is_silent, may_answer, writes = server.handle_async_request, True, asyncio.Event(), []

    async def handle(request):
        if is_silent and request.url.path.endswith("/leases/dynamo-operator"):
            await asyncio.Event().wait()
        elif is_silent and request.method != "GET":
            writes.append(request.url.path)
            await may_answer.wait()
        return await answer(request)

    async with running(server) as (operator, clock):
        term = operator.controller
        server.handle_async_request = handle
        try:
            server.put_object(make_graph("slow"))
            await until(lambda: writes)
            await pass_turns()
            num_sent = len(writes)
            await clock.advance(election.LEASE_S)
            server.put_object(make_graph("new"))
            may_answer.set()
            await pass_turns()
            assert len(writes) == num_sent
            assert not await has_component(cluster, "new")
        finally:
            is_silent = False

        await clock.advance(2 * election.RENEW_S)
        for graph in ("slow", "new"):
            await until(lambda graph=graph: has_component(cluster, graph))
        assert operator.controller is term


async def test_operator_is_ready_when_its_webhooks_have_a_certificate(server):
    """The API server does not answer while an operator starts, which waits, and is no endpoint of its Service."""
    port = ports.reserve()
    url = f"http://127.0.0.1:{port}/readyz"

    async def status():
        return (await client.request("GET", url, b"", timeout_s=PATIENT_S, max_bytes=1000))[0]

    answer, is_away = server.handle_async_request, True

    async def handle(request):
        if is_away and "/secrets" in request.url.path:
            raise httpx2.ConnectError("away")
        return await answer(request)

    server.handle_async_request = handle
    addresses = {"health_probe_bind_address": f"127.0.0.1:{port}"}
    async with running(server, **addresses, webhook_bind_address="127.0.0.1:0") as (_, clock):
        assert await status() == 503
        await clock.advance(10)
        assert await status() == 503
        is_away = False
        await clock.advance(10)

        async def is_ready():
            return await status() == 200

        await until(is_ready)
