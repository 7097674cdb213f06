"""Whatever a stranger sends to a living request plane, it neither hangs nor crashes, and serves the others."""

import asyncio
import contextlib
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nats_server as nats_servers
from dynamo.base import errors
from dynamo.protocols import generate, wire
from dynamo.runtime import requests
from dynamo.runtime.backends import memory_requests, tcp
from dynamo.runtime.backends.nats import requests as nats_requests

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
    reply = await requests.ask(plane, address, ECHO, "well?", reply_type=str, timeout_s=5)
    stranger.transport.abort()
    await plane.close()
    await server.close()
    return reply


async def ask_a_stranger(network, make_plane, data):
    listener = await network.listen(lambda: Stranger(data))
    plane, answer = make_plane(network), requests.Answer()
    try:
        await plane.open(listener.address, ECHO, None, answer)
    except errors.WorkerLost:
        answer.body.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    await plane.close()
    listener.close()
    return answer.body.done() and (answer.body.cancelled() or answer.body.exception())


@contextlib.asynccontextmanager
async def over_memory(url):
    network = memory_requests.MemoryNetwork()
    yield network, memory_requests.MemoryRequestPlane


@contextlib.asynccontextmanager
async def over_tcp(url):
    yield tcp.TcpNetwork(), lambda network: tcp.TcpRequestPlane()


@contextlib.asynccontextmanager
async def over_nats(url):
    connection, ids = await nats_servers.connect(url), itertools.count(1)

    def join():
        return nats_requests.NatsNetwork(connection, namespace="fuzz", number=next(ids))

    yield join(), lambda network: nats_requests.NatsRequestPlane(join())
    await connection.close()


KINDS = {"memory": over_memory, "tcp": over_tcp, "nats": over_nats}


@pytest.fixture(params=KINDS, scope="module")
def kind(request):
    """How to make a network, and the server that it needs."""
    is_served = request.param == "nats"
    return KINDS[request.param], request.getfixturevalue("nats_server").url if is_served else ""


async def run_over(kind, story, data):
    over, url = kind
    async with over(url) as (network, make_plane):
        return await story(network, make_plane, data)


@settings(max_examples=60, deadline=None)
@given(is_polite=st.booleans(), parts=st.lists(said, max_size=8))
def test_a_server_serves_others_whatever_a_stranger_says(kind, is_polite, parts):
    data = wire.encode(HELLO) * is_polite + b"".join(parts)
    reply = asyncio.run(run_over(kind, serve_beside_a_stranger, data))

    assert reply == "well?"


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(said, max_size=8))
def test_an_asker_always_gets_an_end_whatever_a_stranger_answers(kind, parts):
    data = wire.encode(WELCOME) + b"".join(parts)
    end = asyncio.run(run_over(kind, ask_a_stranger, data))

    assert end is True or end is None or isinstance(end, errors.DynamoError)
