"""The simulated way of KV blocks between workers: real bytes are few, so the time they would take is waited."""

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.kvbm import sharing
from dynamo.transfer import descriptors

_BYTES_OF_NAME = 8  # with this head, a token has as many, of which the first of a block are used


class KvLink:
    """As slow as it is told, and as unreliable."""

    def __init__(
        self,
        clock: clocks.Clock,
        *,
        bytes_per_second: float,
        bytes_per_block: int,
        limit_s: float,
        fail_every: int,
    ) -> None:
        """`bytes_per_second` 0: at once; `fail_every` 0: never. A copy that takes `limit_s` fails then."""
        self._clock = clock
        self._s_per_block = bytes_per_block / bytes_per_second if bytes_per_second else 0.0
        self._limit_s = limit_s
        self._fail_every = fail_every
        self._num_copies = 0

    async def wait(self, kv_import: sharing.KvImport) -> None:
        """For as long as these blocks take. Raises TransferError."""
        duration_s = len(kv_import.local_blocks) * self._s_per_block
        if duration_s:
            await self._clock.sleep(min(duration_s, self._limit_s))
        self._num_copies += 1
        if self._fail_every and self._num_copies % self._fail_every == 0:
            raise errors.TransferError("this copy fails, because --kv-transfer-fail-every says so")
        if duration_s > self._limit_s:
            raise errors.TransferError(f"the copy takes longer than {self._limit_s:g} s")


def layout(num_blocks: int, block_size: int) -> descriptors.Layout:
    """Of memory in which a block can hold its name."""
    return descriptors.Layout(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=_BYTES_OF_NAME // 2,
        dtype="float8_e4m3fn",
    )
