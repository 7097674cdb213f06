"""Peers that are not what they should be: strangers at the door, and servers that break off, lie or are silent."""

import asyncio
import contextlib
import secrets
import shutil
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import members
import transfer_peer
from dynamo.base import errors, membership, proof
from dynamo.runtime import authentication
from dynamo.transfer import api, descriptors, messages, server
from dynamo.transfer import link as links
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.backends import shm, tcp
from dynamo.transfer.link import Link, admit, new_authenticator, welcome
from transfer_peer import LAYOUT, blocks_of, content
from waiting import PATIENT_S

READ = api.TransferOperation.READ
OPEN = membership.NO_CREDENTIALS
LONG_S = PATIENT_S
GARBAGE = st.builds(
    bytes.__add__,
    st.sampled_from([b"", proof.GREETING, proof.GREETING + bytes(32), b"\x16\x03\x01\x00\x80\x01"]),
    st.binary(max_size=200),
)


@pytest.fixture(autouse=True, scope="module")
def patient_links():
    """On a busy machine a peer needs longer than 2 s to prove who it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "STALL_S", LONG_S)
        yield


@contextlib.asynccontextmanager
async def worker(credentials=membership.NO_CREDENTIALS):
    made = await transfer_peer.Worker(
        "prefill-0", tcp.TcpBackend(credentials=credentials, is_always_summed=True), seed=2
    ).start()
    try:
        yield made
    finally:
        await made.close()


def dial(metadata):
    address = descriptors.decode(metadata).addresses["tcp"]
    return socket.create_connection(
        ("127.0.0.1", int(address.rpartition(":")[2])), timeout=PATIENT_S
    )


def enter(metadata):
    """A link past the handshake."""
    link = Link(dial(metadata))
    epoch = descriptors.decode(metadata).epoch
    links.enter(
        link,
        name="stranger",
        epoch=epoch,
        authenticator=new_authenticator(OPEN),
        limit=TimeLimit(10),
    )
    return link


def receive(link, kind=messages.Done):
    return link.receive(kind, limit=TimeLimit(10), max_bytes=messages.MAX_FRAME_BYTES)


def is_closed(sock):
    """By the other side, after whatever it still said."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("how", ["open", "token", "tls", "both"])
async def test_garbage_before_the_handshake_is_dropped_and_others_are_served(
    how, credentials_by_name
):
    shown = credentials_by_name[how]
    async with worker(shown) as served, worker(shown) as ours:

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(GARBAGE)
        def knock(said):
            with dial(served.metadata) as sock:
                sock.sendall(said)
                with contextlib.suppress(OSError):  # dropped already
                    sock.shutdown(socket.SHUT_WR)
                assert is_closed(sock)

        await asyncio.to_thread(knock)
        peer = await ours.agent.connect(served.metadata, deadline_s=LONG_S)
        await ours.agent.prepare(READ, peer, [1], [2]).post(deadline_s=LONG_S)

        assert blocks_of(bytes(ours.pool), [1]) == blocks_of(content(2), [2])


async def test_frame_that_is_too_large_is_refused_by_its_length_alone():
    async with worker() as served:

        def knock():
            with dial(served.metadata) as sock:
                link = Link(sock)
                new_authenticator(OPEN).authenticate_server(
                    lambda output: link.send_bytes(output, TimeLimit(10)),
                    lambda size: link.receive_bytes(size, TimeLimit(10)),
                )
                sock.sendall(struct.pack("!I", messages.MAX_GREETING_BYTES + 1))
                assert is_closed(sock)

        await asyncio.to_thread(knock)


async def test_garbage_after_the_handshake_ends_the_connection_only():
    async with worker() as served:

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.binary(min_size=1, max_size=100))
        def say(body):
            link = enter(served.metadata)
            with contextlib.suppress(errors.TransferError, msgspec.DecodeError):
                link._send([memoryview(struct.pack("!I", len(body)) + body)], TimeLimit(10))
                receive(link)
            link.close()

        await asyncio.to_thread(say)
        (await asyncio.to_thread(enter, served.metadata)).close()

    assert bytes(served.pool) == content(2)


@pytest.mark.parametrize(
    "spans",
    [[(0, 0)], [(LAYOUT.num_bytes - 1, 2)], [(2**63, 2**63)], [(2**64 - 1, 1)], []],
    ids=["empty", "over the end", "around the end", "far away", "none"],
)
@pytest.mark.parametrize("kind", [messages.Read, messages.Write])
async def test_pieces_outside_the_pool_are_refused(kind, spans):
    async with worker() as served:
        link = await asyncio.to_thread(enter, served.metadata)
        link.send(kind(messages.pack(spans), True, 5.0), TimeLimit(10))

        with pytest.raises(errors.TransferError, match="refused"):
            await asyncio.to_thread(receive, link)
        link.close()


async def test_write_whose_checksum_is_wrong_is_not_confirmed():
    async with worker() as served:
        link = await asyncio.to_thread(enter, served.metadata)
        link.send(messages.Write(messages.pack([(0, 4)]), True, 5.0), TimeLimit(10))
        link._send([memoryview(b"abcd" + bytes(8))], TimeLimit(10))

        with pytest.raises(errors.TransferError):
            await asyncio.to_thread(receive, link)
        link.close()


@pytest.mark.parametrize("backend", [tcp.TcpBackend, shm.ShmBackend], ids=["tcp", "shm"])
@pytest.mark.parametrize("how", ["open", "other"])
async def test_client_without_the_token_is_refused(backend, how, caplog):
    credentials = members.with_token("another token of a cluster") if how == "other" else OPEN
    served, ours = [
        await transfer_peer.Worker("one", backend(credentials=shown), seed=1).start()
        for shown in (members.with_token(), credentials)
    ]

    with pytest.raises(errors.TransferError, match="has another cluster token"):
        await ours.agent.connect(served.metadata, deadline_s=LONG_S)
    await ours.close()
    await served.close()
    assert "dropping a peer of one: has another cluster token" in caplog.text


async def test_client_without_a_certificate_of_the_cluster_is_refused(certificates):
    shown = (
        members.with_tls(certificates, name="stranger"),
        members.with_tls(certificates, name="stranger", authority="other"),
        OPEN,
    )
    async with worker(members.with_tls(certificates)) as served:
        for credentials in shown:
            async with worker(credentials) as ours:
                with pytest.raises(errors.TransferError):
                    await ours.agent.connect(served.metadata, deadline_s=LONG_S)


@pytest.mark.parametrize(
    ("name", "by_client", "by_server"),
    [
        ("expired", "refuses our certificate, which has expired", "a certificate that has expired"),
        (
            "stranger",
            "refuses our certificate, whose authority",
            "an authority that we do not know",
        ),
        (None, r"it may want certificates \(--cluster-tls-cert-path\)", "does not speak TLS"),
    ],
)
async def test_refused_client_and_its_server_both_name_the_peer_and_the_reason(
    certificates, caplog, name, by_client, by_server
):
    shown = members.with_token() if name is None else members.with_tls(certificates, name=name)
    async with worker(members.with_tls(certificates)) as served, worker(shown) as ours:
        for _ in range(5):  # whether the peer has closed before we write is chance
            with pytest.raises(errors.TransferError, match=by_client) as info:
                await ours.agent.connect(served.metadata, deadline_s=LONG_S)
            assert "the worker at 127.0.0.1:" in str(info.value)

    assert by_server in caplog.text
    assert "(it is at 127.0.0.1)" in caplog.text


async def test_certificates_that_are_changed_are_those_of_new_connections(
    certificates, tmp_path, monkeypatch
):
    monkeypatch.setattr(membership, "CHECK_S", 0.0)
    for name in ("pem", "key"):
        shutil.copy(certificates / f"member.{name}", tmp_path / f"used.{name}")
    shutil.copy(certificates / "authority.pem", tmp_path / "both.pem")
    changing = members.with_tls(tmp_path, name="used", authority="both")
    newcomer = members.with_tls(certificates, name="stranger", authority="other")
    async with worker(changing) as served, worker(newcomer) as ours:
        with pytest.raises(errors.TransferError):
            await ours.agent.connect(served.metadata, deadline_s=LONG_S)
        for name in ("pem", "key"):
            shutil.copy(certificates / f"stranger.{name}", tmp_path / f"used.{name}")
        shutil.copy(certificates / "other.pem", tmp_path / "both.pem")

        await ours.agent.connect(served.metadata, deadline_s=LONG_S)


async def test_flood_of_silent_connections_is_bounded_and_locks_no_peer_out():
    async with worker(members.with_token()) as served, worker(members.with_token()) as ours:
        silent = [dial(served.metadata) for _ in range(server.MAX_PENDING + 3)]
        peer = await ours.agent.connect(served.metadata, deadline_s=LONG_S)
        copy = ours.agent.prepare(READ, peer, [1], [2])
        await copy.post(deadline_s=LONG_S)
        await copy.release()
        replaced = [is_closed(sock) for sock in silent[:3]]  # the oldest, for which this waits
        for sock in silent:
            sock.close()

        assert replaced == [True] * 3
        assert blocks_of(bytes(ours.pool), [1]) == blocks_of(bytes(served.pool), [2])


@pytest.mark.parametrize("said", [bytes(32), proof.GREETING + bytes(64), bytes(200)])
async def test_server_without_the_token_is_refused(said):
    async with worker(members.with_token()) as ours:
        with (
            impostor(lambda link, epoch: link.send_bytes(said, TimeLimit(10))) as metadata,
            pytest.raises(errors.TransferError, match=r"cluster token|broke"),
        ):
            await ours.agent.connect(metadata, deadline_s=LONG_S)


async def test_replayed_handshake_is_refused():
    key = members.with_token().derive_keys(authentication.TRANSFER)[0]
    async with worker(members.with_token()) as served:

        def knock(recorded):
            """Play the asker's part, or what was recorded of it; gives what we said and what came at the end."""
            with dial(served.metadata) as sock:
                steps = proof.client_steps(key, secrets.token_bytes(32))
                said = next(steps).output
                sock.sendall(recorded[:40] or said)
                sock.recv(8, socket.MSG_WAITALL)
                steps.send(proof.GREETING)
                proven = steps.send(sock.recv(32, socket.MSG_WAITALL)).output
                sock.sendall(recorded[40:] or proven)
                sock.shutdown(socket.SHUT_WR)
                return said + proven, b"".join(iter(lambda: sock.recv(4096), b""))

        recorded, proven = await asyncio.to_thread(knock, b"")
        _, refusal = await asyncio.to_thread(knock, recorded)

    assert len(proven) == proof.PROOF_BYTES
    assert b"has another cluster token" in refusal


async def test_server_that_breaks_off_is_an_error_at_once():
    def half(link, epoch):
        greet_truly(link, epoch)
        receive(link, messages.Read)
        link.send(messages.Done(), TimeLimit(10))
        link._send([memoryview(bytes(100))], TimeLimit(10))

    await fails_with(half, "closed the connection")


async def test_damaged_bytes_are_an_error():
    def damage(link, epoch):
        greet_truly(link, epoch)
        receive(link, messages.Read)
        link.send(messages.Done(), TimeLimit(10))
        link._send([memoryview(bytes(LAYOUT.block_bytes + 8))], TimeLimit(10))

    await fails_with(damage, "checksum is wrong")


@pytest.mark.parametrize(
    "frame",
    [struct.pack("!I", 2**31), struct.pack("!I", 3) + b"abc", struct.pack("!I", 1) + b"\x01"],
)
async def test_server_that_breaks_the_protocol_is_an_error(frame):
    def babble(link, epoch):
        greet_truly(link, epoch)
        receive(link, messages.Read)
        link._send([memoryview(frame)], TimeLimit(10))

    await fails_with(babble, "broke the protocol")


async def test_late_bytes_do_not_reach_blocks_of_a_failed_transfer():
    released = threading.Event()

    def dawdle(link, epoch):
        greet_truly(link, epoch)
        receive(link, messages.Read)
        link.send(messages.Done(), TimeLimit(10))
        link._send([memoryview(b"x" * 100)], TimeLimit(10))
        released.wait(PATIENT_S)
        with contextlib.suppress(errors.TransferError):
            link._send([memoryview(b"y" * 1000)], TimeLimit(10))

    async with worker() as ours:
        with impostor(dawdle) as metadata:
            peer = await ours.agent.connect(metadata, deadline_s=LONG_S)
            transfer = ours.agent.prepare(READ, peer, [0], [0])
            with pytest.raises(errors.TransferError, match="within"):
                await transfer.post(deadline_s=1.0)
            released.set()
            await transfer.release()

        assert bytes(ours.pool[:100]) == b"x" * 100
        assert bytes(ours.pool[100 : LAYOUT.slab_bytes]) == content(2)[100 : LAYOUT.slab_bytes]


async def fails_with(behave, why):
    async with worker() as ours:
        with impostor(behave) as metadata:
            peer = await ours.agent.connect(metadata, deadline_s=LONG_S)
            transfer = ours.agent.prepare(READ, peer, [0], [0])
            with pytest.raises(errors.TransferError, match=why):
                await transfer.post(deadline_s=LONG_S)
            await transfer.release()


@contextlib.contextmanager
def impostor(behave):
    """A server whose one connection is treated like this; gives the metadata that leads to it."""
    listening = socket.create_server(("127.0.0.1", 0))
    epoch = secrets.token_hex(16)

    def serve():
        sock, _ = listening.accept()
        link = Link(sock)
        try:
            behave(link, epoch)
        finally:
            link.close()

    thread = threading.Thread(target=serve)
    thread.start()
    metadata = descriptors.Metadata(
        name="prefill-0",
        epoch=epoch,
        host="elsewhere",
        layout=LAYOUT,
        addresses={"tcp": f"127.0.0.1:{listening.getsockname()[1]}"},
    )
    yield descriptors.encode(metadata)
    thread.join(PATIENT_S)
    listening.close()


def greet_truly(link, epoch):
    admit(link, authenticator=new_authenticator(OPEN), limit=TimeLimit(10))
    welcome(link, epoch=epoch, limit=TimeLimit(10))


async def test_bytes_that_are_no_text_are_refused_without_a_traceback(caplog):
    async with worker() as made:

        def talk():
            raised = []
            hook, threading.excepthook = threading.excepthook, lambda args: raised.append(args)
            try:
                for _ in range(20):
                    link = enter(made.metadata)
                    link.send_bytes(struct.pack(">I", 4) + b"\x92\xa1\xff\xc0", TimeLimit(10))
                    with pytest.raises(errors.TransferError):
                        receive(link)
                    link.close()
            finally:
                threading.excepthook = hook
            return raised

        raised = await asyncio.to_thread(talk)
    lines = [record for record in caplog.records if "dropping a peer" in record.getMessage()]

    assert raised == []
    assert 1 <= len(lines) <= 3  # one a second
    assert all(record.exc_info is None for record in lines)
