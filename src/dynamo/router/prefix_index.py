"""Which worker holds which blocks, exactly, from what the workers themselves tell.

    index.apply(worker, event)          one KV event, in the order in which the worker told it (see `event_order`)
    index.find(sequence_hashes)         how many leading blocks of a prompt each worker holds, by tier
    index.remove_worker(worker)         at once, whatever it held

Blocks are kept by sequence hash; `foreign_names` translates for engines that have other names. A foreign block with an
unknown parent has no place and is left out (`num_orphans`). `chains` says what is bounded and why nothing stalls.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence

from dynamo.base import errors
from dynamo.protocols import kv_events
from dynamo.router import api, chains, foreign_names, holders

MAX_BLOCKS = 1 << 22  # about 450 MB
_DEVICE, _HOST, _DISK = kv_events.DEVICE, kv_events.HOST, kv_events.DISK
_SWEEP = 4  # segments for each event
_SWEEP_NAMES = 256  # of foreign engines


class PrefixIndex:
    """An `api.Index`. Mutable; one thread or loop owns it."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.num_orphans = 0  # blocks that were told of but could not be placed
        self._chains = chains.Chains(max_blocks)
        self._holders = holders.Holders()
        self._sweeping = 0  # bits of who is being swept
        self._foreign = foreign_names.ForeignNames()

    @property
    def num_blocks(self) -> int:
        """Different blocks, those that wait to be swept among them."""
        return len(self._chains)

    def find(self, sequence_hashes: Sequence[int]) -> api.Overlaps:
        living = self._holders.living
        device = self._depths(sequence_hashes, living[_DEVICE])
        if not (living[_HOST] or living[_DISK]):
            return api.Overlaps(device, {}, {})
        host = self._depths_behind(sequence_hashes, _HOST, device)
        disk = self._depths_behind(sequence_hashes, _DISK, device, host)
        return api.Overlaps(device, host, disk)

    def apply(self, worker: api.Worker, event: kv_events.KvEvent) -> None:
        """What `worker` told. Raises RemoteProtocolError for a hash that is not of 64 bits."""
        try:
            if isinstance(event, kv_events.Stored):
                self._stored(worker, event)
            elif isinstance(event, kv_events.Removed):
                self.drop(worker, event.tier, self._foreign.remove(worker, event))
            else:
                self.clear(worker)
        except (OverflowError, struct.error) as error:
            raise errors.RemoteProtocolError(
                f"expected hashes of 64 bits, without sign, from {worker}: {error}"
            ) from error
        self.sweep(_SWEEP)

    def clear(self, worker: api.Worker) -> None:
        """It holds nothing, in no tier."""
        self._holders.leave(worker)
        self._foreign.leave(worker)

    def remove_worker(self, worker: api.Worker) -> None:
        self.clear(worker)

    def sweep(self, num_segments: int) -> bool:
        """Free a bounded part of what those who left have left; says whether nothing remains.

        Each event sweeps a little. Where no events come, memory waits for whoever calls this.
        """
        if not self._sweeping and self._holders.left:
            self._sweeping, self._holders.left = self._holders.left, 0
            self._chains.forget(self._sweeping)
        if self._sweeping and self._chains.sweep(num_segments):
            self._holders.release(self._sweeping)
            self._sweeping = 0
        is_free = self._foreign.free(_SWEEP_NAMES)
        return is_free and not (self._sweeping or self._holders.left)

    def holdings(self) -> Iterator[tuple[api.Worker, kv_events.Tier, Sequence[int]]]:
        """All that is known: who, where, and a stretch of consecutive blocks."""
        for (worker, tier), bit in self._holders:
            for names in self._chains.held_by(bit):
                yield worker, tier, names

    def is_foreign(self, worker: api.Worker) -> bool:
        """Whether it has block names of its own, which `holdings` do not tell."""
        return self._foreign.knows(worker)

    def hold(self, worker: api.Worker, tier: kv_events.Tier, names: Sequence[int]) -> None:
        """`worker` has these consecutive blocks: the inverse of `holdings`."""
        self._chains.hold(self._holders.join(worker, tier), names)

    def drop(self, worker: api.Worker, tier: kv_events.Tier, names: Iterable[int]) -> None:
        """`worker` has these blocks no more."""
        if holder := self._holders.bit(worker, tier):
            self._chains.drop(holder, names)

    def _depths(self, names: Sequence[int], among: int) -> dict[api.Worker, int]:
        depths: dict[api.Worker, int] = {}
        for bits, depth in self._chains.runs(names, among):
            found = dict.fromkeys(self._holders.workers(bits), depth)
            if depths:
                depths |= found
            else:
                depths = found
        return depths

    def _depths_behind(
        self, names: Sequence[int], tier: kv_events.Tier, *faster: dict[api.Worker, int]
    ) -> dict[api.Worker, int]:
        """How far this tier goes on for each worker, where its faster tiers end."""
        depths: dict[api.Worker, int] = {}
        among_by_start: dict[int, int] = {}
        for worker in self._holders.workers(self._holders.living[tier]):
            start = sum(tier_depths.get(worker, 0) for tier_depths in faster)
            bit = self._holders.bit(worker, tier)
            among_by_start[start] = among_by_start.get(start, 0) | bit
        for start, among in among_by_start.items():
            depths.update(self._depths(names[start:], among))
        return depths

    def _stored(self, worker: api.Worker, event: kv_events.Stored) -> None:
        if not event.blocks:
            return
        if foreign_names.is_foreign(event):
            learnt = self._foreign.learn(worker, event)
        else:
            learnt = event.parent_hash, [block.block_hash for block in event.blocks]
        if learnt is None:
            self.num_orphans += len(event.blocks)
            return
        parent, names = learnt
        self._chains.hold(self._holders.join(worker, event.tier), names, parent)
