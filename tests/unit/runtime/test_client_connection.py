"""What the frames that come at once bring to the receivers of a connection."""

import asyncio

import msgspec
import pytest

from dynamo.base import clock, errors
from dynamo.protocols import wire
from dynamo.runtime.backends import client_connection, frame_connection


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written = b""

    def write(self, data):
        self.written += data

    def writelines(self, data):
        self.written += b"".join(data)

    def get_write_buffer_size(self):
        return 0

    def abort(self):
        pass


class Receiver:
    """Remembers its items and its end."""

    def __init__(self):
        self.items, self.ends = [], []

    def receive(self, item):
        self.items.append(item)

    def replied(self, body):
        self.items.append(bytes(body))

    def ended(self, error):
        self.ends.append(error and str(error))
        self.error = error


class BatchReceiver(Receiver):
    """Takes items that came together in one call."""

    def receive_all(self, items):
        self.items.append(items)


@pytest.fixture
async def client():
    settings = frame_connection.ConnectionSettings(
        limits=frame_connection.ConnectionLimits(), time=clock.SystemClock(), decode=wire.decode
    )
    made = client_connection.ClientConnection(
        settings, address="there", instance_id=1, name="test", on_lost=lambda lost: None
    )
    made.frames.connection_made(Transport())
    made.frames.data_received(wire.encode(wire.Welcome(wire.VERSION, ())))
    yield made
    made.frames.connection_lost(None)


def step(*items, ended=()):
    return wire.Step(tuple(wire.StepItem(stream, item) for stream, item in items), ended)


def read(client, *frames):
    """Let these frames come at once."""
    client.frames.data_received(b"".join(map(wire.encode, frames)))


def open_stream(client, receiver):
    return client.open_stream("endpoint", None, receiver, {}, None)


async def test_items_that_came_at_once_are_handed_over_together(client):
    batches, single = BatchReceiver(), Receiver()
    open_stream(client, batches)
    open_stream(client, single)
    read(client, step((1, "a"), (2, "x")), step((2, "y"), (1, "b")), step((1, "c"), ended=(1,)))

    assert (batches.items, batches.ends) == ([["a", "b", "c"]], [None])
    assert (single.items, single.ends) == (["x", "y"], [])


async def test_failure_and_reply_come_after_the_items_before_them(client):
    failed, replied = BatchReceiver(), Receiver()
    open_stream(client, failed)
    open_stream(client, replied)
    steps = step((1, "a"), (2, "x")), step((1, "b"), (2, "y"))
    read(client, *steps, wire.Reply(2, msgspec.Raw(b"\xc0")), wire.Fail(1, "internal", "lost"))

    assert (failed.items, failed.ends) == ([["a", "b"]], ["lost"])
    assert replied.items == ["x", "y", b"\xc0"]


async def test_receiver_that_cancels_gets_no_further_item(client):
    class Canceller(Receiver):
        def receive(self, item):
            super().receive(item)
            stream.cancel()

    receiver = Canceller()
    stream = open_stream(client, receiver)
    read(client, step((1, "a")), step((1, "b")))

    assert (receiver.items, receiver.ends) == (["a"], [])


async def test_receiver_that_raises_loses_its_stream_only(client, caplog):
    bad, good = BatchReceiver(), Receiver()
    bad.receive_all = lambda items: 1 / 0
    open_stream(client, bad)
    open_stream(client, good)
    read(client, step((1, "a"), (2, "x")), step((1, "b"), (2, "y")))

    assert bad.ends == ["an internal error lost the answer; see the log"]
    assert (good.items, good.ends) == (["x", "y"], [])
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("needs_proof", "has_answered", "expected"),
    [
        (False, False, errors.WorkerDied),
        (True, False, errors.StreamBroken),
        (True, True, errors.WorkerDied),
    ],
)
async def test_peer_died_with_a_stream_only_if_the_stream_has_arrived_where_that_is_asked(
    client, needs_proof, has_answered, expected
):
    receiver = Receiver()
    client.open_stream("endpoint", None, receiver, {}, None, needs_proof=needs_proof)
    if has_answered:
        read(client, wire.Pong(1))
    client.frames.connection_lost(None)

    assert type(receiver.error) is expected


async def test_proof_of_a_stream_does_not_count_for_a_later_one(client):
    first, second = Receiver(), Receiver()
    for receiver in (first, second):
        client.open_stream("endpoint", None, receiver, {}, None, needs_proof=True)
    read(client, wire.Pong(1))
    client.frames.connection_lost(None)

    assert (type(first.error), type(second.error)) == (errors.WorkerDied, errors.StreamBroken)


async def test_peer_that_answers_a_stream_that_was_never_opened_is_dropped_with_its_other_frames(
    client, caplog
):
    receiver = Receiver()
    open_stream(client, receiver)
    read(client, step((1, "a")), step((9, "x")))

    assert client.frames.is_lost
    assert "stream 9 was never opened" in receiver.ends[0]
    assert "Traceback" not in caplog.text
