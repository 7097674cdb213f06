"""Who holds which blocks, for sets of blocks that are closed: who holds a block holds all before it in its chain.

    block → bit mask of the workers that hold it

Along any chain the set of holders only shrinks; so where it does is found by bisection, ten look-ups for 512 blocks
instead of 512. What requests in flight hold is closed (each holds a whole chain); so is a cache that
evicts from the tail.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import cast

from dynamo.router.api import Worker

_BIT_OF_DIGIT = bytes.maketrans(b"01", b"\x00\x01")


class ChainHolders:
    """Mutable. A worker must be inserted before it is given blocks."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._bits: dict[Worker, int] = {}
        self._workers: list[Worker | None] = []  # by position of the bit

    def insert(self, worker: Worker) -> None:
        """It holds nothing yet. Its bit may be one that was free again."""
        if None in self._workers:
            position = self._workers.index(None)
            self._workers[position] = worker
        else:
            position = len(self._workers)
            self._workers.append(worker)
        self._bits[worker] = 1 << position

    def remove(self, worker: Worker) -> None:
        """It is gone; it must hold nothing any more."""
        self._workers[self._bits.pop(worker).bit_length() - 1] = None

    def run(self, worker: Worker, chain: Sequence[int]) -> int:
        """How many leading blocks of the chain this worker holds."""
        bit = self._bits[worker]
        if not chain or not self._masks.get(chain[0], 0) & bit:
            return 0
        return self._end(chain, bit)

    def runs(self, chain: Sequence[int]) -> dict[Worker, int]:
        """How many leading blocks of the chain each worker holds; who holds none is left out."""
        runs: dict[Worker, int] = {}
        masks, end = self._masks, 0
        mask = masks.get(chain[0], 0) if chain else 0
        while mask:
            end = self._end(chain, mask, end)
            rest = masks.get(chain[end], 0) & mask if end < len(chain) else 0
            runs.update(dict.fromkeys(self._named(mask ^ rest), end))
            mask = rest
        return runs

    def _named(self, mask: int) -> Iterator[Worker]:
        """The workers of a mask; whoever was removed holds nothing, and so has no bit in it."""
        return cast(Iterator[Worker], itertools.compress(self._workers, _flags(mask)))

    def hold(self, worker: Worker, chain: Sequence[int], start: int) -> None:
        """The worker holds the blocks from `start` on as well. What nobody holds yet costs next to nothing."""
        masks, bit = self._masks, self._bits[worker]
        fresh = start
        if start < len(chain) and chain[start] in masks:
            fresh = bisect.bisect_left(chain, True, start, key=lambda name: name not in masks)
        for name in chain[start:fresh]:
            masks[name] |= bit
        masks.update(zip(chain[fresh:], itertools.repeat(bit), strict=False))

    def let_go(self, worker: Worker, names: Sequence[int]) -> None:
        """The worker holds these blocks no more."""
        masks, others = self._masks, ~self._bits[worker]
        for name in names:
            if rest := masks.get(name, 0) & others:
                masks[name] = rest
            else:
                masks.pop(name, None)

    def _end(self, chain: Sequence[int], mask: int, start: int = 0) -> int:
        """Where the blocks end that all workers of the mask hold."""
        get = self._masks.get
        return bisect.bisect_left(chain, True, start, key=lambda name: get(name, 0) & mask != mask)


def _flags(mask: int) -> bytes:
    """A byte for each bit, lowest first: 1 where it is set. By text, as arithmetic copies a thousand bits each step."""
    return bin(mask)[:1:-1].encode().translate(_BIT_OF_DIGIT)
