"""Our own policy: who can give the first token soonest, with regard for those who come after.

    cost = tokens queued there                              until it comes to us
         + busy, unless it is idle                          the step under way ends first
         + price × tokens new to it                         our own time, and what we take from others
         + pressure × tokens new to it × relative pressure  new content goes where caches turn over slowest
         + herding × (its requests - mean)² / mean          many decode there: a second copy is due

all in tokens of prefill, the common currency: workers of one kind compute them at one pace.

*Price.* While workers idle, computing a token costs our own time once: price 1. When all are busy, it also delays
whoever comes behind us, evicts what others would have found, and moves the conversation away from its history: price
`locality`. In between it rises as idle workers get scarce. So under load prompts wait for the worker that
knows them, until the queue there is longer than several times the work that it would save; then the prefix is worth
a second copy, and gets one. How many idle workers are enough grows with the square root of their number, as in the
theory of queues with many servers (Halfin and Whitt, 1981): of a thousand, a hundred idle ones are plenty.

*Herding.* A prefix that everybody asks for queues little prefill, as it is cached, but many that decode. The term
measures how far from chance the requests of a worker are, as a chi-square test does: about 1 for random scatter, a
hundred where a crowd meets.

Why not only the longest prefix: where all prompts begin alike, that is one worker for everybody.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dynamo.router.api import Decision, Prompt, View, Worker
from dynamo.router.worker_load import Load

_FEW = 8  # up to so many workers, enough means all


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedTtft:
    """`--router-policy estimated-ttft`, the default. Weights were tuned as `docs/benchmarks.md` tells."""

    looks: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    locality: float = 8.0
    pressure: float = 0.5
    busy: float = 512.0  # tokens
    herding: float = 1024.0  # tokens

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """The lowest cost; of equals, the first."""
        loads, cached, in_flight = view.loads, view.cached.get, view.in_flight.get
        num_tokens, block_size = prompt.num_tokens, prompt.block_size
        price, pressure, mean = self._weights(loads)
        lowest, best = float("inf"), None
        for worker, load in loads.items():
            known = cached(worker, 0)
            if (running := in_flight(worker, 0)) > known:
                known = running
            num_new = num_tokens - known * block_size
            cost = num_new * (price + pressure * load.inserted) if num_new > 0 else 0.0
            if cost >= lowest:
                continue  # whatever waits there
            if load.num_requests or load.reserved_tokens:
                excess = max(0.0, load.num_requests - mean)
                cost += self.busy + load.backlog(now) + self.herding * excess**2 / mean
            if cost < lowest:
                lowest, best = cost, worker
        assert best is not None, "a policy was asked to choose among no workers"
        return Decision(best, view.overlap(best))

    def _weights(self, loads: Mapping[Worker, Load]) -> tuple[float, float, float]:
        """What depends on all workers: price, pressure per token inserted, and their mean number of requests."""
        num_requests = [load.num_requests for load in loads.values()]
        inserted = sum([load.inserted for load in loads.values()])
        enough = min(len(loads), math.sqrt(_FEW * len(loads)))
        scarcity = max(0.0, 1 - num_requests.count(0) / enough)
        return (
            1 + (self.locality - 1) * scarcity,
            self.pressure * len(loads) / inserted if inserted else 0.0,
            max(1.0, sum(num_requests) / len(loads)),
        )
