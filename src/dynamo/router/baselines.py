"""Policies that need not look at caches, or at little else: what any cleverer one has to beat.

The third of three honest rivals is `ConsistentHash`: it finds nearly every prefix, whatever that costs in balance.

Who answers a prompt that another worker has computed: the one with the fewest blocks in use, and still to compute.

What its cache holds of the prompt does not count: it saves a copy, which is cheap, and not a computation. Between
equals the number of requests decides.
"""

from typing import ClassVar

from dynamo.base import errors
from dynamo.protocols import blocks
from dynamo.router.api import Decision, Draw, Prompt, View, Worker

_HASHED_TOKENS = 2048  # enough to tell prompts apart that share a system prompt, short enough to keep conversations


class RoundRobin:
    """Everybody in turn."""

    looks: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    def __init__(self) -> None:
        self._count = -1

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """The next."""
        self._count += 1
        return Decision(list(view.loads)[self._count % len(view.loads)], 0)


class Random:
    """Anybody."""

    looks: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """Drawn."""
        workers = list(view.loads)
        return Decision(workers[int(self._draw() * len(workers))], 0)


class LeastLoaded:
    """Who has the least to compute; of equals, who has the fewest requests."""

    looks: ClassVar[bool] = True  # to know what is left to compute
    waits: ClassVar[bool] = False

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """The first of the least loaded."""
        return _less_loaded(list(view.loads), view, now)


class PowerOfTwo:
    """The less loaded of two that are drawn: nearly as good as the least loaded, and no herd where loads are stale."""

    looks: ClassVar[bool] = True  # to know what is left to compute
    waits: ClassVar[bool] = False

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """Two different ones, if there are two."""
        workers = list(view.loads)
        pair = [workers.pop(int(self._draw() * len(workers)))]
        if workers:
            pair.append(workers[int(self._draw() * len(workers))])
        return _less_loaded(pair, view, now)


class ConsistentHash:
    """By the prompt's first 2,048 tokens. Highest random weight: when a worker goes, only its own prompts move."""

    looks: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """The same one for the same beginning."""
        hashes = prompt.sequence_hashes
        last = min(len(hashes), max(1, _HASHED_TOKENS // prompt.block_size))
        name = hashes[last - 1] if hashes else 0
        return Decision(max(view.loads, key=lambda worker: _weight(name, worker)), 0)


class Direct:
    """Only where the caller says."""

    looks: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """Raises InvalidRequest: a prompt that names its worker never comes here."""
        raise errors.InvalidRequest(
            "the router's policy is direct: expected the request to name its worker (nvext.backend_instance_id)",
            param="nvext.backend_instance_id",
        )


def _less_loaded(workers: list[Worker], view: View, now: float) -> Decision:
    loads = view.loads
    best = min(workers, key=lambda w: (loads[w].backlog(now), loads[w].num_requests))
    return Decision(best, view.overlap(best))


def _weight(name: int, worker: Worker) -> int:
    return blocks.next_sequence_hash(
        blocks.next_sequence_hash(name, worker.instance_id), worker.dp_rank
    )


def choose(prompt: Prompt, view: View, now: float) -> Decision:
    """One of `view.loads`, of which there is at least one."""

    def load_of(worker: Worker) -> tuple[float, int]:
        load = view.loads[worker]
        return load.active_blocks + load.backlog(now) / prompt.block_size, load.num_requests

    return Decision(min(view.loads, key=load_of), 0.0)
