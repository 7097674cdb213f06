"""The distributed runtime of one process: its instance id, discovery, request plane, event plane and services.

    async with await DistributedRuntime.open(config) as runtime:
        await runtime.register(name, handler)           # other processes can find and call this one
        client = runtime.client(other_name)             # and this one them
        ...
        await runtime.drain(timeout_s)                  # vanish from discovery, finish open requests

Several runtimes can live in one process. For tests and for `dynamo run` they share a `MemoryCluster`; a process that
hosts many workers makes one `sibling` for each, because a lease and a listener per worker would cost threads.
"""

import asyncio
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import msgspec

from dynamo.base import addresses, clock, config, distribution, errors, ids, membership, tasks
from dynamo.observability import tracing
from dynamo.protocols import instances
from dynamo.runtime import (
    client,
    discovery,
    events,
    instance_records,
    listening,
    naming,
    requests,
    services,
    serving,
    system_port,
)
from dynamo.runtime import credentials as credential_files
from dynamo.runtime.backends import file, frame_connection, memory, multiplex, tcp, zmq
from dynamo.runtime.backends.etcd import access as etcd_access
from dynamo.runtime.backends.nats import services as nats_services

Attachment = Callable[[instances.Instance], tuple[str, msgspec.Struct]]
"""Returns key and value of a further record that discovery holds with an instance."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(tracing.TracingConfig, membership.ClusterConfig):
    """Settings of discovery and the planes, which the configuration of each process inherits."""

    namespace: str = config.setting("dynamo", help="namespace of the endpoints of this process")
    etcd_endpoints: tuple[str, ...] = config.option(
        ("http://localhost:2379",),
        env="ETCD_ENDPOINTS",
        help="addresses of etcd; of several, the first that answers is used",
    )
    etcd_start_timeout_secs: float = config.setting(
        120.0, help="seconds for which a starting process waits for etcd", least=1
    )
    request_plane: Literal["tcp", "nats", "memory"] = config.setting(
        "tcp",
        implied=("NATS_SERVER", "nats"),
        help="transport of requests between processes; nats also if NATS_SERVER is set",
    )
    event_plane: Literal["zmq", "nats", "memory"] = config.setting(
        "zmq",
        implied=("NATS_SERVER", "nats"),
        help="transport of events, between processes; nats also if NATS_SERVER is set",
    )
    nats_server: tuple[str, ...] = config.option(
        ("nats://localhost:4222",),
        env="NATS_SERVER",
        help="addresses of NATS, if a plane or queue uses it; several are one cluster",
    )
    nats_start_timeout_secs: float = config.setting(
        10.0, help="seconds for which a starting process waits for NATS", least=0
    )
    tcp_rpc_port: addresses.PortRange = config.setting(  # noqa: RUF009 (a declaration)
        addresses.ANY_PORT,
        help="port on which this process takes requests of others, or a range of which the first free one is used;"
        " 0: any free one",
    )
    event_host: str | None = config.setting(
        None,
        help="address at which others hear the events of this process (default: --tcp-rpc-host)",
    )
    event_port: addresses.PortRange = config.setting(  # noqa: RUF009 (a declaration)
        addresses.ANY_PORT,
        help="port at which others hear the events of this process, or a range of which the first free one is used;"
        " 0: any free one",
    )
    event_advertise: str | None = config.setting(
        None,
        help="address or address:port at which others hear the events, if it is another than it listens on, as behind"
        " a NAT (default: the host of --tcp-rpc-advertise, unless there is an --event-host)",
    )
    request_silence_secs: float = config.setting(
        requests.SILENCE_LIMIT_S,
        help="seconds of silence in an answer after which its worker is given up; more on a very busy machine",
        least=0.1,
    )
    inhibited_duration_secs: float = config.setting(
        5.0, help="seconds during which a failed instance is tried last", least=0
    )

    @property
    def event_address(self) -> listening.ListenAddress:
        return listening.choose_address(
            self, self.event_host, self.event_port, self.event_advertise, setting="DYN_EVENT_"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCluster:
    """The state that runtimes of one process share to reach each other in memory."""

    registry: memory.MemoryRegistry = field(default_factory=memory.MemoryRegistry)
    network: memory.MemoryNetwork = field(default_factory=memory.MemoryNetwork)
    bus: memory.MemoryBus = field(default_factory=memory.MemoryBus)
    services: memory.MemoryServices = field(default_factory=memory.MemoryServices)


class DistributedRuntime:
    """Discovery, request plane and event plane under one instance id. Closing it closes all three."""

    def __new__(cls, *arguments: object, **parts: object) -> "DistributedRuntime":
        """Raise ConfigError for the arguments of NVIDIA Dynamo's bindings: joining the cluster has to be awaited."""
        if arguments:
            raise errors.ConfigError(
                "DistributedRuntime(event_loop, discovery, ...) cannot be made here: decorate the main function with"
                " @dynamo_worker(), which reads DYN_DISCOVERY_BACKEND and DYN_REQUEST_PLANE"
            )
        return super().__new__(cls)

    def __init__(
        self,
        *,
        instance_id: ids.InstanceId,
        registry: discovery.Discovery,
        plane: requests.RequestPlane,
        event_plane: events.EventPlane,
        process_services: services.Services,
        parts: "_Parts",
        is_sibling: bool = False,
    ) -> None:
        """Made by `open`, `in_memory` and `sibling`."""
        self.instance_id = instance_id
        self.discovery = registry
        self.requests = plane
        self.events = event_plane
        self.services = process_services
        self.clock = parts.time
        self.credential_watch = parts.credential_watch
        self.tasks = tasks.Tasks()  # until the runtime is closed
        if not is_sibling and parts.credential_watch.has_files:
            self.tasks.start("watch credentials", parts.credential_watch.watch())
        self._parts = parts
        self._is_sibling = is_sibling
        self.records = instance_records.InstanceRecords(registry, instance_id)
        self.served = serving.ServedEndpoints(self.clock, plane.traffic)
        self.engine_routes: dict[str, system_port.EngineRoute] = {}
        # what belongs to this process as this runtime does, which does not know it
        self.attached: dict[str, object] = {}
        self.stop_requested = asyncio.Event()
        self._clients: list[client.EndpointClient] = []
        self._shared_clients: dict[instances.EndpointName, client.EndpointClient] = {}

    @classmethod
    async def open(
        cls,
        settings: RuntimeConfig,
        cluster: MemoryCluster | None = None,
        *,
        item_type: Any = Any,
        time: clock.Clock | None = None,
    ) -> "DistributedRuntime":
        """Join the system as the settings say; parts in memory are in `cluster`. Raises ConfigError.

        `item_type` is the type of the items that streams carry (`requests.Call.send`).
        """
        if settings.namespace and not instances.is_name(settings.namespace):
            raise errors.ConfigError(
                f"--namespace {settings.namespace!r}: expected a-z, 0-9, - and _, in parts joined by dots"
            )
        cluster = cluster or MemoryCluster()
        time = time or clock.SystemClock()
        credentials = membership.read(settings, os.environ)
        instance_id = ids.new_instance_id()
        nats = nats_services.NatsServices(
            settings.nats_server,
            namespace=settings.namespace,
            instance_id=instance_id,
            start_timeout_s=settings.nats_start_timeout_secs,
            time=time,
        )
        uses_nats = "nats" in (settings.request_plane, settings.event_plane)
        if uses_nats:
            await nats.connect()
        services = {settings.discovery_backend, settings.request_plane, settings.event_plane}
        watch = credential_files.CredentialWatch(
            credentials,
            time,
            client_certificates=credential_files.client_certificates(services, os.environ),
        )
        watch.check()
        parts = _Parts(settings, cluster, credentials, watch, nats, instance_id, item_type, time)
        plane = parts.new_plane(instance_id)  # before discovery: it may refuse its address
        if settings.event_plane == "zmq":
            zmq.check_address(settings.event_address, credentials)
        registry = await parts.open_discovery(functools.partial(_is_owner_answering, plane))
        is_memory_only = settings.request_plane == "memory" and not uses_nats
        return cls(
            instance_id=instance_id,
            registry=registry,
            plane=plane,
            event_plane=parts.new_event_plane(registry),
            process_services=cluster.services if is_memory_only else nats,
            parts=parts,
        )

    @classmethod
    async def in_memory(
        cls, cluster: MemoryCluster, *, item_type: Any = Any, time: clock.Clock | None = None
    ) -> "DistributedRuntime":
        """Join other runtimes of this process; `time` may be virtual, for all that waits."""
        settings = RuntimeConfig(
            discovery_backend="mem", request_plane="memory", event_plane="memory"
        )
        return await cls.open(settings, cluster, item_type=item_type, time=time)

    @property
    def credentials(self) -> membership.Credentials:
        """The credentials of this process, as their files have them now."""
        return self._parts.credentials.current()

    def sibling(self) -> "DistributedRuntime":
        """Make another instance in this process, with an address of its own; close it before this one.

        It shares this runtime's lease and event plane.
        """
        instance_id = ids.new_instance_id()
        return DistributedRuntime(
            instance_id=instance_id,
            registry=self.discovery,
            plane=self._parts.new_plane(instance_id),
            event_plane=self.events,
            process_services=self.services,
            parts=self._parts,
            is_sibling=True,
        )

    def namespace(self, name: str | None = None) -> naming.Namespace:
        """Return a namespace, by default that of the settings: the start of `namespace().component().endpoint()`."""
        return naming.Namespace(self, name or self._parts.settings.namespace)

    def endpoint(self, path: str) -> naming.Endpoint:
        """Return an endpoint by `namespace.component.endpoint`, with or without `dyn://`, as `Component.endpoint`."""
        return naming.Endpoint(self, instances.EndpointName.parse(path.lower()))

    def shutdown(self) -> None:
        """Let a process of `dynamo_worker` finish its requests and end, as SIGTERM does."""
        self.stop_requested.set()

    def register_engine_route(self, route_name: str, callback: system_port.EngineRoute) -> None:
        """Answer /engine/`route_name` of the system port by `callback`: the JSON object of the body in, another out."""
        self.engine_routes[route_name] = callback

    async def register(
        self, name: instances.EndpointName, handler: requests.Handler, *attachments: Attachment
    ) -> instances.Instance:
        """Answer the endpoint `name` with `handler` and publish this instance, with further records under its lease."""
        address = await self.requests.serve(name.path, handler)
        instance = instances.Instance(
            namespace=name.namespace,
            component=name.component,
            endpoint=name.endpoint,
            instance_id=self.instance_id,
            transport={self.requests.name: address},
        )
        for key, record in [(instance.key, instance), *(make(instance) for make in attachments)]:
            await self.records.put(key, record)
        return instance

    async def unregister(self, name: instances.EndpointName) -> None:
        """Undo `register`: publish the instance no more, and refuse requests to the endpoint."""
        try:
            await self.records.deregister_endpoint(name)
        finally:
            self.requests.stop_serving(name.path)

    def shared_client(self, name: instances.EndpointName) -> client.EndpointClient:
        """Return the one client of this endpoint that all which ask for it so share, until this runtime is closed."""
        if name not in self._shared_clients:
            self._shared_clients[name] = self.client(name)
        return self._shared_clients[name]

    def client(self, name: instances.EndpointName) -> client.EndpointClient:
        """Return a client that follows an endpoint; it is closed with this runtime, if not before."""
        endpoint_client = client.EndpointClient(
            name,
            self.discovery,
            self.requests,
            inhibited_s=self._parts.settings.inhibited_duration_secs,
            time=self.clock,
        )
        endpoint_client.start()
        self._clients.append(endpoint_client)
        return endpoint_client

    async def drain(self, timeout_s: float, grace_s: float = 0.0) -> bool:
        """Deregister, refuse new requests and finish open ones; return False if some outlived `timeout_s`.

        For `grace_s` in between, requests of clients that do not know it yet are still taken.
        """
        await self.records.deregister()
        await self.clock.sleep(grace_s)
        self.served.begin_drain()
        return await self.requests.drain(timeout_s)

    async def close(self) -> None:
        """Leave the system. Open requests break."""
        await self.records.deregister()
        await self.tasks.close()
        for endpoint_client in self._clients:
            await endpoint_client.close()
        await self.requests.close()
        if not self._is_sibling:
            await self.events.close()
            await self.discovery.close()
            await self.services.close()

    async def __aenter__(self) -> "DistributedRuntime":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class _Parts:
    """The settings and shared state from which the planes and discovery of one process are made."""

    settings: RuntimeConfig
    cluster: MemoryCluster
    credentials: membership.Credentials
    credential_watch: credential_files.CredentialWatch
    nats: nats_services.NatsServices  # connected if a plane uses it
    instance_id: ids.InstanceId
    item_type: Any
    time: clock.Clock

    def new_plane(self, instance_id: ids.InstanceId) -> requests.RequestPlane:
        silence_s = self.settings.request_silence_secs
        limits = frame_connection.ConnectionLimits(
            silence_s=silence_s, connect_s=max(silence_s, requests.SILENCE_LIMIT_S)
        )
        if self.settings.request_plane == "memory":
            return multiplex.MultiplexedPlane(
                self.cluster.network,
                limits,
                item_type=self.item_type,
                time=self.time,
                instance_id=instance_id,
            )
        if self.settings.request_plane == "nats":
            return self.nats.new_requests(self.item_type, limits, instance_id=instance_id)
        return tcp.TcpRequestPlane(
            listening.ListenAddress(
                host=self.settings.tcp_rpc_host,
                ports=self.settings.tcp_rpc_port,
                advertised=self.settings.tcp_rpc_advertise,
            ),
            limits,
            credentials=self.credentials,
            item_type=self.item_type,
            time=self.time,
            instance_id=instance_id,
        )

    async def open_discovery(self, is_alive: discovery.OwnerCheck) -> discovery.Discovery:
        backend = self.settings.discovery_backend
        if backend == "mem":
            return memory.MemoryDiscovery(self.cluster.registry)
        if backend != "file":
            name = f"dynamo.runtime.backends.{backend}.discovery"
            module = distribution.load_extra(name, feature=f"{backend} discovery", extra=backend)
            if backend == "kubernetes":
                opening = module.join(os.environ, is_alive=is_alive, time=self.time)
            else:
                opening = module.EtcdDiscovery.open(
                    etcd_access.read(self.settings.etcd_endpoints, os.environ),
                    self.instance_id,
                    start_timeout_s=self.settings.etcd_start_timeout_secs,
                    is_alive=is_alive,
                    time=self.time,
                )
            registry: discovery.Discovery = await opening
            return registry
        return await file.FileDiscovery.open(
            membership.discovery_directory(self.settings.file_kv, os.environ),
            self.instance_id,
            local_token=self.credentials.token if self.credentials.is_local else None,
            time=self.time,
        )

    def new_event_plane(self, registry: discovery.Discovery) -> events.EventPlane:
        if self.settings.event_plane == "memory":
            return memory.MemoryEventPlane(self.cluster.bus, self.instance_id)
        if self.settings.event_plane == "nats":
            return self.nats.new_events()
        return zmq.ZmqEventPlane(
            registry,
            self.instance_id,
            listen_address=self.settings.event_address,
            credentials=self.credentials,
        )


def _is_owner_answering(plane: requests.RequestPlane, key: str, value: bytes) -> bool | None:
    """Return whether the instance that put a key into discovery answers on the request plane; None: unknown.

    False for keys of no instance: these end with their lease.
    """
    owner = instances.owner_of(key)
    if owner is None:
        return False
    if not key.startswith(instances.INSTANCES):
        return plane.is_answering(owner)
    try:
        record = msgspec.json.decode(value, type=instances.Instance)
    except (ValueError, RecursionError):
        return False
    return plane.is_answering(owner, record.transport.get(plane.name))
