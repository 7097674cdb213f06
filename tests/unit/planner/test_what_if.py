"""The planner's simulated future: its own pipeline over simulated workers, in virtual time."""

from dynamo.planner import scaling_pipeline
from dynamo.planner.config import ScalingConfig
from dynamo.planner.observation import Fresh, Observation, PoolLoad, PoolState, Traffic
from dynamo.planner.service import make_pipeline


def simulate(factor, *, num_ready=2, starting_since=(), kv_usage=0.3, **settings):
    traffic = Traffic(num_requests=10.0)
    last = Observation(
        at=1000.0,
        interval_s=1.0,
        traffic=Fresh(traffic),
        decode=PoolState(num_ready=num_ready, starting_since=starting_since),
        decode_load=PoolLoad(kv_usage=kv_usage, num_running=8),
    )
    settings = {"max_workers": 8, "max_gpu_budget": 8, "scale_down_delay": 5.0, **settings}
    pipeline = make_pipeline(ScalingConfig(**settings))
    steps = scaling_pipeline.simulate(
        pipeline, last, traffic, factor=factor, interval_s=1.0, horizon_s=200, startup_s=10.0
    )
    return [
        (seen.at, decision.present.decode, decision.replicas.decode) for seen, decision in steps
    ]


def test_more_load_orders_workers_until_each_has_less():
    steps = simulate(4)

    assert steps[0][:2] == (0.0, 2)
    numbers = [after for _, _, after in steps]
    assert numbers == sorted(numbers)
    assert 2 < numbers[-1] <= 8


def test_less_load_gives_workers_back_down_to_the_minimum():
    steps = simulate(0)

    assert steps[0][1:] == (2, 2)
    assert steps[-1][2] == 1


def test_workers_that_start_now_are_not_ordered_once_more():
    assert simulate(4, starting_since=(991.0, 995.0)) == [(0.0, 4, 4)]


def test_the_budget_bounds_the_future_too():
    assert simulate(1000, max_gpu_budget=3)[-1][2] == 3
