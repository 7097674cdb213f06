"""Copies of blocks between a device and host memory; on a GPU where there is one."""

import mmap

import pytest
import torch

from devices import DEVICE
from dynamo.base import errors
from dynamo.engine.native import device_memory
from dynamo.transfer import api, descriptors

LAYERS, BLOCKS, SLAB = 3, 20, 10
READ, WRITE = api.TransferOperation.READ, api.TransferOperation.WRITE


def limit():
    return api.TimeLimit(api.MAX_DEADLINE_S)


@pytest.fixture(params=["gathered", "one by one", "in host memory"])
def cache(request, monkeypatch):
    """A cache, [layers, blocks, keys and values, dimension]: on the device, or in host memory."""
    numbers = torch.arange(LAYERS * BLOCKS * SLAB, dtype=torch.float32)
    made = numbers.view(LAYERS, BLOCKS, 2, SLAB // 2)
    if request.param == "in host memory":
        made.is_region = True
        return made
    if request.param == "one by one":
        monkeypatch.setattr(device_memory, "_GATHERED_BYTES", 1)
    return made.to(DEVICE)


def attach(cache, memory):
    """The copies between a cache and host memory."""
    if not hasattr(cache, "is_region"):
        return device_memory.DeviceBlocks(cache).attach(memoryview(memory))
    layout = descriptors.Layout(
        num_blocks=BLOCKS,
        block_size=1,
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=SLAB // 2,
        dtype="float32",
    )
    region = descriptors.Region(memory=memoryview(cache.numpy()).cast("B"), layout=layout)
    return device_memory.RegionBlocks(region).attach(memoryview(memory))


def host_of(num_blocks):
    memory = mmap.mmap(-1, num_blocks * LAYERS * SLAB * 4)
    return memory, torch.frombuffer(memory, dtype=torch.float32).view(num_blocks, LAYERS, SLAB)


def test_blocks_are_written_as_one_piece_each_to_the_named_places(cache):
    memory, host = host_of(7)
    copies = attach(cache, memory)
    copies.move(WRITE, [4, 19, 0], [6, 2, 3], limit())

    expected = torch.zeros(7, LAYERS, SLAB)
    for block, place in ((4, 6), (19, 2), (0, 3)):
        expected[place] = cache[:, block].flatten(1).cpu()
    assert torch.equal(host, expected)


def test_blocks_are_read_back_and_no_other_changes(cache):
    memory, host = host_of(BLOCKS)
    host.copy_(torch.rand(BLOCKS, LAYERS, SLAB))
    before = cache.clone()
    copies = attach(cache, memory)
    copies.move(READ, (1, 7, 3), (5, 0, 19), limit())

    for block, place in ((1, 5), (7, 0), (3, 19)):
        assert torch.equal(cache[:, block].flatten(1).cpu(), host[place])
    others = [i for i in range(BLOCKS) if i not in (1, 7, 3)]
    assert torch.equal(cache[:, others], before[:, others])


def test_nothing_is_copied_after_the_time_limit(cache):
    memory, host = host_of(BLOCKS)
    over = limit()
    over.cancel()
    with pytest.raises(errors.TransferError, match="cancelled"):
        attach(cache, memory).move(WRITE, [1], [1], over)

    assert not host.any()


class Driver:
    """What locks pages, of which it refuses those that begin at a refused offset."""

    def __init__(self, memory, refused=()):
        self.start, self.refused = memory.data_ptr(), refused
        self.locked, self.unlocked = [], []

    def cudaHostRegister(self, address, num_bytes, flags):
        self.locked.append((address - self.start, num_bytes))
        return int(address - self.start in self.refused)

    def cudaHostUnregister(self, address):
        self.unlocked.append(address - self.start)


@pytest.mark.parametrize(
    ("block_bytes", "piece_bytes"),
    [(mmap.PAGESIZE, 2 * mmap.PAGESIZE), (1024, 2 * mmap.PAGESIZE), (1536, 3 * mmap.PAGESIZE)],
)
def test_pieces_of_whole_pages_and_blocks_are_locked_once_and_unlocked_at_the_end(
    monkeypatch, block_bytes, piece_bytes
):
    monkeypatch.setattr(device_memory, "_PIECE_BYTES", 2 * mmap.PAGESIZE)
    num_bytes = 3 * piece_bytes + block_bytes
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    driver = Driver(memory, refused=(0,))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    locks = device_memory.PageLocks(memory, block_bytes)
    last = num_bytes // block_bytes - 1
    locks.lock([0, last])
    locks.lock([last, 1, piece_bytes // block_bytes])

    pieces = [(0, piece_bytes), (3 * piece_bytes, block_bytes), (piece_bytes, piece_bytes)]
    assert sorted(driver.locked) == sorted(pieces)
    assert not driver.unlocked
    del locks
    assert sorted(driver.unlocked) == [piece_bytes, 3 * piece_bytes]
