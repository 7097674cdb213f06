"""The KV event subscriber against a publisher as vLLM's: a PUB socket that connects, a ROUTER that replays."""

import asyncio
import contextlib
import errno

import msgspec
import pytest
import zmq

from dynamo.base import errors
from dynamo.engine.adapters import kv_subscriber
from dynamo.protocols import kv_events
from dynamo.runtime import listening
from waiting import PATIENT_S

BLOCK = 2


def payload(number, rank=0):
    block = {
        "type": "BlockStored", "block_hashes": [number], "parent_block_hash": number - 1 if number else None,
        "token_ids": [number, number], "block_size": BLOCK,
    }  # fmt: skip
    return msgspec.msgpack.encode([0.5, [block], rank])


def free_endpoints(num_ranks):
    with contextlib.ExitStack() as reservations:
        return kv_subscriber.PublisherEndpoints.on_free_ports(num_ranks, reservations)


class Publisher:
    """One rank of vLLM."""

    def __init__(self, endpoints, rank=0):
        self.context = zmq.Context()
        self.rank = rank
        self.pub = self.context.socket(zmq.XPUB)
        endpoint = kv_subscriber.endpoint_of_rank(endpoints.endpoint, rank)
        if kv_subscriber.is_bound_by_publisher(endpoint):
            self.pub.bind(endpoint)
        else:
            self.pub.connect(endpoint)
        self.topic = endpoints.topic.encode()
        self.replay = self.context.socket(zmq.ROUTER)
        if endpoints.replay_endpoint:
            self.replay.bind(kv_subscriber.endpoint_of_rank(endpoints.replay_endpoint, rank))

    async def heard(self):
        assert await asyncio.to_thread(self.pub.recv) == b"\x01" + self.topic

    def tell(self, number):
        self.pub.send_multipart((self.topic, number.to_bytes(8, "big"), payload(number, self.rank)))

    async def answer(self, until):
        """One question, with what there is from the asked number on."""
        client, _, first = await asyncio.to_thread(self.replay.recv_multipart)
        for number in range(int.from_bytes(first, "big"), until):
            frames = (
                client,
                b"",
                self.topic,
                number.to_bytes(8, "big"),
                payload(number, self.rank),
            )
            self.replay.send_multipart(frames)
        self.replay.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))

    def close(self):
        self.context.destroy(linger=0)


class Listener:
    def __init__(self):
        self.told = asyncio.Queue()

    def __call__(self, events, dp_rank):
        for event in events:
            self.told.put_nowait((dp_rank, event))

    async def next_tokens(self):
        """The rank and the number of the next stored block's tokens."""
        async with asyncio.timeout(PATIENT_S):
            return await self.told.get()


@pytest.fixture
async def start():
    begun, all_publishers = [], []

    async def start(endpoints, num_ranks=1):
        subscriber = kv_subscriber.ZmqKvSubscriber(endpoints, num_ranks)
        begun.append(subscriber.close)
        publishers = [Publisher(endpoints, rank) for rank in range(num_ranks)]
        all_publishers.extend(publishers)
        listener = Listener()
        subscriber.start(BLOCK, listener)
        for publisher in publishers:
            await publisher.heard()
        return subscriber, publishers, listener

    yield start
    for close in begun:
        await close()
        await close()
    for publisher in all_publishers:
        publisher.close()


async def test_events_of_each_rank_are_delivered(start):
    _, publishers, listener = await start(free_endpoints(2), 2)

    publishers[1].tell(0)
    first = await listener.next_tokens()
    publishers[0].tell(0)
    second = await listener.next_tokens()

    assert [rank for rank, _ in (first, second)] == [1, 0]
    assert all(isinstance(event, kv_events.Stored) for _, event in (first, second))


async def test_missed_batches_are_replayed(start):
    subscriber, (publisher,), listener = await start(free_endpoints(1))

    publisher.tell(3)
    await publisher.answer(until=4)
    told = [(await listener.next_tokens())[1] for _ in range(4)]

    parents = [event.parent_hash for event in told]
    assert parents == [None, *(event.blocks[0].block_hash for event in told[:3])]
    assert (subscriber.num_gaps, subscriber.num_dropped) == (0, 0)


async def test_events_go_on_when_there_is_no_file_left_to_ask_for_missed_ones(
    start, monkeypatch, caplog
):
    subscriber, (publisher,), listener = await start(free_endpoints(1))

    def refuse(kind):
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(subscriber._context, "socket", refuse)
        publisher.tell(3)
        told = [await listener.next_tokens()]
    publisher.tell(0)  # of a publisher that was started anew
    told += [await listener.next_tokens() for _ in range(2)]

    assert [type(event).__name__ for _, event in told] == ["Cleared", "Cleared", "Stored"]
    assert "KV events that were missed are lost: tcp://127.0.0.1:" in caplog.text


async def test_the_subscriber_connects_to_a_users_endpoint(start, caplog):
    port = listening.find_free_ports(1)
    endpoints = kv_subscriber.PublisherEndpoints(endpoint=f"tcp://*:{port}", topic="kv-events")
    subscriber, (publisher,), listener = await start(endpoints)

    publisher.tell(1)
    _, event = await listener.next_tokens()

    assert event == kv_events.Cleared()
    assert (subscriber.num_gaps, subscriber.num_dropped) == (1, 1)
    assert "1 blocks dropped without a hash, 1 gaps after which all were cleared" in caplog.text


async def test_the_subscriber_and_the_publisher_bind_the_ports_that_are_kept_for_them(start):
    with contextlib.ExitStack() as reservations:
        endpoints = kv_subscriber.PublisherEndpoints.on_free_ports(1, reservations)
        _, (publisher,), listener = await start(endpoints)

    publisher.tell(0)
    await listener.next_tokens()


async def test_an_endpoint_in_use_is_refused():
    endpoints = free_endpoints(1)
    subscriber = kv_subscriber.ZmqKvSubscriber(endpoints, 1)

    with pytest.raises(errors.ConfigError, match="cannot subscribe to KV events at 'tcp://127"):
        kv_subscriber.ZmqKvSubscriber(endpoints, 1)

    await subscriber.close()


def test_ranks_use_consecutive_ports():
    assert kv_subscriber.endpoint_of_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert kv_subscriber.endpoint_of_rank("ipc:///tmp/x", 0) == "ipc:///tmp/x"
    with pytest.raises(errors.ConfigError, match="several ranks: expected an endpoint tcp"):
        kv_subscriber.endpoint_of_rank("ipc:///tmp/x", 1)


def test_a_wildcard_endpoint_is_connected_on_loopback():
    assert kv_subscriber.connectable("tcp://*:5557") == "tcp://127.0.0.1:5557"
    assert kv_subscriber.connectable("tcp://[::]:5557") == "tcp://[::1]:5557"
    assert not kv_subscriber.is_bound_by_publisher("tcp://127.0.0.1:5557")
