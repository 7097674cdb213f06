"""Both simulated workers, on their own: how long they take, and what they keep."""

import itertools
import math

import pytest

from dynamo.engine.mock import memory, timing
from dynamo.protocols import kv_events
from dynamo.router.worker_load import Capacity
from dynamo.simulate.workers import BatchWorker, FcfsWorker
from dynamo.simulate.workload import SimulatedRequest


def arrival(*names, num_tokens=None, num_output=1):
    return SimulatedRequest(
        at=0.0, num_tokens=num_tokens or 16 * len(names), num_output=num_output, names=names
    )


def fcfs(num_blocks=0):
    return FcfsWorker(tokens_per_s=16.0, num_blocks=num_blocks, block_size=16)


def batch(total_blocks=100):
    return BatchWorker(Capacity(total_blocks=total_blocks, max_num_seqs=8), block_size=16)


def finish(worker):
    """All that it does until it is idle: (time, progress)."""
    done = []
    while worker.next_time < math.inf:
        now = worker.next_time
        done.append((now, worker.advance(now)))
    return done


def cached(worker, asked):
    worker.submit("?", asked, 100.0)
    return [n for _, progress in finish(worker) for _, n in progress.first_outputs]


def test_prompts_are_computed_one_after_the_other():
    worker = fcfs()
    worker.submit("a", arrival(1, 2), 0.0)
    worker.submit("b", arrival(3), 0.5)

    assert [(now, p.ended) for now, p in finish(worker)] == [(2.0, ["a"]), (3.0, ["b"])]


def test_cached_prefix_takes_no_time():
    worker = fcfs()
    worker.submit("a", arrival(1, 2), 0.0)
    worker.submit("b", arrival(1, 2, 3, num_tokens=40), 0.0)

    assert [now for now, _ in finish(worker)] == [2.0, 2.5]


def test_cache_evicts_tails_of_the_least_recently_used():
    worker = fcfs(num_blocks=4)
    for i, asked in enumerate((arrival(1, 2, 3), arrival(1, 4))):
        worker.submit(str(i), asked, 0.0)
    finish(worker)

    worker.submit("new", arrival(5), 50.0)
    ((_, progress),) = finish(worker)

    assert [list(c.names) for c in progress.changes if not c.is_stored] == [[3]]


def test_batch_worker_takes_as_long_as_the_mock_engine():
    worker = batch()
    worker.submit("a", arrival(1, 2, num_output=3), 0.0)

    times = [now for now, _ in finish(worker)]

    first = timing.prefill_ms(32) / 1000
    assert times[0] == pytest.approx(first)
    assert len(times) == 3
    assert all(b - a >= timing.decode_ms(0) / 1000 for a, b in itertools.pairwise(times))


def test_blocks_that_sequences_share_cost_a_step_what_is_said():
    shares = []

    def step_s(*, num_prompt_tokens, num_decoding, active_share):
        shares.append(active_share)
        return 1.0

    capacity = Capacity(total_blocks=100, max_num_seqs=8)
    worker = BatchWorker(capacity, block_size=16, step_s=step_s, repeated_cost=0.5)
    for number in range(3):
        worker.submit(str(number), arrival(1, 2, 3 + number, num_output=2), 0.0)
    finish(worker)

    # the first alone; all three, of which the first has a block for its answer; and the others, with one each
    assert shares == pytest.approx([0.03, 0.06 + 0.5 * 2 * 0.02, 0.06 + 0.5 * 0.02])


def test_batch_worker_finds_blocks_and_computes_at_least_one_token():
    worker = batch()
    worker.submit("a", arrival(1, 2), 0.0)
    finish(worker)

    assert cached(worker, arrival(1, 2, 3)) == [32]
    assert cached(worker, arrival(1, 2)) == [16]


def test_batch_worker_reports_changes_by_the_workloads_names():
    worker = batch(total_blocks=4)
    worker.submit("a", arrival(1, 2, 3), 0.0)
    stored = [list(c.names) for _, p in finish(worker) for c in p.changes if c.is_stored]

    worker.submit("b", arrival(7, 8, 9), 50.0)
    removed = [n for _, p in finish(worker) for c in p.changes if not c.is_stored for n in c.names]

    assert stored == [[1, 2, 3]]
    assert removed == [3, 2]


def test_blocks_that_left_the_cache_are_loaded_from_the_host_tier():
    sizes = memory.SimulatedTiersConfig(
        num_host_blocks=100,
        num_disk_blocks=0,
        host_bytes_per_s=1e9,
        disk_bytes_per_s=1e9,
        block_size=16,
        block_bytes=1000,
    )
    worker = BatchWorker(Capacity(total_blocks=8, max_num_seqs=8), block_size=16, tiers=sizes)
    worker.submit("a", arrival(1, 2, 3, 4, 5), 0.0)
    changes = [change for _, result in finish(worker) for change in result.changes]
    worker.submit("b", arrival(6, 7, 8, 9, 10), 50.0)
    finish(worker)

    assert (True, kv_events.HOST) in {(change.is_stored, change.tier) for change in changes}
    assert cached(worker, arrival(1, 2, 3, 4, 5)) == [64]
