"""Our own policy: who can give the first token soonest, with regard for those who come after.

    cost = tokens queued there                              until it comes to us
         + busy, unless it is idle                          the step under way ends first
         + locality × tokens new to it                      our own time, and what we take from others
         + pressure × tokens new to it × relative pressure  new content goes where caches turn over slowest
         + herding × (its requests - mean)² / mean          many decode there: a second copy is due

all in tokens of prefill, the common currency: workers of one kind compute them at one pace.

Why locality weighs more than 1: a prompt that goes to a worker which does not know it costs its own time once, *and*
leaves a second copy that evicts something, *and* moves the conversation away from its history. So prompts wait for the
worker that knows them, until the queue there is longer than several times the work that it would save.

Beyond that the prefix is worth a second copy, and gets one. A prefix that everybody asks for queues little prefill, as
it is cached, but many that decode; herding sees them. It measures how far from chance the requests of a worker are, as
a chi-square test does: about 1 for random scatter, a hundred where a crowd meets.

Why not only the longest prefix: where all prompts begin alike, that is one worker for everybody.
"""

from dataclasses import dataclass
from typing import ClassVar

from dynamo.router.policy import Decision, Prompt, View


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedTtft:
    """`--router-policy estimated-ttft`, the default. Weights were tuned as `docs/benchmarks.md` tells."""

    looks: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    locality: float = 5.0
    pressure: float = 0.5
    busy: float = 512.0  # tokens
    herding: float = 1024.0  # tokens

    def choose(self, prompt: Prompt, view: View, now: float) -> Decision:
        """The lowest cost; of equals, the first."""
        loads, cached, in_flight = view.loads, view.cached.get, view.in_flight.get
        num_tokens, block_size, locality = prompt.num_tokens, prompt.block_size, self.locality
        inserted = sum([load.inserted for load in loads.values()])
        pressure = self.pressure * len(loads) / inserted if inserted else 0.0
        mean = max(1.0, sum([load.num_requests for load in loads.values()]) / len(loads))
        lowest, best = float("inf"), None
        for worker, load in loads.items():
            num_new = num_tokens - max(cached(worker, 0), in_flight(worker, 0)) * block_size
            cost = max(0, num_new) * (locality + pressure * load.inserted)
            if load.num_requests or load.reserved_tokens:
                excess = max(0.0, load.num_requests - mean)
                cost += self.busy + load.backlog(now) + self.herding * excess**2 / mean
            if cost < lowest:
                lowest, best = cost, worker
        assert best is not None, "a policy was asked to choose among no workers"
        return Decision(best, view.overlap(best))
