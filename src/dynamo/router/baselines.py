"""Policies that do not look at caches, or at little else: the rivals that a better policy has to beat.

`ConsistentHash` is the strongest of them: it finds nearly every prefix, whatever that costs in balance.
`select_decode_worker` is the policy for prompts that a prefill worker has computed.
"""

from typing import ClassVar

from dynamo.base import errors
from dynamo.protocols import blocks
from dynamo.router.api import Candidates, Decision, Draw, Prompt, Worker

_HASHED_TOKENS = (
    2048  # tells apart prompts with one system prompt, yet keeps conversations together
)


class RoundRobin:
    """The workers in turn."""

    uses_cache: ClassVar[bool] = False
    waits_for_worker: ClassVar[bool] = False

    def __init__(self) -> None:
        self._count = -1

    def select_worker(self, prompt: Prompt, candidates: Candidates, now: float) -> Decision:
        """Select the next worker."""
        self._count += 1
        return Decision(list(candidates.loads)[self._count % len(candidates.loads)], 0)


class Random:
    """A worker at random."""

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
        """Select the same worker for every prompt with the same beginning."""
        hashes = prompt.sequence_hashes
        last = min(len(hashes), max(1, _HASHED_TOKENS // prompt.block_size))
        prefix_hash = hashes[last - 1] if hashes else 0

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
