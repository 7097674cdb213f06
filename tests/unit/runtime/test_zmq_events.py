import asyncio
import contextlib
import logging
import socket
import struct
import threading

import msgspec
import pytest
import zmq as pyzmq

import members
import tcp_proxy
from dynamo.base import errors, membership
from dynamo.protocols import instances
from dynamo.runtime import listening
from dynamo.runtime.backends import memory, zmq, zmq_receiver
from waiting import PATIENT_S, until

TOPIC = "dynamo/backend/kv-events"


@pytest.fixture
def cluster():
    return memory.MemoryRegistry()


@pytest.fixture
async def join(cluster):
    """Makes planes of one cluster; they leave at the end."""
    planes = []

    def make(instance_id, **options):
        discovery = memory.MemoryDiscovery(cluster)
        planes.append(zmq.ZmqEventPlane(discovery, instance_id, **options))
        return planes[-1]

    yield make
    for plane in planes:
        await plane.close()


@pytest.fixture
async def stranger(cluster):
    """A publisher that says what it likes: its socket, advertised under TOPIC."""
    with pyzmq.Context() as context, context.socket(pyzmq.XPUB) as socket:
        socket.set(pyzmq.LINGER, 0)
        socket.set(pyzmq.SNDHWM, zmq_receiver.HIGH_WATER)
        socket.bind("tcp://127.0.0.1:0")
        record = instances.EventChannel(
            topic=TOPIC,
            instance_id=255,
            transport={"zmq": socket.get_string(pyzmq.LAST_ENDPOINT)},
        )
        discovery = memory.MemoryDiscovery(cluster)
        await discovery.put(record.key, msgspec.json.encode(record))
        yield socket


async def hear(plane):
    """Subscribe; what is heard comes by the queue, batch by batch."""
    batches = asyncio.Queue()
    await plane.subscribe(TOPIC, batches.put_nowait)
    return batches


async def take(batches):
    async with asyncio.timeout(PATIENT_S):
        return await batches.get()


def message(number, payload=b"", topic=TOPIC, publisher=255):
    return topic.encode() + b"\0" + struct.pack(">QQ", number, publisher) + payload


async def test_publisher_is_in_discovery_until_it_closes(join, cluster):
    plane = join(0xAB)
    await plane.advertise(TOPIC)
    key = "v1/event_channels/dynamo/backend/kv-events/ab"
    record = msgspec.json.decode(cluster.view.get_prefix("")[key], type=instances.EventChannel)
    await plane.close()

    assert (record.topic, record.instance_id) == (TOPIC, 0xAB)
    assert record.transport["zmq"].startswith("tcp://127.0.0.1:")
    assert cluster.view.get_prefix("") == {}


async def test_an_event_is_one_frame(join, cluster):
    """libzmq aborts a publisher that closes its socket when a listener left between two frames of a message."""
    plane = join(0xAB)
    await plane.advertise(TOPIC)
    record = cluster.view.get_prefix("")[f"v1/event_channels/{TOPIC}/ab"]
    address = msgspec.json.decode(record, type=instances.EventChannel).transport["zmq"]
    with pyzmq.Context() as context, context.socket(pyzmq.SUB) as listener:
        listener.subscribe(TOPIC.encode())
        listener.connect(address)
        while not listener.poll(10):  # until the publisher has the subscription
            plane.publish(TOPIC, b"payload")
        frames = listener.recv_multipart()

    (frame,) = frames
    number = struct.unpack_from(">Q", frame, len(TOPIC) + 1)[0]
    assert frame == message(number, b"payload", publisher=0xAB)


async def test_malformed_messages_are_dropped_and_logged(join, stranger, caplog):
    batches = await hear(join(1))
    await asyncio.to_thread(stranger.recv)  # the subscription has arrived
    stranger.send(TOPIC.encode() + b"\0")
    stranger.send(message(0)[:-1])
    stranger.send_multipart([message(6, b"one frame"), b"more", b""])
    stranger.send(message(7, b"fine"))
    heard = []
    while not heard or heard[-1].number != 7:
        heard += await take(batches)

    assert [(e.topic, e.publisher, e.number, e.payload) for e in heard] == [
        (TOPIC, 255, 6, b"one frame"),
        (TOPIC, 255, 7, b"fine"),
    ]
    assert "malformed event messages" in caplog.text


async def test_a_topic_that_begins_like_ours_is_not_ours(join, stranger):
    batches = await hear(join(1))
    await asyncio.to_thread(stranger.recv)
    stranger.send(message(0, b"theirs", topic=TOPIC + "-other"))
    stranger.send(message(0, b"ours"))

    assert [e.payload for e in await take(batches)] == [b"ours"]


async def test_busy_loop_receives_large_batches(join, stranger):
    batches = await hear(join(1))
    await asyncio.to_thread(stranger.recv)
    stranger.send(message(0))
    await take(batches)
    for number in range(1, 5001):
        stranger.send(message(number))
    heard = []
    num_batches = 0
    while len(heard) < 5000:
        heard += [e.number for e in await take(batches)]
        num_batches += 1

    assert heard == list(range(1, 5001))
    assert num_batches < 500


async def test_payload_over_the_limit_cannot_be_published(join):
    plane = join(1)
    await plane.advertise(TOPIC)
    with pytest.raises(errors.LocalProtocolError, match="expected at most"):
        plane.publish(TOPIC, bytes(zmq_receiver.PAYLOAD_LIMIT + 1))


@pytest.mark.parametrize(
    "value",
    [
        b"not json",
        b'{"type":"Endpoint"}',
        b'{"type":"EventChannel","topic":"dynamo/backend/kv-events","instance_id":1,"transport":{"nats":"x"}}',
        b'{"type":"EventChannel","topic":"dynamo/backend/kv-events","instance_id":1,"transport":{"zmq":"nowhere"}}',
    ],
)
async def test_invalid_event_channel_is_logged_and_others_still_arrive(
    join, cluster, stranger, caplog, value
):
    discovery = memory.MemoryDiscovery(cluster)
    await discovery.put(f"v1/event_channels/{TOPIC}/1", value)
    batches = await hear(join(2))
    await asyncio.to_thread(stranger.recv)
    stranger.send(message(0, b"fine"))
    batch = await take(batches)

    assert [e.payload for e in batch] == [b"fine"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_unreachable_host_is_refused(join, host):
    with pytest.raises(errors.ConfigError, match="by which other processes reach"):
        join(1, listen_address=listening.ListenAddress(host=host))


async def test_a_host_that_is_not_ours_is_refused(join):
    plane = join(
        1,
        listen_address=listening.ListenAddress(host="192.0.2.1"),
        credentials=membership.Credentials(is_insecure=True),
    )
    with pytest.raises(errors.ConfigError, match="expected an address of this host"):
        await plane.advertise(TOPIC)


async def test_closed_event_plane_leaves_no_threads_or_tasks(join):
    threads_before = set(threading.enumerate())
    plane = join(1)
    await plane.advertise(TOPIC)
    await hear(plane)
    await plane.close()
    left = {t.name for t in set(threading.enumerate()) - threads_before}

    assert "event receiver" not in left
    assert asyncio.all_tasks() == {asyncio.current_task()}


WITH_TOKEN = members.with_token()
OTHER_TOKEN = members.with_token("the token of another cluster")


async def eventually_hears(batches, publisher, payload=b"hello"):
    """Publish until the listener hears it."""
    async with asyncio.timeout(PATIENT_S):
        while batches.empty():
            publisher.publish(TOPIC, payload)
            await asyncio.sleep(0.01)
    return await take(batches)


class ChangedFiles:
    """Credentials whose files have been read again."""

    def __init__(self, credentials):
        self.latest = credentials

    def current(self):
        return self.latest


async def test_publisher_with_a_token_that_was_just_read_is_heard_at_once(
    join, monkeypatch, caplog
):
    monkeypatch.setattr(membership, "CHECK_S", 10 * PATIENT_S)  # so long until the plane looks
    old, new = b"o" * 40, b"n" * 40
    files = ChangedFiles(membership.Credentials(token=old))
    listener = join(1, credentials=membership.Credentials(token=old, files=files))
    batches = await hear(listener)
    files.latest = membership.Credentials(token=old, second_token=new)
    publisher = join(2, credentials=membership.Credentials(token=new, second_token=old))
    await publisher.advertise(TOPIC)
    await eventually_hears(batches, publisher)

    assert zmq_receiver.MISMATCH not in caplog.text


@pytest.mark.parametrize("shown", [OTHER_TOKEN, membership.NO_CREDENTIALS], ids=["other", "none"])
async def test_publisher_with_another_token_is_ignored_and_logged(join, shown, caplog):
    stranger, honest = join(1, credentials=shown), join(2, credentials=WITH_TOKEN)
    for publisher in (stranger, honest):
        await publisher.advertise(TOPIC)
    batches = await hear(join(3, credentials=WITH_TOKEN))
    for _ in range(100):
        stranger.publish(TOPIC, b"lies")
    await until(lambda: "has another cluster token, or none" in caplog.text)
    heard = await eventually_hears(batches, honest)

    assert {event.publisher for event in heard} == {2}
    assert members.TOKEN not in caplog.text


@pytest.mark.parametrize("shown", [OTHER_TOKEN, membership.NO_CREDENTIALS], ids=["other", "none"])
async def test_listener_with_another_token_receives_nothing_and_both_sides_say_why(
    join, caplog, shown
):
    publisher = join(1, credentials=WITH_TOKEN)
    await publisher.advertise(TOPIC)
    deaf = await hear(join(2, credentials=shown))
    await until(lambda: "event plane: refused a listener at " in caplog.text)
    await until(lambda: "the publisher at tcp://127.0.0.1:" in caplog.text)
    await eventually_hears(await hear(join(3, credentials=WITH_TOKEN)), publisher)

    assert deaf.empty()


NO_TOKEN = membership.NO_CREDENTIALS


@pytest.mark.parametrize(
    ("own", "shown", "mismatch"),
    [
        (WITH_TOKEN, OTHER_TOKEN, "has another cluster token, or none"),
        (WITH_TOKEN, NO_TOKEN, "has another cluster token, or none"),
        (NO_TOKEN, WITH_TOKEN, "has a cluster token, and this process has none"),
    ],
    ids=["another", "none at the listener", "none at the publisher"],
)
async def test_both_sides_log_a_refused_listener_once(
    join, caplog, monkeypatch, own, shown, mismatch
):
    refusals = []
    monkeypatch.setattr(zmq, "_NAME_S", PATIENT_S)
    report = zmq._RefusedListeners._report
    monkeypatch.setattr(
        zmq._RefusedListeners,
        "_report",
        lambda listeners, host, mismatch: (
            refusals.append(host) or report(listeners, host, mismatch)
        ),
    )
    publisher, listener = join(1, credentials=own), join(2, credentials=shown)
    await publisher.advertise(TOPIC)
    await hear(listener)

    async def is_named():
        listener.reconnect(
            TOPIC, 1
        )  # ZeroMQ does not try again if it finds the other mechanism itself
        await asyncio.sleep(0.02)
        return f"refused a listener at 127.0.0.1: it {mismatch}" in caplog.text

    await until(is_named)
    await until(lambda: "the publisher at tcp://127.0.0.1:" in caplog.text)
    num_refusals = len(refusals)

    async def is_refused_again():
        await is_named()
        return len(refusals) > num_refusals + 2

    await until(is_refused_again)

    assert len([r for r in caplog.records if "--cluster-token-file" in r.getMessage()]) == 2


async def test_refused_listener_is_logged_without_an_address_that_cannot_be_read(
    join, caplog, monkeypatch
):
    monkeypatch.setattr(zmq._RefusedListeners, "_find_host", lambda *_: None)
    monkeypatch.setattr(zmq, "_NAME_S", 0.01)
    await join(1, credentials=WITH_TOKEN).advertise(TOPIC)
    await hear(join(2, credentials=OTHER_TOKEN))

    await until(lambda: "a listener at an address that could not be read" in caplog.text)


async def test_publisher_that_says_nothing_is_not_said_to_have_another_token(
    join, caplog, monkeypatch
):
    """Such as a process that is stopped."""
    monkeypatch.setattr(zmq_receiver, "_PEER_WATCH", ((pyzmq.HANDSHAKE_IVL, 50),))
    events, parse = [], zmq_receiver.parse_monitor_message

    def record(frames):
        events.append(parse(frames))
        return events[-1]

    monkeypatch.setattr(zmq_receiver, "parse_monitor_message", record)
    listener = join(2, credentials=WITH_TOKEN)
    await hear(listener)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        listener._receiver.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        await until(lambda: len(events) > 1)
        listener._receiver.disconnect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")

    assert "cluster token" not in caplog.text


async def test_host_of_a_connection_that_has_ended_is_not_looked_up(join, monkeypatch):
    """Its descriptor may belong to another connection by then."""
    publisher = join(1)
    await publisher.advertise(TOPIC)
    refused = publisher._publisher._refused
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        descriptor = connection.fileno()
        before = refused._find_host(descriptor)
        refused._events.append({"event": pyzmq.EVENT_DISCONNECTED, "value": descriptor})
        after = refused._find_host(descriptor)
        refused._events.clear()

    assert (before, after) == ("127.0.0.1", None)


def encrypt(socket, server_key):
    """As a listener who knows CURVE, but guesses the publisher's key."""
    public, secret = pyzmq.curve_keypair()
    socket.set(pyzmq.CURVE_SERVERKEY, server_key)
    socket.set(pyzmq.CURVE_PUBLICKEY, public)
    socket.set(pyzmq.CURVE_SECRETKEY, secret)


@pytest.mark.parametrize("knows_curve", [False, True])
async def test_a_stranger_is_shut_out_in_the_handshake(join, cluster, knows_curve):
    publisher = join(1, credentials=WITH_TOKEN)
    await publisher.advertise(TOPIC)
    record = msgspec.json.decode(next(iter(cluster.view.get_prefix("").values())))
    with pyzmq.Context() as context, context.socket(pyzmq.SUB) as socket:
        if knows_curve:
            encrypt(socket, pyzmq.curve_keypair()[0])
        monitor = socket.get_monitor_socket(
            pyzmq.EVENT_HANDSHAKE_SUCCEEDED | zmq_receiver.HANDSHAKE_FAILURES
        )
        socket.subscribe("")
        socket.connect(record["transport"]["zmq"])
        event = await asyncio.to_thread(monitor.recv_multipart)
        socket.disable_monitor()
        monitor.close()

    assert int.from_bytes(event[0][:2], "little") & zmq_receiver.HANDSHAKE_FAILURES


async def test_peer_that_says_nothing_is_dropped_in_time(join, monkeypatch):
    watch = [
        (option, 200 if option == pyzmq.HANDSHAKE_IVL else value)
        for option, value in zmq_receiver._PEER_WATCH
    ]
    monkeypatch.setattr(zmq_receiver, "_PEER_WATCH", watch)
    publisher = join(1, credentials=WITH_TOKEN)
    await publisher.advertise(TOPIC)
    host, _, port = publisher._publisher.address.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENT_S):
        greeting = await reader.read()  # to the end of the connection
    writer.close()

    assert 0 < len(greeting) <= 64


@pytest.mark.parametrize("shown", [WITH_TOKEN, membership.NO_CREDENTIALS], ids=["token", "open"])
async def test_publisher_survives_malformed_bytes_at_its_socket(join, cluster, shown):
    publisher = join(1, credentials=shown)
    await publisher.advertise(TOPIC)
    record = msgspec.json.decode(next(iter(cluster.view.get_prefix("").values())))
    host, _, port = record["transport"]["zmq"].removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48)
    noise = [b"", b"\xff" * 64, bytes(range(256)) * 40, greeting, greeting + b"\x04\xff" * 200]
    with contextlib.ExitStack() as stack:
        for said in noise * 5:
            sock = stack.enter_context(
                socket.create_connection((host, int(port)), timeout=PATIENT_S)
            )
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
        heard = await eventually_hears(await hear(join(2, credentials=shown)), publisher)

    assert {event.payload for event in heard} == {b"hello"}


def test_an_address_off_loopback_wants_a_token(join):
    with pytest.raises(
        errors.ConfigError, match=r"event plane over ZeroMQ on 10\.0\.0\.7.*--insecure"
    ):
        join(1, listen_address=listening.ListenAddress(host="10.0.0.7"))
    for shown in (WITH_TOKEN, membership.Credentials(is_insecure=True)):
        join(1, listen_address=listening.ListenAddress(host="10.0.0.7"), credentials=shown)


@pytest.fixture
async def behind_a_proxy(cluster, join, monkeypatch):
    """A publisher that listeners reach through a proxy, the proxy, and a listener's batches."""
    quick = {pyzmq.HEARTBEAT_IVL: 50, pyzmq.HEARTBEAT_TIMEOUT: 200, pyzmq.HANDSHAKE_IVL: 500}
    watch = [(option, quick.get(option, value)) for option, value in zmq_receiver._PEER_WATCH]
    monkeypatch.setattr(zmq_receiver, "_PEER_WATCH", watch)
    publisher = join(1)
    await publisher.advertise(TOPIC)
    port = int(publisher._publisher.address.rpartition(":")[2])
    proxy = tcp_proxy.TcpProxy(port)
    record = instances.EventChannel(
        topic=TOPIC, instance_id=1, transport={"zmq": f"tcp://{await proxy.start()}"}
    )
    registry = memory.MemoryDiscovery(cluster)
    await registry.put(record.key, msgspec.json.encode(record))
    listener = join(2)
    heard = await hear(listener)
    await until_heard(publisher, heard)
    yield publisher, proxy, listener, heard
    await proxy.close()


async def until_heard(publisher, heard):
    """Publish until the listener hears it."""
    async with asyncio.timeout(PATIENT_S):
        while heard.empty():
            publisher.publish(TOPIC, b"x")
            await asyncio.sleep(0.01)
    while not heard.empty():
        heard.get_nowait()


@pytest.mark.parametrize("is_told", [False, True], ids=["by heartbeats", "by reconnect"])
async def test_listener_hears_again_after_a_cut_without_a_word(behind_a_proxy, is_told):
    publisher, proxy, listener, heard = behind_a_proxy
    before = len(proxy._writers)
    proxy._flows.clear()
    while not heard.empty():
        heard.get_nowait()
    if is_told:
        listener.reconnect(TOPIC, 1)
    async with asyncio.timeout(PATIENT_S):
        while len(proxy._writers) == before:  # until it has connected anew
            await asyncio.sleep(0.01)
    proxy._flows.set()

    await until_heard(publisher, heard)


async def test_events_of_an_instance_that_is_not_registered_there_are_not_heard(join, stranger):
    """Another process has the port of the one that discovery names."""
    heard = await hear(join(1))
    await asyncio.to_thread(stranger.recv)  # the subscription
    for publisher, payload in ((254, b"another"), (255, b"registered")):
        stranger.send(message(0, payload, publisher=publisher))
    batch = await asyncio.wait_for(heard.get(), PATIENT_S)

    assert [event.payload for event in batch] == [b"registered"]
