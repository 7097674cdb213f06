"""A whole cluster in one process: the API server, its controllers, and what ends them."""

import base64
import contextlib
import fcntl
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks, tls
from dynamo.launch import guard
from dynamo.testing.kube import (
    api,
    autoscaling,
    controllers,
    definitions,
    garbage,
    http_front,
    kubelet,
    pod_network,
    pod_runner,
    resources,
    rights,
    service_network,
    services,
    store,
    workloads,
)

_HOST = "127.0.0.1"
_CONTEXT = '"current-context": "dynamo"'  # by which a file of ours is known
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


class Cluster:
    """A running API server. `served` reads and writes objects without HTTP; `url` is where clients find it."""

    def __init__(
        self,
        served: api.Api,
        front: http_front.HttpFront,
        url: str,
        certificate: bytes,
        token: str,
    ) -> None:
        self.served = served
        self.token = token  # of the user that may do everything
        self.front = front
        self.url = url
        self.certificate = certificate  # in PEM
        self.has_pod_networks = False

    def write_kubeconfig(self, path: Path) -> TextIO:
        """Write a file that kubectl and client libraries take as KUBECONFIG; only this user may read its token.

        It is returned open: until it is closed, no other cluster takes its place. Raises ConfigError for a file of
        another cluster, or of one that runs, which would be lost, and for one that cannot be written.
        """
        try:
            if path.exists():
                with path.open(encoding="utf-8", errors="replace") as former:
                    fcntl.flock(former, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _CONTEXT not in former.read():
                        raise errors.ConfigError(
                            f"--kubeconfig {path}: expected no file, or one of an earlier dynamo kube up, got another"
                            " cluster's; name a new file"
                        )
            path.unlink(missing_ok=True)  # the mode of a file that is there would stay
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            file = os.fdopen(descriptor, "w")
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                json.dump(self.kubeconfig(self.token, "default"), file, indent=2)
                file.flush()
            except OSError:
                path.unlink()  # a cluster would take it for another's
                with contextlib.suppress(OSError):
                    file.close()
                raise
        except BlockingIOError as error:
            text = f"--kubeconfig {path}: is that of a dynamo kube up that runs; name a new file"
            raise errors.ConfigError(text) from error
        except OSError as error:
            text = f"--kubeconfig {path}: cannot be written: {error.strerror}"
            raise errors.ConfigError(text) from error
        return file

    def kubeconfig(self, token: str, namespace: str) -> dict[str, Any]:
        """Return the content of a kubeconfig file for a client with this token."""
        name = "dynamo"
        authority = base64.b64encode(self.certificate).decode()
        server = {"server": self.url, "certificate-authority-data": authority}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": server}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
            "current-context": name,
        }  # fmt: skip


async def _listen(
    served: api.Api, authority: rights.Authority, token: str, host: str, port: int
) -> Cluster:
    """Serve the API at an address, by TLS. Raises ConfigError."""
    made = await tls.make_certificate([host])
    front = http_front.HttpFront(served, tls=made.open_context(), authority=authority)
    bound = await front.start(host, port)
    return Cluster(served, front, f"https://{host}:{bound}", made.certificate, token)


@contextlib.asynccontextmanager
async def run_cluster(
    *,
    port: int = 0,
    has_node: bool = False,
    max_history: int = 20_000,
    backoff_s: float = 10.0,
    pod_path: str = "",
    token: str = "",
    custom_resources: Iterable[dict[str, Any]] = (),
    listener: socket.socket | None = None,
) -> AsyncIterator[Cluster]:
    """Run an API server with its controllers and, with a node, pods as local processes.

    Clients present the token, a random one by default. Pods find programs in `pod_path`
    first. The custom resource definitions are there from the start. Clients in the network that this process has left
    are answered at `listener`, at the same port as those here.
    """
    registry, objects = resources.ResourceRegistry(), store.Store(max_history=max_history)
    token = token or secrets.token_urlsafe(32)
    authority = rights.Authority(objects, token)
    served = api.Api(registry, objects, authority)
    definer = definitions.Definitions(served)
    unsubscribe = objects.subscribe(definer.on_change)
    built_in = (
        *(garbage.GarbageCollector(served), garbage.Namespaces(served), definer),
        *(workloads.Deployments(served), workloads.ReplicaSets(served), workloads.Jobs(served)),
        *(workloads.StatefulSets(served), services.EndpointSlices(served), services.Claims(served)),
        garbage.Events(served),
    )
    control = controllers.ControllerLoop(objects, built_in, clocks.SystemClock())
    if listener is not None:
        port = listener.getsockname()[1]
    running_cluster = await _listen(served, authority, token, _HOST, port)
    front = running_cluster.front
    if listener is not None:
        await front.start_outside(listener)
    await definer.define(custom_resources)
    async with tasks.Tasks() as running, contextlib.AsyncExitStack() as stack:
        running.start("controllers", control.run())
        try:
            namespaces = registry.require("", "namespaces")
            options = api.WriteOptions(manager="kube-apiserver")
            for name in _NAMESPACES:
                await served.create(namespaces, "", garbage.new_namespace(name), options)
            if has_node:
                node = await _open_node(
                    stack, running, running_cluster, authority, backoff_s, pod_path
                )
                await node.register()
                running.start("memory of pods", node.watch_memory())
                control.register(node)
                control.register(node.names)
                front.pod_handler = node.serve_pod
                metrics = autoscaling.PodMetrics(served, node.processes_of, clocks.SystemClock())
                control.register(autoscaling.Autoscalers(served, metrics, clocks.SystemClock()))
                front.pod_metrics = metrics
            yield running_cluster
        finally:
            control.close()
            unsubscribe()
            await stack.aclose()
            await front.close()


async def _open_node(
    stack: contextlib.AsyncExitStack,
    running: tasks.Tasks,
    cluster: Cluster,
    authority: rights.Authority,
    backoff_s: float,
    pod_path: str,
) -> kubelet.Kubelet:
    """Open what pods need, in the stack that ends it."""
    guardian = stack.enter_context(guard.Guard())
    folder = guardian.make_folder("dynamo-kube-")
    network = await stack.enter_async_context(pod_network.open_network())
    inner = cluster
    cluster.has_pod_networks = network.is_isolated
    if network.is_isolated:
        inner = await _listen(cluster.served, authority, cluster.token, network.host, 0)
        stack.push_async_callback(inner.front.close)
    names = service_network.ServiceNetwork(cluster.served.store, network, running)
    stack.push_async_callback(names.close)

    def make_environ(pod: dict[str, Any]) -> dict[str, str]:
        """Return what leads a pod to the API server, as its service account."""
        namespace = pod["metadata"]["namespace"]
        account_token = authority.account_token(namespace, pod["spec"]["serviceAccountName"])
        file = folder / f"kubeconfig-{pod['metadata']['uid']}"
        file.write_text(json.dumps(inner.kubeconfig(account_token, namespace)))
        return {"KUBECONFIG": str(file), "POD_NAMESPACE": namespace}

    context = pod_runner.NodeContext(
        folder=folder,
        network=network,
        guardian=guardian,
        running=running,
        clock=clocks.SystemClock(),
        backoff_s=backoff_s,
        names=names,
        pod_path=pod_path,
        environ=make_environ,
    )
    node = kubelet.Kubelet(cluster.served, context, kubelet.NodeCapacity())
    stack.push_async_callback(node.close)
    return node


enter_user_namespace = pod_network.enter_user_namespace
RunCluster = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]  # `run_cluster`
