"""A whole cluster in one process: the API server, its controllers, and what ends them."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.launch import guard
from dynamo.testing.kube import (
    api,
    definitions,
    garbage,
    http_front,
    kubelet,
    pod_network,
    pod_runner,
    resources,
    services,
    store,
    work_queue,
    workloads,
)

_HOST = "127.0.0.1"
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


class Cluster:
    """A running API server. `served` reads and writes objects without HTTP; `url` is where clients find it."""

    def __init__(self, served: "api.Api", front: "http_front.HttpFront", url: str) -> None:
        self.served = served
        self.front = front
        self.url = url

    def write_kubeconfig(self, path: Path, url: str = "") -> None:
        """Write a file that kubectl and client libraries take as KUBECONFIG; `url` replaces the usual address."""
        path.write_text(json.dumps(self.kubeconfig(url or self.url), indent=2) + "\n")
        path.chmod(0o600)

    def kubeconfig(self, url: str) -> dict[str, Any]:
        """Return the content of a kubeconfig file."""
        name = "dynamo"
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": url}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
            "current-context": name,
        }  # fmt: skip


@contextlib.asynccontextmanager
async def run_cluster(
    *,
    port: int = 0,
    has_node: bool = False,
    max_history: int = 20_000,
    backoff_s: float = 10.0,
) -> AsyncIterator[Cluster]:
    """Run an API server with its controllers and, with a node, pods as local processes."""
    registry, objects = resources.ResourceRegistry(), store.Store(max_history=max_history)
    served = api.Api(registry, objects)
    front = http_front.HttpFront(served)
    definer = definitions.Definitions(served)
    unsubscribe = objects.subscribe(definer.on_change)
    controllers = (
        *(garbage.GarbageCollector(served), garbage.Namespaces(served), definer),
        *(workloads.Deployments(served), workloads.ReplicaSets(served), workloads.Jobs(served)),
        *(workloads.StatefulSets(served), services.EndpointSlices(served), services.Claims(served)),
    )
    queue = work_queue.ReconcileQueue(objects, controllers, clocks.SystemClock())
    bound = await front.start(_HOST, port)
    running_cluster = Cluster(served, front, f"http://{_HOST}:{bound}")
    async with tasks.Tasks() as running, contextlib.AsyncExitStack() as stack:
        running.start("controllers", queue.run())
        try:
            namespaces = registry.find("", "v1", "namespaces")
            assert namespaces is not None
            for name in _NAMESPACES:
                await served.create(namespaces, "", garbage.new_namespace(name))
            if has_node:
                node = await _open_node(stack, running, running_cluster, backoff_s)
                await node.register()
                queue.register(node)
                front.pod_handler = node.serve_pod
            yield running_cluster
        finally:
            queue.close()
            unsubscribe()
            await stack.aclose()
            await front.close()


async def _open_node(
    stack: contextlib.AsyncExitStack, running: tasks.Tasks, cluster: Cluster, backoff_s: float
) -> kubelet.Kubelet:
    """Open what pods need, in the stack that ends it."""
    guardian = stack.enter_context(guard.Guard())
    folder = guardian.make_folder("dynamo-kube-")
    network = await stack.enter_async_context(pod_network.open_network())
    url = cluster.url
    if network.is_isolated:
        inner = http_front.HttpFront(cluster.served)
        url = f"http://{network.host}:{await inner.start(network.host, 0)}"
        stack.push_async_callback(inner.close)
    config = folder / "kubeconfig"
    cluster.write_kubeconfig(config, url)
    context = pod_runner.NodeContext(
        folder=folder,
        network=network,
        guardian=guardian,
        running=running,
        clock=clocks.SystemClock(),
        backoff_s=backoff_s,
        environ=lambda pod: {
            "KUBECONFIG": str(config),
            "POD_NAMESPACE": pod["metadata"]["namespace"],
        },
    )
    node = kubelet.Kubelet(cluster.served, context, kubelet.NodeCapacity())
    stack.push_async_callback(node.close)
    return node


RunCluster = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]  # `run_cluster`
