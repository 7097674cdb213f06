"""A worker whose prompts and answers are told apart, in virtual time: prefill, decode, or both in one iteration.

Each iteration gives every running sequence a token, and fills the rest of its budget with prompts, first come first
served. A sequence is admitted when the whole of its prompt and answer has room, so nothing is preempted.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from dynamo.simulate.hardware import Group


@dataclass(slots=True, kw_only=True)
class Job:
    """One request; times are seconds of the simulation."""

    num_prompt: int
    num_output: int
    begun_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_computed: int = 0  # of the prompt
    num_written: int = 0  # of the answer

    @property
    def num_context(self) -> int:
        """Tokens that a step of its decoding reads."""
        return self.num_prompt + self.num_written


@dataclass(slots=True)
class Done:
    """What an iteration brought."""

    prefilled: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class PhaseWorker:
    """Mutable. `is_prefill_only`: a job leaves with its first token."""

    def __init__(
        self, group: Group, *, max_num_seqs: int, max_num_tokens: int, is_prefill_only: bool = False
    ) -> None:
        self.next_time = math.inf
        self._group = group
        self._max_num_seqs, self._max_num_tokens = max_num_seqs, max_num_tokens
        self._is_prefill_only = is_prefill_only
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []  # of the iteration that runs
        self._num_free = group.num_kv_tokens

    @property
    def num_waiting(self) -> int:
        """Prompts of which nothing is computed yet."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Jobs that are not done."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def submit(self, job: Job, now: float) -> None:
        """Its prompt may be computed already. Who is idle begins at once."""
        self._waiting.append(job)
        if self.next_time == math.inf:
            self._begin(now)

    def advance(self, now: float) -> Done:
        """`next_time` has come: an iteration is over, and the next begins."""
        done = Done()
        for job in self._decoding:
            job.num_written += 1
        for job, num_tokens in self._chunks:
            job.num_computed += num_tokens
            if job.num_computed == job.num_prompt:
                self._end_prefill(job, now, done)
        self._end(now, done)
        self._begin(now)
        return done

    def _end_prefill(self, job: Job, now: float, done: Done) -> None:
        self._prefilling.popleft()
        job.first_token_at, job.num_written = now, 1
        done.prefilled.append(job)
        if self._is_prefill_only:
            self._num_free += self._need(job)
        else:
            self._decoding.append(job)

    def _end(self, now: float, done: Done) -> None:
        done.ended = [job for job in self._decoding if job.num_written >= job.num_output]
        for job in done.ended:
            job.ended_at = now
            self._num_free += self._need(job)
        if done.ended:
            self._decoding = [job for job in self._decoding if job.num_written < job.num_output]

    def _begin(self, now: float) -> None:
        self._admit()
        self._chunks = list(self._plan(self._max_num_tokens - len(self._decoding)))
        self.next_time = math.inf
        if not self._chunks and not self._decoding:
            return
        self.next_time = now + self._group.iteration_s(
            prompts_s=sum(
                self._group.prompt_s(job.num_computed, job.num_computed + num)
                for job, num in self._chunks
            ),
            num_prompt_tokens=sum(num for _, num in self._chunks),
            num_decoding=len(self._decoding),
            num_read=sum(job.num_context for job in self._decoding),
        )

    def _admit(self) -> None:
        num_running = len(self._prefilling) + len(self._decoding)
        while self._waiting and num_running < self._max_num_seqs:
            if (need := self._need(self._waiting[0])) > self._num_free:
                return
            job = self._waiting.popleft()
            self._num_free -= need
            num_running += 1
            has_prompt = job.num_computed == job.num_prompt
            (self._decoding if has_prompt else self._prefilling).append(job)

    def _plan(self, num_left: int) -> list[tuple[Job, int]]:
        chunks = []
        for job in self._prefilling:
            num_tokens = min(num_left, job.num_prompt - job.num_computed)
            if num_tokens <= 0:
                break
            chunks.append((job, num_tokens))
            num_left -= num_tokens
        return chunks

    def _need(self, job: Job) -> int:
        return job.num_prompt + (0 if self._is_prefill_only else job.num_output)
