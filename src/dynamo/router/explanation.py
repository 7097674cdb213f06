"""The explanation of a decision: what each candidate worker would have cost one prompt, and the parts of that cost.

The same figures that the policy compares, computed once more for requests with a decision to be shown: a decision
that is not shown pays nothing. The candidates with the lowest costs come first, and only the first
`MAX_CANDIDATES` are kept, so that an explanation stays small with a thousand workers.
"""  # decider

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from dynamo.router import api, policies

MAX_CANDIDATES = 8


class CandidateCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker as the decision saw it. `cost` is the sum (lmetric: the product) of `parts`; None: not compared."""

    instance: str  # instance id, hexadecimal
    dp_rank: int = 0
    cost: float | None = None
    parts: dict[str, float] = {}
    cached_blocks: float = 0.0  # of the prompt's blocks, those in a slower tier by its weight
    in_flight_blocks: int = 0  # that requests in flight there will have computed
    num_requests: int = 0  # in flight there


class RoutingExplanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision for one request: its model, who computes a prompt, its worker, or what follows the worker's loss."""

    kind: Literal["model", "prefill", "worker", "migration"] = "worker"
    policy: str
    outcome: str = ""  # the model; local or remote; the verdict about a migration; none of a worker
    unit: str = ""  # of the costs
    reason: str = ""  # in words, where no costs were compared
    num_tokens: int = 0  # of the prompt
    num_blocks: int = 0
    num_candidates: int = 0
    candidates: tuple[CandidateCost, ...] = ()


def explain(
    policy: api.RoutingPolicy, prompt: api.Prompt, candidates: api.Candidates, now: float
) -> RoutingExplanation:
    """Explain the decision that `policy` makes for this prompt among these candidates now."""
    parts: Mapping[api.Worker, Mapping[str, float]] = {}
    unit = reason = ""
    if prompt.pinned is not None:
        reason = "the request, or its session, names its worker"
    elif prompt.is_prefilled:
        reason = "a prefill worker has computed the prompt: the worker with most room to decode"
    elif isinstance(policy, policies.EstimatedTtft):
        parts, unit = policy.cost_parts(prompt, candidates, now), "tokens of prefill"
    elif isinstance(policy, policies.Dynamo | policies.LMetric):
        parts = {
            worker: policy.cost_parts(prompt, candidates, worker) for worker in candidates.loads
        }
        unit = "blocks"
    else:
        reason = "this policy compares no costs"
    costs = {worker: policies.total_cost(policy, by_name) for worker, by_name in parts.items()}
    order = sorted(
        candidates.loads,
        key=lambda worker: (costs.get(worker, 0.0), candidates.loads[worker].num_requests),
    )
    return RoutingExplanation(
        policy=type(policy).__name__,
        unit=unit,
        reason=reason,
        num_tokens=prompt.num_tokens,
        num_blocks=len(prompt.sequence_hashes),
        num_candidates=len(order),
        candidates=tuple(
            CandidateCost(
                instance=f"{worker.instance_id:x}",
                dp_rank=worker.dp_rank,
                cost=costs.get(worker),
                parts=dict(parts.get(worker, {})),
                cached_blocks=candidates.cached.get(worker, 0.0),
                in_flight_blocks=candidates.in_flight.get(worker, 0),
                num_requests=candidates.loads[worker].num_requests,
            )
            for worker in order[:MAX_CANDIDATES]
        ),
    )


def explain_turn(mode: str, instance_ids: Sequence[int]) -> RoutingExplanation:
    """Explain the decision of a route that knows neither caches nor load."""
    return RoutingExplanation(
        policy=mode,
        reason=f"router mode {mode}: neither caches nor load count",
        num_candidates=len(instance_ids),
        candidates=tuple(
            CandidateCost(instance=f"{number:x}") for number in instance_ids[:MAX_CANDIDATES]
        ),
    )
