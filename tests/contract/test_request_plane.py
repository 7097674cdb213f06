"""What every request plane promises, held over memory, over TCP (with and without token and TLS) and over NATS."""

import asyncio
import dataclasses
import gc
import itertools
import re
import time
import weakref
from dataclasses import dataclass, field

import msgspec
import pytest

import nats_server
from dynamo.base import addresses, errors, membership
from dynamo.protocols import generate, model_errors, wire
from dynamo.runtime import listening, requests
from dynamo.runtime.backends import (
    client_connection,
    frame_connection,
    memory,
    multiplex,
    server_connection,
    tcp,
)
from dynamo.runtime.backends.nats import connection
from dynamo.runtime.backends.nats import planes as nats_planes
from waiting import PATIENT_S

NORMAL = frame_connection.ConnectionLimits(connect_s=PATIENT_S, hello_s=PATIENT_S)
QUICK = dataclasses.replace(NORMAL, silence_s=0.12)
# a peer that talks is late on a busy machine
HEARD = dataclasses.replace(NORMAL, silence_s=0.6)
SOON = frame_connection.ConnectionLimits(connect_s=0.5, hello_s=0.5)
ECHO = "dynamo/backend/echo"
IDS = itertools.count(1)


class Recorder:
    """A receiver that remembers what it was told."""

    def __init__(self):
        self.outputs, self.bodies, self.ends = [], [], []
        self.over = asyncio.Event()

    def receive(self, output):
        self.outputs.append(output)

    def replied(self, body):
        self.bodies.append(msgspec.msgpack.decode(body))

    def ended(self, error):
        self.ends.append(error)
        self.over.set()

    async def end(self):
        async with asyncio.timeout(PATIENT_S):
            await self.over.wait()
        assert len(self.ends) == 1
        return self.ends[0]

    @property
    def tokens(self):
        return [token for output in self.outputs for token in output.token_ids]


class Holder:
    """A handler that keeps its calls for the test to answer."""

    def __init__(self):
        self.calls, self.cancelled, self.signals = [], [], []
        self._changed = asyncio.Event()

    def __call__(self, call):
        self.calls.append(call)
        call.on_cancel(lambda: self._cancel(call))
        call.on_signal(self._take_signal)
        self._changed.set()

    def _cancel(self, call):
        self.cancelled.append(call)
        self._changed.set()

    def _take_signal(self, signal):
        self.signals.append(signal)
        self._changed.set()

    async def until(self, condition):
        async with asyncio.timeout(PATIENT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def call(self):
        await self.until(lambda: self.calls)
        return self.calls[-1]


@dataclass
class World:
    """Planes that can reach each other."""

    kind: str
    credentials: membership.Credentials = membership.NO_CREDENTIALS
    nats: connection.NatsConnection | None = None
    memory_network: memory.MemoryNetwork = field(default_factory=memory.MemoryNetwork)
    planes: list[multiplex.MultiplexedPlane] = field(default_factory=list)

    def network(self):
        if self.kind == "nats":
            return nats_planes.NatsNetwork(self.nats, namespace="a.b", number=next(IDS))
        if self.kind == "memory":
            return self.memory_network
        return tcp.TcpNetwork(credentials=self.credentials)

    def plane(self, limits=NORMAL, instance_id=0, *, address=None):
        """A plane; with `address` at that of an instance that is gone."""
        options = {"item_type": generate.Output, "instance_id": instance_id}
        if self.kind == "memory":
            if address is not None:
                self.memory_network._numbers = iter([int(address.rpartition(":")[2])])
            plane = multiplex.MultiplexedPlane(self.memory_network, limits, **options)
        elif self.kind == "nats":
            network = self.network()
            if address is not None:
                network._inbox = address
            plane = nats_planes.NatsRequestPlane(network, limits, **options)
        else:
            port = int(address.rpartition(":")[2]) if address is not None else 0
            at = listening.ListenAddress(ports=addresses.PortRange(port, port))
            plane = tcp.TcpRequestPlane(at, limits=limits, credentials=self.credentials, **options)
        self.planes.append(plane)
        return plane


@pytest.fixture(params=["memory", "tcp-open", "tcp-token", "tcp-tls", "tcp-both", "nats"])
async def world(request):
    kind, _, how = request.param.partition("-")
    world = World(kind)
    if how:
        world.credentials = request.getfixturevalue("credentials_by_name")[how]
    if request.param == "nats":
        server = request.getfixturevalue("nats_server")
        world.nats = await nats_server.connect(server.url)
    yield world
    for plane in world.planes:
        await plane.close()
    if world.nats is not None:
        await world.nats.close()


@pytest.fixture
async def held(world):
    """An asker, a holder, and the address to ask."""
    holder = Holder()
    address = await world.plane().serve(ECHO, holder)
    return world.plane(), holder, address


class Peer(asyncio.Protocol):
    """A peer made by hand: it says what it is given when it is connected, and nothing else."""

    def __init__(self, *frames):
        self._frames = frames
        self.heard = []
        self.gone, self.has_failure = asyncio.Event(), asyncio.Event()
        self._reader = wire.FrameReader()

    def connection_made(self, transport):
        self.transport = transport
        transport.write(b"".join(f if type(f) is bytes else wire.encode(f) for f in self._frames))

    def data_received(self, data):
        self.heard += self._reader.feed(data)
        if any(isinstance(frame, wire.Fail) for frame in self.heard):
            self.has_failure.set()

    def connection_lost(self, exc):
        self.gone.set()


HELLO, WELCOME = wire.Hello(wire.VERSION, "test"), wire.Welcome(wire.VERSION, ())


def output(*tokens):
    return generate.Output(tokens)


async def test_outputs_arrive_in_order_before_one_end(held):
    plane, holder, address = held
    receiver = Recorder()
    await plane.open(address, ECHO, {"a": 1}, receiver, headers={"x": "y"})
    call = await holder.call()
    for turn in range(3):
        for token in range(100):
            call.send(output(100 * turn + token))
        await asyncio.sleep(0)
    call.finish()

    assert await receiver.end() is None
    assert receiver.tokens == list(range(300))
    assert (call.endpoint, msgspec.msgpack.decode(call.body)) == (ECHO, {"a": 1})
    assert call.headers == {"x": "y"}


async def test_outputs_replies_and_a_failure_keep_their_order(held):
    plane, holder, address = held
    heard = []
    receiver = Recorder()
    receiver.receive = lambda output: heard.append(output.token_ids[0])
    receiver.replied = lambda body: heard.append(msgspec.msgpack.decode(body))
    await plane.open(address, ECHO, None, receiver)
    call = await holder.call()
    call.send(output(1))
    call.reply("two")
    call.send(output(3))
    call.reply("four")
    call.send(output(5))
    call.fail(errors.EngineFailed("six"))
    error = await receiver.end()

    assert heard == [1, "two", 3, "four", 5]
    assert (type(error), str(error)) == (errors.EngineFailed, "six")


async def test_bytes_are_counted_at_both_sides_and_for_each_endpoint(world):
    server, holder = world.plane(), Holder()
    address = await server.serve(ECHO, holder)
    await server.serve("dynamo/backend/other", holder)
    client, asked = world.plane(), (Recorder(), Recorder())
    for endpoint, recorder in zip((ECHO, "dynamo/backend/other"), asked, strict=True):
        await client.open(address, endpoint, b"?", recorder)
    await holder.until(lambda: len(holder.calls) == 2)
    greeting = server.traffic.sent.value
    for call, tokens in zip(holder.calls, ((1,) * 500, (2, 2)), strict=True):
        call.send(output(*tokens))  # both in one turn of the event loop
        call.reply("end")
        call.finish()
    for recorder in asked:
        assert await recorder.end() is None
    few, many = sorted(server.traffic.responses(call.endpoint).value for call in holder.calls)

    assert client.traffic.sent.value == server.traffic.received.value > 0
    assert client.traffic.received.value == server.traffic.sent.value
    assert few + many == server.traffic.sent.value - greeting
    assert 0 < few < 100
    assert many > 500


async def test_request_error_names_the_field(held):
    plane, holder, address = held
    receiver = Recorder()
    await plane.open(address, ECHO, None, receiver)
    (await holder.call()).fail(errors.InvalidRequest("no such pattern", param="guided_regex"))
    error = await receiver.end()

    assert (type(error), error.param) == (errors.InvalidRequest, "guided_regex")


async def test_outputs_of_one_loop_turn_share_one_frame(held, monkeypatch):
    plane, holder, address = held
    receivers = [Recorder() for _ in range(50)]
    for receiver in receivers:
        await plane.open(address, ECHO, None, receiver)
    await holder.until(lambda: len(holder.calls) == 50)
    frames = []
    received = client_connection.ClientConnection.handle_frame
    monkeypatch.setattr(
        client_connection.ClientConnection,
        "handle_frame",
        lambda end, f: (frames.append(f), received(end, f)),
    )
    for call in holder.calls:
        call.send(output(7))
        call.send(output(8))
        call.finish()
    for receiver in receivers:
        await receiver.end()

    assert [len(f.items) for f in frames if type(f) is wire.Step] == [100]
    assert all(receiver.tokens == [7, 8] for receiver in receivers)


async def test_cancel_reaches_the_handler_and_silences_the_receiver(held):
    plane, holder, address = held
    cancelled, other = Recorder(), Recorder()
    stream = await plane.open(address, ECHO, None, cancelled)
    await plane.open(address, ECHO, None, other)
    await holder.until(lambda: len(holder.calls) == 2)
    stream.cancel()
    stream.cancel()
    await holder.until(lambda: holder.cancelled)
    for call in holder.calls:
        call.send(output(1))
        call.reply("x")
        call.finish()
        call.fail(errors.EngineFailed("too late"))
    await other.end()

    assert holder.cancelled == [holder.calls[0]]
    assert (cancelled.outputs, cancelled.bodies, cancelled.ends) == ([], [], [])


async def test_crossing_cancel_and_finish_are_no_error(held):
    plane, holder, address = held
    stream = await plane.open(address, ECHO, None, Recorder())
    call = await holder.call()
    call.send(output(1))
    call.finish()
    stream.cancel()
    receiver = Recorder()
    await plane.open(address, ECHO, None, receiver)
    await holder.until(lambda: len(holder.calls) == 2)
    holder.calls[1].finish()

    assert await receiver.end() is None
    assert holder.cancelled == []


async def test_signal_reaches_the_handler_and_the_stream_continues(held):
    plane, holder, address = held
    receiver = Recorder()
    stream = await plane.open(address, ECHO, None, receiver)
    call = await holder.call()
    stream.send_signal(1)
    await holder.until(lambda: holder.signals)
    call.send(output(5))
    call.finish()
    await receiver.end()
    stream.send_signal(0)

    assert holder.signals == [1]
    assert holder.cancelled == []
    assert receiver.tokens == [5]


async def test_on_cancel_after_the_cancel_is_called_at_once(held):
    plane, holder, address = held
    stream = await plane.open(address, ECHO, None, Recorder())
    call = await holder.call()
    stream.cancel()
    await holder.until(lambda: holder.cancelled)
    told = []
    call.on_cancel(lambda: told.append(True))

    assert told == [True]


async def test_on_cancel_is_not_called_after_finish(held):
    plane, holder, address = held
    receiver = Recorder()
    await plane.open(address, ECHO, None, receiver)
    (await holder.call()).finish()
    await receiver.end()
    await plane.close()

    assert holder.cancelled == []


@pytest.mark.parametrize(
    "error", [model_errors.ContextTooLong("too long"), errors.Overloaded("busy"), KeyError("a bug")]
)
async def test_error_of_a_handler_ends_its_stream(world, error, caplog):
    def handler(call):
        raise error

    plane, receiver = world.plane(), Recorder()
    address = await world.plane().serve(ECHO, handler)
    await plane.open(address, ECHO, None, receiver)
    end = await receiver.end()

    if isinstance(error, errors.DynamoError):
        assert (type(end), str(end), caplog.text) == (type(error), str(error), "")
    else:
        assert (type(end), end.code) == (errors.DynamoError, "internal")
        assert "a bug" in caplog.text


async def test_receiver_that_raises_loses_only_its_own_stream(held, caplog):
    plane, holder, address = held
    bad, good = Recorder(), Recorder()
    bad.receive = lambda output: 1 / 0
    for receiver in bad, good:
        await plane.open(address, ECHO, None, receiver)
    await holder.until(lambda: len(holder.calls) == 2)
    for call in holder.calls:
        call.send(output(1))
    await holder.until(lambda: holder.cancelled)
    holder.calls[1].finish()

    assert await good.end() is None
    assert good.tokens == [1]
    assert (await bad.end()).code == "internal"
    assert holder.cancelled == [holder.calls[0]]
    assert "ZeroDivisionError" in caplog.text


async def test_receiver_that_raises_at_a_reply_loses_its_stream(held, caplog):
    plane, holder, address = held
    receiver = Recorder()
    receiver.replied = lambda body: 1 / 0
    await plane.open(address, ECHO, None, receiver)
    call = await holder.call()
    call.reply(1)
    call.reply(2)
    await holder.until(lambda: holder.cancelled)

    assert (await receiver.end()).code == "internal"
    assert caplog.text.count("Traceback") == 1


async def test_on_cancel_that_raises_affects_no_other_stream(world, caplog):
    def handler(call):
        call.on_cancel(lambda: 1 / 0)

    plane = world.plane()
    address = await world.plane().serve(ECHO, handler)
    receivers = [Recorder(), Recorder()]
    for receiver in receivers:
        await plane.open(address, ECHO, None, receiver, timeout_s=0.01)
    ends = [await receiver.end() for receiver in receivers]

    assert [type(end) for end in ends] == [errors.DeadlineExceeded] * 2
    assert caplog.text.count("ZeroDivisionError") == 2


async def test_unknown_endpoint_is_no_workers_and_names_the_served_ones(held):
    plane, _, address = held
    receiver = Recorder()
    await plane.open(address, "dynamo/backend/other", None, receiver)
    error = await receiver.end()

    assert type(error) is errors.NoWorkers
    assert "dynamo/backend/other" in str(error)
    assert ECHO in str(error)


async def test_address_without_a_server_is_worker_lost(world):
    server = world.plane()
    address = await server.serve(ECHO, Holder())
    await server.close()
    opens = [world.plane().open(address, ECHO, None, Recorder()) for _ in range(2)]
    results = await asyncio.gather(*opens, return_exceptions=True)

    assert [type(result) for result in results] == [errors.WorkerLost] * 2
    assert address in str(results[0])


@pytest.mark.parametrize("address", ["", "nothing", "host:port", ":1", "127.0.0.1:99999"])
async def test_malformed_address_is_worker_lost(world, address):
    with pytest.raises(errors.WorkerLost):
        await world.plane().open(address, ECHO, None, Recorder())


async def test_concurrent_opens_share_one_connection_even_if_the_first_is_cancelled(world):
    peers = []
    listener = await world.network().listen(lambda: peers.append(Peer(WELCOME)) or peers[-1])
    plane = world.plane()
    opens = [
        asyncio.ensure_future(plane.open(listener.address, ECHO, None, Recorder()))
        for _ in range(20)
    ]
    await asyncio.sleep(0)
    opens[0].cancel()
    results = await asyncio.gather(*opens, return_exceptions=True)
    listener.close()

    assert [type(r) for r in results] == [asyncio.CancelledError] + [
        client_connection.ClientStream
    ] * 19
    assert len(peers) == 1


async def test_open_does_not_suspend_once_connected(held):
    plane, _, address = held
    await plane.open(address, ECHO, None, Recorder())
    coroutine = plane.open(address, ECHO, None, Recorder())

    with pytest.raises(StopIteration):
        coroutine.send(None)


async def test_closing_server_breaks_its_streams_at_both_sides(world):
    server, plane, holder, receiver = world.plane(), world.plane(), Holder(), Recorder()
    address = await server.serve(ECHO, holder)
    await plane.open(address, ECHO, None, receiver)
    (await holder.call()).send(output(1))
    await server.close()
    error = await receiver.end()

    assert type(error) is errors.WorkerDied
    assert address in str(error)
    assert receiver.tokens == [1]
    assert holder.cancelled == holder.calls


async def test_peer_that_dies_after_another_one_had_the_request_only_if_it_has_answered(world):
    plane, dying, holder = world.plane(), world.plane(), Holder()
    first = Recorder()
    await plane.open(await dying.serve(ECHO, Holder()), ECHO, None, first)
    await dying.close()
    assert type(await first.end()) is errors.WorkerDied

    server, answered = world.plane(), Recorder()
    await plane.open(await server.serve(ECHO, holder), ECHO, None, answered)
    (await holder.call()).send(output(1))
    await server.close()
    assert type(await answered.end()) is errors.WorkerDied

    peers, unanswered = [], Recorder()
    listener = await world.network().listen(lambda: peers.append(Peer(WELCOME)) or peers[-1])
    await plane.open(listener.address, ECHO, None, unanswered)
    peers[-1].transport.close()
    error = await unanswered.end()
    listener.close()

    assert type(error) is errors.StreamBroken


async def test_request_on_an_idle_connection_has_arrived_only_if_the_peer_has_answered(
    world, monkeypatch
):
    """Over NATS the death of an idle peer is known with the next message, which is lost."""
    monkeypatch.setattr(multiplex, "_DEATHS_S", 0.0)  # idle for so long
    peers, unanswered = [], Recorder()
    listener = await world.network().listen(lambda: peers.append(Peer(WELCOME)) or peers[-1])
    plane = world.plane()
    (await plane.open(listener.address, ECHO, None, Recorder())).cancel()
    await plane.open(listener.address, ECHO, None, unanswered)
    peers[-1].transport.close()
    error = await unanswered.end()
    listener.close()

    assert type(error) is errors.StreamBroken


async def test_idle_peer_that_is_silent_is_no_longer_said_to_answer(world):
    """Discovery asks whether the owner of a key that it has lost is alive."""
    listener = await world.network().listen(lambda: Peer(WELCOME))
    plane = world.plane(QUICK)
    stream = await plane.open(listener.address, ECHO, None, Recorder(), instance_id=7)
    stream.cancel()
    answers = [plane.is_answering(7, listener.address)]
    async with asyncio.timeout(PATIENT_S):
        while answers[-1]:
            await asyncio.sleep(QUICK.silence_s / 10)
            answers.append(plane.is_answering(7, listener.address))
    listener.close()

    assert (answers[0], answers[-1]) == (True, None)


async def test_idle_peer_that_lives_is_said_to_answer(held):
    plane, _, address = held
    (await plane.open(address, ECHO, None, Recorder(), instance_id=7)).cancel()
    answers = []
    for _ in range(20):
        answers.append(plane.is_answering(7, address))
        await asyncio.sleep(0.01)

    assert answers == [True] * 20


async def test_open_on_a_closed_plane_is_an_error(world):
    address, plane = await world.plane().serve(ECHO, Holder()), world.plane()
    await plane.close()
    await plane.close()
    with pytest.raises(errors.WorkerLost, match="closed"):
        await plane.open(address, ECHO, None, Recorder())
    with pytest.raises(errors.LocalProtocolError, match="closed"):
        await plane.serve(ECHO, Holder())


async def test_close_ends_an_open_that_still_connects(world):
    listener = await world.network().listen(Peer)
    plane = world.plane()
    opening = asyncio.ensure_future(plane.open(listener.address, ECHO, None, Recorder()))
    await asyncio.sleep(0)
    await plane.close()
    with pytest.raises(errors.WorkerLost, match="closed"):
        await opening
    listener.close()


async def test_port_in_use_is_a_config_error_that_names_the_setting():
    first = tcp.TcpRequestPlane(item_type=generate.Output)
    port = int((await first.serve(ECHO, Holder())).rpartition(":")[2])
    with pytest.raises(errors.ConfigError, match="DYN_TCP_RPC_PORT"):
        await tcp.TcpRequestPlane(
            listening.ListenAddress(ports=addresses.PortRange(port, port)),
            item_type=generate.Output,
        ).serve(ECHO, Holder())
    await first.close()


async def test_closing_caller_cancels_its_calls(held):
    plane, holder, address = held
    receiver = Recorder()
    await plane.open(address, ECHO, None, receiver)
    await holder.call()
    await plane.close()
    await holder.until(lambda: holder.cancelled)

    assert type(await receiver.end()) is errors.StreamBroken


async def test_streams_of_a_silent_worker_break(world):
    """In time, by a clock that no other process delays: `tests/unit/runtime/test_frame_connection.py`."""
    listener = await world.network().listen(lambda: Peer(WELCOME))
    receiver = Recorder()
    await world.plane(QUICK).open(listener.address, ECHO, None, receiver)
    error = await receiver.end()
    listener.close()

    assert type(error) is errors.StreamBroken
    assert f"silent for {QUICK.silence_s} s" in str(error)


async def test_streams_that_give_up_early_end_before_the_limit(world):
    """A stream beside them that does not holds them up to the limit, because the connection is one."""
    listener = await world.network().listen(lambda: Peer(WELCOME))
    plane, reasons = world.plane(QUICK), []
    for others in (1, 0):
        early = Recorder()
        for _ in range(others):
            await plane.open(listener.address, ECHO, None, Recorder())
        await plane.open(listener.address, ECHO, None, early, gives_up_early=True)
        reasons.append(str(await early.end()))
    listener.close()

    assert [float(re.search(r"for ([0-9.]+) s", reason)[1]) for reason in reasons] == [
        QUICK.silence_s,
        float(f"{QUICK.silence_s * 2 / 3:.2g}"),
    ]


async def test_silent_worker_is_borne_until_another_can_take_over(world):
    listener = await world.network().listen(lambda: Peer(WELCOME))
    receivers, may_move = [Recorder(), Recorder()], False
    plane = world.plane(QUICK)
    for receiver in receivers:
        await plane.open(listener.address, ECHO, None, receiver, may_move=lambda: may_move)
    other = Recorder()
    await plane.open(listener.address, ECHO, None, other)
    silent = await other.end()  # nothing holds this one
    num_ended = sum(len(receiver.ends) for receiver in receivers)
    may_move = True
    moved = [await receiver.end() for receiver in receivers]
    listener.close()

    assert type(silent) is errors.StreamBroken
    assert num_ended == 0
    assert [type(error) for error in moved] == [errors.StreamBroken] * 2


class DeafPeer(Peer):
    """A peer that never hears what follows the first stream, and goes on to answer that."""

    def connection_made(self, transport):
        super().connection_made(transport)
        self.gone_on = asyncio.ensure_future(self._talk())

    async def _talk(self):
        while not self.gone.is_set():
            if any(isinstance(frame, wire.Open) for frame in self.heard):
                step = wire.Step((wire.StepItem(1, output(1)),), ())
                self.transport.write(wire.encode(step))
            await asyncio.sleep(QUICK.silence_s / 10)


async def test_lost_request_breaks_while_its_connection_is_heard(world):
    peers, first, lost = [], Recorder(), Recorder()
    listener = await world.network().listen(lambda: peers.append(DeafPeer(WELCOME)) or peers[-1])
    plane, may_move = world.plane(HEARD), False
    await plane.open(listener.address, ECHO, None, first, may_move=lambda: may_move)
    await plane.open(listener.address, ECHO, None, lost)
    error = await lost.end()
    num_outputs = len(first.outputs)
    async with asyncio.timeout(PATIENT_S):
        while len(first.outputs) < num_outputs + 5:  # no other can take it over
            await asyncio.sleep(QUICK.silence_s / 10)
    assert not first.ends
    may_move = True
    await first.end()
    listener.close()
    await peers[0].gone_on

    assert type(error) is errors.StreamBroken
    assert "did not answer" in str(error)


async def test_silent_caller_is_noticed(world):
    holder, peer = Holder(), Peer(HELLO, wire.Open(1, ECHO, msgspec.Raw(b"\xc0")))
    address = await world.plane(QUICK).serve(ECHO, holder)
    await world.network().connect(address, lambda: peer)
    await holder.until(lambda: holder.cancelled)
    await asyncio.wait_for(peer.gone.wait(), PATIENT_S)

    assert len(holder.cancelled) == 1


async def test_heartbeats_keep_quiet_and_one_way_streams_alive(world):
    limits = HEARD if world.kind == "nats" else QUICK  # the server of NATS is another process
    holder, receivers = Holder(), [Recorder(), Recorder()]
    address = await world.plane(limits).serve(ECHO, holder)
    plane, loop = world.plane(limits), asyncio.get_running_loop()
    await plane.open(address, ECHO, None, receivers[0])
    await holder.call()
    quiet = asyncio.Event()
    loop.call_later(2 * limits.silence_s, quiet.set)
    await quiet.wait()  # nothing is said for two limits of silence
    ends_at = loop.time() + 2 * limits.silence_s
    while loop.time() < ends_at:  # now only the worker speaks
        holder.calls[0].send(output(1))
        await asyncio.sleep(limits.silence_s / 10)
    holder.calls[0].finish()

    assert await receivers[0].end() is None
    assert holder.cancelled == []


async def test_peer_without_a_welcome_is_worker_lost_in_time(world):
    peers = []
    listener = await world.network().listen(lambda: peers.append(Peer()) or peers[-1])
    with pytest.raises(errors.WorkerLost, match="did not answer"):
        await world.plane(SOON).open(listener.address, ECHO, None, Recorder())
    await asyncio.wait_for(peers[0].gone.wait(), PATIENT_S)
    listener.close()

    assert type(peers[0].heard[0]) is wire.Hello


async def test_other_protocol_version_is_refused_at_both_sides(world, caplog):
    listener = await world.network().listen(lambda: Peer(wire.Welcome(2, ())))
    with pytest.raises(errors.WorkerLost, match="version 2"):
        await world.plane().open(listener.address, ECHO, None, Recorder())
    listener.close()
    peer = Peer(wire.Hello(2, "from the future"))
    await world.network().connect(await world.plane().serve(ECHO, Holder()), lambda: peer)
    await asyncio.wait_for(peer.gone.wait(), PATIENT_S)

    assert "version 2" in caplog.text


async def test_time_limit_ends_a_stream_at_both_sides(held):
    plane, holder, address = held
    receiver = Recorder()
    await plane.open(address, ECHO, None, receiver, timeout_s=0.02)
    error = await receiver.end()

    assert type(error) is errors.DeadlineExceeded
    assert holder.cancelled == holder.calls != []


async def test_caller_enforces_a_time_limit_that_the_worker_ignores(world, monkeypatch):
    monkeypatch.setattr(client_connection, "BACKSTOP_S", 0.01)
    peers = []
    listener = await world.network().listen(lambda: peers.append(Peer(WELCOME)) or peers[-1])
    receiver = Recorder()
    plane = world.plane()
    await plane.open(listener.address, ECHO, None, receiver, timeout_s=0.01)
    error = await receiver.end()
    await plane.close()
    await asyncio.wait_for(peers[0].gone.wait(), PATIENT_S)
    listener.close()

    assert type(error) is errors.DeadlineExceeded
    assert wire.Cancel(1) in peers[0].heard


async def test_expired_time_limit_is_refused_before_sending(held):
    plane, _, address = held
    with pytest.raises(errors.DeadlineExceeded):
        await plane.open(address, ECHO, None, Recorder(), timeout_s=0)


async def test_drain_finishes_running_streams_and_refuses_new_ones(world):
    server, plane, holder, receiver = world.plane(), world.plane(), Holder(), Recorder()
    address = await server.serve(ECHO, holder)
    await plane.open(address, ECHO, None, receiver)
    call = await holder.call()
    drained = asyncio.ensure_future(server.drain(10))
    await asyncio.sleep(0)
    crossing = Recorder()
    await plane.open(address, ECHO, None, crossing)
    assert type(await crossing.end()) is errors.WorkerLost
    with pytest.raises(errors.WorkerLost, match="draining"):
        await plane.open(address, ECHO, None, Recorder())
    with pytest.raises(errors.WorkerLost):
        await world.plane().open(address, ECHO, None, Recorder())
    call.send(output(1))
    call.finish()

    assert await drained
    assert await receiver.end() is None
    assert receiver.tokens == [1]


async def test_stream_opened_during_the_goodbye_is_worker_lost(world):
    server, holder, peer = world.plane(), Holder(), Peer(HELLO)
    await world.network().connect(await server.serve(ECHO, holder), lambda: peer)
    async with asyncio.timeout(PATIENT_S):
        while not peer.heard:
            await asyncio.sleep(0)
    await server.drain(1)
    peer.transport.write(wire.encode(wire.Open(1, ECHO, msgspec.Raw(b"\xc0"))))
    async with asyncio.timeout(PATIENT_S):
        while len(peer.heard) < 3:
            await asyncio.sleep(0)

    assert [type(frame) for frame in peer.heard] == [wire.Welcome, wire.Goodbye, wire.Fail]
    assert peer.heard[2].code == errors.WorkerLost.code


async def test_drain_reports_streams_that_exceed_its_time(world):
    server, holder = world.plane(), Holder()
    address = await server.serve(ECHO, holder)
    await world.plane().open(address, ECHO, None, Recorder())
    await holder.call()

    assert not await server.drain(0.01)


async def test_large_bodies_are_sent_and_too_large_ones_refused(held):
    plane, holder, address = held
    big = b"x" * (8 * 2**20)
    receiver = Recorder()
    await plane.open(address, ECHO, big, receiver)
    call = await holder.call()
    call.reply(big)
    with pytest.raises(errors.LocalProtocolError, match="limit"):
        call.reply(b"x" * wire.MAX_FRAME_BYTES)
    call.finish()
    with pytest.raises(errors.LocalProtocolError, match="limit"):
        await plane.open(address, ECHO, b"x" * wire.MAX_FRAME_BYTES, Recorder())

    assert await receiver.end() is None
    assert receiver.bodies == [big]
    assert msgspec.msgpack.decode(call.body) == big


async def test_too_long_step_is_split_and_too_long_output_fails(held, monkeypatch):
    plane, holder, address = held
    receivers = [Recorder() for _ in range(9)]
    for receiver in receivers:
        await plane.open(address, ECHO, None, receiver)
    await holder.until(lambda: len(holder.calls) == 9)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 400)
    for number, call in enumerate(holder.calls):
        call.send(output(*range(300 if number == 8 else 30)))
        if number != 8:
            call.finish()
    ends = [await receiver.end() for receiver in receivers]

    assert [type(end) for end in ends] == [type(None)] * 8 + [errors.LocalProtocolError]
    assert all(receiver.tokens == list(range(30)) for receiver in receivers[:8])
    assert holder.cancelled == [holder.calls[8]]


async def test_output_that_cannot_be_encoded_fails_its_own_stream_only(held):
    plane, holder, address = held
    receivers = [Recorder() for _ in range(3)]
    for receiver in receivers:
        await plane.open(address, ECHO, None, receiver)
    await holder.until(lambda: len(holder.calls) == 3)
    for call, token in zip(holder.calls, (1, object(), 2**64), strict=True):
        call.send(output(7))
        call.send(output(token))
        call.finish()
    ends = [await receiver.end() for receiver in receivers]

    assert [type(end) for end in ends] == [type(None), *2 * [errors.LocalProtocolError]]
    assert receivers[0].tokens == [7, 1]


async def test_streams_beyond_the_limit_are_overloaded(world):
    holder, plane = Holder(), world.plane()
    address = await world.plane(frame_connection.ConnectionLimits(max_streams=2)).serve(
        ECHO, holder
    )
    receivers = [Recorder() for _ in range(3)]
    for receiver in receivers:
        await plane.open(address, ECHO, None, receiver)

    assert type(await receivers[2].end()) is errors.Overloaded


async def test_thousand_concurrent_streams_leave_nothing_behind(world):
    def handler(call):
        number = msgspec.msgpack.decode(call.body)
        call.send(output(number, number + 1))
        call.finish()

    def num_calls():
        return sum(type(thing) is server_connection.ServerCall for thing in gc.get_objects())

    gc.collect()
    before, plane = num_calls(), world.plane()
    address = await world.plane().serve(ECHO, handler)
    await plane.open(address, ECHO, 0, first := Recorder())
    await first.end()
    tasks = asyncio.all_tasks()
    receivers = [Recorder() for _ in range(1000)]
    await asyncio.gather(*(plane.open(address, ECHO, i, r) for i, r in enumerate(receivers)))
    for receiver in receivers:
        await receiver.end()
    tokens = [receiver.tokens for receiver in receivers]
    living = weakref.WeakSet(receivers)
    del receiver, receivers
    gc.collect()

    assert tokens == [[i, i + 1] for i in range(1000)]
    assert not living
    assert num_calls() == before
    assert asyncio.all_tasks() == tasks


async def test_one_process_serves_several_endpoints_at_one_address(world):
    server, plane = world.plane(), world.plane()
    first = await server.serve("a/b/one", lambda call: call.reply(1))
    second = await server.serve("a/b/two", lambda call: call.reply(2))
    replies = [
        await requests.call(plane, first, f"a/b/{name}", None, reply_type=int, timeout_s=PATIENT_S)
        for name in ("one", "two")
    ]

    assert (first, replies) == (second, [1, 2])
    with pytest.raises(errors.LocalProtocolError):
        await server.serve("a/b/one", Holder())


async def test_endpoint_that_is_not_served_any_more_is_refused_and_may_be_served_again(world):
    async def ask():
        return await requests.call(plane, address, ECHO, None, reply_type=int, timeout_s=PATIENT_S)

    server, plane = world.plane(), world.plane()
    address = await server.serve(ECHO, lambda call: call.reply(1))
    answers = [await ask()]
    server.stop_serving(ECHO)
    server.stop_serving(ECHO)
    with pytest.raises(errors.WorkerLost, match="is not served here any more: ask another"):
        await ask()
    await server.serve(ECHO, lambda call: call.reply(2))

    assert [*answers, await ask()] == [1, 2]


async def test_call_raises_the_error_of_the_endpoint(world):
    def handler(call):
        match msgspec.msgpack.decode(call.body):
            case "fail":
                call.fail(model_errors.ModelNotFound("no such model"))
            case "nothing":
                call.finish()
            case "output":
                call.send(output(1))
            case "text":
                call.reply("text")

    plane, address = world.plane(), await world.plane().serve(ECHO, handler)

    async def error_of(value, timeout_s=PATIENT_S):
        with pytest.raises(errors.DynamoError) as info:
            await requests.call(plane, address, ECHO, value, reply_type=int, timeout_s=timeout_s)
        return info.type

    assert await error_of("fail") is model_errors.ModelNotFound
    assert await error_of("nothing") is errors.RemoteProtocolError
    assert await error_of("output") is errors.RemoteProtocolError
    assert await error_of("text") is errors.RemoteProtocolError
    assert await error_of("silence", timeout_s=0.02) is errors.DeadlineExceeded
    assert (
        await requests.call(plane, address, ECHO, "text", reply_type=str, timeout_s=PATIENT_S)
    ) == "text"


OPEN = wire.encode(wire.Open(1, ECHO, msgspec.Raw(b"\xc0")))


@pytest.mark.parametrize(
    "said",
    [
        (b"GET / HTTP/1.1\r\n\r\n",),
        (b"\0\0\0\1\xc0",),
        (b"\xff\xff\xff\xff",),
        (b"\0\1\0\0",),  # more than a hello may have
        (OPEN,),
        (HELLO, HELLO),
        (HELLO, WELCOME),
        (HELLO, wire.Cancel(1)),
        (HELLO, OPEN, OPEN),
        (HELLO, wire.Open(0, ECHO, msgspec.Raw(b"\xc0"))),
        (HELLO, wire.Open(1, ECHO, msgspec.Raw(b"\xc0"), {}, float("nan"))),
        (HELLO, wire.Open(1, ECHO, msgspec.Raw(b"\xc0"), {}, -1.0)),
        (),  # and never a word
    ],
)
async def test_peer_that_violates_the_protocol_is_dropped_alone(world, said, caplog):
    holder, peer, receiver = Holder(), Peer(*said), Recorder()
    # who says nothing is dropped soon; who says something has the time to prove that it may
    limits = frame_connection.ConnectionLimits() if said else SOON
    address = await world.plane(limits).serve(ECHO, holder)
    plane = world.plane()
    await plane.open(address, ECHO, None, receiver)
    call = await holder.call()
    await world.network().connect(address, lambda: peer)
    await asyncio.wait_for(peer.gone.wait(), PATIENT_S)
    call.finish()

    assert await receiver.end() is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "said",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
        (wire.Pong(1),),
        (WELCOME, WELCOME),
        (WELCOME, HELLO),
        (WELCOME, wire.Step((), (7,))),
        (WELCOME, wire.Step((wire.StepItem(7, generate.Output((1,))),))),
        (WELCOME, wire.Reply(7, msgspec.Raw(b"\xc0"))),
        (WELCOME, wire.Fail(0, "internal", "")),
        (WELCOME, b"\xff\xff\xff\xff"),
    ],
)
async def test_worker_that_violates_the_protocol_is_lost(world, said):
    listener = await world.network().listen(lambda: Peer(*said))
    try:
        receiver = Recorder()
        await world.plane().open(listener.address, ECHO, None, receiver)
        error = await receiver.end()
    except errors.WorkerLost as at_once:
        error = at_once
    listener.close()

    assert isinstance(error, errors.WorkerLost)
    assert listener.address in str(error)


async def test_refused_connections_log_one_line_a_second(world, caplog):
    address = await world.plane().serve(ECHO, Holder())
    peers = [Peer(b"garbage garbage") for _ in range(10)]
    began = time.monotonic()
    for peer in peers:
        await world.network().connect(address, lambda peer=peer: peer)
        await asyncio.wait_for(peer.gone.wait(), PATIENT_S)

    assert 1 <= len(caplog.records) <= 1 + int(time.monotonic() - began)


async def test_request_reaches_the_instance_that_is_meant(world):
    holder = Holder()
    address = await world.plane(instance_id=7).serve(ECHO, holder)
    await world.plane().open(address, ECHO, None, Recorder(), instance_id=7)
    await holder.call()

    assert len(holder.calls) == 1


async def test_instance_at_the_address_of_another_refuses_its_requests(world):
    """A worker is gone, discovery still names it, and another one has its address."""
    former, caller = world.plane(instance_id=7), world.plane()
    holder, receiver = Holder(), Recorder()
    address = await former.serve(ECHO, holder)
    await caller.open(address, ECHO, None, receiver, instance_id=7)
    await holder.call()
    await former.close()
    error = await receiver.end()
    successor = Holder()
    at_same_address = world.plane(instance_id=8, address=address)

    assert await at_same_address.serve(ECHO, successor) == address
    assert isinstance(error, errors.WorkerLost)
    with pytest.raises(errors.WorkerLost, match="instance 7 is not at this address any more"):
        await caller.open(address, ECHO, None, Recorder(), instance_id=7)
    await caller.open(address, ECHO, None, Recorder(), instance_id=8)
    await successor.call()
    assert len(successor.calls) == 1


async def test_stream_that_means_another_instance_is_refused_on_an_open_connection(world):
    holder = Holder()
    meant = wire.Open(1, ECHO, msgspec.Raw(b"\xc0"), instance=9)
    peer = Peer(HELLO, meant)
    address = await world.plane(instance_id=8).serve(ECHO, holder)
    await world.network().connect(address, lambda: peer)
    await asyncio.wait_for(peer.has_failure.wait(), PATIENT_S)
    (failure,) = [frame for frame in peer.heard if isinstance(frame, wire.Fail)]

    assert isinstance(failure.error, errors.WorkerLost)
    assert holder.calls == []
