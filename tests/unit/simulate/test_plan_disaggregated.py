"""The planner's prefill worker and decode worker beside two mock engines, which they stand for."""

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from engine_pair import EnginePair

from dynamo.engine.mock import timing
from dynamo.planner.observation import Replicas
from dynamo.simulate import plan_run
from dynamo.simulate.plan_cluster import PlanCluster, WorkerDeath
from dynamo.simulate.plan_worker import Request, StepTimes
from dynamo.simulate.workload import SharedPrefixes

NUM_BLOCKS, BLOCK, OUTPUT = 1536, 16, 32
TIMES = StepTimes(
    prefill_s=lambda num_tokens: timing.prefill_ms(round(num_tokens)) / 1e3,
    decode_s=lambda share: timing.decode_ms(share) / 1e3,
    num_kv_tokens=NUM_BLOCKS * BLOCK,
    max_num_seqs=64,
)


def make_arrivals(num_requests, rate=0.0):
    """Return prompts of 2,098 tokens, 2,048 of which are one of 32 prefixes."""
    made = SharedPrefixes(
        num_prefixes=32, prefix_tokens=2048, suffix_tokens=50, output_tokens=OUTPUT,
        num_requests=num_requests, concurrency=1, block_size=BLOCK, seed=0,
    )  # fmt: skip
    draw, at, arrivals = random.Random(1), 0.0, []
    while (arrival := made.next_arrival(0.0)) is not None:
        at += draw.expovariate(rate) if rate else 0.0
        arrivals.append(replace(arrival, at=at))
    return arrivals


def make_requests(arrivals):
    return [
        Request(
            at=arrival.at, num_prompt=arrival.num_tokens, num_output=arrival.num_output,
            names=arrival.names, block_size=BLOCK,
        )
        for arrival in arrivals
    ]  # fmt: skip


def figures(first_s, rest_s, seconds):
    """Return mean TTFT, mean ITL and requests a second."""
    return fmean(first_s), fmean(rest_s) / (OUTPUT - 1), len(first_s) / seconds


def run_engines(arrivals, num_clients):
    unsent = iter(arrivals if num_clients else ())

    def ask():
        if (arrival := next(unsent, None)) is not None:
            pair.submit(arrival)

    pair = EnginePair(NUM_BLOCKS, BLOCK, on_end=ask)
    for arrival in () if num_clients else arrivals:
        pair.clock.call_later(arrival.at, pair.submit, arrival)
    for _ in range(num_clients):
        ask()
    pair.run()
    first_at, ended_at = pair.first_at, pair.ended_at
    return figures(
        [first_at[name] - at for name, at in pair.at.items()],
        [ended_at[name] - first_at[name] for name in pair.at],
        max(ended_at.values()) - arrivals[0].at,
    )


def run_planned(arrivals, num_clients):
    requests = make_requests(arrivals)
    unsent = iter(requests if num_clients else ())

    def ask():
        if (request := next(unsent, None)) is not None:
            request.at = cluster.now
            cluster.submit(request)

    cluster = PlanCluster(TIMES, on_end=ask)
    cluster.add_ready(Replicas(1, 1))
    if not num_clients:
        plan_run.feed(cluster, requests, 0, math.inf)
    for _ in range(num_clients):
        ask()
    cluster.run_until(math.inf)
    return figures(
        [request.ttft_s for request in requests],
        [request.ended_at - request.first_token_at for request in requests],
        max(request.ended_at for request in requests) - arrivals[0].at,
    )


@pytest.mark.parametrize(
    ("num_clients", "rate"), [(1, 0.0), (16, 0.0), (64, 0.0), (0, 6.0), (0, 11.0), (0, 15.0)]
)
def test_planned_workers_take_as_long_as_two_mock_engines(num_clients, rate):
    """At 64 clients and at 15 requests a second first the decode worker's cache is full, then the other one's."""
    arrivals = make_arrivals(160, rate)
    ttft_s, itl_s, requests_per_s = run_planned(arrivals, num_clients)
    expected_ttft_s, expected_itl_s, expected_rate = run_engines(arrivals, num_clients)

    assert ttft_s == pytest.approx(expected_ttft_s, rel=0.1)
    assert itl_s == pytest.approx(expected_itl_s, rel=0.02)
    assert requests_per_s == pytest.approx(expected_rate, rel=0.02)


SMALL = replace(TIMES, num_kv_tokens=7000)  # two prompts of 3,000 tokens and their answers


def serve_some(num_requests, *replicas):
    cluster = PlanCluster(SMALL, startup_s=1.0)
    cluster.add_ready(Replicas(*replicas))
    requests = [Request(at=0.0, num_prompt=3000, num_output=50) for _ in range(num_requests)]
    for request in requests:
        cluster.submit(request)
    return cluster, requests


def test_prompts_wait_for_their_first_token_while_the_decode_worker_is_full():
    """Two are decoded, and two are computed and wait in the prefill worker's cache, which is full of them."""
    cluster, requests = serve_some(6, 1, 1)
    cluster.run_until(math.inf)

    assert requests[3].first_token_at < requests[0].ended_at
    assert requests[4].first_token_at > requests[0].ended_at


def test_prefill_worker_that_drains_ends_when_its_last_prompt_is_copied():
    cluster, requests = serve_some(4, 1, 1)
    cluster.run_until(1.0)
    cluster.scale(Replicas(0, 1))
    draining = cluster.observe(1.0).prefill.num_draining
    cluster.run_until(1.5)
    still = cluster.observe(1.0).prefill.num_draining
    cluster.run_until(math.inf)

    assert (draining, still, cluster.observe(1.0).prefill.num_draining) == (1, 1, 0)
    assert all(request.ended_at < math.inf for request in requests)


def test_prompts_that_no_decode_worker_will_copy_leave_the_prefill_worker():
    cluster, requests = serve_some(6, 1, 0)
    cluster.run_until(10.0)
    usage = cluster.observe(1.0).prefill_load.kv_usage
    cluster.scale(Replicas(1, 1))
    cluster.run_until(math.inf)

    assert usage == 0
    assert all(request.ttft_s < 10 and request.ended_at < math.inf for request in requests)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_death_of_a_worker_leaves_no_blocks_under_a_lease(role):
    cluster, requests = serve_some(8, 2, 2)
    cluster.schedule_death(WorkerDeath(1.0, role))
    cluster.run_until(math.inf)

    assert all(request.ended_at < math.inf for request in requests)
    assert cluster.num_migrated > 0
    assert cluster.observe(1.0).prefill_load.kv_usage == 0
