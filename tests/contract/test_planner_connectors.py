"""One suite over the planner's connectors: with real child processes, and with an orchestrator that follows targets."""

import asyncio
import contextlib
import sys

import msgspec
import pytest

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.launch import allocation, children, guard
from dynamo.planner import connectors
from dynamo.planner.connectors import (
    LocalConnector,
    LocalWorkerOptions,
    RegisteredWorkers,
    endpoints,
)
from dynamo.planner.kubernetes_connector import KubernetesConnector
from dynamo.planner.observation import Replicas
from dynamo.planner.scaling_pipeline import Decision
from dynamo.runtime.backends import file
from memory_cluster import MemoryCluster
from waiting import PATIENT_S

NAMESPACE = "plan"
WORKER = """
import asyncio, sys
from dynamo.base import process_setup
from dynamo.runtime import component, DistributedRuntime
async def main():
    settings = component.RuntimeConfig(namespace="plan")
    async with await component.DistributedRuntime.open(settings) as runtime:
        stop = process_setup.stop_on_signals()
        from dynamo.protocols import instances
        name = instances.EndpointName("plan", sys.argv[1], "generate")
        async def handler(call): ...
        await runtime.register(name, handler)
        await stop.wait()
asyncio.run(main())
"""


class Foreign:
    """An orchestrator that registers as many workers as the target says."""

    def __init__(self, registry):
        self.registry, self.keys = registry, {name: [] for name in ("prefill", "backend")}
        self.client = connectors.VirtualOrchestrator(registry, NAMESPACE)

    async def run(self):
        while True:
            target = await self.client.wait()
            counts = (target.num_prefill_workers, target.num_decode_workers)
            for component, number in zip(self.keys, counts, strict=True):
                keys = self.keys[component]
                while len(keys) < number:
                    keys.append(f"v1/instances/{NAMESPACE}/{component}/generate/{len(keys):x}")
                    await self.registry.put(keys[-1], b"{}")
                while len(keys) > number:
                    await self.registry.delete(keys.pop())
            await self.client.complete(target)


class GraphOperator:
    """An operator that gives each service of a deployment its pods, and makes them ready a moment later."""

    def __init__(self):
        self.cluster = MemoryCluster()

    async def run(self):
        kubernetes = self.cluster.connect("k8s")
        services = {
            "VllmPrefillWorker": {"componentType": "worker", "replicas": 0},
            "VllmDecodeWorker": {"componentType": "worker", "replicas": 0},
            "Frontend": {"componentType": "frontend"},
        }
        metadata = {"name": "graph", "namespace": "k8s"}
        graph = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoGraphDeployment"}
        await kubernetes.create(graph | {"metadata": metadata, "spec": {"services": services}})
        async for _, found in kubernetes.watch("nvidia.com/v1alpha1", "DynamoGraphDeployment"):
            for service, spec in found.get("spec", {"services": {}})["services"].items():
                if spec["componentType"] == "worker":
                    await self._set_pods(kubernetes, service, spec["replicas"])

    async def _set_pods(self, kubernetes, service, replicas):
        labels = {
            "nvidia.com/dynamo-component": service,
            "nvidia.com/dynamo-graph-deployment-name": "graph",
        }
        pods = await kubernetes.list("v1", "Pod", labels=f"nvidia.com/dynamo-component={service}")
        for pod in pods[replicas:]:
            await kubernetes.delete("v1", "Pod", pod["metadata"]["name"])
        for number in range(len(pods), replicas):
            metadata = {"name": f"{service.lower()}-{number}", "labels": labels}
            spec = {"containers": [{"name": "main", "image": "none.invalid/none"}]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            await kubernetes.create(pod)
            condition = {"type": "Ready", "status": "True"}
            await kubernetes.patch(
                "v1",
                "Pod",
                metadata["name"],
                {"status": {"conditions": [condition]}},
                subresource="status",
            )


@pytest.fixture(params=["local", "virtual", "kubernetes"])
async def connector(request, tmp_path):
    registry = await file.FileDiscovery.open(tmp_path, 1)
    registered = tuple(RegisteredWorkers(registry, name) for name in endpoints(NAMESPACE))
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "virtual":
            made = connectors.VirtualConnector(
                registry, NAMESPACE, clocks.SystemClock(), registered
            )
            follower = asyncio.ensure_future(Foreign(registry).run())
            stack.callback(follower.cancel)
        elif request.param == "kubernetes":
            operator = GraphOperator()
            follower = asyncio.ensure_future(operator.run())
            stack.callback(follower.cancel)
            await asyncio.sleep(0)
            made = KubernetesConnector(
                operator.cluster.connect("k8s"),
                {"DYN_PARENT_DGD_K8S_NAME": "graph"},
                clock=clocks.SystemClock(),
            )
            async with asyncio.timeout(PATIENT_S):
                graphs = ("nvidia.com", "dynamographdeployments")
                while not operator.cluster.store.list_items(graphs):
                    await asyncio.sleep(0.01)
        else:
            guardian = stack.enter_context(guard.Guard())

            def make_spec(pool, number, resources):
                component = {"prefill": "prefill", "decode": "backend"}[pool]
                return children.ChildSpec(
                    name=f"{pool} {number}",
                    argv=[sys.executable, "-c", WORKER, component],
                    environ={"DYN_FILE_KV": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
                    resources=resources,
                )

            made = LocalConnector(
                make_spec,
                guardian,
                clocks.SystemClock(),
                registered=registered,
                allocator=allocation.Allocator(allocation.Allocation()),
                options=LocalWorkerOptions(),
            )
        stack.push_async_callback(made.close)
        yield made
    await registry.close()


async def order(connector, *replicas):
    prefill, decode = await connector.observe()
    present = Replicas(prefill.num_ordered, decode.num_ordered)
    await connector.scale(
        Decision(at=0.0, present=present, replicas=Replicas(*replicas), outcome="", reason="")
    )


async def settle(connector, *replicas):
    """Wait until exactly these workers serve; return the states."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            states = await connector.observe()
            if [(s.num_ready, s.num_billed) for s in states] == [(n, n) for n in replicas]:
                return states
            await asyncio.sleep(0.02)


async def test_nothing_is_there_at_first(connector):
    assert [state.num_billed for state in await connector.observe()] == [0, 0]


async def test_ordered_workers_come(connector):
    await order(connector, 1, 2)

    await settle(connector, 1, 2)


async def test_ordering_the_same_again_changes_nothing(connector):
    await order(connector, 0, 1)
    await settle(connector, 0, 1)
    await order(connector, 0, 1)

    await settle(connector, 0, 1)


async def test_workers_go_down_to_none(connector):
    await order(connector, 1, 1)
    await settle(connector, 1, 1)
    await order(connector, 0, 0)

    await settle(connector, 0, 0)


async def test_order_returns_before_the_worker_serves(connector):
    await order(connector, 0, 1)
    _, decode = await connector.observe()

    assert decode.num_ordered == 1
    await settle(connector, 0, 1)


async def test_completing_the_order_of_an_earlier_planner_does_not_complete_ours(tmp_path):
    registry = await file.FileDiscovery.open(tmp_path, 1)
    registered = tuple(RegisteredWorkers(registry, name) for name in endpoints(NAMESPACE))
    orchestrator = connectors.VirtualOrchestrator(registry, NAMESPACE)
    earlier, later = (
        connectors.VirtualConnector(registry, NAMESPACE, clocks.SystemClock(), registered)
        for _ in range(2)
    )
    await order(earlier, 0, 1)
    in_work = await orchestrator.wait()
    await registry.delete(connectors.target_key(NAMESPACE))  # with the lease of its planner
    await order(later, 0, 2)
    await orchestrator.complete(in_work)
    async with asyncio.timeout(PATIENT_S):
        following = await orchestrator.wait()

    assert following.num_decode_workers == 2
    assert (await later.observe())[1].num_starting == 2
    await registry.close()


async def test_order_that_could_not_be_written_is_written_at_the_next_decision(
    tmp_path, monkeypatch
):
    registry = await file.FileDiscovery.open(tmp_path, 1)
    registered = tuple(RegisteredWorkers(registry, name) for name in endpoints(NAMESPACE))
    connector = connectors.VirtualConnector(registry, NAMESPACE, clocks.SystemClock(), registered)
    with monkeypatch.context() as patch:

        async def refuse(key, value):
            raise errors.ConfigError("no space left on the device")

        patch.setattr(registry, "put", refuse)
        with pytest.raises(errors.ConfigError):
            await order(connector, 0, 1)
    await order(connector, 0, 1)
    async with asyncio.timeout(PATIENT_S):
        target = await connectors.VirtualOrchestrator(registry, NAMESPACE).wait()

    assert target.num_decode_workers == 1
    await registry.close()


async def test_worker_that_died_after_its_order_was_completed_is_ordered_again(tmp_path):
    registry = await file.FileDiscovery.open(tmp_path, 1)
    registered = tuple(RegisteredWorkers(registry, name) for name in endpoints(NAMESPACE))
    connector = connectors.VirtualConnector(registry, NAMESPACE, clocks.SystemClock(), registered)
    orchestrator = connectors.VirtualOrchestrator(registry, NAMESPACE)
    await order(connector, 0, 1)
    first = await orchestrator.wait()
    await orchestrator.complete(first)  # its process starts, and serves a little later
    await order(connector, 0, 1)
    unchanged = await registry.get_prefix(connectors.target_key(NAMESPACE))
    await registry.put(f"v1/instances/{NAMESPACE}/backend/generate/a", b"{}")
    await order(connector, 0, 1)
    await registry.delete(f"v1/instances/{NAMESPACE}/backend/generate/a")
    await order(connector, 0, 1)
    async with asyncio.timeout(PATIENT_S):
        second = await orchestrator.wait()

    assert list(unchanged.values()) == [msgspec.json.encode(first)]
    assert (second.num_decode_workers, second.decision_id) == (1, first.decision_id + 1)
    assert (await connector.observe())[1].num_starting == 1
    await registry.close()


async def test_what_is_no_answer_of_an_orchestrator_costs_a_decision_and_is_named(tmp_path):
    registry = await file.FileDiscovery.open(tmp_path, 1)
    registered = tuple(RegisteredWorkers(registry, name) for name in endpoints(NAMESPACE))
    connector = connectors.VirtualConnector(registry, NAMESPACE, clocks.SystemClock(), registered)
    await order(connector, 0, 1)
    await registry.put(connectors.done_key(NAMESPACE), b'{"decision_id": "7"}')
    with pytest.raises(errors.RemoteProtocolError, match=r"v1/planner/plan/scaled: expected"):
        await connector.observe()
    await registry.close()
