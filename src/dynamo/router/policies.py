"""The routing policies: how a worker is selected by cached blocks and load.

`EstimatedTtft` is the default: the lowest estimated time to first token, with regard for later requests.

    cost = tokens queued there                              until it comes to this prompt
         + busy, unless it is idle                          the step under way ends first
         + price × tokens new to it                         this prompt, and what it takes from others
         + answers under way there × tokens new to it       they stand still while it computes them
         + price × decode                                   this answer, and those under way, get slower
         + pressure × tokens new to it × relative pressure  new content goes where caches turn over slowest
         + herding × (its requests - mean)² / mean          many decode there: a second copy is due

all in tokens of prefill, the common currency: workers of one kind compute them at one speed.

*Price.* While workers idle, computing a token costs the time of this prompt once: price 1. When all are busy, it also
delays the prompts behind, evicts blocks that others would have found, and moves the conversation away from its
history: price `locality`. In between it rises as idle workers get scarce. So under load a prompt waits for the worker
with its prefix, until the queue there is longer than several times the work that it would save; then the prefix is
worth a second copy, and gets one. How many idle workers are enough grows with the square root of their number, as in
the theory of queues with many servers (Halfin and Whitt, 1981): of a thousand, a hundred idle ones are plenty.

*Decode.* A step takes longer the more tokens of KV the answers of a worker hold together. `DecodeSlowdown` measures how
much longer an answer takes for each of them. This answer meets those in use and adds its own, which the others, half
written on average, bear too:

    weight × slowdown × (in use + added + answers × added / 2) / √(1 + answers)

The root is there because the load evens out by itself: the more answers run, the sooner one ends and another worker is
the fuller one. Without this term two requests shared a worker while another idled.

*Herding.* A prefix that all requests share queues little prefill, as it is cached, but many requests that decode. The
term measures how far from chance the number of requests of a worker is, as a chi-square test does: about 1 for random
scatter, a hundred where a crowd meets.

Why not only the longest prefix: where all prompts begin alike, that is one worker for all of them.

`Dynamo` and `LMetric` are the cost functions of Dynamo's router, to the digit:

    prefill = tokens to compute at the worker, those of queued prompts included, in blocks
    decode  = distinct blocks in use at the worker, with those of the request
    cost    = weight × prefill + decode                                          (0.4)
    cost    = scale × max(0, prefill - weighted cached blocks) + decode          (1.x)
    cost    = max(0, prefill - weighted cached blocks) × (decode + 1)            (1.x, lmetric)

The lowest cost wins; with a temperature above 0, one is drawn by cost. As in Dynamo, only blocks that the index reports
count as cached, not those that requests in flight will have computed.

The others do not look at caches, or at little else: the rivals that a better policy has to beat. `ConsistentHash` is
the strongest of them: it finds nearly every prefix, whatever that costs in balance. `select_decode_worker` is for
prompts that a prefill worker has computed.
"""  # decider

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from dynamo.base import errors
from dynamo.protocols import blocks, kv_events
from dynamo.router import api
from dynamo.router.api import Candidates, Decision, Draw, Prompt, Worker
from dynamo.router.worker_load import WorkerLoad

_FEW_WORKERS = 8  # up to this number, all of them must idle to be enough
# tells apart prompts with one system prompt, yet keeps conversations together
_HASHED_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedTtft:
    """`--router-policy estimated-ttft`, the default. `docs/benchmarks.md` says how its weights were tuned."""

    uses_cache: ClassVar[bool] = True
    waits_for_worker: ClassVar[bool] = True
    locality: float = 8.0
    pressure: float = 0.5
    busy: float = 512.0  # tokens
    herding: float = 1024.0  # tokens
    decode: float = 1.5

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select the worker with the lowest cost; among equals, the first."""
        loads, cached, in_flight = candidates.loads, candidates.cached.get, candidates.in_flight.get
        num_tokens, block_size = prompt.num_tokens, prompt.block_size
        price, pressure, mean, slowdown = self._weights(loads)
        lowest, best = float("inf"), None
        for worker, load in loads.items():
            num_cached = cached(worker, 0)
            if (running := in_flight(worker, 0)) > num_cached:
                num_cached = running
            num_new = num_tokens - num_cached * block_size
            cost = 0.0
            num_answers = load.num_requests - len(load.waiting)
            if num_new > 0:
                cost = num_new * (price + num_answers + pressure * load.inserted_tokens)
            if cost >= lowest:
                continue  # its queue can only add to that
            if slowdown:
                num_added = num_tokens - in_flight(worker, 0) * block_size
                num_slowed = load.active_blocks * block_size + num_added * (1 + num_answers / 2)
                cost += slowdown * num_slowed / math.sqrt(1 + num_answers)
            if load.num_requests or load.reserved_tokens:
                excess = max(0.0, load.num_requests - mean)
                cost += self.busy + load.backlog(now) + self.herding * excess**2 / mean
            if cost < lowest:
                lowest, best = cost, worker
        assert best is not None, "expected at least one candidate"
        return Decision(best, candidates.overlap(best))

    def cost_parts(
        self, prompt: Prompt, candidates: Candidates, now: float
    ) -> dict[Worker, dict[str, float]]:
        """Return the parts of each worker's cost, in tokens: the same sum that `select_worker` compares."""
        price, pressure, mean, slowdown = self._weights(candidates.loads)
        parts: dict[Worker, dict[str, float]] = {}
        for worker, load in candidates.loads.items():
            num_new = max(0.0, prompt.num_tokens - candidates.overlap(worker) * prompt.block_size)
            num_answers = load.num_requests - len(load.waiting)
            num_shared = candidates.in_flight.get(worker, 0) * prompt.block_size
            num_added = prompt.num_tokens - num_shared
            num_slowed = load.active_blocks * prompt.block_size + num_added * (1 + num_answers / 2)
            parts[worker] = {
                "new tokens": num_new * price,
                "answers standing still": num_new * num_answers,
                "slower answers": slowdown * num_slowed / math.sqrt(1 + num_answers),
                "cache pressure": num_new * pressure * load.inserted_tokens,
            }
            if load.num_requests or load.reserved_tokens:
                excess = max(0.0, load.num_requests - mean)
                parts[worker] |= {
                    "busy": self.busy,
                    "queued tokens": load.backlog(now),
                    "crowd": self.herding * excess**2 / mean,
                }
        return parts

    def _weights(self, loads: Mapping[Worker, WorkerLoad]) -> tuple[float, float, float, float]:
        """Return what depends on all workers.

        That is price, pressure per inserted token, mean number of requests, and slowdown per KV token in use.
        """
        num_requests = [load.num_requests for load in loads.values()]
        inserted_tokens = sum([load.inserted_tokens for load in loads.values()])
        enough = min(len(loads), math.sqrt(_FEW_WORKERS * len(loads)))
        price = 1 + (self.locality - 1) * max(0.0, 1 - num_requests.count(0) / enough)
        any_load = next(iter(loads.values()))  # speeds are measured over all of them
        slowdown = any_load.decode_slowdown.seconds_per_token * any_load.prefill_speed.measured
        return (
            price,
            self.pressure * len(loads) / inserted_tokens if inserted_tokens > 1e-6 else 0.0,
            max(1.0, sum(num_requests) / len(loads)),
            self.decode * price * slowdown,
        )


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
class _BlockPolicy(abc.ABC):
    """Selects the lowest cost, which is made of blocks to compute and blocks in use."""

    uses_cache: ClassVar[bool] = True
    waits_for_worker: ClassVar[bool] = False
    draw: Draw
    temperature: float = 0.0

    @abc.abstractmethod
    def cost(self, prefill: float, decode: float) -> float:
        """Return the cost of a worker with so many blocks to compute and in use."""

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select the worker with the lowest cost; the higher the temperature, the more by chance."""
        workers = list(candidates.loads)
        costs = [self.cost(*prefill_and_decode(prompt, candidates, w)) for w in workers]
        worker = workers[pick(costs, self.temperature, self.draw)]
        return Decision(worker, candidates.cached.get(worker, 0))

    def cost_parts(
        self, prompt: Prompt, candidates: Candidates, worker: Worker
    ) -> dict[str, float]:
        """Return the two parts of a worker's cost, in blocks."""
        prefill, decode = prefill_and_decode(prompt, candidates, worker)
        return {"prefill": prefill, "decode": decode}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamo(_BlockPolicy):
    """The weighted sum of blocks to compute and blocks in use (`--router-policy dynamo`)."""

    overlap_weight: float = 1.0

    def cost(self, prefill: float, decode: float) -> float:
        """Return the cost of NVIDIA Dynamo 0.4, in blocks."""
        return self.overlap_weight * prefill + decode

    def cost_parts(
        self, prompt: Prompt, candidates: Candidates, worker: Worker
    ) -> dict[str, float]:
        """Return the two terms of a worker's cost, in blocks."""
        parts = _BlockPolicy.cost_parts(self, prompt, candidates, worker)
        return parts | {"prefill": self.overlap_weight * parts["prefill"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LMetric(_BlockPolicy):
    """The product of blocks to compute and blocks in use (`--router-policy lmetric`)."""

    def cost(self, prefill: float, decode: float) -> float:
        """Return the cost of version 1.x: either factor can rule a worker out."""
        return prefill * (decode + 1)


def total_cost(policy: api.RoutingPolicy, parts: Mapping[str, float]) -> float:
    """Return the cost that these parts make under a policy."""
    if isinstance(policy, LMetric):
        return policy.cost(parts["prefill"], parts["decode"])
    return sum(parts.values())


def prefill_and_decode(prompt: Prompt, candidates: Candidates, worker: Worker) -> tuple[float, int]:
    """Return the blocks to compute and the blocks in use at this worker, with the request."""
    load = candidates.loads[worker]
    num_cached = candidates.cached.get(worker, 0) * prompt.block_size
    prefill = (load.prefill_tokens + prompt.num_tokens - num_cached) / prompt.block_size
    num_new = len(prompt.sequence_hashes) - candidates.in_flight.get(worker, 0)
    return max(0.0, prefill), load.active_blocks + num_new


class RoundRobin:
    """Selects the workers in turn, in the order in which they are listed."""

    uses_cache: ClassVar[bool] = False
    waits_for_worker: ClassVar[bool] = False

    def __init__(self) -> None:
        self._count = -1

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        self._count += 1
        return Decision(list(candidates.loads)[self._count % len(candidates.loads)], 0)


class Random:
    """Selects a worker at random, without regard to load or cache."""

    uses_cache: ClassVar[bool] = False
    waits_for_worker: ClassVar[bool] = False

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Draw a worker, all with equal probability."""
        workers = list(candidates.loads)
        return Decision(workers[int(self._draw() * len(workers))], 0)


class LeastLoaded:
    """The worker with the fewest prompt tokens to compute; among equals, the one with the fewest requests."""

    uses_cache: ClassVar[bool] = True  # the tokens to compute depend on what was cached
    waits_for_worker: ClassVar[bool] = False

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select the first of the least loaded workers."""
        return _select_less_loaded(list(candidates.loads), candidates, now)


class PowerOfTwo:
    """The less loaded of two random workers: nearly as good as the least loaded, and no herd where loads are stale."""

    uses_cache: ClassVar[bool] = True  # the tokens to compute depend on what was cached
    waits_for_worker: ClassVar[bool] = False

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Draw two different workers, if there are two, and select the less loaded."""
        workers = list(candidates.loads)
        pair = [workers.pop(int(self._draw() * len(workers)))]
        if workers:
            pair.append(workers[int(self._draw() * len(workers))])
        return _select_less_loaded(pair, candidates, now)


class ConsistentHash:
    """By the prompt's first 2,048 tokens. Highest random weight: when a worker goes, only its own prompts move."""

    uses_cache: ClassVar[bool] = False
    waits_for_worker: ClassVar[bool] = False

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select the same worker for every prompt with the same beginning; by load for one without a full block."""
        hashes = prompt.sequence_hashes
        if not hashes:  # nothing tells such prompts apart, and nothing of them is cached
            return _select_less_loaded(list(candidates.loads), candidates, now)
        last = min(len(hashes), max(1, _HASHED_TOKENS // prompt.block_size))
        prefix_hash = hashes[last - 1]

        def weight(worker: Worker) -> int:
            instance_hash = blocks.next_sequence_hash(prefix_hash, worker.instance_id)
            return blocks.next_sequence_hash(instance_hash, worker.dp_rank)

        return Decision(max(candidates.loads, key=weight), 0)


class Direct:
    """Only the worker that the request names."""

    uses_cache: ClassVar[bool] = False
    waits_for_worker: ClassVar[bool] = False

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Raise InvalidRequest: a prompt that names its worker is not given to a policy."""
        raise errors.InvalidRequest(
            "the router's policy is direct: expected the request to name its worker (nvext.backend_instance_id)",
            param="nvext.backend_instance_id",
        )


def select_decode_worker(prompt: Prompt, candidates: Candidates, now: float) -> Decision:
    """Select the worker for a prompt that another worker has computed.

    It is the one with the fewest blocks in use or still to compute; among equals, with the fewest requests. A cached
    prefix does not count: it saves a copy, which is cheap, and no computation.
    """

    def load_of(worker: Worker) -> tuple[float, int]:
        load = candidates.loads[worker]
        return load.active_blocks + load.backlog(now) / prompt.block_size, load.num_requests

    return Decision(min(candidates.loads, key=load_of), 0.0)


def _select_less_loaded(workers: list[Worker], candidates: Candidates, now: float) -> Decision:
    loads = candidates.loads
    best = min(workers, key=lambda w: (loads[w].backlog(now), loads[w].num_requests))
    return Decision(best, candidates.overlap(best))
