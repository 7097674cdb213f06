"""How copies between tiers end that a device or a storage cannot make."""

import queue

import pytest

from dynamo.base import errors
from dynamo.kvbm import host_memory, tier_copies
from dynamo.kvbm.tier_jobs import TierCopy
from dynamo.kvbm.tiered_cache import DEVICE, HOST
from dynamo.kvbm.tiers import CachedBlock
from waiting import PATIENT_S


class FailingDevice:
    """An `api.BlockCopier` whose copies all fail."""

    def __init__(self, error):
        self.error = error

    def move(self, operation, device_blocks, host_slots, limit):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        errors.TransferError("it is too late"),
        OSError("it is gone"),
        RuntimeError("CUDA out of memory"),  # torch.OutOfMemoryError is one
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_copy_that_fails_ends_and_the_next_one_begins(error):
    memory = host_memory.HostMemory(2, 4096)
    copies = tier_copies.TierCopies(FailingDevice(error), memory, None)
    ended, posted = [], queue.SimpleQueue()
    copies.open(posted.put, lambda copy, outcome: ended.append(outcome), lambda num_slots: None)
    block = CachedBlock(1, 2, None)
    load = TierCopy(
        path=(HOST, DEVICE), blocks=(block,), from_slots=(0,), to_slots=(0,), num_bytes=4096
    )
    for num_ended in (1, 2):
        copies.begin(load)
        while len(ended) < num_ended:
            posted.get(timeout=PATIENT_S)()
    copies.close()

    assert [outcome.failed for outcome in ended] == [frozenset((0,))] * 2
    assert 0 < ended[0].began_at <= ended[0].ended_at <= ended[1].began_at
