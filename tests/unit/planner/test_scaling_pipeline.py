import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.observation import Missing, PoolState, Replicas, Stale
from dynamo.planner.policies import Proposal, Targets
from dynamo.planner.scaling_pipeline import Limits, ScalingPipeline
from planner_cases import observe


class FixedPolicy:
    """Proposes what a test says."""

    def __init__(self, *replicas, holds=True, unreachable=""):
        self.replicas, self.holds, self.unreachable = Replicas(*replicas), holds, unreachable
        self.is_firm = self.is_step = False

    def propose(self, observation, traffic):
        return Proposal(
            replicas=self.replicas,
            reason="because",
            unreachable=self.unreachable,
            is_firm=self.is_firm,
            is_step=self.is_step,
        )

    def survivors_hold(self, observation, traffic, fewer):
        return self.holds


def make(policy, mode="disagg", **limits):
    return ScalingPipeline(policy, Targets(mode=mode), Limits(**limits))


def test_proposal_within_limits_is_decided():
    decision = make(FixedPolicy(2, 3)).decide(observe())

    assert decision.replicas == (2, 3)
    assert decision.outcome == "up"
    assert "because" in decision.line


def test_line_names_the_change():
    assert "1p1d -> 2p3d" in make(FixedPolicy(2, 3)).decide(observe()).line


def test_minimum_holds():
    decision = make(FixedPolicy(0, 0), min_workers=1).decide(observe(num_decode=2))

    assert decision.replicas == (1, 1)


def test_minimum_of_zero_scales_to_zero():
    decision = make(FixedPolicy(0, 0), mode="agg", min_workers=0).decide(observe(num_prefill=0))

    assert decision.replicas == (0, 0)


def test_maximum_holds():
    assert make(FixedPolicy(3, 9), max_gpus=99, max_workers=4).decide(observe()).replicas == (3, 4)


@given(
    st.integers(0, 20), st.integers(0, 20), st.integers(0, 6), st.integers(0, 6),
    st.integers(0, 3), st.integers(2, 12),
)  # fmt: skip
def test_new_workers_never_exceed_the_budget(prefill, decode, ready_p, ready_d, draining, budget):
    observation = observe(
        prefill=PoolState(num_ready=ready_p, num_draining=draining),
        decode=PoolState(num_ready=ready_d),
    )
    replicas = make(FixedPolicy(prefill, decode), max_gpus=budget).decide(observation).replicas

    num_new = max(0, replicas.prefill - ready_p) + max(0, replicas.decode - ready_d)
    assert not num_new or num_new + ready_p + ready_d + draining <= budget
    assert sum(replicas) <= max(budget, 2)


@pytest.mark.parametrize(
    ("proposed", "decided"),
    [((7, 1), (2, 1)), ((1, 7), (1, 2)), ((0, 7), (0, 3)), ((1, 1), (1, 1))],
)
def test_budget_leaves_each_pool_a_worker_that_it_is_asked_for(proposed, decided):
    pipeline = make(FixedPolicy(*proposed), max_gpus=3, min_workers=0)

    assert pipeline.decide(observe(num_prefill=0, num_decode=0)).replicas == decided


@pytest.mark.parametrize(
    ("is_step", "proposed", "present", "decided"),
    [
        (False, (2, 2), (1, 2), (1, 1)),  # and one for prefill as soon as that has gone
        (True, (2, 2), (1, 2), (1, 2)),
        (True, (3, 2), (2, 1), (2, 1)),
        (True, (1, 2), (2, 1), (1, 1)),
        (True, (2, 2), (1, 1), (2, 1)),
        (True, (3, 1), (3, 0), (2, 0)),  # without a decode worker no request is answered
    ],
)
def test_step_of_one_pool_takes_no_worker_of_the_other_where_the_budget_is_full(
    is_step, proposed, present, decided
):
    policy = FixedPolicy(*proposed)
    policy.is_step = is_step
    observation = observe(num_prefill=present[0], num_decode=present[1])

    assert make(policy, max_gpus=3).decide(observation).replicas == decided


def test_change_of_two_pools_takes_away_before_it_gives():
    pipeline = make(FixedPolicy(3, 1), max_gpus=4)
    first = pipeline.decide(observe(num_prefill=2, num_decode=2))
    second = pipeline.decide(
        observe(at=10, num_prefill=2, decode=PoolState(num_ready=1, num_draining=1))
    )
    third = pipeline.decide(observe(at=20, num_prefill=2, num_decode=1))

    assert [first.replicas, second.replicas, third.replicas] == [(2, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("reading", [Missing("connection refused"), Stale(95.0)])
def test_without_a_fresh_reading_nothing_changes(reading):
    decision = make(FixedPolicy(9, 9)).decide(observe(traffic=reading, num_prefill=3, num_decode=2))

    assert decision.replicas == (3, 2)
    assert decision.outcome == "skipped"


def test_reason_of_a_missing_reading_is_said():
    decision = make(FixedPolicy(9, 9)).decide(observe(traffic=Missing("connection refused")))

    assert "connection refused" in decision.reason


def test_without_a_fresh_reading_the_minimum_still_holds():
    decision = make(FixedPolicy(9, 9), min_workers=2).decide(
        observe(traffic=Missing("no metrics"), num_prefill=1, num_decode=1)
    )

    assert decision.replicas == (2, 2)
    assert "filled up to the minimum" in decision.reason


def test_pool_shrinks_to_the_most_that_was_proposed_in_the_window():
    policy = FixedPolicy(1, 4)
    pipeline = make(policy, stabilization_s=60)
    pipeline.decide(observe(at=0, num_decode=4))
    policy.replicas = Replicas(1, 2)
    soon = pipeline.decide(observe(at=30, num_decode=4))
    later = pipeline.decide(observe(at=70, num_decode=4))

    assert soon.replicas.decode == 4
    assert later.replicas.decode == 2


def test_window_begins_anew_after_metrics_were_stale():
    pipeline = make(FixedPolicy(1, 2), stabilization_s=60)
    for at in range(0, 40, 10):
        pipeline.decide(observe(at=at, num_decode=4))
    for at in range(40, 300, 10):
        pipeline.decide(observe(at=at, num_decode=4, traffic=Stale(float(at - 30))))
    after = [pipeline.decide(observe(at=at, num_decode=4)) for at in (300, 350, 360)]

    assert [decision.replicas.decode for decision in after] == [4, 4, 2]


def test_window_begins_anew_if_nothing_of_it_could_be_read():
    policy = FixedPolicy(1, 4)
    pipeline = make(policy, stabilization_s=60)
    for at in range(0, 70, 10):
        pipeline.decide(observe(at=at, num_decode=4))
    policy.replicas = Replicas(1, 2)
    for at in range(70, 140, 10):  # each second answer is the first after a failure
        pipeline.decide(observe(at=at, num_decode=4, traffic=Missing("no answer")))
    after = [pipeline.decide(observe(at=at, num_decode=4)) for at in (140, 190, 200)]

    assert [decision.replicas.decode for decision in after] == [4, 4, 2]


def test_firm_proposal_shrinks_a_pool_at_once():
    policy = FixedPolicy(1, 4)
    pipeline = make(policy, stabilization_s=60)
    for at in (0, 60):
        pipeline.decide(observe(at=at, num_decode=4))
    policy.replicas, policy.is_firm = Replicas(1, 2), True

    assert pipeline.decide(observe(at=70, num_decode=4)).replicas.decode == 2


def test_worker_stays_if_the_others_could_not_carry_its_load():
    decision = make(FixedPolicy(1, 1, holds=False)).decide(observe(num_decode=2))

    assert decision.replicas.decode == 2
    assert "could not carry" in decision.reason


def test_worker_that_does_not_come_is_withdrawn_with_its_reason():
    pool = PoolState(num_ready=1, starting_since=(0.0,), startup_s=10.0, failure="CUDA is absent")
    decision = make(FixedPolicy(1, 2)).decide(observe(at=31, decode=pool))

    assert decision.withdrawals == (0, 1)
    assert decision.replicas == (1, 1)
    assert "CUDA is absent" in decision.reason


def test_start_is_retried_after_a_pause():
    pipeline = make(FixedPolicy(1, 2))
    late = PoolState(num_ready=1, starting_since=(0.0,), startup_s=10.0)
    pipeline.decide(observe(at=31, decode=late))
    ready = PoolState(num_ready=1, startup_s=10.0)

    assert pipeline.decide(observe(at=45, decode=ready)).replicas.decode == 1
    assert pipeline.decide(observe(at=62, decode=ready)).replicas.decode == 2


def test_start_has_longer_each_time_until_one_was_measured():
    """A large model that takes five minutes to load would be given up after three, for ever."""
    pipeline = make(FixedPolicy(1, 2), startup_s=60.0)

    def is_withdrawn(since, at, **measured):
        pool = PoolState(num_ready=1, starting_since=(since,), **measured)
        return bool(pipeline.decide(observe(at=at, decode=pool)).withdrawals.decode)

    assert is_withdrawn(0.0, 181.0)
    assert not is_withdrawn(400.0, 700.0)
    assert is_withdrawn(400.0, 761.0)
    for number in range(10):
        begin = 10_000.0 * (number + 1)
        assert is_withdrawn(begin, begin + 3601.0)
    assert not is_withdrawn(200_000.0, 200_180.0, startup_s=61.0)
    assert is_withdrawn(200_000.0, 200_184.0, startup_s=61.0)


def test_start_that_ended_is_said_and_retried_after_a_pause_that_doubles():
    pipeline = make(FixedPolicy(1, 2))
    failed = PoolState(num_ready=1, startup_s=10.0, num_failed=1, failure="CUDA is absent")
    ready = PoolState(num_ready=1, startup_s=10.0)
    first = pipeline.decide(observe(at=5, decode=failed))

    assert first.replicas == (1, 1)
    assert "1 decode ended before serving (CUDA is absent), again in 10 s" in first.reason
    assert pipeline.decide(observe(at=16, decode=ready)).replicas.decode == 2
    assert "again in 20 s" in pipeline.decide(observe(at=17, decode=failed)).reason


def test_start_that_ended_shortens_no_window():
    policy = FixedPolicy(1, 4)
    pipeline = make(policy, stabilization_s=60)
    for at in range(0, 70, 10):
        pipeline.decide(observe(at=at, num_decode=3))
    policy.replicas = Replicas(1, 1)
    failed = PoolState(num_ready=3, startup_s=10.0, num_failed=1)

    assert pipeline.decide(observe(at=70, decode=failed)).replicas.decode == 3


def test_start_that_never_succeeds_is_retried_for_ever_after_the_longest_pause():
    pipeline = make(FixedPolicy(1, 2))
    failed = PoolState(num_ready=1, startup_s=10.0, num_failed=1)
    reasons = [pipeline.decide(observe(at=at, decode=failed)).reason for at in range(1100)]

    assert "again in 600 s" in reasons[-1]


def test_worker_that_does_not_come_does_not_hinder_the_other_pool():
    pool = PoolState(num_ready=1, starting_since=(0.0,), startup_s=10.0)

    assert make(FixedPolicy(3, 2)).decide(observe(at=31, decode=pool)).replicas.prefill == 3


def test_unreachable_target_is_said():
    decision = make(FixedPolicy(1, 1, unreachable="TTFT of 1 ms")).decide(observe())

    assert "cannot be met: TTFT of 1 ms" in decision.line


def test_foreign_change_of_replicas_is_said():
    pipeline = make(FixedPolicy(1, 1))
    pipeline.decide(observe())

    assert "2 decode workers where 1 were ordered" in pipeline.decide(observe(num_decode=2)).line


@pytest.mark.parametrize("mode", ["agg", "decode"])
def test_prefill_workers_that_are_not_scaled_stay_whatever_the_budget_and_their_starts(mode):
    prefill = PoolState(num_ready=3, starting_since=(0.0,), startup_s=10.0)
    decode = PoolState(num_ready=4)
    pipeline = make(FixedPolicy(4, 4), mode=mode, max_gpus=6, max_workers=3)
    decision = pipeline.decide(observe(at=100, prefill=prefill, decode=decode))

    assert decision.replicas == (4, 2)
    assert decision.withdrawals == (0, 0)


def test_decode_workers_that_are_not_scaled_are_not_filled_up():
    decision = make(FixedPolicy(2, 0), mode="prefill").decide(observe(num_decode=0))

    assert decision.replicas == (2, 0)


def test_advisory_decisions_are_marked():
    assert make(FixedPolicy(2, 2), is_advisory=True).decide(observe()).outcome == "advisory"


def changeable(num_prefill, num_decode, role_change_s=2.0, **more):
    pools = {
        name: PoolState(num_ready=number, startup_s=30.0, role_change_s=role_change_s)
        for name, number in (("prefill", num_prefill), ("decode", num_decode))
    }
    return observe(**(pools | more))


def test_worker_changes_its_role_where_that_is_quicker_than_a_start():
    decision = make(FixedPolicy(1, 3)).decide(changeable(2, 2))

    assert (decision.replicas, decision.role_changes) == ((1, 3), 1)
    assert decision.outcome == "rebalance"
    assert "1 from prefill to decode, quicker than a start" in decision.reason


@pytest.mark.parametrize(
    ("role_change_s", "sizes"), [(31.0, {}), (None, {}), (2.0, {"prefill_gpus": 2})]
)
def test_worker_keeps_its_role_where_a_start_is_quicker_or_it_cannot_change(role_change_s, sizes):
    pipeline = ScalingPipeline(FixedPolicy(1, 3), Targets(mode="disagg", **sizes), Limits())

    assert pipeline.decide(changeable(2, 2, role_change_s)).role_changes == 0


def test_only_worker_that_serves_keeps_its_role_while_another_starts():
    decode = PoolState(num_ready=1, starting_since=(0.0,), startup_s=30.0, role_change_s=2.0)
    decision = make(FixedPolicy(2, 1)).decide(changeable(1, 1, decode=decode))

    assert decision.role_changes == 0
    assert decision.replicas.decode == 1


def test_quarter_of_a_pool_changes_at_a_time_and_nothing_starts_instead_of_the_rest():
    decision = make(FixedPolicy(4, 4)).decide(changeable(0, 8))

    assert (decision.replicas, decision.role_changes) == ((2, 6), -2)


def test_changes_need_no_free_gpus_and_further_workers_do():
    decision = make(FixedPolicy(3, 2), max_gpus=4).decide(changeable(1, 3))

    assert (decision.replicas, decision.role_changes) == ((2, 2), -1)


def test_change_of_a_role_does_not_wait_until_a_pool_may_shrink():
    pipeline = make(FixedPolicy(3, 1), stabilization_s=60.0)
    decision = pipeline.decide(changeable(2, 2))
    starting = make(FixedPolicy(3, 1), stabilization_s=60.0).decide(changeable(2, 2, None))

    assert (decision.replicas, decision.role_changes) == ((3, 1), -1)
    assert (starting.replicas, starting.role_changes) == ((3, 2), 0)


def test_change_of_a_role_waits_until_steps_down_are_more_than_a_pause_between_rounds():
    policy = FixedPolicy(3, 1)
    policy.is_step = True
    pipeline = make(policy, stabilization_s=60.0)
    changes = []
    for at, num_decode in enumerate((1, 1, 2, 1, 1, 1)):
        policy.replicas = Replicas(3, num_decode)
        changes.append(pipeline.decide(changeable(2, 2, at=at)).role_changes)

    assert changes == [0, 0, 0, 0, 0, -1]


def test_pool_that_grows_is_not_asked_whether_the_rest_carries_the_load():
    class DecodeIsFull(FixedPolicy):
        def survivors_hold(self, observation, traffic, fewer):
            return fewer.decode > 3 and fewer.prefill >= 1

    assert make(DecodeIsFull(1, 3)).decide(changeable(2, 2)).role_changes == 1


@given(
    present=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    proposed=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    budget=st.integers(2, 20),
)
def test_changes_exceed_neither_their_pool_nor_the_budget(present, proposed, budget):
    decision = make(FixedPolicy(*proposed), max_gpus=budget).decide(changeable(*present))
    changes = decision.role_changes

    assert -present[1] <= changes <= present[0]
    assert decision.replicas.prefill >= -changes
    assert decision.replicas.decode >= changes
    assert sum(decision.replicas) <= max(budget, sum(present))


def decide_without_decode_workers(num_prefill, *, starting_since=(), mode="disagg", at=100.0):
    decode = PoolState(starting_since=starting_since, startup_s=60.0, role_change_s=2.0)
    pipeline = make(FixedPolicy(num_prefill, 1), mode=mode)
    return pipeline.decide(observe(at=at, num_prefill=num_prefill, decode=decode))


def test_prefill_worker_takes_the_place_of_the_last_decode_worker():
    decision = decide_without_decode_workers(3)

    assert (decision.role_changes, decision.replicas) == (1, Replicas(2, 1))


def test_decode_worker_that_starts_for_long_is_not_waited_for():
    decision = decide_without_decode_workers(3, starting_since=(90.0,))

    assert (decision.role_changes, decision.replicas) == (1, Replicas(2, 2))


@pytest.mark.parametrize(
    "case",
    [
        {"num_prefill": 1},  # it would serve no longer
        {"num_prefill": 3, "starting_since": (41.0,)},  # ready sooner than a change
        {"num_prefill": 3, "starting_since": (41.5, 97.0)},  # perhaps one that changes
        {"num_prefill": 3, "mode": "decode"},
    ],
)
def test_prefill_worker_stays_where_it_serves_better(case):
    assert decide_without_decode_workers(**case).role_changes == 0


def test_prefill_worker_of_another_size_takes_no_place_of_a_decode_worker():
    decode = PoolState(startup_s=60.0, role_change_s=2.0)
    targets = Targets(mode="disagg", prefill_gpus=1, decode_gpus=2)
    pipeline = ScalingPipeline(FixedPolicy(3, 1), targets, Limits())
    decision = pipeline.decide(observe(num_prefill=3, decode=decode))

    assert (decision.role_changes, decision.replicas) == (0, Replicas(3, 1))
