"""Other forms of a DynamoGraphDeployment, turned into the one that a cluster serves (v1alpha1).

The *short form* of an article (`apiVersion: v1alpha1.dynamo.nvidia.com`) names a model, an engine and a mode. Its
apiVersion has no slash, so it belongs to Kubernetes's own group: no cluster can serve it. *v1beta1* is the later form
with pod templates. What cannot be expressed is said in notes, never dropped in silence; docs/kubernetes.md has a table.
"""  # decider

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.operator import api_types, versions

Document = dict[str, Any]
SHORT_VERSION = f"{api_types.VERSION}.dynamo.{api_types.GROUP}"
_IMAGE = "nvidia/ai-dynamo/{}-runtime"
_IMAGE_NAMES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrtllm"}
_PREFIXES = {"vllm": "Vllm", "sglang": "SGLang", "trtllm": "Trtllm"}
_SHORT_FIELDS = {
    "version", "backend", "model", "deployment_mode", "frontend", "workers", "kvbm", "planner",
}  # fmt: skip
_TARGETS = {"target_ttft_ms": "ttft", "target_itl_ms": "itl"}  # of a planner, with its flags
_HOST_GB, _DISK_GB = 16, 100  # of KV cache tiers without a given size
_DISK_PATH = "/kv-cache"


class _ShortPart(msgspec.Struct):
    replicas: Annotated[int, msgspec.Meta(ge=0)] = 1
    resources: dict[str, dict[str, str | int | float]] | None = None


class _ShortTiers(msgspec.Struct):
    enabled: bool | None = None
    storage_tiers: list[str] = []


class _ShortPlanner(msgspec.Struct):
    scaling_mode: Literal["load_based", "sla_based"] = "load_based"


class _ShortSpec(msgspec.Struct):
    """The fields of the short form that have parts."""

    model: str | None = None
    backend: str | None = None
    frontend: _ShortPart | None = None
    workers: _ShortPart | None = None
    kvbm: _ShortTiers | None = None
    planner: _ShortPlanner | None = None


@dataclass(frozen=True, slots=True)
class ConvertedManifest:
    """A manifest that a cluster serves, and sentences on what is different from the given one."""

    document: Document
    notes: list[str] = field(default_factory=list)


def convert(document: Document) -> ConvertedManifest:
    """Return a manifest in the form that a cluster serves; others than graphs stay. Raises ConfigError."""
    is_graph = document.get("kind") == "DynamoGraphDeployment"
    metadata = document.get("metadata")
    if is_graph and not isinstance(metadata, dict | None):
        raise errors.ConfigError(
            f"DynamoGraphDeployment: metadata: expected keys with values, got {metadata!r:.60}"
        )
    if is_graph and document.get("apiVersion") == SHORT_VERSION:
        return _convert_short(document)
    if is_graph and document.get("apiVersion") == versions.BETA_API_VERSION:
        return _convert_later(document)
    return ConvertedManifest(document)


def _check_form(name: Any, spec: Any) -> None:
    """Raise ConfigError for a short form with a part of another type."""
    try:
        msgspec.convert(spec, _ShortSpec)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$", "`spec", 1)
        raise errors.ConfigError(f"DynamoGraphDeployment {name}: {text}") from error


def _find_idle(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of a short form that is left out or has no effect."""
    planner, kvbm = spec.get("planner") or {}, spec.get("kvbm") or {}
    for part, fields, known_names in (
        ("spec", spec, _SHORT_FIELDS),
        ("spec.kvbm", kvbm, {"enabled", "storage_tiers"}),
        ("spec.planner", planner, {"enabled", "scaling_mode", *_TARGETS}),
    ):
        for name in sorted(fields.keys() - known_names):
            yield f"{part}.{name}: there is no such field; it is left out"
    if planner.get("scaling_mode", "load_based") == "load_based":
        for name in sorted(planner.keys() & _TARGETS.keys()):
            yield f"spec.planner.{name}: has no effect without scaling_mode: sla_based"


def _convert_short(document: Document) -> ConvertedManifest:
    metadata, spec = document.get("metadata") or {}, document.get("spec") or {}
    name = metadata.get("name")
    _check_form(name, spec)
    model, backend = spec.get("model"), spec.get("backend", "vllm")
    if not model:
        raise errors.ConfigError(
            f"DynamoGraphDeployment {name}: spec.model is missing: name the model, such as model: Qwen/Qwen3-0.6B"
        )
    if backend not in _PREFIXES:
        raise errors.ConfigError(
            f"DynamoGraphDeployment {name}: spec.backend: expected {', '.join(_PREFIXES)}, got {backend}"
        )
    mode = spec.get("deployment_mode", "aggregated")
    if mode not in ("aggregated", "disaggregated"):
        raise errors.ConfigError(
            f"DynamoGraphDeployment {name}: spec.deployment_mode: expected aggregated or disaggregated, got {mode}"
        )
    notes = [*_find_idle(spec)]
    tag = str(spec.get("version", "")).removeprefix("v")
    image = _IMAGE.format(_IMAGE_NAMES[backend]) + (f":{tag}" if tag else "")
    services = {"Frontend": _short_service("frontend", spec.get("frontend"), image, notes)}
    roles = {"Decode": ""} | ({"Prefill": "prefill"} if mode == "disaggregated" else {})
    if mode == "disaggregated" and backend != "vllm":
        notes.append(f"spec.deployment_mode: prefill workers of {backend} do not start here")
    for role, disaggregation in roles.items():
        service = _short_service("worker", spec.get("workers"), image, notes)
        service.setdefault("resources", {}).setdefault("limits", {}).setdefault("gpu", "1")
        main = service["extraPodSpec"]["mainContainer"]
        main["command"] = ["python3", "-m", f"dynamo.{backend}"]
        main["args"] = ["--model", model]
        if disaggregation:
            main["args"] += ["--is-prefill-worker"]
            service["subComponentType"] = disaggregation
        elif mode == "disaggregated":
            service["subComponentType"] = "decode"
        if role == "Prefill" or mode == "aggregated":
            _add_tiers(service, spec.get("kvbm") or {}, backend, notes)
        services[f"{_PREFIXES[backend]}{role}Worker"] = service
    if (planner := spec.get("planner") or {}).get("enabled"):
        services["Planner"] = _make_planner(planner, backend, mode, image, notes)
    return ConvertedManifest(
        {
            "apiVersion": api_types.API_VERSION,
            "kind": "DynamoGraphDeployment",
            "metadata": metadata,
            "spec": {"backendFramework": backend, "services": services},
        },
        notes,
    )


def _short_service(
    role: str, given_fields: Mapping[str, Any] | None, image: str, notes: list[str]
) -> Document:
    """Return a service with the replicas and resources of a short one."""
    fields = given_fields or {}
    service: Document = {"componentType": role, "replicas": fields.get("replicas", 1)}
    if resources := fields.get("resources"):
        service["resources"] = {
            kind: {
                "gpu" if name == "nvidia.com/gpu" else name: str(amount)
                for name, amount in amounts.items()
            }
            for kind, amounts in resources.items()
        }
    for name in sorted(fields.keys() - {"replicas", "resources"}):
        field_name = "workers" if role == "worker" else role
        note = f"spec.{field_name}.{name}: there is no such field; it is left out"
        if note not in notes:
            notes.append(note)
    service["extraPodSpec"] = {"mainContainer": {"image": image}}
    return service


def _add_tiers(service: Document, kvbm: Mapping[str, Any], backend: str, notes: list[str]) -> None:
    """Give the workers that compute prompts the tiers of `kvbm.storage_tiers`; hbm is the engine's own."""
    if not kvbm.get("enabled"):
        return
    if backend == "trtllm":
        notes.append("spec.kvbm: TensorRT-LLM has no cache tiers here; left out")
        return
    tiers = kvbm.get("storage_tiers", ["hbm", "host_dram"])
    main = service["extraPodSpec"]["mainContainer"]
    envs: list[Document] = []
    if "host_dram" in tiers:
        envs.append({"name": "DYN_KVBM_CPU_CACHE_GB", "value": str(_HOST_GB)})
    if "nvme_ssd" in tiers:
        envs += [
            {"name": "DYN_KVBM_DISK_CACHE_GB", "value": str(_DISK_GB)},
            {"name": "DYN_KVBM_DISK_CACHE_DIR", "value": _DISK_PATH},
        ]
        service["extraPodSpec"]["volumes"] = [
            {"name": "kv-cache", "emptyDir": {"sizeLimit": f"{_DISK_GB}Gi"}}
        ]
        main["volumeMounts"] = [{"name": "kv-cache", "mountPath": _DISK_PATH}]
    is_sender = backend == "vllm" and "--is-prefill-worker" in main["args"]
    main["args"] += ["--connector", "kvbm", *(["nixl"] if is_sender else [])]
    service["envs"] = envs
    notes.append(
        f"spec.kvbm: sizes are not in the short form: {_HOST_GB} GB of host memory and {_DISK_GB} GB of disk stand for"
        " them; raise the memory limit with them"
    )
    if unknown := [str(tier) for tier in tiers if tier not in ("hbm", "host_dram", "nvme_ssd")]:
        notes.append(f"spec.kvbm.storage_tiers: {', '.join(unknown)} is no tier here; left out")
    if backend == "vllm":
        notes.append("spec.kvbm: vLLM on a GPU needs --connector lmcache, with nixl for prefill")


def _make_planner(
    planner: Mapping[str, Any], backend: str, mode: str, image: str, notes: list[str]
) -> Document:
    is_sla = planner.get("scaling_mode", "load_based") == "sla_based"
    args = ["--environment=kubernetes", f"--backend={backend}"]
    args += [f"--mode={'disagg' if mode == 'disaggregated' else 'agg'}"]
    args += [f"--{flag}={planner[key]}" for key, flag in _TARGETS.items() if key in planner]
    service = _short_service("planner", None, image, notes)
    if is_sla:
        args += ["--policy=sla", "--profile-results-dir=/data/profiling_results"]
        service["volumeMounts"] = [{"name": "dynamo-pvc", "mountPoint": "/data"}]
        notes.append(
            "spec.planner: scaling by targets needs a profile of the model (python -m dynamo.profiler) in the"
            " PersistentVolumeClaim dynamo-pvc, which must exist"
        )
    main = service["extraPodSpec"]["mainContainer"]
    main |= {"command": ["python3", "-m", "dynamo.planner"], "args": args}
    return service


def _convert_later(document: Document) -> ConvertedManifest:
    """Turn the components of v1beta1 with their pod templates into services, without fields that there are not."""
    versions.check_form(document)
    spec = dict(document.get("spec") or {})
    unknown = sorted(spec.keys() - _field_names(versions.BetaGraphSpec))
    notes = [
        f"spec.{name}: {api_types.API_VERSION} has no such field; it is left out"
        for name in unknown
    ]
    known = {key: value for key, value in spec.items() if key not in unknown}
    components = []
    for component in spec.get("components") or ():
        unknown = sorted(component.keys() - _field_names(versions.BetaComponent))
        notes += [
            f"component {component['name']}: {key} has no counterpart; it is left out"
            for key in unknown
        ]
        components.append({key: value for key, value in component.items() if key not in unknown})
    if components:
        known["components"] = components
    converted = versions.convert({**document, "spec": known}, api_types.API_VERSION)
    return ConvertedManifest(converted, notes)


def _field_names(kind: type) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}
