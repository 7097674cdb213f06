"""The scheduler of the mock engine without its time: what each step computes, and the outputs that it brings.

    schedule() → plan (how much work) → time passes → commit() → outputs

First come, first served. If a choice needs a block and none is free, the choice that was admitted last (or first,
according to `BatchLimits`) is preempted: it waits, with its output so far as part of its prompt.

Benchmarks of all other parts use this engine, so a token must cost next to nothing: a choice is examined only at its
`next_check` (when it ends, or needs a block); in between it sends prepared outputs.
"""  # decider

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from dynamo.engine import api
from dynamo.engine.mock.answers import EchoedPrompt, TokenCycle
from dynamo.engine.mock.memory import MockChoice, MockMemory
from dynamo.kvbm import block_tables, sharing, tier_jobs
from dynamo.protocols import generate, kv_events, kv_transfer, load


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits of a step and of a sequence, and which choice is preempted."""

    max_num_seqs: int
    max_num_batched_tokens: int
    context_length: int  # without chunked prefill, at most `max_num_batched_tokens`
    chunked_prefill: bool = True
    preempts_newest: bool = True
    echoes: bool = False  # answers are the prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one simulated step, from which `timing` has its duration: tokens of prompts, choices that decode."""

    num_prompt_tokens: int
    num_decoding: int
    active_share: float  # of all blocks

    @property
    def is_empty(self) -> bool:
        """Return True if nothing can be computed until a request, an import or a lease changes."""
        return not self.num_prompt_tokens and not self.num_decoding


class LeasedPrompt(NamedTuple):
    """A request whose prompt's blocks are kept for another engine, with their lease."""

    request: generate.Request
    lease: sharing.BlockLease


class MockBatch:
    """The requests of one rank; they may come and go between `schedule` and `commit`. One event loop owns it."""

    def __init__(
        self,
        cycle: TokenCycle,
        memory: MockMemory,
        limits: BatchLimits,
        shared: sharing.SharedBlocks[MockChoice] | None = None,
    ) -> None:
        self._cycle = cycle
        self._memory = memory
        self._limits = limits
        self._shared = shared or sharing.SharedBlocks(memory.pool, memory.block_size)
        self._newly_leased: dict[tuple[str, int], LeasedPrompt] = {}
        # answers to requests for cached blocks only, and first tokens that came with their prompts
        self._outputs: list[api.EngineOutput] = []
        # in order of admission; a choice leaves from any position at once, as clients go
        self._waiting: OrderedDict[MockChoice, None] = OrderedDict()
        self._prefilling: list[MockChoice] = []  # in order of admission, like all below
        self._decoding: list[MockChoice] = []
        self._full: list[MockChoice] = []  # decoding, but the next token needs another block
        self._planned: list[tuple[MockChoice, int]] = []
        self._open: dict[str, list[MockChoice]] = {}
        # a copy writes to their blocks, which must not be freed
        self._copying: set[MockChoice] = set()

    @property
    def has_work(self) -> bool:
        """Return True if any request runs or waits."""
        return bool(self._open)

    @property
    def num_repeated_blocks(self) -> int:
        """Return the blocks that running choices share, each counted for all of its users but the first."""
        running = (*self._decoding, *self._prefilling, *self._copying)
        return sum(len(choice.block_ids) for choice in running) - self._memory.pool.num_active

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def submit(
        self, request: generate.Request, first_token: kv_transfer.FirstToken | None = None
    ) -> None:
        """Queue a request that `engine.refusal` accepts, with an id that is not in use.

        With `first_token`, which the engine that computed the prompt has drawn, its output comes by `take_outputs`.
        """
        leader: MockChoice | None = None
        remote = kv_transfer.remote_blocks(request.kv_transfer_params)
        choices = self._open[request.id] = []
        cycle = EchoedPrompt(request) if self._limits.echoes else self._cycle
        for index in range(request.sampling_options.n):
            choice = MockChoice(
                request=request,
                index=index,
                cycle=cycle,
                answer=cycle.answer(request, index, self._limits.context_length),
                outputs=cycle.outputs(index, request.output_options.logprobs),
                leader=leader,
                prompt_len=request.prompt_len,
                seed=request.hash_seed,
                remote=None if leader else remote,
            )
            leader = leader or choice
            choices.append(choice)
        if kv_transfer.is_cached_only(request.kv_transfer_params):
            if self._memory.admit_cached(choices[0]):
                self._copying.add(choices[0])
            else:
                self._end_export(choices[0])
            return
        self._waiting.update(dict.fromkeys(choices))
        if leader is not None and leader.remote is None:
            self._memory.prepare(leader)
        elif leader is not None and first_token is not None:
            self._begin_with(leader, first_token)

    def _begin_with(self, choice: MockChoice, token: kv_transfer.FirstToken) -> None:
        """Give out the first token of an answer before its prompt is copied, as the native engine does."""
        choice.num_output = 1
        outputs, answer = choice.outputs, choice.answer
        output = msgspec.structs.replace(
            outputs[answer.start % len(outputs)],
            token_ids=(token.token_id,),
            cached_tokens=token.cached_tokens,
        )
        if answer.length == 1:
            output = msgspec.structs.replace(
                output, finish_reason=answer.finish_reason, stop_reason=answer.stop_reason
            )
            self._end(choice)
        self._outputs.append(api.EngineOutput(choice.request.id, output))

    def abort(self, request_id: str) -> None:
        """End a request at once. An unknown id is no error."""
        self._drop_outputs(request_id)
        for choice in self._open.pop(request_id, ()):
            self._withdraw(choice)

    def abort_choice(self, request_id: str, index: int) -> None:
        """End one choice at once. An unknown one is no error."""
        self._drop_outputs(request_id, index)
        choices = self._open.get(request_id, [])
        for choice in [choice for choice in choices if choice.index == index]:
            self._end(choice)
            if not choice.num_output:
                block_tables.pass_lead(choice, choices)

    def _drop_outputs(self, request_id: str, index: int | None = None) -> None:
        """Drop the outputs of one choice or of all that were not taken yet, with the leases that they bring."""

        def is_kept(name: str, number: int) -> bool:
            return name != request_id or index not in (None, number)

        self._outputs = [o for o in self._outputs if is_kept(o.request_id, o.output.index)]
        for key in [key for key in self._newly_leased if not is_kept(*key)]:
            self.release_lease(self._newly_leased.pop(key).lease.lease_id)

    def take_imports(self) -> list[sharing.KvImport]:
        """Return the imports that began since the last call."""
        return self._shared.take_imports()

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """Let the choice of an import go on. An unknown id is no error."""
        choice = self._shared.end_import(import_id, is_copied=is_copied)
        if choice is None or not self._end_copying(choice):
            return
        if is_copied:
            if not self._memory.is_import_intact(choice):  # of other blocks: answer wrongly
                choice.answer = replace(choice.answer, start=choice.answer.start + 1)
            if self._memory.count_import(choice):
                self._memory.commit(choice, choice.num_computed)
        if choice.num_output and choice.num_computed == choice.num_tokens - 1:
            self._memory.commit(choice, choice.num_computed)
            self._decoding.append(choice)
            self._set_next_check(choice)
        else:
            self._prefilling.append(choice)

    def end_tier_copy(self, copy: tier_jobs.TierCopy, seconds: float) -> None:
        """Record that a simulated copy between tiers has ended; the choice of a load goes on."""
        tiers, choice = self._memory.tiers, copy.waiting
        assert tiers is not None
        tiers.end_copy(copy, seconds=seconds)
        if not isinstance(choice, MockChoice) or copy.path[1] != kv_events.DEVICE:
            return
        if not self._end_copying(choice):
            return
        num_loaded = len(copy.blocks) * self._memory.block_size
        choice.num_computed += num_loaded
        self._memory.commit(choice, choice.num_computed)
        is_counted = not choice.num_output and not choice.num_loaded
        by_tier = tiers.count_tokens_by_tier(copy, num_loaded) if is_counted else {}
        if kv_transfer.is_cached_only(choice.request.kv_transfer_params):
            self._end_export(choice)
            return
        if is_counted:
            self._memory.count_loaded(choice, num_loaded, by_tier)
        self._prefilling.append(choice)

    def _end_copying(self, choice: MockChoice) -> bool:
        """Return whether a choice goes on now that its copy has ended; free its blocks if it was aborted meanwhile."""
        self._copying.remove(choice)
        is_open = choice in self._open.get(choice.request.id, ())
        if not is_open:
            self._memory.release(choice)
        return is_open

    def take_outputs(self) -> list[api.EngineOutput]:
        """Return the outputs for which no step was made, since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _end_export(self, choice: MockChoice) -> None:
        """Answer a request for cached blocks only, with a lease on them if there are any."""
        leased = choice.block_ids[: choice.num_computed // self._memory.block_size]
        output = generate.Output(
            token_ids=(),
            finish_reason=generate.FinishReason.LENGTH,
            cached_tokens=choice.num_computed,
        )
        if leased:
            self._lease(choice, leased, is_prefix=True)
        self._outputs.append(api.EngineOutput(choice.request.id, output))
        self._end(choice)

    def _lease(self, choice: MockChoice, block_ids: list[int], *, is_prefix: bool = False) -> None:
        lease = self._shared.lease_blocks(block_ids, is_prefix=is_prefix)
        self._newly_leased[choice.request.id, choice.index] = LeasedPrompt(choice.request, lease)

    def take_newly_leased(self) -> dict[tuple[str, int], LeasedPrompt]:
        """Return the prompts whose blocks were put under a lease since the last call, by request id and choice."""
        leased, self._newly_leased = self._newly_leased, {}
        return leased

    def release_lease(self, lease_id: int) -> None:
        """Free the blocks under a lease. An unknown id is no error."""
        self._shared.release_lease(lease_id)

    def clear(self) -> None:
        """Drop all cached prefixes."""
        self._memory.clear()

    def take_events(self) -> list[kv_events.KvEvent]:
        """Return the KV events since the last call."""
        return self._memory.pool.take_events()

    def load(self, dp_rank: int = 0) -> load.ForwardPassMetrics:
        """Return the load of the rank; its slots are choices."""
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
                gpu_prefix_cache_hit_rate=self._memory.hit_rate,
            ),
        )

    def schedule(self) -> StepPlan:
        """Plan the next step; it is empty only if all choices wait for an import or for leased blocks."""
        self._planned = []
        has_preempted = self._add_blocks()
        num_left = self._limits.max_num_batched_tokens - len(self._decoding)
        for choice in self._prefilling:
            num_left -= self._plan_prefill(choice, num_left)
        if not has_preempted:
            self._admit(num_left)
        return StepPlan(
            num_prompt_tokens=sum(num_tokens for _, num_tokens in self._planned),
            num_decoding=len(self._decoding),
            active_share=self._memory.pool.num_active / self._memory.pool.num_blocks,
        )

    def commit(self) -> list[api.EngineOutput]:
        """Return the outputs of the planned step: a token for each choice that decodes or completes its prompt."""
        batch: list[api.EngineOutput] = []
        ended: list[MockChoice] = []
        for choice in self._decoding:
            num_output = choice.num_output = choice.num_output + 1
            if num_output == choice.next_check:
                self._check(choice, batch, ended)
            else:
                outputs = choice.outputs
                output = outputs[(choice.answer.start + num_output - 1) % len(outputs)]
                batch.append(api.EngineOutput(choice.request.id, output))
        for choice, num_tokens in self._planned:
            if not choice.block_ids:  # it was aborted since
                continue
            choice.num_computed += num_tokens
            if choice.num_computed < choice.num_tokens:
                continue
            self._prefilling.remove(choice)
            self._decoding.append(choice)
            choice.num_output += 1
            self._set_next_check(choice)
            self._check(choice, batch, ended)
        for choice in ended:
            self._end(choice)
        return batch

    def _add_blocks(self) -> bool:
        """Allocate a block for each choice that filled its last; return True if a choice was preempted for it."""
        has_preempted = False
        full, self._full = self._full, []
        for choice in full:
            while choice.block_ids and not self._memory.add_block(choice):
                if self._limits.preempts_newest:
                    victim = (self._prefilling or self._decoding)[-1]
                else:
                    victim = (self._decoding or self._prefilling)[0]
                self._withdraw(victim)
                self._waiting[victim] = None
                self._waiting.move_to_end(victim, last=False)
                has_preempted = True
            if choice.block_ids:  # it was not preempted itself
                self._set_next_check(choice)
        return has_preempted

    def _admit(self, num_left: int) -> None:
        admitted: list[MockChoice] = []
        for choice in self._waiting:
            if num_left <= 0 or self._num_running >= self._limits.max_num_seqs:
                break
            if choice.leader in self._copying:
                break  # it will share the imported blocks
            if self._memory.is_preparing(choice.leader or choice):
                continue
            if not self._memory.admit(
                choice,
                keep_free=self._memory.num_reserved if self._prefilling or self._decoding else 0,
                max_new=None if self._limits.chunked_prefill else num_left,
            ):
                break
            admitted.append(choice)
            is_engine_busy = bool(self._prefilling or self._decoding)
            if self._shared.begin_import(choice) or self._memory.load(
                choice, is_engine_busy=is_engine_busy
            ):
                self._copying.add(choice)
                continue
            self._prefilling.append(choice)
            num_left -= self._plan_prefill(choice, num_left)
        for choice in admitted:
            del self._waiting[choice]

    @property
    def _num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._copying)

    def _plan_prefill(self, choice: MockChoice, num_left: int) -> int:
        """Plan the next part of a prompt; return its tokens. Choices that are planned later share its blocks."""
        num_tokens = min(num_left, choice.num_tokens - choice.num_computed)
        if num_tokens > 0:
            self._planned.append((choice, num_tokens))
            self._memory.commit(choice, choice.num_computed + num_tokens)
        return num_tokens

    def _set_next_check(self, choice: MockChoice) -> None:
        """Check it again at its last token, or at the first that needs another block."""
        num_fitting = self._memory.num_slots(choice) - choice.prompt_len
        choice.next_check = min(choice.answer.length, num_fitting + 1)

    def _check(
        self, choice: MockChoice, batch: list[api.EngineOutput], ended: list[MockChoice]
    ) -> None:
        """Append the output of a choice that begins, ends or has filled its blocks."""
        answer = choice.answer
        output = choice.outputs[(answer.start + choice.num_output - 1) % len(choice.outputs)]
        if choice.num_output == 1 and choice.leader is None:
            output = msgspec.structs.replace(
                output,
                cached_tokens=choice.num_cached,
                tier_tokens=choice.tier_tokens,
                prompt_logprobs=self._cycle.prompt_logprobs(choice.request),
            )
        if choice.num_output == answer.length:
            if kv_transfer.is_prefill_only(choice.request.kv_transfer_params):
                self._lease(choice, choice.block_ids)
            output = msgspec.structs.replace(
                output, finish_reason=answer.finish_reason, stop_reason=answer.stop_reason
            )
            ended.append(choice)
        elif choice.num_output == choice.next_check:
            self._full.append(choice)
        self._memory.commit(choice, choice.num_tokens - 1)  # the last is not computed yet
        batch.append(api.EngineOutput(choice.request.id, output))

    def _end(self, choice: MockChoice) -> None:
        self._withdraw(choice)
        choices = self._open[choice.request.id]
        choices.remove(choice)
        if not choices:
            del self._open[choice.request.id]

    def _withdraw(self, choice: MockChoice) -> None:
        """Remove a choice from all queues and free its blocks; during an import, when the copy has ended."""
        if choice in self._copying:
            return  # `_end_copying` frees its blocks
        if choice in self._waiting:
            del self._waiting[choice]
        else:
            for queue in (self._decoding, self._prefilling, self._full):
                if choice in queue:
                    queue.remove(choice)
        self._memory.release(choice)
