"""The SLA policy of Dynamo 0.4.1, to the letter: for comparison, and for figures that are based on it.

It multiplies the predicted traffic by what the profile says of one worker. Measured times over those of the profile
correct it; while workers start these corrections keep their values, because they measure the lack of workers.
"""

import math
from collections.abc import Callable

from dynamo.planner.observation import Observation, Replicas, Traffic
from dynamo.planner.policies import Prediction, Proposal, Targets, in_mode
from dynamo.planner.predictors import Predictor
from dynamo.planner.profile import WorkerProfile


class SlaPolicy:
    """Workers from predicted traffic, profile and corrections."""

    def __init__(
        self,
        profile: WorkerProfile,
        targets: Targets,
        make_predictor: Callable[[], Predictor],
        *,
        corrects: bool = True,
    ) -> None:
        self._profile = profile
        self._targets = targets
        self._num_requests, self._isl, self._osl = (make_predictor() for _ in range(3))
        self._corrects = corrects
        self._prefill_correction = self._decode_correction = 1.0

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return the workers for the predicted traffic; those there are if a mean could not be measured."""
        present = observation.num_ordered
        means = (traffic.isl, traffic.osl, traffic.ttft_s, traffic.itl_s, traffic.duration_s)
        if any(mean is None or not math.isfinite(mean) for mean in means):
            return Proposal(replicas=present, reason="no request ended in the interval: skipped")
        isl, osl = traffic.isl or 0.0, traffic.osl or 0.0
        for predictor, value in (
            (self._num_requests, traffic.num_requests),
            (self._isl, isl),
            (self._osl, osl),
        ):
            predictor.add(value)
        if not (observation.prefill.num_starting or observation.decode.num_starting):
            self._correct(observation, traffic, isl, osl)
        next_requests, next_isl, next_osl = (
            series.forecast(1)[0] for series in (self._num_requests, self._isl, self._osl)
        )
        rate = next_requests / observation.interval_s
        num_prefill_gpus = (
            rate
            * next_isl
            * min(1.0, self._prefill_correction)
            / self._profile.prefill.tokens_per_s(next_isl)
        )
        itl_s = self._targets.itl_s
        if self._decode_correction > 0:
            itl_s /= self._decode_correction
        best = self._profile.decode.best_rate(itl_s, next_isl + next_osl / 2)
        replicas = Replicas(
            math.ceil(num_prefill_gpus / self._targets.prefill_gpus),
            math.ceil(rate * next_osl / best.throughput / self._targets.decode_gpus),
        )
        return Proposal(
            replicas=in_mode(self._targets.mode, replicas, present),
            reason=(
                f"{rate:.3g} requests/s of {next_isl:.0f}+{next_osl:.0f} tokens predicted, corrections"
                f" {self._prefill_correction:.2f} and {self._decode_correction:.2f}"
            ),
            prediction=Prediction(requests_per_s=rate, isl=next_isl, osl=next_osl),
        )

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True: the original takes workers away as soon as the formula does."""
        return True

    def _correct(self, observation: Observation, traffic: Traffic, isl: float, osl: float) -> None:
        if not self._corrects:
            return
        expected_s = self._profile.prefill.prompt_s(isl)
        self._prefill_correction = (traffic.ttft_s or 0.0) / expected_s if expected_s else 1.0
        busy = traffic.num_requests * (traffic.duration_s or 0.0) / observation.interval_s
        concurrency = busy / max(1, observation.decode.num_ready)
        context = isl + osl / 2
        usage = concurrency * context / self._profile.decode.max_kv_tokens
        self._decode_correction = (traffic.itl_s or 0.0) / self._profile.decode.itl_s(
            usage, context
        )
