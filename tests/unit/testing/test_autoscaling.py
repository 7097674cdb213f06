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
