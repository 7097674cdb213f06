"""What a class of a service says of itself: decorators that only take notes, and start nothing.

    @service(dynamo={"namespace": "demo"}, workers=2)
    class Backend:
        @endpoint()
        async def generate(self, request: Prompt): yield ...

    @service(resources={"gpu": 1}, module="dynamo.vllm")     # the process is an existing command
    class Worker: ...

A class with endpoints becomes `python -m dynamo.sdk TARGET --service-name NAME`; one with `module` becomes `python -m
MODULE`, with its configuration as flags; one with `inside` has no process, because another service does its work.
"""

import dataclasses
import inspect
import json
import os
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar, cast

from dynamo.base import errors
from dynamo.protocols import instances

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])
_SPEC, _ROLE = "__dynamo_service__", "__dynamo_role__"
CLIENTS = "__dynamo_clients__"  # attribute of a service's class while its process runs
RESOURCES = ("cpu", "gpu", "memory")
# of `dynamo`; the original has the last three, which have no effect
DYNAMO_KEYS = ("namespace", "component", "enabled", "name", "component_type")
_KEYS = {"dynamo": DYNAMO_KEYS, "resources": RESOURCES}
DYNAMO_IMAGE = os.environ.get("DYNAMO_IMAGE", "")
"""The `image` of services of NVIDIA Dynamo's examples; here `dynamo deploy --image` names it."""
dynamo_context: dict[str, Any] = {}
"""In a running service: `runtime`, `component`, `endpoints` (their names) and `namespace`."""


@dataclasses.dataclass(slots=True, kw_only=True)
class DeclaredService:
    """The notes of one service class; `links` grows while the graph's module is imported."""

    cls: type
    name: str
    namespace: str | None
    workers: int
    resources: Mapping[str, str]
    defaults: Mapping[str, Any]  # configuration that the decorator gives
    module: str | None
    inside: str | None
    links: list[type] = dataclasses.field(default_factory=list)

    @property
    def file(self) -> str:
        """The file of the class, for messages."""
        return inspect.getsourcefile(self.cls) or self.cls.__module__

    @property
    def dependencies(self) -> dict[str, type]:
        """The services that the class names by `depends`, by attribute."""
        members = inspect.getmembers_static(self.cls, lambda value: isinstance(value, Dependency))
        return {name: dependency.on for name, dependency in members}

    def methods(self, role: str) -> dict[str, str]:
        """Return the attributes with a role (`endpoint`, `api`, `start`, `shutdown`), by their public name.

        They come in the order of the class, after those of its bases.
        """
        names = dict.fromkeys(name for cls in reversed(self.cls.__mro__) for name in vars(cls))
        roles = {name: getattr(inspect.getattr_static(self.cls, name), _ROLE, {}) for name in names}
        return {roles[name][role] or name: name for name in names if role in roles[name]}

    def check(self) -> None:
        """Raise ConfigError for a method that cannot answer, or a name that no endpoint can have."""
        for role in ("endpoint", "api"):
            for name, attribute in self.methods(role).items():
                where = f"{self.file}, {self.cls.__name__}.{attribute}"
                method = getattr(self.cls, attribute)
                self._check_annotations(method, where)
                if inspect.isgeneratorfunction(method):
                    raise errors.ConfigError(
                        f"{where}: expected async def, got a generator that blocks all other requests"
                    )
                if role == "api":
                    continue
                parameters = list(inspect.signature(method).parameters)
                if len(parameters) != 2:
                    raise errors.ConfigError(
                        f"{where}: expected the parameters self and request, got {', '.join(parameters)}"
                    )
                for part in (self.name.lower(), name):
                    if not instances.is_name(part):
                        raise errors.ConfigError(
                            f"{where}: expected a name of a-z, 0-9, - and _, got {part!r}"
                        )

    def _check_annotations(self, method: Callable[..., Any], where: str) -> None:
        """Raise ConfigError for annotations that this process could not read for a request."""
        if self.module is not None:  # another command answers
            return
        try:
            typing.get_type_hints(method)
        except (NameError, AttributeError, TypeError, SyntaxError) as error:
            raise errors.ConfigError(f"{where}: an annotation cannot be read: {error}") from error


def service(
    inner: type | None = None,
    *,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int = 1,
    module: str | None = None,
    inside: str | None = None,
    **defaults: Any,
) -> Any:
    """Declare a class as a service; it gets `link`, `dynamo_address` and nothing else.

    `dynamo` has `namespace` and `component` (the name); `resources` has `cpu`, `gpu` and `memory` of each process;
    other arguments are configuration. Raises ConfigError that names file, class and field.

    NVIDIA Dynamo's `image`, `app`, `system_app` and `enable_system_app` have no effect: `dynamo deploy --image` names
    the image, and an HTTP server of our own has the paths of `api` and of probes.
    """

    for key in ("image", "app", "system_app", "enable_system_app"):
        defaults.pop(key, None)

    def decorate(cls: type) -> type:
        where = f"{inspect.getsourcefile(cls)}, class {cls.__name__}"
        mappings: dict[str, object] = {"dynamo": dynamo, "resources": resources}
        for argument, value in mappings.items():
            if not isinstance(value, Mapping | None):
                raise errors.ConfigError(
                    f"{where}, {argument}: expected keys with values, got {value!r:.60}"
                )
            if unknown := {*(value or {})} - {*_KEYS[argument]}:
                raise errors.ConfigError(
                    f"{where}, {argument}: expected {', '.join(_KEYS[argument])}, got {min(unknown)!r}"
                )
        for key, value in defaults.items():
            if not _is_json(value):
                raise errors.ConfigError(
                    f"{where}, {key}: expected a value that JSON has, got {value!r:.60}"
                )
        if not isinstance(workers, int) or workers < 1:
            raise errors.ConfigError(
                f"{where}, workers: expected a number of at least 1, got {workers!r}"
            )
        spec = DeclaredService(
            cls=cls,
            name=(dynamo or {}).get("component", cls.__name__),
            namespace=(dynamo or {}).get("namespace"),
            workers=workers,
            resources={name: str(value) for name, value in (resources or {}).items()},
            defaults=defaults,
            module=module,
            inside=inside,
        )
        for name, value in (
            (_SPEC, spec),
            ("link", classmethod(_link)),
            ("dynamo_address", classmethod(_address)),
        ):
            setattr(cls, name, value)
        return cls

    return decorate if inner is None else decorate(inner)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _link(cls: type, linked: type) -> type:
    """Make `linked` part of the graph, and return it for the next link."""
    spec_of(linked)
    spec_of(cls).links.append(linked)
    return linked


def _address(cls: type) -> tuple[str, str]:
    """Return the service's namespace and component."""
    return dynamo_context.get("namespace") or spec_of(cls).namespace or "dynamo", spec_of(cls).name


def spec_of(cls: Any) -> DeclaredService:
    """Return the notes of a service class. Raises ConfigError for another object."""
    spec = getattr(cls, _SPEC, None)
    if not isinstance(spec, DeclaredService):
        raise errors.ConfigError(f"{cls!r}: expected a class with the decorator @service")
    return spec


def _mark(role: str, name: str | None) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        roles: dict[str, str | None] = {**getattr(function, _ROLE, {}), role: name}
        setattr(function, _ROLE, roles)
        return function

    return decorate


def endpoint(name: str | None = None) -> Callable[[F], F]:
    """Declare an async generator `(self, request)` as an endpoint; `request` gets the type of its annotation."""
    return _mark("endpoint", name)


dynamo_endpoint = endpoint


def api(function: F | None = None, *, name: str | None = None) -> Any:
    """Declare a method as `POST /name`: its arguments are the fields of the JSON body, what it yields is streamed."""
    return _mark("api", name) if function is None else _mark("api", name)(function)


def async_on_start(function: F) -> F:
    """Declare a method, async or not, that runs before the endpoints are served."""
    return _mark("start", None)(function)


def on_shutdown(function: F) -> F:
    """Declare a method, async or not, that runs when the process ends."""
    return _mark("shutdown", None)(function)


async_on_shutdown = on_shutdown


def liveness(function: F) -> F:
    """Declare a method, async or not, that returns whether the process may live on, for `/live` and `/healthz`."""
    return _mark("liveness", None)(function)


def readiness(function: F) -> F:
    """Declare a method, async or not, that returns whether the service can serve, for `/health` and `/readyz`."""
    return _mark("readiness", None)(function)


class Dependency:
    """The descriptor that `depends` makes: the client of another service, once the process runs."""

    def __init__(self, on: type) -> None:
        self.on = on
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        clients: dict[str, ServiceClient] = getattr(instance, CLIENTS, {})
        if self._name not in clients:
            raise errors.ConfigError(
                f"{owner.__name__}.{self._name}: {self.on.__name__} is not part of this graph; link it, or start it"
            )
        return clients[self._name]


def depends(on: type[C]) -> C:
    """Return a client of another service; its methods have the names of the endpoints and stream their answers."""
    spec_of(on)
    return cast(C, Dependency(on))


class ServiceClient:
    """The client of one service in a process that depends on it."""

    def __init__(
        self, spec: DeclaredService, call: Callable[[str, Any, int | None], AsyncIterator[Any]]
    ) -> None:
        endpoints = spec.methods("endpoint")
        by_attribute = {attribute: name for name, attribute in endpoints.items()}
        self._endpoints = by_attribute | {name: name for name in endpoints}
        self._call = call
        self._name = spec.name

    def __getattr__(self, name: str) -> Callable[..., AsyncIterator[Any]]:
        """Return the function that asks this endpoint: `(request, instance_id=None)`, an async iterator."""
        if name.startswith("_") or name not in self._endpoints:
            names = ", ".join(self._endpoints) or "none"
            raise AttributeError(f"{self._name} has no endpoint {name!r}; there are {names}")
        endpoint_name = self._endpoints[name]

        def ask(request: Any, instance_id: int | None = None) -> AsyncIterator[Any]:
            return self._call(endpoint_name, request, instance_id)

        return ask


def endpoint_url(namespace: str, component: str, name: str) -> instances.EndpointName:
    """Return the endpoint of a service; its component is the class's name in lower case."""
    return instances.EndpointName.parse(f"dyn://{namespace}.{component.lower()}.{name}")
