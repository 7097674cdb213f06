"""A connection drops a peer that does not take what is sent, and reports its end once."""

import asyncio

import pytest

from dynamo.base import clock
from dynamo.protocols import wire
from dynamo.runtime import requests
from dynamo.runtime.backends import client_connection, frame_connection
from dynamo.testing import clock as clocks


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

    limit_ticks = frame_connection.TICKS

    def __init__(self):
        self.num_streams, self.frames, self.losses = 0, [], []

    def handle_connected(self):
        self.frames.append("connected")

    def handle_frame(self, frame):
        self.frames.append(frame)

    def handle_read(self):
        pass

    def handle_tick(self):
        pass

    def handle_quiet(self):
        self.frames.append("quiet")

    def handle_silent(self, reason):
        self.own.drop(reason)

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


class LateClock(clocks.VirtualClock):
    """A clock on which the process stands still: its timers run only when it goes on."""

    def stand_still(self, duration_s):
        self.skipped_s += duration_s

    skipped_s = 0.0

    def now(self):
        return super().now() + self.skipped_s


@pytest.fixture
async def watched():
    time, end = LateClock(), Handler()
    own_settings = frame_connection.ConnectionSettings(
        limits=frame_connection.ConnectionLimits(silence_s=3.0), time=time, decode=wire.decode
    )
    own = frame_connection.FrameConnection(own_settings, end)
    own.connection_made(Transport())
    end.num_streams, end.own = 1, own
    yield own, end, time
    own.connection_lost(None)


async def test_silent_peer_is_dropped_after_the_limit(watched):
    own, end, time = watched
    await time.advance(2.9)
    assert not own.is_lost
    await time.advance(0.2)

    assert end.losses == ["was silent for 3 s"]


async def test_silence_while_this_process_stood_still_is_not_counted(watched):
    own, end, time = watched
    await time.advance(2.9)
    time.stand_still(20.0)
    end.frames.clear()
    await time.advance(0.2)

    assert not own.is_lost
    assert end.frames == ["quiet"]  # the peer hears of us at once
    await time.advance(2.8)
    assert not own.is_lost
    await time.advance(0.2)
    assert own.is_lost


async def test_process_that_is_late_again_and_again_does_not_drop_its_peers(watched):
    own, _, time = watched
    for _ in range(20):
        time.stand_still(0.6)
        await time.advance(0.5)

    assert not own.is_lost


@pytest.mark.parametrize("is_heard", [False, True], ids=["silent", "without an answer"])
async def test_process_that_is_always_late_gives_up_a_peer_in_the_end(watched, is_heard):
    own, _, time = watched
    own.expect_answer()
    num_ticks = 0
    while not own.is_lost and num_ticks < 1000:
        num_ticks += 1
        if is_heard:
            own.data_received(wire.encode(wire.Pong(1)))
        time.stand_still(0.6)
        await time.advance(0.5)

    assert num_ticks == frame_connection.LATE_TICKS + frame_connection.TICKS


async def test_living_peer_of_a_process_that_is_always_late_is_kept(watched):
    own, _, time = watched
    for number in range(200):
        if number % 20 == 0:
            own.expect_answer()
            own.data_received(wire.encode(wire.Pong(1)))
            own.note_answer(is_last=True)
        time.stand_still(0.6)
        await time.advance(0.5)

    assert not own.is_lost


async def test_peer_that_does_not_answer_is_dropped_though_it_is_heard(watched):
    own, end, time = watched
    own.expect_answer()
    for _ in range(7):
        own.data_received(wire.encode(wire.Pong(1)))
        await time.advance(0.4)
    own.note_answer(is_last=False)
    await time.advance(0.4)
    assert not own.is_lost
    for _ in range(7):
        own.data_received(wire.encode(wire.Pong(1)))
        await time.advance(0.4)

    assert "did not answer for 3 s" in end.losses[0]


async def test_peer_that_owes_no_answer_is_not_dropped_while_it_is_heard(watched):
    own, _, time = watched
    own.expect_answer()
    own.note_answer(is_last=True)
    for _ in range(20):
        own.data_received(wire.encode(wire.Pong(1)))
        await time.advance(0.4)

    assert not own.is_lost


async def test_peer_that_takes_what_waits_for_it_is_not_silent(watched, monkeypatch):
    own, _, time = watched
    waiting = iter(range(20_000, 0, -1_000))
    monkeypatch.setattr(
        frame_connection, "count_waiting_bytes", lambda transport: next(waiting, 500)
    )
    own.expect_answer()
    await time.advance(10.0)
    assert not own.is_lost
    await time.advance(3.6)

    assert own.is_lost  # what is left is taken no more


async def test_what_is_sent_at_each_tick_does_not_hide_silence(watched, monkeypatch):
    own, _, time = watched
    monkeypatch.setattr(frame_connection, "count_waiting_bytes", lambda transport: 10)
    for _ in range(7):
        own.write(b"x" * 10)
        await time.advance(0.5)

    assert own.is_lost


async def test_lost_request_ends_though_both_sides_speak():
    time = clocks.VirtualClock()
    own_settings = frame_connection.ConnectionSettings(
        limits=frame_connection.ConnectionLimits(), time=time, decode=wire.decode
    )
    client = client_connection.ClientConnection(
        own_settings, address="a:1", instance_id=7, name="test", on_lost=lambda lost: None
    )
    client.frames.connection_made(Transport())
    client.frames.data_received(wire.encode(wire.Welcome(wire.VERSION, ())))
    receiver = requests.ItemReceiver(dict)
    client.open_stream("e", {}, receiver, {}, None)
    for _ in range(16):
        if receiver.is_complete:
            break
        client.open_stream("e", {}, requests.ItemReceiver(dict), {}, None).cancel()
        client.frames.data_received(wire.encode(wire.Step((), ())))
        await time.advance(0.2)

    assert f"did not answer for {requests.SILENCE_LIMIT_S} s" in str(receiver.error)
