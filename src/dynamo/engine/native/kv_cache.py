"""The memory of keys and values, in blocks of `block_size` tokens. `paging` knows which sequence uses which block."""

import math
import mmap
from collections.abc import Callable

import torch

from dynamo.base import errors
from dynamo.engine.native.config import ModelConfig

Allocate = Callable[[int], memoryview]  # number of bytes → memory


class KvCache:
    """Slot s of a layer holds one token: its key heads and then its value heads. Block b is slots b * block_size on."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        allocate: Allocate | None = None,
    ) -> None:
        """`allocate` returns zeroed memory that other engines can map; only for a CPU. Raises ConfigError."""
        self.config, self.block_size = config, block_size
        self.dtype, self.device = dtype, device
        self._token_shape = 2 * config.num_kv_heads, config.head_dim
        self.memory: memoryview | None = None  # the whole cache, if it is in host memory
        shape = config.num_layers, num_blocks * block_size, *self._token_shape
        try:
            if device == "cpu":
                num_bytes = math.prod(shape) * dtype.itemsize
                self.memory = (allocate or _allocate_private)(num_bytes)
                cache = torch.frombuffer(self.memory, dtype=dtype).view(shape)
            else:
                cache = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, OSError) as error:
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise errors.ConfigError(
                f"a KV cache of {num_blocks} blocks takes {size:.1f} GiB, more than {device} has; ask for fewer"
            ) from error
        self._layers = cache.unbind()
        self._blocks = [layer.view(num_blocks, -1) for layer in self._layers]
        self._staging = self._blocks[0].new_empty(0)

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [slots, 2 * KV heads, head_dim]."""
        self._layers[layer].index_copy_(0, slots, kv)

    def stage(self, num_blocks: int) -> torch.Tensor:
        """Return a buffer of `num_blocks` rows, one block each, to which blocks are copied. All callers share it."""
        width = self._blocks[0].shape[1]
        if len(self._staging) < num_blocks * width:
            self._staging = self._staging.new_empty(num_blocks * width)
        return self._staging[: num_blocks * width].view(num_blocks, width)

    def by_head(
        self, staged: torch.Tensor, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """View staged blocks of equally long sequences as keys and values, [sequences, heads, tokens, head_dim]."""
        keys, values = (
            staged.view(num_sequences, -1, *self._token_shape).transpose(1, 2).chunk(2, 1)
        )
        return keys, values

    def read(self, layer: int, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy these blocks to the staging buffer."""
        torch.index_select(self._blocks[layer], 0, blocks, out=staged)


def _allocate_private(num_bytes: int) -> memoryview:
    """Allocate pages that the system provides when they are first written: torch would write all of them now."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
