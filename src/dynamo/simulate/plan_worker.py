"""A worker that batches: chunked prompts beside decode steps, and the times of its steps by a profile.

The simulations of the planner and of disaggregation run it, the second with the times of a group of GPUs.
Steps in which nothing but decoding happens are computed in one go up to the first answer that ends; a request that
comes in between joins at the end of the step that runs then. A request is admitted when its prompt and answer have
room, so nothing is preempted. Requests whose prompts begin alike share blocks of the KV cache, which take room once.
Among the tokens on which the time of a decode step depends they count once, and as often again as the worker's times
say that a shared token costs each further sequence. The prompts of a prefill worker keep their room under a lease until
a decode worker has admitted them. Times are seconds, and never go back.
"""  # decider

import heapq
import itertools
import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from dynamo.engine.mock import timing
from dynamo.protocols import load

Role = Literal["prefill", "decode", "agg"]
_MOST_STEPS = 512  # computed in one go
_MOST_PASSES = 64  # that an observation tells of


class Timing(Protocol):
    """The times of a worker's steps, and its limits."""

    @property
    def num_kv_tokens(self) -> int:
        """Return the tokens for which the KV cache has room."""

    @property
    def max_num_seqs(self) -> int:
        """Return the most requests at once."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Return the most tokens of a step."""

    @property
    def repeated_cost(self) -> float:
        """Return what a shared token costs each further sequence, as a share of a token of its own."""

    def step_s(
        self,
        prompts: Sequence[tuple[int, int]],
        num_decoding: int,
        num_active: int,
        num_prefilling: int = 0,
    ) -> float:
        """Return the seconds of a step that computes these parts of prompts, from and to a token.

        `num_active` tokens are in the KV cache, shared ones counted once and by their cost for further sequences;
        `num_prefilling` of them are of prompts that are not complete.
        """

    def decode_steps_s(self, num_steps: int, num_decoding: int, num_active: int) -> list[float]:
        """Return the seconds of so many steps, one after the other, in which nothing but decoding happens."""

    def transfer_s(self, num_tokens: int) -> float:
        """Return the seconds in which the KV cache of so many tokens goes to another worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The times of a worker's steps in seconds by a profile, and its memory."""

    prefill_s: Callable[[float], float]  # by the new prompt tokens of the step
    decode_s: Callable[[float], float]  # by the share of the KV cache in use
    num_kv_tokens: int = 448_000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_bytes_per_s: float = 64e9  # from a prefill worker to a decode worker
    kv_bytes_per_token: int = 131_072
    repeated_cost: float = 0.0  # 0: that of the mock engine

    def step_s(
        self,
        prompts: Sequence[tuple[int, int]],
        num_decoding: int,
        num_active: int,
        num_prefilling: int = 0,
    ) -> float:
        """Return the seconds of a step: those of its prompts, and of decoding by the use of the KV cache."""
        decode_s = self.decode_s(min(1.0, num_active / self.num_kv_tokens)) if num_decoding else 0.0
        if not prompts:
            return decode_s
        return self.prefill_s(sum(end - start for start, end in prompts)) + decode_s

    def decode_steps_s(self, num_steps: int, num_decoding: int, num_active: int) -> list[float]:
        """Return the seconds of decode steps, which are most of what a simulation computes: few calls for each."""
        decode_s, size = self.decode_s, self.num_kv_tokens
        nums = range(num_active, num_active + num_steps * num_decoding, num_decoding)
        return [decode_s(num / size if num < size else 1.0) for num in nums]

    def batch_step_s(
        self,
        num_cache_tokens: int,
        *,
        num_prompt_tokens: int,
        num_decoding: int,
        active_share: float,
    ) -> float:
        """Return the same of a step that is described as the mock engine does, by the share of a cache of this size."""
        prompts = [(0, num_prompt_tokens)] if num_prompt_tokens else []
        return self.step_s(prompts, num_decoding, round(active_share * num_cache_tokens))

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes_per_token / self.kv_bytes_per_s


def h100_8b() -> StepTimes:
    """Return the profile of the planner's experiments: a model of 8 billion parameters on one H100."""

    def prefill_s(num_tokens: float) -> float:
        return (8 + 0.049 * num_tokens) / 1e3 if num_tokens else 0.0

    def decode_s(share: float) -> float:
        return timing.decode_ms(share) / 1e3

    return StepTimes(prefill_s=prefill_s, decode_s=decode_s)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request on its way."""

    at: float
    num_prompt: int
    num_output: int
    names: Sequence[int] = ()  # of its blocks, equal where prompts are equal up to there
    block_size: int = 512
    is_servable: bool = True  # its own prefill leaves time for the TTFT target
    num_left: int = 0  # prompt tokens still to be computed
    num_cached: int = 0
    num_earlier: int = 0  # tokens of its answer that a worker which died gave; they count as prompt
    is_prefilled: bool = False  # its prompt is computed
    first_token_at: float = math.inf
    ended_at: float = math.inf

    @property
    def num_tokens(self) -> int:
        """Return the tokens of prompt and answer."""
        return self.num_prompt + self.num_output

    @property
    def answer_len(self) -> int:
        """Return the tokens of the whole answer."""
        return self.num_earlier + self.num_output

    @property
    def ttft_s(self) -> float:
        """Return the seconds from arrival to the first token."""
        return self.first_token_at - self.at

    @property
    def itl_s(self) -> float:
        """Return the mean seconds between two tokens."""
        return (self.ended_at - self.first_token_at) / max(1, self.answer_len - 1)

    def migrate(self, num_done: int) -> None:
        """Leave a worker that died after so many tokens: another one computes prompt and tokens, and goes on."""
        self.num_prompt += num_done
        self.num_output -= num_done
        self.num_earlier += num_done
        self.is_prefilled = False


@dataclass(slots=True)
class StepResult:
    """The requests that got their first token, and those that ended; a prefill worker hands over the first.

    `admitted` are those with a computed prompt that got room: the prefill worker may release their blocks.
    """

    prefilled: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)


class _Reservation(NamedTuple):
    """The room of a request: blocks of its prompt that others may share, and tokens of its own."""

    shared_names: Sequence[int]
    block_size: int
    num_own: int  # of its prompt
    num_answer: int


class ReservedTokens:
    """The room that requests have in a worker's KV cache. Full blocks of prompts that begin alike are shared.

    So it is in the mock engine: what is computed is found at once, and what is copied from a prefill worker is found in
    the next step. Blocks that two requests copy in one step are there twice, until the second of them ends.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_repeated = 0  # tokens of prompts beyond the first of each shared block
        self._num_free = num_tokens
        self._reservations: dict[Request, _Reservation] = {}
        self._num_users: dict[int, int] = {}  # of each block that is shared, or may be
        self._newly_copied: set[int] = set()

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, request: Request) -> bool:
        return request in self._reservations

    def begin_step(self) -> None:
        """Let the blocks be found that were copied for the step before."""
        self._newly_copied.clear()

    def reserve(self, request: Request, num_answer: int) -> int | None:
        """Return the tokens of a prompt for which no other request has room; None if there is none for the request."""
        names = request.names[: (request.num_prompt - 1) // request.block_size]
        # a request that has a block has all before it
        num_found = bisect_left(names, True, key=lambda name: name not in self._num_users)
        if request.is_prefilled:
            num_known = bisect_left(names, True, hi=num_found, key=self._newly_copied.__contains__)
            if num_known < num_found:
                num_found, names = num_known, names[:num_known]
        num_new = request.num_prompt - num_found * request.block_size
        if num_new + num_answer > self._num_free and self._reservations:
            return None
        self._num_free -= num_new + num_answer
        self.num_repeated += request.num_prompt - num_new
        self._reservations[request] = _Reservation(
            shared_names=names,
            block_size=request.block_size,
            num_own=request.num_prompt - len(names) * request.block_size,
            num_answer=num_answer,
        )
        for name in names:
            self._num_users[name] = self._num_users.get(name, 0) + 1
        if request.is_prefilled:
            self._newly_copied.update(names[num_found:])
        return num_new

    def release(self, request: Request) -> int:
        """Free the room of a request; return the tokens of its prompt that no other one has."""
        reservation = self._reservations.pop(request)
        num_freed = reservation.num_own
        for name in reservation.shared_names:
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._num_users[name]
                num_freed += reservation.block_size
        self._num_free += num_freed + reservation.num_answer
        self.num_repeated -= request.num_prompt - num_freed
        return num_freed


class PlanWorker:
    """One worker in one role."""

    def __init__(self, role: Role, times: Timing) -> None:
        self.role = role
        self.next_time = math.inf
        self.num_queued_tokens = 0  # prompt tokens that are not computed yet
        self.num_active_tokens = 0
        self._times = times
        self._waiting: deque[Request] = deque()
        self._computed: deque[Request] = deque()  # prompts of these; they wait for room only
        self._prefilling: deque[Request] = deque()
        self._decoding: list[tuple[int, int, Request]] = []  # a heap by the step of their end
        self._order = itertools.count()
        self._reserved = ReservedTokens(times.num_kv_tokens)  # of running and of leased requests
        self._num_steps = 0
        self._ends: list[float] = []  # of the steps that are computed in one go
        self._chunks: list[tuple[Request, int]] = []
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._passes: deque[load.ForwardPass] = deque(maxlen=_MOST_PASSES)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests of which nothing is computed yet."""
        return len(self._waiting) + len(self._computed)

    @property
    def num_running(self) -> int:
        """Return the number of requests that have been admitted."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_open(self) -> int:
        """Return the number of requests in the worker."""
        return self.num_waiting + self.num_running

    @property
    def is_drained(self) -> bool:
        """Return True if the worker has no request, and keeps no prompt for a decode worker."""
        return not self.num_waiting and not self._reserved

    @property
    def kv_usage(self) -> float:
        """Return the share of the KV cache in use."""
        return min(1.0, self.num_active_tokens / self._times.num_kv_tokens)

    def cached_tokens(self, request: Request) -> int:
        """Return the leading tokens of a prompt that are in the cache, at most all but one."""
        num_blocks = 0
        for name in request.names:
            if name not in self._cache:
                break
            num_blocks += 1
        return min(num_blocks * request.block_size, request.num_prompt - 1)

    def queued_after(self, request: Request) -> tuple[int, int]:
        """Return the prompt tokens to be computed with one more request, and the tokens in the KV cache."""
        num_new = request.num_prompt - (self.cached_tokens(request) if request.names else 0)
        return self.num_queued_tokens + num_new, self.num_active_tokens

    def submit(self, request: Request, now: float) -> None:
        """Queue a request, the prompt of which is computed already if it has its first token."""
        if request.is_prefilled:
            self._computed.append(request)
        else:
            self._look_up(request)
            self.num_queued_tokens += request.num_left
            self._waiting.append(request)
        if self.next_time == math.inf:
            self.next_time = now  # the next step begins when all that comes at this time has come
        elif len(self._ends) > 1:
            del self._ends[bisect_left(self._ends, now) + 1 :]
            self.next_time = self._ends[-1]

    def _look_up(self, request: Request) -> None:
        """Leave out what is in the cache of a prompt of which nothing is computed yet."""
        request.num_cached = self.cached_tokens(request)
        request.num_left = request.num_prompt - request.num_cached

    def withdraw_waiting(self) -> list[Request]:
        """Remove the requests of which nothing is computed yet, and return them."""
        withdrawn = [*self._computed, *self._waiting]
        self._computed.clear()
        self._waiting.clear()
        self.num_queued_tokens -= sum(request.num_left for request in withdrawn)
        return withdrawn

    def release_lease(self, request: Request, now: float) -> None:
        """Free the blocks of a prompt that a decode worker has admitted. An unknown one is no error."""
        if request in self._reserved:
            self.num_active_tokens -= self._reserved.release(request)
            if self._waiting and self.next_time == math.inf:
                self.next_time = now

    def die(self, now: float) -> list[Request]:
        """End without a further step, and return all requests, for other workers."""
        num_steps = self._num_steps + bisect_left(self._ends, now)
        for end, _, request in self._decoding:
            request.migrate(request.num_output - (end - num_steps))
        for request in self._computed:
            request.migrate(1)
        decoding = [request for _, _, request in self._decoding]
        self.next_time = math.inf
        self._reserved = ReservedTokens(self._times.num_kv_tokens)
        return [*self._waiting, *self._computed, *self._prefilling, *decoding]

    def advance(self, now: float) -> StepResult:
        """End the steps that end at `next_time`, and begin the next ones."""
        result = StepResult()
        num_steps = len(self._ends)
        if self._decoding:
            self._num_steps += num_steps
            self.num_active_tokens += num_steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            self._end(heapq.heappop(self._decoding)[2], now, result)
        for request, num_tokens in self._chunks:
            request.num_left -= num_tokens
            self.num_queued_tokens -= num_tokens
            if not request.num_left:
                self._prefilling.popleft()
                self._complete_prompt(request, now, result)
        self._begin(now, result)
        return result

    def _complete_prompt(self, request: Request, now: float, result: StepResult) -> None:
        request.first_token_at = min(now, request.first_token_at)
        request.is_prefilled = True
        result.prefilled.append(request)
        self._store(request.names, request.block_size)
        if request.num_output == 1:
            self._end(request, now, result)
        elif self.role != "prefill":  # which keeps the blocks until a decode worker has them
            self._decode(request)

    def _decode(self, request: Request) -> None:
        end = self._num_steps + request.num_output - 1
        heapq.heappush(self._decoding, (end, next(self._order), request))

    def _end(self, request: Request, now: float, result: StepResult) -> None:
        self.num_active_tokens -= self._reserved.release(request) + request.num_output - 1
        request.ended_at = now
        result.ended.append(request)

    def _store(self, names: Sequence[int], block_size: int) -> None:
        for name in reversed(names):
            self._cache[name] = None
            self._cache.move_to_end(name)
        num_over = len(self._cache) - self._times.num_kv_tokens // block_size
        for _ in range(num_over):
            self._cache.popitem(last=False)

    def _admit(self, queue: deque[Request]) -> Request | None:
        """Return the next request after it got room; None if none waits or none fits."""
        if not queue or self.num_running >= self._times.max_num_seqs:
            return None
        num_answer = 0 if self.role == "prefill" else queue[0].num_output
        num_new = self._reserved.reserve(queue[0], num_answer)
        if num_new is None:
            return None
        self.num_active_tokens += num_new
        return queue.popleft()

    def _begin(self, now: float, result: StepResult) -> None:
        self._reserved.begin_step()
        while (request := self._admit(self._computed)) is not None:
            self._decode(request)
            result.admitted.append(request)
        num_decoding = len(self._decoding)
        parts = self._plan_chunks(self._times.max_num_batched_tokens - num_decoding)
        if self._chunks:
            began_at = now
            num_prefilling = sum(request.num_prompt for request in self._prefilling)
            now += self._times.step_s(parts, num_decoding, self._num_read, num_prefilling)
            self._note_pass(sum(end - start for start, end in parts), num_decoding, now - began_at)
            self._ends = [now]
        elif num_decoding:
            self._ends = self._decode_ends(now, num_decoding)
            self._note_pass(0, num_decoding, self._ends[0] - now)
        else:
            self._ends = []
        self.next_time = self._ends[-1] if self._ends else math.inf

    def take_passes(self) -> tuple[load.ForwardPass, ...]:
        """Return some of the forward passes since the last call, the newest last."""
        passes = tuple(self._passes)
        self._passes.clear()
        return passes

    def _note_pass(self, num_prompt_tokens: int, num_decoding: int, seconds: float) -> None:
        self._passes.append(
            load.ForwardPass(
                num_prompt_tokens=num_prompt_tokens,
                num_kv_tokens=self.num_active_tokens if num_decoding else 0,
                wall_s=seconds,
            )
        )

    def _plan_chunks(self, budget: int) -> list[tuple[int, int]]:
        """Plan the prompts of a step, and return their parts; prompts beyond the budget go on waiting."""
        self._chunks = []
        for request in self._prefilling:
            budget -= self._plan_chunk(request, budget)
        while budget > 0 and (admitted := self._admit(self._waiting)) is not None:
            self.num_queued_tokens -= admitted.num_left
            self._look_up(admitted)  # others may have computed its beginning since it came
            self.num_queued_tokens += admitted.num_left
            self._prefilling.append(admitted)
            budget -= self._plan_chunk(admitted, budget)
        return [
            (request.num_prompt - request.num_left, request.num_prompt - request.num_left + num)
            for request, num in self._chunks
        ]

    def _plan_chunk(self, request: Request, budget: int) -> int:
        num_tokens = min(budget, request.num_left)
        if num_tokens > 0:
            self._chunks.append((request, num_tokens))
        return max(0, num_tokens)

    @property
    def _num_read(self) -> int:
        """Return the tokens by which decoding is looked up."""
        return self.num_active_tokens + round(
            self._times.repeated_cost * self._reserved.num_repeated
        )

    def _decode_ends(self, now: float, num_decoding: int) -> list[float]:
        num_steps = max(1, min(_MOST_STEPS, self._decoding[0][0] - self._num_steps))
        steps_s = self._times.decode_steps_s(num_steps, num_decoding, self._num_read)
        return list(itertools.accumulate(steps_s, initial=now))[1:]
