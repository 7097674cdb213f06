"""A segment: consecutive blocks of one chain, and who holds which of them.

Blocks are known by sequence hashes, which name a block together with all before it. So two chains that agree at one
position agree at all before, and how far a prompt follows a segment is found by looking at a few positions only: the
cost of a match is in segments, not in blocks.

A *holder* is a bit. Most holders hold all of a segment: they are in the mask `full`. Others have an int with a
bit per position in `partial`; that is exact too when blocks vanish from the middle.
"""

from array import array
from collections.abc import Sequence

MAX_BLOCKS = 128  # longer ones gain nothing more


class Segment:
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

    def split(self, num_blocks: int) -> "Segment":
        """Keep the first blocks, give the others, with their holders."""
        rest = Segment(self.names[num_blocks:], self.full)
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
