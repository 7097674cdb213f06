"""The simulated engine's memory: real blocks of a real pool, named by their content; only the bytes are missing.

The rules are those of the native engine: all blocks of a prompt at admission, one more whenever an answer has filled
its last, and at least the last token is computed even if its block is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.engine.mock.answers import Answer, Cycle
from dynamo.kvbm import pool
from dynamo.protocols import blocks, generate, kv_transfer


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One choice of one request."""

    request: generate.Request
    index: int
    answer: Answer
    outputs: Sequence[generate.Output]  # one for each token of the cycle
    leader: "Choice | None"  # the choice that tells what was cached; None: this one
    prompt_len: int
    seed: int = blocks.SEED  # of the names of its blocks
    num_output: int = 0
    num_computed: int = 0
    num_cached: int | None = None
    event: int = 0  # the number of output tokens at which to look closely
    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0
    remote: kv_transfer.RemoteBlocks | None = (
        None  # its prompt at another engine, until the import begins
    )
    is_importing: bool = False  # a copy writes to its blocks: they must not be freed
    is_aborted: bool = False  # during the import
    local_hashes: list[int] = field(default_factory=list)
    sequence_hashes: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt, and answer so far."""
        return self.prompt_len + self.num_output


class Memory:
    """Who holds which blocks."""

    def __init__(
        self,
        cycle: Cycle,
        *,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        watermark: float = 0.01,
    ) -> None:
        """`watermark`: the share of the blocks that admission leaves free while others run."""
        self.pool = pool.BlockPool(num_blocks)
        self.prefix_caching = prefix_caching
        self.block_size = block_size
        self._cycle = cycle
        self._names: memoryview | None = None
        self._is_read = False
        self._watermark = max(1, round(num_blocks * watermark))

    def lie_in(self, names: memoryview, *, is_read: bool) -> None:
        """Blocks have room for their names: 8 bytes a token, the first is used. They are written if somebody reads."""
        self._names, self._is_read = names, is_read

    def is_as_named(self, choice: Choice) -> bool:
        """Do its full blocks that were not known before hold what their names say, as far as they hold anything?"""
        if self._names is None:
            return True
        new = range(choice.num_committed, min(len(choice.sequence_hashes), len(choice.block_ids)))
        held = {i: self._names[choice.block_ids[i] * self.block_size] for i in new}
        return all(name in (0, choice.sequence_hashes[i]) for i, name in held.items())

    def admit(self, choice: Choice, *, is_alone: bool, max_new: int | None = None) -> bool:
        """Blocks for all its tokens; False if there are too few, or more than `max_new` tokens to compute."""
        self._hash(choice)
        num_usable = (choice.num_tokens - 1) // self.block_size
        found = self.pool.match_prefix(choice.sequence_hashes[:num_usable])
        num_fresh = -(-choice.num_tokens // self.block_size) - len(found)
        room = self.pool.num_free - (0 if is_alone else self._watermark)
        num_new = choice.num_tokens - len(found) * self.block_size
        fits = num_fresh <= room and (max_new is None or num_new <= max_new)
        fresh = self.pool.allocate(num_fresh) if fits else None
        if fresh is None:
            self.pool.release(found)
            return False
        choice.block_ids = found + fresh
        choice.num_committed = len(found)
        choice.num_computed = len(found) * self.block_size
        return True

    def grow(self, choice: Choice) -> bool:
        """One more block; False if none is left."""
        fresh = self.pool.allocate(1)
        choice.block_ids += fresh or ()
        return fresh is not None

    def num_slots(self, choice: Choice) -> int:
        """Tokens that its blocks can hold."""
        return len(choice.block_ids) * self.block_size

    def commit(self, choice: Choice, num_computed: int) -> None:
        """Let the blocks be found that these tokens fill."""
        num_full = num_computed // self.block_size
        if not self.prefix_caching or num_full == choice.num_committed:
            return
        self._hash(choice)
        new = range(choice.num_committed, num_full)
        self.pool.commit_chain(choice.block_ids, choice.sequence_hashes, choice.local_hashes, new)
        if self._names is not None and self._is_read:
            for i in new:
                self._names[choice.block_ids[i] * self.block_size] = choice.sequence_hashes[i]
        choice.num_committed = num_full

    def release(self, choice: Choice) -> None:
        """Take all its blocks."""
        self.pool.release(choice.block_ids)
        choice.block_ids = []

    def _hash(self, choice: Choice) -> None:
        """Name the full blocks that were added to it."""
        if not self.prefix_caching:
            return
        names = choice.sequence_hashes
        start = len(names) * self.block_size
        num_said = max(0, start - choice.prompt_len)  # these are named already
        added = choice.request.token_ids[start * blocks.TOKEN_BYTES :] + self._cycle.packed(
            choice.answer.start + num_said, choice.num_output - num_said
        )
        local = blocks.local_hashes(added, self.block_size, choice.seed)
        choice.local_hashes += local
        names += blocks.sequence_hashes(local, names[-1] if names else None)
