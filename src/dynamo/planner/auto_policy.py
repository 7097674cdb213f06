"""The policy of mode auto: aggregated or disaggregated, whichever needs fewer GPUs for the predicted traffic.

The workers are decode workers, which compute all prompts as long as there are no prefill workers: aggregated is a
deployment of decode workers alone. A move is therefore a change of the two pools, and loses no request. Each form has a
predictive policy of its own over the same traffic. The other form is taken when it has needed fewer GPUs, or has been
the only one that can hold the targets, for `settle_s` seconds without interruption; after a move, from the beginning.
"""  # decider

import dataclasses
from collections.abc import Callable
from typing import Literal

from dynamo.planner.observation import Observation, PoolLoad, PoolState, Replicas, Traffic
from dynamo.planner.policies import Proposal, Targets
from dynamo.planner.predictive_policy import PredictivePolicy

Form = Literal["agg", "disagg"]
_NAMES: dict[Form, str] = {"agg": "aggregated", "disagg": "disaggregated"}


class AutoPolicy:
    """Chooses the form, and lets the policy of that form choose the number of workers."""

    def __init__(
        self, targets: Targets, make: Callable[[Targets], PredictivePolicy], *, settle_s: float
    ) -> None:
        self._targets = targets
        self._policies: dict[Form, PredictivePolicy] = {
            "agg": make(dataclasses.replace(targets, mode="agg")),
            "disagg": make(dataclasses.replace(targets, mode="disagg")),
        }
        self._settle_s = settle_s
        self._form: Form = "agg"
        self._better: Form | None = None  # than the present one, in the last interval
        self._better_since = 0.0

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return the workers of the present form, or of the other one once it has been better for long enough."""
        proposals = {
            "agg": self._policies["agg"].propose(as_aggregated(observation), traffic),
            "disagg": self._policies["disagg"].propose(observation, traffic),
        }
        self._form = "disagg" if observation.prefill.num_ordered else "agg"
        other: Form = "agg" if self._form == "disagg" else "disagg"
        proposal = proposals[self._form]
        reason = f"{_NAMES[self._form]}: {proposal.reason}"
        present = dataclasses.replace(proposal, reason=reason)
        if proposal.prediction is None:
            return present
        rate = proposal.prediction.requests_per_s
        if self._cost(other, rate) >= self._cost(self._form, rate):
            self._better = None
            return present
        if self._better != other:
            self._better, self._better_since = other, observation.at
        if observation.at - self._better_since < self._settle_s:
            return present
        replicas = self._policies[other].workers(rate)
        reason = f"{_NAMES[other]} needs less than {_NAMES[self._form]}: {proposal.reason}"
        self._form = other
        return dataclasses.replace(proposals[other], replicas=replicas, reason=reason, is_firm=True)

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True if fewer workers, in the form that was proposed, would hold the targets."""
        if self._form == "agg":
            observation = as_aggregated(observation)
        return self._policies[self._form].survivors_hold(observation, traffic, fewer)

    def _cost(self, form: Form, requests_per_s: float) -> tuple[bool, int]:
        """Return whether the targets are out of reach in this form, and the GPUs that it needs."""
        policy = self._policies[form]
        replicas = policy.workers(requests_per_s)
        num_gpus = (
            replicas.prefill * self._targets.prefill_gpus
            + replicas.decode * self._targets.decode_gpus
        )
        return policy.is_out_of_reach, num_gpus


def as_aggregated(observation: Observation) -> Observation:
    """Return the observation with all workers and their load in the decode pool."""
    pools = (observation.prefill, observation.decode)
    loads = (observation.prefill_load, observation.decode_load)
    return dataclasses.replace(
        observation,
        prefill=PoolState(),
        decode=dataclasses.replace(
            observation.decode,
            num_ready=sum(pool.num_ready for pool in pools),
            starting_since=tuple(sorted(at for pool in pools for at in pool.starting_since)),
            num_draining=sum(pool.num_draining for pool in pools),
        ),
        prefill_load=PoolLoad(),
        decode_load=PoolLoad(
            kv_usage=observation.decode_load.kv_usage,
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            waiting_tokens=sum(load.waiting_tokens for load in loads),
            workers=tuple(worker for load in loads for worker in load.workers),
        ),
    )
