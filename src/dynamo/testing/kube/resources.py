"""The resources of an API server: those that are built in, and those of custom resource definitions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo.testing.kube import builtin_schemas

Object = dict[str, Any]

# apiVersion, kind, plural, short names, flags: n namespaced, s status subresource, r scale subresource, g generation
_BUILTIN = """
v1 Pod pods po nsg
v1 Service services svc ns
v1 ConfigMap configmaps cm n
v1 Secret secrets - n
v1 ServiceAccount serviceaccounts sa n
v1 PersistentVolumeClaim persistentvolumeclaims pvc ns
v1 PersistentVolume persistentvolumes pv s
v1 Namespace namespaces ns s
v1 Node nodes no s
v1 Event events ev n
v1 Endpoints endpoints ep n
v1 ResourceQuota resourcequotas quota ns
v1 LimitRange limitranges limits n
apps/v1 Deployment deployments deploy nsrg
apps/v1 ReplicaSet replicasets rs nsrg
apps/v1 StatefulSet statefulsets sts nsrg
apps/v1 DaemonSet daemonsets ds nsg
apps/v1 ControllerRevision controllerrevisions - n
batch/v1 Job jobs - nsg
batch/v1 CronJob cronjobs cj nsg
autoscaling/v2 HorizontalPodAutoscaler horizontalpodautoscalers hpa ns
networking.k8s.io/v1 Ingress ingresses ing nsg
networking.k8s.io/v1 IngressClass ingressclasses - g
networking.k8s.io/v1 NetworkPolicy networkpolicies netpol ng
policy/v1 PodDisruptionBudget poddisruptionbudgets pdb nsg
coordination.k8s.io/v1 Lease leases - n
discovery.k8s.io/v1 EndpointSlice endpointslices - ng
events.k8s.io/v1 Event events ev n
storage.k8s.io/v1 StorageClass storageclasses sc -
scheduling.k8s.io/v1 PriorityClass priorityclasses pc g
rbac.authorization.k8s.io/v1 Role roles - n
rbac.authorization.k8s.io/v1 RoleBinding rolebindings - n
rbac.authorization.k8s.io/v1 ClusterRole clusterroles - -
rbac.authorization.k8s.io/v1 ClusterRoleBinding clusterrolebindings - -
apiextensions.k8s.io/v1 CustomResourceDefinition customresourcedefinitions crd,crds sg
apiregistration.k8s.io/v1 APIService apiservices - s
admissionregistration.k8s.io/v1 ValidatingWebhookConfiguration validatingwebhookconfigurations - g
admissionregistration.k8s.io/v1 MutatingWebhookConfiguration mutatingwebhookconfigurations - g
"""
_CATEGORIES = {
    **dict.fromkeys(
        (
            *("pods", "services", "deployments", "replicasets", "statefulsets", "daemonsets"),
            *("jobs", "cronjobs", "horizontalpodautoscalers"),
        ),
        ("all",),
    ),
    **dict.fromkeys(
        (
            *("customresourcedefinitions", "apiservices"),
            *("validatingwebhookconfigurations", "mutatingwebhookconfigurations"),
        ),
        ("api-extensions",),
    ),
}


@dataclass(frozen=True, slots=True)
class ScalePaths:
    """Where the scale subresource finds its fields, as JSON paths that begin with a point."""

    spec: str = ".spec.replicas"
    status: str = ".status.replicas"
    selector: str = ""

    def change(self, replicas: int) -> Any:
        """Return the merge patch that sets the replicas."""
        patch: Any = replicas
        for name in reversed(self.spec.strip(".").split(".")):
            patch = {name: patch}
        return patch


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiResource:
    """One version of one resource. `schema` has all fields of a custom resource, and else only merge keys."""

    group: str
    version: str
    kind: str
    plural: str
    singular: str
    list_kind: str
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    is_namespaced: bool = True
    has_status: bool = False
    has_generation: bool = True
    scale: ScalePaths | None = None
    schema: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[Object, ...] = ()
    selectable: tuple[str, ...] = ()
    is_custom: bool = False
    warning: str = ""  # of a deprecated version
    conversion: Mapping[str, Any] = field(default_factory=dict)  # the webhook's clientConfig

    @property
    def key(self) -> tuple[str, str]:
        """The name of the store's table, which all versions share."""
        if self.group == "events.k8s.io":
            return "", "events"
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        """The group and version as objects carry them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified_plural(self) -> str:
        """The plural with its group, as messages show it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified_kind(self) -> str:
        """The kind with its group, as messages show it."""
        return f"{self.kind}.{self.group}" if self.group else self.kind


def _parse_builtin(line: str) -> ApiResource:
    api_version, kind, plural, short_names, flags = line.split()
    group, _, version = api_version.rpartition("/")
    is_workload = "r" in flags
    return ApiResource(
        group=group,
        version=version,
        kind=kind,
        plural=plural,
        singular=kind.lower(),
        list_kind=f"{kind}List",
        short_names=() if short_names == "-" else tuple(short_names.split(",")),
        categories=_CATEGORIES.get(plural, ()),
        is_namespaced="n" in flags,
        has_status="s" in flags,
        has_generation="g" in flags,
        scale=ScalePaths(selector=".spec.selector") if is_workload else None,
        schema=builtin_schemas.load(api_version, kind),
    )


class ResourceRegistry:
    """All resources that are served, by group, version and plural."""

    def __init__(self) -> None:
        self._by_path: dict[tuple[str, str, str], ApiResource] = {}
        self._storage_version: dict[tuple[str, str], str] = {}
        for line in _BUILTIN.strip().splitlines():
            resource = _parse_builtin(line)
            self._by_path[resource.group, resource.version, resource.plural] = resource
        self.generation = 0  # changes with each definition that comes or goes

    def __iter__(self) -> Iterator[ApiResource]:
        return iter(tuple(self._by_path.values()))

    def find(self, group: str, version: str, plural: str) -> ApiResource | None:
        """Return the resource at this path, if it is served."""
        return self._by_path.get((group, version, plural))

    def require(self, group: str, plural: str, version: str = "v1") -> ApiResource:
        """Return the resource at this path, which is always served."""
        return self._by_path[group, version, plural]

    def find_kind(self, api_version: str, kind: str) -> ApiResource | None:
        for resource in self._by_path.values():
            if resource.kind == kind and resource.api_version == api_version:
                return resource
        return None

    def storage_api_version(self, resource: ApiResource) -> str:
        """Return the apiVersion in which objects of a resource are stored."""
        version = self._storage_version.get(resource.key)
        return f"{resource.group}/{version}" if version else resource.api_version

    def storage_resource(self, resource: ApiResource) -> ApiResource:
        """Return the resource in the version in which its objects are stored."""
        return replace(resource, version=self._storage_version.get(resource.key, resource.version))

    def resources_of(self, key: tuple[str, str]) -> list[ApiResource]:
        """Return the served versions of one table of the store, that of the storage first."""
        found = [resource for resource in self._by_path.values() if resource.key == key]
        return sorted(found, key=lambda entry: entry.version != self._storage_version.get(key))

    def define(self, definition: Object) -> None:
        """Serve the versions of an established custom resource definition instead of its earlier ones."""
        spec = definition["spec"]
        self.remove(spec["group"], spec["names"]["plural"])
        for version in spec["versions"]:
            if version.get("storage"):
                self._storage_version[spec["group"], spec["names"]["plural"]] = version["name"]
            if version.get("served"):
                resource = _custom_resource(spec, version)
                self._by_path[resource.group, resource.version, resource.plural] = resource

    def remove(self, group: str, plural: str) -> None:
        """Serve no version of this custom resource any more."""
        for path in [path for path in self._by_path if path[0] == group and path[2] == plural]:
            del self._by_path[path]
        self.generation += 1


def _custom_resource(spec: Object, version: Object) -> ApiResource:
    names, subresources = spec["names"], version.get("subresources") or {}
    scale = subresources.get("scale")
    return ApiResource(
        group=spec["group"],
        version=version["name"],
        kind=names["kind"],
        plural=names["plural"],
        singular=names["singular"],
        list_kind=names["listKind"],
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        is_namespaced=spec["scope"] == "Namespaced",
        has_status="status" in subresources,
        scale=None
        if scale is None
        else ScalePaths(
            scale["specReplicasPath"],
            scale["statusReplicasPath"],
            scale.get("labelSelectorPath", ""),
        ),
        schema=(version.get("schema") or {}).get("openAPIV3Schema") or {},
        columns=tuple(version.get("additionalPrinterColumns") or ()),
        selectable=tuple(item["jsonPath"] for item in version.get("selectableFields") or ()),
        is_custom=True,
        warning=version.get("deprecationWarning")
        or f"{spec['group']}/{version['name']} {names['kind']} is deprecated"
        if version.get("deprecated")
        else "",
        conversion=((spec.get("conversion") or {}).get("webhook") or {}).get("clientConfig") or {},
    )
