"""The prefix tree under the index: all chains of cached blocks, and the set of workers that have each block.

An *edge* is a run of consecutive blocks of one chain (a compressed path, as in a radix tree). Blocks are known by
sequence hashes, which name a block together with all before it. So two chains that agree at one position agree at all
before, and how far a prompt follows an edge is found by looking at a few positions only: the cost of a match is in
edges, not in blocks. A *worker set* is an int with a bit for each worker and tier; `prefix_index` assigns the bits.

One dictionary leads from a block's hash to the number of its edge. Its values are ints, one object per edge, so the
garbage collector never walks it: a million blocks cost it nothing. A block without workers is not kept, except for
gaps: a block inside an edge keeps its place until the blocks behind it go too, so that it can return to it.

**Bounded.** Beyond `max_blocks` the oldest edges are dropped, tails before heads; an edge that several workers have (a
system prompt, say) is passed over a few times. A dropped block is as if no worker had ever published it.

**Nothing stalls.** `begin_sweep` only notes which workers are removed; each `sweep` then cleans a bounded number of
edges.
"""  # decider

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

MAX_EDGE_BLOCKS = 128  # longer edges gain nothing more
_NUM_PASSES = 8  # how many shared edges are passed over to find one to drop
# A dictionary finds its first entry the more slowly, the more were removed before it: so several are found at once, and
# of a full tree one block in so many is dropped at a time.
_DROPPED_EDGES, _DROPPED_SHARE = 64, 4096
_WINDOW = 8192  # blocks that are copied at a time: a list may be known and unknown by turns


class PrefixEdge:
    """One to `MAX_EDGE_BLOCKS` consecutive blocks, with the workers that have all or some of them.

    Most workers have all blocks of an edge: their bits are in `full`. Each other one has an int with a bit per position
    in `partial`, which is exact too when blocks vanish from the middle. No worker is in both.
    """

    __slots__ = ("full", "names", "partial")

    def __init__(self, names: Sequence[int], full: int) -> None:
        self.names = array("Q", names)
        self.full = full
        self.partial: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_workers(self) -> int:
        """Return the number of workers that have at least one block of the edge."""
        return self.full.bit_count() + len(self.partial)

    def position_of(self, name: int, guess: int) -> int:
        """Return the position of a block of this edge; `guess` is tried first."""
        if 0 <= guess < len(self.names) and self.names[guess] == name:
            return guess
        return self.names.index(name)

    def match_length(self, position: int, names: Sequence[int], start: int) -> int:
        """Return how many blocks `names[start:]` shares with the edge from `position` on; the first must be shared."""
        own = self.names
        longest = min(len(own) - position, len(names) - start)
        if own[position + longest - 1] == names[start + longest - 1]:
            return longest
        shared, differs = 1, longest
        while differs - shared > 1:
            middle = (shared + differs) // 2
            if own[position + middle - 1] == names[start + middle - 1]:
                shared = middle
            else:
                differs = middle
        return shared

    def extend(self, names: Sequence[int]) -> None:
        """Append blocks that all workers of the edge have; no worker may have only a part."""
        self.names.extend(array("Q", names))

    def add_blocks(self, worker: int, position: int, num_blocks: int) -> None:
        """Add `num_blocks` blocks from `position` on to those that the worker has."""
        if not worker & self.full:
            added = ((1 << num_blocks) - 1) << position
            self._set_positions(worker, self.partial.get(worker, 0) | added)

    def remove_blocks(self, worker: int, positions: int) -> None:
        """Remove the blocks at these positions (a bit each) from those that the worker has."""
        remaining = self._all if worker & self.full else self.partial.get(worker, 0)
        self.full &= ~worker
        self._set_positions(worker, remaining & ~positions)

    def remove_workers(self, workers: int) -> None:
        """Remove all blocks of these workers."""
        self.full &= ~workers
        for worker in [worker for worker in self.partial if worker & workers]:
            del self.partial[worker]

    def split(self, num_blocks: int) -> "PrefixEdge":
        """Keep the first blocks; return an edge of the others, with their workers."""
        tail = PrefixEdge(self.names[num_blocks:], self.full)
        positions_by_worker, self.partial = self.partial, {}
        del self.names[num_blocks:]
        for worker, positions in positions_by_worker.items():
            self._set_positions(worker, positions & self._all)
            tail._set_positions(worker, positions >> num_blocks)
        return tail

    def trim(self) -> "array[int]":
        """Drop the blocks at the end that no worker has; return them."""
        if self.full:
            return array("Q")
        used = 0
        for positions in self.partial.values():
            used |= positions
        dropped = self.names[used.bit_length() :]
        if dropped:
            del self.names[used.bit_length() :]
            for worker, positions in list(self.partial.items()):
                self._set_positions(worker, positions)  # a part may now be all
        return dropped

    def run_length(self, worker: int, position: int) -> int:
        """Return how many blocks from `position` on a worker of `partial` has without a gap."""
        missing = ~(self.partial.get(worker, 0) >> position)
        return (missing & -missing).bit_length() - 1

    def runs_of(self, worker: int) -> list[Sequence[int]]:
        """Return the runs of consecutive blocks that this worker has."""
        if worker & self.full:
            return [self.names]
        runs: list[Sequence[int]] = []
        positions, at = self.partial.get(worker, 0), 0
        while positions >> at:
            length = self.run_length(worker, at)
            if length:
                runs.append(self.names[at : at + length])
            at += length + 1
        return runs

    @property
    def _all(self) -> int:
        return (1 << len(self.names)) - 1

    def _set_positions(self, worker: int, positions: int) -> None:
        """Put the worker into `full`, `partial` or neither, by the positions that it has."""
        self.partial.pop(worker, None)
        if positions and positions == self._all:
            self.full |= worker
        elif positions:
            self.partial[worker] = positions


class PrefixTree:
    """All edges, by block. A worker is one bit; block names are sequence hashes (`protocols.blocks`)."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._edge_by_name: dict[int, int] = {}
        self._edges: dict[int, PrefixEdge] = {}  # oldest first
        self._last_number = 0
        self._removed_workers = 0  # the bits that the current sweep removes
        self._unswept: list[int] = []

    def __len__(self) -> int:
        """Return the number of blocks, gaps included."""
        return len(self._edge_by_name)

    def match(self, names: Sequence[int], workers: int) -> list[tuple[int, int]]:
        """Return (worker set, number of leading blocks of `names`) for those of `workers` that have any."""
        matches: list[tuple[int, int]] = []
        depth, matching, total = 0, workers, len(names)
        while matching and depth < total:
            number = self._edge_by_name.get(names[depth])
            if number is None:
                break
            edge = self._edges[number]
            position = edge.position_of(names[depth], 0)
            length = edge.match_length(position, names, depth)
            matching = _follow_edge(edge, position, length, matching, depth, matches)
            depth += length
        if matching and depth:
            matches.append((matching, depth))
        return matches

    def add_blocks(self, worker: int, names: Sequence[int], parent: int | None = None) -> None:
        """Add consecutive blocks, the first of which follows `parent`, to those that the worker has."""
        start = 0
        while start < len(names):
            number = self._edge_by_name.get(names[start])
            if number is None:
                before = names[start - 1] if start else parent
                start += self._add_new_blocks(worker, names[start : start + _WINDOW], before)
                continue
            edge = self._edges[number]
            position = edge.position_of(names[start], 0)
            length = edge.match_length(position, names, start)
            is_new = not worker & edge.full and worker not in edge.partial
            if is_new and position == 0 and length < len(edge):
                tail = edge.split(length)  # where chains part: so most workers have full edges
                added = self._add_edge(tail, tail.names)
                if self._unswept:
                    self._unswept.append(added)
                self._trim_edge(added)
            edge.add_blocks(worker, position, length)
            start += length
        if len(self._edge_by_name) > self._max_blocks:
            self._drop_oldest()

    def remove_blocks(self, worker: int, names: Iterable[int]) -> None:
        """Remove blocks from those that the worker has."""
        positions_by_edge: dict[int, int] = {}
        position = 0
        for name in names:
            number = self._edge_by_name.get(name)
            if number is not None:  # eviction starts at the tail
                position = self._edges[number].position_of(name, position - 1)
                positions_by_edge[number] = positions_by_edge.get(number, 0) | 1 << position
        for number, positions in positions_by_edge.items():
            self._edges[number].remove_blocks(worker, positions)
            self._trim_edge(number)

    def begin_sweep(self, workers: int) -> None:
        """Begin to remove all blocks of these workers; the sweep before must have ended."""
        self._removed_workers = workers
        self._unswept = list(self._edges)

    def sweep(self, num_edges: int) -> bool:
        """Clean at most `num_edges` edges of the removed workers; return True if all edges are clean."""
        for _ in range(min(num_edges, len(self._unswept))):
            number = self._unswept.pop()
            if number in self._edges:
                self._edges[number].remove_workers(self._removed_workers)
                self._trim_edge(number)
        return not self._unswept

    def runs_of(self, worker: int) -> Iterator[Sequence[int]]:
        """Yield the runs of consecutive blocks that the worker has."""
        for edge in self._edges.values():
            yield from edge.runs_of(worker)

    def _add_new_blocks(self, worker: int, names: Sequence[int], parent: int | None) -> int:
        """Add the leading blocks that are not in the tree; return their number."""
        if not self._edge_by_name.keys().isdisjoint(names):
            names = names[: next(i for i, n in enumerate(names) if n in self._edge_by_name)]
        appended = self._append_to_edge(worker, names, parent)
        step = MAX_EDGE_BLOCKS  # tails first: so they are older, and dropped before their heads
        for start in reversed(range(appended, len(names), step)):
            piece = names[start : start + step]
            self._add_edge(PrefixEdge(piece, worker), piece)
        return len(names)

    def _append_to_edge(self, worker: int, names: Sequence[int], parent: int | None) -> int:
        """Extend the edge that ends with `parent`, if only this worker has it; return by how many blocks."""
        number = None if parent is None else self._edge_by_name.get(parent)
        if number is None:
            return 0
        edge = self._edges[number]
        room = MAX_EDGE_BLOCKS - len(edge)
        if edge.full != worker or edge.partial or edge.names[-1] != parent or not room:
            return 0
        added = names[:room]
        edge.extend(added)
        self._edge_by_name.update(dict.fromkeys(added, number))
        return len(added)

    def _add_edge(self, edge: PrefixEdge, names: Sequence[int]) -> int:
        self._last_number += 1
        self._edges[self._last_number] = edge
        self._edge_by_name.update(dict.fromkeys(names, self._last_number))
        return self._last_number

    def _trim_edge(self, number: int) -> None:
        edge = self._edges[number]
        for name in edge.trim():
            self._edge_by_name.pop(name, None)
        if not edge.names:
            del self._edges[number]

    def _drop_oldest(self) -> None:
        passes, oldest = _NUM_PASSES, iter(list[int]())
        least = self._max_blocks - self._max_blocks // _DROPPED_SHARE
        while len(self._edge_by_name) > least:
            number = next(oldest, None)
            if number is None:
                oldest = iter(list(islice(self._edges, _DROPPED_EDGES)))
                continue
            edge = self._edges.pop(number)
            if edge.num_workers > 1 and passes:
                passes -= 1
                self._edges[number] = edge
                continue
            passes = _NUM_PASSES
            for name in edge.names:
                self._edge_by_name.pop(name, None)


def _follow_edge(
    edge: PrefixEdge,
    position: int,
    length: int,
    matching: int,
    depth: int,
    matches: list[tuple[int, int]],
) -> int:
    """Return those of `matching` that have the next `length` blocks too; append the others to `matches`."""
    staying, ended = matching & edge.full, 0
    for worker in edge.partial:
        if not worker & matching:
            continue
        run = edge.run_length(worker, position)
        if run >= length:
            staying |= worker
        elif depth + run:
            ended |= worker
            matches.append((worker, depth + run))
    if depth and (missing := matching & ~staying & ~ended):
        matches.append((missing, depth))
    return staying
