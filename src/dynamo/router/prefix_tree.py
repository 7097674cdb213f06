"""A segment: consecutive blocks of one chain, and who holds which of them.

Blocks are known by sequence hashes, which name a block together with all before it. So two chains that agree at one
position agree at all before, and how far a prompt follows a segment is found by looking at a few positions only: the
cost of a match is in segments, not in blocks.

A *holder* is a bit. Most holders hold all of a segment: they are in the mask `full`. Others have an int with a
bit per position in `partial`; that is exact too when blocks vanish from the middle.

All chains of blocks that somebody holds, as segments: the store under the prefix index.

One dictionary leads from a block's name to its segment's number. Its values are ints, one object per segment, so
the garbage collector never walks it: a million blocks cost it nothing. What nobody holds is not kept, but for holes:
a block inside of a segment keeps its place until the blocks behind it go too, so that it comes back where it was.

**Bounded.** Beyond `max_blocks` the oldest segments are forgotten, tails before heads; one that several hold (a system
prompt, say) is passed over a few times. A block that was forgotten is as if nobody had ever told of it.

**Nothing stalls.** `forget` only notes who is gone; `sweep` then cleans a bounded number of segments at a time.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

MAX_BLOCKS = 128  # longer ones gain nothing more


class PrefixEdge:
    """One to `MAX_BLOCKS` blocks; each holder is in `full` or in `partial`, never in both."""

    __slots__ = ("full", "names", "partial")

    def __init__(self, names: Sequence[int], full: int) -> None:
        self.names = array("Q", names)
        self.full = full
        self.partial: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_holders(self) -> int:
        """Who holds at least one block of it."""
        return self.full.bit_count() + len(self.partial)

    def position_of(self, name: int, guess: int) -> int:
        """Where this block of ours is; probably at `guess`."""
        if 0 <= guess < len(self.names) and self.names[guess] == name:
            return guess
        return self.names.index(name)

    def match(self, position: int, names: Sequence[int], start: int) -> int:
        """How many blocks `names[start:]` shares with us from `position` on, where the first is known to be shared."""
        own = self.names
        most = min(len(own) - position, len(names) - start)
        if own[position + most - 1] == names[start + most - 1]:
            return most
        shared, differs = 1, most
        while differs - shared > 1:
            middle = (shared + differs) // 2
            if own[position + middle - 1] == names[start + middle - 1]:
                shared = middle
            else:
                differs = middle
        return shared

    def extend(self, names: Sequence[int]) -> None:
        """More blocks, which all holders hold; nobody may hold a part only."""
        self.names.extend(array("Q", names))

    def hold(self, holder: int, position: int, num_blocks: int) -> None:
        """`holder` has these blocks now."""
        if not holder & self.full:
            added = ((1 << num_blocks) - 1) << position
            self._set(holder, self.partial.get(holder, 0) | added)

    def drop(self, holder: int, positions: int) -> None:
        """`holder` has the blocks at these positions (a bit each) no more."""
        held = self._all if holder & self.full else self.partial.get(holder, 0)
        self.full &= ~holder
        self._set(holder, held & ~positions)

    def forget(self, holders: int) -> None:
        """These have nothing any more."""
        self.full &= ~holders
        for holder in [holder for holder in self.partial if holder & holders]:
            del self.partial[holder]

    def split(self, num_blocks: int) -> "PrefixEdge":
        """Keep the first blocks, give the others, with their holders."""
        rest = PrefixEdge(self.names[num_blocks:], self.full)
        held_by, self.partial = self.partial, {}
        del self.names[num_blocks:]
        for holder, positions in held_by.items():
            self._set(holder, positions & self._all)
            rest._set(holder, positions >> num_blocks)
        return rest

    def trim(self) -> "array[int]":
        """Let go of the blocks at the end that nobody holds; gives them."""
        if self.full:
            return array("Q")
        held = 0
        for positions in self.partial.values():
            held |= positions
        gone = self.names[held.bit_length() :]
        if gone:
            del self.names[held.bit_length() :]
            for holder, positions in list(self.partial.items()):
                self._set(holder, positions)  # what was a part may now be all
        return gone

    def run_of(self, holder: int, position: int) -> int:
        """How many blocks from `position` on this holder of a part has without a break."""
        missing = ~(self.partial.get(holder, 0) >> position)
        return (missing & -missing).bit_length() - 1

    def runs_held_by(self, holder: int) -> list[Sequence[int]]:
        """The unbroken stretches that this holder has."""
        if holder & self.full:
            return [self.names]
        runs: list[Sequence[int]] = []
        positions, at = self.partial.get(holder, 0), 0
        while positions >> at:
            length = self.run_of(holder, at)
            if length:
                runs.append(self.names[at : at + length])
            at += length + 1
        return runs

    @property
    def _all(self) -> int:
        return (1 << len(self.names)) - 1

    def _set(self, holder: int, positions: int) -> None:
        """Put the holder where it belongs: all, a part, or nothing."""
        self.partial.pop(holder, None)
        if positions and positions == self._all:
            self.full |= holder
        elif positions:
            self.partial[holder] = positions


_NUM_PASSES = 8  # how many shared segments are passed over to find one to forget


class PrefixTree:
    """Who holds what; holders are bits. Names are sequence hashes (`protocols.blocks`)."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._segment_by_name: dict[int, int] = {}
        self._segments: dict[int, PrefixEdge] = {}  # oldest first
        self._num_made = 0
        self._gone = 0  # holders that are being swept
        self._unswept: list[int] = []

    def __len__(self) -> int:
        """Blocks, holes among them."""
        return len(self._segment_by_name)

    def runs(self, names: Sequence[int], among: int) -> list[tuple[int, int]]:
        """(holders, how many leading blocks of `names` they have), for those of `among` that have any."""
        found: list[tuple[int, int]] = []
        depth, alive, total = 0, among, len(names)
        while alive and depth < total:
            number = self._segment_by_name.get(names[depth])
            if number is None:
                break
            segment = self._segments[number]
            position = segment.position_of(names[depth], 0)
            length = segment.match(position, names, depth)
            alive = _go_on(segment, position, length, alive, depth, found)
            depth += length
        if alive and depth:
            found.append((alive, depth))
        return found

    def hold(self, holder: int, names: Sequence[int], parent: int | None = None) -> None:
        """`holder` has these consecutive blocks, the first of which follows `parent`."""
        done = 0
        while done < len(names):
            number = self._segment_by_name.get(names[done])
            if number is None:
                done += self._hold_new(holder, names[done:], names[done - 1] if done else parent)
            else:
                done += self._hold_known(holder, number, names, done)
        if len(self._segment_by_name) > self._max_blocks:
            self._prune()

    def drop(self, holder: int, names: Iterable[int]) -> None:
        """`holder` has these blocks no more."""
        positions_by_segment: dict[int, int] = {}
        position = 0
        for name in names:
            number = self._segment_by_name.get(name)
            if number is not None:  # eviction goes from the tail
                position = self._segments[number].position_of(name, position - 1)
                known = positions_by_segment.get(number, 0)
                positions_by_segment[number] = known | 1 << position
        for number, positions in positions_by_segment.items():
            self._segments[number].drop(holder, positions)
            self._trim(number)

    def forget(self, holders: int) -> None:
        """Begin to clean up after holders that are gone; only when no other sweep is on."""
        self._gone = holders
        self._unswept = list(self._segments)

    def sweep(self, num_segments: int) -> bool:
        """Clean some segments of who is gone; says whether all are clean."""
        for _ in range(min(num_segments, len(self._unswept))):
            number = self._unswept.pop()
            if number in self._segments:
                self._segments[number].forget(self._gone)
                self._trim(number)
        return not self._unswept

    def held_by(self, holder: int) -> Iterator[Sequence[int]]:
        """The stretches of consecutive blocks that `holder` has."""
        for segment in self._segments.values():
            yield from segment.runs_held_by(holder)

    def _hold_known(self, holder: int, number: int, names: Sequence[int], start: int) -> int:
        """Hold what a segment has of `names[start:]`; gives how many blocks that is."""
        segment = self._segments[number]
        position = segment.position_of(names[start], 0)
        length = segment.match(position, names, start)
        is_new = not holder & segment.full and holder not in segment.partial
        if is_new and position == 0 and length < len(segment):
            self._split(number, length)  # where chains part, so that most holders hold all
        segment.hold(holder, position, length)
        return length

    def _hold_new(self, holder: int, names: Sequence[int], parent: int | None) -> int:
        """Hold those leading blocks that nobody knows; gives how many they are."""
        if not self._segment_by_name.keys().isdisjoint(names):
            names = names[: next(i for i, n in enumerate(names) if n in self._segment_by_name)]
        appended = self._append(holder, names, parent)
        step = MAX_BLOCKS  # tails first, so that they are older and go before their heads
        for start in reversed(range(appended, len(names), step)):
            piece = names[start : start + step]
            self._add(PrefixEdge(piece, holder), piece)
        return len(names)

    def _append(self, holder: int, names: Sequence[int], parent: int | None) -> int:
        """Continue the segment that ends with `parent`, if the holder alone has it; gives by how many blocks."""
        number = None if parent is None else self._segment_by_name.get(parent)
        if number is None:
            return 0
        segment = self._segments[number]
        room = MAX_BLOCKS - len(segment)
        if segment.full != holder or segment.partial or segment.names[-1] != parent or not room:
            return 0
        added = names[:room]
        segment.extend(added)
        self._segment_by_name.update(dict.fromkeys(added, number))
        return len(added)

    def _add(self, segment: PrefixEdge, names: Sequence[int]) -> int:
        self._num_made += 1
        self._segments[self._num_made] = segment
        self._segment_by_name.update(dict.fromkeys(names, self._num_made))
        return self._num_made

    def _split(self, number: int, num_blocks: int) -> None:
        rest = self._segments[number].split(num_blocks)
        added = self._add(rest, rest.names)
        if self._unswept:
            self._unswept.append(added)
        self._trim(added)

    def _trim(self, number: int) -> None:
        segment = self._segments[number]
        for name in segment.trim():
            self._segment_by_name.pop(name, None)
        if not segment.names:
            del self._segments[number]

    def _prune(self) -> None:
        passes = _NUM_PASSES
        while len(self._segment_by_name) > self._max_blocks:
            number = next(iter(self._segments))
            segment = self._segments.pop(number)
            if segment.num_holders > 1 and passes:
                passes -= 1
                self._segments[number] = segment
                continue
            passes = _NUM_PASSES
            for name in segment.names:
                self._segment_by_name.pop(name, None)


def _go_on(
    segment: PrefixEdge,
    position: int,
    length: int,
    alive: int,
    depth: int,
    found: list[tuple[int, int]],
) -> int:
    """Who of `alive` holds the next `length` blocks as well; those whose run ends go to `found`."""
    staying, ended = alive & segment.full, 0
    for holder in segment.partial:
        if not holder & alive:
            continue
        run = segment.run_of(holder, position)
        if run >= length:
            staying |= holder
        elif depth + run:
            ended |= holder
            found.append((holder, depth + run))
    if depth and (missing := alive & ~staying & ~ended):
        found.append((missing, depth))
    return staying
