"""The addresses of services on the laptop's cluster lead to their pods, whatever changes about the service."""

import asyncio

import pytest

import ports
from dynamo.base import tasks
from dynamo.testing.kube import service_network, store
from waiting import PATIENT_S

KEY = ("default", "web")


class HostNetwork:
    """A network in which all addresses of 127.0.0.0/8 lead to this host."""

    is_isolated = True

    def __init__(self):
        self.addresses = []

    async def set_service_address(self, address, *, is_present):
        self.addresses.append(address) if is_present else self.addresses.remove(address)


@pytest.fixture
async def network():
    """The services of a cluster with one pod, which answers `hello`."""

    async def greet(reader, writer):
        writer.write(b"hello")
        writer.close()

    pod = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with pod, tasks.Tasks() as running:
        made = service_network.ServiceNetwork(store.Store(), HostNetwork(), running)
        made.pod_port = pod.sockets[0].getsockname()[1]
        yield made
        await made.close()


async def write_service(network, port, *, name="http", address="127.0.0.1"):
    metadata = {"namespace": KEY[0], "name": KEY[1]}
    spec = {"clusterIP": address, "ports": [{"port": port, "name": name}]}
    slice_ = {
        "metadata": {**metadata, "labels": {"kubernetes.io/service-name": KEY[1]}},
        "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": True}}],
        "ports": [{"name": name, "port": network.pod_port}],
    }
    network._objects.put(("", "services"), {"metadata": metadata, "spec": spec})
    network._objects.put(("discovery.k8s.io", "endpointslices"), slice_)
    await network.reconcile(KEY)


async def read(address, port):
    async with asyncio.timeout(PATIENT_S):
        reader, writer = await asyncio.open_connection(address, port)
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_port_of_a_service_that_is_renamed_leads_to_its_pods(network):
    port = ports.reserve()
    await write_service(network, port)
    before = await read("127.0.0.1", port)
    await write_service(network, port, name="web")

    assert (before, await read("127.0.0.1", port)) == (b"hello", b"hello")


async def test_service_made_again_is_found_at_its_new_address_only(network):
    port = ports.reserve()
    await write_service(network, port)
    await write_service(network, port, address="127.0.0.2")

    assert await read("127.0.0.2", port) == b"hello"
    assert network._network.addresses == ["127.0.0.2"]
    network._objects.delete(("", "services"), KEY)
    await network.reconcile(KEY)
    assert network._network.addresses == []
    with pytest.raises(ConnectionRefusedError):
        await read("127.0.0.2", port)
