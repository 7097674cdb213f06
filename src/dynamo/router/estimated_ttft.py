"""The default policy: the worker with the lowest estimated time to first token, with regard for later requests.

    cost = tokens queued there                              until it comes to this prompt
         + busy, unless it is idle                          the step under way ends first
         + price × tokens new to it                         this prompt, and what it takes from others
         + pressure × tokens new to it × relative pressure  new content goes where caches turn over slowest
         + herding × (its requests - mean)² / mean          many decode there: a second copy is due

all in tokens of prefill, the common currency: workers of one kind compute them at one speed.

*Price.* While workers idle, computing a token costs the time of this prompt once: price 1. When all are busy, it also
delays the prompts behind, evicts blocks that others would have found, and moves the conversation away from its
history: price `locality`. In between it rises as idle workers get scarce. So under load a prompt waits for the worker
with its prefix, until the queue there is longer than several times the work that it would save; then the prefix is
worth a second copy, and gets one. How many idle workers are enough grows with the square root of their number, as in
the theory of queues with many servers (Halfin and Whitt, 1981): of a thousand, a hundred idle ones are plenty.

*Herding.* A prefix that all requests share queues little prefill, as it is cached, but many requests that decode. The
term measures how far from chance the number of requests of a worker is, as a chi-square test does: about 1 for random
scatter, a hundred where a crowd meets.

Why not only the longest prefix: where all prompts begin alike, that is one worker for all of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dynamo.router.api import Candidates, Decision, Prompt, Worker
from dynamo.router.worker_load import WorkerLoad

_FEW_WORKERS = 8  # up to this number, all of them must idle to be enough


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedTtft:
    """`--router-policy estimated-ttft`, the default. `docs/benchmarks.md` says how its weights were tuned."""

    uses_cache: ClassVar[bool] = True
    waits_for_worker: ClassVar[bool] = True
    locality: float = 8.0
    pressure: float = 0.5
    busy: float = 512.0  # tokens
    herding: float = 1024.0  # tokens

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select the worker with the lowest cost; among equals, the first."""
        loads, cached, in_flight = candidates.loads, candidates.cached.get, candidates.in_flight.get
        num_tokens, block_size = prompt.num_tokens, prompt.block_size
        price, pressure, mean = self._weights(loads)
        lowest, best = float("inf"), None
        for worker, load in loads.items():
            num_cached = cached(worker, 0)
            if (running := in_flight(worker, 0)) > num_cached:
                num_cached = running
            num_new = num_tokens - num_cached * block_size
            cost = num_new * (price + pressure * load.inserted_tokens) if num_new > 0 else 0.0
            if cost >= lowest:
                continue  # its queue can only add to that
            if load.num_requests or load.reserved_tokens:
                excess = max(0.0, load.num_requests - mean)
                cost += self.busy + load.backlog(now) + self.herding * excess**2 / mean
            if cost < lowest:
                lowest, best = cost, worker
        assert best is not None, "expected at least one candidate"
        return Decision(best, candidates.overlap(best))

    def _weights(self, loads: Mapping[Worker, WorkerLoad]) -> tuple[float, float, float]:
        """Return what depends on all workers: price, pressure per inserted token, mean number of requests."""
        num_requests = [load.num_requests for load in loads.values()]
        inserted_tokens = sum([load.inserted_tokens for load in loads.values()])
        enough = min(len(loads), math.sqrt(_FEW_WORKERS * len(loads)))
        scarcity = max(0.0, 1 - num_requests.count(0) / enough)
        return (
            1 + (self.locality - 1) * scarcity,
            self.pressure * len(loads) / inserted_tokens if inserted_tokens else 0.0,
            max(1.0, sum(num_requests) / len(loads)),
        )
