"""The load policy: one worker more or fewer by the use of the KV cache and the queue of prompts. Needs no profile.

Decode workers: more above a share of their KV cache in use, fewer below another. Prefill workers: more if the queue per
worker is long now and, continued by its trend over some intervals, stays so; fewer if it is short. After a worker has
become ready its pool waits for some intervals before it grows again. Aggregated workers do both: either reason adds
one, and both must allow to take one away.
"""

from dataclasses import dataclass

from dynamo.planner.observation import Observation, PoolState, Replicas, Traffic
from dynamo.planner.policies import Proposal, Targets, in_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadThresholds:
    """The thresholds of Dynamo's load-based planner. Queues are requests per worker."""

    decode_kv_scale_up: float = 0.9
    decode_kv_scale_down: float = 0.5
    prefill_queue_scale_up: float = 0.5
    prefill_queue_scale_down: float = 0.2
    decode_grace_intervals: int = 3
    queue_trend_intervals: int = 3


class _Growth:
    """The grace period of a pool after a worker became ready."""

    def __init__(self, num_intervals: int) -> None:
        self._num_intervals = num_intervals
        self._num_left = self._num_ready = 0

    def may_grow(self, pool: PoolState) -> bool:
        """Return True if no worker starts and the last one has served for the grace period."""
        self._num_left = (
            self._num_intervals if pool.num_ready > self._num_ready else max(0, self._num_left - 1)
        )
        if not self._num_ready:
            self._num_left = 0  # the first workers are no growth
        self._num_ready = pool.num_ready
        return not self._num_left and not pool.num_starting


class LoadPolicy:
    """One step up or down per interval. With `is_literal` survivors are not examined, as in the original."""

    def __init__(
        self,
        targets: Targets,
        thresholds: LoadThresholds = LoadThresholds(),
        *,
        is_literal: bool = False,
    ) -> None:
        self._targets = targets
        self._limits = thresholds
        self._is_literal = is_literal
        self._last_queue = 0.0
        self._decode_growth = _Growth(thresholds.decode_grace_intervals)

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return the workers that there are, one more or one fewer in each pool."""
        present = observation.num_ordered
        is_aggregated = self._targets.mode == "agg"
        usage = observation.decode_load.kv_usage
        prefill = observation.decode if is_aggregated else observation.prefill
        num_waiting = observation.prefill_load.num_waiting + (
            observation.decode_load.num_waiting if is_aggregated else 0
        )
        queue = num_waiting / max(1, prefill.num_ready)
        queue_step = self._queue_step(queue, num_waiting, prefill)
        usage_step = self._usage_step(usage, observation.decode)
        if is_aggregated:
            up, down = max(queue_step, usage_step), min(queue_step, usage_step)
            replicas = Replicas(0, present.decode + (up if up >= 0 else down))
        else:
            replicas = Replicas(present.prefill + queue_step, present.decode + usage_step)
        if not _has_load(observation, traffic):
            replicas = Replicas(0, 0)
        return Proposal(
            replicas=in_mode(self._targets.mode, replicas, present),
            reason=f"KV cache {usage:.0%} in use, {queue:.2g} prompts waiting per worker",
        )

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True if the KV use, spread over the workers that remain, stays below the threshold to grow."""
        if self._is_literal or not _has_load(observation, traffic):
            return True
        if not fewer.decode:
            return False
        usage = observation.decode_load.kv_usage * observation.decode.num_ready / fewer.decode
        return usage < 0.9 * self._limits.decode_kv_scale_up

    def _usage_step(self, usage: float, pool: PoolState) -> int:
        may_grow = self._decode_growth.may_grow(pool)
        if usage > self._limits.decode_kv_scale_up:
            return int(may_grow)
        return -1 if usage < self._limits.decode_kv_scale_down and not pool.num_starting else 0

    def _queue_step(self, queue: float, num_waiting: int, pool: PoolState) -> int:
        trend, self._last_queue = queue - self._last_queue, queue
        if not pool.num_ready:
            return int(num_waiting > 0 and not pool.num_starting)
        foretold = queue + trend * self._limits.queue_trend_intervals
        threshold = self._limits.prefill_queue_scale_up
        if queue > threshold and foretold > threshold:
            return int(not pool.num_starting)
        is_short = queue < self._limits.prefill_queue_scale_down
        return -1 if is_short and not pool.num_starting else 0


def _has_load(observation: Observation, traffic: Traffic) -> bool:
    loads = (observation.prefill_load, observation.decode_load)
    if traffic.num_requests > 0 or observation.num_open:
        return True
    return any(load.num_running or load.num_waiting for load in loads)
