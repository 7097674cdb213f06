"""`dynamo kube`: a Kubernetes cluster on a laptop with local processes as pods, and manifests for any cluster."""

import asyncio
import contextlib
import importlib.resources
import json
import os
import pathlib
import signal
import sys
import typing
from dataclasses import dataclass
from typing import Literal

from dynamo.base import clock, config, distribution, draining, errors, process_setup
from dynamo.cli import waiting
from dynamo.launch import children, guard, supervisor

if typing.TYPE_CHECKING:
    from dynamo.testing.kube import cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeCommandConfig:
    """Run a Kubernetes cluster on this machine, with pods as local processes; convert and apply manifests."""

    action: Literal["up", "convert", "apply"] = config.option(
        flag="",
        help="up: run the cluster until Ctrl-C, and remove all of it then; convert: print the manifests of FILE in the"
        " form that clusters serve; apply: the same, into the cluster of KUBECONFIG",
    )
    file: str = config.option(
        "", flag="", help="convert, apply: file with manifests in YAML; -: standard input"
    )
    port: int = config.option(
        0, help="port of the API server; 0: the system chooses", least=0, most=65535
    )
    node: bool = config.option(True, help="run pods as processes; without, pods stay pending")
    operator: bool = config.option(
        True, help="run the operator, which makes pods of DynamoGraphDeployments"
    )
    backoff_s: float = config.option(
        10.0,
        help="seconds before a container that failed twice starts again; doubled each time",
        least=0,
    )
    pod_path: str = config.option(
        "",
        help="folders in which pods look for programs first, separated by colons: the bin folder of an environment"
        " with vLLM, for example",
    )
    kubeconfig: str = config.option(
        "dynamo-kubeconfig", help="file that is written for kubectl and other clients"
    )


def run(options: KubeCommandConfig) -> int:
    """Run the action and return the exit code. Raises ConfigError."""
    if options.action != "up":
        return _handle_manifests(options.action, options.file)
    if options.file:
        raise errors.ConfigError(
            f"up: expected no file, got {options.file!r}; `dynamo kube apply FILE` applies one to a cluster that runs"
        )
    module = distribution.load_extra(
        "dynamo.testing.kube.cluster", feature="dynamo kube", extra="kube"
    )
    pod_path = find_folders(options.pod_path)
    path = pathlib.Path(options.kubeconfig).absolute()
    definitions = importlib.resources.files("dynamo.operator").joinpath("definitions.json")
    try:
        listener = module.enter_user_namespace(options.port) if options.node else None
    except OSError as error:
        raise errors.ConfigError(
            f"--port {options.port}: {error.strerror}; name a free one"
        ) from error
    opened = typing.cast("cluster.RunCluster", module.run_cluster)(
        port=options.port,
        listener=listener,
        has_node=options.node,
        backoff_s=options.backoff_s,
        pod_path=pod_path,
        custom_resources=json.loads(definitions.read_bytes()) if options.operator else (),
    )
    return asyncio.run(_serve(path, opened, has_operator=options.operator, has_node=options.node))


def find_folders(text: str) -> str:
    """Return the folders of --pod-path, from the root: a pod runs in a folder of its own. Raises ConfigError."""
    folders = [pathlib.Path(part).absolute() for part in text.split(":") if part]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise errors.ConfigError(f"--pod-path: expected folders, got {missing[0]}")
    return ":".join(map(str, folders))


def _handle_manifests(action: str, file: str) -> int:
    if not file:
        raise errors.ConfigError(
            f"{action}: expected a file with manifests, or - for standard input"
        )
    module = distribution.load_extra(
        "dynamo.cli.kube_manifests", feature=f"dynamo kube {action}", extra="kubernetes"
    )
    handle = module.print_manifests if action == "convert" else module.apply_manifests
    return int(handle(file))


async def _serve(
    path: pathlib.Path,
    opened: "contextlib.AbstractAsyncContextManager[cluster.Cluster]",
    *,
    has_operator: bool,
    has_node: bool,
) -> int:
    stop = process_setup.stop_on_signals()
    async with opened as running, contextlib.AsyncExitStack() as stack:
        stack.enter_context(running.write_kubeconfig(path))
        stack.callback(path.unlink, missing_ok=True)
        print(f"export KUBECONFIG={path}", flush=True)
        print(f"The API server listens at {running.url}; Ctrl-C ends the cluster.", flush=True)
        if has_node and not running.has_pod_networks:
            print(
                "Pods share the network and the files of this machine, with an address of 127.0.0.0/8 each, and names"
                " of services lead nowhere: more takes root, or a kernel that lets users make namespaces, and the"
                " command ip."
            )
        if not has_operator:
            await stop.wait()
            return 0
        print("kubectl apply -f deploy/examples/mocker.yaml")  # needs no model, GPU or image
        print("kubectl get dgd", flush=True)
        return await _run_operator(path, stop)


async def _run_operator(path: pathlib.Path, stop: asyncio.Event) -> int:
    """Run the operator until a signal comes, and start it again when it dies; return the exit code."""
    argv = [sys.executable, "-m", "dynamo.operator"]
    argv += ["--metrics-bind-address", "127.0.0.1:0", "--health-probe-bind-address", "127.0.0.1:0"]
    argv += ["--webhook-bind-address", "127.0.0.1:0"]
    environ = {**os.environ, "KUBECONFIG": str(path)}
    with guard.Guard() as guardian:
        async with supervisor.Supervisor(
            guardian, clock.SystemClock(), waiting.say, stop_timeout_s=draining.STOP_TIMEOUT_S
        ) as pool:
            pool.stop_on((signal.SIGTERM, signal.SIGINT))
            try:
                if not stop.is_set():  # a signal came before
                    await pool.start(
                        children.ChildSpec(name="operator", argv=argv, environ=environ)
                    )
                    pool.watch("operator", fatal_codes=frozenset({2}))
                    await pool.run()
            except children.ChildDied as death:
                waiting.say(str(death))
                return death.exit_code
    return 0
