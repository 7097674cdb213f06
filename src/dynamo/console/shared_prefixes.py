"""The prefixes of recent prompts, those first that many prompts share, found from the hashes of their blocks: no text.

A sequence hash names a block together with all before it. So two prompts share a prefix of n blocks if their n-th
hashes are equal, and the number of prompts with a hash never grows along a prompt: where it falls, a shared prefix
ends.
"""  # decider

from collections import Counter, deque
from collections.abc import Sequence

import msgspec

MAX_PROMPTS = 256
MAX_BLOCKS = 128  # of a prompt; longer prefixes are cut there


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix of recent prompts of one model."""

    model: str
    hashes: tuple[int, ...]  # of its blocks
    num_prompts: int  # of the recent prompts, those that begin so


class RecentPrompts:
    """The hashes of the last prompts."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=MAX_PROMPTS)

    def add(self, model: str, hashes: Sequence[int]) -> None:
        """Add a prompt by the sequence hashes of its full blocks."""
        if hashes:
            self._prompts.append((model, tuple(hashes[:MAX_BLOCKS])))

    def find_prefixes(self, limit: int = 20) -> Sequence[SharedPrefix]:
        """Return whole prompts and what they share, first what saves most, then what is longest."""
        counts = Counter((model, block) for model, hashes in self._prompts for block in hashes)
        prefixes: dict[tuple[str, int], SharedPrefix] = {}
        for model, hashes in self._prompts:
            for end, block in enumerate(hashes, 1):
                is_end = end == len(hashes) or counts[model, hashes[end]] < counts[model, block]
                if is_end and (model, block) not in prefixes:
                    prefixes[model, block] = SharedPrefix(
                        model=model, hashes=hashes[:end], num_prompts=counts[model, block]
                    )
        saved = sorted(
            prefixes.values(),
            key=lambda prefix: (
                -(prefix.num_prompts - 1) * len(prefix.hashes),
                -len(prefix.hashes),
            ),
        )
        return saved[:limit]
