"""The engine of a decode worker, which lets prefill workers compute long prompts: an engine in front of the engine.

    submit ── policy ──┬── local ─────────────────────────────────────────────▶ engine.submit
                       └── remote ── prefill queue ── where the blocks are ──▶ engine.submit (copies them, answers)

Whatever fails on the way (no worker, a time limit, a worker that dies), the engine gets the request without KV transfer
parameters, and computes the prompt itself. So a failure costs a request time at most, and no request is lost.

`RemotePrefillSink` tracks the cached prefixes and adds reports to outputs. Neither costs anything per token: the
worker's own method takes the outputs, except while a request that asked for a report is answered. Outputs carry the
report from the end of the copy on, which may come after the first of them.
"""

import asyncio
import itertools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.disagg import metrics, policy, prefill_queue, prefill_workers
from dynamo.engine import api
from dynamo.kvbm import sharing
from dynamo.observability import tracing
from dynamo.protocols import blocks, generate, kv_events, kv_transfer, load, model_errors
from dynamo.router import api as routing
from dynamo.router import worker_load

_logger = logging.getLogger(__name__)


class CachedPrefixes:
    """The reusable blocks of the local engine, by its KV events, so that no other worker computes them.

    It lags one step behind, which costs at most a wrong estimate: what is really cached is decided when the sequence
    gets its blocks.
    """

    def __init__(self) -> None:
        # By rank and tier: a block stays as long as one of them has it.
        self._hashes: defaultdict[tuple[int, kv_events.Tier], set[int]] = defaultdict(set)

    def apply_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """Apply the events of one step of a rank."""
        for event in events:
            match event:
                case kv_events.Stored(blocks=stored, tier=tier):
                    self._hashes[dp_rank, tier].update(block.block_hash for block in stored)
                case kv_events.Removed(block_hashes=hashes, tier=tier):
                    self._hashes[dp_rank, tier].difference_update(hashes)
                case kv_events.Cleared():
                    for rank, tier in list(self._hashes):
                        if rank == dp_rank:
                            del self._hashes[rank, tier]

    def count_tokens(self, token_ids: bytes, block_size: int, seed: int = blocks.SEED) -> int:
        """Return how many of these packed tokens are cached; `seed` is that of `blocks.seed_of`."""
        names = blocks.sequence_hashes(blocks.local_hashes(token_ids, block_size, seed))
        cached = tuple(self._hashes.values())
        is_cached = (any(name in hashes for hashes in cached) for name in names)
        return sum(itertools.takewhile(bool, is_cached)) * block_size


class RemotePrefillSink:
    """An `api.EngineSink` in front of the worker's own."""

    def __init__(self, sink: api.EngineSink, cached: CachedPrefixes) -> None:
        self.outputs: Callable[[Sequence[api.EngineOutput]], None] = sink.outputs
        self.died = sink.died
        self._sink, self._cached = sink, cached
        self._prefill_s: dict[str, float | None] = {}  # by id of a running request with a report
        self._reports: dict[str, kv_transfer.TransferReport] = {}

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """Apply and pass on the events of one step."""
        self._cached.apply_events(events, dp_rank)
        self._sink.kv_events(events, dp_rank)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """Pass on the failure of a request."""
        self.forget_request(request_id)
        self._sink.failed(request_id, error)

    def expect_import(self, request: generate.Request, prefill_s: float | None) -> None:
        """Prepare a report if the request asks for it; `prefill_s` None: this worker did not request the prefill."""
        if kv_transfer.REPORT_ANNOTATION in request.annotations:
            self._prefill_s[request.id] = prefill_s
            self.outputs = self._outputs_with_reports

    def add_import(self, report: sharing.ImportReport, worker_id: int | None) -> None:
        """Add the report of a finished copy to the request's outputs from now on."""
        if report.request_id in self._prefill_s:
            prefill_s = self._prefill_s[report.request_id]
            self._reports[report.request_id] = kv_transfer.TransferReport(
                transfer_ms=report.duration_s * 1000,
                num_blocks=report.num_blocks,
                prefill_worker_id=worker_id,
                prefill_ms=None if prefill_s is None else prefill_s * 1000,
            )

    def forget_request(self, request_id: str) -> None:
        """Drop the report of a request that has ended."""
        self._prefill_s.pop(request_id, None)
        self._reports.pop(request_id, None)
        if not self._prefill_s:
            self.outputs = self._sink.outputs

    def _outputs_with_reports(self, batch: Sequence[api.EngineOutput]) -> None:
        self._sink.outputs([self._add_report(item) for item in batch])
        for request_id, output in batch:
            if output.finish_reason is not None:
                self.forget_request(request_id)

    def _add_report(self, item: api.EngineOutput) -> api.EngineOutput:
        report = self._reports.get(item.request_id)
        if report is None:
            return item
        params = kv_transfer.KvTransferParams(report=report)
        output = msgspec.structs.replace(item.output, kv_transfer_params=params)
        return item._replace(output=output)


@dataclass(slots=True)
class HeldRequest:
    """A request that waits in front of the engine, with its choices that were aborted meanwhile."""

    request: generate.Request
    aborted: set[int] = field(default_factory=set)
    task: "asyncio.Task[None] | None" = None  # which submits it in the end


class FrontEngine:
    """What engines in front of another, which can move KV blocks (`api.KvTransferPeer`), have in common.

    They hold requests back until blocks can be copied, and pass on what concerns them no more.
    """

    def __init__(self, engine: api.Engine) -> None:
        assert engine.capabilities.kv_transfer is not None
        self.capabilities = engine.capabilities
        self._engine, self._transfer = engine, engine.capabilities.kv_transfer
        self._held: dict[str, HeldRequest] = {}  # by request id
        self._tasks = tasks.Tasks()

    def _hold(
        self,
        held_request: HeldRequest,
        sink: api.EngineSink,
        task_name: str,
        work: Coroutine[Any, Any, None],
    ) -> None:
        """Hold a request until `work` has submitted it. If `work` dies, which is a fault of this program, it fails."""
        self._held[held_request.request.id] = held_request

        def fail(fault: BaseException) -> None:
            if self._held.get(held_request.request.id) is held_request:
                del self._held[held_request.request.id]
            error = errors.EngineFailed(f"the task {task_name!r} died: {type(fault).__name__}")
            sink.failed(held_request.request.id, error)

        held_request.task = self._tasks.start(task_name, work, on_death=fail)

    def abort(self, request_id: str) -> None:
        """Abort a request, at the engine or while it is held; the lease of its blocks then expires."""
        held_request = self._held.pop(request_id, None)
        if held_request is None:
            self._engine.abort(request_id)
        elif held_request.task is not None:
            held_request.task.cancel()

    def abort_choice(self, request_id: str, index: int) -> None:
        """Abort one choice, at the engine or as soon as the request gets there."""
        held_request = self._held.get(request_id)
        if held_request is None:
            self._engine.abort_choice(request_id, index)
            return
        held_request.aborted.add(index)
        if len(held_request.aborted) == held_request.request.sampling_options.n:
            self.abort(request_id)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        return self._engine.load()

    async def clear_kv_blocks(self) -> None:
        await self._engine.clear_kv_blocks()

    async def stop(self) -> None:
        """Abandon the held requests, then stop the engine. Idempotent."""
        self._held.clear()
        await self._tasks.close()
        await self._engine.stop()


class RemotePrefillEngine(FrontEngine):
    """An `api.Engine` in front of one that can move KV blocks; it holds the requests of remote prefills."""

    def __init__(
        self,
        engine: api.Engine,
        queue: prefill_queue.PrefillQueue,
        workers: prefill_workers.PrefillWorkers,
        counters: metrics.DisaggMetrics,
        *,
        follow_limits: Callable[[policy.LengthPolicy], Coroutine[Any, Any, None]],
        prefill_policy: policy.PrefillPolicy,
        prefill_timeout_s: float,
        clock: clocks.Clock,
    ) -> None:
        """`follow_limits` keeps the limits of a `policy.LengthPolicy` as discovery has them, until it is cancelled."""
        super().__init__(engine)
        self._queue = queue
        self._workers = workers
        self._counters = counters
        self._follow_limits = follow_limits
        self._policy = prefill_policy
        self._prefill_pace, self._copy_pace = worker_load.PrefillSpeed(), worker_load.PrefillSpeed()
        self._prefill_timeout_s = prefill_timeout_s
        self._clock = clock
        self._own_prefixes: tuple[str, int] | None = None  # endpoint path and instance id
        self._cached = CachedPrefixes()
        self._block_size = 1
        self._sink: RemotePrefillSink | None = None
        # By request id, as long as a request runs whose spans are exported.
        self._records = weakref.WeakValueDictionary[str, tracing.StageRecord]()

    def offer_prefixes(self, endpoint_path: str, instance_id: int) -> None:
        """Let prefill workers copy the blocks that this worker, at this endpoint, has of a prompt already."""
        self._own_prefixes = endpoint_path, instance_id

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Start the engine, then the search for prefill workers."""
        self._transfer.on_import(self._handle_import)
        self._sink = RemotePrefillSink(sink, self._cached)
        facts = await self._engine.start(self._sink)
        self._block_size = facts.kv_block_size
        self._workers.start()
        if isinstance(self._policy, policy.LengthPolicy):
            following = self._follow_limits(self._policy)
            self._tasks.start("watch limits of local prefill", following)
        return facts

    def submit(self, request: generate.Request) -> None:
        """Submit to the engine, or to a prefill worker first; then a refusal comes through the sink."""
        _logger.debug("New Request ID: %s", request.id)
        if (record := tracing.stage_record.get()) is not None:
            self._records[request.id] = record
        if kv_transfer.is_prefilled(request.kv_transfer_params):  # a frontend requested the prefill
            self._submit_prefilled(request)
            if self._sink is not None:
                self._sink.expect_import(request, None)
        elif self._is_remote(request):
            _logger.debug(
                "Prefilling remotely for request %s with length %d", request.id, request.prompt_len
            )
            assert self._sink is not None
            prompt = HeldRequest(request)
            self._hold(prompt, self._sink, "prefill remotely", self._prefill_and_submit(prompt))
        elif kv_transfer.is_cached_only(request.kv_transfer_params):
            self._engine.submit(request)
        else:
            _logger.info(
                "Prefilling locally for request %s with length %d", request.id, request.prompt_len
            )
            self._engine.submit(request)
            self._counters.local.inc()

    def abort(self, request_id: str) -> None:
        if self._sink is not None:
            self._sink.forget_request(request_id)
        super().abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        # there may be no last output, and those before have had the report
        if self._sink is not None:
            self._sink.forget_request(request_id)
        super().abort_choice(request_id, index)

    async def stop(self) -> None:
        """Stop all remote prefills, then the engine. Idempotent."""
        self._held.clear()
        await self._tasks.close()
        await self._queue.close()
        await self._workers.close()
        await super().stop()

    def _handle_import(self, report: sharing.ImportReport) -> None:
        if report.is_prefix:
            return
        if report.error is not None:
            self._counters.fallback.inc()
            self._workers.reconnect(report.engine_id)
            return
        self._add_stage(report.request_id, "transfer", report.duration_s)
        self._counters.remote.inc()
        self._counters.transfer_s.observe(report.duration_s)
        self._copy_pace.observe(report.num_blocks * self._block_size, report.duration_s)
        if self._sink is not None:
            self._sink.add_import(report, self._workers.instance_of(report.engine_id))

    def _add_stage(self, request_id: str, name: str, duration_s: float) -> None:
        """Add a stage that ends now to the spans of a request, if they are exported."""
        record = self._records.get(request_id)
        if record is not None:
            now = self._clock.now()
            record.stages.append(tracing.Stage(name, now - duration_s, now))

    def _is_remote(self, request: generate.Request) -> bool:
        """Return whether a prefill worker computes the prompt.

        Not if it has images or is to be scored, or has choices that the engine would compute anyway, or another process
        has decided already.
        """
        size, num_tokens = self._queue.size, request.prompt_len
        if size is None or not self._policy.may_be_remote(num_tokens, size):
            return False
        is_scored = request.output_options.prompt_logprobs is not None
        if is_scored or request.images or request.kv_transfer_params is not None:
            return False
        if request.sampling_options.n > 1 and not self._engine.capabilities.imports_choices:
            return False
        if request.lora_name is not None and not self._workers.all_have_adapter(request.lora_name):
            return False
        return self._policy.is_remote(
            num_tokens,
            size,
            lambda: self._estimate_local(request),
            lambda: self._estimate_remote(num_tokens),
        )

    def _estimate_local(self, request: generate.Request) -> routing.LoadEstimate:
        stats = [rank.worker_stats for rank in self._engine.load()]
        num_cached = self._cached.count_tokens(
            request.token_ids, self._block_size, request.hash_seed
        )
        return routing.LoadEstimate(
            num_new=max(0, request.prompt_len - num_cached),
            block_size=self._block_size,
            num_ahead=sum(rank.active_prefill_tokens for rank in stats),
            num_requests=sum(rank.request_active_slots for rank in stats),
            tokens_per_s=self._prefill_pace.tokens_per_s,
            copies_per_s=self._copy_pace.measured,
        )

    def _estimate_remote(self, num_tokens: int) -> routing.LoadEstimate:
        """Estimate by the prompts that this worker itself has sent to prefill workers."""
        num_remote = sum(prompt.request.prompt_len for prompt in self._held.values())
        return routing.LoadEstimate(
            num_new=num_tokens,
            num_ahead=num_remote / max(1, len(self._workers.connected)),
            tokens_per_s=self._prefill_pace.tokens_per_s,
        )

    async def _prefill_and_submit(self, prompt: HeldRequest) -> None:
        request = prompt.request
        params: kv_transfer.KvTransferParams | None = None
        try:
            params = await self._prefill(request)
            # `asyncio.wait_for`, which nats-py uses, loses a cancellation that comes in the moment of its end
            if self._held.get(request.id) is not prompt:
                self._transfer.release_remote(params)
                return
            del self._held[request.id]
            self._submit_prefilled(msgspec.structs.replace(request, kv_transfer_params=params))
        except errors.DynamoError as error:
            self._held.pop(request.id, None)
            self._transfer.release_remote(params)
            assert self._sink is not None
            self._sink.failed(request.id, error)
            return
        for index in prompt.aborted:
            self._engine.abort_choice(request.id, index)

    def _submit_prefilled(self, request: generate.Request) -> None:
        try:
            self._engine.submit(request)
        except errors.RemoteProtocolError as error:  # parameters of another kind of engine
            self._fall_back(request.id, error)
            self._engine.submit(msgspec.structs.replace(request, kv_transfer_params=None))

    def _fall_back(self, request_id: str, error: errors.DynamoError) -> None:
        _logger.warning("%s: its prompt is computed here: %s", request_id, error)
        self._counters.fallback.inc()

    def _name_own_blocks(self, prefill: generate.Request) -> generate.Request:
        """Let the prefill worker copy the blocks that this worker has, instead of computing them."""
        metadata = self._transfer.transfer_metadata
        if self._own_prefixes is None or metadata is None:
            return prefill
        endpoint, instance_id = self._own_prefixes
        num_tokens = self._cached.count_tokens(
            prefill.token_ids, self._block_size, prefill.hash_seed
        )
        source = kv_transfer.PrefixSource(
            endpoint=endpoint, instance_id=instance_id, metadata=metadata, num_tokens=num_tokens
        )
        return msgspec.structs.replace(prefill, prefix_source=source)

    async def _prefill(self, request: generate.Request) -> kv_transfer.KvTransferParams | None:
        """Return where the prompt's blocks are; None if no prefill worker has computed them. Raises SuspectRequest."""
        began_at = self._clock.now()
        is_alone = len(self._held) == 1
        try:
            params = await self._queue.prefill(
                self._name_own_blocks(prefill_queue.make_prefill_request(request)),
                timeout_s=self._prefill_timeout_s,
            )
        except model_errors.SuspectRequest:
            raise
        except errors.DynamoError as error:
            self._fall_back(request.id, error)
            return None
        duration_s = self._clock.now() - began_at
        self._add_stage(request.id, "remote_prefill", duration_s)
        self._counters.prefill_s.observe(duration_s)
        if is_alone:  # no other prompt of ours was ahead of it
            compute_s = max(0.0, duration_s - policy.HANDOFF_S)
            self._prefill_pace.observe(request.prompt_len, compute_s)
        passed_on = kv_transfer.pass_on(params, duration_s, request.prompt_len)
        if passed_on is None:
            fault = errors.RemoteProtocolError("the prefill worker does not hold its blocks")
            self._fall_back(request.id, fault)
        elif self._sink is not None:
            self._sink.expect_import(request, duration_s)
        return passed_on
