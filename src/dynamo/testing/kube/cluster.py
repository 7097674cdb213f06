"""A whole cluster in one process: the API server, its controllers, and what ends them."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.testing.kube import (
    api,
    definitions,
    garbage,
    http_front,
    resources,
    store,
    work_queue,
)

_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


class Cluster:
    """A running API server. `served` reads and writes objects without HTTP; `url` is where clients find it."""

    def __init__(self, served: "api.Api", front: "http_front.HttpFront", url: str) -> None:
        self.served = served
        self.front = front
        self.url = url

    def write_kubeconfig(self, path: Path) -> None:
        """Write a file that kubectl and client libraries take as KUBECONFIG."""
        path.write_text(json.dumps(self.kubeconfig(), indent=2) + "\n")
        path.chmod(0o600)

    def kubeconfig(self) -> dict[str, Any]:
        """Return the content of a kubeconfig file."""
        name = "dynamo"
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": self.url}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
            "current-context": name,
        }  # fmt: skip


@contextlib.asynccontextmanager
async def run_cluster(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    controllers: Iterable[work_queue.Controller] = (),
    max_history: int = 20_000,
) -> AsyncIterator[Cluster]:
    """Run an API server with garbage collection, namespaces, custom resource definitions and further controllers."""
    registry, objects = resources.ResourceRegistry(), store.Store(max_history=max_history)
    served = api.Api(registry, objects)
    front = http_front.HttpFront(served)
    established = definitions.Definitions(served)
    unsubscribe = objects.subscribe(established.on_change)
    found: tuple[work_queue.Controller, ...] = (
        garbage.GarbageCollector(served),
        garbage.Namespaces(served),
        established,
        *controllers,
    )
    queue = work_queue.ReconcileQueue(objects, found, clocks.SystemClock())
    bound = await front.start(host, port)
    async with tasks.Tasks() as running:
        running.start("controllers", queue.run())
        try:
            namespaces = registry.find("", "v1", "namespaces")
            assert namespaces is not None
            for name in _NAMESPACES:
                await served.create(namespaces, "", garbage.new_namespace(name))
            yield Cluster(served, front, f"http://{host}:{bound}")
        finally:
            queue.close()
            unsubscribe()
            await front.close()


RunCluster = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]  # `run_cluster`
