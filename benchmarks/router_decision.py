"""What a routing decision costs: hashing the prompt, finding it, choosing, and counting the request in and out again.

    python -m benchmarks.router_decision

Microseconds of one process, best and median of rounds. The index knows every block of those before.
"""

import os
import random
import statistics
import time
from collections.abc import Callable

from dynamo.protocols import blocks, kv_events
from dynamo.router import config, prefix_index
from dynamo.router.api import Prompt, Worker
from dynamo.router.worker_load import Capacity

BLOCK_SIZE = 16
NUM_IN_FLIGHT = 16  # requests per worker while it is measured
NUM_ROUNDS = 300


def main() -> None:
    """Every case, one line each."""
    for policy in ("estimated-ttft", "dynamo", "round-robin"):
        for num_workers, num_blocks in ((64, 512), (16, 100)):
            best, median, settled, hashed, counted = _measure(
                *_case(policy, num_workers, num_blocks)
            )
            print(
                f"{policy:15} {num_workers:3} workers, {num_blocks:3} blocks: {best:6.1f} (median {median:6.1f}) µs,"
                f" of it hashing {hashed:5.1f}, counting in {counted:5.1f}; first output and end {settled:5.1f} µs;"
                f" {1e6 / (median + settled):,.0f} requests/s"
            )


Step = Callable[[int], None]


def _case(policy: str, num_workers: int, num_blocks: int) -> tuple[Step, Step, Step, Step]:
    """Workers that hold and compute prompts; half of these begin with one of 100 prefixes of half their length."""
    rng = random.Random(1)
    index = prefix_index.PrefixIndex()
    selector = config.make_selector(
        config.RouterConfig(router_policy=policy), index, block_size=BLOCK_SIZE, draw=rng.random
    )
    workers = [Worker(i) for i in range(num_workers)]
    selector.set_workers(dict.fromkeys(workers, Capacity(total_blocks=10**6)))
    size = num_blocks * BLOCK_SIZE * blocks.TOKEN_BYTES
    prefixes = [rng.randbytes(size // 2) for _ in range(100)]

    def tokens() -> bytes:
        return (rng.choice(prefixes) if rng.random() < 0.5 else os.urandom(size // 2)) + os.urandom(
            size // 2
        )

    for worker in workers:
        for _ in range(NUM_IN_FLIGHT):
            prompt = Prompt.from_tokens(tokens(), BLOCK_SIZE)
            index.add_blocks(worker, kv_events.DEVICE, prompt.sequence_hashes)
            request_id = f"standing {rng.random()}"
            selector.select(request_id, prompt, 0.0)
            selector.mark_prefill_completed(request_id, 0.0)
    packed = [tokens() for _ in range(NUM_ROUNDS)]

    def decide(i: int) -> None:
        selector.select(str(i), Prompt.from_tokens(packed[i], BLOCK_SIZE), 1.0)

    def settle(i: int) -> None:
        selector.mark_prefill_completed(str(i), 1.0)
        selector.free(str(i), 1.0)
        selector.admit(1.0)

    def hash_only(i: int) -> None:
        prompts.append(Prompt.from_tokens(packed[i], BLOCK_SIZE))

    def count(i: int) -> None:
        selector.active.add(
            f"counted {i}",
            workers[0],
            prompts[i].sequence_hashes,
            isl=size // 4,
            overlap=0.0,
            now=1.0,
        )
        selector.active.free(f"counted {i}", 1.0)

    prompts: list[Prompt] = []
    return decide, settle, hash_only, count


def _measure(decide: Step, settle: Step, hash_only: Step, count: Step) -> tuple[float, ...]:
    """Best and median of deciding; median of settling, hashing, and counting in (half of in and out); µs."""
    times: dict[Step, list[float]] = {decide: [], settle: [], hash_only: [], count: []}
    for i in range(NUM_ROUNDS):
        for step, taken in times.items():
            taken.append(_time(step, i))
    median = {step: statistics.median(taken) for step, taken in times.items()}
    return min(times[decide]), median[decide], median[settle], median[hash_only], median[count] / 2


def _time(call: Callable[[int], None], i: int) -> float:
    started = time.perf_counter()
    call(i)
    return (time.perf_counter() - started) * 1e6


if __name__ == "__main__":
    main()
