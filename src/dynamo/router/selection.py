"""The whole decision: what each worker holds, how busy it is, who gets the request, and whether it waits first.

    selector.set_workers({Worker(7): Capacity(total_blocks=16384)})     who is there, whenever that changes
    decision = selector.select("id", prompt, now)                      a Decision; None: it waits in the router's queue
    selector.first_output("id", now)                                   its prompt is computed
    selector.free("id", now)                                           it ended, however it ended
    for id, decision in selector.admit(now): ...                       after each of these: who need not wait any more

Ids that are not known (any more) are no error.
"""

from dataclasses import dataclass

from dynamo.router import api


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and what of its prompt is expected to be there."""

    worker: api.Worker
    overlap_blocks: float  # blocks of the prompt that it need not compute (credits of tiers included)
