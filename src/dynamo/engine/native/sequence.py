"""Sequences: one choice of one request inside the engine, its block table, and the chunk of it that a step computes.

The scheduler owns a sequence's blocks and progress; the runner reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dynamo.base import errors
from dynamo.kvbm import block_tables, tier_jobs
from dynamo.protocols import blocks, generate


class Guide(Protocol):
    """The state of one sequence in its grammar (`guided_decoding.GrammarGuide`)."""

    num_tokens: int  # of the vocabulary, perhaps more than the model has
    error: errors.DynamoError | None  # why it cannot be followed any more
    begins_text: bool  # the next token begins the answer, or a string within it

    # what remains of the words that the answer may be spelling, by the log of their share in what was drawn last
    spellings: Mapping[tuple[int, ...], float]
    candidates: Mapping[tuple[int, ...], float]  # the same of the token that is drawn next

    def spell(self, token_id: int) -> tuple[int, ...]:
        """Return the tokens of a token's text without its blank; none if it has none, or they may not come."""

    def fill(self, bits: memoryview, *, may_end: bool) -> None:
        """Set the bit of each token that may come next, of end tokens only with `may_end`."""

    def advance(self, token_id: int) -> None:
        """Follow the grammar by the token that was drawn."""


class Grammar(Protocol):
    """A compiled grammar that the output of a sequence must follow."""

    def begin(self) -> Guide:
        """Return a guide for one answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence(block_tables.PagedSequence):
    """One choice of one request; only the engine's thread uses it.

    `token_ids` is the prompt and then the output. The first `num_computed` of them have their keys and values in the
    cache, in the blocks `block_ids` (position p lies in block_ids[p // block_size], slot p % block_size).
    """

    token_ids: list[int]
    grammar: Grammar | None = None
    rank: tuple[int, int, int] = (0, 0, 0)  # the lowest is served first, and preempted last

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Return the number of tokens generated so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def answer_start(self) -> int:
        """Return the position where the answer begins: within the prompt if another worker has begun it, else after."""
        return self.prompt_len - self.request.num_resumed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether the whole prompt must be computed for its logprobs: by the first choice, before its answer."""
        return (
            self.request.output_options.prompt_logprobs is not None
            and self.index == 0
            and len(self.token_ids) == self.prompt_len
        )

    @property
    def options(self) -> generate.SamplingOptions:
        """Return the request's sampling options."""
        return self.request.sampling_options


class Paging(block_tables.BlockTables[Sequence]):
    """The block tables of sequences. A prefill that has begun never waits for memory; only decoding asks for more."""

    def end_load(
        self, sequence: Sequence, copy: tier_jobs.TierCopy, failed: frozenset[int]
    ) -> None:
        """Record the blocks that were loaded: those before the first that failed."""
        num_blocks = min(failed, default=len(copy.blocks))
        sequence.num_computed += num_blocks * self.block_size
        self.commit(sequence, sequence.num_computed)

    def grow(self, sequence: Sequence) -> bool:
        """Ensure a block for the last token of a sequence; return False if none is free."""
        has_room = len(sequence.token_ids) <= len(sequence.block_ids) * self.block_size
        return has_room or self.add_block(sequence)

    def _may_load(self, sequence: Sequence) -> bool:
        return self.prefix_caching and not sequence.wants_prompt_logprobs

    def _hash(self, sequence: Sequence) -> None:
        hashes = sequence.sequence_hashes
        added = blocks.pack(sequence.token_ids[len(hashes) * self.block_size :])
        local = blocks.local_hashes(added, self.block_size, sequence.request.hash_seed)
        sequence.local_hashes += local
        hashes += blocks.sequence_hashes(local, hashes[-1] if hashes else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of a sequence that one step computes: positions start .. start + num_tokens - 1.

    All blocks that it writes to are already in `sequence.block_ids`. If `samples`, the chunk ends with the last
    token that the sequence has, and the step draws the next one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The token drawn for a chunk that samples."""

    token_id: int
    logprobs: generate.TokenLogprobs | None = None
    # with the first token, if requested
    prompt_logprobs: tuple[generate.TokenLogprobs, ...] | None = None
