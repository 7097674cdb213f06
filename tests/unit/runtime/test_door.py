"""Who gets in, who gives way to whom, and what is said in the log."""

import asyncio

import pytest

import members
from dynamo.base import errors, membership, proof
from dynamo.protocols import wire
from dynamo.runtime.backends import complaints, door, link

CREDENTIALS = members.with_token()
KEY = CREDENTIALS.key(door.PURPOSE)


class Transport:
    """Remembers what was done to it."""

    def __init__(self, host="10.0.0.1"):
        self.host, self.said, self.protocol, self.is_over = host, b"", None, False

    def get_extra_info(self, name, default=None):
        return (self.host, 1) if name == "peername" else default

    def write(self, data):
        self.said += data

    def set_protocol(self, protocol):
        self.protocol = protocol

    def is_closing(self):
        return self.is_over

    def close(self):
        self.is_over = True

    abort = close


class Made:
    """Stands for a link."""

    def __init__(self):
        self.transport, self.heard = None, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.heard += data


def a_porch(**limits):
    return door.Porch(link.Limits(**limits), CREDENTIALS, Made)


def knock(porch, host="10.0.0.1"):
    transport, made = Transport(host), door.AnsweringDoor(porch)
    made.connection_made(transport)
    return made, transport


async def test_a_door_opens_to_who_proves_it_and_hands_on_what_came_behind():
    made, transport = knock(a_porch())
    steps = proof.ask(KEY, bytes(32))
    made.data_received(next(steps).said)
    steps.send(transport.said[:8])
    proven = steps.send(transport.said[8:]).said
    for byte in proven[:-1]:
        made.data_received(bytes([byte]))
    was_closed = transport.protocol is None
    made.data_received(proven[-1:] + b"Hello")

    assert was_closed
    assert transport.protocol.transport is transport
    assert transport.protocol.heard == b"Hello"
    assert not transport.is_over


async def test_who_proves_nothing_learns_a_nonce_and_is_told_why(caplog):
    made, transport = knock(a_porch())
    for part in (proof.GREETING + bytes(32), bytes(32)):
        made.data_received(part)
    (goodbye,) = wire.FrameReader().feed(transport.said[40:])

    assert transport.said.startswith(proof.GREETING)
    assert "has another cluster token" in goodbye.reason
    assert (transport.protocol, transport.is_over) == (None, True)
    assert "has another cluster token" in caplog.text


async def test_what_comes_after_a_refusal_is_not_looked_at():
    made, transport = knock(a_porch())
    made.data_received(bytes(8))
    said = transport.said
    made.data_received(proof.GREETING + bytes(64))

    assert transport.said == said


async def test_the_oldest_of_the_host_with_most_strangers_gives_way():
    porch = a_porch(max_strangers=4)
    hosts = ["honest", "flood", "flood", "other", "flood", "flood"]
    transports = [knock(porch, host)[1] for host in hosts]

    assert [t.is_over for t in transports] == [False, True, True, False, False, False]


async def test_a_door_that_stays_shut_is_dropped_in_time():
    _, transport = knock(a_porch(hello_s=0.01))
    async with asyncio.timeout(10):
        while not transport.is_over:
            await asyncio.sleep(0.001)

    assert transport.protocol is None


async def test_a_porch_that_closes_drops_all():
    porch = a_porch()
    transports = [knock(porch)[1] for _ in range(3)]
    porch.close()

    assert all(transport.is_over for transport in transports)


async def test_what_comes_while_tls_is_still_being_set_up_is_kept(monkeypatch):
    """start_tls tells the protocol of data before it tells its caller that it is done."""
    tls = membership.Tls(asking=None, answering=None)
    porch = door.Porch(link.Limits(), membership.Credentials(tls=tls), Made)
    raw, secured, entrance = Transport(), Transport(), door.AnsweringDoor(porch)
    raw.pause_reading = lambda: None

    async def start_tls(transport, protocol, context, **options):
        protocol.data_received(b"Hello")
        return secured

    monkeypatch.setattr(asyncio.get_running_loop(), "start_tls", start_tls)
    entrance.connection_made(raw)
    await entrance._securing

    assert (secured.protocol.transport, secured.protocol.heard) == (secured, b"Hello")


async def test_an_asker_is_told_when_the_worker_does_not_prove_it():
    entrance = door.AskingDoor(CREDENTIALS, Made, "10.0.0.9:1")
    transport = Transport()
    entrance.connection_made(transport)
    entrance.data_received(b"HTTP/1.1 400")

    with pytest.raises(errors.WorkerLost, match=r"worker at 10\.0\.0\.9:1 has no cluster token"):
        await entrance.opened
    assert transport.is_over


def test_complaints_are_one_line_a_second(caplog):
    now = [0.0]
    made = complaints.Complaints(lambda: now[0])
    for now[0] in (0.0, 0.5, 0.99, 1.0, 1.5, 2.0):
        made.say(f"came at {now[0]}")

    assert [r.getMessage().rpartition(" ")[2] for r in caplog.records] == ["0.0", "1.0", "2.0"]
