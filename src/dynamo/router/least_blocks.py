"""Who answers a prompt that another worker has computed: the one with the fewest blocks in use, and still to compute.

What its cache holds of the prompt does not count: it saves a copy, which is cheap, and not a computation. Between
equals the number of requests decides.
"""

from dynamo.router.api import Worker
from dynamo.router.policy import Decision, Prompt, View


def choose(prompt: Prompt, view: View, now: float) -> Decision:
    """One of `view.loads`, of which there is at least one."""

    def load_of(worker: Worker) -> tuple[float, int]:
        load = view.loads[worker]
        return load.active_blocks + load.backlog(now) / prompt.block_size, load.num_requests

    return Decision(min(view.loads, key=load_of), 0.0)
