"""A routing policy of one's own: no short prompt waits behind a long one."""

from dynamo.router.api import Decision

LONG = 512  # tokens


class ByLength:
    """The first worker for long prompts, and the one with the fewest requests of the others for short ones."""

    uses_cache = False  # it does not ask which worker has the prefix
    waits_for_worker = False  # requests do not queue in the router

    def select_worker(self, prompt, candidates, now):
        first, *others = sorted(candidates.loads)
        if prompt.num_tokens < LONG and others:
            first = min(others, key=lambda worker: candidates.loads[worker].num_requests)
        return Decision(first, candidates.overlap(first))
