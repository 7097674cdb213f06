"""Whatever a stranger sends to a living request plane, it neither hangs nor crashes, and serves the others."""

import asyncio
import contextlib
import itertools
import socket

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import members
import nats_server as nats_servers
from dynamo.base import errors, membership, proof
from dynamo.protocols import generate, wire
from dynamo.runtime import authentication, listening, requests
from dynamo.runtime.backends import frame_connection, memory, multiplex, tcp
from dynamo.runtime.backends.nats import planes
from waiting import PATIENT_S, until

ECHO = "a/b/echo"
small = st.integers(-1, 4)
bodies = st.sampled_from([b"\xc0", b"\x01", b"\xa1x"]).map(msgspec.Raw)
# Frames that may be right or wrong where they stand, and bytes that are none.
said = st.one_of(
    st.builds(wire.Hello, st.sampled_from([0, wire.VERSION]), st.just("fuzz")),
    st.builds(wire.Open, small, st.sampled_from([ECHO, "other"]), bodies),
    st.builds(wire.Cancel, small),
    st.builds(wire.Step, st.just(()), st.lists(small, max_size=2).map(tuple)),
    st.builds(wire.StepItem, small, st.just(generate.Output((1,)))).map(lambda i: wire.Step((i,))),
    st.builds(wire.Fail, small, st.sampled_from(["internal", "overloaded", "?"]), st.just("")),
    st.builds(wire.Reply, small, bodies),
    st.builds(wire.Ping, small),
    st.builds(wire.Welcome, st.sampled_from([0, wire.VERSION]), st.just(())),
    st.builds(wire.Goodbye, st.just("")),
).map(wire.encode) | st.binary(max_size=30)
HELLO, WELCOME = wire.Hello(wire.VERSION, "fuzz"), wire.Welcome(wire.VERSION, ())


class Stranger(asyncio.Protocol):
    """Says its piece as soon as it is connected."""

    def __init__(self, data):
        self._data = data

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self._data)


def echo(call):
    call.on_cancel(lambda: None)
    call.reply(msgspec.msgpack.decode(call.body))
    call.finish()


async def serve_beside_a_stranger(network, make_plane, data):
    server, plane, stranger = make_plane(network), make_plane(network), Stranger(data)
    address = await server.serve(ECHO, echo)
    await network.connect(address, lambda: stranger)
    reply = await requests.call(plane, address, ECHO, "well?", reply_type=str, timeout_s=PATIENT_S)
    stranger.transport.abort()
    await plane.close()
    await server.close()
    return reply


async def ask_a_stranger(network, make_plane, data):
    listener = await network.listen(lambda: Stranger(data))
    plane, receiver = make_plane(network), requests.ItemReceiver(object)
    try:
        await plane.open(listener.address, ECHO, None, receiver)
    except errors.WorkerLost as error:
        receiver.ended(error)
    for _ in range(5):
        await asyncio.sleep(0)
    await plane.close()
    listener.close()
    return receiver.is_complete and receiver.error is not None


@contextlib.asynccontextmanager
async def over_memory(_):
    network = memory.MemoryNetwork()
    yield network, multiplex.MultiplexedPlane


@contextlib.asynccontextmanager
async def over_tcp(credentials):
    shown = {"credentials": credentials}
    yield (
        tcp.TcpNetwork(**shown),
        lambda network: tcp.TcpRequestPlane(**shown, item_type=generate.Output),
    )


@contextlib.asynccontextmanager
async def over_nats(url):
    connection, ids = await nats_servers.connect(url), itertools.count(1)

    def join():
        return planes.NatsNetwork(connection, namespace="fuzz", number=next(ids))

    yield join(), lambda network: planes.NatsRequestPlane(join(), item_type=generate.Output)
    await connection.close()


SECURED = ["token", "tls", "both"]


@pytest.fixture(params=["memory", "open", *SECURED, "nats"], scope="module")
def kind(request):
    """How to make a network, and what it needs: a server, or credentials."""
    if request.param == "nats":
        return over_nats, request.getfixturevalue("nats_server").url
    if request.param == "memory":
        return over_memory, None
    return over_tcp, request.getfixturevalue("credentials_by_name")[request.param]


async def run_over(kind, story, data):
    over, needed = kind
    async with over(needed) as (network, make_plane):
        return await story(network, make_plane, data)


@settings(max_examples=60, deadline=None)
@given(is_polite=st.booleans(), parts=st.lists(said, max_size=8))
def test_arbitrary_bytes_of_one_peer_do_not_affect_others(kind, is_polite, parts):
    data = wire.encode(HELLO) * is_polite + b"".join(parts)
    reply = asyncio.run(run_over(kind, serve_beside_a_stranger, data))

    assert reply == "well?"


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(said, max_size=8))
def test_caller_gets_an_end_whatever_the_server_answers(kind, parts):
    data = wire.encode(WELCOME) + b"".join(parts)
    end = asyncio.run(run_over(kind, ask_a_stranger, data))

    assert end is True or end is None or isinstance(end, errors.DynamoError)


# What somebody may say who has neither token nor certificate.
unproven = st.tuples(
    st.sampled_from(
        [b"", proof.GREETING, proof.GREETING + bytes(32), b"\x16\x03\x01\x00\x80\x01", b"GET / "]
    )
    | st.just(wire.encode(HELLO) + wire.encode(wire.Open(1, ECHO, msgspec.Raw(b"\xc0")))),
    st.binary(max_size=300),
).map(b"".join)


@pytest.fixture(params=SECURED, scope="module")
def credentials(request, credentials_by_name):
    return credentials_by_name[request.param]


def remembering(bodies):
    def handler(call):
        bodies.append(msgspec.msgpack.decode(call.body))
        echo(call)

    return handler


async def knock(address, data, *, is_patient=False):
    """Say it on a connection of our own, as if from another host; gives what is answered until it is closed."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
    writer.write(data)
    if not is_patient:
        writer.write_eof()
    try:
        return await reader.read()
    except ConnectionError:  # which is a way of closing it
        return b""
    finally:
        writer.close()


async def serve_beside_the_unproven(credentials, data):
    bodies = []
    server, plane = (
        tcp.TcpRequestPlane(credentials=credentials, item_type=generate.Output) for _ in range(2)
    )
    address = await server.serve(ECHO, remembering(bodies))
    answer, reply = await asyncio.gather(
        knock(address, data),
        requests.call(plane, address, ECHO, "well?", reply_type=str, timeout_s=PATIENT_S),
    )
    await plane.close()
    await server.close()
    return bodies, len(answer), reply


@settings(max_examples=60, deadline=None)
@given(data=unproven)
def test_unauthenticated_peer_reaches_no_handler(credentials, data):
    bodies, num_answered, reply = asyncio.run(serve_beside_the_unproven(credentials, data))

    assert (bodies, reply) == (["well?"], "well?")
    assert num_answered < 4096


async def test_flood_of_pending_connections_locks_no_peer_out(credentials):
    limits = frame_connection.ConnectionLimits(max_pending=8, hello_s=30)
    server = tcp.TcpRequestPlane(credentials=credentials, limits=limits, item_type=generate.Output)
    address = await server.serve(ECHO, echo)
    strangers = [
        asyncio.create_task(knock(address, proof.GREETING[:4], is_patient=True)) for _ in range(200)
    ]
    patient = frame_connection.ConnectionLimits(connect_s=PATIENT_S)
    plane = tcp.TcpRequestPlane(credentials=credentials, limits=patient, item_type=generate.Output)
    first = await requests.call(plane, address, ECHO, 1, reply_type=int, timeout_s=PATIENT_S)
    await until(lambda: sum(stranger.done() for stranger in strangers) >= 192)
    later = tcp.TcpRequestPlane(credentials=credentials, item_type=generate.Output)
    second = await requests.call(later, address, ECHO, 2, reply_type=int, timeout_s=PATIENT_S)
    for closed in (plane, later, server):
        await closed.close()
    await asyncio.gather(*strangers)  # the last ones, too, are let go

    assert (first, second) == (1, 2)


async def test_silent_pending_connections_are_dropped_in_time(credentials):
    limits = frame_connection.ConnectionLimits(hello_s=0.1)
    server = tcp.TcpRequestPlane(credentials=credentials, limits=limits, item_type=generate.Output)
    address = await server.serve(ECHO, echo)
    async with asyncio.timeout(PATIENT_S):
        answers = await asyncio.gather(*(knock(address, b"", is_patient=True) for _ in range(5)))
    await server.close()

    assert answers == [b""] * 5


async def test_pending_connections_are_bounded_without_a_token():
    server = tcp.TcpRequestPlane(
        limits=frame_connection.ConnectionLimits(max_pending=8, hello_s=30),
        item_type=generate.Output,
    )
    address = await server.serve(ECHO, echo)
    strangers = [asyncio.create_task(knock(address, b"\0", is_patient=True)) for _ in range(100)]
    await until(lambda: sum(stranger.done() for stranger in strangers) >= 92)
    plane = tcp.TcpRequestPlane(item_type=generate.Output)
    reply = await requests.call(plane, address, ECHO, 1, reply_type=int, timeout_s=PATIENT_S)
    for closed in (plane, server):
        await closed.close()
    await asyncio.gather(*strangers)

    assert reply == 1


async def test_worker_that_dies_as_it_is_connected_to_is_worker_lost():
    """Its kernel accepts a connection, and resets it before the first byte is sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    network = tcp.TcpNetwork(credentials=members.with_token())

    class Dying(authentication.ClientHandshake):
        def connection_made(self, transport):
            listener.close()
            super().connection_made(transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authentication, "ClientHandshake", Dying)
        with pytest.raises(errors.WorkerLost, match="closed the connection before"):
            await network.connect(address, asyncio.Protocol)


OTHER_TOKEN = members.with_token("the token of another cluster")


@pytest.mark.parametrize(
    ("asker", "answerer", "asker_hears", "answerer_says"),
    [
        (
            "other",
            "token",
            "has another cluster token",
            "the peer at 127.0.0.1 has another cluster token",
        ),
        (
            "token",
            "other",
            "has another cluster token",
            "the peer at 127.0.0.1 has another cluster token",
        ),
        ("open", "token", "refused us: the peer has no cluster token", "has no cluster token"),
        ("token", "open", "closed the connection before it had proven", "where we have none"),
        ("tls", "open", "it may have no certificates", "where we have none"),
        ("open", "tls", "worker at", "at 127.0.0.1 does not speak TLS"),
        (
            "stranger",
            "tls",
            "an authority that we do not know",
            "refuses our certificate, whose authority",
        ),
        (
            "tls",
            "stranger",
            "an authority that we do not know",
            "refuses our certificate, whose authority",
        ),
        (
            "expired",
            "tls",
            "refuses our certificate, which has expired",
            "shows a certificate that has expired",
        ),
        (
            "tls",
            "expired",
            "shows a certificate that has expired",
            "refuses our certificate, which has expired",
        ),
        (
            "stale",
            "stale",
            "shows a certificate that has expired, or whose authority has",
            "refuses our certificate, which has expired, or whose authority has",
        ),
        ("tls", "token", "does not speak TLS: give it certificates", "speaks TLS, and we have no"),
        ("token", "tls", "it may want certificates", "at 127.0.0.1 does not speak TLS"),
    ],
)
async def test_different_tokens_are_logged_at_both_sides(
    asker, answerer, asker_hears, answerer_says, credentials_by_name, certificates, caplog
):
    stranger = members.with_tls(certificates, name="stranger", authority="other")
    expired = members.with_tls(certificates, name="expired")
    stale = members.with_tls(certificates, name="of-past", authority="past")
    shown = credentials_by_name | {"other": OTHER_TOKEN, "stranger": stranger, "expired": expired}
    shown["stale"] = stale
    server = tcp.TcpRequestPlane(credentials=shown[answerer], item_type=generate.Output)
    plane = tcp.TcpRequestPlane(credentials=shown[asker], item_type=generate.Output)
    address = await server.serve(ECHO, echo)

    with pytest.raises(errors.WorkerLost, match=asker_hears):
        await plane.open(address, ECHO, None, requests.ItemReceiver(object))
    await until(lambda: answerer_says in caplog.text)
    await plane.close()
    await server.close()
    assert members.TOKEN not in caplog.text


def test_address_off_loopback_needs_a_token_or_certificates(credentials):
    with pytest.raises(errors.ConfigError, match=r"DYN_TCP_RPC_HOST.*--cluster-token-file"):
        tcp.TcpRequestPlane(listening.ListenAddress(host="10.0.0.7"), item_type=generate.Output)
    for shown in (credentials, membership.Credentials(is_insecure=True)):
        tcp.TcpRequestPlane(
            listening.ListenAddress(host="10.0.0.7"), credentials=shown, item_type=generate.Output
        )
