"""`dynamo kube`: a Kubernetes cluster on a laptop, whose pods are local processes."""

import asyncio
import pathlib
import typing
from dataclasses import dataclass
from typing import Literal

from dynamo.base import config, distribution, process_setup

if typing.TYPE_CHECKING:
    from dynamo.testing.kube import cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeCommandConfig:
    """Run a Kubernetes cluster on this machine, with pods as local processes."""

    action: Literal["up"] = config.option(
        "up", flag="", help="up: run the cluster until Ctrl-C, and remove all of it then"
    )
    port: int = config.option(
        0, help="port of the API server; 0: the system chooses", least=0, most=65535
    )
    kubeconfig: str = config.option(
        "dynamo-kubeconfig", help="file that is written for kubectl and other clients"
    )


def run(options: KubeCommandConfig) -> int:
    """Run the action and return the exit code. Raises ConfigError."""
    module = distribution.load_extra(
        "dynamo.testing.kube.cluster", feature="dynamo kube", extra="kube"
    )
    path = pathlib.Path(options.kubeconfig).absolute()
    try:
        work = _serve(path, options.port, typing.cast("cluster.RunCluster", module.run_cluster))
        asyncio.run(work)
    finally:
        path.unlink(missing_ok=True)
    return 0


async def _serve(path: pathlib.Path, port: int, run_cluster: "cluster.RunCluster") -> None:
    stop = process_setup.stop_on_signals()
    async with run_cluster(port=port) as running:
        running.write_kubeconfig(path)
        print(f"export KUBECONFIG={path}", flush=True)
        print(f"The API server listens at {running.url}; Ctrl-C ends the cluster.", flush=True)
        await stop.wait()
