"""Rates and quantiles between two samples of counters, and the hour that is kept."""

import pytest

from dynamo.console import metric_history
from dynamo.console.metric_history import ALL_MODELS, MAX_MODELS, MAX_POINTS, MetricHistory, Sample

INF = float("inf")


def sample(at=0.0, *, read_at=None, ttft=(), itl=(), **counters):
    names = ("num_ended", "num_failed", "input_tokens", "cached_tokens", "output_tokens",
             "num_inflight", "num_queued")  # fmt: skip
    read_at = at if read_at is None else read_at
    values = dict.fromkeys(names, 0.0) | counters
    return Sample(at=at, read_at=read_at, ttft=ttft, itl=itl, **values)


def test_point_has_the_rates_between_two_samples():
    first = sample(100.0, num_ended=10, input_tokens=1000, cached_tokens=100, output_tokens=50)
    second = sample(
        105.0, num_ended=20, num_failed=5, input_tokens=2000, cached_tokens=600, output_tokens=550,
        num_inflight=3, num_queued=1,
    )  # fmt: skip
    point = metric_history.make_point(first, second)

    assert (point.requests_per_s, point.errors_per_s) == (2.0, 1.0)
    assert (point.input_tokens_per_s, point.output_tokens_per_s) == (200.0, 100.0)
    assert (point.cached_share, point.num_inflight, point.num_queued) == (0.5, 3, 1)
    assert (point.ttft_p50, point.itl_p95) == (None, None)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_rates_stay_when_the_wall_clock_jumps(jump_s):
    first = sample(10_000.0, read_at=100.0, num_ended=10)
    second = sample(10_005.0 + jump_s, read_at=105.0, num_ended=20)

    assert metric_history.make_point(first, second).requests_per_s == 2.0


def test_point_without_prompts_has_no_cached_share():
    assert metric_history.make_point(sample(0.0), sample(5.0)).cached_share is None


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (INF, 0.0)], 0.5, None),
        ([(1.0, 4.0), (INF, 4.0)], 0.5, 0.5),
        ([(1.0, 2.0), (3.0, 4.0), (INF, 4.0)], 0.75, 2.0),
        ([(1.0, 2.0), (INF, 4.0)], 0.95, 1.0),
        ([(0.0, 0.0), (1.0, 2.0), (INF, 2.0)], 0.0, 0.0),
        ([(1.0, 1.0)], 1.5, 1.0),
    ],
)
def test_quantile_is_interpolated_within_its_bucket(buckets, share, expected):
    assert metric_history.quantile(buckets, share) == expected


def test_quantiles_count_only_what_came_between_the_samples():
    first = sample(0.0, ttft=[(1.0, 100.0), (2.0, 100.0), (INF, 100.0)])
    second = sample(5.0, ttft=[(1.0, 100.0), (2.0, 104.0), (INF, 104.0)])

    assert metric_history.make_point(first, second).ttft_p50 == 1.5


def test_history_has_each_model_and_the_sum():
    history = MetricHistory()
    history.add({"a": sample(0.0), "b": sample(0.0)}, 0.0, 0.0)
    buckets = [(1.0, 2.0), (INF, 2.0)]
    history.add(
        {
            "a": sample(5.0, output_tokens=5, itl=buckets),
            "b": sample(5.0, output_tokens=10, itl=buckets),
        },
        5.0,
        5.0,
    )

    assert history.models == ["a", "b"]
    assert history.latest("b").output_tokens_per_s == 2.0
    assert history.latest().output_tokens_per_s == 3.0
    assert history.latest().itl_p50 == 0.5
    assert history.points("unknown") == []
    assert history.latest("unknown") is None


def test_history_is_bounded_in_time_and_in_models():
    history = MetricHistory()
    for number in range(MAX_POINTS + 10):
        models = {f"m{i:02}": sample(5.0 * number, num_ended=number) for i in range(MAX_MODELS + 3)}
        history.add(models, 5.0 * number, 5.0 * number)

    assert len(history.points()) == MAX_POINTS
    assert len(history.models) == MAX_MODELS
    assert history.points(ALL_MODELS)[-1].requests_per_s == pytest.approx((MAX_MODELS + 3) / 5)
