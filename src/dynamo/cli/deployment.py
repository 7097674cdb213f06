"""`dynamo deploy` and `dynamo deployment`: a graph as a DynamoGraphDeployment, on a cluster or in a file.

A graph is a tag that `dynamo build` printed, or `module:Class` with its sources in the working directory. They are in
the image, or go along in a ConfigMap (`--with-sources`). The cluster is that of the kubeconfig, or of the pod; a
laptop's (`dynamo kube up`) is one like any other.
"""

import asyncio
import contextlib
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dynamo.base import config, distribution, errors
from dynamo.cli import graph as graph_command
from dynamo.cli import package, source_map, waiting
from dynamo.launch import allocation
from dynamo.sdk import commands, graph

API_VERSION, KIND = "nvidia.com/v1alpha1", "DynamoGraphDeployment"
_MANAGER = "dynamo-deployment"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # of a service of Kubernetes
_TAG = re.compile(r".+:[0-9a-f]{12}\.?")  # which may look like module:Class
_MOST_NAME_CHARS = 63
_COMPONENT_TYPES = {"dynamo.frontend": "frontend", "dynamo.planner": "planner"}
# Of pydynamo's own images, which one has a module; the frontend's has all that no engine is needed for.
_IMAGES = {
    "dynamo.native": "native",
    "dynamo.vllm": "vllm-runtime",
    "dynamo.sglang": "sglang-runtime",
    "dynamo.trtllm": "trtllm-runtime",
}
# How a cluster learns of a class without @api that it starts, answers, and ends.
_SYSTEM_PORT = 9090
_SYSTEM_VARIABLES = {"DYN_SYSTEM_HOST": "0.0.0.0", "DYN_SYSTEM_PORT": str(_SYSTEM_PORT)}
_PROBES = {
    "readinessProbe": {
        "httpGet": {"path": "/health", "port": _SYSTEM_PORT},
        "periodSeconds": 5,
        "timeoutSeconds": 30,
    },
    "livenessProbe": {
        "httpGet": {"path": "/live", "port": _SYSTEM_PORT},
        "periodSeconds": 10,
        "timeoutSeconds": 30,
        "failureThreshold": 10,
    },
}
Object = dict[str, Any]
Connection = Any  # runtime.backends.kubernetes.connection, which is loaded when it is used


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """Deploy a graph (same as deployment create)."""

    pipeline: str = config.option(flag="", help="tag that `dynamo build` printed, or module:Class")
    name: str | None = config.option(
        None, aliases=("-n",), help="name of the deployment (default: that of the first service)"
    )
    file: str | None = config.option(
        None, aliases=("-f",), help="YAML file with a section for each service"
    )
    namespace: str | None = config.option(
        None, help="namespace of the cluster (default: the kubeconfig's)"
    )
    image: str | None = config.option(None, help="image of all services (default: the tag's)")
    with_sources: bool = config.option(
        False,
        help="send the sources along in a ConfigMap; the image needs pydynamo only (default: one of pydynamo's)",
    )
    working_dir: str = config.option(".", help="directory of the sources of module:Class")
    endpoint: str | None = config.option(
        None,
        aliases=("-e",),
        env="DYNAMO_CLOUD",
        help="accepted from 0.3; the kubeconfig names the cluster",
    )
    wait: bool = config.option(True, help="wait until the deployment is ready")
    timeout: float = config.option(3600.0, help="seconds to wait", least=0)
    dry_run: bool = config.option(False, help="print the DynamoGraphDeployment, and apply nothing")
    overrides: tuple[str, ...] = config.rest(help="--Service.key=value sets a value of a service.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig(DeployConfig):
    """Create, list, show, update and delete deployments of graphs on a Kubernetes cluster."""

    action: Literal["create", "list", "get", "update", "delete"] = config.option(
        "list", flag="", help="what to do"
    )
    pipeline: str = config.option(
        "", flag="", help="create, update: tag or module:Class; get, delete: name of the deployment"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig:
    """Say what replaced the Dynamo Cloud of 0.3."""

    words: tuple[str, ...] = config.rest(help="Arguments of the command of 0.3 are accepted.")


def deploy(options: DeployConfig) -> int:
    """Apply a graph's deployment, or print it; return the exit code. Raises DynamoError."""
    made = make_objects(options)
    if options.dry_run:
        print("---\n".join(map(_yaml, made)), end="")
        return 0
    return _on_cluster(lambda cluster: _apply(cluster, made, options))


def manage(options: DeploymentConfig) -> int:
    """Do what the action says; return the exit code. Raises DynamoError."""
    if options.action in ("create", "update"):
        return deploy(options)
    for name in ("dry_run", "file", "image", "with_sources"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise errors.ConfigError(f"{flag}: expected create or update, got {options.action}")
    if options.overrides:
        raise errors.ConfigError(
            f"unrecognized argument of {options.action}: {options.overrides[0]} (see --help)"
        )
    names = [each for each in (options.pipeline, options.name) if each]
    if len(names) > (options.action != "list"):
        number = "no name" if options.action == "list" else "one name"
        raise errors.ConfigError(
            f"{options.action}: expected {number} of a deployment, got {' and '.join(names)};"
            " --namespace names the namespace of the cluster"
        )
    if options.action == "list":
        return _on_cluster(lambda cluster: _list(cluster, options.namespace))
    name = options.name or options.pipeline
    if not name:
        raise errors.ConfigError(
            f"{options.action}: expected a name that `dynamo deployment list` shows"
        )
    work = _show if options.action == "get" else _delete
    return _on_cluster(lambda cluster: work(cluster, name, options.namespace))


def cloud(_: CloudConfig) -> int:
    """Say what to use instead of a command that 0.3 had, and return 2."""
    raise errors.ConfigError(
        "`dynamo cloud` installed the platform of 0.3; today charts do: helm install dynamo-crds and dynamo-platform,"
        " then `dynamo deploy TAG`; on a laptop `dynamo kube up` is a cluster"
    )


def make_objects(options: DeployConfig) -> list[Object]:
    """Return the DynamoGraphDeployment of a graph, behind the ConfigMap of its sources if any. Raises ConfigError."""
    if not options.pipeline:
        raise errors.ConfigError("expected a tag that `dynamo build` printed, or module:Class")
    with _sources(options) as (target, directory):
        graph_options = graph_command.GraphConfig(
            target=target,
            file=options.file,
            working_dir=str(directory),
            overrides=options.overrides,
        )
        loaded = graph_command.load(graph_options)
        files = dict(package.sources(directory, directory)) if options.with_sources else {}
    name = options.name or loaded.specs[0].name.lower()
    if len(name) > _MOST_NAME_CHARS or not _NAME.fullmatch(name):
        raise errors.ConfigError(
            f"-n: expected at most {_MOST_NAME_CHARS} lower-case letters, digits and dashes, as Kubernetes names have,"
            f" got {name!r}"
        )
    # A pod has an address of its own, to whose port 8000 its Service leads.
    names = [spec.name for spec in loaded.specs if spec.module is None and spec.methods("api")]
    served = [f"--{each}.{setting}" for each in names for setting in ("host=0.0.0.0", "port=8000")]
    plan = commands.make(
        loaded.specs,
        loaded.values.with_overrides(served),
        allocation.Allocation(),
        target=target,
        directory=source_map.FOLDER,
        namespace=loaded.namespaces[0],
        environ={},
    )
    services: dict[str, Object] = {}
    for command in (*plan.commands, *plan.idle):
        type_ = _component_type(command.argv[2], is_http=command.service in names)
        service = services.setdefault(command.service, _service(command, options, name, type_))
        service["replicas"] += command not in plan.idle
    place = {"namespace": options.namespace} if options.namespace else {}
    manifest = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, **place},
        "spec": {"services": services},
    }
    if not options.with_sources:
        return [manifest]
    sources = source_map.make(name, files)
    sources["metadata"] |= place
    for service in services.values():
        source_map.mount(service, sources, files)
    return [sources, manifest]


def _component_type(module: str, *, is_http: bool) -> str | None:
    """Return the type of a component; the classes of a graph are none, since they find each other in one namespace."""
    if module == "dynamo.sdk":
        return "frontend" if is_http else None
    return _COMPONENT_TYPES.get(module, "worker")


def _service(
    command: commands.ServiceCommand, options: DeployConfig, name: str, component_type: str | None
) -> Object:
    """Return a service of the deployment; its replicas are counted by the caller."""
    image = options.image or options.pipeline.removesuffix(".")  # as `dynamo build` ends its line
    if options.with_sources and options.image is None:
        kind = _IMAGES.get(command.argv[2], "frontend")
        image = f"dynamo-serving/{kind}:{distribution.version()}"
    service: Object = {
        "dynamoNamespace": name,
        "replicas": 0,
        "envs": [
            {"name": key, "value": value}
            for key, value in command.environ.items()
            if key != "DYN_NAMESPACE"
        ],
        "extraPodSpec": {
            "mainContainer": {
                "image": image,
                "workingDir": command.directory,
                "command": ["python3", *command.argv[1:3]],
                "args": list(command.argv[3:]),
            }
        },
    }
    if component_type is not None:
        service["componentType"] = component_type
    else:
        service |= _PROBES
        service["envs"] += [
            {"name": key, "value": value} for key, value in _SYSTEM_VARIABLES.items()
        ]
    resources: Object = {"requests": dict(command.pod_requests)} if command.pod_requests else {}
    if command.num_devices:
        resources["limits"] = {"gpu": str(command.num_devices)}
    if resources:
        service["resources"] = resources
    return service


@contextlib.contextmanager
def _sources(options: DeployConfig) -> Iterator[tuple[str, Path]]:
    """Yield a graph's target and the directory of its sources, those of an archive unpacked."""
    pipeline = options.pipeline
    path = package.archive_path(pipeline, None)
    if not path.exists():
        if _TAG.fullmatch(pipeline) or not graph.is_target(pipeline):
            raise errors.ConfigError(f"{pipeline}: no such archive; `dynamo get` lists them")
        if options.image is None and not options.with_sources:
            raise errors.ConfigError(
                f"{pipeline}: expected --image with an image that has its sources, since no tag names one;"
                " --with-sources, which sends them along; or"
                f" `dynamo build --containerize {pipeline}`, push the image of the tag, and deploy the tag"
            )
        yield pipeline, Path(options.working_dir).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield package.unpack(path, folder).target, Path(folder, "src")


def _on_cluster(work: Callable[[Connection], Awaitable[int]]) -> int:
    """Call `work` with a connection to the cluster. Raises ConfigError if there is none."""
    module = distribution.load_extra(
        "dynamo.runtime.backends.kubernetes.connection", feature="a deployment", extra="kubernetes"
    )

    async def run() -> int:
        async with module.KubernetesConnection.open(os.environ) as cluster:
            return await work(cluster)

    return asyncio.run(run())


async def _apply(cluster: Connection, made: Sequence[Object], options: DeployConfig) -> int:
    *sources, manifest = made
    name = manifest["metadata"]["name"]
    namespace = options.namespace or cluster.namespace
    place = {"namespace": namespace}
    for each in sources:  # before the pods, which would wait for them
        each["metadata"] |= place
        await cluster.apply(each, _MANAGER, force=True)
    applied = {**manifest, "metadata": {"name": name, **place}}
    stored = await cluster.apply(applied, _MANAGER, force=True)
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": stored["metadata"]["uid"],
    }
    for each in sources:  # it is deleted with the deployment
        each["metadata"]["ownerReferences"] = [owner]
        await cluster.apply(each, _MANAGER, force=True)
    print(f"applied {name} in the namespace {namespace}", flush=True)
    if not options.wait:
        return 0
    try:
        async with asyncio.timeout(options.timeout):
            await _until_ready(cluster, stored)
    except TimeoutError:
        raise errors.DeadlineExceeded(
            f"{name} is not ready after {options.timeout:g} s; `dynamo deployment get {name}` shows why"
        ) from None
    await _delete_former_sources(cluster, name, namespace, sources)
    services = manifest["spec"]["services"].items()
    doors = [key.lower() for key, value in services if value.get("componentType") == "frontend"]
    reached = "".join(
        f"; reach it: kubectl port-forward svc/{name}-{door} 8000:8000" for door in doors
    )
    print(f"{name} is ready{reached}")
    return 0


async def _until_ready(cluster: Connection, stored: Object) -> None:
    """Wait until the stored deployment is ready, and say regularly what it lacks. Raises Conflict if it is deleted."""
    name, namespace = stored["metadata"]["name"], stored["metadata"]["namespace"]
    is_gone = True  # until it is listed
    with waiting.say_regularly(lambda: f"{name} is not ready: {_cause(stored)}"):
        async for event, each in cluster.watch(API_VERSION, KIND, namespace):
            if each.get("metadata", {}).get("name") == name:
                stored, is_gone = each, event == "DELETED"
                if is_ready(stored) and not is_gone:
                    return
            if is_gone and event in ("SYNCED", "DELETED"):
                raise errors.Conflict(f"{name} was deleted before it was ready")


async def _delete_former_sources(
    cluster: Connection, name: str, namespace: str, sources: Sequence[Object]
) -> None:
    """Delete the sources of former versions, which no pod has any more."""
    names = {each["metadata"]["name"] for each in sources}
    kind = (source_map.API_VERSION, source_map.KIND)
    for stored in await cluster.list(*kind, namespace, labels=f"{source_map.LABEL}={name}"):
        if stored["metadata"]["name"] not in names:
            await cluster.delete(*kind, stored["metadata"]["name"], namespace)


async def _list(cluster: Connection, namespace: str | None) -> int:
    stored = await cluster.list(API_VERSION, KIND, namespace or cluster.namespace)
    print(f"{'NAME':<32} {'SERVICES':>8}  STATE")
    for each in stored:
        services = each["spec"].get("services") or {}
        state = (each.get("status") or {}).get("state") or "pending"
        print(f"{each['metadata']['name']:<32} {len(services):>8}  {state}")
    return 0


async def _show(cluster: Connection, name: str, namespace: str | None) -> int:
    stored = await cluster.get(API_VERSION, KIND, name, namespace or cluster.namespace)
    if stored is None:
        raise errors.ConfigError(f"no deployment is called {name}; `dynamo deployment list`")
    stored["metadata"].pop("managedFields", None)
    print(_yaml(stored), end="")
    return 0


async def _delete(cluster: Connection, name: str, namespace: str | None) -> int:
    if not await cluster.delete(API_VERSION, KIND, name, namespace or cluster.namespace):
        raise errors.ConfigError(f"no deployment is called {name}; `dynamo deployment list`")
    print(f"deleted {name}")
    return 0


def is_ready(stored: Mapping[str, Any]) -> bool:
    """Return whether a deployment says that it is ready, in its present generation."""
    status = stored.get("status") or {}
    found = {(each["type"], each["status"]) for each in status.get("conditions") or ()}
    is_observed = status.get("observedGeneration", 0) >= stored["metadata"].get("generation", 0)
    return is_observed and ("Ready", "True") in found


def _cause(stored: Mapping[str, Any]) -> str:
    """Return why a deployment is not ready, in the words of the operator."""
    status = stored.get("status") or {}
    if status.get("observedGeneration", 0) < stored["metadata"].get("generation", 0):
        return "no operator has looked at it yet"
    ready = [each for each in status.get("conditions") or () if each["type"] == "Ready"]
    return ready[0].get("message", "") if ready else "no operator has looked at it yet"


def _yaml(document: Mapping[str, Any]) -> str:
    module = distribution.load_extra("dynamo.sdk.yaml_file", feature="a deployment", extra="sdk")
    return str(module.write(dict(document)))
