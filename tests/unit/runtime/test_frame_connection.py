"""A connection drops a peer that does not take what is sent, and reports its end once."""

import asyncio

import pytest

from dynamo.base import clock
from dynamo.protocols import wire
from dynamo.runtime.backends import frame_connection


class Transport(asyncio.Transport):
    """Takes everything and sends nothing."""

    def __init__(self):
        super().__init__()
        self.backlog, self.calls, self.writes = 0, [], []

    def write(self, data):
        self.backlog += len(data)
        self.writes.append(data)

    def get_write_buffer_size(self):
        return self.backlog

    def abort(self):
        self.calls.append("abort")

    def close(self):
        self.calls.append("close")


class Handler:
    """Records all calls."""

    def __init__(self):
        self.num_streams, self.frames, self.losses = 0, [], []

    def handle_connected(self):
        self.frames.append("connected")

    def handle_frame(self, frame):
        self.frames.append(frame)

    def handle_tick(self):
        pass

    def handle_quiet(self):
        self.frames.append("quiet")

    def handle_lost(self, reason):
        self.losses.append(reason)


def settings(**limits):
    return frame_connection.ConnectionSettings(
        limits=frame_connection.ConnectionLimits(**limits),
        time=clock.SystemClock(),
        decode=wire.decode,
    )


@pytest.fixture
async def made():
    end, transport = Handler(), Transport()
    own = frame_connection.FrameConnection(settings(max_backlog_bytes=100), end)
    own.connection_made(transport)
    yield own, end, transport
    own.connection_lost(None)


async def test_a_peer_that_is_too_slow_is_dropped(made):
    own, end, transport = made
    own.write(b"x" * 100)
    await asyncio.sleep(0)
    assert not own.is_lost
    own.write(b"x")
    await asyncio.sleep(0)
    own.write(b"never sent")
    await asyncio.sleep(0)

    assert transport.calls == ["abort"]
    assert transport.backlog == 101
    assert len(end.losses) == 1
    assert "too slow" in end.losses[0]


async def test_frames_of_one_loop_turn_are_sent_in_one_write(made):
    own, _, transport = made
    own.write(b"one")
    own.write(b"two")
    await asyncio.sleep(0)

    assert transport.writes == [b"onetwo"]


async def test_close_sends_buffered_frames(made):
    own, _, transport = made
    own.write(b"last words")
    closing = asyncio.ensure_future(own.close())
    await asyncio.sleep(0)
    own.connection_lost(None)
    await closing

    assert transport.writes == [b"last words"]


async def test_the_end_is_said_once(made):
    own, end, _ = made
    own.connection_lost(OSError("reset"))
    own.connection_lost(None)
    own.drop("late")

    assert end.losses == ["closed the connection (reset)"]
    assert not own.was_dropped


async def test_no_frame_is_received_after_the_connection_is_dropped(made):
    own, end, _ = made
    end.handle_frame = lambda frame: (end.frames.append(frame), own.drop("enough"))
    own.data_received(wire.encode(wire.Ping(1)) + wire.encode(wire.Ping(2)))

    assert end.frames == ["connected", wire.Ping(1)]


async def test_a_peer_that_does_not_take_the_last_words_is_dropped_in_time(made, monkeypatch):
    own, end, transport = made
    monkeypatch.setattr(frame_connection, "CLOSE_S", 0.01)
    await own.close()

    assert transport.calls == ["close", "abort"]
    assert len(end.losses) == 1


async def test_a_link_that_was_never_connected_can_be_closed():
    own = frame_connection.FrameConnection(settings(), Handler())
    await own.close()
    own.write(b"into the void")

    assert not own.is_lost
