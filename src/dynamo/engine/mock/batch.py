"""The simulated engine without its time: what each step would compute, and what it brings.

    schedule() → plan (how much work) → time passes → commit() → outputs

First come, first served. If a choice needs a block and there is none, the one that was admitted last (or first, if
`Limits` say so) is preempted: it waits, with what it has written as a longer prompt.

It stands behind benchmarks of everything else, so a token must cost next to nothing: a choice is looked at closely
only at its next `event` (its end, or that of its blocks); in between it sends prepared outputs.
"""

from dataclasses import dataclass, replace

import msgspec

from dynamo.engine import api
from dynamo.engine.mock.answers import Cycle
from dynamo.engine.mock.memory import Choice, Memory
from dynamo.kvbm import sharing
from dynamo.protocols import blocks, generate, kv_events, kv_transfer, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step, and a sequence, may not exceed; and who gives way."""

    max_num_seqs: int
    max_num_batched_tokens: int
    context_length: int  # at most a step's tokens, where prompts are computed whole
    chunked_prefill: bool = True
    preempts_newest: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much a step computes."""

    num_prompt_tokens: int
    num_decoding: int
    active_share: float  # of all blocks

    @property
    def is_empty(self) -> bool:
        """Nothing can be computed before something changes."""
        return not self.num_prompt_tokens and not self.num_decoding


class Batch:
    """Mutable; one event loop owns it. Requests may come and go between `schedule` and `commit`."""

    def __init__(
        self,
        cycle: Cycle,
        memory: Memory,
        limits: Limits,
        shared: sharing.SharedBlocks[Choice] | None = None,
    ) -> None:
        self._cycle = cycle
        self._memory = memory
        self._limits = limits
        self._shared = shared or sharing.SharedBlocks(memory.pool, memory.block_size)
        self._holding: dict[str, generate.Request] = {}
        self._waiting: list[Choice] = []
        self._prefilling: list[Choice] = []  # in order of admission, like all below
        self._decoding: list[Choice] = []
        self._full: list[Choice] = []  # decoding, but the next token needs another block
        self._planned: list[tuple[Choice, int]] = []
        self._open: dict[str, list[Choice]] = {}
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, request: generate.Request) -> None:
        """Take a request that fits (`engine.refusal`), and whose id is not in use."""
        leader: Choice | None = None
        remote = kv_transfer.remote_blocks(request.kv_transfer_params)
        seed = blocks.seed_of(request.lora_name)
        choices = self._open[request.id] = []
        for index in range(request.sampling_options.n):
            choice = Choice(
                request=request,
                index=index,
                answer=self._cycle.answer(request, index, self._limits.context_length),
                outputs=self._cycle.outputs(index, request.output_options.logprobs),
                leader=leader,
                prompt_len=request.prompt_len,
                seed=seed,
                remote=None if leader else remote,
            )
            leader = leader or choice
            choices.append(choice)
        self._waiting += choices

    def abort(self, request_id: str) -> None:
        """End a request at once. An unknown id is no error."""
        for choice in self._open.pop(request_id, ()):
            self._leave(choice)

    def abort_choice(self, request_id: str, index: int) -> None:
        """End one choice at once. An unknown one is no error."""
        choices = self._open.get(request_id, [])
        for choice in [one for one in choices if one.index == index]:
            self._end(choice)
            if not choice.num_output:  # the next one leads
                for other in choices:
                    other.leader = choices[0] if other is not choices[0] else None

    def take_imports(self) -> list[sharing.KvImport]:
        """Return the imports that began since the last call."""
        return self._shared.take_imports()

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """Let the choice of an import go on. An unknown id is no error."""
        choice = self._shared.end_import(import_id)
        if choice is None:
            return
        if choice.is_aborted:
            self._memory.release(choice)
            return
        if is_copied:
            if not self._memory.is_as_named(
                choice
            ):  # the blocks were given to others: answer wrongly
                choice.answer = replace(choice.answer, start=choice.answer.start + 1)
            choice.num_computed = choice.prompt_len - 1
        self._prefilling.append(choice)

    def take_holding(self) -> dict[str, generate.Request]:
        """The requests for whose outputs blocks are held, since the last call, by id."""
        holding, self._holding = self._holding, {}
        return holding

    def release_lease(self, lease_id: int) -> None:
        """Free the blocks under a lease. An unknown id is no error."""
        self._shared.release_lease(lease_id)

    def clear(self) -> None:
        """Forget all reusable prefixes."""
        self._memory.pool.clear()

    def take_events(self) -> list[kv_events.KvEvent]:
        """What became findable, and what no longer is, since the last call."""
        return self._memory.pool.take_events()

    def load(self, dp_rank: int = 0) -> load.ForwardPassMetrics:
        """How busy it is. Slots are choices."""
        return load.ForwardPassMetrics(
            worker_stats=load.WorkerStats(
                request_active_slots=self._num_running,
                request_total_slots=self._limits.max_num_seqs,
                num_requests_waiting=len(self._waiting),
                active_prefill_tokens=sum(
                    choice.num_tokens - choice.num_computed
                    for choice in (*self._prefilling, *self._waiting)
                ),
                data_parallel_rank=dp_rank,
            ),
            kv_stats=load.KvStats(
                kv_active_blocks=self._memory.pool.num_active,
                kv_total_blocks=self._memory.pool.num_blocks,
                gpu_prefix_cache_hit_rate=self._num_cached_tokens / max(1, self._num_prompt_tokens),
            ),
        )

    def schedule(self) -> Plan:
        """The next step. It is empty only if nothing runs, and what waits does so for a copy or for blocks on loan."""
        self._planned = []
        is_short = self._grow()
        num_left = self._limits.max_num_batched_tokens - len(self._decoding)
        for choice in self._prefilling:
            num_left -= self._plan(choice, num_left)
        if not is_short:
            self._admit(num_left)
        return Plan(
            num_prompt_tokens=sum(num_tokens for _, num_tokens in self._planned),
            num_decoding=len(self._decoding),
            active_share=self._memory.pool.num_active / self._memory.pool.num_blocks,
        )

    def commit(self) -> list[api.EngineOutput]:
        """The step is done: a token for each choice that decodes, and for each whose prompt is complete."""
        size = len(self._cycle)
        batch: list[api.EngineOutput] = []
        ended: list[Choice] = []
        for choice in self._decoding:
            num_output = choice.num_output = choice.num_output + 1
            if num_output == choice.event:
                self._look_closely(choice, batch, ended)
            else:
                output = choice.outputs[(choice.answer.start + num_output - 1) % size]
                batch.append(api.EngineOutput(choice.request.id, output))
        for choice, num_tokens in self._planned:
            if choice.block_ids:  # not aborted since
                self._prefill(choice, num_tokens, batch, ended)
        for choice in ended:
            self._end(choice)
        return batch

    def _grow(self) -> bool:
        """Another block for each choice that filled its last. Returns whether somebody was preempted for it."""
        is_short = False
        full, self._full = self._full, []
        for choice in full:
            while choice.block_ids and not self._memory.grow(choice):
                self._preempt(self._victim())
                is_short = True
            if choice.block_ids:  # it was not preempted itself
                self._set_event(choice)
        return is_short

    def _victim(self) -> Choice:
        if self._limits.preempts_newest:
            return (self._prefilling or self._decoding)[-1]
        return (self._decoding or self._prefilling)[0]

    def _preempt(self, choice: Choice) -> None:
        self._leave(choice)
        self._waiting.insert(0, choice)

    def _admit(self, num_left: int) -> None:
        while self._waiting and num_left > 0 and self._has_slot():
            choice = self._waiting[0]
            if choice.leader is not None and choice.leader.is_importing:
                break  # they will share its prompt
            if not self._memory.admit(
                choice,
                is_alone=not self._prefilling and not self._decoding,
                max_new=None if self._limits.chunked_prefill else num_left,
            ):
                break
            del self._waiting[0]
            self._count_cached(choice)
            if choice.remote is not None and self._shared.begin_import(choice):
                continue
            self._prefilling.append(choice)
            num_left -= self._plan(choice, num_left)

    def _has_slot(self) -> bool:
        return self._num_running < self._limits.max_num_seqs

    @property
    def _num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + self._shared.num_importing

    def _count_cached(self, choice: Choice) -> None:
        if choice.num_cached is None:
            choice.num_cached = choice.num_computed
            self._num_cached_tokens += choice.num_cached
            self._num_prompt_tokens += choice.prompt_len

    def _plan(self, choice: Choice, num_left: int) -> int:
        """What the step computes of it. Its blocks can be found from now on: who is planned later shares them."""
        num_tokens = min(num_left, choice.num_tokens - choice.num_computed)
        if num_tokens > 0:
            self._planned.append((choice, num_tokens))
            self._memory.commit(choice, choice.num_computed + num_tokens)
        return num_tokens

    def _prefill(
        self, choice: Choice, num_tokens: int, batch: list[api.EngineOutput], ended: list[Choice]
    ) -> None:
        choice.num_computed += num_tokens
        if choice.num_computed < choice.num_tokens:
            return
        self._prefilling.remove(choice)
        self._decoding.append(choice)
        choice.num_output += 1
        self._set_event(choice)
        self._look_closely(choice, batch, ended)

    def _set_event(self, choice: Choice) -> None:
        """Look again at the last token, or at the first whose computation will need another block."""
        num_fitting = self._memory.num_slots(choice) - choice.prompt_len
        choice.event = min(choice.answer.length, num_fitting + 1)

    def _look_closely(
        self, choice: Choice, batch: list[api.EngineOutput], ended: list[Choice]
    ) -> None:
        """The output of a choice that begins, ends or has filled its blocks."""
        answer = choice.answer
        output = choice.outputs[(answer.start + choice.num_output - 1) % len(choice.outputs)]
        if choice.num_output == 1 and choice.leader is None:
            output = msgspec.structs.replace(
                output,
                cached_tokens=choice.num_cached,
                prompt_logprobs=self._cycle.prompt_logprobs(choice.request),
            )
        if choice.num_output == answer.length:
            output = msgspec.structs.replace(
                output,
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                kv_transfer_params=self._hold(choice),
            )
            ended.append(choice)
        elif choice.num_output == choice.event:
            self._full.append(choice)
        self._memory.commit(choice, choice.num_tokens - 1)  # the last is not computed yet
        batch.append(api.EngineOutput(choice.request.id, output))

    def _hold(self, choice: Choice) -> kv_transfer.KvTransferParams | None:
        """Keep its blocks, if it was computed for another engine."""
        if not kv_transfer.is_prefill_only(choice.request.kv_transfer_params):
            return None
        self._holding[choice.request.id] = choice.request
        return self._shared.lease_blocks(choice.block_ids)

    def _end(self, choice: Choice) -> None:
        self._leave(choice)
        choices = self._open[choice.request.id]
        choices.remove(choice)
        if not choices:
            del self._open[choice.request.id]

    def _leave(self, choice: Choice) -> None:
        """Take it out of whatever it is in. Blocks that others write to are free when they have ended."""
        if choice.is_importing:
            choice.is_aborted = True
            return
        for queue in (self._decoding, self._prefilling, self._waiting, self._full):
            if choice in queue:
                queue.remove(choice)
        self._memory.release(choice)
