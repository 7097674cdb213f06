"""The simulated network between workers: KV blocks have few real bytes, so the time of the others is waited."""

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.kvbm import sharing
from dynamo.transfer import descriptors

_BYTES_OF_NAME = 8  # each token of the layout has so many; a block uses those of its first token


class KvLink:
    """A simulated network with a bandwidth and a failure rate."""

    def __init__(
        self,
        clock: clocks.Clock,
        *,
        bytes_per_second: float,
        bytes_per_block: int,
        limit_s: float,
        fail_every: int,
    ) -> None:
        """`bytes_per_second` 0: no delay; `fail_every` n: every n-th copy fails, 0: none.

        A copy that takes longer than `limit_s` fails after that time.
        """
        self._clock = clock
        self._s_per_block = bytes_per_block / bytes_per_second if bytes_per_second else 0.0
        self._limit_s = limit_s
        self._fail_every = fail_every
        self._num_copies = 0

    async def wait(self, kv_import: sharing.KvImport) -> None:
        """Wait as long as copying these blocks takes. Raises TransferError."""
        duration_s = len(kv_import.local_blocks) * self._s_per_block
        if duration_s:
            await self._clock.sleep(min(duration_s, self._limit_s))
        self._num_copies += 1
        if self._fail_every and self._num_copies % self._fail_every == 0:
            raise errors.TransferError("this copy fails, because --kv-transfer-fail-every says so")
        if duration_s > self._limit_s:
            raise errors.TransferError(f"the copy takes longer than {self._limit_s:g} s")


def layout(num_blocks: int, block_size: int) -> descriptors.Layout:
    """Return the layout of memory in which each block can store its sequence hash."""
    return descriptors.Layout(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=_BYTES_OF_NAME // 2,
        dtype="float8_e4m3fn",
    )
