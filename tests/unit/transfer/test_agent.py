"""What an agent refuses by itself; what it does with others is in the contract suite."""

import asyncio

import pytest

import transfer_peer
from dynamo.base import errors
from dynamo.transfer import agent, descriptors
from dynamo.transfer.backends import local, shm, tcp
from transfer_peer import LAYOUT
from waiting import PATIENT_S


def region(memory, layout=LAYOUT):
    return descriptors.Region(memory=memory, layout=layout)


def test_memory_shorter_than_its_layout_is_refused():
    made = agent.TransferAgent("decode-0", backends=[])

    with pytest.raises(errors.ConfigError, match=f"expected {LAYOUT.num_bytes} writable bytes"):
        made.register(region(memoryview(bytearray(LAYOUT.num_bytes - 1))))


def test_memory_that_cannot_be_written_is_refused():
    made = agent.TransferAgent("decode-0", backends=[])

    with pytest.raises(errors.ConfigError, match="read-only"):
        made.register(region(memoryview(bytes(LAYOUT.num_bytes))))


async def test_steps_out_of_order_are_refused():
    made = agent.TransferAgent("decode-0", backends=[shm.ShmBackend()])

    with pytest.raises(errors.LocalProtocolError, match="register first"):
        await made.start()
    with pytest.raises(errors.LocalProtocolError, match="not started"):
        made.export_metadata()
    pool = made.allocate(LAYOUT.num_bytes)
    with pytest.raises(errors.LocalProtocolError, match="allocated its memory already"):
        made.allocate(1)
    made.register(region(pool))
    with pytest.raises(errors.LocalProtocolError, match="registered its memory already"):
        made.register(region(pool))
    await made.close()


async def test_memory_from_elsewhere_is_offered_by_tcp_alone():
    made = agent.TransferAgent("decode-0", backends=[shm.ShmBackend(), tcp.TcpBackend()])
    made.register(region(memoryview(bytearray(LAYOUT.num_bytes))))

    await made.start()

    assert descriptors.decode(made.export_metadata()).addresses.keys() == {"tcp"}
    await made.close()


async def test_agent_that_takes_no_notifications_says_so():
    deaf = agent.TransferAgent("prefill-0", backends=[tcp.TcpBackend()])
    deaf.register(region(deaf.allocate(LAYOUT.num_bytes)))
    await deaf.start()
    worker = await transfer_peer.Worker("decode-0", tcp.TcpBackend(), seed=1).start()
    peer = await worker.agent.connect(deaf.export_metadata(), deadline_s=PATIENT_S)

    with pytest.raises(errors.TransferError, match="prefill-0 takes no notifications"):
        await worker.agent.notify(peer, b"hello", deadline_s=PATIENT_S)
    await worker.close()
    await deaf.close()


def test_two_starts_of_one_name_are_two_epochs():
    assert (
        agent.TransferAgent("a", backends=[]).epoch != agent.TransferAgent("a", backends=[]).epoch
    )


def test_agent_whose_loop_is_over_says_so():
    room = local.Room()
    gone = transfer_peer.Worker("prefill-0", local.LocalBackend(room), seed=1)
    asyncio.run(gone.start())

    async def tell():
        worker = transfer_peer.Worker("decode-0", local.LocalBackend(room), seed=1)
        await worker.start()
        peer = await worker.agent.connect(gone.metadata, deadline_s=PATIENT_S)
        try:
            await worker.agent.notify(peer, b"hello", deadline_s=PATIENT_S)
        finally:
            await worker.close()

    with pytest.raises(errors.TransferError, match="prefill-0 has ended"):
        asyncio.run(tell())


async def test_peer_that_handles_no_notification_in_time_is_an_error():
    room = local.Room()
    worker = await transfer_peer.Worker("decode-0", local.LocalBackend(room), seed=1).start()
    busy = transfer_peer.Worker("prefill-0", local.LocalBackend(room), seed=1)
    loop = asyncio.new_event_loop()
    await asyncio.to_thread(loop.run_until_complete, busy.start())  # and turns no more
    peer = await worker.agent.connect(busy.metadata, deadline_s=PATIENT_S)

    with pytest.raises(errors.TransferError, match="prefill-0 is too busy to listen"):
        await worker.agent.notify(peer, b"hello", deadline_s=0.05)
    await worker.close()
    loop.close()
