"""The original's policies: each worker's cost by its formula (`cost`); the lowest wins, or a draw by temperature.

Like the original they count as cached only what the index tells, not what requests in flight will have computed.
"""

from dataclasses import dataclass
from typing import ClassVar

from dynamo.router import cost
from dynamo.router.api import Worker
from dynamo.router.policy import Decision, Draw, Prompt, View


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
        costs = [cost.logit(self.overlap_weight, *_blocks(prompt, view, w)) for w in workers]
        worker = workers[cost.pick(costs, self.temperature, self.draw)]
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
        costs = [cost.lmetric(*_blocks(prompt, view, w)) for w in workers]
        worker = workers[cost.pick(costs, self.temperature, self.draw)]
        return Decision(worker, view.cached.get(worker, 0))


def _blocks(prompt: Prompt, view: View, worker: Worker) -> tuple[float, float]:
    """What would be to compute there, and in use there."""
    load = view.loads[worker]
    prefill = cost.potential_prefill_blocks(
        load.prefill_tokens, prompt.num_tokens, view.cached.get(worker, 0), prompt.block_size
    )
    num_new = len(prompt.sequence_hashes) - view.in_flight.get(worker, 0)
    return max(0.0, prefill), cost.potential_decode_blocks(load.active_blocks, num_new, prefill)
