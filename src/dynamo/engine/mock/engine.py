"""The mock engine: an engine without a model, with the interface, KV blocks, timing and events of a real one.

It runs on the caller's event loop, as one task for each data-parallel rank. Ranks share nothing but the loop: each has
its own scheduler, cache, events and load, as if it were a GPU of its own. All its time comes from the clock that it is
given, so it runs in virtual time too.

The mock embedder's vectors have no meaning, but are always the same ones for the same tokens. A vector is drawn by a
generator that is seeded with a hash of the token ids, so two different texts are nearly at right angles and equal texts
agree, across processes too.
"""

import asyncio
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api, refusal
from dynamo.engine.mock import memory
from dynamo.engine.mock.answers import TokenCycle
from dynamo.engine.mock.batch import BatchLimits, MockBatch, StepPlan
from dynamo.engine.mock.memory import MockChoice, MockMemory
from dynamo.engine.mock.settings import MockConfig
from dynamo.engine.mock.timing import Profile, Timing
from dynamo.kvbm import agents, exchange, sharing, tier_jobs
from dynamo.protocols import encoders, generate, kv_transfer, load, model_card
from dynamo.transfer import descriptors
from dynamo.transfer import memory as transfer_memory
from dynamo.transfer.backends import local

_SLEEP_TAGS = frozenset(("weights", "kv_cache"))
_BYTES_OF_NAME = 8  # each token of the layout has so many; a block uses those of its first token
MAX_BATCHED_TOKENS = 8192


class KvLink:
    """A simulated network with a bandwidth and a failure rate."""

    def __init__(
        self, clock: clocks.Clock, *, bytes_per_second: float, bytes_per_block: int, fail_every: int
    ) -> None:
        """`bytes_per_second` 0: no delay; `fail_every` n: every n-th copy fails, 0: none."""
        self._clock = clock
        self._s_per_block = bytes_per_block / bytes_per_second if bytes_per_second else 0.0
        self._fail_every = fail_every
        self._num_copies = 0

    async def wait(self, kv_import: sharing.KvImport, limit_s: float) -> None:
        """Wait as long as copying these blocks takes. Raises TransferError, after `limit_s` if it takes longer."""
        duration_s = len(kv_import.local_blocks) * self._s_per_block
        if duration_s:
            await self._clock.sleep(min(duration_s, limit_s))
        self._num_copies += 1
        if self._fail_every and self._num_copies % self._fail_every == 0:
            raise errors.TransferError("this copy fails, because --kv-transfer-fail-every says so")
        if duration_s > limit_s:
            raise errors.TransferError(f"the copy takes longer than {limit_s:g} s")


class MockRank:
    """One data-parallel rank: its scheduler and cache, and the task that schedules, waits and commits steps."""

    def __init__(
        self,
        number: int,
        batch: MockBatch,
        timing: Timing,
        clock: clocks.Clock,
        kv_exchange: exchange.KvExchange,
        num_kv_tokens: int,
    ) -> None:
        self.number = number
        self._num_kv_tokens = num_kv_tokens  # for which the KV cache has room
        self.batch = batch
        self._timing = timing
        self._clock = clock
        self._exchange = kv_exchange
        self._has_changed = asyncio.Event()
        self._due = 0.0  # when the last step ended
        self.copies: memory.SimulatedCopies | None = None  # set before `run`
        self._last_passes: tuple[load.ForwardPass, ...] = ()

    def submit(
        self, request: generate.Request, first_token: kv_transfer.FirstToken | None = None
    ) -> None:
        """Queue a request for the next step."""
        self.batch.submit(request, first_token)
        self._has_changed.set()

    def load(self) -> load.ForwardPassMetrics:
        """Return the current load, with the last steps."""
        return msgspec.structs.replace(self.batch.load(self.number), last_passes=self._last_passes)

    def publish_first_tokens(self, sink: api.EngineSink) -> None:
        """Give the sink the first tokens that came with their prompts, without waiting for the step that runs."""
        self._publish(self.batch.take_outputs(), sink)

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """Let the choice of an import go on."""
        self.batch.end_import(import_id, is_copied=is_copied)
        self._has_changed.set()

    def end_tier_copy(self, copy: tier_jobs.TierCopy, seconds: float) -> None:
        """Let the choice of a load from a slower tier go on."""
        self.batch.end_tier_copy(copy, seconds)
        self._has_changed.set()

    def release_lease(self, lease_id: int) -> None:
        """Free the blocks under a lease."""
        self.batch.release_lease(lease_id)
        self._has_changed.set()

    async def run(self, sink: api.EngineSink) -> None:
        """Make steps while there is work, until the task is cancelled."""
        self._due = self._clock.now()
        while True:
            plan = self.batch.schedule()
            if imports := self.batch.take_imports():
                self._exchange.begin_imports(imports)
            if self.copies is not None:
                self.copies.begin(self._has_changed.set)
            self._publish(self.batch.take_outputs(), sink)
            if plan.is_empty:
                self.publish_events(sink)
                self._has_changed.clear()
                await self._has_changed.wait()
                self._due = self._clock.now()
            else:
                await self._step(plan, sink)

    def publish_events(self, sink: api.EngineSink) -> None:
        """Give the sink the KV events since the last call."""
        if events := self.batch.take_events():
            sink.kv_events(events, self.number)

    async def _step(self, plan: StepPlan, sink: api.EngineSink) -> None:
        duration_s = self._timing.step_s(
            num_prompt_tokens=plan.num_prompt_tokens,
            num_decoding=plan.num_decoding,
            active_share=plan.active_share,
        )
        if self.copies is not None:
            self.copies.record_step(plan.num_prompt_tokens + plan.num_decoding, duration_s)
        now = self._clock.now()  # a delay of less than a step is caught up
        self._due = max(self._due, now - duration_s) + duration_s
        await self._clock.sleep(max(0.0, self._due - now))
        latest = load.ForwardPass(
            num_prompt_tokens=plan.num_prompt_tokens,
            num_kv_tokens=round(plan.active_share * self._num_kv_tokens)
            if plan.num_decoding
            else 0,
            wall_s=self._clock.now() - now,
        )
        self._last_passes = load.keep_latest(self._last_passes, latest)
        self._publish([*self.batch.commit(), *self.batch.take_outputs()], sink)
        self.publish_events(sink)

    def _publish(self, outputs: list[api.EngineOutput], sink: api.EngineSink) -> None:
        """Give the sink outputs; those that lease blocks are completed before."""
        if leased := self.batch.take_newly_leased():
            for i, (request_id, output) in enumerate(outputs):
                prompt = leased.get((request_id, output.index))
                if prompt is not None and output.finish_reason is not None:
                    published = self._exchange.publish_lease(prompt.request, output, prompt.lease)
                    outputs[i] = api.EngineOutput(request_id, published)
        if outputs:
            sink.outputs(outputs)


class MockEngine(exchange.ExchangesKv):
    """An `api.Engine` that answers with the tokens of `cycle`, which should decode to words."""

    def __init__(
        self,
        settings: MockConfig,
        *,
        cycle: TokenCycle,
        context_length: int,
        profile: Profile | None = None,
        clock: clocks.Clock | None = None,
        room: local.Room | None = None,
    ) -> None:
        settings.check()
        self._startup_s = settings.startup_time
        self._facts = _facts(settings, context_length)
        self._clock = clock or clocks.SystemClock()
        self._exchange = exchange.KvExchange(
            functools.partial(agents.make_agent, "mocker", settings, room),
            self._clock,
            timeout_s=settings.kv_transfer_timeout_s,
            patience_s=settings.kv_transfer_patience_s,
            lease_s=settings.kv_hold_s,
            before_copy=KvLink(
                self._clock,
                bytes_per_second=settings.kv_transfer_bandwidth * 1e9,
                bytes_per_block=settings.kv_bytes_per_token * settings.block_size,
                fail_every=settings.kv_transfer_fail_every,
            ).wait,
        )
        timing = Timing(
            speedup_ratio=settings.speedup_ratio,
            decode_speedup_ratio=settings.decode_speedup_ratio,
            tick_ms=settings.tick_ms,
            profile=profile,
            num_cache_tokens=settings.num_gpu_blocks_override * settings.block_size,
        )
        share_ids = itertools.count(1)  # of leases and imports
        self._memories = [
            MockMemory(
                num_blocks=settings.num_gpu_blocks_override,
                block_size=settings.block_size,
                prefix_caching=settings.enable_prefix_caching,
                watermark=settings.watermark,
            )
            for _ in range(settings.data_parallel_size)
        ]
        self._ranks = [
            MockRank(
                number,
                _batch(settings, self._facts, cycle, memory, number, share_ids),
                timing,
                self._clock,
                self._exchange,
                memory.pool.num_blocks * memory.block_size,
            )
            for number, memory in enumerate(self._memories)
        ]
        if settings.kvbm_host_blocks:
            self._add_tiers(settings)
        self._tasks = tasks.Tasks()
        self._death: errors.EngineFailed | None = None
        self._asleep: frozenset[str] = frozenset()  # the parts that are released by `sleep`

    def _add_tiers(self, settings: MockConfig) -> None:
        config = memory.SimulatedTiersConfig(
            num_host_blocks=settings.kvbm_host_blocks,
            num_disk_blocks=settings.kvbm_disk_blocks,
            host_bytes_per_s=settings.kvbm_host_bandwidth * 1e9,
            disk_bytes_per_s=settings.kvbm_disk_bandwidth * 1e9,
            block_size=settings.block_size,
            block_bytes=settings.kv_bytes_per_token * settings.block_size,
        )
        for rank_memory, rank in zip(self._memories, self._ranks, strict=True):
            rank_memory.tiers = memory.make_cache(rank_memory.pool, config)
            rank.copies = memory.SimulatedCopies(
                rank_memory.tiers, config, self._clock, rank.end_tier_copy
            )

    @property
    def capabilities(self) -> api.EngineCapabilities:
        """Return the engine itself for each capability."""
        return api.EngineCapabilities(
            kv_transfer=self,
            kv_exports=self,
            sleep=self,
            lora_adapters=self,
            exports_prefixes=True,
            role_changer=self,
        )

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Start the tasks of all ranks, after the simulated time of loading."""
        self._sink = sink
        if self._startup_s:
            await self._clock.sleep(self._startup_s)
        await self._exchange.start(self._region(), self)
        for rank in self._ranks:
            self._tasks.start(f"mock engine, rank {rank.number}", self._run_rank(rank))
        return self._facts

    def submit(self, request: generate.Request) -> None:
        """Queue a request at the rank that it names, or at the rank with the fewest requests."""
        if self._death is not None:
            raise self._death
        if self._asleep:
            raise errors.Conflict(f"the engine sleeps: it misses {', '.join(sorted(self._asleep))}")
        is_id_open = any(request.id in rank.batch for rank in self._ranks)
        refusal.check(request, self._facts, vocab_size=None, is_id_open=is_id_open)
        first_token = None
        if request.kv_transfer_params is not None:
            first_token = self._exchange.accept_request(request)
        if request.data_parallel_rank is not None:
            rank = self._ranks[request.data_parallel_rank]
        else:
            rank = min(self._ranks, key=lambda rank: len(rank.batch))
        rank.submit(request, first_token)
        if first_token is not None:
            if request.id not in rank.batch:  # one token was asked for
                self._exchange.skip_import(request.id)
            asyncio.get_running_loop().call_soon(rank.publish_first_tokens, self._sink)

    def abort(self, request_id: str) -> None:
        """Abort a request: free its blocks now, or when a copy to them has ended."""
        self._exchange.abort_import(request_id)
        for rank in self._ranks:
            rank.batch.abort(request_id)

    def abort_choice(self, request_id: str, index: int) -> None:
        """Abort one choice of a request, and free its blocks."""
        for rank in self._ranks:
            rank.batch.abort_choice(request_id, index)
        if not any(request_id in rank.batch for rank in self._ranks):
            self._exchange.abort_import(request_id)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """Return the current load of each rank."""
        return [rank.load() for rank in self._ranks]

    async def clear_kv_blocks(self) -> None:
        """Drop all cached prefixes of all ranks."""
        for rank in self._ranks:
            rank.batch.clear()
            rank.publish_events(self._sink)

    async def sleep(self, level: int) -> None:
        """Refuse requests until `wake_up`; there is no memory to release."""
        del level
        self._asleep = _SLEEP_TAGS

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Wake the parts that the tags name, or all; return True if none sleeps any more."""
        self._asleep -= frozenset(tags) or _SLEEP_TAGS
        return not self._asleep

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        return self._facts.lora_names

    async def load_lora(self, name: str, directory: Path) -> None:
        """Add an adapter, without reading its files. Raises Conflict while the engine sleeps."""
        del directory
        if self._asleep:
            raise errors.Conflict("the engine sleeps")
        self._facts = dataclasses.replace(self._facts, lora_names=(*self.lora_names, name))

    async def unload_lora(self, name: str) -> None:
        """Remove an adapter; an unknown one is no error."""
        names = tuple(loaded for loaded in self.lora_names if loaded != name)
        self._facts = dataclasses.replace(self._facts, lora_names=names)

    async def stop(self) -> None:
        """Stop all imports, leases and ranks."""
        await self._exchange.close()
        await self._tasks.close()

    def end_import(self, import_id: int, *, is_copied: bool) -> None:
        """Let the choice of an import go on, at the rank that has it."""
        for rank in self._ranks:
            rank.end_import(import_id, is_copied=is_copied)

    def release_lease(self, lease_id: int) -> None:
        """Free the blocks under a lease, at the rank that has it."""
        for rank in self._ranks:
            rank.release_lease(lease_id)

    def _region(self) -> descriptors.Region:
        """Allocate memory for the hashes of all ranks' blocks; they are written only if other engines may copy them."""
        size, num_blocks = self._facts.kv_block_size, self._facts.total_kv_blocks
        shape = layout(num_blocks * len(self._ranks), size)
        allocate = self._exchange.allocate
        memory = (allocate or transfer_memory.private)(shape.num_bytes)
        names = memory.cast("Q")
        for number, rank_memory in enumerate(self._memories):
            rank_names = names[number * num_blocks * size :]
            rank_memory.store_names(rank_names, is_exported=allocate is not None)
        return descriptors.Region(memory=memory, layout=shape)

    async def _run_rank(self, rank: MockRank) -> None:
        try:
            await rank.run(self._sink)
        except Exception as error:  # noqa: BLE001 - supervises the engine's task: reports to the sink
            if self._death is not None:
                return  # another rank has failed before
            self._death = errors.EngineFailed(
                f"the mock engine died: {type(error).__name__}: {error}"
            )
            self._death.__cause__ = error
            self._sink.died(self._death)


def _facts(settings: MockConfig, context_length: int) -> api.EngineFacts:
    longest = settings.num_gpu_blocks_override * settings.block_size
    if not settings.enable_chunked_prefill:
        longest = min(longest, settings.max_num_batched_tokens)
    return api.EngineFacts(
        context_length=min(settings.max_model_len or context_length, longest),
        kv_block_size=settings.block_size,
        total_kv_blocks=settings.num_gpu_blocks_override,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        data_parallel_size=settings.data_parallel_size,
        lora_names=settings.lora_names,
    )


def _batch(
    settings: MockConfig,
    facts: api.EngineFacts,
    cycle: TokenCycle,
    memory: MockMemory,
    rank: int,
    share_ids: Iterator[int],
) -> MockBatch:
    limits = BatchLimits(
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        context_length=facts.context_length,
        chunked_prefill=settings.enable_chunked_prefill,
        preempts_newest=settings.preemption_mode == "lifo",
        echoes=settings.echo,
    )
    shared: sharing.SharedBlocks[MockChoice] = sharing.SharedBlocks(
        memory.pool, memory.block_size, first_block=rank * facts.total_kv_blocks, ids=share_ids
    )
    return MockBatch(cycle, memory, limits, shared)


def layout(num_blocks: int, block_size: int) -> descriptors.Layout:
    """Return the layout of memory in which each block can store its sequence hash."""
    return descriptors.Layout(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=_BYTES_OF_NAME // 2,
        dtype="float8_e4m3fn",
    )


class MockEmbedder:
    """An `api.Embedder` without a model: its vectors follow from the tokens alone."""

    def __init__(self, *, context_length: int, dimensions: int) -> None:
        self._facts = api.EmbedderFacts(
            context_length=context_length,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            vectors=model_card.EmbeddingFacts(dimensions=dimensions, can_shorten=True),
        )

    async def start(self) -> api.EmbedderFacts:
        """Return the facts of the embedder; there is nothing to load."""
        return self._facts

    async def embed(self, batch: Sequence[api.EmbedInput]) -> list[bytes]:
        """Return a vector for each input, after one turn of the event loop, so that other tasks run in between."""
        await asyncio.sleep(0)
        full = self._facts.vectors.dimensions
        return [_vector(text.token_ids, text.dimensions or full) for text in batch]

    async def stop(self) -> None:
        """Do nothing: there is nothing to stop."""


def _vector(token_ids: bytes, dimensions: int) -> bytes:
    seed = xxhash.xxh3_64_intdigest(token_ids)
    draw = random.Random(seed).gauss
    values = [draw(0, 1) for _ in range(dimensions)]
    length = math.hypot(*values)
    return encoders.pack(value / length for value in values)
