"""The process of one service: it makes the object, gives it its clients, and serves its endpoints and HTTP paths."""

import asyncio
import contextlib
import inspect
import logging
import os
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo.base import addresses, config, draining, errors, process_setup, tasks
from dynamo.base import clock as clocks
from dynamo.observability import logs
from dynamo.protocols import generate
from dynamo.runtime import client as clients
from dynamo.runtime import component, decorators, reachability, system_port
from dynamo.runtime.http import browsers, exchange, server
from dynamo.sdk import declaration, graph, settings

FIND_S = 60.0  # for another service of the graph to be there
_PAUSE_S = 0.1  # until the next worker is asked
_PROG = "python -m dynamo.sdk"
_TEXT = "text/plain; charset=utf-8"
_STATUSES: tuple[tuple[type[errors.DynamoError], int], ...] = (
    (errors.RequestError, 400),
    (errors.Unavailable, 503),
    (errors.WorkerLost, 503),
)
_EXPECTED = "expected a JSON object with the method's arguments"
ApiMethod = Callable[..., AsyncGenerator[Any, None]]
Probe = Callable[[], Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProcessConfig(component.RuntimeConfig):
    """Run one service of a graph in this process; `dynamo serve` prints such commands and starts them."""

    target: str = config.option(flag="", help="the graph: module:Class, or file.py:Class")
    service_name: str | None = config.option(
        None, help="the service to run (default: the class itself)"
    )
    working_dir: str = config.option(".", help="directory from which the module is imported")
    system_host: str = config.setting(
        "127.0.0.1",
        help="address of /live and /health of a service without @api; 0.0.0.0 for all networks",
    )
    system_port: addresses.PortRange | None = config.setting(  # noqa: RUF009 (a declaration)
        None,
        help="port of /live and /health of a service without @api, or a range of which the first free one is used;"
        " 0: any, -1 (default): none",
    )
    cors_allow_origin: tuple[str, ...] = config.setting(
        (), help=f"of a service with @api: {browsers.ORIGINS_HELP}"
    )
    allowed_hosts: tuple[str, ...] = config.setting(
        (), help=f"of a service with @api: {browsers.HOSTS_HELP}"
    )
    graceful_shutdown_timeout_s: float = draining.WORKER.option(
        "seconds for running requests to finish after SIGTERM; increase it for long answers"
    )
    grace_period_s: float = draining.GRACE.option(
        "seconds after SIGTERM in which new requests are still taken, while /health says 503 already"
    )


class Health:
    """What /health tells probes: 503 while the service starts, and again when it drains."""

    def __init__(self, num_endpoints: int) -> None:
        self._num_missing = num_endpoints  # endpoints that discovery does not list yet
        self.has_started = self.is_draining = False

    @property
    def is_ready(self) -> bool:
        return self.has_started and not self._num_missing and not self.is_draining

    def endpoint_is_listed(self) -> None:
        self._num_missing -= 1


async def run(options: ServiceProcessConfig, specs: Sequence[declaration.DeclaredService]) -> None:
    """Serve until a signal comes. Raises DynamoError."""
    browsers.check_origins(options.cors_allow_origin)
    spec = graph.find(specs, options.service_name or specs[0].name)
    values = settings.with_defaults(settings.ServiceConfig.get_instance(), specs)
    os.environ[settings.VARIABLE] = msgspec.json.encode(values).decode()  # for `get_instance()`
    section = values.section(spec.name)
    if spec.methods("endpoint"):
        options = reachability.with_reachable_host(options, os.environ)
    async with (
        await component.DistributedRuntime.open(options, item_type=generate.Output) as runtime,
        tasks.Tasks() as running,
    ):
        stop = process_setup.stop_on_signals()
        own_component = runtime.namespace().component(spec.name.lower())
        endpoints = [
            (own_component.endpoint(name), attribute)
            for name, attribute in spec.methods("endpoint").items()
        ]
        declaration.dynamo_context.update(
            runtime=runtime,
            component=own_component,
            endpoints=[endpoint for endpoint, _ in endpoints],
            namespace=options.namespace,
        )
        clients_by_name = {
            name: declaration.ServiceClient(
                declaration.spec_of(cls), _caller(runtime, options.namespace, cls)
            )
            for name, cls in spec.dependencies.items()
            if declaration.spec_of(cls) in specs
        }
        service = _construct(spec, section, clients_by_name)
        health = Health(len(endpoints))
        methods = {name: _api(getattr(service, a)) for name, a in spec.methods("api").items()}
        policy = browsers.BrowserPolicy(
            frozenset(options.cors_allow_origin),
            frozenset(options.allowed_hosts) | browsers.own_names(),
        )
        probes = {
            role: [getattr(service, attribute) for attribute in spec.methods(role).values()]
            for role in ("liveness", "readiness")
        }
        served = _make_server(methods, health, policy, probes)
        try:
            if methods:
                host = str(section.get("host", "127.0.0.1")).strip("[]")
                port = settings.read_port(spec.name, section)
                await served.start(host, port, port_flag=f"another {spec.name}.port")
            elif options.system_port is not None:
                await system_port.listen(served, options.system_host, options.system_port)
            for attribute in spec.methods("start").values():
                await _call(getattr(service, attribute))
            for endpoint, attribute in endpoints:
                serving = endpoint.serve_endpoint(
                    _handler(getattr(service, attribute)),
                    on_listed=health.endpoint_is_listed,
                )
                running.start(f"serve {endpoint.name.endpoint}", serving)
            health.has_started = True
            await running.run_until(stop)
            health.is_draining = True
            limit_s, grace_s = options.graceful_shutdown_timeout_s, options.grace_period_s
            await asyncio.gather(
                runtime.drain(limit_s, grace_s), _drain(served, runtime.clock, limit_s, grace_s)
            )
        finally:
            # all of them are called, whatever becomes of those before
            async with contextlib.AsyncExitStack() as end:
                for attribute in reversed([*spec.methods("shutdown").values()]):
                    end.push_async_callback(_call, getattr(service, attribute))
                end.push_async_callback(served.close)


def _construct(
    spec: declaration.DeclaredService,
    section: settings.Section,
    clients_by_name: Mapping[str, declaration.ServiceClient],
) -> Any:
    """Return the service's object; its constructor may take clients already.

    Raises ConfigError if a value of its constructor is missing.
    """
    setattr(spec.cls, declaration.CLIENTS, clients_by_name)
    values = settings.constructor_values(spec.cls, section)
    try:
        inspect.signature(spec.cls).bind(**values)
    except TypeError as error:
        raise errors.ConfigError(f"{spec.file}, class {spec.name}: {error}") from error
    return spec.cls(**values)


async def _call(method: Callable[[], Any]) -> None:
    """Run a method of the service, async or not."""
    result = method()
    if inspect.isawaitable(result):
        await result


async def _drain(
    served: server.HttpServer, clock: clocks.Clock, limit_s: float, grace_s: float
) -> None:
    await clock.sleep(grace_s)
    await served.drain(limit_s)


def _caller(
    runtime: component.DistributedRuntime, namespace: str, cls: type
) -> Callable[[str, Any, int | None], AsyncIterator[Any]]:
    """Return the function that asks an endpoint of another service.

    A worker that is lost before its first item, such as one that an update replaces, does not fail the request: the
    next one is asked, also if it is there only within FIND_S.
    """
    spec, client_by_endpoint = declaration.spec_of(cls), dict[str, clients.EndpointClient]()

    async def call(name: str, request: Any, instance_id: int | None) -> AsyncIterator[Any]:
        if name not in client_by_endpoint:
            client_by_endpoint[name] = runtime.client(
                declaration.endpoint_url(namespace, spec.name, name)
            )
        endpoint, has_begun = client_by_endpoint[name], False
        now = asyncio.get_running_loop().time
        deadline = now() + FIND_S
        while True:
            await endpoint.wait_for_instances(FIND_S)
            stream = endpoint.stream(
                decorators.to_plain(request), item_type=object, instance_id=instance_id
            )
            try:
                async for item in stream:
                    has_begun = True
                    yield decorators.to_plain(item)  # an item of a worker is a struct
            except (errors.WorkerLost, errors.NoWorkers):
                if has_begun or instance_id is not None or now() >= deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    return call


def _handler(method: Callable[[Any], Any]) -> Callable[[Any], AsyncIterator[Any]]:
    """Return the handler of an endpoint: the request in the annotated type, items as JSON-like values."""
    (parameter,) = inspect.signature(method).parameters
    kind = typing.get_type_hints(method).get(parameter, Any)

    async def handle(request: Any) -> AsyncIterator[Any]:
        try:
            value = decorators.read_value(request, kind)
        except msgspec.ValidationError as error:
            raise errors.InvalidRequest(f"the request does not fit: {error}") from error
        async for item in _items(method(value)):
            yield decorators.to_plain(item)

    return handle


def _api(method: Callable[..., Any]) -> ApiMethod:
    """Return the function that takes the fields of a body, each in the annotated type of its parameter."""
    signature, kinds = inspect.signature(method), typing.get_type_hints(method)

    def ask(**fields: Any) -> AsyncGenerator[Any, None]:
        try:
            signature.bind(**fields)
        except TypeError as error:
            raise errors.InvalidRequest(f"{_EXPECTED}: {error}") from error
        for name in signature.parameters.keys() & kinds.keys() & fields.keys():
            if fields[name] is None and signature.parameters[name].default is None:
                continue
            try:
                fields[name] = decorators.read_value(fields[name], kinds[name])
            except msgspec.ValidationError as error:
                raise errors.InvalidRequest(f"{_EXPECTED}: {name}: {error}") from error
        return _items(method(**fields))

    return ask


async def _items(result: Any) -> AsyncGenerator[Any, None]:
    """Yield what an async generator yields, or the one value of a coroutine or of a plain method."""
    if inspect.isasyncgen(result):
        async for item in result:
            yield decorators.to_plain(item)
    else:
        yield decorators.to_plain(await result if inspect.isawaitable(result) else result)


def _make_server(
    methods: Mapping[str, ApiMethod],
    health: Health,
    policy: browsers.BrowserPolicy,
    probes: Mapping[str, Sequence[Probe]] = MappingProxyType({}),
) -> server.HttpServer:
    """Return the server of these methods: `POST /name` for each, and `GET /health` and `/live` for probes."""
    table: dict[tuple[str, str], exchange.Handler] = {
        ("POST", f"/{name}"): _http_handler(method, health) for name, method in methods.items()
    }

    async def tell_health(client: exchange.Exchange) -> None:
        is_ready = health.is_ready and await _passes(probes.get("readiness", ()))
        status = "healthy" if is_ready else "notready"
        client.respond(200 if is_ready else 503, f'{{"status":"{status}"}}'.encode())

    async def tell_life(client: exchange.Exchange) -> None:
        is_alive = not health.has_started or await _passes(probes.get("liveness", ()))
        status = "live" if is_alive else "notlive"
        client.respond(200 if is_alive else 503, f'{{"status":"{status}"}}'.encode())

    table["GET", "/health"] = table["GET", "/readyz"] = tell_health
    table["GET", "/live"] = table["GET", "/healthz"] = tell_life
    router = exchange.HttpRouter(table, error_body=server.plain_error)
    guarded = browsers.BrowserGuard(
        router, policy, lambda client, error: _refuse(client, 403, str(error))
    )
    return server.HttpServer(
        guarded, error_body=server.plain_error, cors_headers=policy.cors_headers
    )


async def _passes(probes: Sequence[Probe]) -> bool:
    """Return whether all methods of a probe return true; one that raises an error does not."""
    try:
        for probe in probes:
            result = probe()
            if not (await result if inspect.isawaitable(result) else result):
                return False
    except Exception:  # noqa: BLE001 (the supervisor of a user's method)
        _log.exception("a probe failed")
        return False
    return True


def _http_handler(method: ApiMethod, health: Health) -> exchange.Handler:
    async def handle(client: exchange.Exchange) -> None:
        if not health.has_started:
            _refuse(client, 503, "this service is starting; try again soon")
            return
        answering = asyncio.current_task()
        assert answering is not None

        def cancel() -> None:
            answering.cancel()

        client.on_disconnect(cancel)
        try:
            await _stream(client, method)
        except errors.DynamoError as error:
            status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 500)
            _refuse(client, status, str(error))

    return handle


async def _stream(client: exchange.Exchange, method: ApiMethod) -> None:
    """Stream what the method yields for the body, as long as the client is there."""
    try:
        fields = msgspec.json.decode(client.request.body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidRequest(f"{_EXPECTED}: {error}") from error
    async with contextlib.aclosing(method(**fields)) as items:
        async for item in items:
            if not client.is_streaming:
                client.start_stream(200, content_type=_TEXT)
            await client.send(item.encode() if isinstance(item, str) else msgspec.json.encode(item))
    if not client.is_streaming:
        client.start_stream(200, content_type=_TEXT)
    client.end()


def _refuse(client: exchange.Exchange, status: int, message: str) -> None:
    """Answer with an error; a stream that has begun says so in its last line."""
    if client.is_streaming:
        client.end(f"\nerror: {message}\n".encode())
    else:
        client.respond(status, server.plain_error(status, message, client.request.path))


def main() -> int:
    """Run the command `python -m dynamo.sdk` and return its exit code."""
    return process_setup.run_command(_PROG, _run, expected=errors.DynamoError)


def _run() -> None:
    logs.configure()
    options = config.load(ServiceProcessConfig, prog=_PROG)
    specs = graph.load(options.target, Path(options.working_dir).resolve())
    asyncio.run(run(options, specs))
