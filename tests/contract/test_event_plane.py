"""What every EventPlane promises, run over each of them.

Nobody promises when a listener begins to hear, so each test publishes until the first message has come.
"""

import asyncio
import contextlib
import itertools

import pytest

import nats_server
from dynamo.base import errors
from dynamo.runtime.backends import memory, zmq
from dynamo.runtime.backends.nats import planes
from waiting import PATIENT_S

TOPIC = "dynamo/backend/kv-events"
HELLOS = itertools.count()


class Network:
    """Where planes hear each other."""

    def __init__(self, kind, credentials):
        self._kind = kind
        self._credentials = credentials
        self.nats = None
        self._bus = memory.MemoryBus()
        self._cluster = memory.MemoryRegistry()
        self._ids = itertools.count(7)
        self.planes = []

    def join(self):
        """A plane, and its instance id."""
        instance_id = next(self._ids)
        if self._kind == "memory":
            plane = memory.MemoryEventPlane(self._bus, instance_id)
        elif self._kind == "nats":
            plane = planes.NatsEventPlane(self.nats, instance_id)
        else:
            discovery = memory.MemoryDiscovery(self._cluster)
            plane = zmq.ZmqEventPlane(discovery, instance_id, credentials=self._credentials)
        self.planes.append(plane)
        return plane, instance_id


@pytest.fixture(params=["memory", "zmq-open", "zmq-token", "nats"])
async def network(request):
    kind, _, how = request.param.partition("-")
    credentials = request.getfixturevalue("credentials_by_name")[how] if how else None
    network = Network(kind, credentials)
    if request.param == "nats":
        server = request.getfixturevalue("nats_server")
        network.nats = await nats_server.connect(server.url)
    yield network
    for plane in network.planes:
        await plane.close()
    if network.nats is not None:
        await network.nats.close()


class Ear:
    """A listener that can wait for what it wants to hear."""

    def __init__(self):
        self.events = []
        self._came = asyncio.Event()

    def __call__(self, batch):
        self.events += batch
        self._came.set()

    async def wait_for(self, is_heard):
        async with asyncio.timeout(PATIENT_S):
            while not is_heard(self.events):
                self._came.clear()
                await self._came.wait()

    async def hears(self, publisher, topic=TOPIC):
        """Have `publisher` speak until we hear it; says how many messages that took."""
        payload, spoken = b"hello %d" % next(HELLOS), 0
        async with asyncio.timeout(PATIENT_S):
            while payload not in [event.payload for event in self.events]:
                publisher.publish(topic, payload)
                spoken += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await self.wait_for(
                            lambda events: events[-1:] and events[-1].payload == payload
                        )
        return spoken


async def test_subscriber_gets_numbered_messages_in_order(network):
    (speaker, speaker_id), (listener, _) = network.join(), network.join()
    await speaker.advertise(TOPIC)
    ear = Ear()
    await listener.subscribe(TOPIC, ear)
    spoken = await ear.hears(speaker)
    for i in range(500):
        speaker.publish(TOPIC, b"%d" % i)
    await ear.wait_for(lambda events: events[-1].payload == b"499")
    first = ear.events[0].number

    assert [e.number for e in ear.events] == list(range(first, spoken + 500))
    assert [e.payload for e in ear.events][-500:] == [b"%d" % i for i in range(500)]
    assert {(e.topic, e.publisher) for e in ear.events} == {(TOPIC, speaker_id)}


async def test_subscriber_gets_messages_of_later_publishers(network):
    (listener, _), (first, first_id) = network.join(), network.join()
    await first.advertise(TOPIC)
    ear = Ear()
    await listener.subscribe(TOPIC, ear)
    await ear.hears(first)
    second, second_id = network.join()
    await second.advertise(TOPIC)
    ear.events.clear()
    await ear.hears(second)

    assert {e.publisher for e in ear.events} >= {second_id}
    assert {e.publisher for e in ear.events} <= {first_id, second_id}


async def test_subscriber_gets_messages_of_its_own_process(network):
    plane, plane_id = network.join()
    await plane.advertise(TOPIC)
    ear = Ear()
    await plane.subscribe(TOPIC, ear)
    await ear.hears(plane)

    assert ear.events[0].publisher == plane_id


async def test_topics_are_delivered_and_numbered_separately(network):
    (speaker, _), (listener, _) = network.join(), network.join()
    longer = TOPIC + "-more"  # a topic that begins with another's name is another topic
    for topic in (TOPIC, longer):
        await speaker.advertise(topic)
    ear, longer_ear = Ear(), Ear()
    await listener.subscribe(TOPIC, ear)
    await listener.subscribe(longer, longer_ear)
    spoken = await ear.hears(speaker)
    longer_spoken = await longer_ear.hears(speaker, longer)
    speaker.publish(longer, b"end")
    speaker.publish(TOPIC, b"end")
    for one in (ear, longer_ear):
        await one.wait_for(lambda events: events[-1].payload == b"end")

    assert ear.events[-1].number == spoken
    assert longer_ear.events[-1].number == longer_spoken
    assert {e.topic for e in ear.events} == {TOPIC}
    assert {e.topic for e in longer_ear.events} == {longer}


async def test_closed_subscription_gets_nothing_while_others_do(network):
    (speaker, _), (listener, _) = network.join(), network.join()
    await speaker.advertise(TOPIC)
    closed_ear, ear = Ear(), Ear()
    closed = await listener.subscribe(TOPIC, closed_ear)
    await listener.subscribe(TOPIC, ear)
    await ear.hears(speaker)
    speaker.publish(TOPIC, b"on its way")
    await closed.close()
    await closed.close()
    heard_before = list(closed_ear.events)
    speaker.publish(TOPIC, b"end")
    await ear.wait_for(lambda events: events[-1].payload == b"end")

    assert closed_ear.events == heard_before


async def test_topic_can_be_subscribed_again_after_its_last_subscriber(network):
    (speaker, _), (listener, _) = network.join(), network.join()
    await speaker.advertise(TOPIC)
    ear, late_ear = Ear(), Ear()
    subscription = await listener.subscribe(TOPIC, ear)
    await ear.hears(speaker)
    await subscription.close()
    await listener.subscribe(TOPIC, late_ear)
    await late_ear.hears(speaker)

    assert late_ear.events[0].number > ear.events[0].number


async def test_failing_subscriber_does_not_affect_others(network):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    (speaker, _), (listener, _) = network.join(), network.join()
    await speaker.advertise(TOPIC)
    ear = Ear()

    def fail(batch):
        raise ValueError("boo")

    await listener.subscribe(TOPIC, fail)
    await listener.subscribe(TOPIC, ear)
    await ear.hears(speaker)
    speaker.publish(TOPIC, b"end")
    await ear.wait_for(lambda events: events[-1].payload == b"end")

    assert isinstance(told[0]["exception"], ValueError)


async def test_publish_without_advertise_is_an_error(network):
    speaker, _ = network.join()
    with pytest.raises(errors.LocalProtocolError, match="advertise"):
        speaker.publish(TOPIC, b"")
    await speaker.advertise("another/topic/here")
    with pytest.raises(errors.LocalProtocolError, match="advertise"):
        speaker.publish(TOPIC, b"")


async def test_closed_publisher_is_silent_and_closes_twice(network):
    (speaker, _), (listener, _) = network.join(), network.join()
    await speaker.advertise(TOPIC)
    ear = Ear()
    await listener.subscribe(TOPIC, ear)
    await ear.hears(speaker)
    await speaker.close()
    await speaker.close()
    speaker.publish(TOPIC, b"too late")
    other, _ = network.join()
    await other.advertise(TOPIC)
    ear.events.clear()
    await ear.hears(other)

    assert b"too late" not in [e.payload for e in ear.events]


async def test_subscriber_may_close_at_any_time(network):
    (speaker, _), (listener, _) = network.join(), network.join()
    await speaker.advertise(TOPIC)
    ear = Ear()
    await listener.subscribe(TOPIC, ear)
    await ear.hears(speaker)
    for _ in range(100):
        speaker.publish(TOPIC, b"flood")
    await listener.close()
    heard_before = len(ear.events)
    speaker.publish(TOPIC, b"too late")
    await asyncio.sleep(0)

    assert len(ear.events) == heard_before
