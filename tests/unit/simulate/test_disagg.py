"""Pools with clients against what can be computed on paper, and the comparison of their curves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.disagg import policy
from dynamo.simulate import disagg
from dynamo.simulate.disagg import Gpu, GpuGroup, ModelShape, Point, Pool

BIG, SMALL = (
    GpuGroup(gpu=Gpu(), model=ModelShape(), size=size, max_num_batched_tokens=4096)
    for size in (4, 1)
)
AGGREGATED = Pool(name="aggregated", num_workers=2, group=BIG)
SPLIT = replace(AGGREGATED, name="split", num_workers=1, num_prefill=4, prefill_group=SMALL)
ASKED = {"num_prompt": 3000, "num_output": 11}


def prefill_s(group):
    return group.step_s([(0, 3000)], num_decoding=0, num_active=3000, num_prefilling=3000)


def mean_step_s(group):
    """Of an answer alone."""
    steps = [group.step_s((), num_decoding=1, num_active=3000 + i) for i in range(10)]
    return sum(steps) / len(steps)


def point(per_user, per_gpu):
    return Point(1, per_user, per_gpu, 0.0, 0.0)


@pytest.mark.parametrize(("pool", "group"), [(AGGREGATED, BIG), (SPLIT, SMALL)])
def test_single_client_waits_only_for_its_own_work(pool, group):
    alone = disagg.measure(pool, 1, **ASKED)

    assert alone.mean_ttft == pytest.approx(prefill_s(group))
    assert alone.per_user == pytest.approx(1 / mean_step_s(BIG))
    assert alone.per_gpu == pytest.approx(11 / (prefill_s(group) + 10 * mean_step_s(BIG)) / 8)


def test_transfer_delays_the_second_token():
    link = 3000 * SMALL.model.kv_bytes / 0.5  # bytes a second
    group = replace(SMALL, transfer_bytes_per_s=link)
    slow = disagg.measure(replace(SPLIT, prefill_group=group), 1, **ASKED)

    assert 1 / slow.per_user == pytest.approx(mean_step_s(BIG) + 0.5 / 10)
    assert slow.mean_ttft == pytest.approx(prefill_s(SMALL))


def test_prefill_workers_limit_many_clients():
    many = disagg.measure(SPLIT, 64, **ASKED)

    assert many.per_gpu == pytest.approx(4 / prefill_s(SMALL) * 11 / 8, rel=0.02)


@pytest.mark.parametrize(
    ("num_prompt", "limits", "share"),
    [
        (3000, disagg.ALWAYS_REMOTE, 1.0),
        (900, policy.LocalPrefillLimits(), 0.0),
        (3000, policy.LocalPrefillLimits(max_prefill_queue_size=0), 0.0),
    ],
)
def test_disagg_policy_decides_where_a_prompt_is_computed(num_prompt, limits, share):
    pool = replace(SPLIT, limits=limits)

    assert disagg.measure(pool, 8, num_prompt=num_prompt, num_output=5).share_remote == share


def test_request_that_does_not_fit_beside_the_model_is_refused():
    with pytest.raises(errors.ConfigError, match="a group of 1 GPUs has room for 18310 tokens"):
        disagg.measure(SPLIT, 1, num_prompt=19_000, num_output=2)


POINTS = st.lists(
    st.builds(point, st.integers(1, 100).map(float), st.integers(1, 100).map(float)),
    min_size=1,
    max_size=12,
)


@given(points=POINTS)
def test_frontier_has_the_points_that_no_other_beats(points):
    kept = disagg.frontier(points)

    unbeaten = {
        (p.per_user, p.per_gpu)
        for p in points
        if not any(
            q.per_user >= p.per_user and q.per_gpu >= p.per_gpu and q[1:3] != p[1:3] for q in points
        )
    }
    assert {(p.per_user, p.per_gpu) for p in kept} == unbeaten
    assert [p.per_user for p in kept] == sorted({p.per_user for p in kept})


@given(points=POINTS, factor=st.floats(0.5, 2.0))
def test_scaled_curve_has_a_constant_ratio(points, factor):
    better = [p._replace(per_gpu=p.per_gpu * factor) for p in points]

    assert all(each.ratio == pytest.approx(factor) for each in disagg.compare(better, points))


def test_curve_is_constant_below_its_slowest_point():
    ratios = disagg.compare([point(50.0, 10.0)], [point(0.0, 20.0), point(100.0, 0.1)])

    assert ratios[0].ratio == pytest.approx(0.5)
    assert (ratios[-1].per_user, ratios[-1].ratio) == (50.0, pytest.approx(10 / 10.05))
    assert disagg.winning_ranges(ratios) == []
    assert disagg.winning_ranges(
        [disagg.Ratio(s, r) for s, r in ((1, 0.9), (2, 1.2), (3, 1.1), (4, 0.5))]
    ) == [(2, 3)]


@pytest.fixture(scope="module")
def claim():
    told = disagg.DisaggConfig()
    return [disagg.measure_case(told, num_nodes).ratios["disaggregated"] for num_nodes in (1, 2)]


def gain(ratios, speed):
    return min(ratios, key=lambda each: abs(each.per_user - speed)).ratio


def test_one_node_gains_a_third_in_the_middle_and_loses_at_both_ends(claim):
    one, _ = claim

    assert gain(one, 43) == pytest.approx(1.3, abs=0.1)
    assert (one[0].ratio < 0.9, one[-1].ratio < 0.5) == (True, True)


def test_two_nodes_gain_more_than_twice(claim):
    one, two = claim

    assert max(each.ratio for each in two) > 2
    assert max(each.ratio for each in two) > max(each.ratio for each in one)
    assert two[-1].ratio < 0.5


def test_short_prompts_with_long_outputs_gain_nothing():
    told = disagg.DisaggConfig(prompt_tokens=300, output_tokens=600)

    ratios = disagg.measure_case(told, 1).ratios["disaggregated"]

    assert gain(ratios, 40) < 1


def test_slow_points_can_be_left_out():
    told = disagg.DisaggConfig(max_ttft_s=0.1, concurrency=2)

    case = disagg.measure_case(told, 1)

    assert case.points["disaggregated"] == []
    assert disagg.rows(case)[0][2:] == ("-",) * (len(disagg.COLUMNS) - 2)
