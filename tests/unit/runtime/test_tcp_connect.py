"""A connection over TCP: attempts that are not answered are followed by others."""

import asyncio
import contextlib

import pytest

from dynamo.base import errors
from dynamo.runtime.backends import tcp
from waiting import PATIENT_S


class Peer(asyncio.Protocol):
    def __init__(self):
        self.transport = None
        self.received = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received.set_result(data)


@pytest.fixture
async def attempts(monkeypatch):
    """The attempts to connect, in order: a future each that holds it back until it is done."""
    loop = asyncio.get_running_loop()
    connect, held = loop.create_connection, []

    async def create_connection(*arguments):
        held.append(loop.create_future())
        await held[-1]
        return await connect(*arguments)

    monkeypatch.setattr(loop, "create_connection", create_connection)
    monkeypatch.setattr(tcp, "_NEXT_ATTEMPT_S", 0.001)
    return held


class Made:
    """The protocols that were made."""

    def __init__(self):
        self.peers = []

    def add(self):
        self.peers.append(Peer())
        return self.peers[-1]


@pytest.fixture
async def made():
    made = Made()
    yield made
    for peer in made.peers:
        peer.transport.close()


@pytest.fixture
async def server():
    """The address of a server that greets each connection."""

    async def greet(reader, writer):
        writer.write(b"hello")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def until(condition):
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_lost_attempt_is_followed_by_another_one(attempts, server, made):
    dialing = asyncio.ensure_future(tcp.TcpNetwork().connect(server, made.add))
    await until(lambda: len(attempts) == 2)
    attempts[1].set_result(None)
    await dialing

    (peer,) = made.peers
    assert await peer.received == b"hello"
    assert attempts[0].cancelled()


async def test_attempts_are_bounded_and_one_connection_stays(attempts, server, made):
    dialing = asyncio.ensure_future(tcp.TcpNetwork().connect(server, made.add))
    await until(lambda: len(attempts) == tcp._MAX_ATTEMPTS)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(attempts) == tcp._MAX_ATTEMPTS
    for attempt in attempts:
        attempt.set_result(None)
    await dialing

    (peer,) = made.peers
    assert await peer.received == b"hello"


async def test_caller_that_leaves_ends_all_attempts(attempts, server, made):
    dialing = asyncio.ensure_future(tcp.TcpNetwork().connect(server, made.add))
    await until(lambda: len(attempts) == 3)
    dialing.cancel()
    await asyncio.wait([dialing])
    await until(lambda: all(attempt.cancelled() for attempt in attempts))

    assert not made.peers


async def test_refused_attempt_is_final(unused_tcp_port):
    with pytest.raises(errors.WorkerLost) as refusal:
        await tcp.TcpNetwork().connect(f"127.0.0.1:{unused_tcp_port}", Peer)
    assert isinstance(refusal.value.__cause__, ConnectionRefusedError)
