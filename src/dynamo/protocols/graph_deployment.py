"""The DynamoGraphDeployment of a profiled model: the profiler writes it to a file, the operator creates it on request.

The last line of a profiler's log is a `ProfiledSize` in JSON, with further fields; the operator reads it there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

_API_VERSION = "nvidia.com/v1alpha1"
KIND = "DynamoGraphDeployment"
_FRONTEND_IMAGE = "nvidia/ai-dynamo/dynamo-frontend"


class ProfiledSize(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers of which kind a profiler recommends."""

    mode: Literal["agg", "disagg"]
    num_prefill: int
    num_decode: int  # or aggregated
    gpus_per_worker: int = 1
    unreachable: str = ""  # which target cannot be met, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplate:
    """The container of each worker; the framework names its image where none is given."""

    engine: str
    framework: str
    model: str | None = None
    flags: Sequence[str] = ()
    image: str | None = None
    has_gpus: bool = True


def make_graph(
    metadata: Mapping[str, Any], worker: WorkerTemplate, size: ProfiledSize
) -> dict[str, Any]:
    """Return a deployment of a frontend and as many workers as the size has."""
    services = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "extraPodSpec": {"mainContainer": {"image": _FRONTEND_IMAGE}},
        },
        "Worker": _make_service(worker, size.num_decode, size.gpus_per_worker),
    }
    if size.mode == "disagg":
        services["Worker"]["subComponentType"] = "decode"
        prefill = _make_service(
            worker, size.num_prefill, size.gpus_per_worker, "--is-prefill-worker"
        )
        services["PrefillWorker"] = {**prefill, "subComponentType": "prefill"}
    return {
        "apiVersion": _API_VERSION,
        "kind": KIND,
        "metadata": dict(metadata),
        "spec": {"services": services, "backendFramework": worker.framework},
    }


def _make_service(
    worker: WorkerTemplate, replicas: int, num_gpus: int, *role: str
) -> dict[str, Any]:
    model = ["--model", worker.model] if worker.model else []
    container: dict[str, Any] = {"command": ["python3", "-m", f"dynamo.{worker.engine}"]}
    if args := [*model, *worker.flags, *role]:
        container["args"] = args
    if worker.image:
        container["image"] = worker.image
    service: dict[str, Any] = {"componentType": "worker", "replicas": replicas}
    if worker.model:
        service["modelRef"] = {"name": worker.model}
    service["extraPodSpec"] = {"mainContainer": container}
    if worker.has_gpus:
        service["resources"] = {"limits": {"gpu": str(num_gpus)}}
    return service
