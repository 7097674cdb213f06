import functools

import pytest

from dynamo.base import errors
from dynamo.planner import predictors, service
from dynamo.planner.auto_policy import AutoPolicy, as_aggregated
from dynamo.planner.config import ScalingConfig
from dynamo.planner.observation import PoolLoad, PoolState, Replicas
from dynamo.planner.policies import Targets
from dynamo.planner.predictive_policy import PredictivePolicy
from dynamo.planner.scaling_pipeline import Limits, ScalingPipeline
from planner_cases import make_steady_profile, observe

SETTLE_S = 20.0
MANY, FEW = 100, 3  # requests in ten seconds, of 1,000 tokens


def make_policy():
    make = functools.partial(predictors.make_predictor, "constant")
    profile = make_steady_profile()
    return AutoPolicy(
        Targets(mode="auto", ttft_s=0.5, itl_s=0.0125),
        lambda targets: PredictivePolicy(profile, targets, make),
        settle_s=SETTLE_S,
    )


def propose_until(policy, end_s, num_requests, num_prefill=0, num_decode=6):
    proposal = None
    for at in range(0, end_s + 1, 10):
        observation = observe(at, num_requests, num_prefill=num_prefill, num_decode=num_decode)
        proposal = policy.propose(observation, observation.traffic.value)
    return proposal


def test_load_that_needs_fewer_gpus_apart_is_disaggregated_once_that_has_settled():
    before = propose_until(make_policy(), 10, MANY)
    after = propose_until(make_policy(), 20, MANY)

    assert (before.replicas.prefill, before.is_firm) == (0, False)
    assert after.replicas.prefill > 0
    assert after.is_firm
    assert sum(after.replicas) < before.replicas.decode
    assert "disaggregated needs less than aggregated" in after.reason


def test_small_load_is_aggregated_again():
    proposal = propose_until(make_policy(), 20, FEW, num_prefill=2, num_decode=1)

    assert (proposal.replicas, proposal.is_firm) == ((0, 1), True)


def test_form_stays_where_the_other_is_better_for_moments_only():
    policy, forms = make_policy(), []
    for at in range(0, 200, 10):
        observation = observe(at, MANY if at % 20 else FEW, num_prefill=0, num_decode=6)
        forms.append(policy.propose(observation, observation.traffic.value).replicas.prefill)

    assert not any(forms)


def test_form_that_was_just_taken_is_not_left_before_the_other_has_been_better_for_as_long():
    policy = make_policy()
    propose_until(policy, 20, MANY)
    moved = [observe(at, FEW, num_prefill=2, num_decode=1) for at in (30, 40, 50)]
    proposals = [policy.propose(each, each.traffic.value) for each in moved]

    assert [each.is_firm for each in proposals] == [False, False, True]


def test_all_workers_and_their_load_are_one_pool_where_they_are_aggregated():
    observation = as_aggregated(
        observe(
            prefill=PoolState(num_ready=2, starting_since=(1.0,)),
            decode=PoolState(num_ready=3, num_draining=1),
            prefill_load=PoolLoad(num_waiting=4),
            decode_load=PoolLoad(num_waiting=1, kv_usage=0.5),
        )
    )

    assert observation.num_ordered == Replicas(0, 6)
    assert observation.decode_load == PoolLoad(num_waiting=5, kv_usage=0.5)


def test_move_changes_roles_at_once_and_stays_within_the_budget():
    limits = Limits(max_gpus=6, stabilization_s=SETTLE_S)
    pipeline = ScalingPipeline(make_policy(), Targets(mode="auto"), limits)
    pools, history = {"prefill": 0, "decode": 6}, []
    for at in range(0, 200, 10):
        states = {
            name: PoolState(num_ready=number, startup_s=30.0, role_change_s=2.0)
            for name, number in pools.items()
        }
        decision = pipeline.decide(observe(at, MANY, **states))
        pools = decision.replicas._asdict()
        history.append(decision)

    moves = [decision for decision in history if decision.role_changes]
    assert moves[0].at == SETTLE_S
    assert moves[0].role_changes == -1
    assert all(sum(decision.replicas) <= 6 for decision in history)
    assert history[-1].replicas.prefill > 0
    assert history[-1].replicas == history[-2].replicas


def test_mode_auto_needs_a_profile():
    with pytest.raises(errors.ConfigError, match="expected --policy predictive and a profile"):
        service.make_pipeline(ScalingConfig(mode="auto"))
