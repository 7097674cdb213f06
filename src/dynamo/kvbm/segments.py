"""The queue from host memory to the tier below it: which blocks are written there, and together.

    chain   0 1 2 3 | 4 5 6 7 | 8 9      segments of 4 blocks; 8 and 9 are not written until 10 and 11 are there

A slot of the tier below holds a segment: a fixed number of consecutive blocks, which begin at a multiple of that number
in their chain. So a request to an object store moves many blocks, and the hash of the last one names them all. A disk
has segments of one block.

A segment is queued when its last block is offered, and copied if host memory has all its blocks then. If it has not, or
if there is no room, nothing waits: the next request with this prefix offers the block again.
"""  # decider

import itertools
from collections import Counter
from collections.abc import Sequence

from dynamo.kvbm import tier_policy
from dynamo.kvbm.tiers import CachedBlock, OffloadQueue, QueuedBlock, Tier, TierBlock
from dynamo.protocols import generate


class SegmentQueue:
    """Mutable; the thread that owns the tiers owns it."""

    def __init__(
        self,
        host: Tier,
        below: Tier,
        admission: tier_policy.OffloadFilter,
        counts: Counter[str],
    ) -> None:
        self._host, self._below, self._filter, self._counts = host, below, admission, counts
        self._queue = OffloadQueue()

    def __len__(self) -> int:
        """Return the number of blocks that wait."""
        return len(self._queue) * self._below.segment_blocks

    def offer(self, last: TierBlock) -> None:
        """Queue the segment that this block of host memory ends, if it is worth a copy and not there yet."""
        name = last.block.sequence_hash
        if last.is_foreign or name in self._below or not self._filter.admits(name):
            return
        if not self._queue.add(QueuedBlock(last.block, last.priority)):
            self._counts["skipped_queue_full"] += 1

    def take(self, max_blocks: int) -> tuple[list[TierBlock], list[TierBlock]]:
        """Return blocks of host memory to copy now, acquired, and the slots that they are to be copied to."""
        sources: list[TierBlock] = []
        targets: list[TierBlock] = []
        while len(sources) + self._below.segment_blocks <= max_blocks:
            queued = self._queue.pop()
            if queued is None:
                break
            segment = self._find_segment(queued.block.sequence_hash)
            is_given_up = not segment or segment[-1].is_foreign  # or another worker writes it
            if queued.block.sequence_hash in self._below or is_given_up:
                continue
            if any(each.is_memory_only for each in segment):
                self._counts["kept_off_disk"] += len(segment)
                continue
            target = self._below.reserve(
                tuple([each.block for each in segment]),
                max(each.priority for each in segment),
                max((each.hint for each in segment if each.hint), key=_strength, default=None),
            )
            if target is None:
                self._counts["skipped_tier_full"] += 1
                break
            sources += [self._host.acquire(each, is_read=False) for each in segment]
            targets.append(target)
        return sources, targets

    def clear(self) -> None:
        """Remove all blocks."""
        self._queue.clear()

    def _find_segment(self, last: int) -> list[TierBlock]:
        """Return the blocks of the segment that ends with this one; none unless host memory has all of them."""
        found: list[TierBlock] = []
        name: int | None = last
        while name is not None and len(found) < self._below.segment_blocks:
            entry = self._host.find(name)
            if entry is None:
                return []
            found.append(entry)
            name = entry.block.parent_hash
        return found[::-1] if len(found) == self._below.segment_blocks else []


def batch_reads(
    below: Tier, names: Sequence[int], max_blocks: int
) -> list[list[tuple[TierBlock, CachedBlock]]]:
    """Return the blocks of these hashes, each with the segment that has it, in batches for one copy each.

    No segment is in two batches, so that one request reads what is needed of it.
    """
    reads: list[list[tuple[TierBlock, CachedBlock]]] = []  # one for each segment
    pairs: dict[int, tuple[TierBlock, CachedBlock]] = {}  # of one segment, by hash
    for name in reversed(names):  # the segment with the last block has those before it, too
        if name not in pairs:
            source = below.find(name)
            assert source is not None, "the caller has found it"
            pairs = {block.sequence_hash: (source, block) for block in source.segment}
            reads.append([])
        reads[-1].append(pairs[name])
    ordered = [read[::-1] for read in reversed(reads)]
    num_segments = max(1, max_blocks // below.segment_blocks)
    starts = range(0, len(ordered), num_segments)
    return [list(itertools.chain(*ordered[at : at + num_segments])) for at in starts]


def _strength(hint: generate.CacheHint) -> tuple[int, bool]:
    return hint.ttl_s, hint.is_pinned
