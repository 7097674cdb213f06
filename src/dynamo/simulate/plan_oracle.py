"""The oracle of the planner's simulation: it knows all arrivals, and is a yardstick, not a bound.

For each interval it looks for the smallest pools that hold the targets for 95 % of the requests that arrive in it, with
the queue carried over from the interval before: greedily forward, no search over orders. Then workers are ordered one
start-up time ahead, kept through gaps shorter than that, and drained as in every other run.
"""  # decider

import copy
import math
from collections.abc import Sequence

from dynamo.planner import observation
from dynamo.simulate import plan_run
from dynamo.simulate.plan_cluster import PlanCluster, WorkerOrder
from dynamo.simulate.plan_run import PlanResult, PlanScenario
from dynamo.simulate.plan_worker import Request

_LEAST_ATTAINMENT = 0.95
_PATIENCE_S = 30.0  # after the interval, for its requests to end


def run_oracle(scenario: PlanScenario) -> PlanResult:
    """Simulate the schedule of the oracle."""
    needs = find_needs(scenario)
    interval_s, startup_s = scenario.interval_s, scenario.startup_s

    def target(at: float) -> observation.Replicas:
        first = round(at / interval_s)
        last = first + math.ceil(startup_s / interval_s)
        window = needs[first : last + 1] or [
            observation.Replicas(0 if scenario.is_aggregated else 1, 1)
        ]
        prefill, decode = (max(numbers) for numbers in zip(*window, strict=True))
        while prefill + decode > scenario.max_gpus:  # what the first interval needs does fit
            if prefill - window[0].prefill > decode - window[0].decode:
                prefill -= 1
            else:
                decode -= 1
        return observation.Replicas(prefill, decode)

    def decide(observation: observation.Observation) -> WorkerOrder:
        return WorkerOrder(target(observation.at))

    return plan_run.run(scenario, "oracle", decide, target(0.0))


def find_needs(scenario: PlanScenario) -> list[observation.Replicas]:
    """Return the smallest pools for each interval."""
    cluster = scenario.cluster()
    is_aggregated = scenario.is_aggregated
    least = observation.Replicas(0 if is_aggregated else 1, 1)
    needs: list[observation.Replicas] = []
    position, num_intervals = 0, math.floor(scenario.requests[-1].at / scenario.interval_s) + 1
    present = least
    for i in range(num_intervals):
        begin, end = i * scenario.interval_s, (i + 1) * scenario.interval_s
        num_arrivals = 0
        while (
            position + num_arrivals < len(scenario.requests)
            and scenario.requests[position + num_arrivals].at < end
        ):
            num_arrivals += 1
        arrivals = scenario.requests[position : position + num_arrivals]
        position += num_arrivals
        trial = _Trial(scenario, cluster, arrivals, begin, end)
        present = trial.smallest(
            observation.Replicas(*(max(n - 1, low) for n, low in zip(present, least, strict=True)))
        )
        cluster = trial.commit(present)
        needs.append(present)
    return needs


class _Trial:
    """The search of one interval, from the state at its begin."""

    def __init__(
        self,
        scenario: PlanScenario,
        cluster: PlanCluster,
        arrivals: Sequence[Request],
        begin: float,
        end: float,
    ) -> None:
        self._scenario, self._cluster, self._arrivals = scenario, cluster, arrivals
        self._begin, self._end = begin, end

    def smallest(self, replicas: observation.Replicas) -> observation.Replicas:
        """Return the smallest pools that hold the targets, from this size on; those that miss the fewest if none do."""
        best, fewest = replicas, math.inf
        while True:
            late, slow, num_servable = self._missed(replicas)
            if late + slow <= (1 - _LEAST_ATTAINMENT) * num_servable:
                return replicas
            if late + slow < fewest:
                best, fewest = replicas, late + slow
            if sum(replicas) >= self._scenario.max_gpus:
                return best
            more_decode = self._scenario.is_aggregated or slow > late
            replicas = (
                observation.Replicas(replicas.prefill, replicas.decode + 1)
                if more_decode
                else observation.Replicas(replicas.prefill + 1, replicas.decode)
            )

    def commit(self, replicas: observation.Replicas) -> PlanCluster:
        """Return the cluster at the end of the interval with these pools."""
        cluster, _ = self._play(replicas)
        cluster.observe(self._end - self._begin)
        return cluster

    def _missed(self, replicas: observation.Replicas) -> tuple[int, int, int]:
        """Return the numbers of servable requests: first token late, other tokens slow, all."""
        cluster, requests = self._play(replicas)
        cluster.run_until(self._end + _PATIENCE_S)
        servable = [request for request in requests if request.is_servable]
        late = [r for r in servable if r.ttft_s > self._scenario.ttft_s]
        slow = [r for r in servable if r not in late and r.itl_s > self._scenario.itl_s]
        return len(late), len(slow), len(servable)

    def _play(self, replicas: observation.Replicas) -> tuple[PlanCluster, list[Request]]:
        cluster = copy.deepcopy(self._cluster)
        cluster.set_ready(replicas)
        requests = [copy.copy(request) for request in self._arrivals]
        plan_run.feed(cluster, requests, 0, self._end)
        cluster.run_until(self._end)
        return cluster, requests
