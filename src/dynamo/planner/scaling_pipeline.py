"""The decision of one interval: OBSERVE, PREDICT and PROPOSE (the policy), RECONCILE, CONSTRAIN; others EXECUTE it.

- Observe: without a fresh reading nothing changes, except that a pool below its minimum is filled up.
- Reconcile: a worker that is not ready after three start-up times is withdrawn; after that, and after a start that
  ended without serving, the pool waits, longer each time, before it tries again. As long as no start-up time was
  measured, the next try has twice as long. What comes and goes without our order is said.
- Where one pool shrinks while the other grows, workers change their role, if that is quicker than starting others; a
  quarter of a pool at a time, because each of them leaves it before it serves the other. A prefill worker does so at
  once where no decode worker serves.
- Constrain: minimum, maximum and GPU budget. Numbers beyond the budget are scaled down in proportion; where they are
  steps from the present workers, no pool grows by workers of the other one. A worker that drains still holds its GPUs,
  so a change of two pools takes away before it gives. A pool shrinks only to the largest number that was proposed
  within the stabilization window, and only if the workers that remain would hold the targets. For workers that another
  pool takes over by a change of role there is no window, because they can be back as quickly, nor for a firm proposal;
  steps must have been proposed for some intervals, since one reading may be that of a pause.

`simulate` runs the same pipeline over simulated workers, in virtual time: what the planner would do if the load were
another. The last observation is repeated with its traffic multiplied. Load spreads evenly, so that of a worker falls as
others get ready; a worker is ready a start-up time after its order. Latencies stay as observed: what they would be is
the matter of `dynamo.simulate plan`, which simulates the workers' steps too.
"""  # decider

import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dynamo.planner.observation import (
    Fresh,
    Missing,
    Observation,
    PoolLoad,
    PoolState,
    Replicas,
    Stale,
    Traffic,
)
from dynamo.planner.policies import Policy, Proposal, Targets

_OVERDUE = 3.0  # start-up times
_LONGEST_START_S = 3600.0  # for which a start is waited for, as long as none was measured
_LONGEST_PAUSE_S = 600.0
_MOST_DOUBLINGS = 10  # of a pause
PREFILL, DECODE = "prefill", "decode"
_NONE = Replicas(0, 0)
_UNSCALED = {"agg": PREFILL, "decode": PREFILL, "prefill": DECODE}  # by mode: left as it is
_PLENTY = 1_000_000_000  # workers of a pool that does not shrink, for the question whether the others carry the load
_SHARE_OF_CHANGES = 4
_LOW_INTERVALS = 3  # after which a step down is more than the pause between two rounds of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of every decision."""

    max_gpus: int = 8
    min_workers: int = 1  # of each pool that the mode has
    max_workers: int = 1_000_000  # of each pool
    stabilization_s: float = 0.0  # a pool shrinks to the largest proposal of so many seconds
    startup_s: float = 60.0  # until one is measured
    is_advisory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done after an interval, and why."""

    at: float
    present: Replicas  # ready or starting, when it was decided
    replicas: Replicas  # to be
    outcome: str  # up, down, rebalance, hold, skipped, advisory
    reason: str
    proposal: Proposal | None = None
    withdrawals: Replicas = _NONE  # starts to give up
    role_changes: int = 0  # workers from prefill to decode; negative: from decode to prefill

    @property
    def line(self) -> str:
        """Return the decision in one line of text."""
        change = (
            f"{_text(self.present)} -> {_text(self.replicas)}"
            if self.replicas != self.present
            else _text(self.present)
        )
        return f"{self.outcome}: {change}: {self.reason}"


def _text(replicas: Replicas) -> str:
    return f"{replicas.prefill}p{replicas.decode}d" if replicas.prefill else f"{replicas.decode}"


@dataclass(slots=True)
class _PoolMemory:
    """What the pipeline remembers of a pool."""

    proposals: deque[tuple[float, int]] = field(default_factory=deque)
    num_failures: int = 0
    retry_at: float = 0.0
    expected: int | None = None
    num_ready: int = 0
    num_low: int = 0  # intervals for which fewer workers than there are have been proposed


class ScalingPipeline:
    """Owns the memory between intervals; the policy is exchangeable."""

    def __init__(self, policy: Policy, targets: Targets, limits: Limits) -> None:
        self._policy = policy
        self._targets = targets
        self._limits = limits
        self._memory = {PREFILL: _PoolMemory(), DECODE: _PoolMemory()}
        self._observing_since: float | None = None

    def forget(self) -> None:
        """Forget what was observed and proposed, so that nothing shrinks before a whole window was observed again."""
        self._memory = {PREFILL: _PoolMemory(), DECODE: _PoolMemory()}
        self._observing_since = None

    def decide(self, observation: Observation) -> Decision:
        """Return the decision for an interval that has ended."""
        present = observation.num_ordered
        notes = self._note_foreign_changes(present)
        withdrawals, failures = self._reconcile(observation)
        notes += failures
        proposal: Proposal | None = None
        target = present
        match observation.traffic:
            case Fresh(traffic):
                proposal = self._policy.propose(observation, traffic)
                target = self._shrink_slowly(observation, proposal)
                if not self._survivors_hold(observation, traffic, target):
                    target = Replicas(*map(max, target, present))
                    notes.append("the workers that remain could not carry the load")
                notes.insert(0, proposal.reason)
                if proposal.unreachable:
                    notes.append(f"cannot be met: {proposal.unreachable}")
            case Missing(reason):
                proposals = self._memory[DECODE].proposals
                if proposals and observation.at - proposals[-1][0] > self._limits.stabilization_s:
                    self._observing_since = None  # nothing of the window was observed
                notes.insert(0, f"skipped, no metrics: {reason}")
            case Stale(age_s, reason):
                self._observing_since = None  # the load may have risen and fallen meanwhile
                notes.insert(0, f"skipped, metrics are {age_s:.0f} s old: {reason}")
        is_step = proposal is not None and proposal.is_step
        target = self._constrain(observation, target, withdrawals, is_step=is_step)
        target = self._replace_last_decode_worker(observation, target)
        target, role_changes = self._change_roles(observation, target)
        if role_changes:
            way = "prefill to decode" if role_changes > 0 else "decode to prefill"
            notes.append(f"{abs(role_changes)} from {way}, quicker than a start")
        target = self._give_what_is_free(observation, target, role_changes)
        if proposal is None and target != present and not sum(withdrawals):
            notes.append("filled up to the minimum")
        for name, number in zip((PREFILL, DECODE), target, strict=True):
            self._memory[name].expected = number
        return Decision(
            at=observation.at,
            present=present,
            replicas=target,
            outcome=self._outcome(present, target, proposal),
            reason="; ".join(notes),
            proposal=proposal,
            withdrawals=withdrawals,
            role_changes=role_changes,
        )

    def _survivors_hold(self, observation: Observation, traffic: Traffic, target: Replicas) -> bool:
        """Return whether the pools that lose workers still carry the load; a pool that loses none always does."""
        pairs = zip(target, observation.num_ordered, strict=True)
        survivors = Replicas(*(number if number < now else _PLENTY for number, now in pairs))
        return min(survivors) == _PLENTY or self._policy.survivors_hold(
            observation, traffic, survivors
        )

    def _outcome(self, present: Replicas, target: Replicas, proposal: Proposal | None) -> str:
        if self._limits.is_advisory:
            return "advisory"
        is_up = target.prefill > present.prefill or target.decode > present.decode
        is_down = target.prefill < present.prefill or target.decode < present.decode
        if is_up or is_down:
            return "rebalance" if is_up and is_down else "up" if is_up else "down"
        return "hold" if proposal is not None else "skipped"

    def _note_foreign_changes(self, present: Replicas) -> list[str]:
        if self._limits.is_advisory:
            return []
        notes = []
        for name, number in zip((PREFILL, DECODE), present, strict=True):
            expected = self._memory[name].expected
            if expected is not None and number != expected:
                notes.append(f"{number} {name} workers where {expected} were ordered")
        return notes

    def _reconcile(self, observation: Observation) -> tuple[Replicas, list[str]]:
        """Return how many starts to give up, and the reasons."""
        counts, notes = [], []
        for name, pool in ((PREFILL, observation.prefill), (DECODE, observation.decode)):
            if name == _UNSCALED.get(self._targets.mode):
                counts.append(0)
                continue
            memory = self._memory[name]
            startup_s = pool.startup_s or self._limits.startup_s
            patience_s = limit_s = _OVERDUE * startup_s
            if pool.startup_s is None:  # perhaps it needs longer than was expected
                limit_s *= 2**memory.num_failures
                limit_s = max(patience_s, min(_LONGEST_START_S, limit_s))
            num_overdue = sum(observation.at - since > limit_s for since in pool.starting_since)
            counts.append(num_overdue)
            if pool.num_ready > memory.num_ready:
                memory.num_failures = 0
            memory.num_ready = pool.num_ready
            if not num_overdue and not pool.num_failed:
                continue
            # A start that ends by itself has cost less than one that was waited for, and is tried again sooner.
            shortest_s = patience_s if num_overdue else startup_s
            pause_s = min(_LONGEST_PAUSE_S, shortest_s * 2**memory.num_failures)
            memory.num_failures = min(memory.num_failures + 1, _MOST_DOUBLINGS)
            memory.retry_at = observation.at + pause_s
            why = f" ({pool.failure})" if pool.failure else ""
            if num_overdue:
                what = f"{num_overdue} {name} not ready after {limit_s:.0f} s{why}: withdrawn"
            else:
                what = f"{pool.num_failed} {name} ended before serving{why}"
            notes.append(f"{what}, again in {pause_s:.0f} s")
        return Replicas(*counts), notes

    def _shrink_slowly(self, observation: Observation, proposal: Proposal) -> Replicas:
        """Return the proposal, but no fewer workers than the most that were proposed in the window.

        Before a whole window was observed nothing shrinks: a planner that has just started, or had no metrics for long,
        knows no peak. Neither holds for workers that change their role.
        """
        numbers = []
        if self._observing_since is None:
            self._observing_since = observation.at
        is_informed = observation.at - self._observing_since >= self._limits.stabilization_s
        pairs = zip((PREFILL, DECODE), proposal.replicas, observation.num_ordered, strict=True)
        for name, number, present in pairs:
            memory = self._memory[name]
            memory.num_low = memory.num_low + 1 if number < present else 0
            proposals = memory.proposals
            if proposal.is_firm:
                proposals.clear()
            proposals.append((observation.at, number))
            while proposals[0][0] < observation.at - self._limits.stabilization_s:
                proposals.popleft()
            most = max(n for _, n in proposals) if is_informed else present
            numbers.append(number if number >= present else min(present, most))
        giving, num_changes = self._num_role_changes(observation, proposal.replicas)
        is_low = self._memory[(PREFILL, DECODE)[giving]].num_low >= _LOW_INTERVALS
        if num_changes and (is_low or not proposal.is_step):
            numbers[giving] = min(numbers[giving], observation.num_ordered[giving] - num_changes)
        return Replicas(*numbers)

    def _constrain(
        self, observation: Observation, target: Replicas, withdrawals: Replicas, *, is_step: bool
    ) -> Replicas:
        """Return the target within minimum, maximum, back-off and the budget without what drains."""
        pools = (observation.prefill, observation.decode)
        minimum, mode = self._limits.min_workers, self._targets.mode
        unscaled = _UNSCALED.get(mode)
        fixed = {unscaled: getattr(observation.num_ordered, unscaled)} if unscaled else {}
        least = Replicas(0 if mode == "auto" else minimum, minimum)._replace(**fixed)
        numbers = []
        for name, pool, number, lowest, num_withdrawn in zip(
            (PREFILL, DECODE), pools, target, least, withdrawals, strict=True
        ):
            bounded = min(max(number, lowest), self._limits.max_workers)
            if observation.at < self._memory[name].retry_at:
                bounded = min(bounded, pool.num_ordered - num_withdrawn)
            numbers.append(bounded)
        bounded_target = Replicas(*numbers)._replace(**fixed)
        kept = Replicas(*map(min, bounded_target, observation.num_ordered)) if is_step else _NONE
        return self._within_budget(bounded_target, least, kept)._replace(**fixed)

    def _replace_last_decode_worker(self, observation: Observation, target: Replicas) -> Replicas:
        """Return the target with a prefill worker that serves instead of the decode workers that have all gone.

        Without one no request is answered, however many prompts are computed.
        """
        prefill, decode, targets = observation.prefill, observation.decode, self._targets
        change_s, spare = decode.role_change_s, max(1, self._limits.min_workers)
        can_change = targets.mode in ("disagg", "auto")
        can_change &= targets.prefill_gpus == targets.decode_gpus
        if decode.num_ready or prefill.num_ready <= spare or change_s is None or not can_change:
            return target
        starts = decode.starting_since
        left_s = (decode.startup_s or self._limits.startup_s) - (
            observation.at - starts[0] if starts else 0.0
        )
        is_changing = bool(starts) and observation.at - starts[-1] <= 2 * change_s  # perhaps
        if change_s >= left_s or is_changing:
            return target
        return Replicas(
            min(target.prefill, prefill.num_ordered - 1),
            max(target.decode, decode.num_ordered + 1),
        )

    def _change_roles(self, observation: Observation, target: Replicas) -> tuple[Replicas, int]:
        """Return how many workers change from prefill to decode, negative for the other way, and the target meanwhile.

        Workers that are to change later stay where they are, and nothing is started in their stead.
        """
        giving, num_in_all = self._num_role_changes(observation, target)
        num_ready = (observation.prefill, observation.decode)[giving].num_ready
        num_now = min(num_in_all, max(1, num_ready // _SHARE_OF_CHANGES))
        num_later = (num_in_all - num_now) * (1 if giving == 0 else -1)
        meanwhile = Replicas(target.prefill + num_later, target.decode - num_later)
        return meanwhile, num_now if giving == 0 else -num_now

    def _num_role_changes(self, observation: Observation, target: Replicas) -> tuple[int, int]:
        """Return which pool gives (0: prefill, 1: decode) and how many; none if a start is quicker."""
        pools = (observation.prefill, observation.decode)
        surplus = [pool.num_ordered - number for pool, number in zip(pools, target, strict=True)]
        giving = 0 if surplus[0] > 0 else 1
        giver, taker = pools[giving], pools[1 - giving]
        startup_s = taker.startup_s or self._limits.startup_s
        is_quicker = taker.role_change_s is not None and taker.role_change_s < startup_s
        if not is_quicker or self._targets.prefill_gpus != self._targets.decode_gpus:
            return giving, 0
        num_spare = giver.num_ready - target[giving]  # those that start answer no request yet
        return giving, max(0, min(num_spare, -surplus[1 - giving]))

    def _within_budget(self, target: Replicas, least: Replicas, kept: Replicas) -> Replicas:
        """Return the target scaled down to the budget in proportion, as the original does.

        Of a pool that is asked for one worker stays, because without it those of the other pool answer no request.
        Where the budget has room for the workers to be kept, no pool grows at their expense.
        """
        gpus = (self._targets.prefill_gpus, self._targets.decode_gpus)
        budget = self._limits.max_gpus
        total = target.prefill * gpus[0] + target.decode * gpus[1]
        if total <= budget:
            return target
        least = Replicas(*(max(low, min(1, n)) for low, n in zip(least, target, strict=True)))
        kept = Replicas(*map(max, least, kept))
        if kept.prefill * gpus[0] + kept.decode * gpus[1] <= budget:
            least = kept
        num_prefill = max(least.prefill, round(target.prefill * budget / total))
        num_prefill = min(num_prefill, (budget - least.decode * gpus[1]) // gpus[0])
        num_decode = min(target.decode, (budget - num_prefill * gpus[0]) // gpus[1])
        return Replicas(max(0, num_prefill), max(least.decode, num_decode))

    def _give_what_is_free(
        self, observation: Observation, target: Replicas, role_changes: int
    ) -> Replicas:
        """Return the target with as many new workers as fit beside all that hold GPUs now."""
        pools = (observation.prefill, observation.decode)
        gpus = (self._targets.prefill_gpus, self._targets.decode_gpus)
        free = self._limits.max_gpus - sum(
            pool.num_billed * size for pool, size in zip(pools, gpus, strict=True)
        )
        numbers = []
        for pool, size, number, num_leaving in zip(
            pools, gpus, target, (role_changes, -role_changes), strict=True
        ):
            num_there = pool.num_ordered - num_leaving
            num_new = min(max(0, number - num_there), max(0, free) // size)
            free -= num_new * size
            numbers.append(min(number, num_there) + num_new)
        return Replicas(*numbers)


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
    pools = [
        PoolState(
            num_ready=pool.num_ready,
            starting_since=tuple(since - last.at for since in pool.starting_since),
        )
        for pool in (last.prefill, last.decode)
    ]
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
        workers=tuple(
            dataclasses.replace(each, waiting_tokens=round(each.waiting_tokens * factor))
            for each in load.workers
        ),
        is_reported=load.is_reported,
    )
