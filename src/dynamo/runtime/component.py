"""One process's membership in the system: who it is, whom it can find, what it answers, what it tells.

    async with await DistributedRuntime.open(config) as runtime:
        await runtime.register(name, handler, card)     # others can find and ask us
        client = runtime.client(other)                  # and we them
        ...
        await runtime.drain(timeout_s)                  # vanish from discovery, finish what runs

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
from typing import Literal

import msgspec

from dynamo.base import config, distribution, errors, ids, membership
from dynamo.observability import tracing
from dynamo.protocols import instances, model_card
from dynamo.runtime import client, discovery, events, requests, services
from dynamo.runtime.backends import (
    file,
    memory_discovery,
    memory_events,
    memory_requests,
    tcp,
    zmq,
)
from dynamo.runtime.backends.etcd import access as etcd_access

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(tracing.TracingConfig, membership.ClusterConfig):
    """Discovery and the planes, which every process has: its own configuration inherits this."""

    namespace: str = config.option("dynamo", env="DYN_NAMESPACE", help="namespace of our endpoints")
    discovery_backend: Literal["file", "etcd", "mem"] = config.option(
        "file",
        env="DYN_DISCOVERY_BACKEND",
        help="how processes find each other: by a directory of this host, by etcd, or not at all",
    )
    etcd_endpoints: tuple[str, ...] = config.option(
        ("http://localhost:2379",),
        env="ETCD_ENDPOINTS",
        help="where etcd listens; of several, the first that answers is used",
    )
    etcd_start_timeout_secs: float = config.option(
        120.0,
        env="DYN_ETCD_START_TIMEOUT_SECS",
        help="for how long a process that starts waits for etcd",
        least=1,
    )
    file_kv: str | None = config.option(
        None, env="DYN_FILE_KV", help="directory of file discovery; by default one per user"
    )
    request_plane: Literal["tcp", "nats", "memory"] = config.option(
        "tcp", env="DYN_REQUEST_PLANE", help="how processes ask each other"
    )
    event_plane: Literal["zmq", "nats", "memory"] = config.option(
        "zmq", env="DYN_EVENT_PLANE", help="how processes tell each other"
    )
    nats_server: tuple[str, ...] = config.option(
        ("nats://localhost:4222",),
        env="NATS_SERVER",
        help="where NATS listens, if a plane uses it; several are one cluster",
    )
    nats_start_timeout_secs: float = config.option(
        10.0,
        env="DYN_NATS_START_TIMEOUT_SECS",
        help="for how long a process that starts waits for NATS",
        least=0,
    )
    tcp_rpc_port: int = config.option(
        0,
        env="DYN_TCP_RPC_PORT",
        help="port for requests of other processes; 0: any",
        least=0,
        most=65535,
    )
    inhibited_duration_secs: float = config.option(
        5.0,
        env="DYN_INHIBITED_DURATION_SECS",
        help="for how long an instance that was lost is asked last",
        least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCluster:
    """What runtimes of one process share to reach each other in memory."""

    registry: memory_discovery.MemoryCluster = field(default_factory=memory_discovery.MemoryCluster)
    network: memory_requests.MemoryNetwork = field(default_factory=memory_requests.MemoryNetwork)
    bus: memory_events.MemoryBus = field(default_factory=memory_events.MemoryBus)
    beside: services.MemoryServices = field(default_factory=services.MemoryServices)


class DistributedRuntime:
    """Discovery, request plane and event plane under one instance id. Closing it closes all three."""

    def __init__(
        self,
        *,
        instance_id: ids.InstanceId,
        registry: discovery.Discovery,
        plane: requests.RequestPlane,
        new_plane: Callable[[], requests.RequestPlane],
        event_plane: events.EventPlane,
        beside: services.Services,
        inhibited_s: float = 5.0,
        is_sibling: bool = False,
    ) -> None:
        self.instance_id = instance_id
        self.discovery = registry
        self.requests = plane
        self.events = event_plane
        self.services = beside
        self._new_plane = new_plane
        self._inhibited_s = inhibited_s
        self._is_sibling = is_sibling
        self._records: dict[str, bytes] = {}  # what others find of us, by key
        self._is_withdrawn = False
        self._publishing = asyncio.Lock()  # a card that changes is not put behind our back
        self._clients: list[client.EndpointClient] = []

    @classmethod
    async def open(
        cls, settings: RuntimeConfig, cluster: MemoryCluster | None = None
    ) -> "DistributedRuntime":
        """Join as the settings say; what they want in memory is in `cluster`. Raises ConfigError."""
        cluster = cluster or MemoryCluster()
        credentials = membership.read(settings, os.environ)
        instance_id = ids.new_instance_id()
        nats_services = services.NatsServices(
            settings.nats_server,
            namespace=settings.namespace,
            instance_id=instance_id,
            start_timeout_s=settings.nats_start_timeout_secs,
        )
        has_nats = "nats" in (settings.request_plane, settings.event_plane)
        nats = await nats_services.join() if has_nats else None
        is_alone = settings.request_plane == "memory" and not has_nats
        new_plane = functools.partial(_request_plane, settings, credentials, cluster, nats)
        plane = new_plane()
        if settings.event_plane == "zmq":  # before discovery is open
            zmq.check_host(settings.tcp_rpc_host, credentials)
        registry = await _discovery(settings, cluster, instance_id)
        return cls(
            instance_id=instance_id,
            registry=registry,
            plane=plane,
            new_plane=new_plane,
            event_plane=_event_plane(settings, credentials, cluster, nats, registry, instance_id),
            beside=cluster.beside if is_alone else nats_services,
            inhibited_s=settings.inhibited_duration_secs,
        )

    @classmethod
    async def in_memory(cls, cluster: MemoryCluster) -> "DistributedRuntime":
        """Join others of this process."""
        settings = RuntimeConfig(
            discovery_backend="mem", request_plane="memory", event_plane="memory"
        )
        return await cls.open(settings, cluster)

    def sibling(self) -> "DistributedRuntime":
        """Another instance in this process, asked at an address of its own; close it before us.

        It lives under our lease, and is heard through our event plane.
        """
        return DistributedRuntime(
            instance_id=ids.new_instance_id(),
            registry=self.discovery,
            plane=self._new_plane(),
            new_plane=self._new_plane,
            event_plane=self.events,
            beside=self.services,
            inhibited_s=self._inhibited_s,
            is_sibling=True,
        )

    async def register(
        self,
        name: instances.EndpointName,
        handler: requests.Handler,
        card: model_card.ModelCard | None = None,
    ) -> instances.Instance:
        """Answer `name` with `handler`, and let others know; with `card`, that it serves this model."""
        address = await self.requests.serve(name.path, handler)
        instance = instances.Instance(
            namespace=name.namespace,
            component=name.component,
            endpoint=name.endpoint,
            instance_id=self.instance_id,
            transport={self.requests.name: address},
        )
        await self._put(instance.key, instance)
        if card is not None:
            await self._put(instance.card_key, self._card_record(instance, card))
        return instance

    async def change_card(self, instance: instances.Instance, card: model_card.ModelCard) -> None:
        """Of what was registered with one. Raises Conflict while it is withdrawn, or we leave.

        If discovery is away, others hear of it later.
        """
        async with self._publishing:
            before = self._records.get(instance.card_key)
            if self._is_withdrawn or before is None:
                raise errors.Conflict("nobody is to find us now: try again when we serve")
            try:
                await self._put(instance.card_key, self._card_record(instance, card))
            except errors.Unavailable as error:
                _logger.warning("others hear of our changed card when discovery is back: %s", error)
            except BaseException:
                self._records[instance.card_key] = before
                raise

    async def deregister(self) -> None:
        """Take back what we registered, last first; we still answer."""
        await self.withdraw()
        self._records.clear()

    async def withdraw(self) -> None:
        """Take it back for a while; we still answer."""
        async with self._publishing:
            self._is_withdrawn = True
            for key in reversed(list(self._records)):
                await self.discovery.delete(key)

    async def restore(self) -> None:
        """What was withdrawn can be found again."""
        async with self._publishing:
            for key, value in self._records.items():
                await self.discovery.put(key, value)
            self._is_withdrawn = False

    def client(self, name: instances.EndpointName) -> client.EndpointClient:
        """Follow and ask an endpoint; it is closed with us, if not before."""
        made = client.EndpointClient(
            name, self.discovery, self.requests, inhibited_s=self._inhibited_s
        )
        made.start()
        self._clients.append(made)
        return made

    async def drain(self, timeout_s: float, grace_s: float = 0.0) -> bool:
        """Be found no more, take nothing new, finish what runs; says whether all ended in time.

        For `grace_s` in between, new requests of those who have not heard of it are still taken.
        """
        await self.deregister()
        await asyncio.sleep(grace_s)
        return await self.requests.drain(timeout_s)

    async def close(self) -> None:
        """Leave. What is still in flight breaks."""
        await self.deregister()
        for made in self._clients:
            await made.close()
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

    def _card_record(
        self, instance: instances.Instance, card: model_card.ModelCard
    ) -> model_card.CardRecord:
        return model_card.CardRecord(
            namespace=instance.namespace,
            component=instance.component,
            endpoint=instance.endpoint,
            instance_id=self.instance_id,
            card_json=card,
        )

    async def _put(self, key: str, value: msgspec.Struct) -> None:
        self._records[key] = msgspec.json.encode(value)
        await self.discovery.put(key, self._records[key])


def _request_plane(
    settings: RuntimeConfig,
    credentials: membership.Credentials,
    cluster: MemoryCluster,
    nats: services.NatsPlanes | None,
) -> requests.RequestPlane:
    if settings.request_plane == "memory":
        return memory_requests.MemoryRequestPlane(cluster.network)
    if settings.request_plane == "nats" and nats is not None:
        return nats.new_requests()
    return tcp.TcpRequestPlane(
        settings.tcp_rpc_host, settings.tcp_rpc_port, credentials=credentials
    )


async def _discovery(
    settings: RuntimeConfig, cluster: MemoryCluster, instance_id: ids.InstanceId
) -> discovery.Discovery:
    if settings.discovery_backend == "mem":
        return memory_discovery.MemoryDiscovery(cluster.registry)
    if settings.discovery_backend == "etcd":
        return await _etcd(settings, instance_id)
    environ = {"DYN_FILE_KV": settings.file_kv} if settings.file_kv else os.environ
    return await file.FileDiscovery.open(file.default_directory(environ), instance_id)


async def _etcd(settings: RuntimeConfig, instance_id: ids.InstanceId) -> discovery.Discovery:
    whereto = etcd_access.read(settings.etcd_endpoints, os.environ)
    backend = distribution.load_extra(
        "dynamo.runtime.backends.etcd.discovery", feature="etcd discovery", extra="etcd"
    )
    opened: discovery.Discovery = await backend.EtcdDiscovery.open(
        whereto, instance_id, start_timeout_s=settings.etcd_start_timeout_secs
    )
    return opened


def _event_plane(
    settings: RuntimeConfig,
    credentials: membership.Credentials,
    cluster: MemoryCluster,
    nats: services.NatsPlanes | None,
    registry: discovery.Discovery,
    instance_id: ids.InstanceId,
) -> events.EventPlane:
    if settings.event_plane == "memory":
        return memory_events.MemoryEventPlane(cluster.bus, instance_id)
    if settings.event_plane == "nats" and nats is not None:
        return nats.events
    return zmq.ZmqEventPlane(
        registry, instance_id, host=settings.tcp_rpc_host, credentials=credentials
    )
