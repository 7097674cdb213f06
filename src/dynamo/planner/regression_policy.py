"""The regression policy: times of forward passes, as the workers report them, foretell TTFT and ITL without a profile.

It is the load-based scaling of Dynamo 1.x. Two lines are fitted to the reported passes of a pool: the seconds of a pass
by its prompt tokens, and by the tokens in the KV cache of the answers that it continues. They foretell of each worker
the TTFT of a prompt behind its queue, and the ITL of its answers. A pool gets one worker more if all its workers miss
the target, and one less if all hold a share of it (`sensitivity`) with the load of N workers on N - 1.

Unlike there, prefill workers that are busy for most of the time stay, though no prompt waits for them at the moment,
and where a prompt takes longer than the TTFT target by itself, only the queue counts: no worker makes it quicker.
Aggregated workers do both: either target adds one, and both must allow to take one away.
"""  # decider

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from dynamo.planner.observation import (
    Observation,
    PoolLoad,
    PoolState,
    Replicas,
    ReportedLoad,
    Traffic,
)
from dynamo.planner.policies import Estimate, Proposal, Targets, has_load, in_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionLimits:
    """The samples of a regression, and how far below the target the workers that remain must stay."""

    max_samples: int = 64
    samples_of_bucket: int = 16
    least_samples: int = 5
    sensitivity: float = 0.8  # share of the target


class PassRegression:
    """The seconds of a forward pass as a line over its tokens.

    Samples are kept in buckets of similar numbers of tokens, from one power of two to the next, so that many passes of
    one size do not displace the few of others.
    """

    def __init__(self, limits: RegressionLimits) -> None:
        self._limits = limits
        self._buckets: dict[int, deque[tuple[int, float]]] = {}
        self._base_s = self._token_s = 0.0

    @property
    def num_samples(self) -> int:
        """Return the number of samples that are kept."""
        return sum(map(len, self._buckets.values()))

    @property
    def is_known(self) -> bool:
        """Return whether there are enough samples to foretell a time."""
        return self.num_samples >= self._limits.least_samples

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the largest pass that is kept; 0 without samples."""
        return max((tokens for bucket in self._buckets.values() for tokens, _ in bucket), default=0)

    def add(self, samples: Iterable[tuple[int, float]]) -> None:
        """Take passes of so many tokens that took so many seconds, the oldest first, and fit the line anew."""
        for num_tokens, seconds in samples:
            bucket = self._buckets.setdefault(num_tokens.bit_length(), deque())
            bucket.append((num_tokens, seconds))
            if len(bucket) > self._limits.samples_of_bucket:
                bucket.popleft()
            if self.num_samples > self._limits.max_samples:
                max(self._buckets.values(), key=len).popleft()
        self._fit([sample for bucket in self._buckets.values() for sample in bucket])

    def seconds(self, num_tokens: float) -> float:
        """Return the foretold seconds of one pass."""
        return self._base_s + self._token_s * num_tokens

    def _fit(self, samples: list[tuple[int, float]]) -> None:
        """Fit by least squares; a pass never gets quicker by more tokens."""
        if not samples:
            return
        mean_x = sum(x for x, _ in samples) / len(samples)
        mean_y = sum(y for _, y in samples) / len(samples)
        spread = sum((x - mean_x) ** 2 for x, _ in samples)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0
        self._token_s = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
        self._base_s = mean_y - self._token_s * mean_x


@dataclass(frozen=True, slots=True, kw_only=True)
class _Foretold:
    """What the lines say of the workers of one pool; without workers that reported, the lists are empty."""

    queues: list[int]  # prompt tokens that wait at each worker
    waits_s: list[float]  # in which they will be computed
    own_s: float  # of a prompt that does not wait
    itls_s: list[float]
    busy: float  # workers that the prompts of a second keep busy


class RegressionPolicy:
    """One step up or down per interval, by what regressions over forward passes foretell."""

    def __init__(self, targets: Targets, limits: RegressionLimits = RegressionLimits()) -> None:
        self._targets = targets
        self._limits = limits
        self._prompts = PassRegression(limits)
        self._answers = PassRegression(limits)

    def propose(self, observation: Observation, traffic: Traffic) -> Proposal:
        """Return the workers that there are, one more or one fewer in each pool."""
        present = observation.num_ordered
        is_aggregated = self._targets.mode == "agg"
        entry = observation.decode if is_aggregated else observation.prefill
        # a pass that computes a prompt and continues answers tells of both
        workers = (*observation.prefill_load.workers, *observation.decode_load.workers)
        passes = [each for worker in workers for each in worker.passes]
        self._prompts.add((p.num_prompt_tokens, p.wall_s) for p in passes if p.num_prompt_tokens)
        self._answers.add((p.num_kv_tokens, p.wall_s) for p in passes if p.num_kv_tokens)
        if not has_load(observation, traffic):
            nothing = in_mode(self._targets.mode, Replicas(0, 0), present)
            return Proposal(replicas=nothing, reason="no requests")
        prompts = self._foretell(observation, traffic)
        prefill_step = self._prefill_step(prompts, entry)
        decode_step = self._decode_step(prompts.itls_s, observation.decode)
        if is_aggregated:
            up, down = max(prefill_step, decode_step), min(prefill_step, decode_step)
            replicas = Replicas(0, present.decode + (up if up >= 0 else down))
        else:
            replicas = Replicas(present.prefill + prefill_step, present.decode + decode_step)
        estimate = Estimate(
            ttft_s=min(prompts.waits_s, default=0.0) + prompts.own_s,
            itl_s=min(prompts.itls_s, default=0.0),
            prompts_per_s=1 / prompts.own_s if prompts.own_s else 0.0,
        )
        return Proposal(
            replicas=in_mode(self._targets.mode, replicas, present),
            reason=self._explain(prompts),
            estimate=estimate if self._prompts.is_known and self._answers.is_known else None,
            unreachable=self._unreachable(prompts),
            is_step=True,
        )

    def survivors_hold(self, observation: Observation, traffic: Traffic, fewer: Replicas) -> bool:
        """Return True if this number of workers would hold the target with the whole load.

        A pool that does not shrink may miss its own target.
        """
        if not has_load(observation, traffic):
            return True
        is_aggregated = self._targets.mode == "agg"
        entry = observation.decode if is_aggregated else observation.prefill
        num_entry = fewer.decode if is_aggregated else fewer.prefill
        prompts, decode = self._foretell(observation, traffic), observation.decode
        return (
            num_entry >= entry.num_ordered
            or self._holds_prompts(prompts, entry.num_ready, num_entry)
        ) and (
            fewer.decode >= decode.num_ordered
            or self._holds_answers(prompts.itls_s, decode.num_ready, fewer.decode)
        )

    def _foretell(self, observation: Observation, traffic: Traffic) -> _Foretold:
        entry_load = (
            observation.decode_load if self._targets.mode == "agg" else observation.prefill_load
        )
        num_new = (traffic.isl or 0.0) * (1.0 - traffic.hit_rate)
        own_s = self._prompt_s(num_new)
        queues = _queues(entry_load)
        return _Foretold(
            queues=queues,
            waits_s=[self._prompt_s(n) for n in queues],
            own_s=own_s,
            itls_s=[
                self._answers.seconds(num_kv_tokens) if num_kv_tokens else 0.0
                for num_kv_tokens in map(_kv_tokens, observation.decode_load.workers)
            ],
            busy=own_s * traffic.num_requests / observation.interval_s,
        )

    def _prompt_s(self, num_tokens: float) -> float:
        """Return the seconds in which so many prompt tokens are computed, in passes no larger than those seen."""
        if num_tokens <= 0:
            return 0.0
        num_passes = math.ceil(num_tokens / max(1, self._prompts.most_tokens))
        return num_passes * self._prompts.seconds(num_tokens / num_passes)

    def _prefill_step(self, prompts: _Foretold, pool: PoolState) -> int:
        if not pool.num_ready:
            return int(not pool.num_starting)
        if pool.num_starting or not prompts.waits_s:
            return 0
        if self._prompts.is_known and min(prompts.waits_s) > self._most_wait_s(prompts):
            return 1
        return -int(self._holds_prompts(prompts, pool.num_ready, pool.num_ready - 1))

    def _decode_step(self, itls_s: list[float], pool: PoolState) -> int:
        if not pool.num_ready:
            return int(not pool.num_starting)
        if pool.num_starting or not (self._answers.is_known and itls_s):
            return 0
        if min(itls_s) > self._targets.itl_s and self._answers.seconds(0) < self._targets.itl_s:
            return 1
        return -int(self._holds_answers(itls_s, pool.num_ready, pool.num_ready - 1))

    def _most_wait_s(self, prompts: _Foretold) -> float:
        """Return how long a prompt may wait: what the target leaves, or as long as it takes if that is nothing."""
        left_s = self._targets.ttft_s - prompts.own_s
        return left_s if left_s > 0 else prompts.own_s

    def _holds_prompts(self, prompts: _Foretold, num_ready: int, num_fewer: int) -> bool:
        if not num_fewer:
            return False
        if not self._prompts.is_known:
            return not any(prompts.queues)
        most_wait_s = self._limits.sensitivity * self._most_wait_s(prompts)
        wait_s = max(prompts.waits_s, default=0.0) * num_ready / num_fewer
        return wait_s < most_wait_s and prompts.busy < self._limits.sensitivity * num_fewer

    def _holds_answers(self, itls_s: list[float], num_ready: int, num_fewer: int) -> bool:
        if not num_fewer or not self._answers.is_known:
            return False
        base_s = self._answers.seconds(0)
        longest_s = max(itls_s, default=0.0)
        foretold_s = base_s + max(0.0, longest_s - base_s) * num_ready / num_fewer
        return foretold_s < self._limits.sensitivity * self._targets.itl_s

    def _unreachable(self, prompts: _Foretold) -> str:
        """Return which target no number of workers can meet, or nothing."""
        targets, base_s = self._targets, self._answers.seconds(0)
        if self._prompts.is_known and prompts.own_s > targets.ttft_s:
            return f"a prompt takes {prompts.own_s * 1e3:.0f} ms by itself, the TTFT target is {targets.ttft_s * 1e3:g}"
        if self._answers.is_known and base_s > targets.itl_s:
            return f"a pass takes {base_s * 1e3:.0f} ms at least, the ITL target is {targets.itl_s * 1e3:g}"
        return ""

    def _explain(self, prompts: _Foretold) -> str:
        """Return what is foretold of the least loaded workers."""
        texts = []
        for name, regression, seconds in (
            ("TTFT", self._prompts, min(prompts.waits_s, default=0.0) + prompts.own_s),
            ("ITL", self._answers, min(prompts.itls_s, default=0.0)),
        ):
            num, least = regression.num_samples, self._limits.least_samples
            is_known = f"{name} of {seconds * 1e3:.0f} ms foretold"
            unknown = f"{name} unknown: {num} of {least} forward passes reported"
            texts.append(is_known if regression.is_known else unknown)
        return ", ".join(texts)


def _queues(load: PoolLoad) -> list[int]:
    """Return the prompt tokens that wait at each worker, with its share of those that no worker has yet."""
    if not load.workers:
        return []
    queued = [worker.waiting_tokens for worker in load.workers]
    elsewhere = max(0, load.waiting_tokens - sum(queued)) // len(queued)
    return [num_tokens + elsewhere for num_tokens in queued]


def _kv_tokens(worker: ReportedLoad) -> float:
    """Return the mean tokens in the KV cache of the passes that continued answers; 0 if there were none."""
    counts = [each.num_kv_tokens for each in worker.passes if each.num_kv_tokens]
    return sum(counts) / len(counts) if counts else 0.0
