"""Our own policy: who can give the first token soonest, with regard for those who come after.

    cost = tokens queued there                              until it comes to us
         + locality × tokens new to it                      our own time, and the cache room that we take from others
         + pressure × tokens new to it × relative pressure  new content goes where caches turn over slowest
         + crowding(share of its cache in use)              decoding slows it down, and a full one preempts

all in tokens of prefill, the common currency: workers of one kind compute them at one pace.

Why locality weighs more than 1: a prompt that goes to a worker which does not know it costs its own time once, *and*
leaves a second copy that evicts something, *and* moves the conversation away from its history. Counting its new tokens
several times makes prompts wait for the worker that knows them, until the queue there is longer than several times
the work that it would save. Beyond that the prefix is worth a second copy, and gets one: so a hot prefix spreads
by as much as its load asks, and no further.

Why not only the longest prefix: where all prompts begin alike, that is one worker for everybody.
"""

from dataclasses import dataclass
from typing import ClassVar

from dynamo.router.load import Load
from dynamo.router.policy import Decision, Prompt, View

_FULLEST = 0.95  # share of the cache in use from which more does not matter any more


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedTtft:
    """`--router-policy estimated-ttft`, the default. Weights were tuned as `docs/benchmarks.md` tells."""

    looks: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    locality: float = 4.0
    pressure: float = 0.5
    crowding: float = 1024.0  # tokens; a worker half full costs so much more than an empty one

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """The lowest cost; of equals, the first."""
        loads, cached, in_flight = view.loads, view.cached.get, view.in_flight.get
        num_tokens, block_size, locality = prompt.num_tokens, prompt.block_size, self.locality
        inserted = sum([load.inserted for load in loads.values()])
        pressure = self.pressure * len(loads) / inserted if inserted else 0.0
        lowest, best = float("inf"), None
        for worker, load in loads.items():
            num_new = num_tokens - max(cached(worker, 0), in_flight(worker, 0)) * block_size
            cost = max(0, num_new) * (locality + pressure * load.inserted)
            if load.num_requests or load.reserved_tokens:
                cost += load.backlog(now) + self.crowding * _crowding(load)
            if cost < lowest:
                lowest, best = cost, worker
        assert best is not None, "a policy was asked to choose among no workers"
        return Decision(best, view.overlap(best))


def _crowding(load: Load) -> float:
    """0 for an empty cache, 1 for one that is half in use, 19 at most."""
    total = load.capacity.total_blocks
    if not total:
        return 0.0
    share = min(_FULLEST, load.active_blocks / total)
    return share / (1 - share)
