"""How copies between tiers end that a device or a storage cannot make, or not yet."""

import queue
import threading

import pytest

from dynamo.base import errors
from dynamo.kvbm import host_memory, storage, tier_copies
from dynamo.kvbm.tier_jobs import TierCopy
from dynamo.kvbm.tiered_cache import DEVICE, HOST
from dynamo.kvbm.tiers import CachedBlock
from waiting import PATIENT_S, eventually

BLOCK, BLOCK_BYTES = CachedBlock(1, 2, None), 4096


class FailingDevice:
    """An `api.BlockCopier` whose copies all fail."""

    def __init__(self, error):
        self.error = error

    def move(self, operation, device_blocks, host_slots, limit):
        raise self.error


class HangingDevice:
    """An `api.BlockCopier` whose copies end when `may_go_on` is set."""

    def __init__(self):
        self.may_go_on, self.begun = threading.Event(), queue.SimpleQueue()

    def move(self, operation, device_blocks, host_slots, limit):
        self.begun.put(operation)
        assert self.may_go_on.wait(PATIENT_S)


def make_copy(*path):
    return TierCopy(
        path=path, blocks=(BLOCK,), from_slots=(0,), to_slots=(0,), num_bytes=BLOCK_BYTES
    )


class Panic(BaseException):
    """No Exception, as what libraries in Rust raise for a fault of their own."""


@pytest.mark.parametrize(
    "error",
    [
        errors.TransferError("it is too late"),
        OSError("it is gone"),
        RuntimeError("CUDA out of memory"),  # torch.OutOfMemoryError is one
        MemoryError(),
        ValueError("a fault of the program"),
        Panic("a library in Rust has a fault"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_copy_that_fails_ends_and_the_next_one_begins(error):
    memory = host_memory.HostMemory(2, BLOCK_BYTES)
    copies = tier_copies.TierCopies(FailingDevice(error), memory, None)
    ended, posted = [], queue.SimpleQueue()
    copies.open(posted.put, lambda copy, outcome: ended.append(outcome), lambda num_slots: None)
    for num_ended in (1, 2):
        copies.begin(make_copy(HOST, DEVICE))
        while len(ended) < num_ended:
            posted.get(timeout=PATIENT_S)()
    copies.close()

    assert [outcome.failed for outcome in ended] == [frozenset((0,))] * 2
    assert 0 < ended[0].began_at <= ended[0].ended_at <= ended[1].began_at


def test_clearing_ends_though_what_was_forgotten_cannot_be_removed(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("it has a fault")

    monkeypatch.setattr(storage.DiskFile, "purge", fail)
    memory, faults = host_memory.HostMemory(2, BLOCK_BYTES), queue.SimpleQueue()
    copies = tier_copies.TierCopies(FailingDevice(None), memory, open_file(tmp_path))
    copies.forget(faults.put)

    assert f"not removed from {tmp_path}/blocks.kv: it has a fault" in faults.get(timeout=PATIENT_S)
    copies.close()


def open_file(directory):
    return storage.DiskFile(directory, {"model": "m"}, block_bytes=BLOCK_BYTES, num_slots=2)


def test_storage_is_closed_after_the_copies_that_hang_and_none_begins_meanwhile(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tier_copies, "_CLOSE_S", 0.01)
    device, memory, ended = HangingDevice(), host_memory.HostMemory(2, BLOCK_BYTES), []
    copies = tier_copies.TierCopies(device, memory, open_file(tmp_path))
    copies.open(ended.append, lambda *_: None, lambda _: None)
    for path in ((HOST, DEVICE), (DEVICE, HOST)):
        for _ in range(2):  # one thread makes them
            copies.begin(make_copy(*path))
        device.begun.get(timeout=PATIENT_S)
    copies.close()
    copies.close()
    with pytest.raises(errors.ConfigError, match="is in use"):
        open_file(tmp_path)
    device.may_go_on.set()

    def is_open():
        try:
            open_file(tmp_path).close()
        except errors.ConfigError:
            return False
        return True

    eventually(is_open, what="it was closed")
    assert device.begun.empty()
    assert len(ended) == 2


def test_index_that_cannot_be_read_is_logged_at_most_once_a_minute(monkeypatch, caplog):
    memory = host_memory.HostMemory(2, BLOCK_BYTES)
    copies = tier_copies.TierCopies(FailingDevice(OSError()), memory, None)

    def look():
        raise OSError("it was cut short")

    monkeypatch.setattr(memory, "look", look)
    changes = [copies.look() for _ in range(3)]  # once in each step

    assert changes == [{}, {}, {}]
    assert caplog.text.count("it was cut short") == 1
