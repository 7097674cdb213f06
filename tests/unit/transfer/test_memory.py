"""Shared memory is what it is said to be, and copies stop when their time is over."""

import os
import subprocess
import sys

import pytest

from dynamo.base import errors
from dynamo.transfer import api, memory
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.plan import Pattern

READ, WRITE = api.TransferOperation.READ, api.TransferOperation.WRITE
MIB = 2**20


def one(local, remote, length):
    return Pattern([(0, 0)], [(local, remote, length)])


def test_two_mappings_of_one_pool_show_the_same_bytes():
    shared = memory.SharedMemory(4096)
    mapped = memory.map_peers(os.dup(shared.fd), 4096)

    shared.memory[7] = 42

    assert mapped[7] == 42
    shared.close()


def test_tensor_over_a_pool_writes_what_peers_see():
    torch = pytest.importorskip("torch")
    shared = memory.SharedMemory(4096)
    mapped = memory.map_peers(os.dup(shared.fd), 4096)

    torch.frombuffer(shared.memory, dtype=torch.uint8).view(64, 64)[1, 1] = 42

    assert mapped[65] == 42
    shared.close()


def test_size_of_a_pool_cannot_be_changed_under_its_peers():
    shared = memory.SharedMemory(4096)

    with pytest.raises(PermissionError):
        os.ftruncate(shared.fd, 0)
    shared.close()


def test_file_that_could_be_cut_short_is_not_mapped():
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)

    with pytest.raises(errors.TransferError, match="sealed memory file of 4096 bytes"):
        memory.map_peers(fd, 4096)


def test_pool_that_is_smaller_than_its_layout_is_not_mapped():
    shared = memory.SharedMemory(4096)

    with pytest.raises(errors.TransferError, match="of 8192 bytes, got 4096"):
        memory.map_peers(os.dup(shared.fd), 8192)
    shared.close()


def test_other_files_are_not_mapped():
    reading, writing = os.pipe()
    os.close(writing)

    with pytest.raises(errors.TransferError, match="cannot map"):
        memory.map_peers(reading, 4096)


def test_impossible_allocation_is_a_config_error():
    with pytest.raises(errors.ConfigError, match="MiB of shared memory"):
        memory.SharedMemory(2**62)


@pytest.mark.parametrize("length", [5, 64 * 1024, 40 * MIB])
def test_short_and_long_copies_in_both_directions(length):
    ours, theirs = (memory.Window(memory.private(41 * MIB)) for _ in range(2))
    theirs.view[10 : 10 + length] = os.urandom(length)

    memory.move(READ, ours, theirs, one(3, 10, length), TimeLimit(30))
    memory.move(WRITE, ours, theirs, one(3, 0, length), TimeLimit(30))

    assert ours.view[3 : 3 + length] == theirs.view[:length]
    ours.close()
    theirs.close()


def test_copy_that_was_cancelled_stops_on_its_way():
    ours, theirs = (memory.Window(memory.private(64 * MIB)) for _ in range(2))
    theirs.view[-1] = 1
    limit = TimeLimit(30)
    limit.cancel()

    with pytest.raises(errors.TransferError, match="cancelled"):
        memory.move(READ, ours, theirs, one(0, 0, 64 * MIB), limit)
    assert ours.view[-1] == 0
    ours.close()
    theirs.close()


@pytest.mark.parametrize("operation", [READ, WRITE])
def test_pattern_is_copied_from_each_of_its_origins(operation):
    ours, theirs = (memory.Window(memory.private(300)) for _ in range(2))
    ours.view[:], theirs.view[:] = os.urandom(300), os.urandom(300)
    pattern = Pattern([(0, 200), (100, 10)], [(5, 1, 20), (50, 70, 8)])
    expected_ours, expected_theirs = bytearray(ours.view), bytearray(theirs.view)
    for here, there, length in [(5, 201, 20), (50, 270, 8), (105, 11, 20), (150, 80, 8)]:
        if operation is READ:
            expected_ours[here : here + length] = theirs.view[there : there + length]
        else:
            expected_theirs[there : there + length] = ours.view[here : here + length]

    memory.move(operation, ours, theirs, pattern, TimeLimit(30))

    assert (ours.view, theirs.view) == (expected_ours, expected_theirs)
    ours.close()
    theirs.close()


def test_other_threads_may_run_for_every_other_stretch_of_short_pieces(monkeypatch):
    """In between they may not, so the stretch must be long enough for a thread to wake in it."""
    ours, theirs = (memory.Window(memory.private(12 * MIB)) for _ in range(2))
    freely, copy = [], memory._memmove
    monkeypatch.setattr(memory, "_memmove", lambda *at: (freely.append(at[0]), copy(*at)))
    size = 64 * 1024
    pieces = [(at, at, size) for at in range(0, 12 * MIB, size)]

    memory.move(READ, ours, theirs, Pattern([(0, 0)], pieces), TimeLimit(30))

    stretches = [range(start, start + 2 * MIB, size) for start in (2 * MIB, 6 * MIB, 10 * MIB)]
    assert [at - ours.address for at in freely] == [at for each in stretches for at in each]
    ours.close()
    theirs.close()


def test_copy_that_failed_holds_no_memory(monkeypatch):
    memories = [memory.private(8 * MIB) for _ in range(2)]
    ours, theirs = map(memory.Window, memories)
    limit = TimeLimit(30)
    monkeypatch.setattr(memory, "_memmove", lambda *_: limit.cancel())
    size = 64 * 1024
    pieces = [(at, at, size) for at in range(0, 8 * MIB, size)]

    with pytest.raises(errors.TransferError, match="cancelled") as failure:
        memory.move(READ, ours, theirs, Pattern([(0, 0)], pieces), limit)
    ours.close()
    theirs.close()
    for one in memories:
        mapped = one.obj
        one.release()
        mapped.close()  # BufferError if anybody has a part of it

    assert failure.value


def test_two_processes_of_one_user_have_the_same_host_id():
    other = subprocess.run(
        [sys.executable, "-c", "from dynamo.transfer import memory; print(memory.identify_host())"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert other.stdout.strip() == memory.identify_host()
