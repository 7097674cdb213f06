"""The sampler: from logits to tokens.

Log probabilities are reported from the model's own logits, as OpenAI's users expect; tokens are drawn from adjusted
logits, in this order:

    allowed ids → banned ids (min_tokens) → logit bias → penalties → temperature → min-p → top-k → top-p

A draw takes one number u in [0, 1) per token and walks the distribution until its sum exceeds u: of the whole
vocabulary in order of id, or of the candidates in order of probability where top-k or top-p cut. u is a hash of (seed,
choice, place in the answer), so a seed gives the same answer whatever shares the batch, and a preempted sequence has no
generator to restore. Sums are formed in order, so more candidates for another row change nothing.

A thinking budget limits the tokens of a thought: when it is used up, the mark that ends a thought is the next token. A
thought stands at the beginning of an answer: the prompt has opened it, or the answer does within its first tokens. An
opening mark later on belongs to the text.
"""

import bisect
import enum
import itertools
import math
import secrets
import struct
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Row

import torch
import xxhash

from dynamo.base import errors
from dynamo.engine.native.sequence import Guide, Sampled, Sequence
from dynamo.protocols import generate

MIN_TEMPERATURE = 1e-5  # a lower one is greedy
NUM_CANDIDATES = 64  # the likeliest tokens, among which top-k and top-p mostly cut
MAX_LEADING_TOKENS = 4  # mostly white space, that may stand before the opening mark of a thought
_PLACE = struct.Struct("<QQ")
_SEED_MASK = 2**64 - 1
_BIT_VALUES = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)


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
        self.biases: tuple[torch.Tensor, torch.Tensor] | None = None  # made once: perhaps of all
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
        bans = self.min_tokens and self.ending_ids
        adjustments = (bans, limit, options.logit_bias, options.allowed_token_ids)
        self.is_adjusted = self.has_penalties or any(adjustments)

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
        is_used_up = is_thinking and self._num_thought >= self._limit.max_tokens
        return self._limit.close_ids[0] if is_used_up else None


# From logits [rows, vocabulary] to token ids.
DrawFunction = Callable[[torch.Tensor, list[SamplingState]], list[int]]


class Sampler:
    """Draws the next token of each sequence of a batch, and keeps the state of each sequence."""

    def __init__(self) -> None:
        self._states: dict[Sequence, SamplingState] = {}
        self._counts: dict[Sequence, TokenCounts] = {}
        self._guides: dict[Sequence, Guide] = {}  # of those that follow a grammar

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended."""
        self._states.pop(sequence, None)
        self._counts.pop(sequence, None)
        self._guides.pop(sequence, None)

    def sample(
        self, logits: torch.Tensor, sequences: Row[Sequence]
    ) -> list[Sampled | errors.DynamoError]:
        """Draw one token for each row of logits [sequences, vocabulary], or return why there is none.

        If the rows cannot be drawn together, each is drawn alone, so that a sequence with impossible options fails
        alone.
        """
        try:
            return self._sample(logits, sequences)
        except Exception as error:  # noqa: BLE001 - of one of the sequences
            if len(sequences) == 1:
                return [errors.EngineFailed(f"no token can be drawn: {error!r}")]
            rows = zip(logits.split(1), sequences, strict=True)
            return [result for row, sequence in rows for result in self.sample(row, [sequence])]

    def _sample(
        self, logits: torch.Tensor, sequences: Row[Sequence]
    ) -> list[Sampled | errors.DynamoError]:
        states = [self._state(sequence) for sequence in sequences]
        with torch.inference_mode():
            adjusted = self.adjust(logits, states)
            guide_by_row = enumerate(map(self._guides.get, sequences))
            guides = {i: guide for i, guide in guide_by_row if guide is not None}
            if guides:
                may_end = [states[i].may_end for i in guides]
                adjusted = apply_guides(adjusted, guides, may_end)
            for i, state in enumerate(states):
                budget = state.thinking_budget
                forced = None if budget is None else budget.forced_id()
                # A grammar bans the mark within a character of several tokens: it comes after that.
                if forced is not None and (i not in guides or adjusted[i, forced] > -math.inf):
                    adjusted[i] = -torch.inf
                    adjusted[i, forced] = 0.0
            peaks = adjusted.amax(-1).tolist()
            functions = [_take_likeliest if state.is_greedy else draw for state in states]
            token_ids = _draw_grouped(adjusted, states, functions)
            logprobs = _logprobs(logits, token_ids, states)
        for i, guide in guides.items():
            guide.advance(token_ids[i])
        return [
            Sampled(token_id=token_id, logprobs=logprobs.get(i))
            if math.isfinite(peak)
            else _no_token(peak, states[i], guides.get(i))
            for i, (token_id, peak) in enumerate(zip(token_ids, peaks, strict=True))
        ]

    def adjust(self, logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
        """Return logits with bans, biases and penalties; the same tensor if no row has any."""
        changed = [i for i, state in enumerate(states) if state.is_adjusted]
        if not changed:
            return logits
        logits = logits.clone()
        for i in changed:
            _ban_and_bias(logits[i], states[i])
        if penalized := [i for i in changed if states[i].has_penalties]:
            rows = torch.tensor(penalized, device=logits.device)
            logits[rows] = self._penalize(logits[rows], [states[i] for i in penalized])
        return logits

    def _state(self, sequence: Sequence) -> SamplingState:
        state = self._states.get(sequence)
        if state is None:
            state = SamplingState(sequence)
            if sequence.grammar is not None:
                guide = sequence.grammar.begin()
                for token_id in sequence.token_ids[sequence.answer_start :]:
                    guide.advance(token_id)  # of a resumed answer
                self._guides[sequence] = guide
            self._states[sequence] = state
        return state

    def _penalize(self, logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
        counts = [self._count(state.sequence, logits) for state in states]
        in_output = torch.stack([count.in_output for count in counts])
        is_seen = torch.stack([count.is_seen for count in counts])
        repetition, frequency, presence = _columns([state.penalties for state in states], logits)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_seen, repeated, logits)
        return logits - frequency * in_output - presence * (in_output > 0)

    def _count(self, sequence: Sequence, logits: torch.Tensor) -> TokenCounts:
        count = self._counts.get(sequence)
        if count is None:
            count = TokenCounts(sequence, logits.shape[1], logits.device)
            self._counts[sequence] = count
        count.update()
        return count


def draw(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    """Draw a token for each row at random, by temperature, min-p, top-k and top-p."""
    return _draw_grouped(logits, states, [_DRAW_BY_POOL[state.pool] for state in states])


def _draw_grouped(
    logits: torch.Tensor, states: list[SamplingState], functions: Row[DrawFunction]
) -> list[int]:
    """Draw each row by its function; rows with the same function are drawn together."""
    token_ids = [0] * len(states)
    for function in dict.fromkeys(functions):
        rows = [i for i, chosen in enumerate(functions) if chosen is function]
        drawn = function(_rows(logits, rows), [states[i] for i in rows])
        for i, token_id in zip(rows, drawn, strict=True):
            token_ids[i] = token_id
    return token_ids


def _take_likeliest(logits: torch.Tensor, _states: list[SamplingState]) -> list[int]:
    return list(logits.argmax(-1).tolist())


def _draw_from_few(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    width = min(max(state.options.top_k for state in states), logits.shape[1])
    best, token_ids = logits.topk(width)
    ranks = map(rank_drawn, best.tolist(), states)
    return [row[rank] for row, rank in zip(token_ids.tolist(), ranks, strict=True)]


def rank_drawn(logits: list[float], state: SamplingState) -> int:
    """Return the rank of the drawn token among logits in falling order. For so few, tensors would be slower."""
    options, peak = state.options, logits[0]
    scaled = [(logit - peak) / options.temperature for logit in logits[: options.top_k]]
    if options.min_p > 0:
        floor = math.log(options.min_p)
        scaled = [x for x in scaled if x >= floor] or scaled[:1]
    sums = list(itertools.accumulate(map(math.exp, scaled)))
    last = min(bisect.bisect_left(sums, options.top_p * sums[-1]), len(sums) - 1)
    return bisect.bisect_right(sums, state.uniform * sums[last], hi=last)


def _draw_from_likeliest(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    return _draw_from_best(_probabilities(logits, states), states, NUM_CANDIDATES)


def _draw_from_all(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    sums = _probabilities(logits, states).cumsum(-1, dtype=torch.float64)
    (uniform,) = _columns([(state.uniform,) for state in states], sums)
    return list(_first_beyond(sums, uniform * sums[:, -1:]).squeeze(1).tolist())


def _probabilities(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """Return the probabilities [rows, vocabulary] after temperature and min-p."""
    options = [state.options for state in states]
    temperature, min_p = _columns([(o.temperature, o.min_p) for o in options], logits)
    logits = logits / temperature
    if any(o.min_p > 0 for o in options):
        floor = logits.amax(-1, keepdim=True) + min_p.log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits.softmax(-1)


def _draw_from_best(
    probabilities: torch.Tensor, states: list[SamplingState], width: int
) -> list[int]:
    """Draw among the `width` likeliest; a row that needs more for its top-k or top-p is drawn among 8 times as many."""
    size = probabilities.shape[1]
    best, token_ids = probabilities.topk(min(width, size))
    chosen = _draw_among(best, token_ids, states, size=size)
    short = _rows_that_need_more(best, states, size)
    if short:
        wider = _draw_from_best(_rows(probabilities, short), [states[i] for i in short], width * 8)
        for i, token_id in zip(short, wider, strict=True):
            chosen[i] = token_id
    return chosen


def _draw_among(
    best: torch.Tensor, token_ids: torch.Tensor, states: list[SamplingState], *, size: int
) -> list[int]:
    """Draw by top-k and top-p from probabilities in falling order and their token ids, both [rows, width]."""
    sums = best.cumsum(-1, dtype=torch.float64)
    columns = [
        (min(state.options.top_k or size, size), state.options.top_p, state.uniform)
        for state in states
    ]
    top_k, top_p, uniform = _columns(columns, sums)
    ranks = torch.arange(sums.shape[1], device=sums.device)
    last = (top_k.long() - 1).clamp(max=sums.shape[1] - 1)
    total = torch.where(top_k < size, sums.gather(1, last), 1.0)
    is_kept = (ranks < top_k) & ((sums - best < top_p * total) | (ranks == 0))
    num_kept = is_kept.sum(-1, keepdim=True)
    rank = _first_beyond(sums, uniform * sums.gather(1, num_kept - 1))
    return list(token_ids.gather(1, rank).squeeze(1).tolist())


def _rows_that_need_more(best: torch.Tensor, states: list[SamplingState], size: int) -> list[int]:
    """Return the rows that need more than these candidates for their top-k or top-p."""
    width = best.shape[1]
    sums = best.cumsum(-1, dtype=torch.float64)[:, -1].tolist()
    rows = []
    for i, (state, sum_of_all) in enumerate(zip(states, sums, strict=True)):
        top_k = min(state.options.top_k or size, size)
        if width < top_k and (top_k < size or sum_of_all < state.options.top_p):
            rows.append(i)
    return rows


_DRAW_BY_POOL: dict[CandidatePool, DrawFunction] = {
    CandidatePool.FEW: _draw_from_few,
    CandidatePool.LIKELIEST: _draw_from_likeliest,
    CandidatePool.ALL: _draw_from_all,
}


def _first_beyond(sums: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return where each row's running sum first exceeds its target; a valid index even if the sums are NaN."""
    return torch.searchsorted(sums, targets, right=True).clamp(max=sums.shape[1] - 1)


def _ban_and_bias(logits: torch.Tensor, state: SamplingState) -> None:
    """Change the logits of one row in place."""
    if bias := state.options.logit_bias:
        if state.biases is None:
            token_ids = torch.tensor(list(bias), device=logits.device)
            state.biases = token_ids, logits.new_tensor(list(bias.values()))
        logits.index_add_(0, *state.biases)
    if allowed := list(state.options.allowed_token_ids):
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    if banned := state.banned_ids:
        logits[banned] = -torch.inf


def _logprobs(
    logits: torch.Tensor, token_ids: list[int], states: list[SamplingState]
) -> dict[int, generate.TokenLogprobs]:
    """Return the logprobs of the drawn tokens, by row, for the requests that asked for them."""
    num_by_row = {i: d.num_logprobs for i, d in enumerate(states) if d.num_logprobs is not None}
    if not num_by_row:
        return {}
    rows = list(num_by_row)
    logprobs = report_logprobs(
        _rows(logits, rows), [token_ids[i] for i in rows], list(num_by_row.values())
    )
    return dict(zip(rows, logprobs, strict=True))


def report_logprobs(
    logits: torch.Tensor, token_ids: Row[int], nums: Row[int]
) -> list[generate.TokenLogprobs]:
    """Return for each row of logits [rows, vocabulary] the logprob of this token, and of the `nums` likeliest."""
    logprobs = logits.log_softmax(-1)
    chosen_ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, chosen_ids).squeeze(1).tolist()
    top = logprobs.topk(min(max(nums), logits.shape[1]))
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        generate.TokenLogprobs(logprob, tuple(map(generate.TopLogprob, ids[:num], values[:num])))
        for num, logprob, (ids, values) in zip(nums, chosen, alternatives, strict=True)
    ]


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return these rows in order; no copy if it is all of them."""
    if len(rows) == len(values):
        return values
    return values[torch.tensor(rows, device=values.device)]


def _columns(rows: Row[tuple[float, ...]], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return one [rows, 1] tensor for each place in the tuples."""
    return tuple(like.new_tensor(rows).unsqueeze(1).unbind(-1))


def apply_guides(
    logits: torch.Tensor, guides: Mapping[int, Guide], may_end: Row[bool]
) -> torch.Tensor:
    """Return a copy of logits [rows, vocabulary] with minus infinity for tokens that a row's guide does not allow.

    Where a text begins, tokens that are banned for their leading blank are spelled without it.
    """
    size = logits.shape[1]
    words = -(-max(guide.num_tokens for guide in guides.values()) // 32)  # of 32 bits
    bits = torch.zeros((len(guides), words * 4), dtype=torch.uint8)
    for row, guide, may in zip(bits, guides.values(), may_end, strict=True):
        guide.fill(memoryview(row.numpy()), may_end=may)
    bits = bits.to(logits.device).unsqueeze(-1)
    is_banned = ((bits & _BIT_VALUES.to(logits.device)) == 0).flatten(1)[:, :size]
    if len(guides) == len(logits):
        masked = logits.masked_fill(is_banned, -torch.inf)
    else:
        rows = torch.tensor(list(guides), device=logits.device)
        allowed = logits[rows].masked_fill_(is_banned, -torch.inf)
        masked = logits.index_copy(0, rows, allowed)
    for (i, guide), banned in zip(guides.items(), is_banned, strict=True):
        if (guide.begins_text or guide.spellings) and logits[i].amax() > -math.inf:
            _heal(masked[i], logits[i], banned, guide)
    return masked


def _heal(
    masked: torch.Tensor, logits: torch.Tensor, is_banned: torch.Tensor, guide: Guide
) -> None:
    """Spell out " word" where a text may begin with "word" only: change a row [vocabulary], `masked`, in place.

    Models begin nearly every word with a blank. Without this, the token that happens to be next best begins the text,
    often the middle of the same word. The first token of "word" gets the weight of " word", and after it the next one
    gets what of its own weight came from there: so the model is not left with a first letter that it never chose.
    """
    total = logits.logsumexp(-1)
    masked += math.log(max(1e-9, 1.0 - sum(map(math.exp, guide.spellings.values())))) - total
    spellings = dict(guide.spellings)
    if guide.begins_text:
        best = logits.topk(min(NUM_CANDIDATES, len(logits)))
        found = best.indices.tolist(), (best.values - total).tolist(), is_banned[best.indices]
        for token_id, logprob, is_candidate in zip(*found, strict=True):
            if is_candidate and (ids := guide.spell(token_id)):
                spellings[ids] = logprob
    spellings = {ids: logprob for ids, logprob in spellings.items() if masked[ids[0]] > -math.inf}
    for ids, logprob in spellings.items():
        masked[ids[0]] = torch.logaddexp(masked[ids[0]], masked.new_tensor(logprob))
    guide.candidates = {ids: value - float(masked[ids[0]]) for ids, value in spellings.items()}


def _no_token(peak: float, state: SamplingState, guide: Guide | None) -> errors.DynamoError:
    """Return why no token is left in a row with this highest adjusted logit."""
    if guide is not None and guide.error is not None:
        return guide.error
    is_free = guide is None and not state.is_adjusted
    if is_free or peak != -math.inf:
        return errors.EngineFailed("no token can be drawn: the model's logits are not finite")
    limits = {"min_tokens": state.banned_ids, "allowed_token_ids": state.options.allowed_token_ids}
    param = next((name for name, token_ids in limits.items() if token_ids), "logit_bias")
    return errors.InvalidRequest.of_param(
        param,
        "expected at least one token that may come next, got none, as min_tokens, logit_bias,"
        " allowed_token_ids and the grammar together exclude all",
    )
