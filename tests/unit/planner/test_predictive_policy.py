import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner import predictors
from dynamo.planner.forecast import Forecast, RequestShape
from dynamo.planner.observation import Fresh, PoolLoad, PoolState, ReportedLoad, Traffic
from dynamo.planner.policies import Targets
from dynamo.planner.predictive_policy import (
    Headroom,
    PredictivePolicy,
    Sizing,
    stabilization_s,
)
from dynamo.planner.profile import DecodePoint, DecodeSurface, WorkerProfile
from dynamo.protocols.load import ForwardPass
from planner_cases import make_profile, make_steady_profile, observe


def make_policy(mode="disagg", corrects=True, **targets):
    make = functools.partial(predictors.make_predictor, "constant")
    targets = Targets(mode=mode, **targets)
    return PredictivePolicy(make_profile(), targets, make, corrects=corrects)


def propose(policy, observation):
    return policy.propose(observation, observation.traffic.value)


def test_queue_that_will_be_there_adds_workers():
    calm = propose(make_policy(), observe(num_requests=100, num_prefill=2))
    crowded = propose(make_policy(), observe(num_requests=100, num_prefill=2, num_waiting=900))

    assert crowded.replicas.prefill > calm.replicas.prefill


def test_worker_that_starts_counts_against_the_queue():
    pool = PoolState(num_ready=2, starting_since=(-29.0,) * 4, startup_s=30.0)
    without = propose(make_policy(), observe(num_requests=150, num_prefill=2, num_waiting=200))
    with_starts = propose(make_policy(), observe(num_requests=150, num_waiting=200, prefill=pool))

    assert with_starts.replicas.prefill <= max(6, without.replicas.prefill)


@pytest.mark.parametrize(("role_change_s", "num_decode"), [(2.0, 2), (31.0, 3), (None, 3)])
def test_idle_decode_workers_that_can_change_are_expected_to_help_with_prompts(
    role_change_s, num_decode
):
    pools = {
        name: PoolState(num_ready=number, startup_s=30.0, role_change_s=role_change_s)
        for name, number in (("prefill", 1), ("decode", 3))
    }
    observation = observe(num_requests=150, kv_usage=0.05, **pools)
    proposal = propose(make_policy(), observation)

    assert proposal.replicas.decode == num_decode


def test_decode_workers_are_kept_for_the_answers_that_they_write():
    """Long answers have not ended yet, so the mean length of those that ended says too little."""
    few = propose(make_policy(), observe(num_decode=4, kv_usage=0.02)).replicas.decode
    many = propose(make_policy(), observe(num_decode=4, kv_usage=0.33)).replicas.decode

    assert few < 4
    assert many == 4


def test_answers_that_wait_for_a_decode_worker_order_one():
    load = PoolLoad(kv_usage=0.3, num_waiting=60)

    assert propose(make_policy(), observe(decode_load=load)).replicas.decode > 1


def test_short_prompts_are_held_in_time_beside_long_ones():
    """The mean prompt of 5,500 tokens exceeds the target alone, but five of six do not."""

    def traffic(**lens):
        return Fresh(Traffic(num_requests=60, isl=5500, osl=10, **lens))

    lens = {1000.0: 50.0, 28_000.0: 10.0}
    plain, aware = (
        propose(make_policy(ttft_s=0.3), observe(num_prefill=8, traffic=each))
        for each in (traffic(), traffic(prompt_lens=lens))
    )

    assert plain.unreachable
    assert not aware.unreachable
    assert aware.replicas.prefill > plain.replicas.prefill


def test_target_that_most_prompts_exceed_is_unreachable():
    lens = {1000.0: 10.0, 9000.0: 50.0}
    traffic = Fresh(Traffic(num_requests=60, isl=7700, osl=10, prompt_lens=lens))

    assert propose(make_policy(ttft_s=0.3), observe(traffic=traffic)).unreachable


def test_cached_prefixes_need_fewer_workers():
    def traffic(hit_rate):
        return Fresh(Traffic(num_requests=400, isl=1000, osl=10, hit_rate=hit_rate))

    plain = propose(make_policy(), observe(traffic=traffic(0.0))).replicas.prefill
    cached = propose(make_policy(), observe(traffic=traffic(0.8))).replicas.prefill

    assert plain >= 4
    assert cached < plain / 2


class Numbered:
    """A predictor that foretells 100,000 tokens a second for each interval that there was, and that follows."""

    basis = None
    num_values = 0

    def add(self, value):
        self.num_values += 1

    def forecast(self, number):
        return [1e5 * (self.num_values + k) for k in range(1, number + 1)]


def forecast_too_low(predictor, num_steps=1, num_intervals=29):
    forecast = Forecast(predictor)
    for number in range(1, num_intervals + 1):  # work of 1.1 million tokens, 2.2, 3.3 …
        forecast.add(Traffic(num_requests=1100 * number, isl=1000), 10.0, 10.0)
        forecast.rates(num_steps)
    return forecast


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_margin_compares_a_forecast_with_the_interval_that_it_was_for(num_steps):
    assert forecast_too_low(Numbered(), num_steps).margin == pytest.approx(1.1, abs=0.002)


def test_margin_forgets_the_errors_of_forecasts_on_another_basis():
    predictor = Numbered()
    forecast = forecast_too_low(predictor, num_intervals=20)
    original = predictor.forecast

    def forecast_by_period(number):
        predictor.basis = "period"
        return original(number)

    predictor.forecast = forecast_by_period
    forecast.rates(1)

    assert forecast.margin == 1.0


def test_burstiness_is_at_least_what_unequal_prompts_cause():
    """Six equal intervals, in which one prompt of ten has 6,000 tokens and the others 500."""
    forecast, lens = Forecast(Numbered()), {500.0: 90.0, 6000.0: 10.0}
    for _ in range(6):
        forecast.add(Traffic(num_requests=100, isl=1050, prompt_lens=lens), 10.0, 10.0)

    assert forecast.burstiness == pytest.approx((0.9 * 500**2 + 0.1 * 6000**2) / 1050**2)


def forecast_of(*nums_requests):
    forecast = Forecast(Numbered())
    for number in nums_requests:
        forecast.add(Traffic(num_requests=number, isl=1000), 10.0, 10.0)
    return forecast


def test_growth_compares_the_last_interval_with_three_before_it():
    assert forecast_of(500, 80, 100, 120, 150).growth == pytest.approx(1.5)
    assert forecast_of(0, 0, 7).growth == 1.0
    assert forecast_of().growth == 1.0


def test_recent_peak_counts_where_the_load_has_fallen_deeply():
    assert forecast_of(200, 200, 200, 100, 90, 80, 85).recent_peak == 0.0
    assert forecast_of(200, 200, 200, 100, 50, 40, 50).recent_peak == 20.0
    assert forecast_of(*(200,) * 3, *(40,) * 6).recent_peak == 4.0  # the peak was long ago


@pytest.mark.parametrize(("predictor", "seconds"), [("kalman", 70.0), ("seasonal", 40.0)])
def test_an_idle_worker_is_kept_for_a_start_up_time_of_which_the_forecast_holds_some(
    predictor, seconds
):
    assert stabilization_s(predictor, 60.0, 10.0) == seconds
    assert stabilization_s(predictor, 60.0, 60.0) >= 60.0


def test_worker_that_was_given_up_is_not_ordered_again_before_the_load_rises():
    policy = make_policy("prefill")
    proposals = [
        propose(policy, observe(at=at, num_requests=num_requests, num_prefill=number)).replicas
        for at, num_requests, number in [
            (0.0, 150, 2),
            (10.0, 150, 3),
            (20.0, 150, 2),
            (30.0, 150, 2),
            (40.0, 165, 2),
        ]
    ]

    assert [each.prefill for each in proposals] == [3, 2, 2, 2, 3]


def test_worker_that_has_died_is_replaced_with_the_margin_of_forecasts():
    policy = make_policy("prefill")
    proposals = [
        propose(policy, observe(at=at, num_requests=240, num_prefill=number)).replicas
        for at, number in [(0.0, 3), (10.0, 2)]
    ]

    assert [each.prefill for each in proposals] == [4, 4]


def test_rising_load_keeps_workers_for_what_it_may_rise_to():
    policy = make_policy("prefill")
    fewer = observe().num_ordered._replace(prefill=3)
    holds = []
    for num_requests in (100, 100, 100, 120, 150):
        observation = observe(num_requests=num_requests, num_prefill=4)
        propose(policy, observation)
        holds.append(policy.survivors_hold(observation, observation.traffic.value, fewer))

    assert holds == [True, True, True, True, False]


def test_no_request_yet_asks_for_no_worker():
    assert propose(make_policy(), observe(num_requests=0)).replicas == (0, 0)


def test_busy_workers_of_an_earlier_planner_stay_while_no_request_arrives():
    load = PoolLoad(num_running=40, kv_usage=0.9)
    silence = Fresh(Traffic(num_requests=0))
    observation = observe(traffic=silence, num_prefill=2, num_decode=4, decode_load=load)

    assert propose(make_policy(), observation).replicas == (2, 4)


def test_target_can_be_met_where_all_prompts_are_cached():
    traffic = Traffic(
        num_requests=10,
        isl=1000,
        osl=100,
        hit_rate=1.0,
        prompt_lens={500.0: 6, 1500.0: 4, 900.0: 1},
    )

    assert not propose(make_policy(), observe(traffic=Fresh(traffic))).unreachable


def test_aggregated_worker_computes_prompts_on_all_its_gpus():
    """Throughputs of a profile are those of a GPU."""
    of_one, of_four = (
        propose(make_policy(mode="agg", decode_gpus=n), observe(num_requests=900, num_prefill=0))
        for n in (1, 4)
    )

    assert of_four.replicas.decode <= -(-of_one.replicas.decode // 4) + 1


def test_waiting_request_before_any_other_asks_for_one_worker_each():
    assert propose(make_policy(), observe(num_requests=0, num_waiting=1)).replicas == (1, 1)


def test_target_below_one_prompts_time_is_called_unreachable():
    proposal = propose(make_policy(ttft_s=0.001), observe())

    assert "1 ms" in proposal.unreachable
    assert "100 ms" in proposal.unreachable


def test_unreachable_target_does_not_add_workers_without_end():
    policy = make_policy(ttft_s=0.001)
    numbers = {
        propose(policy, observe(at=10.0 * i, num_requests=150, num_prefill=2)).replicas.prefill
        for i in range(20)
    }

    assert numbers == {2}


def test_unreachable_itl_is_called_so():
    assert "ITL" in propose(make_policy(itl_s=0.005), observe()).unreachable


@pytest.mark.parametrize("mode", ["agg", "disagg"])
def test_unreachable_itl_gets_no_more_workers_than_a_loose_one(mode):
    """Half-empty workers do not meet it either."""
    strict, loose = (
        propose(make_policy(mode=mode, itl_s=itl_s), observe(num_requests=300)).replicas.decode
        for itl_s in (0.005, 10.0)
    )

    assert strict <= loose


@pytest.mark.parametrize("mode", ["agg", "disagg", "decode"])
def test_workers_stay_for_long_answers_that_have_not_ended_yet(mode):
    """Short ones that ended say nothing of them, and no new request comes."""
    policy = make_policy(mode=mode)
    propose(policy, observe(num_requests=10, num_prefill=0, num_decode=4, kv_usage=0.3))
    load = PoolLoad(kv_usage=0.3, num_running=200)
    later = observe(at=10, num_requests=0, num_prefill=0, num_decode=4, decode_load=load)

    assert propose(policy, later).replicas.decode == 4


def test_aggregated_worker_answers_short_prompts_as_fast_as_it_decodes():
    """20 tokens of a prompt take nothing beside 30,000 of an answer."""
    profile = make_steady_profile()
    shape = RequestShape(isl=20, osl=30_000, context=15_020)
    targets, headroom = Targets(mode="agg"), Headroom()
    sizing = Sizing(profile, targets, headroom, shape, burstiness=1.0)
    best = profile.decode.best_rate(targets.itl_s, shape.context)

    assert sizing.prompts_per_s == pytest.approx(
        headroom.most_busy * best.throughput / shape.osl, rel=0.01
    )


def test_decode_worker_is_counted_for_one_answer_at_least():
    """Next to the ITL of an idle worker there may be no hundredth of a large cache that holds the target."""
    points = [DecodePoint(n / 1000, 1000.0, 0.01 * n, 100.0) for n in (1, 10, 100, 1000)]
    surface = DecodeSurface(points, max_kv_tokens=1_000_000)
    profile = WorkerProfile(prefill=make_profile().prefill, decode=surface)
    shape = RequestShape(isl=950, osl=100, context=1000)
    targets = Targets(mode="disagg", itl_s=0.011)
    sizing = Sizing(profile, targets, Headroom(), shape, burstiness=1.0)

    assert sizing.decode_workers_for(20_000) == 20


@pytest.mark.parametrize("mode", ["agg", "disagg"])
@given(st.integers(1, 500), st.integers(1, 500))
def test_more_requests_never_need_fewer_workers(mode, a, b):
    low, high = sorted((a, b))
    few = propose(make_policy(mode), observe(num_requests=low, num_prefill=0, num_decode=0))
    many = propose(make_policy(mode), observe(num_requests=high, num_prefill=0, num_decode=0))

    assert all(x <= y for x, y in zip(few.replicas, many.replicas, strict=True))


@pytest.mark.parametrize("share", [0.6, 0.7, 0.8])
def test_constant_load_of_two_workers_is_scaled_once_at_most(share):
    policy, number, changes = make_policy("prefill"), 2, 0
    for i in range(60):
        observation = observe(at=10.0 * i, num_requests=200 * share, num_prefill=number)
        proposal = propose(policy, observation).replicas.prefill
        if proposal < number and not policy.survivors_hold(
            observation,
            observation.traffic.value,
            observation.num_ordered._replace(prefill=proposal),
        ):
            proposal = number
        changes += proposal != number
        number = proposal

    assert changes <= 1


def test_noise_of_short_intervals_adds_no_workers():
    draw = random.Random(1)
    policy = make_policy("prefill")
    proposals = []
    for second in range(120):
        number = sum(draw.random() < 0.01 for _ in range(1500))  # 15 a second
        observation = observe(at=float(second), num_requests=number, num_prefill=3, interval_s=1.0)
        proposals.append(propose(policy, observation).replicas.prefill)

    assert max(proposals[20:]) <= 3


@pytest.mark.parametrize(("before_s", "after_s"), [(60.0, 150.0), (60.0, 600.0), (600.0, 60.0)])
def test_steady_load_is_foretold_as_it_is_when_another_start_up_time_is_measured(before_s, after_s):
    policy = make_policy()
    for number in range(60):
        startup_s = before_s if number < 30 else after_s
        pools = {
            name: PoolState(num_ready=4, startup_s=startup_s) for name in ("prefill", "decode")
        }
        proposal = propose(policy, observe(10.0 * number, num_requests=200, **pools))

        assert proposal.prediction.requests_per_s == pytest.approx(20.0)


@pytest.mark.parametrize("mode", ["agg", "decode", "disagg"])
def test_one_worker_does_not_carry_the_load_of_many(mode):
    policy = make_policy(mode)
    observation = observe(num_requests=3000, num_prefill=40, num_decode=40)
    traffic = observation.traffic.value
    assert policy.survivors_hold(observation, traffic, observation.num_ordered)  # knows nothing
    propose(policy, observation)

    fewer = observation.num_ordered._replace(prefill=1, decode=1)
    assert not policy.survivors_hold(observation, traffic, fewer)


@pytest.mark.parametrize("isl", [None, float("nan"), float("inf")])
def test_prompts_of_unknown_length_count_as_those_before(isl):
    policy = make_policy()
    before = [propose(policy, observe(at, 300)) for at in (0.0, 10.0, 20.0)][-1]
    after = propose(policy, observe(30.0, traffic=Fresh(Traffic(num_requests=300, isl=isl))))

    assert after.replicas.prefill == before.replicas.prefill


@pytest.mark.parametrize("corrects", [True, False])
def test_prompts_that_take_longer_than_profiled_get_more_workers(corrects):
    """The profile says 100 ms; twice as long is seen in service."""
    slow = ForwardPass(num_prompt_tokens=1000, num_kv_tokens=0, wall_s=0.2)
    load = PoolLoad(workers=(ReportedLoad(passes=(slow,) * 5),))
    policy, as_profiled = make_policy(corrects=corrects, ttft_s=2.0), make_policy(ttft_s=2.0)
    for at in range(0, 200, 10):
        proposal = propose(policy, observe(at=at, num_requests=200, prefill_load=load))
        expected = propose(as_profiled, observe(at=at, num_requests=200))

    assert (proposal.replicas.prefill >= 1.5 * expected.replicas.prefill) == corrects
    assert ("prompts take 2.00" in proposal.reason) == corrects


def test_prompts_without_tokens_are_no_reason_to_scale():
    traffic = Traffic(num_requests=5, isl=0.0, osl=100.0, prompt_lens={50.0: 5.0})
    observation = observe(traffic=Fresh(traffic))

    assert make_policy().propose(observation, traffic).reason == "no request yet"
