"""KV copies fill a slow link between two hosts: the request plane, which has connections of its own, stays alive."""

import asyncio
import contextlib

import hosts
import pytest

import members
import transfer_peer
from dynamo.base import errors
from dynamo.runtime import listening, requests
from dynamo.runtime.backends import tcp
from dynamo.transfer import api
from dynamo.transfer.backends import tcp as copies
from waiting import PATIENT_S

BYTES_PER_S = 125_000
COPYING_S = 6.0  # twice as long as a silent peer is borne
NUM_COPIES = 4


PROBE_BYTES, PROBE_S = 2**18, 0.2
REQUEST_BYTES = 700_000  # which take longer than a silent peer is borne


async def copy_on(ours, peer, number):
    """Copy blocks until cancelled; one that is given up on such a link is tried again."""
    first = number * 100
    blocks = list(range(first, first + 100))
    while True:
        transfer = ours.agent.prepare(api.TransferOperation.READ, peer, blocks, blocks)
        with contextlib.suppress(Exception):
            await transfer.post(deadline_s=COPYING_S)
        await transfer.release()


async def test_pings_are_answered_beside_copies_on_a_slow_link():
    credentials, receiver = members.with_token(), requests.ItemReceiver(dict)
    with hosts.Network().open() as network:
        host = network.add(has_wire=True)
        at = listening.ListenAddress(host=host.address)
        with hosts.standing_in(host.name):  # sockets and processes stay where they begin
            other = transfer_peer.ProcessPeer("tcp-token", options={"listen_address": at})
            server = tcp.TcpRequestPlane(at, credentials=credentials, instance_id=7)
            address = await server.serve("a/b/silent", lambda call: call.on_cancel(lambda: None))
        client = tcp.TcpRequestPlane(credentials=credentials)
        own = listening.ListenAddress(host=network.address(1))
        backend = copies.TcpBackend(listen_address=own, credentials=credentials)
        ours = await transfer_peer.Worker("decode-0", backend, seed=1).start()
        peer = await ours.agent.connect(other.metadata, deadline_s=COPYING_S)
        await client.open(address, "a/b/silent", {}, receiver, instance_id=7)
        host.set_wire(bytes_per_s=BYTES_PER_S)
        before = client.traffic.received.value
        tasks = [asyncio.create_task(copy_on(ours, peer, i)) for i in range(NUM_COPIES)]
        await asyncio.sleep(COPYING_S)  # the load itself
        was_alive, num_bytes = not receiver.is_complete, client.traffic.received.value - before
        has_copied = bytes(ours.pool) != transfer_peer.content(1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(errors.TransferError):
            await ours.agent.probe(peer, PROBE_BYTES, deadline_s=PROBE_S)
        host.set_wire()
        await ours.agent.probe(peer, PROBE_BYTES, deadline_s=PATIENT_S)
        await ours.close()
        await client.close()
        await server.close()
        other.close()

    assert was_alive, receiver.error
    assert num_bytes > 0  # pongs
    assert has_copied


async def test_long_request_over_a_slow_link_is_not_taken_for_silence():
    credentials = members.with_token()
    with hosts.Network().open() as network:
        host = network.add(has_wire=True)
        at = listening.ListenAddress(host=host.address)
        with hosts.standing_in(host.name):
            server = tcp.TcpRequestPlane(at, credentials=credentials, instance_id=7)
            address = await server.serve("a/b/length", lambda call: call.reply(len(call.body)))
        client = tcp.TcpRequestPlane(credentials=credentials)
        host.set_wire(bytes_per_s=BYTES_PER_S)
        body = b"x" * REQUEST_BYTES
        length = await requests.call(
            client, address, "a/b/length", body, reply_type=int, timeout_s=PATIENT_S, instance_id=7
        )
        await client.close()
        await server.close()

    assert length > REQUEST_BYTES
