"""What every way between two pools promises; the peer is a real process, except where the way is within one."""

import asyncio
import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import members
import processes
import transfer_peer
from dynamo.base import addresses, errors
from dynamo.runtime import listening
from dynamo.transfer import api, descriptors, link
from dynamo.transfer.backends import local
from transfer_peer import LAYOUT, NIXL, blocks_of, content, needs_nixl
from waiting import PATIENT_S, until

ACROSS = ["shm", "tcp", "tcp-token", "tcp-tls", "shm-token", NIXL]
READ, WRITE = api.TransferOperation.READ, api.TransferOperation.WRITE
WAYS = ["local", *ACROSS]
SOON_S, LONG_S = 0.3, PATIENT_S
GIVEN_UP = "given up"
BLOCKS = st.lists(st.integers(0, LAYOUT.num_blocks - 1), min_size=1, max_size=40, unique=True)


@pytest.fixture(autouse=True)
def shared_certificates(certificates, monkeypatch):
    """Known to the peers' processes, too."""
    for name, path in members.flags(certificates).items():
        monkeypatch.setenv(f"DYN_{name.upper()}", path)


@pytest.fixture(autouse=True)
def patient_links(monkeypatch):
    """On a busy machine a peer needs longer than 2 s to prove who it is."""
    monkeypatch.setattr(link, "STALL_S", LONG_S)


@contextlib.asynccontextmanager
async def connected(backend, **options):
    """Our worker, its peer, and the peer as our agent sees it."""
    room = local.Room()
    ours = await transfer_peer.Worker(
        "decode-0", transfer_peer.make_backend(backend, room), seed=1
    ).start()
    if backend == "local":
        made = transfer_peer.make_backend(backend, room)
        theirs = await transfer_peer.Worker("prefill-0", made, seed=2).start()
        process, close = transfer_peer.LocalPeer(theirs), theirs.close
    else:
        process = await asyncio.to_thread(transfer_peer.ProcessPeer, backend, **options)
        close = None
    try:
        peer = await ours.agent.connect(process.metadata, deadline_s=LONG_S)
        yield ours, process, peer
    finally:
        await ours.close()
        if close is not None:
            await close()
        else:
            process.close()


async def move(ours, operation, peer, local_blocks, remote_blocks, **post):
    transfer = ours.agent.prepare(operation, peer, local_blocks, remote_blocks)
    try:
        await transfer.post(**{"deadline_s": LONG_S, **post})
    finally:
        await transfer.release()


@pytest.mark.parametrize("backend", WAYS)
async def test_read_brings_the_peers_blocks_and_touches_no_others(backend):
    async with connected(backend) as (ours, _, peer):

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(remote=BLOCKS, seed=st.randoms(use_true_random=False))
        def choose(remote, seed):
            chosen.append((seed.sample(range(LAYOUT.num_blocks), len(remote)), remote))

        chosen = []
        choose()
        for here, there in chosen:
            ours.pool[:] = content(1)
            expected = list(blocks_of(content(1), range(LAYOUT.num_blocks)))
            for block, brought in zip(here, blocks_of(content(2), there), strict=True):
                expected[block] = brought

            await move(ours, READ, peer, here, there)

            assert blocks_of(bytes(ours.pool), range(LAYOUT.num_blocks)) == expected


@pytest.mark.parametrize("backend", WAYS)
@pytest.mark.parametrize("num_blocks", [1, 2, 127, 1000])
async def test_reads_of_one_to_a_thousand_blocks(backend, num_blocks):
    scattered = [block * 7 % LAYOUT.num_blocks for block in range(num_blocks)]
    async with connected(backend) as (ours, _, peer):
        await move(ours, READ, peer, range(num_blocks), scattered)

        brought = blocks_of(bytes(ours.pool), range(num_blocks))
        assert brought == blocks_of(content(2), scattered)


@pytest.mark.parametrize("backend", WAYS)
async def test_write_reaches_the_peers_pool(backend):
    async with connected(backend) as (ours, process, peer):
        await move(ours, WRITE, peer, [5, 6, 9], [100, 101, 3])

        arrived = blocks_of(process.content(), [100, 101, 3])
        assert arrived == blocks_of(content(1), [5, 6, 9])


@pytest.mark.parametrize("backend", WAYS)
async def test_neighbours_are_moved_together(backend):
    async with connected(backend) as (ours, _, peer):
        transfer = ours.agent.prepare(READ, peer, [*range(10, 20), 40], [*range(30, 40), 5])

        assert transfer.num_pieces == 2 * LAYOUT.num_layers
        assert transfer.num_bytes == 11 * LAYOUT.block_bytes


@pytest.mark.parametrize("backend", WAYS)
async def test_notification_comes_with_a_transfer_and_alone(backend):
    async with connected(backend) as (ours, process, peer):
        await move(ours, READ, peer, [1], [2], notification=b"pulled 7")
        await ours.agent.notify(peer, b"hello", deadline_s=LONG_S)

        assert process.heard() == [("decode-0", b"pulled 7"), ("decode-0", b"hello")]


@pytest.mark.parametrize("backend", WAYS)
async def test_many_transfers_at_once(backend):
    async with connected(backend) as (ours, process, peer):
        async with asyncio.TaskGroup() as tasks:
            for i in range(32):
                blocks = range(i * 32, i * 32 + 32)
                done = f"{i}".encode()
                tasks.create_task(move(ours, READ, peer, blocks, blocks, notification=done))

        assert bytes(ours.pool) == content(2)
        assert sorted(int(said) for _, said in process.heard()) == list(range(32))


@pytest.mark.parametrize("backend", WAYS)
async def test_running_transfer_cannot_be_posted_again_and_a_done_one_can(backend):
    blocks = [block * 3 % 1024 for block in range(1000)]
    async with connected(backend) as (ours, _, peer):
        transfer = ours.agent.prepare(READ, peer, range(1000), blocks)
        before = transfer.is_running
        posted = transfer.post(deadline_s=LONG_S)
        during = transfer.is_running
        with pytest.raises(errors.LocalProtocolError, match="running"):
            transfer.post(deadline_s=LONG_S)
        await posted
        await transfer.post(deadline_s=LONG_S)

        assert [before, during, transfer.is_running] == [False, True, False]

        await transfer.release()
        with pytest.raises(errors.LocalProtocolError, match="released"):
            transfer.post(deadline_s=LONG_S)


@pytest.mark.parametrize("backend", WAYS)
async def test_invalid_transfer_is_refused_before_a_byte_moves(backend):
    async with connected(backend) as (ours, _, peer):
        for here, there in [([1], [1, 2]), ([1024], [0]), ([0], [-1]), ([3, 3], [1, 2])]:
            with pytest.raises(errors.LocalProtocolError):
                ours.agent.prepare(READ, peer, here, there)
        with pytest.raises(errors.LocalProtocolError, match="deadline_s"):
            ours.agent.prepare(READ, peer, [0], [0]).post(deadline_s=0)
        with pytest.raises(errors.LocalProtocolError, match="65536 bytes"):
            await ours.agent.notify(peer, bytes(65_537), deadline_s=1)


@pytest.mark.parametrize("backend", WAYS)
async def test_after_disconnect_nothing_goes_to_that_peer(backend):
    async with connected(backend) as (ours, _, peer):
        transfer = ours.agent.prepare(READ, peer, [1], [2])
        await ours.agent.disconnect(peer)

        with pytest.raises(errors.TransferError, match="not connected"):
            transfer.post(deadline_s=LONG_S)
        with pytest.raises(errors.TransferError, match="not connected"):
            await ours.agent.notify(peer, b"", deadline_s=LONG_S)


@pytest.mark.parametrize("backend", WAYS)
async def test_peer_with_another_layout_is_refused_with_both_values(backend):
    async with connected(backend) as (ours, process, peer):
        await ours.agent.disconnect(peer)
        metadata = process.metadata.replace(b"\xaablock_size\x04", b"\xaablock_size\x08")

        with pytest.raises(errors.TransferError, match="block_size is 4 here and 8 at prefill-0"):
            await ours.agent.connect(metadata, deadline_s=LONG_S)


def heads_of(pool, block, layout):
    """The bytes of each head of a block by (layer, token, keys or values, head of the model), by definition."""
    found, size = {}, layout.head_bytes
    for layer in range(layout.num_layers):
        at = layer * layout.layer_stride + block * layout.block_stride
        for token in range(layout.block_size):
            for half in range(2):
                for head in layout.heads:
                    found[layer, token, half, head] = bytes(pool[at : at + size])
                    at += size
    return found


@pytest.mark.parametrize("backend", ACROSS)
@pytest.mark.parametrize("operation", [READ, WRITE])
@pytest.mark.parametrize(
    "changes", [{"order": "block_major"}, {"tp_size": 2, "tp_rank": 1}, {"tp_size": 4, "order": "block_major"}]
)  # fmt: skip
async def test_another_order_and_a_share_of_the_heads_are_laid_out_anew(
    backend, operation, changes
):
    theirs = msgspec.convert({**msgspec.to_builtins(LAYOUT), **changes}, descriptors.Layout)
    async with connected(backend, changes=changes) as (ours, process, peer):
        before = {False: bytes(ours.pool), True: process.content()}
        await move(ours, operation, peer, [5, 6, 9], [100, 101, 3])

        is_write = operation is WRITE
        after = process.content() if is_write else bytes(ours.pool)
        layouts = {False: LAYOUT, True: theirs}
        for here, there in zip([5, 6, 9], [100, 101, 3], strict=True):
            blocks = {False: here, True: there}
            source = heads_of(before[not is_write], blocks[not is_write], layouts[not is_write])
            target = heads_of(before[is_write], blocks[is_write], layouts[is_write])
            expected = {place: source.get(place, kept) for place, kept in target.items()}
            assert heads_of(after, blocks[is_write], layouts[is_write]) == expected


@pytest.mark.parametrize("changes", [{"block_size": 8}, {"dtype": "bfloat16"}, {"num_layers": 4}])
async def test_pools_that_must_be_converted_are_refused(changes):
    ((name, value),) = changes.items()

    with pytest.raises(errors.TransferError, match=f"{name} is .* here and {value} at prefill-0"):
        async with connected("tcp", changes=changes):
            pass


@pytest.mark.parametrize("backend", WAYS)
async def test_same_peer_is_connected_once(backend):
    async with connected(backend) as (ours, process, peer):
        same = await ours.agent.connect(process.metadata, deadline_s=LONG_S)
        await ours.agent.disconnect(peer)

        connect = [ours.agent.connect(process.metadata, deadline_s=LONG_S) for _ in range(5)]
        again = await asyncio.gather(*connect)

        assert same is peer
        assert len(set(again)) == 1
        assert peer not in again
        async with asyncio.timeout(PATIENT_S):  # the threads that have connected end
            while any(each.name.startswith("transfer-connect") for each in threading.enumerate()):
                await asyncio.sleep(0.01)


async def test_transfer_from_a_frozen_peer_fails_at_the_deadline_over_tcp():
    async with connected("tcp") as (ours, process, peer):
        process.freeze()

        with pytest.raises(errors.TransferError, match=r"within 0\.3 s"):
            await move(ours, READ, peer, [1], [2], deadline_s=SOON_S)
        with pytest.raises(errors.TransferError, match=r"within 0\.3 s"):
            await move(ours, WRITE, peer, [1], [2], deadline_s=SOON_S)


@pytest.mark.parametrize("backend", ACROSS)
async def test_frozen_peer_gets_no_notifications_or_connections(backend):
    async with connected(backend) as (ours, process, peer):
        process.freeze()

        with pytest.raises(errors.TransferError, match=r"within 0\.3 s"):
            await ours.agent.notify(peer, b"hello", deadline_s=SOON_S)
        await ours.agent.disconnect(peer)
        with pytest.raises(errors.TransferError, match=r"within 0\.3 s"):
            await ours.agent.connect(process.metadata, deadline_s=SOON_S)


@pytest.mark.parametrize("backend", WAYS)
async def test_probe_of_a_whole_pool_passes_and_changes_nothing(backend):
    async with connected(backend) as (ours, _, peer):
        await ours.agent.probe(peer, 2 * LAYOUT.num_bytes, deadline_s=LONG_S)

        assert bytes(ours.pool) == content(1)


@pytest.mark.parametrize("backend", [way for way in ACROSS if "tcp" in str(way)])
async def test_probe_of_a_frozen_peer_fails_in_time_over_a_network(backend):
    async with connected(backend) as (ours, process, peer):
        process.freeze()

        with pytest.raises(errors.TransferError, match=r"within 0\.3 s"):
            await ours.agent.probe(peer, 1000, deadline_s=SOON_S)


async def test_transfers_that_wait_for_a_thread_keep_their_deadline():
    async with connected("tcp") as (ours, process, peer):
        process.freeze()
        stalled = [ours.agent.prepare(READ, peer, [i], [i]) for i in range(4)]
        outcomes = [transfer.post(deadline_s=LONG_S) for transfer in stalled]

        with pytest.raises(errors.TransferError, match="other jobs were ahead of it"):
            await move(ours, READ, peer, [9], [9], deadline_s=SOON_S)

        for transfer in stalled:
            await transfer.release()
        assert {type(outcome.exception()) for outcome in outcomes} == {errors.TransferError}


async def test_peer_killed_in_the_middle_is_an_error_at_once_over_tcp():
    async with connected("tcp") as (ours, process, peer):
        process.freeze()
        transfer = ours.agent.prepare(READ, peer, range(1000), range(1000))
        posted = transfer.post(deadline_s=LONG_S)
        process.kill()

        with pytest.raises(errors.TransferError):
            async with asyncio.timeout(LONG_S / 2):
                await posted
        await transfer.release()


@needs_nixl
@pytest.mark.parametrize("operation", [READ, WRITE])
async def test_killed_peer_is_an_error_over_nixl(operation):
    async with connected("nixl") as (ours, process, peer):
        process.kill()

        with pytest.raises(errors.TransferError):
            await move(ours, operation, peer, range(1000), range(1000), deadline_s=LONG_S)


async def give_up_a_stalled_nixl_peer():
    async with connected("nixl") as (ours, process, peer):
        process.freeze()
        with pytest.raises(errors.TransferError, match=r"within 0\.3 s"):
            await move(ours, READ, peer, range(1000), range(1000), deadline_s=SOON_S)
        left = bytes(ours.pool)
        sys.stdout.write(GIVEN_UP)
        sys.stdout.flush()

        await asyncio.to_thread(process.resume)
        with contextlib.suppress(
            errors.TransferError
        ):  # if it died; what lives makes progress here
            await ours.agent.notify(peer, b"still there?", deadline_s=1.0)

        assert bytes(ours.pool) == left


@needs_nixl
def test_stalled_nixl_peer_times_out_and_writes_nothing_afterwards():
    """In a process of its own: UCX may end one (abort) whose peer comes back after it was given up."""
    story = "import asyncio, test_transfer as t; asyncio.run(t.give_up_a_stalled_nixl_peer())"
    path = [str(pathlib.Path(__file__).parent), *sys.path]
    over_tcp = {
        "UCX_TLS": "tcp",
        "PYTHONPATH": os.pathsep.join(path),
    }  # there the peer must send what we read
    done = subprocess.run(
        [sys.executable, "-c", story], env=os.environ | over_tcp, capture_output=True, text=True, timeout=PATIENT_S
    )  # fmt: skip

    assert GIVEN_UP in done.stdout, done.stderr
    assert done.returncode in (0, -signal.SIGABRT), done.stderr


async def test_shared_memory_outlives_its_owner():
    async with connected("shm") as (ours, process, peer):
        process.kill()

        await move(ours, READ, peer, range(1000), range(1000))

        assert blocks_of(bytes(ours.pool), range(1000)) == blocks_of(content(2), range(1000))
        with pytest.raises(errors.TransferError):
            await move(ours, READ, peer, [1], [2], notification=b"pulled", deadline_s=LONG_S)


@pytest.mark.parametrize("backend", ACROSS)
async def test_connecting_to_a_missing_peer_fails(backend):
    async with connected(backend) as (ours, process, peer):
        await ours.agent.disconnect(peer)
        process.kill()

        with pytest.raises(errors.TransferError, match="cannot connect"):
            await ours.agent.connect(process.metadata, deadline_s=LONG_S)


async def test_restarted_worker_is_another_peer():
    async with connected("tcp") as (ours, process, peer):
        port = int(process.metadata.rpartition(b"127.0.0.1:")[2])
        address = listening.ListenAddress(ports=addresses.PortRange(port, port))
        process.kill()
        again = await asyncio.to_thread(
            transfer_peer.ProcessPeer, "tcp", seed=3, options={"listen_address": address}
        )

        try:
            with pytest.raises(errors.TransferError):
                await move(ours, READ, peer, [1], [2])
            await ours.agent.disconnect(peer)
            with pytest.raises(errors.TransferError, match="has restarted"):
                await ours.agent.connect(process.metadata, deadline_s=LONG_S)
            renewed = await ours.agent.connect(again.metadata, deadline_s=LONG_S)
            await move(ours, READ, renewed, [1], [2])
        finally:
            again.close()

        assert renewed.name == peer.name
        assert renewed.epoch != peer.epoch


async def test_cancelled_transfer_stops_and_is_quiet_after_release():
    async with connected("tcp") as (ours, process, peer):
        process.freeze()
        transfer = ours.agent.prepare(READ, peer, range(10), range(10))
        posted = transfer.post(deadline_s=LONG_S)

        posted.cancel()
        async with asyncio.timeout(LONG_S / 2):
            await transfer.release()

        assert posted.cancelled()
        assert not transfer.is_running


async def test_killed_peer_leaves_nothing_behind():
    sockets = pathlib.Path("/proc/net/unix")
    async with connected("shm") as (_, process, _):
        address = descriptors.decode(process.metadata).addresses["shm"]
        had = address in sockets.read_text()
        shared_files = processes.shared_files([process.pid])
        process.kill()
        has = address in sockets.read_text()

    assert (had, has) == (True, False)
    assert not [path for path in shared_files if os.path.exists(path)]


@pytest.mark.parametrize("backend", ACROSS)
async def test_closing_frees_descriptors_mappings_and_threads(backend):
    async with connected(backend) as (_, process, _):
        num_theirs = process.num_descriptors()
        ours = await transfer_peer.Worker(
            "decode-1", transfer_peer.make_backend(backend), seed=1
        ).start()
        before = held()
        for _ in range(5):
            peer = await ours.agent.connect(process.metadata, deadline_s=LONG_S)
            await asyncio.gather(
                *(move(ours, READ, peer, [i], [i], notification=b"") for i in range(8))
            )
            await ours.agent.disconnect(peer)
        await until(lambda: held() == before and process.num_descriptors() <= num_theirs)
        await ours.close()


def held():
    """Open descriptors, mappings of pools, and threads of peers, of this process."""
    gc.collect()  # pools of earlier tests
    maps = pathlib.Path("/proc/self/maps").read_text()
    peers = [t for t in threading.enumerate() if t.name.startswith("transfer-prefill")]
    return len(os.listdir("/proc/self/fd")), maps.count("dynamo-kv"), len(peers)
