"""What those who talk through NATS see when its server, or their peer, dies, stops, or loses a message."""

import asyncio
import contextlib
import itertools
import multiprocessing
import types

import pytest

import nats_server as servers
import tcp_proxy
from dynamo.base import errors
from dynamo.protocols import generate
from dynamo.runtime import requests
from dynamo.runtime.backends import frame_connection
from dynamo.runtime.backends.nats import connection, planes
from waiting import PATIENT_S, until

ECHO, TOPIC = "a/b/echo", "a/b/events"
IDS = itertools.count(1)
QUICK = frame_connection.ConnectionLimits(silence_s=0.6, connect_s=3.0)
UNHURRIED = frame_connection.ConnectionLimits(
    silence_s=PATIENT_S
)  # so it is not silence that tells


class Receiver:
    """Counts tokens, and knows how it ended."""

    def __init__(self):
        self.tokens = []
        self.over = asyncio.get_running_loop().create_future()

    def receive(self, output):
        self.tokens += output.token_ids

    def replied(self, body):
        raise AssertionError

    def ended(self, error):
        self.over.set_result(error)


@pytest.fixture
def server(tmp_path):
    """One that may be harmed."""
    server = servers.NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@contextlib.asynccontextmanager
async def joined(server, limits=QUICK):
    """A process: its connection and its request plane."""
    to_nats = await servers.connect(server.url)
    network = planes.NatsNetwork(to_nats, namespace="a", number=next(IDS))
    plane = planes.NatsRequestPlane(network, limits, item_type=generate.Output)
    try:
        yield plane, to_nats
    finally:
        await plane.close()
        await to_nats.close()


@contextlib.asynccontextmanager
async def asking(server, limits=QUICK):
    """An asker, whom to ask, what it was asked, and the stream that is open."""
    calls, receiver = [], Receiver()
    async with joined(server, limits) as (worker, _), joined(server, limits) as (asker, to_nats):
        address = await worker.serve(ECHO, calls.append)
        await asker.open(address, ECHO, None, receiver)
        await until(lambda: calls)
        yield asker, address, calls, receiver, to_nats


async def serves_again(asker, address, calls):
    """A new stream comes to its end; one that a busy machine has kept silent for too long is followed by another."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            before, receiver = len(calls), Receiver()
            try:
                await asker.open(address, ECHO, None, receiver)
            except errors.WorkerLost:
                await asyncio.sleep(0.05)
                continue
            await until(lambda before=before: len(calls) > before)
            calls[-1].send(generate.Output((1,)))
            calls[-1].finish()
            if await receiver.over is None:
                return receiver.tokens == [1]


async def test_killed_server_breaks_streams_until_its_restart(server):
    async with asking(server) as (asker, address, calls, receiver, _):
        cancelled = asyncio.Event()
        calls[0].on_cancel(cancelled.set)
        server.stop()
        async with asyncio.timeout(PATIENT_S):
            error = await receiver.over
            await cancelled.wait()
        server.start()

        assert type(error) is errors.StreamBroken
        assert "NATS" in str(error)
        assert await serves_again(asker, address, calls)


async def test_an_open_while_there_is_no_server_is_worker_lost_in_time(server):
    async with joined(server) as (asker, to_nats):
        gone = asyncio.Event()
        to_nats.on_lost(lambda _: gone.set())
        server.stop()
        await gone.wait()
        with pytest.raises(errors.WorkerLost, match="did not answer"):
            await asker.open("dynamo.link.a.1", ECHO, None, Receiver())


async def test_a_server_that_is_away_for_long_is_not_waited_for_again(server, monkeypatch):
    monkeypatch.setattr(planes, "AWAY_S", 0.0)
    async with joined(server, frame_connection.ConnectionLimits(connect_s=60.0)) as (
        asker,
        to_nats,
    ):
        gone = asyncio.Event()
        to_nats.on_lost(lambda _: gone.set())
        server.stop()
        await gone.wait()
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(errors.WorkerLost, match="is gone for more than"):
                await asker.open("dynamo.link.a.1", ECHO, None, Receiver())


async def test_an_open_waits_for_a_server_that_restarts(server):
    async with asking(server) as (asker, address, calls, receiver, _):
        server.stop()
        await receiver.over
        opening = asyncio.ensure_future(serves_again(asker, address, calls))
        await asyncio.sleep(0)
        server.start()

        assert await opening


async def test_request_waits_for_a_peer_that_reconnects_later(server, monkeypatch):
    monkeypatch.setattr(planes, "RETURN_S", PATIENT_S)
    calls, number = [], next(IDS)
    async with joined(server, UNHURRIED) as (asker, to_nats):
        gone, probed, publish = asyncio.Event(), asyncio.Event(), to_nats.publish

        def publish_and_tell(subject, data, reply):
            publish(subject, data, reply)
            probed.set()

        to_nats.on_lost(lambda _: gone.set())
        monkeypatch.setattr(to_nats, "publish", publish_and_tell)
        server.stop()
        await gone.wait()
        server.start()
        address = f"dynamo.link.a.{number:x}"
        opening = asyncio.ensure_future(asker.open(address, ECHO, None, Receiver()))
        await probed.wait()
        other = await servers.connect(server.url)
        network = planes.NatsNetwork(other, namespace="a", number=number)
        late = planes.NatsRequestPlane(network, UNHURRIED, item_type=generate.Output)
        await late.serve(ECHO, calls.append)
        await opening
        await until(lambda: calls)
        await late.close()
        await other.close()


async def test_request_reaches_a_peer_that_has_lost_what_was_sent_first(server):
    calls, number, lost = [], next(IDS), asyncio.Event()
    limits = frame_connection.ConnectionLimits(connect_s=PATIENT_S)
    async with joined(server, limits) as (asker, _):
        address = f"dynamo.link.a.{number:x}"
        other = await servers.connect(server.url)
        deaf = await other.subscribe(f"{address}.*", lambda *_: lost.set())
        opening = asyncio.ensure_future(asker.open(address, ECHO, None, Receiver()))
        await lost.wait()
        network = planes.NatsNetwork(other, namespace="a", number=number)
        late = planes.NatsRequestPlane(network, limits, item_type=generate.Output)
        await late.serve(ECHO, calls.append)
        await deaf.close()
        await opening
        await until(lambda: calls)
        await late.close()
        await other.close()


async def test_frozen_server_breaks_streams_at_the_silence_limit(server):
    async with asking(server) as (asker, address, calls, receiver, _):
        server.freeze()
        error = await asyncio.wait_for(receiver.over, PATIENT_S)
        server.thaw()

        assert type(error) is errors.StreamBroken
        assert "silent" in str(error)
        assert await serves_again(asker, address, calls)


async def test_a_server_that_does_not_answer_is_left(server, monkeypatch):
    monkeypatch.setattr(connection, "_PING_S", 0.05)
    async with joined(server) as (_, to_nats):
        gone = asyncio.Event()
        to_nats.on_lost(lambda _: gone.set())
        server.freeze()
        await asyncio.wait_for(gone.wait(), PATIENT_S)
        server.thaw()
        await asyncio.wait_for(to_nats.wait_connected(PATIENT_S), PATIENT_S)


async def test_a_server_that_dismisses_us_is_joined_again(tmp_path):
    config = tmp_path / "config"
    config.write_text("max_payload: 100000")
    server = servers.NatsServer(tmp_path / "nats", "-c", str(config))
    server.start()
    async with asking(server, UNHURRIED) as (asker, address, calls, receiver, to_nats):
        config.write_text("max_payload: 1000")
        server.reload()
        async with asyncio.timeout(PATIENT_S):
            while not receiver.over.done():  # a violation, of which the server ends the connection
                to_nats.publish("a", b"x" * 50_000)
                await asyncio.sleep(0.05)

        assert type(receiver.over.result()) is errors.StreamBroken
        assert await serves_again(asker, address, calls)
        assert to_nats.max_message_bytes == 1000
    server.stop()


async def test_a_lost_message_breaks_the_link_by_name(server, monkeypatch):
    async with asking(server, UNHURRIED) as (asker, address, calls, receiver, _):
        split = planes.EnvelopeWriter.split
        monkeypatch.setattr(planes.EnvelopeWriter, "split", lambda *a: list(split(*a))[1:])
        calls[0].send(generate.Output((1,)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        monkeypatch.undo()
        calls[0].send(generate.Output((2,)))
        error = await asyncio.wait_for(receiver.over, PATIENT_S)

        assert type(error) is errors.StreamBroken
        assert "lost a message" in str(error)
        assert receiver.tokens == []
        assert await serves_again(asker, address, calls)


async def test_idle_stream_stops_probing_but_stays_open(server, monkeypatch):
    monkeypatch.setattr(planes, "PROBE_S", 0.01)
    said = []
    say = planes.NatsNetwork.send
    monkeypatch.setattr(planes.NatsNetwork, "send", lambda *a: (said.append(a[3]), say(*a)))
    async with asking(server, UNHURRIED) as (asker, address, calls, receiver, _):
        num_probes = 0
        async with asyncio.timeout(PATIENT_S):  # a late message of the peer begins the count anew
            while (num_now := said.count(planes.PROBE)) < 10 or num_now > num_probes:
                num_probes = num_now
                await asyncio.sleep(0.1)  # ten more, if it would not end

        assert not receiver.over.done()
        assert await serves_again(asker, address, calls)


def serve_until_killed(url, pipe):
    async def serve():
        to_nats = await servers.connect(url)
        network = planes.NatsNetwork(to_nats, namespace="a", number=99)
        pipe.send(
            await planes.NatsRequestPlane(network, item_type=generate.Output).serve(
                ECHO, lambda call: None
            )
        )
        await asyncio.Event().wait()

    asyncio.run(serve())


async def test_a_killed_worker_is_noticed_by_a_probe(server):
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(
        target=serve_until_killed, args=(server.url, theirs), daemon=True
    )
    worker.start()
    address = await asyncio.to_thread(ours.recv)
    async with joined(server, UNHURRIED) as (asker, _):
        receiver = Receiver()
        await asker.open(address, ECHO, None, receiver)
        worker.kill()
        worker.join()
        error = await asyncio.wait_for(receiver.over, PATIENT_S)
        with pytest.raises(errors.WorkerLost, match="no subscriber"):
            await asker.open(address, ECHO, None, Receiver())

    assert isinstance(error, errors.WorkerLost)
    assert "no subscriber" in str(error)


async def test_long_request_over_a_slow_wire_is_not_taken_for_silence(server):
    limits = frame_connection.ConnectionLimits(silence_s=2.0, connect_s=PATIENT_S)
    proxy = tcp_proxy.TcpProxy(int(server.url.rpartition(":")[2]), bytes_per_s=150_000)
    behind_it = types.SimpleNamespace(url=f"nats://{await proxy.start()}")
    body = b"x" * 600_000  # which take twice as long as a silent peer is borne
    try:
        async with joined(behind_it, limits) as (worker, _), joined(server, limits) as (asker, _):
            address = await worker.serve(ECHO, lambda call: call.reply(len(call.body)))
            length = await requests.call(
                asker, address, ECHO, body, reply_type=int, timeout_s=PATIENT_S
            )
    finally:
        await proxy.close()

    assert length > len(body)


def test_bytes_wait_until_the_long_message_that_they_belong_to_has_arrived():
    count, num_bytes = planes.ArrivalCount(), 2 * planes.PART_BYTES
    messages = list(planes.EnvelopeWriter().split(b"x" * num_bytes, max_message_bytes=2**20))
    for message in messages:
        count.note_sent(message)
    waiting = []
    for next_number in range(3):
        count.note_arrived(next_number)
        waiting.append(count.num_waiting)

    assert [len(message) for message in messages[:2]] == [planes.PART_BYTES] * 2
    assert waiting == [num_bytes, num_bytes - planes.PART_BYTES + planes.HEADER.size, 0]


async def test_event_numbers_show_the_gap_after_a_server_restart(server):
    heard = []
    async with joined(server) as (_, one), joined(server) as (_, other):
        speaker, listener = planes.NatsEventPlane(one, 1), planes.NatsEventPlane(other, 2)
        await speaker.advertise(TOPIC)
        await listener.subscribe(TOPIC, heard.extend)
        speaker.publish(TOPIC, b"before")
        await until(lambda: heard)
        gone = asyncio.Event()
        one.on_lost(lambda _: gone.set())
        server.stop()
        await gone.wait()
        speaker.publish(TOPIC, b"unheard")
        server.start()
        while heard[-1].payload != b"after":
            speaker.publish(TOPIC, b"after")
            await asyncio.sleep(0.02)

    numbers = [event.number for event in heard]
    assert b"unheard" not in [event.payload for event in heard]
    assert numbers[0] == 0
    assert numbers[1] > 1


async def test_event_numbers_show_messages_missed_by_a_slow_listener(server, monkeypatch):
    monkeypatch.setattr(connection, "_SUBSCRIPTION_MESSAGES", 10)
    heard = []
    async with joined(server) as (_, to_nats):
        plane = planes.NatsEventPlane(to_nats, 1)
        await plane.advertise(TOPIC)
        await plane.subscribe(TOPIC, heard.extend)
        for _ in range(5000):
            plane.publish(TOPIC, b"x")
        await until(lambda: heard)
        while heard[-1].number < 5000:
            plane.publish(TOPIC, b"end")
            await asyncio.sleep(0.01)

    numbers = [event.number for event in heard]
    assert numbers == sorted(numbers)
    assert len(numbers) < numbers[-1] + 1


async def test_stream_breaks_when_its_outbox_is_full(server, monkeypatch):
    monkeypatch.setattr(connection, "OUTBOX_BYTES", 1000)
    async with asking(server) as (_, _, calls, receiver, _):
        for turn in range(20):
            calls[0].send(generate.Output(tuple(range(turn * 100, turn * 100 + 300))))
            calls[0].reply(turn)
        error = await asyncio.wait_for(receiver.over, PATIENT_S)

    assert type(error) is errors.StreamBroken
