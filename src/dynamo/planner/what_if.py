"""What the planner would do if the load were another: its own pipeline over simulated workers, in virtual time.

The last observation is repeated with its traffic multiplied. Load spreads evenly, so that of a worker falls as others
get ready; a worker is ready a start-up time after its order. Latencies stay as observed: what they would be is the
matter of `dynamo.simulate plan`, which simulates the workers' steps too.
"""

import dataclasses
from collections.abc import Iterator

from dynamo.planner.observation import Fresh, Observation, PoolLoad, PoolState, Traffic
from dynamo.planner.scaling_pipeline import Decision, ScalingPipeline

MOST_INTERVALS = 400


def simulate(
    pipeline: ScalingPipeline,
    last: Observation,
    traffic: Traffic,
    *,
    factor: float,
    interval_s: float,
    horizon_s: float,
    startup_s: float,
) -> Iterator[tuple[Observation, Decision]]:
    """Yield the first decision, and each that changes the number of workers; times begin at 0."""
    pools = [PoolState(num_ready=pool.num_ready) for pool in (last.prefill, last.decode)]
    loads = (last.prefill_load, last.decode_load)
    num_ready = [max(1, pool.num_ready) for pool in pools]
    scaled_traffic = dataclasses.replace(traffic, num_requests=traffic.num_requests * factor)
    for number in range(min(MOST_INTERVALS, int(horizon_s / interval_s) + 1)):
        at = number * interval_s
        pools = [_make_ready(pool, at, startup_s) for pool in pools]
        prefill_load, decode_load = (
            _scale_load(load, factor * before / max(1, pool.num_ready))
            for load, before, pool in zip(loads, num_ready, pools, strict=True)
        )
        observation = dataclasses.replace(
            last,
            at=at,
            interval_s=interval_s,
            traffic=Fresh(scaled_traffic),
            prefill=pools[0],
            decode=pools[1],
            prefill_load=prefill_load,
            decode_load=decode_load,
            num_open=round(last.num_open * factor),
        )
        decision = pipeline.decide(observation)
        if not number or decision.replicas != decision.present:
            yield observation, decision
        pools = [
            _order(pool, target, at) for pool, target in zip(pools, decision.replicas, strict=True)
        ]


def _make_ready(pool: PoolState, at: float, startup_s: float) -> PoolState:
    starting = tuple(since for since in pool.starting_since if at - since < startup_s)
    num_ready = pool.num_ready + pool.num_starting - len(starting)
    return PoolState(num_ready=num_ready, starting_since=starting, startup_s=startup_s)


def _order(pool: PoolState, target: int, at: float) -> PoolState:
    """Return the pool after the order of `target` workers; what starts is given up before what is ready."""
    starting = pool.starting_since[: max(0, target - pool.num_ready)]
    num_ready = min(pool.num_ready, target)
    started = (at,) * max(0, target - num_ready - len(starting))
    return dataclasses.replace(pool, num_ready=num_ready, starting_since=starting + started)


def _scale_load(load: PoolLoad, factor: float) -> PoolLoad:
    return PoolLoad(
        kv_usage=min(1.0, load.kv_usage * factor),
        num_running=round(load.num_running * factor),
        num_waiting=round(load.num_waiting * factor),
        waiting_tokens=round(load.waiting_tokens * factor),
    )
