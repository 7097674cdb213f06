"""What policies are shown in tests."""

from dynamo.router.api import Candidates, Prompt, Worker
from dynamo.router.worker_load import Capacity, PrefillSpeed, WorkerLoad


def prompt(num_blocks=10, block_size=16, *, first=1, **more):
    names = list(range(first, first + num_blocks))
    return Prompt(
        num_tokens=num_blocks * block_size,
        block_size=block_size,
        sequence_hashes=names,
        **more,
    )


def view(*loads, cached=None, in_flight=None):
    """Workers 0, 1, ... with what is given of their loads."""
    made = {}
    for i, given in enumerate(loads):
        load = made[Worker(i)] = WorkerLoad(given.pop("capacity", Capacity()), PrefillSpeed())
        for j, num_tokens in enumerate(given.pop("queued", ())):
            load.add_prefill(str(j), num_tokens, 0.0)
            load.num_requests += 1
        for name, value in given.items():
            setattr(load, name, value)
    by_worker = [{Worker(i): n for i, n in (part or {}).items()} for part in (cached, in_flight)]
    return Candidates(made, *by_worker)


def chosen(policy, asked, seen, now=0.0):
    """The number of the chosen worker."""
    return policy.select_worker(asked, seen, now).worker.instance_id
