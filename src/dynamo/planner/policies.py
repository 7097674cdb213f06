"""The seam of a scaling policy: from an observation to a proposal, without limits of budget and time.

Limits, cool-down and workers that do not come are the matter of `scaling_pipeline`, and the same for every policy.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from dynamo.planner.observation import Observation, Replicas, Traffic

Mode = Literal["agg", "disagg", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the planner holds, and the size of a worker."""

    mode: Mode = "agg"
    ttft_s: float = 0.5
    itl_s: float = 0.05
    prefill_gpus: int = 1  # of one prefill worker
    decode_gpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The traffic that a proposal is made for."""

    requests_per_s: float
    isl: float
    osl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The workers that a policy asks for, and why; `unreachable` says which target no number of workers can meet."""

    replicas: Replicas
    reason: str
    prediction: Prediction | None = None
    unreachable: str = ""


class Policy(Protocol):
    """Proposes a number of workers. It keeps the series that it needs."""

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return a proposal; `traffic` is the fresh reading of the observation."""
        ...

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True if this smaller number of workers would hold the target with the whole load."""
        ...


def in_mode(mode: Mode, proposal: Replicas, present: Replicas) -> Replicas:
    """Return the proposal, with a pool that this mode does not scale left as it is."""
    match mode:
        case "agg":
            return Replicas(0, proposal.decode)
        case "prefill":
            return Replicas(proposal.prefill, present.decode)
        case "decode":
            return Replicas(present.prefill, proposal.decode)
        case _:
            return proposal
