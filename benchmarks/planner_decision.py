"""How long the planner's decision for 10,000 workers takes: traffic that changes by a tenth, 60 intervals of 10 s.

    python -m benchmarks.planner_decision

CPU milliseconds of one decision: from the observation to the order, the predictor included.
"""

import functools
import random
import statistics
import sys
import time

from dynamo.planner import (
    auto_policy,
    observation,
    policies,
    predictive_policy,
    predictors,
    scaling_pipeline,
)
from dynamo.simulate import plan_policies, plan_worker

NUM_WORKERS = {"agg": (0, 10_000), "disagg": (8_000, 2_000), "auto": (0, 10_000)}


def make_pipeline(mode: policies.Mode, predictor: str) -> scaling_pipeline.ScalingPipeline:
    profile = plan_policies.sample_profile(plan_worker.h100_8b())
    make_predictor = functools.partial(predictors.make_predictor, predictor)

    def make(targets: policies.Targets) -> predictive_policy.PredictivePolicy:
        return predictive_policy.PredictivePolicy(profile, targets, make_predictor)

    targets = policies.Targets(mode=mode, ttft_s=0.5, itl_s=0.05)
    policy = (
        auto_policy.AutoPolicy(targets, make, settle_s=60.0) if mode == "auto" else make(targets)
    )
    limits = scaling_pipeline.Limits(max_gpus=12_000, stabilization_s=60.0)
    return scaling_pipeline.ScalingPipeline(policy, targets, limits)


def measure(mode: policies.Mode, predictor: str) -> list[float]:
    """Return the CPU milliseconds of each decision."""
    pipeline, rng = make_pipeline(mode, predictor), random.Random(1)
    pools = [
        observation.PoolState(num_ready=number, startup_s=60.0, role_change_s=2.0)
        for number in NUM_WORKERS[mode]
    ]
    durations = []
    for number in range(60):
        traffic = observation.Traffic(
            num_requests=400_000 * rng.uniform(1.0, 1.1), isl=3000, osl=150, ttft_s=0.3, itl_s=0.02
        )
        observed = observation.Observation(
            at=10.0 * number,
            interval_s=10.0,
            traffic=observation.Fresh(traffic),
            prefill=pools[0],
            decode=pools[1],
        )
        begin = time.process_time()
        pipeline.decide(observed)
        durations.append((time.process_time() - begin) * 1e3)
    return durations


def main() -> None:
    sys.stdout.write("| mode | predictor | median ms | most |\n|---|---|---|---|\n")
    for mode in NUM_WORKERS:
        for predictor in ("seasonal", "kalman"):
            durations = measure(mode, predictor)
            median, most = statistics.median(durations), max(durations)
            sys.stdout.write(f"| {mode} | {predictor} | {median:.1f} | {most:.1f} |\n")


if __name__ == "__main__":
    main()
