import dataclasses
import functools

import pytest

from dynamo.planner import predictors
from dynamo.planner.observation import Fresh, PoolState, Traffic
from dynamo.planner.policies import SlaPolicy, Targets
from planner_cases import make_profile, observe


def make_policy(**targets):
    constant = functools.partial(predictors.make_predictor, "constant")
    return SlaPolicy(make_profile(), Targets(mode="disagg", **targets), constant)


def propose(policy, observation):
    return policy.propose(observation, observation.traffic.value)


def test_prefill_workers_are_tokens_over_throughput():
    # 25 requests/s of 1,000 tokens, 10,000 tokens/s each; the observed TTFT equals the profile's
    assert propose(make_policy(), observe(num_requests=250)).replicas.prefill == 3


def test_decode_workers_follow_the_best_throughput_within_the_itl():
    policy = make_policy(itl_s=0.05)
    rate = make_profile().decode.best_rate(
        0.05 / (0.02 / make_profile().decode.itl_s(20 * 1050 / 100_000, 1050)), 1050
    )

    replicas = propose(policy, observe(num_requests=100)).replicas

    assert replicas.decode == -(-10 * 100 // rate.throughput)


def test_prefill_correction_never_raises_the_number():
    slow = Traffic(num_requests=250, isl=1000, osl=100, ttft_s=9.0, itl_s=0.02, duration_s=2.0)

    assert propose(make_policy(), observe(traffic=Fresh(slow))).replicas.prefill == 3


def test_correction_keeps_its_value_while_workers_start():
    policy = make_policy()
    cached = Traffic(num_requests=250, isl=1000, osl=100, ttft_s=0.03, itl_s=0.02, duration_s=2.0)
    starting = PoolState(num_ready=1, starting_since=(0.0,))

    frozen = propose(policy, observe(traffic=Fresh(cached), prefill=starting))
    free = propose(policy, observe(traffic=Fresh(cached)))

    assert frozen.replicas.prefill == 3
    assert free.replicas.prefill == 1


@pytest.mark.parametrize("missing", ["isl", "osl", "ttft_s", "itl_s", "duration_s"])
def test_interval_without_a_mean_is_skipped(missing):
    means = {"isl": 1000, "osl": 100, "ttft_s": 0.1, "itl_s": 0.02, "duration_s": 2.0}
    traffic = Traffic(num_requests=900, **(means | {missing: None}))
    observation = observe(traffic=Fresh(traffic), num_prefill=2, num_decode=3)

    assert propose(make_policy(), observation).replicas == (2, 3)


def test_first_request_gets_workers_though_none_has_ended():
    observation = observe(
        traffic=Fresh(Traffic(num_requests=0)), num_prefill=0, num_decode=0, num_waiting=1
    )

    assert propose(make_policy(), observation).replicas == (1, 1)


def test_policy_without_correction_uses_the_profile_alone():
    constant = functools.partial(predictors.make_predictor, "constant")
    policy = SlaPolicy(make_profile(), Targets(mode="decode"), constant, corrects=False)
    observation = observe(num_requests=100, num_prefill=7)
    proposal = propose(policy, observation)

    assert "corrections 1.00 and 1.00" in proposal.reason
    assert proposal.replicas.prefill == 7
    assert policy.survivors_hold(observation, observation.traffic.value, proposal.replicas)


def test_estimate_is_the_queue_and_the_own_prompt_and_the_itl_of_the_use():
    profile = make_profile()
    observation = observe(num_prefill=2, kv_usage=0.4)
    waiting = dataclasses.replace(observation.prefill_load, waiting_tokens=4000)
    estimate = propose(
        make_policy(), dataclasses.replace(observation, prefill_load=waiting)
    ).estimate

    tokens_per_s = profile.prefill.tokens_per_s(1000)
    assert estimate.ttft_s == pytest.approx(2000 / tokens_per_s + profile.prefill.prompt_s(1000))
    assert estimate.itl_s == profile.decode.itl_s(0.4, 1050)
    assert estimate.prompts_per_s == tokens_per_s / 1000
