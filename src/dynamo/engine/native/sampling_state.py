"""What the sampler keeps for each sequence: its options and seed, token counts for penalties, its thinking budget.

A thinking budget limits the tokens of a thought: when it is used up, the mark that ends a thought is the next token. A
thought stands at the beginning of an answer: the prompt has opened it, or the answer does within its first tokens. An
opening mark later on belongs to the text.
"""

import enum
import math
import secrets
import struct

import torch
import xxhash

from dynamo.engine.native.sequence import Sequence
from dynamo.protocols import generate

MIN_TEMPERATURE = 1e-5  # a lower one is greedy
NUM_CANDIDATES = 64  # the likeliest tokens, among which top-k and top-p mostly cut
MAX_LEADING_TOKENS = 4  # mostly white space, that may stand before the opening mark of a thought
_PLACE = struct.Struct("<QQ")
_SEED_MASK = 2**64 - 1


class CandidatePool(enum.Enum):
    """The tokens that have to be looked at to draw one."""

    FEW = enum.auto()  # the NUM_CANDIDATES likeliest: top-k says so
    LIKELIEST = enum.auto()  # as many as top-p or a large top-k need
    ALL = enum.auto()


def choose_pool(options: generate.SamplingOptions) -> CandidatePool:
    """Return the smallest pool that these options allow."""
    if 0 < options.top_k <= NUM_CANDIDATES:
        return CandidatePool.FEW
    if options.top_k or options.top_p < 1.0:
        return CandidatePool.LIKELIEST
    return CandidatePool.ALL


class SamplingState:
    """The sampling options of one sequence and what follows from them, from its first token to its last."""

    def __init__(self, sequence: Sequence) -> None:
        options, stops = sequence.options, sequence.request.stop_conditions
        self.sequence, self.options = sequence, options
        self.seed = secrets.randbits(64) if options.seed is None else options.seed & _SEED_MASK
        self.is_greedy = options.temperature < MIN_TEMPERATURE
        self.pool = choose_pool(options)
        self.num_logprobs = sequence.request.output_options.logprobs
        self.min_tokens = stops.min_tokens
        self.may_end_at = math.inf if stops.ignore_eos else stops.min_tokens  # in output tokens
        has_grammar = sequence.grammar is not None  # then the grammar says when the answer ends
        eos = () if stops.ignore_eos or has_grammar else sequence.request.eos_token_ids
        self.ending_ids = [*eos, *stops.stop_token_ids]
        self.penalties = (
            options.repetition_penalty,
            options.frequency_penalty,
            options.presence_penalty,
        )
        self.has_penalties = self.penalties != (1.0, 0.0, 0.0)
        limit = sequence.request.thinking
        self.thinking_budget = ThinkingBudget(sequence, limit) if limit else None
        self.is_adjusted = (
            self.has_penalties
            or self.thinking_budget is not None
            or bool(options.logit_bias)
            or bool(self.min_tokens and self.ending_ids)
        )

    @property
    def uniform(self) -> float:
        """Return the number in [0, 1) that decides the next token."""
        sequence = self.sequence
        num_answered = len(sequence.token_ids) - sequence.answer_start
        place = _PLACE.pack(sequence.request.first_choice + sequence.index, num_answered)
        return (xxhash.xxh3_64_intdigest(place, self.seed) >> 32) / 2**32

    @property
    def may_end(self) -> bool:
        """Return whether the answer may end where its grammar allows it."""
        return self.sequence.num_output >= self.may_end_at

    @property
    def banned_ids(self) -> list[int]:
        """Return the tokens that may not come next."""
        return self.ending_ids if self.sequence.num_output < self.min_tokens else []


class TokenCounts:
    """How often each token of the vocabulary has come in a sequence, for penalties."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device) -> None:
        start = sequence.answer_start
        self._sequence, self._num_counted = sequence, start
        self.in_output = torch.zeros(vocab_size, device=device)
        self.is_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_seen[sequence.token_ids[:start]] = True

    def update(self) -> None:
        """Count the tokens that were added since the last call."""
        new = self._sequence.token_ids[self._num_counted :]
        self._num_counted += len(new)
        for token in new:
            self.in_output[token] += 1
            self.is_seen[token] = True


class ThinkingBudget:
    """Counts the tokens of a thought. A preempted sequence keeps its tokens, so nothing has to be restored."""

    def __init__(self, sequence: Sequence, limit: generate.ThinkingLimit) -> None:
        self._sequence = sequence
        self._limit = limit
        self._num_read = sequence.answer_start
        self._is_open = limit.is_open
        self._is_over = False
        self._num_thought = 0

    def forced_id(self) -> int | None:
        """Return the token that ends the thought if the budget is used up, else None."""
        for token in self._sequence.token_ids[self._num_read :]:
            self._num_read += 1
            if token in self._limit.close_ids:
                self._is_over = True
            elif self._is_open:
                self._num_thought += 1
            elif token in self._limit.open_ids:
                self._is_open = True
            elif self._num_read - self._sequence.answer_start > MAX_LEADING_TOKENS:
                self._is_over = True
        is_thinking = self._is_open and not self._is_over
        if is_thinking and self._num_thought >= self._limit.max_tokens:
            return self._limit.close_ids[0]
        return None
