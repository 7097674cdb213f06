"""The pods of a component: defaults by its role, what lets pods reach each other, and what the user lays over it.

Processes listen on loopback and discover by files unless told otherwise, so each pod is told its addresses, how to
discover, and the secret of its namespace. The user's `extraPodSpec` goes beyond everything here.

The main container's last log lines become its termination message (`FallbackToLogsOnError`): so a crash loop can be
explained without a right to read logs. A Secret of `envFromSecret` may be absent: a model that lies on the node needs
no token, and the status names the Secret.

The commands of engines say which engine a container runs, and how one replica is spread over several nodes.
"""  # decider

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo.base import draining, errors
from dynamo.operator import api_types, objects
from dynamo.operator.objects import Object
from dynamo.operator.settings import OperatorConfig

HTTP_PORT, SYSTEM_PORT, PLANNER_PORT = 8000, 9090, 9085
PLANNER_ACCOUNT = "planner-serviceaccount"
MAIN, SHARED_MEMORY, TOKEN_KEY = "main", "shared-memory", "token"
_MIB = 2**20
_LEAST_SHM, _MOST_SHM = 512 * _MIB, 8192 * _MIB
_UNITS = {"": 1, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_UNITS |= {f"{unit}i": 1024 ** (power + 1) for power, unit in enumerate("KMGTPE")}
_LEAST_GRACE_S, _MARGIN_S, _DRAIN_S = 60, 30, 30
_LEAVE_S = 5  # until no proxy of a cluster sends requests to a frontend that ends any more
FRAMEWORK_IMAGES = {
    "vllm": "nvidia/ai-dynamo/vllm-runtime",
    "sglang": "nvidia/ai-dynamo/sglang-runtime",
    "trtllm": "nvidia/ai-dynamo/tensorrtllm-runtime",
}
_VOLUME_GROUP = {"fsGroup": 65532, "fsGroupChangePolicy": "OnRootMismatch"}  # of the images
RESTRICTED_POD = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_COMPILATION_CACHE = {"vllm": "/var/cache/vllm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceComponent:
    """A component to make pods for: its spec, with the names that it lives under."""

    name: str  # of its Deployment and, for a frontend, its Service
    namespace: str
    graph: str
    dynamo_namespace: str
    spec: api_types.ComponentSpec
    settings: OperatorConfig
    discovery: str  # etcd or kubernetes
    generation: str = ""  # eight digits of the hash of the graph's workers

    @property
    def service(self) -> str:
        """Return the name of the service within its graph."""
        return self.spec.service_name or self.spec.dynamo_component or self.name

    @property
    def service_account(self) -> str | None:
        """Return the account of the pods, None for the namespace's default."""
        if self.spec.role == "planner":
            return PLANNER_ACCOUNT
        return discovery_account(self.graph) if self.discovery == "kubernetes" else None

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of the component's objects and pods."""
        labels = {
            objects.SELECTOR_LABEL: self.name,
            objects.GRAPH_LABEL: self.graph,
            objects.COMPONENT_LABEL: self.service,
            objects.NAMESPACE_LABEL: self.dynamo_namespace,
            objects.MANAGED_BY: objects.FIELD_MANAGER,
            objects.METRICS_LABEL: "true",
        }
        if self.spec.role:
            labels[objects.TYPE_LABEL] = self.spec.role
        if self.spec.role == "worker":
            labels[objects.CLASS_LABEL] = "worker"
        if self.spec.sub_component_type:
            labels[objects.SUBTYPE_LABEL] = self.spec.sub_component_type
        if self.discovery == "kubernetes":
            labels[objects.DISCOVERY_LABEL] = "kubernetes"
        return {**(self.spec.labels or {}), **labels}

    @property
    def main_overrides(self) -> Object:
        """Return what the user says of the main container."""
        return dict((self.spec.extra_pod_spec or {}).get("mainContainer") or {})

    @property
    def framework(self) -> str | None:
        """Return the engine: as declared, else as the command shows."""
        return self.spec.backend_framework or detect_framework(self.main_overrides)


def token_secret_name(dynamo_namespace: str) -> str:
    """Return the name of the Secret with the cluster token of a namespace; `_` is no letter of such names."""
    return f"{dynamo_namespace.replace('_', '-').strip('-')}-cluster-token"


def discovery_account(graph: str) -> str:
    """Return the name of the ServiceAccount by which pods of a graph discover each other."""
    return f"{graph}-k8s-service-discovery"


def parse_quantity(quantity: int | str) -> float:
    """Return the value of a quantity such as 250Gi. Raises ConfigError for one that has no value."""
    match = re.fullmatch(r"((?=\.?\d)\d*\.?\d*)([eE][+-]?\d+)?([numkKMGTPE]?i?)", str(quantity))
    if match is None or match[3] not in _UNITS:
        raise errors.ConfigError(f"{quantity}: expected an amount such as 16Gi or 500M")
    return float(match[1] + (match[2] or "")) * _UNITS[match[3]]


def make_template(component: ServiceComponent) -> Object:
    """Return the pod template of a component's Deployment. Raises ConfigError for a spec that cannot run."""
    spec = component.spec
    main = make_main_container(component)
    extra_spec = spec.extra_pod_spec or {}
    group = {} if "securityContext" in extra_spec else _VOLUME_GROUP
    restriction = RESTRICTED_POD if component.settings.restricted_security_context else {}
    pod: Object = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace_period_s(main),
        "securityContext": {**group, **restriction},
        "containers": [main],
        "volumes": make_volumes(component),
    }
    if component.service_account:
        pod["serviceAccountName"] = component.service_account
    extra = {key: value for key, value in extra_spec.items() if key != "mainContainer"}
    pod = objects.merge(pod, extra)
    metadata = spec.extra_pod_metadata or api_types.ExtraPodMetadata()
    labels = {**(metadata.labels or {}), **component.labels}
    template: Object = {"metadata": {"labels": labels}, "spec": pod}
    if annotations := {**(spec.annotations or {}), **(metadata.annotations or {})}:
        template["metadata"]["annotations"] = annotations
    template["metadata"]["labels"] = {**labels, objects.TEMPLATE_LABEL: objects.digest(template)}
    return template


def make_main_container(component: ServiceComponent) -> Object:
    """Return the main container: defaults of its role under what the user says. Raises ConfigError."""
    spec, overrides = component.spec, component.main_overrides
    defaults: Object = {
        "name": MAIN,
        **default_command(component),
        "ports": make_ports(spec.role),
        "resources": render_resources(spec.resources or api_types.ResourceDemand()),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **make_probes(spec),
        "volumeMounts": make_volume_mounts(component),
    }
    if component.settings.restricted_security_context:
        defaults["securityContext"] = RESTRICTED_CONTAINER
    if spec.env_from_secret:
        secret = {"name": spec.env_from_secret, "optional": True}
        overrides["envFrom"] = [{"secretRef": secret}, *(overrides.get("envFrom") or ())]
    env = [
        *make_environment(component),
        *(entry.render() for entry in spec.envs or ()),
        *overrides.pop("env", ()),
    ]
    image = overrides.pop("image", None) or FRAMEWORK_IMAGES.get(component.framework or "")
    if not image:
        raise errors.ConfigError(
            f"service {component.service}: expected an image in extraPodSpec.mainContainer.image;"
            " there is a default only where backendFramework or the command names the engine"
        )
    overrides["ports"] = objects.name_ports(overrides.get("ports") or (), defaults["ports"])
    container = objects.merge(defaults, overrides)
    container["image"] = component.settings.substitute_image(image)
    container["env"] = objects.merge_lists(env, (), "name")
    container |= replace_shell(container)
    return {key: value for key, value in container.items() if value not in ([], {}, None)}


def default_command(component: ServiceComponent) -> Object:
    """Return the default command. Raises ConfigError for a worker without any."""
    overrides = component.main_overrides
    if overrides.get("command"):
        return {}
    match component.spec.role:
        case "frontend":
            return {"command": ["python3", "-m", "dynamo.frontend"]}
        case "planner" if not overrides.get("args"):
            return {"command": ["python3", "-m", "dynamo.planner"]}
        case "worker" if not overrides.get("args"):
            raise errors.ConfigError(
                f"service {component.service}: a worker needs its command in extraPodSpec.mainContainer,"
                " such as args: [python3 -m dynamo.vllm --model Qwen/Qwen3-0.6B]"
            )
        case _:
            return {"command": ["/bin/sh", "-c"]} if overrides.get("args") else {}


def make_ports(role: str) -> list[Object]:
    """Return the ports of a role."""
    number_by_name = {
        "frontend": {"http": HTTP_PORT},
        "worker": {"system": SYSTEM_PORT},
        "planner": {"metrics": PLANNER_PORT},
    }.get(role, {})
    return [
        {"name": name, "containerPort": number, "protocol": "TCP"}
        for name, number in number_by_name.items()
    ]


def make_probes(spec: api_types.ServiceSpec) -> Object:
    """Return the probes of a role; those of the user replace them.

    A frontend is alive without workers, but ready only with them. Its original probes waited a minute before the
    first look, and restarted frontends that had no workers.
    """
    probes: Object = {}
    if spec.role == "frontend":
        probes = {
            "livenessProbe": _http_probe("/live", "http", period=10, timeout=30, failures=10),
            "readinessProbe": _http_probe("/health", "http", period=5, timeout=30, failures=3),
        }
    elif spec.role == "worker":
        probes = {
            "livenessProbe": _http_probe("/live", "system", period=5, timeout=30, failures=1),
            "readinessProbe": _http_probe("/health", "system", period=10, timeout=30, failures=60),
            "startupProbe": _http_probe("/live", "system", period=10, timeout=5, failures=60),
        }
    if spec.liveness_probe:
        probes["livenessProbe"] = spec.liveness_probe
    if spec.readiness_probe:
        probes["readinessProbe"] = spec.readiness_probe
    return probes


def _http_probe(path: str, port: str, *, period: int, timeout: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def make_environment(component: ServiceComponent) -> list[Object]:
    """Return the variables that every pod gets, then those of its role."""
    settings = component.settings
    values = {
        "DYN_NAMESPACE": component.dynamo_namespace,
        "DYN_PARENT_DGD_K8S_NAME": component.graph,
        "DYN_PARENT_DGD_K8S_NAMESPACE": component.namespace,
        "DYN_DISCOVERY_BACKEND": component.discovery,
    }
    if settings.nats_addr:
        values["NATS_SERVER"] = settings.nats_addr
    if settings.etcd_addr:
        values["ETCD_ENDPOINTS"] = settings.etcd_addr
    match component.spec.role:
        case "frontend":
            values |= {
                "DYNAMO_PORT": str(HTTP_PORT),
                "DYN_HTTP_PORT": str(HTTP_PORT),
                "DYN_HTTP_HOST": "0.0.0.0",
                "DYN_ALLOWED_HOSTS": ",".join(service_host_names(component)),
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(_LEAVE_S),
                "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(_DRAIN_S),
            }
        case "worker":
            values |= {
                "DYN_SYSTEM_ENABLED": "true",
                "DYN_SYSTEM_HOST": "0.0.0.0",
                "DYN_SYSTEM_PORT": str(SYSTEM_PORT),
                "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
            }
        case "planner":
            values |= {"DYN_PLANNER_HOST": "0.0.0.0", "PLANNER_PROMETHEUS_PORT": str(PLANNER_PORT)}
    for mount in component.spec.volume_mounts or ():
        if mount.use_as_compilation_cache and component.framework == "vllm":
            values["VLLM_CACHE_ROOT"] = mount.mount_point or _COMPILATION_CACHE["vllm"]
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
        "DYN_TCP_RPC_HOST": "status.podIP",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "status.podIP",
    }
    secret = {"name": token_secret_name(base_namespace(component)), "key": TOKEN_KEY}
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ),
        {"name": "DYN_CLUSTER_TOKEN", "valueFrom": {"secretKeyRef": secret}},
    ]


def merge_environments(
    common: list[api_types.EnvironmentVariable] | None,
    own: list[api_types.EnvironmentVariable] | None,
) -> list[api_types.EnvironmentVariable] | None:
    """Return the variables of the graph with those of a service over them."""
    merged = {entry.name: entry for entry in [*(common or ()), *(own or ())]}
    return list(merged.values()) or None


def base_namespace(component: ServiceComponent) -> str:
    """Return the dynamo namespace without the suffix of the generation: all generations share a token."""
    return component.dynamo_namespace.removesuffix(f"-{component.generation}")


def service_host_names(component: ServiceComponent) -> list[str]:
    """Return the names by which browsers may reach a frontend."""
    names = [component.name]
    for domain in (component.namespace, "svc", "cluster", "local"):
        names.append(f"{names[-1]}.{domain}")
    ingress = component.spec.ingress
    if ingress and ingress.enabled:
        names.append(ingress_host(component))
    return [name for name in dict.fromkeys(names) if not name.endswith(".cluster")]


def ingress_host(component: ServiceComponent) -> str:
    """Return the host name under which an Ingress leads to a component."""
    ingress = component.spec.ingress or api_types.IngressSpec()
    host = f"{ingress.host_prefix or ''}{ingress.host or component.name}"
    suffix = ingress.host_suffix or component.settings.ingress_host_suffix
    return f"{host}.{suffix.lstrip('.')}" if suffix and "." not in host else host


def render_resources(demand: api_types.ResourceDemand) -> Object:
    """Return the resources of a container. A device must be limited, and its request may not differ from its limit."""
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    for rendered, amounts in ((requests, demand.requests), (limits, demand.limits)):
        if amounts is not None:
            values = {"cpu": amounts.cpu, "memory": amounts.memory, "nvidia.com/gpu": amounts.gpu}
            values |= amounts.custom or {}
            rendered |= {name: value for name, value in values.items() if value is not None}
    for name in {**requests, **limits}:
        if "/" in name and "kubernetes.io/" not in name:
            limits[name] = limits.get(name) or requests.get(name, "")
            if name in requests:
                requests[name] = limits[name]
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def make_volumes(component: ServiceComponent) -> list[Object]:
    """Return the volumes of a pod: claims, and memory for /dev/shm."""
    spec = component.spec
    claims = {mount.name for mount in spec.volume_mounts or ()}
    if spec.pvc and spec.pvc.name:
        claims.add(spec.pvc.name)
    volumes = [
        {"name": name, "persistentVolumeClaim": {"claimName": name}} for name in sorted(claims)
    ]
    if _has_shared_memory(spec):
        size = shared_memory_size(spec)
        volumes.append({"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    return volumes


def make_volume_mounts(component: ServiceComponent) -> list[Object]:
    """Return where the volumes are mounted. Raises ConfigError for one without a place."""
    spec = component.spec
    mounts = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}] if _has_shared_memory(spec) else []
    if spec.pvc and spec.pvc.name and spec.pvc.mount_point:
        mounts.append({"name": spec.pvc.name, "mountPath": spec.pvc.mount_point})
    for mount in spec.volume_mounts or ():
        path = mount.mount_point
        if mount.use_as_compilation_cache:
            path = path or _COMPILATION_CACHE.get(component.framework or "")
        if not path:
            raise errors.ConfigError(
                f"service {component.service}: volumeMounts {mount.name}: expected a mountPoint"
            )
        mounts.append({"name": mount.name, "mountPath": path})
    return mounts


def _has_shared_memory(spec: api_types.ServiceSpec) -> bool:
    is_disabled = spec.shared_memory is not None and bool(spec.shared_memory.disabled)
    main = (spec.extra_pod_spec or {}).get("mainContainer") or {}
    return not is_disabled and not any(
        mount.get("mountPath") == "/dev/shm" for mount in main.get("volumeMounts", ())
    )


def shared_memory_size(spec: api_types.ServiceSpec) -> str:
    """Return the size of /dev/shm: as asked, else a quarter of the memory limit, from 512Mi to 8Gi."""
    if spec.shared_memory is not None and spec.shared_memory.size is not None:
        return str(spec.shared_memory.size)
    limits = spec.resources.limits if spec.resources else None
    memory = parse_quantity(limits.memory) if limits and limits.memory else 0
    return f"{int(min(_MOST_SHM, max(_LEAST_SHM, memory / 4))) // _MIB}Mi"


def grace_period_s(main: Mapping[str, Any]) -> int:
    """Return the seconds that a pod gets to end: what it takes to drain, and some to spare."""
    values = {str(entry.get("name")): entry.get("value") for entry in main.get("env", ())}
    words = join_command({**main}).split()

    def read_s(setting: draining.DrainSetting, default_s: float = 0.0) -> int:
        value: Any = values.get(setting.variable) or default_s
        try:
            value = setting.read_s(words, {setting.variable: str(float(value))})
            return round(float(value))
        except (TypeError, ValueError, OverflowError) as error:  # infinity is one, too
            names = f"{setting.variable}, {setting.flag}"
            raise errors.ConfigError(f"{names}: expected seconds, got {value!r}") from error

    drain_s = max(read_s(draining.WORKER, _DRAIN_S), read_s(draining.FRONTEND))
    return max(_LEAST_GRACE_S, drain_s + read_s(draining.GRACE) + _MARGIN_S)


_MODULE = re.compile(r"(?s)(?>.*?python[0-9.]*(?=\s)).*(?<=\s)-m\s++dynamo\.(vllm|sglang|trtllm)\b")
_SHELL = ("/bin/sh", "-c")
# After commands joined by `&&`: one of Python, up to the end, with no `;`, `&`, `|` or line end outside of a `\\`.
# Like the one above it tries nothing twice: a command may be long, and the objects of others wait until it is read.
_LAST_COMMAND = re.compile(
    r"((?:[^;|&\n]*+&&)*+\s*+)(python[0-9.]*+\s(?:>&|[^;&|\n\\]|\\.)*+\s*+)", re.DOTALL
)
_RAY_PORT, _DIST_PORT = 6379, 29500


class Join(NamedTuple):
    """How a node of a group names its leader and itself: by variables that the group's controller sets."""

    leader: str
    rank: str  # of a node other than the leader, as its shell computes it


LEADER_WORKER_SET = Join("$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)")
GROVE = Join(
    "$(GROVE_PCS_NAME)-$(GROVE_PCS_INDEX)-ldr-0.$(GROVE_HEADLESS_SERVICE)",
    "$((GROVE_PCLQ_POD_INDEX + 1))",
)


def detect_framework(container: dict[str, Any]) -> str | None:
    """Return the engine that the command of a container starts: vllm, sglang, trtllm or None."""
    match = _MODULE.match(join_command(container))
    return match[1] if match else None


def join_command(container: dict[str, Any]) -> str:
    """Return command and arguments of a container as one line of a shell."""
    words = _words(container)
    return words[2] if _is_shell(words) else shlex.join(words)


def replace_shell(container: dict[str, Any]) -> dict[str, Sequence[str]]:
    """Return the arguments, if a shell only waits for the command of Python that it runs: that one takes its place.

    A shell in the first process of a container passes no SIGTERM on, so that what the pod answers would be cut off.
    """
    words = _words(container)
    if not _is_shell(words) or not (match := _LAST_COMMAND.fullmatch(words[2])):
        return {}
    in_command = len(container.get("command", ()))
    words[2] = f"{match[1]}exec {match[2]}"
    return {"command": words[:in_command], "args": words[in_command:]}


def _words(container: dict[str, Any]) -> list[str]:
    return [str(word) for key in ("command", "args") for word in container.get(key) or ()]


def _is_shell(words: Sequence[str]) -> bool:
    return len(words) > 2 and words[0].endswith("sh") and words[1] == "-c"


def as_shell(line: str) -> dict[str, Sequence[str]]:
    """Return command and arguments that run a line in a shell, which the last of its commands replaces."""
    container = {"command": list(_SHELL), "args": [line]}
    return {**container, **replace_shell(container)}


def spread_over_nodes(
    component: ServiceComponent, container: dict[str, Any], num_nodes: int, join: Join
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the container of the leader and that of the other nodes. Raises ConfigError for engines that cannot."""
    line, framework = join_command(container), component.framework
    without_probes = {key: value for key, value in container.items() if not key.endswith("Probe")}
    if framework == "vllm":
        follow = f"exec ray start --address={join.leader}:{_RAY_PORT} --block"
        lead = f"ray start --head --port={_RAY_PORT} && {line}"
        return {**container, **as_shell(lead)}, {**without_probes, **as_shell(follow)}
    if framework == "sglang":
        flags = f"--dist-init-addr {join.leader}:{_DIST_PORT} --nnodes {num_nodes} --node-rank"
        lead, follow = f"{line} {flags} 0", f"{line} {flags} {join.rank}"
        return {**container, **as_shell(lead)}, {**without_probes, **as_shell(follow)}
    raise errors.ConfigError(
        f"service {component.service}: multinode: the engine is {framework or 'unknown'}; expected `python3 -m"
        " dynamo.vllm` or `dynamo.sglang` in the command, whose nodes join by Ray and by --dist-init-addr"
    )
