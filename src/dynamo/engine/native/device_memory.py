"""The blocks of a KV cache in the engine's own memory, and the copies of them from and to host memory for the tiers.

Where the engine's memory is a region of host memory, NumPy copies the layers of a block in one call, while other
threads run.

On a GPU a block is a slab in each layer, in host memory it is one piece. So blocks are gathered on the GPU, some at a
time, and each crosses the bus in one copy; on the way back they are scattered. This is done on a stream of its own for
each thread, beside what the engine computes.

Host memory is page-locked when it is first used, a piece at a time: the GPU reads and writes such memory by itself, and
several times as fast. Where the driver refuses to lock it, copies are slower.
"""

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch

from dynamo.transfer import api, descriptors

_GATHERED_BYTES = 32 * 2**20  # together on the GPU
_PIECE_BYTES = 64 * 2**20


class RegionBlocks:
    """A cache in host memory as an `api.DeviceMemory`."""

    def __init__(self, region: descriptors.Region) -> None:
        layout = region.layout
        self._blocks = torch.frombuffer(region.memory, dtype=torch.uint8).as_strided(
            (layout.num_blocks, layout.num_layers, layout.slab_bytes),
            (layout.block_stride, layout.layer_stride, 1),
        )

    def attach(self, host: memoryview) -> "RegionCopies":
        """Return the copies from and to host memory in which blocks follow one another."""
        return RegionCopies(self._blocks, host)


class RegionCopies:
    """An `api.BlockCopier` between two pieces of host memory."""

    def __init__(self, blocks: torch.Tensor, host: memoryview) -> None:
        """`blocks` is [blocks, layers, slab], in bytes."""
        memory = torch.frombuffer(host, dtype=torch.uint8)
        self._blocks, self._host = blocks.numpy(), memory.view(-1, *blocks.shape[1:]).numpy()

    def move(
        self,
        operation: api.TransferOperation,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        limit: api.TimeLimit,
    ) -> None:
        """Copy blocks, see `api.BlockCopier`."""
        is_save = operation is api.TransferOperation.WRITE
        for block, slot in zip(device_blocks, host_blocks, strict=True):
            limit.remaining_s()
            if is_save:
                self._host[slot] = self._blocks[block]
            else:
                self._blocks[block] = self._host[slot]
        limit.remaining_s()


class DeviceBlocks:
    """A cache on a GPU as an `api.DeviceMemory`."""

    def __init__(self, cache: torch.Tensor) -> None:
        """`cache` is [layers, blocks, ...]."""
        self._blocks = cache.flatten(2).transpose(0, 1)

    def attach(self, host: memoryview) -> "HostCopies":
        """Return the copies from and to host memory in which blocks follow one another."""
        return HostCopies(self._blocks, host)


class HostCopies:
    """An `api.BlockCopier` between a GPU's memory and one piece of host memory."""

    def __init__(self, blocks: torch.Tensor, host: memoryview) -> None:
        """`blocks` is [blocks, layers, slab], on the device."""
        self._blocks, self._of_thread = blocks, threading.local()
        memory = torch.frombuffer(host, dtype=blocks.dtype)
        self._host = memory.view(-1, *blocks.shape[1:])
        block_bytes = self._host[0].nbytes
        self._num_gathered = max(1, _GATHERED_BYTES // block_bytes)
        self._locked = PageLocks(memory, block_bytes) if blocks.is_cuda else None

    def move(
        self,
        operation: api.TransferOperation,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        limit: api.TimeLimit,
    ) -> None:
        """Copy blocks, see `api.BlockCopier`. Returns when they are there."""
        if self._locked is not None:
            self._locked.lock(host_blocks)
        copy = self._save if operation is api.TransferOperation.WRITE else self._load
        with self._stream(), torch.inference_mode():
            for i in range(0, len(device_blocks), self._num_gathered):
                limit.remaining_s()
                part = slice(i, i + self._num_gathered)
                copy(
                    torch.tensor(device_blocks[part], device=self._blocks.device), host_blocks[part]
                )
        limit.remaining_s()

    def _save(self, device_blocks: torch.Tensor, host_blocks: Sequence[int]) -> None:
        gathered = self._blocks.index_select(0, device_blocks)
        for block, content in zip(host_blocks, gathered, strict=True):
            self._host[block].copy_(content, non_blocking=True)

    def _load(self, device_blocks: torch.Tensor, host_blocks: Sequence[int]) -> None:
        shape = len(host_blocks), *self._blocks.shape[1:]
        gathered = self._blocks.new_empty(shape)
        for block, content in zip(host_blocks, gathered, strict=True):
            content.copy_(self._host[block], non_blocking=True)
        self._blocks.index_copy_(0, device_blocks, gathered)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """Let this thread's copies begin after the steps that have begun, and wait for their end."""
        if not self._blocks.is_cuda:
            yield
            return
        device = self._blocks.device
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(device)
        stream: torch.cuda.Stream = self._of_thread.stream
        stream.wait_stream(torch.cuda.default_stream(device))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


class PageLocks:
    """Pieces of host memory that are page-locked for the GPU, until this object ends."""

    def __init__(self, memory: torch.Tensor, block_bytes: int) -> None:
        """A piece is some blocks and some pages, both whole."""
        blocks_per_page = mmap.PAGESIZE // math.gcd(block_bytes, mmap.PAGESIZE)
        unit_bytes = blocks_per_page * block_bytes
        self._num_blocks = -(-_PIECE_BYTES // unit_bytes) * blocks_per_page
        self._block_bytes, self._memory = block_bytes, memory
        self._lock = threading.Lock()
        self._pieces: set[int] = set()
        self._addresses: list[int] = []
        weakref.finalize(self, _unlock, memory, self._addresses)

    def lock(self, blocks: Sequence[int]) -> None:
        """Lock the pieces in which these blocks lie."""
        needed = {block // self._num_blocks for block in blocks}
        if needed <= self._pieces:
            return
        with self._lock:
            for piece in needed - self._pieces:
                self._lock_piece(piece)
                self._pieces.add(piece)

    def _lock_piece(self, piece: int) -> None:
        start = piece * self._num_blocks * self._block_bytes
        num_bytes = min(self._num_blocks * self._block_bytes, self._memory.nbytes - start)
        address = self._memory.data_ptr() + start
        if not int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)):
            self._addresses.append(address)


def _unlock(memory: torch.Tensor, addresses: list[int]) -> None:
    """Unlock memory, which is mapped until then because it is an argument."""
    del memory
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
