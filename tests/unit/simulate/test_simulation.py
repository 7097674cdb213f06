import random

import pytest
from tests.unit.simulate import traces

from dynamo.router import config as router_config
from dynamo.router import prefix_index
from dynamo.router.api import Decision, Worker
from dynamo.router.worker_load import Capacity
from dynamo.simulate import routing, simulation, workload
from dynamo.simulate.routing import SimulateConfig
from dynamo.simulate.workers import FcfsWorker


def run(policy, trace, **told):
    config = SimulateConfig(trace="given", **told)
    return routing.run(
        config, router_config.RouterConfig(), trace, policy, lambda n: None, lambda: 0.0
    )


class LongestPrefix:
    """The trap: whoever holds most of it, whatever that means for the others."""

    uses_cache, waits_for_worker = True, False

    def select_worker(self, prompt, view, now):
        return Decision(max(view.loads, key=view.overlap), 0)


def share_of_the_busiest(trace, monkeypatch, policy=None):
    if policy is not None:
        monkeypatch.setattr(router_config, "make_policy", lambda told, draw: policy)
    return run("estimated-ttft", trace).curves.shares[0] / 8


def test_every_request_is_answered_after_its_arrival():
    trace = traces.conversations(300)

    summary = run("round-robin", trace)

    assert summary.num_requests == 300
    assert summary.curves.ttfts[0] >= 0


def test_estimated_ttft_avoids_the_longest_prefix_trap(monkeypatch):
    trace = traces.conversations(600)

    assert share_of_the_busiest(trace, monkeypatch) < 1.3 / 8
    assert share_of_the_busiest(trace, monkeypatch, LongestPrefix()) == 1


def test_estimated_ttft_avoids_the_trap_on_the_recorded_trace(monkeypatch):
    trace = traces.recorded(limit=3000)

    assert share_of_the_busiest(trace, monkeypatch) < 1.3 / 8
    assert share_of_the_busiest(trace, monkeypatch, LongestPrefix()) == 1


@pytest.mark.parametrize(("policy", "mean_ttft"), [("round-robin", 5.62), ("least-loaded", 2.29)])
def test_simulation_gives_the_figures_of_an_independent_study(policy, mean_ttft):
    summary = run(policy, traces.recorded())

    assert summary.mean_ttft == pytest.approx(mean_ttft, rel=0.02)


def test_estimated_ttft_is_better_than_every_baseline():
    trace = traces.conversations(1000)

    ours = run("estimated-ttft", trace).mean_ttft

    for name in ("round-robin", "least-loaded", "consistent-hash", "dynamo"):
        assert ours < run(name, trace).mean_ttft


def test_prefixes_stay_on_their_workers_when_caches_are_small():
    config = SimulateConfig(
        engine="batch", workers=4, cache_tokens=1536 * 16, requests=320, concurrency=16
    )

    summary = routing.run(
        config, router_config.RouterConfig(), None, "estimated-ttft", lambda n: None, lambda: 0.0
    )

    assert summary.hit_rate > 0.95 * (1 - 32 / 320) * 2048 / 2098


def test_requests_share_no_worker_where_that_slows_their_answers():
    """Four clients and four workers: two requests on one worker while another idles cost a sixth of the throughput."""
    config = SimulateConfig(
        engine="batch", workers=4, cache_tokens=24_576, max_num_seqs=64, requests=200, concurrency=4
    )  # fmt: skip

    def duration_s(policy):
        return routing.run(
            config, router_config.RouterConfig(), None, policy, lambda n: None, lambda: 0.0
        ).simulated_s

    assert duration_s("estimated-ttft") < 1.05 * duration_s("dynamo")


def test_closed_loop_ends_when_all_requests_were_sent():
    config = SimulateConfig(
        engine="batch", workers=2, cache_tokens=1 << 20, requests=50, concurrency=7
    )
    seen = []

    summary = routing.run(
        config, router_config.RouterConfig(), None, "random", seen.append, lambda: 0.0
    )

    assert (summary.num_requests, seen[-1]) == (50, 50)


def test_same_seed_gives_the_same_run():
    trace = traces.conversations(200)

    assert run("power-of-two", trace).curves.ttfts == run("power-of-two", trace).curves.ttfts


def test_index_equals_the_simulated_caches():
    """So the router expects what the workers then find: a run's predicted and real hits are the same."""
    rng, index, caches = random.Random(5), prefix_index.PrefixIndex(), {}
    selector = router_config.make_selector(
        router_config.RouterConfig(), index, block_size=16, draw=lambda: 0.0
    )
    for i in range(3):
        caches[Worker(i)] = FcfsWorker(tokens_per_s=1e9, num_blocks=12, block_size=16)
    selector.set_workers(dict.fromkeys(caches, Capacity()))
    chains = [tuple(100 * i + j for j in range(rng.randrange(1, 6))) for i in range(8)]
    arrivals = [
        workload.SimulatedRequest(
            at=float(at), num_tokens=100, num_output=1, names=rng.choice(chains)
        )
        for at in range(200)
    ]

    simulation.Simulation(workload.Trace(arrivals, 16), caches, selector, index).run()

    for chain in chains:
        held = {w: [name in c._cache for name in chain] for w, c in caches.items()}
        expected = {w: [*known, False].index(False) for w, known in held.items()}
        assert index.find_matches(chain).by_tier.get("device", {}) == {
            w: n for w, n in expected.items() if n
        }


def test_requests_wait_in_the_router_when_workers_are_full():
    selector = router_config.make_selector(
        router_config.RouterConfig(),
        index := prefix_index.PrefixIndex(),
        block_size=16,
        draw=lambda: 0.0,
    )
    workers = {Worker(0): FcfsWorker(tokens_per_s=16.0, num_blocks=0, block_size=16)}
    selector.set_workers({Worker(0): Capacity(max_num_batched_tokens=16)})
    arrivals = [
        workload.SimulatedRequest(
            at=float(at), num_tokens=160, num_output=1, names=range(10 * at, 10 * at + 10)
        )
        for at in range(3)
    ]

    record = simulation.Simulation(workload.Trace(arrivals, 16), workers, selector, index).run()

    assert record.max_waiting == 2
    assert [o.first_output_at for o in record.outcomes] == [10.0, 20.0, 30.0]
    assert [o.ended_at for o in record.outcomes] == [10.0, 20.0, 30.0]


def test_outcome_has_the_time_between_its_tokens():
    arrival = workload.SimulatedRequest(at=0.0, num_tokens=8, num_output=5, names=(1,))
    outcome = simulation.Outcome(arrival=arrival, first_output_at=2.0, ended_at=4.0)

    assert outcome.itl == 0.5


def test_time_between_tokens_is_that_of_answers_with_two_tokens_or_more():
    outcomes = [
        simulation.Outcome(
            arrival=workload.SimulatedRequest(at=0.0, num_tokens=1, num_output=number, names=[0]),
            worker=Worker(0),
            first_output_at=1.0,
            ended_at=float(number),
        )
        for number in (1, 3)
    ]
    record = simulation.RunRecord(outcomes=outcomes)

    assert simulation.summarise("x", record, [Worker(0)], 1.0).mean_itl == 1.0


def test_cache_smaller_than_a_block_is_not_unlimited():
    trace = traces.conversations(60)

    assert run("round-robin", trace, workers=1, cache_tokens=1).hit_rate < 0.1
    assert run("round-robin", trace, workers=1, cache_tokens=0).hit_rate > 0.3
