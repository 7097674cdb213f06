"""Which bit stands for whom: a holder is one tier of one worker.

A bit of somebody who left is not given to another before every trace of it is swept from the blocks, because until
then it still stands on them. Whoever searches does so among the living, so the traces harm nobody.
"""

from collections.abc import Iterable, Iterator
from itertools import compress

from dynamo.protocols import kv_events
from dynamo.router import api

_DIGITS = bytes.maketrans(b"01", b"\0\1")


class Holders:
    """Workers by bit. All bits of the living are in `living`, by tier."""

    def __init__(self) -> None:
        self.living = dict.fromkeys(kv_events.TIERS, 0)
        self.left = 0  # who left and was not begun to be swept
        self._bits: dict[tuple[api.Worker, kv_events.Tier], int] = {}
        self._workers: list[api.Worker | None] = []  # by position of the bit
        self._free: list[int] = []

    def bit(self, worker: api.Worker, tier: kv_events.Tier) -> int:
        """Its bit; 0 if it has none."""
        return self._bits.get((worker, tier), 0)

    def join(self, worker: api.Worker, tier: kv_events.Tier) -> int:
        """Its bit; a new one if it has none."""
        bit = self._bits.get((worker, tier))
        if bit is None:
            bit = self._bits[worker, tier] = self._new_bit(worker)
            self.living[tier] = self.living.get(tier, 0) | bit
        return bit

    def leave(self, worker: api.Worker) -> None:
        """It has nothing any more, in no tier."""
        for tier in self.living:
            bit = self._bits.pop((worker, tier), 0)
            self.living[tier] &= ~bit
            self.left |= bit

    def release(self, bits: int) -> None:
        """These bits stand on no block any more: others may have them."""
        positions = [i for i in range(len(self._workers)) if bits >> i & 1]
        for position in positions:
            self._workers[position] = None
        self._free += positions

    def workers(self, bits: int) -> Iterable[api.Worker]:
        """Who these (living) are; all of one tier."""
        if not bits & (bits - 1):
            return self._workers[bits.bit_length() - 1 : bits.bit_length()]  # type: ignore[return-value]
        digits = bin(bits)[:1:-1].encode().translate(_DIGITS)
        return compress(self._workers, digits)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[tuple[api.Worker, kv_events.Tier], int]]:
        return iter(self._bits.items())

    def _new_bit(self, worker: api.Worker) -> int:
        if not self._free:
            self._free.append(len(self._workers))
            self._workers.append(None)
        position = self._free.pop()
        self._workers[position] = worker
        return 1 << position
