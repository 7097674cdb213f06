"""A cluster in virtual time: pools of workers that start, serve, drain and are billed.

It is what a connector of the simulated planner orders from, and what an observation measures. A worker is billed from
the order of its start until it has drained. A prompt goes to the worker that will have computed it first, its cached
prefix included; what a draining prefill worker has not begun goes to another one. Without a ready worker requests wait.
A prefill worker keeps the blocks of a prompt until a decode worker has admitted it, and computes no further prompts
while its cache is full of them. They are freed if no decode worker is ready to copy them; this lease has no time limit.
A worker that changes its role drains first, and serves `role_change_s` seconds later; until then it counts as starting.
A worker that dies does so at once: its requests migrate, as a frontend does it. A start that fails ends when it would
have served, and one that hangs is billed until it is withdrawn.
"""  # decider

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynamo.planner import observation
from dynamo.simulate.plan_worker import PlanWorker, Request, Role, StepResult, Timing

_NONE = observation.Replicas(0, 0)
_LENGTH_BUCKETS = (100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000, math.inf)


@dataclass(slots=True, eq=False)
class _Member:
    """A worker of the cluster."""

    worker: PlanWorker
    role: Role
    ordered_at: float  # or asked to change its role
    ready_at: float
    number: int = -1  # of its pool's ready workers, in the order in which they became ready
    is_draining: bool = False
    is_changing: bool = False  # it drains, and then serves in the other pool
    is_failing: bool = False  # its start will

    @property
    def load(self) -> tuple[int, int]:
        """Return the prompt tokens that are not computed yet, and the tokens in the KV cache of open requests."""
        return self.worker.num_queued_tokens, self.worker.num_active_tokens


@dataclass(slots=True)
class _Pool:
    """The workers of one role. With thousands of them, no request may look at each."""

    role: Role
    times: Timing
    ready: list[_Member] = field(default_factory=list)
    starting: list[_Member] = field(default_factory=list)
    draining: list[_Member] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)  # no worker is ready
    by_number: dict[int, _Member] = field(default_factory=dict)  # those that are ready
    # a heap; what is outdated stays a while
    by_load: list[tuple[int, int, int]] = field(default_factory=list)
    # their numbers, by a prompt's first block
    with_block: dict[int, set[int]] = field(default_factory=dict)
    num_ever_ready: int = 0
    num_failed: int = 0  # starts since the last observation

    def add_ready(self, member: _Member) -> None:
        """Let a worker serve."""
        member.number, self.num_ever_ready = self.num_ever_ready, self.num_ever_ready + 1
        self.ready.append(member)
        self.by_number[member.number] = member
        self.record_load(member)

    def remove_ready(self, member: _Member) -> None:
        """Let a worker serve no longer."""
        self.ready.remove(member)
        del self.by_number[member.number]

    def record_load(self, member: _Member) -> None:
        """Take over the load of a worker, after each change of it."""
        if member.number not in self.by_number:
            return
        heapq.heappush(self.by_load, (*member.load, member.number))
        if len(self.by_load) > 64 + 4 * len(self.ready):
            self.by_load = [(*each.load, each.number) for each in self.ready]
            heapq.heapify(self.by_load)

    def least_loaded(self) -> _Member:
        """Return the ready worker with the least load, the oldest of several."""
        while True:
            *load, number = self.by_load[0]
            member = self.by_number.get(number)
            if member is not None and member.load == tuple(load):
                return member
            heapq.heappop(self.by_load)

    def holders(self, request: Request) -> list[_Member]:
        """Return the ready workers that have the beginning of a prompt in their cache."""
        numbers = self.with_block.get(request.names[0], set()) if request.names else set()
        members = {number: self.by_number.get(number) for number in numbers}
        found = [m for m in members.values() if m is not None and m.worker.cached_tokens(request)]
        numbers.intersection_update([member.number for member in found])
        return found


@dataclass(slots=True)
class _Interval:
    """What happened since the last observation."""

    arrived: list[Request] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)


class WorkerOrder(NamedTuple):
    """Numbers of workers, and how many of them come from the prefill pool to decode; negative: the other way."""

    replicas: observation.Replicas
    role_changes: int = 0
    withdrawals: observation.Replicas = _NONE  # starts to give up, the oldest, which are too slow
    reason: str = ""


class WorkerDeath(NamedTuple):
    """The death of the busiest worker of a pool at a time; `role` is that of aggregated workers as well."""

    at: float
    role: Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """A failure that was injected, or a decision that changed a pool or follows a failed start."""

    at: float
    kind: Literal["death", "failed start", "withdrawn start", "decision"]
    text: str


class PlanCluster:
    """Two pools, or one of aggregated workers, and the requests that are on their way."""

    def __init__(
        self,
        times: Timing,
        *,
        startup_s: float = 0.0,
        role_change_s: float | None = None,
        is_aggregated: bool = False,
        prefill_times: Timing | None = None,  # if they are others
        on_end: Callable[[], None] = lambda: None,  # after each request
    ) -> None:
        self.now = 0.0
        self.gpu_seconds = 0.0
        self.num_scalings = 0
        self.num_ended = 0
        self.num_migrated = 0
        self.num_hanging_starts = 0  # of those to come; they never get ready
        self.num_failing_starts = 0  # after these
        self.events: list[PlanEvent] = []
        self._on_end = on_end
        self._startup_s = startup_s
        self._role_change_s = role_change_s  # None: workers keep their roles
        self._prefill = _Pool("prefill", prefill_times or times)
        self._decode = _Pool("agg" if is_aggregated else "decode", times)
        self._entry = self._decode if is_aggregated else self._prefill
        self._order = itertools.count()
        self._exporters: dict[Request, _Member] = {}  # of a prompt, until it is decoded
        self._due: list[tuple[float, int, _Member | Request | WorkerDeath]] = []
        self._interval = _Interval()

    def add_ready(self, replicas: observation.Replicas) -> None:
        """Add workers that serve at once: those that were there before the first request."""
        for pool, number in zip((self._prefill, self._decode), replicas, strict=True):
            for _ in range(number):
                pool.add_ready(self._make(pool, ready_at=self.now))

    def scale(
        self,
        target: observation.Replicas,
        role_changes: int = 0,
        withdrawals: observation.Replicas = _NONE,
    ) -> None:
        """Order changes of roles and starts, give up starts, and drain, until the pools have this many workers."""
        pools = (self._prefill, self._decode)
        for pool, number in zip(pools, withdrawals, strict=True):
            self._withdraw_oldest(pool, number)
        self.num_scalings += sum(
            len(pool.ready) + len(pool.starting) != number
            for pool, number in zip(pools, target, strict=True)
        )
        giver, taker = pools if role_changes > 0 else pools[::-1]
        for _ in range(abs(role_changes)):
            self._begin_role_change(giver, taker)
        for pool, number in zip(pools, target, strict=True):
            num_present = len(pool.ready) + len(pool.starting)
            for _ in range(number - num_present):
                self._begin_start(pool)
            for _ in range(num_present - number):
                if pool.starting:
                    self._give_up(pool.starting.pop())
                else:
                    self._drain(pool)

    def _withdraw_oldest(self, pool: _Pool, number: int) -> None:
        for _ in range(number):
            member = min(pool.starting, key=lambda m: m.ordered_at)
            pool.starting.remove(member)
            self._give_up(member)
            self._record("withdrawn start", f"a {pool.role} worker was not ready in time")

    def _begin_start(self, pool: _Pool) -> None:
        """Begin the start of a worker, which hangs or fails as long as such starts are due."""
        member = self._make(pool, ready_at=self.now + self._startup_s)
        if self.num_hanging_starts:
            self.num_hanging_starts -= 1
            member.ready_at = math.inf
        elif self.num_failing_starts:
            self.num_failing_starts -= 1
            member.is_failing = True
        pool.starting.append(member)
        self._push(member.ready_at, member)

    def set_ready(self, target: observation.Replicas) -> None:
        """Change the pools at once, without start-up time: the oracle's search."""
        for pool, number in zip((self._prefill, self._decode), target, strict=True):
            num_new = max(0, number - len(pool.ready))
            is_prefill = pool is self._prefill
            self.add_ready(observation.Replicas(num_new * is_prefill, num_new * (not is_prefill)))
            self._send_held(pool)
            while len(pool.ready) > number:
                self._drain(pool)

    @property
    def prefill_queue(self) -> int | None:
        """Return the prompts that wait in the prefill worker that would get the next one; None without one."""
        pool = self._prefill
        return pool.least_loaded().worker.num_waiting if pool.ready else None

    def schedule_death(self, death: WorkerDeath) -> None:
        """Let a worker die when its time has come, if there is one."""
        self._push(death.at, death)

    def submit(self, request: Request, *, is_local: bool = False) -> None:
        """Let a request arrive now; with `is_local` a decode worker computes its prompt."""
        self._interval.arrived.append(request)
        self._send(request, self._decode if is_local else self._entry)

    def run_until(self, time: float) -> None:
        """Let time pass until `time`."""
        while self._due and self._due[0][0] <= time:
            self.now, _, due = heapq.heappop(self._due)
            if isinstance(due, Request):
                self._send(due, self._decode)
            elif isinstance(due, WorkerDeath):
                self._kill(self._prefill if due.role == "prefill" else self._decode)
            elif due.ready_at == self.now and due in self._pool_of(due).starting:
                self._begin_serving(due)
            elif due.worker.next_time == self.now:
                self._step(due)
        if time < math.inf:
            self.now = time

    def stop(self) -> None:
        """Bill what still runs; the run is over."""
        for pool in (self._prefill, self._decode):
            for member in (*pool.ready, *pool.starting, *pool.draining):
                self._bill(member)

    def observe(self, interval_s: float) -> observation.Observation:
        """Return the observation of the interval that ends now, and begin the next one."""
        interval, self._interval = self._interval, _Interval()
        first, ended = interval.first_tokens, interval.ended
        prompts = interval.arrived or first
        num_prompt = sum(request.num_prompt for request in first)
        decoded = [request for request in ended if request.answer_len > 1]
        traffic = observation.Traffic(
            num_requests=len(interval.arrived),
            isl=_mean([request.num_prompt for request in prompts]),
            osl=_mean([request.answer_len for request in ended]),
            ttft_s=_mean([request.ttft_s for request in first]),
            itl_s=_mean([request.itl_s for request in decoded]),
            duration_s=_mean([request.ended_at - request.at for request in ended]),
            hit_rate=sum(r.num_cached for r in first) / num_prompt if num_prompt else 0.0,
            prompt_lens=_prompt_lens(prompts),
        )
        return observation.Observation(
            at=self.now,
            interval_s=interval_s,
            traffic=observation.Fresh(traffic),
            prefill=self._state(self._prefill),
            decode=self._state(self._decode),
            prefill_load=_load(self._prefill),
            decode_load=_load(self._decode),
        )

    def _make(self, pool: _Pool, *, ready_at: float) -> _Member:
        worker = PlanWorker(pool.role, pool.times)
        return _Member(worker, pool.role, ordered_at=self.now, ready_at=ready_at)

    def _pool_of(self, member: _Member) -> _Pool:
        return self._prefill if member.role == "prefill" else self._decode

    def _push(self, time: float, due: _Member | Request | WorkerDeath) -> None:
        heapq.heappush(self._due, (time, next(self._order), due))

    def _begin_serving(self, member: _Member) -> None:
        pool = self._pool_of(member)
        pool.starting.remove(member)
        if member.is_failing:
            pool.num_failed += 1
            self._bill(member)
            self._record("failed start", f"a {pool.role} worker ended before it served")
            return
        pool.add_ready(member)
        self._send_held(pool)
        if pool is self._entry and len(pool.ready) > 1:
            self._share_queue(pool)

    def _kill(self, pool: _Pool) -> None:
        if not pool.ready:
            return
        member = max(pool.ready, key=lambda m: m.load)
        pool.remove_ready(member)
        self._bill(member)
        requests = member.worker.die(self.now)
        self.num_migrated += len(requests)
        self._record("death", f"a {pool.role} worker died, requests that migrate: {len(requests)}")
        for request in sorted(requests, key=lambda r: r.at):
            self._release_lease(request)
            self._send(request, self._entry)

    def _record(self, kind: Literal["death", "failed start", "withdrawn start"], text: str) -> None:
        self.events.append(PlanEvent(self.now, kind, text))

    def _begin_role_change(self, giver: _Pool, taker: _Pool) -> None:
        member = self._withdraw_idlest(giver)
        self._bill(member)
        member.ordered_at, member.ready_at, member.is_changing = self.now, math.inf, True
        taker.starting.append(member)
        self._end_if_drained(member)

    def _end_role(self, member: _Member) -> None:
        """Let a worker that has drained begin in its new role."""
        assert self._role_change_s is not None
        member.is_changing = False
        member.role = self._decode.role if member.role == "prefill" else "prefill"
        member.worker = PlanWorker(member.role, self._pool_of(member).times)
        member.ready_at = self.now + self._role_change_s
        self._push(member.ready_at, member)

    def _give_up(self, member: _Member) -> None:
        """End a worker that does not serve yet, or a change of its role; it ends what it still runs in the old one."""
        if member.is_changing:
            member.is_changing, member.is_draining = False, True
            self._pool_of(member).draining.append(member)
        else:
            self._bill(member)

    def _share_queue(self, pool: _Pool) -> None:
        """Give a new worker its share of the prompts that no other has begun."""
        waiting: list[Request] = []
        for other in pool.ready:
            waiting += other.worker.withdraw_waiting()
            pool.record_load(other)
        for request in sorted(waiting, key=lambda r: r.at):
            self._send(request, pool)

    def _send_held(self, pool: _Pool) -> None:
        held, pool.held = pool.held, []
        for request in held:
            self._send(request, pool)

    def _send(self, request: Request, pool: _Pool) -> None:
        if not pool.ready:
            self._release_lease(request)
            pool.held.append(request)
            return
        member = pool.least_loaded()
        if pool is self._entry and (holders := pool.holders(request)):
            member = min(
                [member, *holders], key=lambda m: (m.worker.queued_after(request), m.number)
            )
        next_time = member.worker.next_time
        member.worker.submit(request, self.now)
        self._record_change(member, next_time)

    def _step(self, member: _Member) -> None:
        result: StepResult = member.worker.advance(self.now)
        pool = self._pool_of(member)
        pool.record_load(member)
        for request in result.prefilled:
            if request.names:
                pool.with_block.setdefault(request.names[0], set()).add(member.number)
        if member.worker.next_time < math.inf:
            self._push(member.worker.next_time, member)
        self._interval.first_tokens += (  # one that migrated had its first token before
            request for request in result.prefilled if request.first_token_at == self.now
        )
        self._interval.ended += result.ended
        self.num_ended += len(result.ended)
        if member.role == "prefill":
            for request in result.prefilled:
                if request.num_output > 1:
                    self._exporters[request] = member
                    self._push(self.now + pool.times.transfer_s(request.num_prompt), request)
        for request in result.admitted:
            self._release_lease(request)
        self._end_if_drained(member)
        for _ in result.ended:
            self._on_end()

    def _record_change(self, member: _Member, next_time: float) -> None:
        """Record the load of a worker after a change, and the time of its next step, which was `next_time` before."""
        self._pool_of(member).record_load(member)
        if member.worker.next_time != next_time:
            self._push(member.worker.next_time, member)

    def _release_lease(self, request: Request) -> None:
        """Let the prefill worker free the blocks of a prompt, if one keeps them."""
        member = self._exporters.pop(request, None)
        if member is not None:
            next_time = member.worker.next_time
            member.worker.release_lease(request, self.now)
            self._record_change(member, next_time)
            self._end_if_drained(member)

    def _end_if_drained(self, member: _Member) -> None:
        """End a worker that drains, or let it begin in its new role, once nothing is left in it."""
        if not member.worker.is_drained:
            return
        if member.is_changing:
            self._end_role(member)
        elif member.is_draining:
            self._pool_of(member).draining.remove(member)
            self._bill(member)

    def _withdraw_idlest(self, pool: _Pool) -> _Member:
        """Take the worker with the least load out of service; others get the requests that it has not begun."""
        member = min(pool.ready, key=lambda m: (m.worker.num_active_tokens, m.worker.num_open))
        pool.remove_ready(member)
        for request in member.worker.withdraw_waiting():
            self._send(request, pool)
        return member

    def _drain(self, pool: _Pool) -> None:
        member = self._withdraw_idlest(pool)
        member.is_draining = True
        pool.draining.append(member)
        self._end_if_drained(member)

    def _bill(self, member: _Member) -> None:
        self.gpu_seconds += self.now - member.ordered_at

    def _state(self, pool: _Pool) -> observation.PoolState:
        num_failed, pool.num_failed = pool.num_failed, 0
        return observation.PoolState(
            num_failed=num_failed,
            failure="injected" if num_failed else "",
            num_ready=len(pool.ready),
            starting_since=tuple(sorted(member.ordered_at for member in pool.starting)),
            num_draining=len(pool.draining),
            startup_s=self._startup_s,
            role_change_s=self._role_change_s,
        )


def _load(pool: _Pool) -> observation.PoolLoad:
    workers = [member.worker for member in (*pool.ready, *pool.draining)]
    ready = [member.worker for member in pool.ready]
    return observation.PoolLoad(
        kv_usage=_mean([worker.kv_usage for worker in ready]) or 0.0,
        num_running=sum(worker.num_running for worker in workers),
        num_waiting=sum(worker.num_waiting for worker in workers) + len(pool.held),
        waiting_tokens=sum(worker.num_queued_tokens for worker in workers),
        workers=tuple(
            observation.ReportedLoad(
                waiting_tokens=worker.num_queued_tokens, passes=worker.take_passes()
            )
            for worker in ready
        ),
    )


def _prompt_lens(requests: Sequence[Request]) -> dict[float, float]:
    """Return the lengths of prompts as well as a frontend's histogram tells them."""
    counts = dict.fromkeys(_LENGTH_BUCKETS, 0.0)
    for request in requests:
        counts[_LENGTH_BUCKETS[bisect.bisect_left(_LENGTH_BUCKETS, request.num_prompt)]] += 1
    return observation.spread_buckets(counts)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
