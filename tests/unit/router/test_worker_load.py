import random

import pytest

from dynamo.router.api import Worker
from dynamo.router.worker_load import (
    CachePressure,
    Capacity,
    DecodeSlowdown,
    PrefillSpeed,
    WorkerLoad,
)


def load(**capacity):
    return WorkerLoad(Capacity(**capacity), PrefillSpeed())


def slowdown_of(pairs):
    slowdown = DecodeSlowdown()
    for tokens, seconds in pairs:
        slowdown.observe(seconds, tokens)
    return slowdown.seconds_per_token


def test_slowdown_is_the_slope_of_the_time_of_answers():
    assert slowdown_of((n, 2 + 0.003 * n) for n in range(1_000, 1_020)) == pytest.approx(
        0.003, rel=1e-4
    )


def test_answers_that_get_faster_with_load_slow_nobody_down():
    assert slowdown_of((n, 9 - 0.003 * n) for n in range(1_000, 1_020)) == 0


def test_slowdown_is_at_most_the_whole_time_over_all_tokens():
    assert slowdown_of((n, 0.01 * n - 5) for n in range(1_000, 1_020)) == pytest.approx(
        0.005, rel=0.02
    )


def test_noise_is_no_slowdown():
    noise = random.Random(1)
    pairs = [(noise.uniform(1_000, 2_000), noise.uniform(1, 5)) for _ in range(200)]

    assert slowdown_of(pairs) < 1e-4
    assert slowdown_of((n, seconds + 0.01 * n) for n, seconds in pairs) == pytest.approx(
        0.01, rel=0.1
    )


@pytest.mark.parametrize("pairs", [[], [(1_000, 1.0), (2_000, 2.0)], [(1_000, 1.0)] * 50])
def test_slowdown_is_unknown_without_answers_at_different_loads(pairs):
    assert slowdown_of(pairs) == 0


def test_idle_worker_always_has_room():
    assert load(total_blocks=1).has_room(100, 0.0, 0.0)


def test_room_ends_with_the_tokens_of_a_step():
    worker = load(max_num_batched_tokens=100)
    worker.num_requests = 1
    worker.add_prefill("a", 100, 0.0)
    before = worker.has_room(0, 1.0, 0.0)

    worker.add_prefill("b", 1, 0.0)

    assert (before, worker.has_room(0, 1.0, 0.0)) == (True, False)


def test_share_in_use_needs_the_total_of_blocks():
    worker = load(total_blocks=10)
    worker.active_blocks = 6

    assert worker.share_in_use(1) == 0.7
    assert load().share_in_use(1) is None


def test_room_ends_with_slots_and_with_blocks():
    worker = load(max_num_seqs=2, total_blocks=10)
    worker.num_requests, worker.active_blocks = 1, 6

    assert worker.has_room(4, 1.0, 0.0)
    assert not worker.has_room(5, 1.0, 0.0)
    worker.num_requests = 2
    assert not worker.has_room(0, 1.0, 0.0)


def test_queued_requests_take_no_room():
    worker = load(max_num_batched_tokens=10)
    worker.num_requests, worker.reserved_tokens = 1, 1000.0

    assert worker.has_room(0, 1.0, 0.0)


def test_prefill_can_be_removed_twice():
    worker = load()
    worker.add_prefill("a", 5, 0.0)

    worker.remove_prefill("a", 1.0)
    worker.remove_prefill("a", 1.0)

    assert worker.prefill_tokens == 0


def test_prefill_speed_forgets_old_observations():
    pace = PrefillSpeed()
    for _ in range(10):
        pace.observe(100, 1.0)
    for _ in range(500):
        pace.observe(100, 0.1)

    assert pace.tokens_per_s == pytest.approx(1000, rel=0.01)


def test_cache_pressure_decays_with_later_insertions():
    loads = {Worker(0): load(), Worker(1): load()}
    pressure = CachePressure(loads.values())
    pressure.update_cache_size(block_size=16)
    first, second = loads.values()

    pressure.insert(first, 1000)
    pressure.insert(second, 1000)
    at_once = second.inserted_tokens / first.inserted_tokens
    for _ in range(20_000):
        pressure.insert(second, 1000)

    assert at_once == pytest.approx(1.0, abs=0.01)
    assert first.inserted_tokens < 1e-6 * second.inserted_tokens < float("inf")
