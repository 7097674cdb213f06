"""The scheduler: it decides what each step computes, by continuous batching, chunked prefill and preemption.

    schedule() → chunks → (the runner computes them) → commit(chunks, sampled) → outputs

A sequence waits, runs, and ends. All order is by rank: the request's priority (the higher is served first), then
arrival, then choice. A step is filled within `max_num_batched_tokens`, and at most `max_num_seqs` run:

1. Decode: every running sequence of which only the last token is not computed gets one token, so that no answer waits
   for the prompt of another request.
2. Prefill: the rest of the budget goes to prompts that have been begun, then to waiting sequences. The first that does
   not fit ends admission: smaller ones do not overtake it, so it cannot starve. A share of the blocks stays free at
   admission, or the running sequences would soon preempt the admitted one.

When a running sequence needs a block and there is none, the running sequence of lowest rank is preempted: its blocks
are freed, and it waits with its answer so far as a longer prompt. Its blocks stay in the prefix cache, so it may lose
little. The sequence of highest rank always goes on, so every one ends.

The choices of a request (n > 1) are sequences that share its prompt: all wait for the first, then reuse its blocks.

A prompt that another engine has computed is admitted like any other, and waits until its blocks are imported.
If that engine has drawn the first token too, the sequence has it from the beginning. Blocks that a tier below the
engine's memory has are loaded in the same way; what only the disk has is copied to host memory while the prompt queues.
If that engine had only a prefix, the rest of the prompt is computed here.

A request for cached blocks only (`kv_transfer.EXPORT_CACHED`) never runs: it leases what the prefix cache has, at once
or when a load from host memory has ended, however long the queue is.
"""  # decider

import bisect
import operator
from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo.base import errors
from dynamo.engine.native.sequence import Chunk, Grammar, Paging, Sampled, Sequence
from dynamo.kvbm import block_tables, sharing, tier_jobs, tier_report, tiered_cache
from dynamo.protocols import blocks, generate, kv_events, kv_transfer, load

WATERMARK = 0.01  # share of the blocks that admission leaves free
_rank = operator.attrgetter("rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of a step and of a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    context_length: int


class RequestOutput(NamedTuple):
    """The output of one choice. It refers to the request itself, as an id may be used again after an abort."""

    request: generate.Request
    output: generate.Output
    lease: sharing.BlockLease | None = None  # of the prompt's blocks, for another engine


class RequestFailure(NamedTuple):
    """A request that could not go on, with the error."""

    request: generate.Request
    error: errors.DynamoError


@dataclass(slots=True, kw_only=True)
class StepResult:
    """The results of a step, in the order of the sink's methods."""

    outputs: list[RequestOutput] = field(default_factory=list)
    failed: list[RequestFailure] = field(default_factory=list)
    block_events: list[kv_events.KvEvent] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    holds_blocks: bool = False  # some of these outputs lease blocks to another engine


@dataclass(slots=True, eq=False)
class _SequenceGroup:
    """The sequences of a request that have not ended, one for each choice."""

    open: list[Sequence]
    has_reported_cached: bool = False


class Scheduler:
    """Owned by the engine's thread. `SchedulerLimits.context_length` must fit into the blocks."""

    def __init__(self, paging: Paging, limits: SchedulerLimits) -> None:
        self._paging = paging
        self._limits = limits
        self._num_reserved = max(1, round(paging.pool.num_blocks * WATERMARK))
        self._waiting: list[Sequence] = []  # by rank
        self._num_waiting_tokens = 0
        self._running: list[Sequence] = []  # by rank
        self._groups: dict[str, _SequenceGroup] = {}
        self._shared: sharing.SharedBlocks[Sequence] = sharing.SharedBlocks(
            paging.pool, paging.block_size
        )
        # a copy writes to their blocks, which must not be freed
        self._copying: set[Sequence] = set()
        self._exports: list[RequestOutput] = []  # of requests for cached blocks only
        self._num_arrived = 0
        self._last_passes: tuple[load.ForwardPass, ...] = ()

    @property
    def has_work(self) -> bool:
        """Return whether `schedule` may find anything to compute."""
        return bool(self._running or self._waiting)

    def submit(self, request: generate.Request, grammar: Grammar | None = None) -> None:
        """Add a request that has passed `engine.refusal`, with an id that is not in use; answers follow `grammar`."""
        prompt = blocks.unpack(request.token_ids)
        if kv_transfer.is_cached_only(request.kv_transfer_params):
            self._export_cached(
                Sequence(request=request, index=0, token_ids=prompt, prompt_len=len(prompt))
            )
            return
        remote = kv_transfer.remote_blocks(request.kv_transfer_params)
        first_token = sharing.usable_first_token(request, remote)
        output_ids = [] if first_token is None else [first_token.token_id]
        self._num_arrived += 1
        leader: Sequence | None = None
        group = self._groups[request.id] = _SequenceGroup(
            [], has_reported_cached=first_token is not None
        )
        for index in range(request.sampling_options.n):
            sequence = Sequence(
                request=request,
                index=index,
                token_ids=prompt + output_ids,
                prompt_len=len(prompt),
                grammar=grammar,
                leader=leader,
                rank=(-request.priority, self._num_arrived, index),
                remote=None if leader else remote,
            )
            leader = leader or sequence
            group.open.append(sequence)
            self._enqueue(sequence)
        if leader is not None and leader.remote is None:
            self._paging.prepare(leader)

    def abort(self, request_id: str) -> list[Sequence]:
        """Abort a request; return its sequences. An unknown id is no error."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return []
        for sequence in group.open:
            self._remove(sequence)
        return group.open

    def abort_choice(self, request_id: str, index: int) -> list[Sequence]:
        """Abort one choice of a request; return its sequence. An unknown one is no error."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        aborted = [sequence for sequence in group.open if sequence.index == index]
        for sequence in aborted:
            self._end(sequence, group)
            if not sequence.num_output:
                block_tables.pass_lead(sequence, group.open)
        return aborted

    def clear(self) -> StepResult:
        """Clear the prefix cache; return its KV events."""
        self._paging.clear()
        return StepResult(block_events=self._paging.pool.take_events())

    def take_imports(self) -> list[sharing.KvImport]:
        """Return the imports that began since the last call; each ends with `end_import`."""
        return self._shared.take_imports()

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """Let the sequence of an import go on; nothing writes to its blocks any more."""
        sequence = self._shared.end_import(import_id, is_copied=is_copied)
        if sequence is None:
            return
        if is_copied:
            self._paging.count_import(sequence)
            self._paging.commit(sequence, sequence.num_computed)
        self._resume(sequence)

    def take_exports(self) -> StepResult:
        """Return the answers to requests for cached blocks only, since the last call."""
        exports, self._exports = self._exports, []
        return StepResult(outputs=exports, holds_blocks=any(answer.lease for answer in exports))

    def _export_cached(self, sequence: Sequence) -> None:
        """Begin to answer a request for cached blocks only."""
        self._groups[sequence.request.id] = _SequenceGroup([sequence])
        if self._paging.admit_cached(sequence):
            self._copying.add(sequence)
        else:
            self._end_export(sequence)

    def _end_export(self, sequence: Sequence) -> None:
        """Answer a request for cached blocks only, with a lease on them if there are any."""
        num_blocks = sequence.num_computed // self._paging.block_size
        leased = sequence.block_ids[:num_blocks]
        lease = self._shared.lease_blocks(leased, is_prefix=True) if leased else None
        output = generate.Output(
            token_ids=(),
            finish_reason=generate.FinishReason.LENGTH,
            cached_tokens=sequence.num_computed,
        )
        self._exports.append(RequestOutput(sequence.request, output, lease))
        del self._groups[sequence.request.id]
        self._paging.release(sequence)

    def _resume(self, sequence: Sequence) -> None:
        """Let a sequence take part in steps again, because its blocks were copied."""
        self._copying.discard(sequence)
        group = self._groups.get(sequence.request.id)
        is_open = group is not None and sequence in group.open
        if is_open and kv_transfer.is_cached_only(sequence.request.kv_transfer_params):
            self._end_export(sequence)
        elif is_open:
            bisect.insort(self._running, sequence, key=_rank)
        else:  # it was aborted
            self._paging.release(sequence)

    @property
    def tiers(self) -> tiered_cache.TieredCache | None:
        """The cache tiers below the engine's memory."""
        return self._paging.tiers

    def end_tier_copy(
        self,
        copy: tier_jobs.TierCopy,
        failed: frozenset[int] = frozenset(),
        seconds: float | None = None,
    ) -> None:
        """Record how a copy between tiers has ended; a sequence that was loaded goes on."""
        tiers, sequence = self._paging.tiers, copy.waiting
        assert tiers is not None
        tiers.end_copy(copy, failed, seconds)
        if not isinstance(sequence, Sequence) or copy.path[1] is not kv_events.DEVICE:
            return
        num_before = sequence.num_computed
        self._paging.end_load(sequence, copy, failed)
        num_loaded = sequence.num_computed - num_before
        if num_loaded and not sequence.num_output and not sequence.num_loaded:
            by_tier = tiers.count_tokens_by_tier(copy, num_loaded)
            if not kv_transfer.is_cached_only(sequence.request.kv_transfer_params):
                self._paging.count_loaded(sequence, num_loaded, by_tier)
        self._resume(sequence)

    def report_tiers(self) -> tier_report.TierReport | None:
        """Return the report on the cache tiers; None if there are none."""
        tiers = self._paging.tiers
        return None if tiers is None else tier_report.make_report(self._paging.pool, tiers)

    def take_events(self) -> StepResult:
        """Return the KV events since the last step."""
        return StepResult(block_events=self._paging.pool.take_events())

    def release_lease(self, lease_id: int) -> None:
        """Free blocks that were computed for another engine."""
        self._shared.release_lease(lease_id)

    def schedule(self) -> tuple[Chunk, ...]:
        """Return the chunks of the next step; empty only while all sequences wait for imports or leased blocks."""
        num_waiting = len(self._waiting)
        chunks: list[Chunk] = []
        for sequence in [s for s in self._running if _num_uncomputed(s) == 1]:
            if sequence.block_ids and self._grow(sequence):
                _add_chunk(chunks, sequence, 1)
        num_left = self._limits.max_num_batched_tokens - len(chunks)
        begun = [s for s in self._running if _num_uncomputed(s) > 1]
        for sequence in begun:
            num_left -= _add_chunk(chunks, sequence, num_left)
        if len(self._waiting) == num_waiting:  # no sequence was preempted
            self._admit(chunks, num_left)
        return tuple(chunks)

    def commit(
        self,
        chunks: abc.Sequence[Chunk],
        sampled: abc.Sequence[Sampled | errors.DynamoError | None],
    ) -> StepResult:
        """Record that the chunks were computed and these tokens drawn; an error fails its request."""
        result = StepResult()
        for chunk, drawn in zip(chunks, sampled, strict=True):
            sequence = chunk.sequence
            if sequence.request.id not in self._groups:  # another choice has failed the request
                continue
            sequence.num_computed += chunk.num_tokens
            self._paging.commit(sequence, sequence.num_computed)
            if isinstance(drawn, errors.DynamoError):
                result.failed.append(RequestFailure(sequence.request, drawn))
                result.ended += self.abort(sequence.request.id)
            elif drawn is not None:
                self._append(sequence, drawn, result)
        result.block_events = self._paging.pool.take_events()
        return result

    def record_pass(self, chunks: abc.Sequence[Chunk], wall_s: float) -> None:
        """Record how long the computation of a step's chunks took, for `load`."""
        continued = [chunk for chunk in chunks if chunk.start >= chunk.sequence.prompt_len]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        latest = load.ForwardPass(
            num_prompt_tokens=num_tokens - sum(chunk.num_tokens for chunk in continued),
            num_kv_tokens=sum(chunk.start + chunk.num_tokens for chunk in continued),
            wall_s=wall_s,
        )
        self._last_passes = load.keep_latest(self._last_passes, latest)

    def load(self) -> load.ForwardPassMetrics:
        """Return the current load. Slots are sequences: a request has one for each choice."""
        # A decoding sequence has one uncomputed token, which is none of a prompt.
        begun = (n for s in self._running if (n := _num_uncomputed(s)) > 1)
        num_prefill_tokens = sum(begun) + self._num_waiting_tokens
        return load.ForwardPassMetrics(
            worker_stats=load.WorkerStats(
                request_active_slots=len(self._running),
                request_total_slots=self._limits.max_num_seqs,
                num_requests_waiting=len(self._waiting) + len(self._copying),
                active_prefill_tokens=num_prefill_tokens,
            ),
            kv_stats=load.KvStats(
                kv_active_blocks=self._paging.pool.num_active,
                kv_total_blocks=self._paging.pool.num_blocks,
                gpu_prefix_cache_hit_rate=self._paging.hit_rate,
            ),
            last_passes=self._last_passes,
        )

    def _grow(self, sequence: Sequence) -> bool:
        """Allocate a block for the next token, if need be by preempting sequences of lower rank.

        Returns False if the sequence has to pause.
        """
        while not self._paging.grow(sequence):
            last = self._running[-1]
            if last is sequence:
                return False
            self._paging.release(last)
            self._running.pop()
            self._enqueue(last)
        return True

    def _admit(self, chunks: list[Chunk], num_left: int) -> None:
        i = 0
        while i < len(self._waiting) and num_left:
            if len(self._running) + len(self._copying) >= self._limits.max_num_seqs:
                break
            sequence = self._waiting[i]
            if self._must_wait_for_leader(sequence) or self._paging.is_preparing(sequence):
                i += 1
                continue
            if not self._paging.admit(
                sequence, keep_free=self._num_reserved if self._running else 0
            ):
                break
            self._dequeue(i)
            if self._shared.begin_import(sequence) or self._paging.load(
                sequence, is_engine_busy=bool(chunks), max_new=num_left
            ):
                self._copying.add(sequence)
                continue
            bisect.insort(self._running, sequence, key=_rank)
            num_left -= _add_chunk(chunks, sequence, num_left)

    def _must_wait_for_leader(self, sequence: Sequence) -> bool:
        """Return whether a choice waits until the first one has computed the prompt, or reports its logprobs."""
        shares_prompt = (
            self._paging.prefix_caching
            or sequence.request.output_options.prompt_logprobs is not None
        )
        leader = sequence.leader
        return shares_prompt and leader is not None and leader.num_output == 0

    def _append(self, sequence: Sequence, drawn: Sampled, result: StepResult) -> None:
        sequence.token_ids.append(drawn.token_id)
        finish_reason, stop_reason = check_finish(
            sequence.request,
            drawn.token_id,
            num_output=sequence.num_output,
            is_full=len(sequence.token_ids) >= self._limits.context_length,
        )
        group = self._groups[sequence.request.id]
        is_leased = finish_reason is not None and kv_transfer.is_prefill_only(
            sequence.request.kv_transfer_params
        )
        output = generate.Output(
            token_ids=(drawn.token_id,),
            finish_reason=finish_reason,
            index=sequence.index,
            logprobs=(drawn.logprobs,) if drawn.logprobs else None,
            cached_tokens=None if group.has_reported_cached else sequence.num_cached,
            stop_reason=stop_reason,
            prompt_logprobs=drawn.prompt_logprobs,
            tier_tokens=None if group.has_reported_cached else sequence.tier_tokens,
        )
        group.has_reported_cached = True
        result.holds_blocks |= is_leased
        lease = self._shared.lease_blocks(sequence.block_ids) if is_leased else None
        result.outputs.append(RequestOutput(sequence.request, output, lease))
        if finish_reason is not None:
            self._end(sequence, group)
            result.ended.append(sequence)

    def _end(self, sequence: Sequence, group: _SequenceGroup) -> None:
        self._remove(sequence)
        group.open.remove(sequence)
        if not group.open:
            del self._groups[sequence.request.id]

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._copying:
            return  # `_resume` frees its blocks
        if sequence.block_ids:
            self._running.remove(sequence)
        else:
            self._dequeue(bisect.bisect_left(self._waiting, sequence.rank, key=_rank))
        self._paging.release(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=_rank)
        self._num_waiting_tokens += len(sequence.token_ids)

    def _dequeue(self, position: int) -> None:
        self._num_waiting_tokens -= len(self._waiting.pop(position).token_ids)


def _num_uncomputed(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.num_computed


def _add_chunk(chunks: list[Chunk], sequence: Sequence, num_left: int) -> int:
    """Add a chunk of as many tokens of the sequence as the budget allows; return their number."""
    num_uncomputed = _num_uncomputed(sequence)
    num_tokens = min(num_uncomputed, num_left)
    if num_tokens:
        chunks.append(
            Chunk(
                sequence=sequence,
                start=sequence.num_computed,
                num_tokens=num_tokens,
                samples=num_tokens == num_uncomputed,
            )
        )
    return num_tokens


def check_finish(
    request: generate.Request, token_id: int, *, num_output: int, is_full: bool
) -> tuple[generate.FinishReason | None, int | None]:
    """Return the finish reason if this token, the last of `num_output`, ends the choice, and the stop token if any.

    `is_full` says that the context has no room for another token.
    """
    conditions, is_eos = request.stop_conditions, token_id in request.eos_token_ids
    if is_eos and request.sampling_options.guided_decoding is not None:
        return generate.FinishReason.EOS, None  # the grammar allows it only at the end
    if num_output >= conditions.min_tokens:
        if is_eos and not conditions.ignore_eos:
            return generate.FinishReason.EOS, None
        if token_id in conditions.stop_token_ids:
            return generate.FinishReason.STOP, token_id
    if is_full or num_output == conditions.max_tokens:
        return generate.FinishReason.LENGTH, None
    return None, None
