"""What one side of a link says, the other hears in full, or knows that it did not."""

import asyncio
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import clock, errors
from dynamo.runtime.backends.nats import planes
from waiting import until

LIMIT = planes.HEADER.size + 5
writes = st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=8)


def said(datas):
    writer = planes.EnvelopeWriter()
    return [m for data in datas for m in writer.split(data, LIMIT)]


@given(writes)
def test_bytes_are_split_into_messages_under_the_limit(datas):
    messages, reader = said(datas), planes.EnvelopeReader()
    heard = [reader.unwrap(message) for message in messages]

    assert b"".join(data for _, data in heard) == b"".join(datas)
    assert {kind for kind, _ in heard} == {planes.MessageKind.BYTES}
    assert all(len(message) <= LIMIT for message in messages)


@given(writes, st.data())
def test_a_message_that_is_missing_doubled_or_displaced_is_noticed(datas, data):
    messages, reader = said(datas), planes.EnvelopeReader()
    at = data.draw(st.integers(0, len(messages) - 1))
    harmed = data.draw(
        st.sampled_from(
            [
                messages[:at] + messages[at + 1 :] + [planes.HEADER.pack(1, len(messages))],
                messages[: at + 1] + messages[at:],
                messages[at:] + messages[:at] if at else [*messages, messages[0]],
            ]
        )
    )
    with pytest.raises(errors.RemoteProtocolError, match="lost a message"):  # noqa: PT012
        for message in harmed:
            reader.unwrap(message)


@given(st.binary(max_size=12))
def test_malformed_message_raises_a_protocol_error(message):
    try:
        kind, _ = planes.EnvelopeReader().unwrap(message)
    except errors.RemoteProtocolError:
        return

    assert kind in planes.MessageKind
    assert kind is planes.MessageKind.PROBE or message[1 : planes.HEADER.size] == bytes(8)


class Server:
    """The connection of a process, as its event plane uses it."""

    clock = clock.SystemClock()

    def __init__(self):
        self.subscribed = set()

    async def subscribe(self, subject, on_message):
        self.subscribed.add(on_message)
        return self

    async def close(self):
        self.subscribed.clear()


async def test_closed_subscription_to_events_keeps_its_listener_no_longer():
    class Listener:
        def __call__(self, batch):
            pass

    plane, listener = planes.NatsEventPlane(Server(), 1), Listener()
    subscription = await plane.subscribe("n/c/e", listener)
    await subscription.close()
    kept = weakref.ref(listener)
    del listener, subscription
    gc.collect()  # the subscription and its receiver refer to each other

    assert kept() is None


class Member:
    """The connection of one of several processes; `inboxes` are those that the server knows, by subject."""

    clock = clock.SystemClock()
    max_message_bytes, backlog_bytes = 2**20, 0

    def __init__(self, inboxes):
        self._inboxes = inboxes

    def on_lost(self, listener):
        pass

    def is_back_since(self, duration_s):
        return False

    async def wait_connected(self, limit_s):
        pass

    async def subscribe(self, subject, on_message):
        self._inbox = subject.removesuffix(".*")
        self._inboxes[self._inbox] = on_message
        return self

    async def close(self):
        self._inboxes.pop(self._inbox, None)

    def publish(self, subject, data, reply=""):
        if (listener := self._inboxes.get(subject.rpartition(".")[0])) is None:
            listener, subject, data, reply = self._inboxes[self._inbox], reply, b"", ""
        asyncio.get_running_loop().call_soon(listener, subject, reply, data)


async def test_connection_of_a_client_that_died_ends_when_another_client_comes():
    inboxes, ends = {}, []

    class Protocol(asyncio.Protocol):
        def connection_lost(self, exc):
            ends.append(exc)

    server, first, second = (
        planes.NatsNetwork(Member(inboxes), namespace="n", number=number) for number in range(3)
    )
    listener = await server.listen(Protocol)
    await first.connect(listener.address, asyncio.Protocol)
    await until(lambda: server._transports)
    await first.close()  # without a word to the server of its connection
    await second.connect(listener.address, asyncio.Protocol)
    await until(lambda: ends)
    await second.close()

    assert len(server._transports) == len(ends) == 1
