"""Handshakes of the request plane: which peers are authenticated, dropped and logged."""

import asyncio
import logging

import pytest

import members
from dynamo.base import clock, errors, membership, proof
from dynamo.protocols import wire
from dynamo.runtime import authentication
from waiting import until

CREDENTIALS = members.with_token()
KEY = CREDENTIALS.derive_keys(authentication.REQUEST_PLANE)[0]


class Transport:
    """Remembers what was done to it."""

    def __init__(self, host="10.0.0.1"):
        self.host, self.written, self.protocol, self.is_over = host, b"", None, False

    def get_extra_info(self, name, default=None):
        return (self.host, 1) if name == "peername" else default

    def write(self, data):
        self.written += data

    def pause_reading(self):
        pass

    def set_protocol(self, protocol):
        self.protocol = protocol

    def is_closing(self):
        return self.is_over

    def close(self):
        self.is_over = True

    abort = close


class Protocol:
    """Stands for the protocol that gets an authenticated connection."""

    def __init__(self):
        self.transport, self.received = None, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data


def pending_connections(*, limit_s=5.0, max_pending=128, credentials=CREDENTIALS):
    return authentication.PendingConnections(
        authentication.ConnectionAuthenticator(credentials, authentication.REQUEST_PLANE),
        Protocol,
        limit_s=limit_s,
        max_pending=max_pending,
        time=clock.SystemClock(),
    )


def connect(pending, host="10.0.0.1"):
    transport, handshake = Transport(host), authentication.ServerHandshake(pending)
    handshake.connection_made(transport)
    return handshake, transport


async def test_proven_connection_is_handed_over_with_the_bytes_behind_the_proof():
    handshake, transport = connect(pending_connections())
    steps = proof.client_steps(KEY, bytes(32))
    handshake.data_received(next(steps).output)
    steps.send(transport.written[:8])
    proven = steps.send(transport.written[8:]).output
    for byte in proven[:-1]:
        handshake.data_received(bytes([byte]))
    was_closed = transport.protocol is None
    handshake.data_received(proven[-1:] + b"Hello")

    assert was_closed
    assert transport.protocol.transport is transport
    assert transport.protocol.received == b"Hello"
    assert not transport.is_over


async def test_unproven_peer_gets_a_nonce_and_a_goodbye_with_the_reason(caplog):
    handshake, transport = connect(pending_connections())
    for part in (proof.GREETING + bytes(32), bytes(32)):
        handshake.data_received(part)
    (goodbye,) = wire.FrameReader().feed(transport.written[40:])

    assert transport.written.startswith(proof.GREETING)
    assert "has another cluster token" in goodbye.reason
    assert (transport.protocol, transport.is_over) == (None, True)
    assert "has another cluster token" in caplog.text


async def test_bytes_after_a_refusal_are_ignored():
    handshake, transport = connect(pending_connections())
    handshake.data_received(bytes(8))
    written = transport.written
    handshake.data_received(proof.GREETING + bytes(64))

    assert transport.written == written


async def test_oldest_connection_of_the_busiest_host_is_dropped_for_a_new_one():
    pending = pending_connections(max_pending=4)
    hosts = ["honest", "flood", "flood", "other", "flood", "flood"]
    transports = [connect(pending, host)[1] for host in hosts]

    assert [t.is_over for t in transports] == [False, True, True, False, False, False]


async def test_connection_without_a_proof_is_dropped_after_the_time_limit():
    _, transport = connect(pending_connections(limit_s=0.01))
    await until(lambda: transport.is_over)

    assert transport.protocol is None


async def test_closing_drops_all_pending_connections():
    pending = pending_connections()
    transports = [connect(pending)[1] for _ in range(3)]
    pending.close()

    assert all(transport.is_over for transport in transports)


async def test_bytes_that_arrive_during_the_tls_handshake_are_kept(monkeypatch):
    """start_tls tells the protocol of data before it tells its caller that it is done."""
    tls = membership.Tls(client=None, server=None)
    pending = pending_connections(credentials=membership.Credentials(tls=tls))
    raw, secured, handshake = Transport(), Transport(), authentication.ServerHandshake(pending)

    async def start_tls(transport, protocol, context, **options):
        protocol.data_received(b"Hello")
        return secured

    monkeypatch.setattr(asyncio.get_running_loop(), "start_tls", start_tls)
    handshake.connection_made(raw)
    await handshake._tls_task

    assert (secured.protocol.transport, secured.protocol.received) == (secured, b"Hello")


async def test_client_gets_worker_lost_when_the_server_does_not_prove_the_token():
    handshake = authentication.ClientHandshake(
        authentication.ConnectionAuthenticator(CREDENTIALS, authentication.REQUEST_PLANE),
        Protocol,
        "10.0.0.9:1",
    )
    transport = Transport()
    handshake.connection_made(transport)
    handshake.data_received(b"HTTP/1.1 400")

    with pytest.raises(errors.WorkerLost, match=r"worker at 10\.0\.0\.9:1 has no cluster token"):
        await handshake.completed
    assert transport.is_over


def test_reason_that_was_left_out_because_of_another_one_is_logged_when_it_comes_again(caplog):
    now = [0.0]
    log = authentication.RefusalLog(logging.getLogger("dynamo.test"), lambda: now[0])
    for at, reason in ((0.0, "expired"), (0.5, "no token"), (1.5, "no token"), (3.0, "no token")):
        now[0] = at
        log.warning("10.0.0.1", "%s", reason)

    logged = [record.getMessage().partition(" (")[0] for record in caplog.records]
    assert logged == ["expired", "no token"]
