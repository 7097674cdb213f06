"""The host tier that workers share: each writes its part, all read everything, and no half block is believed."""

import multiprocessing
import os
import signal
import stat
import time

import pytest

from dynamo.base import errors
from dynamo.kvbm import host_memory, slot_file, storage, tier_copies
from dynamo.kvbm.tier_jobs import TierCopy
from dynamo.kvbm.tiered_cache import DEVICE, HOST
from dynamo.kvbm.tiers import CachedBlock
from waiting import PATIENT_S

SIZE, NUM_BLOCKS = 8192, 8
OURS = {"model": "m"}


def block(name):
    return CachedBlock(name, name + 1, None)


def join(directory, num_parts=2, num_blocks=NUM_BLOCKS, kind=OURS):
    path = host_memory.locate(str(directory), kind)
    return host_memory.SharedHostMemory(
        path, kind, num_blocks=num_blocks, block_bytes=SIZE, num_parts=num_parts
    )


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "shared"


@pytest.fixture
def workers(directory):
    made = [join(directory), join(directory)]
    yield made
    for worker in made:
        worker.close()


def store(worker, slot, name, generation=None):
    worker.retract((slot,))
    worker.block(slot)[:] = name.to_bytes(8, "little") * (SIZE // 8)
    worker.publish(slot, block(name), worker.generation if generation is None else generation)


def test_block_of_another_worker_is_copied_before_it_is_written_elsewhere(workers):
    first, second = workers
    store(first, 0, 7)
    content = second.get(0, block(7))
    store(first, 0, 8)

    assert content == (7).to_bytes(8, "little") * (SIZE // 8)
    with pytest.raises(OSError, match="removed a block"):
        second.get(0, block(7))
    assert first.get(0, block(8)) == second.get(0, block(8))


def test_parts_of_two_workers_differ_and_both_see_every_byte(workers):
    first, second = workers
    store(first, 0, 7)

    assert (first.slots.first, second.slots.first) == (0, 4)
    assert second.look().stored == {0: block(7)}
    assert second.look() is None
    assert bytes(second.block(0)) == bytes(first.block(0))
    assert second.version(0, block(7)) is not None


def test_block_that_is_replaced_while_it_is_read_is_not_current(workers):
    first, second = workers
    store(first, 0, 7)
    second.look()
    first.retract((0,))
    half_written = second.version(0, block(7))
    store(first, 0, 8)
    changes = second.look()

    assert half_written is None
    assert second.version(0, block(7)) is None
    assert (changes.removed, changes.stored) == ([0], {0: block(8)})


class BusyDevice:
    """An `api.BlockCopier` that copies blocks out of host memory, and makes time pass before and after that."""

    def __init__(self, memory, before, after):
        self.memory, self.before, self.after = memory, before, after
        self.copied = []

    def move(self, operation, device_blocks, host_slots, limit):
        self.before()
        self.copied += [bytes(self.memory.block(slot)) for slot in host_slots]
        self.after()


def test_block_that_left_and_came_back_while_its_slot_was_read_is_not_loaded(workers):
    first, second = workers
    store(first, 0, 7)
    second.look()
    device = BusyDevice(second, lambda: store(first, 0, 8), lambda: store(first, 0, 7))
    copies = tier_copies.TierCopies(device, second, None)
    load = TierCopy(
        path=(HOST, DEVICE), blocks=(block(7),), from_slots=(0,), to_slots=(3,), num_bytes=SIZE
    )
    outcome = copies.run(load)

    assert device.copied == [(8).to_bytes(8, "little") * (SIZE // 8)]
    assert outcome.failed == {0}
    device.before = device.after = int  # do nothing
    assert not copies.run(load).failed


def test_clearing_reaches_every_worker_and_what_was_on_its_way(workers):
    first, second = workers
    store(first, 0, 7)
    store(second, 4, 8)
    before = second.generation
    second.look()
    first.forget()
    store(second, 5, 9, before)

    of_first = first.look()
    assert of_first is None or not of_first.stored
    changes = second.look()
    assert changes.is_cleared
    assert not changes.stored
    assert second.version(0, block(7)) is None


def test_one_worker_too_many_is_refused(workers, directory):
    with pytest.raises(errors.ConfigError, match="in use by 2 other processes"):
        join(directory)
    workers[0].close()
    join(directory).close()


def test_workers_that_count_each_other_differently_are_refused(directory):
    first = join(directory, num_parts=2)
    with pytest.raises(errors.ConfigError, match="is shared by 2 workers: expected the same"):
        join(directory, num_parts=3)
    first.close()


def test_second_worker_takes_the_size_of_the_first(directory, caplog):
    first, second = join(directory), join(directory, num_blocks=100)

    assert second.num_blocks == NUM_BLOCKS
    assert "keeps its size of 8 blocks" in caplog.text
    first.close()
    second.close()


def test_only_the_owner_can_read_the_memory(workers, directory):
    (path,) = directory.iterdir()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_last_worker_removes_the_memory_and_a_start_that_of_other_models(directory):
    first, second = join(directory), join(directory)
    first.close()
    kept = len(list(directory.iterdir()))
    second.close()
    other = host_memory.locate(str(directory), {"model": "other"})
    crashed = slot_file.SlotFile(
        other, {"model": "other"}, block_bytes=SIZE, num_slots=4, num_parts=2, stride=SIZE, option=""
    )  # fmt: skip
    crashed.close()
    existed = other.exists()
    last = join(directory)

    assert (kept, existed) == (1, True)
    assert [path.name for path in directory.iterdir()] == [
        host_memory.locate(str(directory), OURS).name
    ]
    last.close()


def test_other_models_never_meet(directory):
    first, second = join(directory), join(directory, kind={"model": "other"})
    store(first, 0, 7)

    assert second.look() is None or not second.look().stored
    first.close()
    second.close()


def test_own_part_is_provided_while_there_is_memory(directory, monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 2 * SIZE)
    memory, other = join(directory), join(directory)
    assert list(memory.provide()) == [2, 2]
    assert list(other.provide()) == [2, 2]
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    assert list(memory.provide()) == [2, 2]  # it is there already
    memory.close()
    other.close()
    memory = join(directory)
    assert list(memory.provide()) == []
    assert "stays at 0 blocks of 4" in caplog.text
    memory.close()


def write_for_ever(directory, pipe):
    memory, name = join(directory), 0
    while True:
        name += 1
        store(memory, memory.slots.first + name % 4, name)
        if name == 50:
            pipe.send("well under way")


def test_killed_writer_leaves_whole_blocks_to_readers_and_to_its_successor(directory):
    context = multiprocessing.get_context("spawn")
    reader = join(directory)
    for _ in range(3):
        ours, theirs = context.Pipe()
        writer = context.Process(target=write_for_ever, args=(directory, theirs))
        writer.start()
        assert ours.poll(PATIENT_S)
        until = time.monotonic() + 0.2  # the writer is killed at any point of its work
        num_whole = 0
        while time.monotonic() < until:
            changes = reader.look()
            for slot, stored in changes.stored.items() if changes else ():
                content = bytes(reader.block(slot))
                if reader.version(slot, stored) is not None:
                    assert content == stored.sequence_hash.to_bytes(8, "little") * (SIZE // 8)
                    num_whole += 1
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        successor = join(directory)
        for slot, (stored,) in successor.slots.stored.items():
            assert bytes(reader.block(slot)[:8]) == stored.sequence_hash.to_bytes(8, "little")
            assert len(set(reader.block(slot).cast("Q"))) == 1
        assert num_whole > 0
        assert len(successor.slots.stored) >= 3
        successor.close()
    reader.close()


def test_workers_share_a_disk_file_by_parts(tmp_path):
    def open_part():
        return storage.DiskFile(tmp_path, OURS, block_bytes=SIZE, num_slots=8, num_parts=2)

    first, second = open_part(), open_part()
    content = memoryview(bytearray(b"abcdefgh" * (SIZE // 8)))
    first.write(0, (block(7),), (content,), 0)
    buffer = memoryview(bytearray(SIZE))

    assert second.look().stored == {0: block(7)}
    assert not second.read(0, [block(7)], [buffer])
    assert buffer == content
    assert second.read(0, [block(8)], [buffer]) == {0}  # the slot has another block by now
    with pytest.raises(errors.ConfigError, match="in use by another process"):
        storage.open_stored(tmp_path)
    first.close()
    second.close()
    whole = storage.open_stored(tmp_path)
    assert whole.blocks == {0: (block(7),)}
    whole.close()


def test_pipe_among_the_files_of_other_models_stops_no_start(directory):
    directory.mkdir()
    os.mkfifo(directory / "other.kv")

    join(directory).close()
