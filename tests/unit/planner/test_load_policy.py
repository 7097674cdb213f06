import pytest

from dynamo.planner.observation import PoolLoad, PoolState, Replicas
from dynamo.planner.policies import LoadPolicy, Targets
from dynamo.planner.scaling_pipeline import Limits, ScalingPipeline
from planner_cases import observe


def propose(policy, observation):
    return policy.propose(observation, observation.traffic.value).replicas


def disaggregated():
    return LoadPolicy(Targets(mode="disagg"))


def test_full_cache_adds_a_decode_worker():
    assert propose(disaggregated(), observe(kv_usage=0.95)).decode == 2


def test_empty_cache_takes_a_decode_worker_away():
    assert propose(disaggregated(), observe(kv_usage=0.2, num_decode=3)).decode == 2


def test_cache_between_the_thresholds_changes_nothing():
    assert propose(disaggregated(), observe(kv_usage=0.7, num_decode=3)).decode == 3


def test_long_queue_adds_a_prefill_worker():
    assert propose(disaggregated(), observe(num_waiting=4)).prefill == 2


def test_queue_that_shrinks_adds_no_prefill_worker():
    policy = disaggregated()
    propose(policy, observe(num_waiting=9, num_prefill=2))

    assert propose(policy, observe(at=10, num_waiting=4, num_prefill=2)).prefill == 2


def test_pool_does_not_grow_while_a_worker_starts():
    starting = PoolState(num_ready=1, starting_since=(0.0,))

    assert propose(disaggregated(), observe(kv_usage=0.95, decode=starting)).decode == 2


def test_new_decode_worker_has_three_intervals_of_grace():
    policy = disaggregated()
    propose(policy, observe(kv_usage=0.95, num_decode=1))
    numbers = [
        propose(policy, observe(at=at, kv_usage=0.95, num_decode=2)).decode
        for at in (10, 20, 30, 40)
    ]

    assert numbers == [2, 2, 2, 3]


def test_aggregated_worker_goes_only_if_cache_and_queue_allow_it():
    policy = LoadPolicy(Targets(mode="agg"))

    assert propose(policy, observe(kv_usage=0.1, num_decode=2, num_waiting=1)).decode == 2
    assert propose(policy, observe(kv_usage=0.1, num_decode=2, num_waiting=0)).decode == 1


def test_no_load_at_all_needs_no_worker():
    policy = LoadPolicy(Targets(mode="agg"))
    idle = observe(num_requests=0, kv_usage=0.0, num_prefill=0, num_decode=3)

    assert propose(policy, idle) == (0, 0)


def test_waiting_request_without_workers_starts_one():
    policy = LoadPolicy(Targets(mode="agg"))
    waiting = observe(num_requests=0, num_waiting=1, num_prefill=0, num_decode=0)

    assert propose(policy, waiting) == (0, 1)


@pytest.mark.parametrize(
    ("mode", "present", "expected"),
    [
        ("disagg", (0, 0), (1, 1)),
        ("disagg", (2, 0), (1, 1)),
        ("decode", (1, 0), (1, 1)),
        ("prefill", (0, 1), (1, 1)),
    ],
)
def test_waiting_request_starts_a_worker_of_a_pool_without_one(mode, present, expected):
    waiting = observe(
        num_requests=0,
        num_prefill=present[0],
        num_decode=present[1],
        decode_load=PoolLoad(num_waiting=1),
    )

    assert propose(LoadPolicy(Targets(mode=mode)), waiting) == expected


def test_what_waited_for_the_first_worker_is_no_reason_for_a_second_until_it_had_an_interval():
    policy = LoadPolicy(Targets(mode="agg"))
    waiting = {"num_requests": 0, "num_waiting": 1, "num_prefill": 0}
    for at in (0, 10):
        propose(policy, observe(at=at, num_decode=0, **waiting))

    numbers = [propose(policy, observe(at=at, num_decode=1, **waiting)).decode for at in (20, 30)]

    assert numbers == [1, 2]


def test_survivors_hold_if_the_spread_load_stays_below_the_threshold():
    policy, observation = disaggregated(), observe(kv_usage=0.45, num_decode=2)
    light = observe(kv_usage=0.3, num_decode=2)

    assert not policy.survivors_hold(observation, observation.traffic.value, Replicas(1, 1))
    assert policy.survivors_hold(light, light.traffic.value, Replicas(1, 1))


def decide_every_ten_seconds(observations, **limits):
    """Return the decode workers that a pipeline decides on, one observation every ten seconds, 60 s of window."""
    pipeline = ScalingPipeline(
        LoadPolicy(Targets(mode="agg")), Targets(mode="agg"), Limits(stabilization_s=60, **limits)
    )
    decisions = [pipeline.decide(observe(at=10 * i, **o)) for i, o in enumerate(observations)]
    return [decision.replicas.decode for decision in decisions]


def test_one_low_reading_removes_no_worker_that_the_others_of_the_window_need():
    needed = {"num_prefill": 0, "num_decode": 2, "kv_usage": 0.49}  # twice as much is too much
    low = needed | {"kv_usage": 0.1}

    assert decide_every_ten_seconds([needed] * 10 + [low] * 7) == [2] * 16 + [1]


def test_long_queue_takes_no_worker_of_a_decode_pool_that_is_needed():
    """Two thirds of the caches of two workers are more than one worker has."""
    pipeline = ScalingPipeline(disaggregated(), Targets(mode="disagg"), Limits(max_gpus=3))
    decision = pipeline.decide(observe(num_waiting=9, kv_usage=0.66, num_decode=2))

    assert decision.replicas == (1, 2)


def test_last_prefill_worker_stays_while_requests_come():
    """Without it the next prompt would start another one."""
    assert propose(disaggregated(), observe(num_prefill=1, num_decode=1)).prefill == 1
    assert propose(disaggregated(), observe(num_prefill=2, num_decode=1)).prefill == 1


def test_last_worker_goes_after_a_whole_window_without_requests():
    busy = {"num_prefill": 0, "kv_usage": 0.1}
    idle = {"num_prefill": 0, "kv_usage": 0.0, "num_requests": 0}
    numbers = decide_every_ten_seconds([busy] * 10 + [idle] * 7, min_workers=0)

    assert numbers == [1] * 16 + [0]


def test_reason_names_a_long_queue_without_an_exponent():
    observation = observe(num_waiting=1234)
    proposal = disaggregated().propose(observation, observation.traffic.value)

    assert "1234 prompts waiting per worker" in proposal.reason


@pytest.mark.parametrize(
    ("silent", "expected"), [("prefill", (3, 2)), ("decode", (2, 3)), ("neither", (2, 2))]
)
def test_pool_that_reports_no_load_does_not_shrink_while_requests_come(silent, expected):
    loads = {
        f"{name}_load": PoolLoad(is_reported=name != silent, kv_usage=0.2)
        for name in ("prefill", "decode")
    }
    observation = observe(num_prefill=3, num_decode=3, **loads)
    proposal = disaggregated().propose(observation, observation.traffic.value)

    assert proposal.replicas == expected
    assert (f"no {silent} worker reports its load" in proposal.reason) == (silent != "neither")


@pytest.mark.parametrize("num_requests", [0, 5])
def test_mode_agg_leaves_prefill_workers_as_they_are(num_requests):
    policy = LoadPolicy(Targets(mode="agg"))
    observation = observe(num_requests=num_requests, kv_usage=0.0, num_prefill=2, num_decode=2)

    assert propose(policy, observation).prefill == 2
