"""Our own policy: a prompt is computed where that delays everybody least, its own first token included.

    here   = what waits before it here + its new tokens × (1 + answers that are being written here)
    there  = what waits before it there + its new tokens there + handing over + copying

in seconds, at the pace at which prompts have been computed lately. A prefill here stops every answer that its worker is
writing for as long as it takes, so it counts once for each; a prefill worker writes no answers. So where nothing runs a
prompt stays, however long, and saves the copy; beside running answers even a short one goes.
"""

from dynamo.disagg.policy import Look

HANDOFF_S = 0.004  # asking another process, and one more decode step (measured: docs/benchmarks.md)


class Estimated:
    """`--disagg-policy estimated`: a `policy.Policy`."""

    def may_go(self, prompt_len: int, queue_size: int) -> bool:
        """As `policy.Policy`: it depends."""
        del prompt_len, queue_size
        return True

    def goes(self, prompt_len: int, queue_size: int, here: Look, there: Look) -> bool:
        """As `policy.Policy`."""
        del prompt_len, queue_size
        one, other = here(), there()
        pace = other.tokens_per_s
        here_s = (one.num_ahead + one.num_new * (1 + one.num_requests)) / pace
        there_s = (other.num_ahead + other.num_new) / pace
        copy_s = one.num_new / one.copies_per_s if one.copies_per_s else 0.0
        return there_s + HANDOFF_S + copy_s < here_s
