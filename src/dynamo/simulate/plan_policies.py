"""The policies of the planner's simulation: those of the planner itself, and others to compare them with."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

from dynamo.base import errors
from dynamo.planner import (
    observation,
    policies,
    predictive_policy,
    predictors,
    profile,
    profile_files,
    regression_policy,
    scaling_pipeline,
)
from dynamo.simulate import plan_worker
from dynamo.simulate.plan_cluster import WorkerOrder
from dynamo.simulate.plan_run import Decide, PlanScenario, run_fixed
from dynamo.simulate.plan_worker import StepTimes

BUILT_IN_PROFILE = "h100-8b"
NAMES = ("fixed", "hpa", "load", "regression", "sla", "predictive", "best-fixed", "oracle")
_LEAST_ATTAINMENT = 0.95  # with which a fixed number of workers holds the targets
_SIN_CONTEXT = 3075.0  # mean tokens of a sequence of the original's experiment
_CONTEXTS = (256, 1024, 3072, 8192, 16384)


def sample_profile(times: StepTimes, factor: float = 1.0) -> profile.WorkerProfile:
    """Return what a profiler would measure of a worker with these step times, each time `factor` times too long."""
    isl = tuple(float(2**k) for k in range(6, 18))
    ttft_s = tuple(times.prefill_s(n) for n in isl)
    points = {}
    for context in _CONTEXTS:
        for step in range(1, 41):
            concurrency = max(1, step / 40 * min(times.max_num_seqs, times.num_kv_tokens / context))
            usage = concurrency * context / times.num_kv_tokens
            itl_s = times.decode_s(usage)
            points[usage, context] = profile.DecodePoint(usage, context, itl_s, concurrency / itl_s)
    prefill = profile.PrefillCurve(
        isl=isl, ttft_s=ttft_s, throughput=tuple(n / s for n, s in zip(isl, ttft_s, strict=True))
    )
    decode = profile.DecodeSurface(list(points.values()), max_kv_tokens=times.num_kv_tokens)
    return profile.WorkerProfile(prefill=prefill.scaled(factor), decode=decode.scaled(factor))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTimes(StepTimes):
    """The times of steps by a measured profile.

    Decoding is looked up at the tokens that a sequence has of the KV cache: where sequences share blocks, each has a
    part of them, and what they cost it beyond that. A step with prompts and answers takes the time of both, in which
    what each step costs is counted once: the shortest decode step that was measured.
    """

    surface: profile.DecodeSurface
    least_s: float = 0.0

    def step_s(
        self,
        prompts: Sequence[tuple[int, int]],
        num_decoding: int,
        num_active: int,
        num_prefilling: int = 0,
    ) -> float:
        """Return the seconds of a step: the tokens in use are taken for spread evenly over its sequences."""
        prompts_s = self.prefill_s(sum(end - start for start, end in prompts)) if prompts else 0.0
        if not num_decoding:
            return prompts_s
        context = num_active / (num_decoding + len(prompts))
        decode_s = self.surface.step_s(num_decoding, context)
        return prompts_s + max(0.0, decode_s - self.least_s) if prompts else decode_s

    def decode_steps_s(self, num_steps: int, num_decoding: int, num_active: int) -> list[float]:
        context = num_active / num_decoding
        return [self.surface.step_s(num_decoding, context + i) for i in range(num_steps)]


def step_times(profile: profile.WorkerProfile, *, context: float) -> ProfiledTimes:
    """Return the step times that a measured profile implies; `context` is the mean length of sequences.

    A worker runs no more sequences at once than were measured: what a step with more of them takes is not known.
    """
    num_kv_tokens = profile.decode.max_kv_tokens
    nums = [p.kv_usage * num_kv_tokens / p.context for p in profile.decode.points if p.context > 0]
    return ProfiledTimes(
        prefill_s=profile.prefill.prompt_s,
        decode_s=lambda share: profile.decode.itl_s(share, context),
        num_kv_tokens=num_kv_tokens,
        max_num_seqs=max(1, round(max(nums, default=1))),
        repeated_cost=profile.decode.repeated_cost,
        surface=profile.decode,
        least_s=min(point.itl_s for point in profile.decode.points),
    )


def read_times(profile: str, context: float = _SIN_CONTEXT) -> StepTimes:
    """Return the step times of the built-in profile, or of a directory for sequences of a mean length.

    Raises ConfigError.
    """
    if profile == BUILT_IN_PROFILE:
        return plan_worker.h100_8b()
    return step_times(profile_files.read_profile(Path(profile)), context=context)


def make_decide(
    name: str, scenario: PlanScenario, profile: profile.WorkerProfile, predictor: str
) -> Decide:
    """Return what a policy decides. Raises ConfigError for an unknown name."""
    targets = policies.Targets(
        mode="agg" if scenario.is_aggregated else "disagg",
        ttft_s=scenario.ttft_s,
        itl_s=scenario.itl_s,
    )
    make_predictor = functools.partial(predictors.make_predictor, predictor)
    stabilization_s = 0.0
    policy: policies.Policy
    match name:
        case "predictive":
            policy = predictive_policy.PredictivePolicy(
                profile, targets, make_predictor, corrects=scenario.corrects
            )
            stabilization_s = predictive_policy.stabilization_s(
                predictor, scenario.startup_s, scenario.interval_s
            )
        case "sla":
            arima = functools.partial(predictors.make_predictor, "arima")
            policy = policies.SlaPolicy(profile, targets, arima)
        case "load":
            policy = policies.LoadPolicy(targets, is_literal=True)
        case "regression":
            policy = regression_policy.RegressionPolicy(targets)
            stabilization_s = scenario.startup_s + scenario.interval_s
        case "hpa":
            return functools.partial(_hpa, scenario.max_gpus, targets.mode)
        case _:
            raise errors.ConfigError(f"--policy {name}: expected one of {', '.join(NAMES)}")
    limits = scaling_pipeline.Limits(
        max_gpus=scenario.max_gpus, stabilization_s=stabilization_s, startup_s=scenario.startup_s
    )
    pipeline = scaling_pipeline.ScalingPipeline(policy, targets, limits)

    def decide(observed: observation.Observation) -> WorkerOrder:
        if name != "predictive":  # the original's planner knows no change of roles
            observed = dataclasses.replace(
                observed,
                prefill=dataclasses.replace(observed.prefill, role_change_s=None),
                decode=dataclasses.replace(observed.decode, role_change_s=None),
            )
        decision = pipeline.decide(observed)
        return WorkerOrder(
            decision.replicas, decision.role_changes, decision.withdrawals, decision.line
        )

    return decide


def _hpa(max_gpus: int, mode: policies.Mode, observed: observation.Observation) -> WorkerOrder:
    """Scale each pool as Kubernetes' HPA does for a queue of one request per worker, with its tolerance of 10 %."""
    numbers = []
    for pool, load in (
        (observed.prefill, observed.prefill_load),
        (observed.decode, observed.decode_load),
    ):
        ratio = load.num_waiting / max(1, pool.num_ready)
        is_steady = abs(ratio - 1) <= 0.1
        number = pool.num_ordered if is_steady else math.ceil(pool.num_ready * ratio)
        numbers.append(max(1, number))
    if mode == "agg":
        numbers[0] = 0
    while sum(numbers) > max_gpus:
        numbers[numbers.index(max(numbers))] -= 1
    return WorkerOrder(observation.Replicas(*numbers))


def fixed_splits(num_workers: int, *, is_aggregated: bool) -> list[observation.Replicas]:
    """Return all ways to split workers between prefill and decode."""
    if is_aggregated:
        return [observation.Replicas(0, num_workers)]
    return [observation.Replicas(n, num_workers - n) for n in range(1, num_workers)]


def split_name(replicas: observation.Replicas) -> str:
    """Return a split as people write it, such as 2p2d."""
    return f"{replicas.prefill}p{replicas.decode}d" if replicas.prefill else f"{replicas.decode}"


def find_best_fixed(scenario: PlanScenario) -> observation.Replicas:
    """Return the smallest fixed number of workers that holds the targets, in hindsight; else the best there is."""
    best, best_attainment = observation.Replicas(0, 1), -1.0
    for total in range(1, scenario.max_gpus + 1):
        for replicas in fixed_splits(total, is_aggregated=scenario.is_aggregated):
            attainment = run_fixed(scenario, replicas).attainment
            if attainment > best_attainment:
                best, best_attainment = replicas, attainment
        if best_attainment >= _LEAST_ATTAINMENT:
            break
    return best
