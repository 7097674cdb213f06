"""How many pods a HorizontalPodAutoscaler asks for."""

import pytest

from dynamo.testing.kube import autoscaling

UNKNOWN = None


@pytest.mark.parametrize(
    ("usages", "current", "expected"),
    [
        ([1.0], 1, 2),
        ([0.55, 0.54], 2, 2),  # within the tolerance
        ([0.6, 0.6], 2, 3),
        ([0.1, 0.1, 0.1], 3, 1),
        ([1.0, UNKNOWN], 2, 2),  # UNKNOWN speaks against a change
        ([0.1, UNKNOWN], 2, 2),
        ([0.0, 0.0, UNKNOWN], 3, 1),
        ([UNKNOWN], 1, None),
        ([], 1, None),
    ],
)
def test_replicas_bring_the_usage_to_its_target(usages, current, expected):
    loads = [autoscaling.PodLoad(usage, 0.5) for usage in usages]

    assert autoscaling.count_replicas(loads, current) == expected


def test_pod_that_is_not_ready_counts_as_idle_in_a_rise_and_not_in_a_fall():
    starting = autoscaling.PodLoad(2.0, 0.5, is_ready=False)

    assert autoscaling.count_replicas([autoscaling.PodLoad(1.0, 0.5), starting], 2) == 2
    assert autoscaling.count_replicas([autoscaling.PodLoad(0.1, 0.5), starting], 2) == 1


def run_history(behavior, steps, current=1):
    """Return the replicas after each step: the seconds since the one before, and what the metrics ask for."""
    history, now, counts = autoscaling.ScalingHistory(0.0, current), 0.0, []
    for seconds, desired in steps:
        now += seconds
        after = history.limit(behavior, now, current, desired)
        if after != current:
            history.record_change(now, after - current)
        current = after
        counts.append(current)
    return counts


def test_without_policies_replicas_double_or_grow_by_four_in_fifteen_seconds():
    assert run_history({}, [(2, 100)] * 3) == [5, 5, 5]
    assert run_history({}, [(2, 100), (16, 100), (16, 100)]) == [5, 10, 20]


def test_policies_bound_what_is_added_in_their_period():
    pods = {"type": "Pods", "value": 2, "periodSeconds": 60}
    percent = {"type": "Percent", "value": 50, "periodSeconds": 60}
    steps = [(2, 100), (30, 100), (31, 100)]

    assert run_history({"scaleUp": {"policies": [pods]}}, steps, 10) == [12, 12, 14]
    assert run_history({"scaleUp": {"policies": [pods, percent]}}, steps, 10) == [15, 15, 23]
    cautious = {"scaleUp": {"policies": [pods, percent], "selectPolicy": "Min"}}
    assert run_history(cautious, steps, 10) == [12, 12, 14]
    assert run_history({"scaleUp": {"selectPolicy": "Disabled"}}, steps, 10) == [10, 10, 10]


def test_policies_and_window_bound_what_is_taken_away():
    rule = {"policies": [{"type": "Pods", "value": 3, "periodSeconds": 60}]}
    steps = [(2, 1), (2, 1), (61, 1)]

    assert run_history({"scaleDown": rule}, steps, 10) == [10, 10, 10]  # five minutes are not over
    rule["stabilizationWindowSeconds"] = 0
    assert run_history({"scaleDown": rule}, steps, 10) == [7, 7, 4]
    rule["selectPolicy"] = "Disabled"
    assert run_history({"scaleDown": rule}, steps, 10) == [10, 10, 10]


def test_replicas_follow_the_highest_recommendation_of_the_window():
    steps = [(2, 8), (10, 2), (60, 4), (231, 4), (70, 4)]
    behavior = {"scaleUp": {"policies": [{"type": "Pods", "value": 100, "periodSeconds": 1}]}}

    assert run_history(behavior, steps, 3) == [8, 8, 8, 4, 4]
