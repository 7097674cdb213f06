"""From logits to tokens.

What is reported and what is drawn from are two things, as OpenAI's users know it: log probabilities are those of
the model's own logits; tokens are drawn after, in this order,

    banned ids (min_tokens) → logit bias → penalties → temperature → min-p → top-k → top-p

Drawing takes one number u in [0, 1) per token and walks the distribution until its sum exceeds u: of the whole
vocabulary in order of id, or of the candidates in order of probability where top-k or top-p cut. u is a hash of (seed,
choice, place in the answer), so a seed gives the same answer whatever shares the batch, and a sequence that was
preempted has no generator to restore. Sums are formed in order, so more candidates for a neighbour change nothing.
"""

import bisect
import enum
import itertools
import math
import secrets
import struct
from collections.abc import Callable
from collections.abc import Sequence as Row

import torch
import xxhash

from dynamo.base import errors
from dynamo.engine.native import thinking
from dynamo.engine.native.guidance import masks
from dynamo.engine.native.sequence import Grammar, Guide, Sampled, Sequence
from dynamo.protocols import generate

COLDEST = 1e-5  # a lower temperature is greedy
NUM_CANDIDATES = 64  # the likeliest tokens, among which top-k and top-p mostly cut
_PLACE = struct.Struct("<QQ")
_SEED_MASK = 2**64 - 1


class Pool(enum.Enum):
    """Which tokens have to be looked at to draw one."""

    FEW = enum.auto()  # the NUM_CANDIDATES likeliest: top-k says so
    LIKELIEST = enum.auto()  # as many as top-p or a large top-k need
    ALL = enum.auto()


def pool_of(options: generate.SamplingOptions) -> Pool:
    """The smallest that will do."""
    if 0 < options.top_k <= NUM_CANDIDATES:
        return Pool.FEW
    return Pool.LIKELIEST if options.top_k or options.top_p < 1.0 else Pool.ALL


class Drawing:
    """What is known of one sequence, from its first token to its last."""

    def __init__(self, sequence: Sequence) -> None:
        options, stops = sequence.options, sequence.request.stop_conditions
        self.sequence, self.options = sequence, options
        self.seed = secrets.randbits(64) if options.seed is None else options.seed & _SEED_MASK
        self.is_greedy = options.temperature < COLDEST
        self.pool = pool_of(options)
        self.num_logprobs = sequence.request.output_options.logprobs
        self.min_tokens = stops.min_tokens
        self.may_end_at = math.inf if stops.ignore_eos else stops.min_tokens  # in output tokens
        is_guided = sequence.grammar is not None  # then the grammar says when it ends
        eos = () if stops.ignore_eos or is_guided else sequence.request.eos_token_ids
        self.ending_ids = [*eos, *stops.stop_token_ids]
        self.penalties = (
            options.repetition_penalty,
            options.frequency_penalty,
            options.presence_penalty,
        )
        self.has_penalties = self.penalties != (1.0, 0.0, 0.0)
        limit = sequence.request.thinking
        self.thoughts = thinking.ThoughtWatch(sequence, limit) if limit else None
        self.is_adjusted = (
            self.has_penalties
            or self.thoughts is not None
            or bool(options.logit_bias)
            or bool(self.min_tokens and self.ending_ids)
        )

    @property
    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token."""
        sequence = self.sequence
        num_answered = len(sequence.token_ids) - sequence.answer_start
        place = _PLACE.pack(sequence.request.first_choice + sequence.index, num_answered)
        return (xxhash.xxh3_64_intdigest(place, self.seed) >> 32) / 2**32

    @property
    def may_end(self) -> bool:
        """Where a grammar says that it can."""
        return self.sequence.num_output >= self.may_end_at

    @property
    def banned_ids(self) -> list[int]:
        """What may not come next."""
        return self.ending_ids if self.sequence.num_output < self.min_tokens else []


Way = Callable[[torch.Tensor, list[Drawing]], list[int]]  # logits [rows, vocabulary] to token ids


class Occurrences:
    """How often each token of the vocabulary has come in a sequence; follows it as it grows."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device) -> None:
        start = sequence.answer_start
        self._sequence, self._num_counted = sequence, start
        self.in_output = torch.zeros(vocab_size, device=device)
        self.is_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_seen[sequence.token_ids[:start]] = True

    def catch_up(self) -> None:
        """Count what has come since."""
        new = self._sequence.token_ids[self._num_counted :]
        self._num_counted += len(new)
        for token in new:
            self.in_output[token] += 1
            self.is_seen[token] = True


class Sampler:
    """Draws the next token of each sequence of a batch."""

    def __init__(self) -> None:
        self._drawings: dict[Sequence, Drawing] = {}
        self._occurrences: dict[Sequence, Occurrences] = {}
        self._guides: dict[Sequence, Guide] = {}  # of those that follow a grammar

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence."""
        self._drawings.pop(sequence, None)
        self._occurrences.pop(sequence, None)
        self._guides.pop(sequence, None)

    def sample(
        self, logits: torch.Tensor, sequences: Row[Sequence]
    ) -> list[Sampled | errors.DynamoError]:
        """One token for each row of logits [sequences, vocabulary], or why there is none."""
        drawings = [self._drawing(sequence) for sequence in sequences]
        with torch.inference_mode():
            adjusted = self.adjust(logits, drawings)
            guides = self._guides_of(drawings) if self._guides else {}
            if guides:
                may_end = [drawings[i].may_end for i in guides]
                adjusted = masks.masked(adjusted, guides, may_end)
            peaks = adjusted.amax(-1).tolist()
            token_ids = _choose(adjusted, drawings)
            logprobs = _logprobs(logits, token_ids, drawings)
        for i, guide in guides.items():
            guide.advance(token_ids[i])
        return [
            Sampled(token_id=token_id, logprobs=logprobs.get(i))
            if math.isfinite(peak)
            else _no_token(guides.get(i))
            for i, (token_id, peak) in enumerate(zip(token_ids, peaks, strict=True))
        ]

    def adjust(self, logits: torch.Tensor, drawings: list[Drawing]) -> torch.Tensor:
        """Logits with bans, biases and penalties; the same tensor where there are none."""
        changed = [i for i, drawing in enumerate(drawings) if drawing.is_adjusted]
        if not changed:
            return logits
        logits = logits.clone()
        for i in changed:
            _ban_and_bias(logits[i], drawings[i])
        penalized = [i for i in changed if drawings[i].has_penalties]
        if penalized:
            rows = torch.tensor(penalized, device=logits.device)
            logits[rows] = self._penalize(logits[rows], [drawings[i] for i in penalized])
        return logits

    def _drawing(self, sequence: Sequence) -> Drawing:
        drawing = self._drawings.get(sequence)
        if drawing is None:
            drawing = self._drawings[sequence] = Drawing(sequence)
            if sequence.grammar is not None:
                self._guides[sequence] = _guide(sequence.grammar, sequence)
        return drawing

    def _guides_of(self, drawings: list[Drawing]) -> dict[int, Guide]:
        """By row, of those that follow a grammar."""
        found = {i: self._guides.get(drawing.sequence) for i, drawing in enumerate(drawings)}
        return {i: guide for i, guide in found.items() if guide is not None}

    def _penalize(self, logits: torch.Tensor, drawings: list[Drawing]) -> torch.Tensor:
        counts = [self._count(drawing.sequence, logits) for drawing in drawings]
        in_output = torch.stack([count.in_output for count in counts])
        is_seen = torch.stack([count.is_seen for count in counts])
        repetition, frequency, presence = _columns(
            [drawing.penalties for drawing in drawings], logits
        )
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_seen, repeated, logits)
        return logits - frequency * in_output - presence * (in_output > 0)

    def _count(self, sequence: Sequence, logits: torch.Tensor) -> Occurrences:
        count = self._occurrences.get(sequence)
        if count is None:
            count = Occurrences(sequence, logits.shape[1], logits.device)
            self._occurrences[sequence] = count
        count.catch_up()
        return count


def _guide(grammar: Grammar, sequence: Sequence) -> Guide:
    """It stands where the answer does: a resumed one is not at its beginning."""
    guide = grammar.begin()
    for token_id in sequence.token_ids[sequence.answer_start :]:
        guide.advance(token_id)
    return guide


def draw(logits: torch.Tensor, drawings: list[Drawing]) -> list[int]:
    """A token at random for each row, by temperature, min-p, top-k and top-p."""
    return _each_its_way(logits, drawings, [_WAY_BY_POOL[drawing.pool] for drawing in drawings])


def _choose(logits: torch.Tensor, drawings: list[Drawing]) -> list[int]:
    ways = [_likeliest if drawing.is_greedy else draw for drawing in drawings]
    return _each_its_way(logits, drawings, ways)


def _each_its_way(logits: torch.Tensor, drawings: list[Drawing], ways: Row[Way]) -> list[int]:
    """Rows that go the same way go it together."""
    token_ids = [0] * len(drawings)
    for way in dict.fromkeys(ways):
        rows = [i for i, other in enumerate(ways) if other is way]
        drawn = way(_rows(logits, rows), [drawings[i] for i in rows])
        for i, token_id in zip(rows, drawn, strict=True):
            token_ids[i] = token_id
    return token_ids


def _likeliest(logits: torch.Tensor, _drawings: list[Drawing]) -> list[int]:
    token_ids: list[int] = logits.argmax(-1).tolist()
    return token_ids


def _draw_from_few(logits: torch.Tensor, drawings: list[Drawing]) -> list[int]:
    width = min(max(drawing.options.top_k for drawing in drawings), logits.shape[1])
    best, token_ids = logits.topk(width)
    ranks = map(rank_drawn, best.tolist(), drawings)
    return [row[rank] for row, rank in zip(token_ids.tolist(), ranks, strict=True)]


def rank_drawn(logits: list[float], drawing: Drawing) -> int:
    """Which of these logits in falling order is drawn. Plain arithmetic: on so few, tensors only cost."""
    options, peak = drawing.options, logits[0]
    scaled = [(logit - peak) / options.temperature for logit in logits[: options.top_k]]
    if options.min_p > 0:
        floor = math.log(options.min_p)
        scaled = [x for x in scaled if x >= floor] or scaled[:1]
    sums = list(itertools.accumulate(map(math.exp, scaled)))
    last = min(bisect.bisect_left(sums, options.top_p * sums[-1]), len(sums) - 1)
    return bisect.bisect_right(sums, drawing.uniform * sums[last], hi=last)


def _draw_from_likeliest(logits: torch.Tensor, drawings: list[Drawing]) -> list[int]:
    return _draw_from_best(_probabilities(logits, drawings), drawings, NUM_CANDIDATES)


def _draw_from_all(logits: torch.Tensor, drawings: list[Drawing]) -> list[int]:
    sums = _probabilities(logits, drawings).cumsum(-1, dtype=torch.float64)
    (uniform,) = _columns([(drawing.uniform,) for drawing in drawings], sums)
    chosen: list[int] = _first_beyond(sums, uniform * sums[:, -1:]).squeeze(1).tolist()
    return chosen


def _probabilities(logits: torch.Tensor, drawings: list[Drawing]) -> torch.Tensor:
    """After temperature and min-p."""
    options = [drawing.options for drawing in drawings]
    temperature, min_p = _columns([(o.temperature, o.min_p) for o in options], logits)
    logits = logits / temperature
    if any(o.min_p > 0 for o in options):
        floor = logits.amax(-1, keepdim=True) + min_p.log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits.softmax(-1)


def _draw_from_best(probabilities: torch.Tensor, drawings: list[Drawing], width: int) -> list[int]:
    """Look at the `width` likeliest; where a row's top-k or top-p needs more of them, look again."""
    size = probabilities.shape[1]
    best, token_ids = probabilities.topk(min(width, size))
    chosen = _draw_among(best, token_ids, drawings, size=size)
    short = _rows_that_need_more(best, drawings, size)
    if short:
        wider = _draw_from_best(
            _rows(probabilities, short), [drawings[i] for i in short], width * 8
        )
        for i, token_id in zip(short, wider, strict=True):
            chosen[i] = token_id
    return chosen


def _draw_among(
    best: torch.Tensor, token_ids: torch.Tensor, drawings: list[Drawing], *, size: int
) -> list[int]:
    """From probabilities in falling order, and whose they are: top-k, top-p, and the number that decides."""
    sums = best.cumsum(-1, dtype=torch.float64)
    columns = [
        (min(drawing.options.top_k or size, size), drawing.options.top_p, drawing.uniform)
        for drawing in drawings
    ]
    top_k, top_p, uniform = _columns(columns, sums)
    ranks = torch.arange(sums.shape[1], device=sums.device)
    last = (top_k.long() - 1).clamp(max=sums.shape[1] - 1)
    total = torch.where(top_k < size, sums.gather(1, last), 1.0)
    is_kept = (ranks < top_k) & ((sums - best < top_p * total) | (ranks == 0))
    num_kept = is_kept.sum(-1, keepdim=True)
    rank = _first_beyond(sums, uniform * sums.gather(1, num_kept - 1))
    chosen: list[int] = token_ids.gather(1, rank).squeeze(1).tolist()
    return chosen


def _rows_that_need_more(best: torch.Tensor, drawings: list[Drawing], size: int) -> list[int]:
    """Those whose top-k or top-p goes beyond these candidates."""
    width = best.shape[1]
    sums = best.cumsum(-1, dtype=torch.float64)[:, -1].tolist()
    rows = []
    for i, (drawing, sum_of_all) in enumerate(zip(drawings, sums, strict=True)):
        top_k = min(drawing.options.top_k or size, size)
        if width < top_k and (top_k < size or sum_of_all < drawing.options.top_p):
            rows.append(i)
    return rows


_WAY_BY_POOL: dict[Pool, Way] = {
    Pool.FEW: _draw_from_few,
    Pool.LIKELIEST: _draw_from_likeliest,
    Pool.ALL: _draw_from_all,
}


def _first_beyond(sums: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Where each row's running sum first exceeds its target; a valid index even if the sums are not numbers."""
    return torch.searchsorted(sums, targets, right=True).clamp(max=sums.shape[1] - 1)


def _ban_and_bias(logits: torch.Tensor, drawing: Drawing) -> None:
    """Change one row in place."""
    bias = drawing.options.logit_bias
    if bias:
        token_ids = torch.tensor(list(bias), device=logits.device)
        logits.index_add_(0, token_ids, logits.new_tensor(list(bias.values())))
    if banned := drawing.banned_ids:
        logits[banned] = -torch.inf
    if drawing.thoughts is not None and (forced := drawing.thoughts.forced_id()) is not None:
        logits.fill_(-torch.inf)
        logits[forced] = 0.0


def _logprobs(
    logits: torch.Tensor, token_ids: list[int], drawings: list[Drawing]
) -> dict[int, generate.TokenLogprobs]:
    """By row, for those that want them."""
    wanted = {i: d.num_logprobs for i, d in enumerate(drawings) if d.num_logprobs is not None}
    if not wanted:
        return {}
    rows = list(wanted)
    found = report(_rows(logits, rows), [token_ids[i] for i in rows], list(wanted.values()))
    return dict(zip(rows, found, strict=True))


def report(
    logits: torch.Tensor, token_ids: Row[int], nums: Row[int]
) -> list[generate.TokenLogprobs]:
    """For each row of logits [rows, vocabulary] how likely this token is, and its `nums` likeliest."""
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
    """These rows, in order; no copy if it is all."""
    if len(rows) == len(values):
        return values
    return values[torch.tensor(rows, device=values.device)]


def _columns(rows: Row[tuple[float, ...]], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One [rows, 1] tensor for each place in the tuples."""
    return tuple(like.new_tensor(rows).unsqueeze(1).unbind(-1))


def _no_token(guide: Guide | None) -> errors.DynamoError:
    if guide is not None and guide.error is not None:
        return guide.error
    return errors.EngineFailed(
        "no token can be drawn: the model's logits are not finite, or logit_bias and min_tokens exclude all of them"
    )
