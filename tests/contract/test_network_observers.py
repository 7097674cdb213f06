"""What a host between two processes can read, and what it can alter: with a token, and with certificates besides."""

import asyncio
import contextlib

import msgspec
import pytest

import members
import tcp_proxy
import transfer_peer
from dynamo.base import errors
from dynamo.protocols import generate, instances
from dynamo.runtime import requests
from dynamo.runtime.backends import memory, tcp, zmq
from dynamo.transfer import api, descriptors
from dynamo.transfer.backends import tcp as transfers
from waiting import PATIENT_S

ECHO = "a/b/echo"
SECRET, OTHER = "the words of a prompt", "what another one says"  # of one length


class Observer:
    """A proxy that keeps all it carries, and replaces one text by another."""

    def __init__(self, port, old=b"", new=b""):
        self.seen, self._texts = bytearray(), (old, new)
        self.proxy = tcp_proxy.TcpProxy(port, alter=self._alter)

    def _alter(self, data):
        self.seen += data
        return data.replace(*self._texts) if self._texts[0] else data


@contextlib.asynccontextmanager
async def observed(port, *texts):
    observer = Observer(port, *texts)
    yield observer, await observer.proxy.start()
    await observer.proxy.close()


def port_of(address):
    return int(address.rpartition(":")[2])


@pytest.fixture(params=["token", "tls", "both"])
def protection(request, credentials_by_name):
    """The name of the credentials, and they themselves."""
    return request.param, credentials_by_name[request.param]


@contextlib.asynccontextmanager
async def planes(credentials):
    """Two request planes with these credentials, the address of the first, and the bodies that it has served."""
    served = []

    def echo(call):
        served.append(msgspec.msgpack.decode(call.body))
        call.reply(served[-1])
        call.finish()

    server, caller = (
        tcp.TcpRequestPlane(credentials=credentials, item_type=generate.Output) for _ in range(2)
    )
    yield caller, await server.serve(ECHO, echo), served
    await caller.close()
    await server.close()


async def test_requests_are_read_on_the_network_unless_there_are_certificates(protection):
    name, credentials = protection
    async with (
        planes(credentials) as (caller, address, _),
        observed(port_of(address)) as (observer, there),
    ):
        answer = await requests.call(
            caller, there, ECHO, SECRET, reply_type=str, timeout_s=PATIENT_S
        )

    assert answer == SECRET
    assert (SECRET.encode() in observer.seen) == (name == "token")
    assert members.TOKEN.encode() not in observer.seen


async def test_altered_request_is_taken_unless_there_are_certificates(protection):
    name, credentials = protection
    async with (
        planes(credentials) as (caller, address, served),
        observed(port_of(address), SECRET.encode(), OTHER.encode()) as (_, there),
    ):
        await requests.call(caller, there, ECHO, SECRET, reply_type=str, timeout_s=PATIENT_S)

    assert served == [OTHER if name == "token" else SECRET]


async def test_bytes_that_are_altered_below_tls_end_the_connection(credentials_by_name):
    def damage(data):  # a record of TLS 1.3 with application data, and one bit of it
        is_record = data[:3] == b"\x17\x03\x03" and len(data) > 100
        return data[:-1] + bytes([data[-1] ^ 1]) if is_record else data

    async with planes(credentials_by_name["tls"]) as (caller, address, served):
        proxy = tcp_proxy.TcpProxy(port_of(address), alter=damage)
        there = await proxy.start()
        with pytest.raises(errors.WorkerLost):
            await requests.call(
                caller, there, ECHO, SECRET * 10, reply_type=str, timeout_s=PATIENT_S
            )
        await proxy.close()

    assert served == []


async def test_kv_blocks_are_read_on_the_network_unless_there_are_certificates(protection):
    name, credentials = protection
    exporter, importer = [
        await transfer_peer.Worker(
            role, transfers.TcpBackend(credentials=credentials), seed=seed
        ).start()
        for role, seed in (("prefill", 2), ("decode", 1))
    ]
    published = descriptors.decode(exporter.metadata)
    async with observed(port_of(published.addresses["tcp"])) as (observer, there):
        proxied = msgspec.structs.replace(published, addresses={"tcp": there})
        peer = await importer.agent.connect(descriptors.encode(proxied), deadline_s=PATIENT_S)
        copy = importer.agent.prepare(api.TransferOperation.READ, peer, [5], [7])
        await copy.post(deadline_s=PATIENT_S)
        await copy.release()
    (block,) = transfer_peer.blocks_of(bytes(exporter.pool), [7])
    arrived = transfer_peer.blocks_of(bytes(importer.pool), [5])
    for worker in (importer, exporter):
        await worker.close()

    assert arrived == [block]
    assert (block[: transfer_peer.LAYOUT.slab_bytes] in observer.seen) == (name == "token")


@pytest.mark.parametrize("name", ["open", "token", "both"])
async def test_events_are_read_on_the_network_only_without_a_token(name, credentials_by_name):
    cluster, topic = memory.MemoryRegistry(), "dynamo/backend/kv-events"
    publisher, listener = (
        zmq.ZmqEventPlane(
            memory.MemoryDiscovery(cluster), number, credentials=credentials_by_name[name]
        )
        for number in (1, 2)
    )
    await publisher.advertise(topic)
    registry = memory.MemoryDiscovery(cluster)
    (record,) = (
        msgspec.json.decode(value, type=instances.EventChannel)
        for value in cluster.view.get_prefix("").values()
    )
    async with observed(port_of(record.transport["zmq"])) as (observer, there):
        transport = record.transport | {"zmq": f"tcp://{there}"}
        proxied = msgspec.structs.replace(record, transport=transport)
        await registry.put(proxied.key, msgspec.json.encode(proxied))
        heard = asyncio.Queue()
        await listener.subscribe(topic, heard.put_nowait)
        async with asyncio.timeout(PATIENT_S):
            while heard.empty():
                publisher.publish(topic, SECRET.encode())
                await asyncio.sleep(0.01)
        for plane in (listener, publisher):
            await plane.close()

    assert {event.payload for event in heard.get_nowait()} == {SECRET.encode()}
    assert (SECRET.encode() in observer.seen) == (name == "open")
