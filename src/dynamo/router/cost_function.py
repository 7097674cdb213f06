"""The cost functions of Dynamo's router, to the digit, and the policies that use them.

prefill = tokens to compute at the worker, those of queued prompts included, in blocks
decode  = distinct blocks in use at the worker, with those of the request
cost    = weight × prefill + decode                                          (0.4)
cost    = scale × max(0, prefill - weighted cached blocks) + decode          (1.x)
cost    = max(0, prefill - weighted cached blocks) × (decode + 1)            (1.x, lmetric)

The worker with the lowest cost wins; with a temperature above 0, one is drawn by cost. As in Dynamo, only blocks that
the index reports count as cached, not those that requests in flight will have computed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from dynamo.protocols import kv_events
from dynamo.router import api
from dynamo.router.api import Candidates, Decision, Draw, Prompt, Worker

# The share of computing a block that a cached copy in a tier saves, from 0 to 1. A tier that the mapping does not name
# counts like the one with the lowest weight.
TierWeights = Mapping[kv_events.Tier, float]
DEFAULT_TIER_WEIGHTS: TierWeights = MappingProxyType(
    {kv_events.DEVICE: 1.0, kv_events.HOST: 0.75, kv_events.DISK: 0.25}
)


def cached_blocks(
    overlaps: api.OverlapScores, tier_weights: TierWeights = DEFAULT_TIER_WEIGHTS
) -> Mapping[Worker, float]:
    """Return the blocks that each worker need not compute: the sum over all tiers of blocks times tier weight."""
    by_tier = overlaps.by_tier
    if (
        len(by_tier) == 1
        and kv_events.DEVICE in by_tier
        and tier_weights.get(kv_events.DEVICE, 1.0) == 1
    ):
        return by_tier[kv_events.DEVICE]
    total: dict[Worker, float] = {}
    for tier, blocks_by_worker in by_tier.items():
        weight = tier_weights.get(tier)
        if weight is None:
            weight = min(tier_weights.values())
        for worker, num_blocks in blocks_by_worker.items():
            total[worker] = total.get(worker, 0.0) + weight * num_blocks
    return total


def potential_prefill_blocks(
    active_tokens: int | None, isl: int, overlap: float, block_size: int
) -> float:
    """Return the blocks to compute until this request's prompt is done. `active_tokens` None: the load is unknown."""
    tokens = isl if active_tokens is None else active_tokens + isl - overlap * block_size
    return tokens / block_size


def potential_decode_blocks(active_blocks: int | None, new_blocks: int, prefill: float) -> float:
    """Return the blocks in use with this request. `active_blocks` None: the load is unknown."""
    return math.floor(prefill) if active_blocks is None else active_blocks + new_blocks


def logit(weight: float, prefill: float, decode: float) -> float:
    """Return the cost of version 0.4: a weighted sum."""
    return weight * prefill + decode


def lmetric(prefill: float, decode: float) -> float:
    """Return the cost lmetric of version 1.x: a product, so that either factor can rule a worker out."""
    return prefill * (decode + 1)


def probabilities(costs: Sequence[float], temperature: float) -> list[float]:
    """Return the probability of each choice: softmax of the negated costs, scaled to a range of 1, over temperature."""
    spread = max(costs) - min(costs)
    if not spread:
        return [1 / len(costs)] * len(costs)
    lowest = min(costs)
    weights = [math.exp((lowest - cost) / spread / temperature) for cost in costs]
    total = sum(weights)
    return [weight / total for weight in weights]


def pick(costs: Sequence[float], temperature: float, draw: Draw) -> int:
    """Return the index of the lowest cost (among equals, a random one); with a temperature, draw one by cost."""
    if not temperature:
        lowest = min(costs)
        best = [i for i, cost in enumerate(costs) if cost == lowest]
        return best[int(draw() * len(best))] if len(best) > 1 else best[0]
    remaining = draw()
    for i, probability in enumerate(probabilities(costs, temperature)):
        remaining -= probability
        if remaining < 0:
            return i
    return len(costs) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamo:
    """The weighted sum of blocks to compute and blocks in use (`--router-policy dynamo`)."""

    uses_cache: ClassVar[bool] = True
    waits_for_worker: ClassVar[bool] = False
    draw: Draw
    overlap_weight: float = 1.0
    temperature: float = 0.0

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select the worker with the lowest logit."""
        workers = list(candidates.loads)
        costs = [
            logit(self.overlap_weight, *_prefill_and_decode(prompt, candidates, w)) for w in workers
        ]
        worker = workers[pick(costs, self.temperature, self.draw)]
        return Decision(worker, candidates.cached.get(worker, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LMetric:
    """The product of blocks to compute and blocks in use (`--router-policy lmetric`)."""

    uses_cache: ClassVar[bool] = True
    waits_for_worker: ClassVar[bool] = False
    draw: Draw
    temperature: float = 0.0

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select the worker with the lowest product."""
        workers = list(candidates.loads)
        costs = [lmetric(*_prefill_and_decode(prompt, candidates, w)) for w in workers]
        worker = workers[pick(costs, self.temperature, self.draw)]
        return Decision(worker, candidates.cached.get(worker, 0))


def _prefill_and_decode(
    prompt: Prompt, candidates: Candidates, worker: Worker
) -> tuple[float, float]:
    """Return the blocks to compute and the blocks in use at this worker, with the request."""
    load = candidates.loads[worker]
    prefill = potential_prefill_blocks(
        load.prefill_tokens, prompt.num_tokens, candidates.cached.get(worker, 0), prompt.block_size
    )
    num_new = len(prompt.sequence_hashes) - candidates.in_flight.get(worker, 0)
    return max(0.0, prefill), potential_decode_blocks(load.active_blocks, num_new, prefill)
