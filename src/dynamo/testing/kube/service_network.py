"""Names and addresses of services, as pods see them: a hosts file for each pod, and a listener for each service's port.

It stands for the cluster's DNS and for kube-proxy. A service's name leads to its cluster IP, which the host has, and a
connection to it goes to one of the ready pods; the name of a headless service leads to its pods. Hosts files are
written in place, since pods have them mounted. Only pods with a network of their own have either.
"""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from dynamo.base import errors, tasks
from dynamo.testing.kube import pod_network, store

Object = dict[str, Any]
_SERVICES, _SLICES = ("", "services"), ("discovery.k8s.io", "endpointslices")
_SERVICE_LABEL = "kubernetes.io/service-name"
_PIECE_BYTES = 2**16
_CONNECT_S = 5.0


class ServiceNetwork:
    """A controller of services and endpoint slices."""

    def __init__(
        self, objects: store.Store, network: pod_network.PodNetwork, running: tasks.Tasks
    ) -> None:
        self._objects = objects
        self._network = network
        self._running = running
        self._pods: dict[Path, tuple[str, str]] = {}  # namespace and first lines by hosts file
        # by service, port and its name
        self._listeners: dict[tuple[str, str], dict[tuple[int, str], asyncio.Server]] = {}
        self._addresses: dict[tuple[str, str], str] = {}
        self._turns = itertools.count()

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the service that changed, itself or in its endpoints."""
        meta = change.item["metadata"]
        if change.table == _SERVICES:
            yield meta["namespace"], meta["name"]
        elif change.table == _SLICES and _SERVICE_LABEL in (meta.get("labels") or {}):
            yield meta["namespace"], meta["labels"][_SERVICE_LABEL]

    async def reconcile(self, key: Hashable) -> float | None:
        """Write the hosts files, and listen at the ports of one service."""
        for path in self._pods:
            self._write_hosts(path)
        if self._network.is_isolated:
            with contextlib.suppress(
                errors.ConfigError, OSError
            ):  # another cluster has the address
                await self._listen(cast("tuple[str, str]", key))
        return None

    def add_pod(self, path: Path, namespace: str, first_lines: str) -> None:
        """Keep a hosts file up to date for a pod of a namespace."""
        self._pods[path] = namespace, first_lines
        self._write_hosts(path)

    def remove_pod(self, path: Path) -> None:
        """Leave a hosts file alone from now on."""
        self._pods.pop(path, None)

    def _write_hosts(self, path: Path) -> None:
        namespace, text = self._pods[path]
        for service in self._objects.list_items(_SERVICES):
            meta, address = service["metadata"], service["spec"].get("clusterIP")
            domain = f"{meta['name']}.{meta['namespace']}"
            names = f"{domain} {domain}.svc {domain}.svc.cluster.local"
            if meta["namespace"] == namespace:
                names += f" {meta['name']}"
            if address and address != "None":
                text += f"{address} {names}\n"
                continue
            for endpoint in self._endpoints(namespace=meta["namespace"], name=meta["name"]):
                own = endpoint.get("hostname")
                of_pod = f" {own}.{domain}.svc.cluster.local {own}.{meta['name']}" if own else ""
                text += f"{endpoint['addresses'][0]} {names}{of_pod}\n"
        with path.open("r+") as file:
            file.write(text)
            file.truncate()

    def _endpoints(self, *, namespace: str, name: str) -> Iterator[Object]:
        for item in self._objects.list_items(_SLICES, namespace):
            if (item["metadata"].get("labels") or {}).get(_SERVICE_LABEL) == name:
                for endpoint in item.get("endpoints") or ():
                    if (endpoint.get("conditions") or {}).get("ready", True):
                        yield {**endpoint, "ports": item.get("ports") or ()}

    async def _listen(self, key: tuple[str, str]) -> None:
        service = self._objects.get(_SERVICES, key)
        spec = service["spec"] if service is not None else {}
        address = spec.get("clusterIP", "None")
        has_moved = key in self._addresses and self._addresses[key] != address
        ports = {
            (port["port"], port.get("name", ""))
            for port in spec.get("ports") or ()
            if port.get("protocol", "TCP") == "TCP"
        }
        listeners = self._listeners.setdefault(key, {})
        for entry in listeners.keys() - (set() if has_moved else ports):
            listeners.pop(entry).close()
        if has_moved:  # the service is gone, or another one of its name
            await self._network.set_service_address(self._addresses.pop(key), is_present=False)
        if address != "None" and key not in self._addresses:
            await self._network.set_service_address(address, is_present=True)
            self._addresses[key] = address
        for number, name in ports - listeners.keys() if key in self._addresses else ():
            forward = functools.partial(self._start_forwarding, key, name)
            listeners[number, name] = await asyncio.start_server(
                forward, self._addresses[key], number
            )
        if service is None:
            del self._listeners[key]

    def _start_forwarding(
        self,
        key: tuple[str, str],
        port: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._running.start("connection to a service", self._forward(key, port, reader, writer))

    async def _forward(
        self,
        key: tuple[str, str],
        port: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Connect a client to the next ready pod, or cut it off if there is none."""
        targets = [
            (endpoint["addresses"][0], entry["port"])
            for endpoint in self._endpoints(namespace=key[0], name=key[1])
            for entry in endpoint["ports"]
            if entry.get("name", "") == port and entry.get("port")
        ]
        try:
            if not targets:
                raise ConnectionRefusedError
            async with asyncio.timeout(_CONNECT_S):
                inner = await asyncio.open_connection(*targets[next(self._turns) % len(targets)])
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_copy(reader, inner[1]), _copy(inner[0], writer))
        finally:
            writer.close()
            inner[1].close()

    async def close(self) -> None:
        """Stop listening."""
        for listeners in self._listeners.values():
            for listener in listeners.values():
                listener.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, which is passed on; a connection that breaks ends both directions."""
    try:
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()
