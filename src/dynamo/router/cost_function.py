"""The arithmetic of the original's router, to the digit: what a worker would cost, and a draw by cost.

prefill = tokens to compute there, the queued ones included, in blocks
decode  = distinct blocks in use there, if the request came
cost    = weight × prefill + decode                                          (0.4)
cost    = scale × max(0, prefill - credits of what is cached) + decode       (1.x)
cost    = max(0, prefill - credits) × (decode + 1)                           (1.x, lmetric)

The original's policies: each worker's cost by its formula (`cost`); the lowest wins, or a draw by temperature.

Like the original they count as cached only what the index tells, not what requests in flight will have computed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dynamo.router import api
from dynamo.router.api import Decision, Draw, Prompt, View, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """How much of computing a block it saves that the block lies in this tier."""

    device: float = 1.0
    host: float = 0.75
    disk: float = 0.25


def cached_blocks(overlaps: api.OverlapScores, credits_: Credits) -> Mapping[api.Worker, float]:
    """Per worker, the blocks that it need not compute; a block that must be fetched first counts in part."""
    if credits_.device == 1 and not overlaps.host and not overlaps.disk:
        return overlaps.device
    total: dict[api.Worker, float] = {}
    tiers = (
        (overlaps.device, credits_.device),
        (overlaps.host, credits_.host),
        (overlaps.disk, credits_.disk),
    )
    for tier, credit in tiers:
        for worker, num_blocks in tier.items():
            total[worker] = total.get(worker, 0.0) + credit * num_blocks
    return total


def potential_prefill_blocks(
    active_tokens: int | None, isl: int, overlap: float, block_size: int
) -> float:
    """Blocks to compute before this request is done. `active_tokens` None: nothing is known of the worker."""
    tokens = isl if active_tokens is None else active_tokens + isl - overlap * block_size
    return tokens / block_size


def potential_decode_blocks(active_blocks: int | None, new_blocks: int, prefill: float) -> float:
    """Blocks in use if the request came. `active_blocks` None: nothing is known of the worker."""
    return math.floor(prefill) if active_blocks is None else active_blocks + new_blocks


def logit(weight: float, prefill: float, decode: float) -> float:
    """0.4: a weighted sum."""
    return weight * prefill + decode


def lmetric(prefill: float, decode: float) -> float:
    """1.x: a product, so that either of the two can rule a worker out."""
    return prefill * (decode + 1)


def probabilities(costs: Sequence[float], temperature: float) -> list[float]:
    """How likely each is chosen: softmax of the negated costs, scaled to a range of 1, over the temperature (> 0)."""
    spread = max(costs) - min(costs)
    if not spread:
        return [1 / len(costs)] * len(costs)
    lowest = min(costs)
    weights = [math.exp((lowest - cost) / spread / temperature) for cost in costs]
    total = sum(weights)
    return [weight / total for weight in weights]


def pick(costs: Sequence[float], temperature: float, draw: Draw) -> int:
    """An index: of the lowest cost at temperature 0 (equals are drawn from), else drawn by `probabilities`."""
    if not temperature:
        lowest = min(costs)
        best = [i for i, cost in enumerate(costs) if cost == lowest]
        return best[int(draw() * len(best))] if len(best) > 1 else best[0]
    mark = draw()
    for i, probability in enumerate(probabilities(costs, temperature)):
        mark -= probability
        if mark < 0:
            return i
    return len(costs) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamo:
    """Weighted sum of what is to be computed and what is in use (`--router-policy dynamo`)."""

    looks: ClassVar[bool] = True
    waits: ClassVar[bool] = False
    draw: Draw
    overlap_weight: float = 1.0
    temperature: float = 0.0

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """The lowest logit."""
        workers = list(view.loads)
        costs = [logit(self.overlap_weight, *_blocks(prompt, view, w)) for w in workers]
        worker = workers[pick(costs, self.temperature, self.draw)]
        return Decision(worker, view.cached.get(worker, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LMetric:
    """Product of the two (`--router-policy lmetric`)."""

    looks: ClassVar[bool] = True
    waits: ClassVar[bool] = False
    draw: Draw
    temperature: float = 0.0

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """The lowest product."""
        workers = list(view.loads)
        costs = [lmetric(*_blocks(prompt, view, w)) for w in workers]
        worker = workers[pick(costs, self.temperature, self.draw)]
        return Decision(worker, view.cached.get(worker, 0))


def _blocks(prompt: Prompt, view: View, worker: Worker) -> tuple[float, float]:
    """What would be to compute there, and in use there."""
    load = view.loads[worker]
    prefill = potential_prefill_blocks(
        load.prefill_tokens, prompt.num_tokens, view.cached.get(worker, 0), prompt.block_size
    )
    num_new = len(prompt.sequence_hashes) - view.in_flight.get(worker, 0)
    return max(0.0, prefill), potential_decode_blocks(load.active_blocks, num_new, prefill)
