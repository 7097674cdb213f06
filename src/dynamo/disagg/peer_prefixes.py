"""The engine of a worker that copies prefixes from other workers, where that takes less time than computing them.

    submit ── `prefix_source` ──┬── not worth it ──────────────────────────▶ engine.submit
                                └── a lease there on what that worker has ──▶ engine.submit (copies it)

A router, or a decode worker that asks for a prefill, names the worker that has more of the prompt. That worker computes
nothing for it: it leases what its cache has (`kv_transfer.EXPORT_CACHED`), however long its queue is.

The decision is `tier_policy.LoadCost`'s, as for a slow tier, by what copying and computing took before. Lease and copy
together may take at most half of the time of computing. Whatever fails or is late, the engine computes the prompt, and
that worker is not asked again for `REST_S`.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.disagg import metrics, prefill_queue, remote_prefill
from dynamo.engine import api
from dynamo.kvbm import sharing, tier_policy
from dynamo.observability import logs
from dynamo.protocols import generate, kv_events, kv_transfer
from dynamo.runtime import client
from dynamo.transfer import descriptors

MAX_FETCHES = 32  # leases that are asked for at once
MIN_BLOCKS = 2  # fewer are computed
REST_S = 10.0
_MIN_COPY_S = 0.02
_PATH: tier_policy.Path = (kv_events.PEER, kv_events.DEVICE)
_logger = logging.getLogger(__name__)


class PeerPrefixSink:
    """An `api.EngineSink` in front of another: it learns what is cached, and how fast prompts are computed."""

    def __init__(
        self,
        sink: api.EngineSink,
        cached: remote_prefill.CachedPrefixes,
        cost: tier_policy.LoadCost,
        clock: clocks.Clock,
    ) -> None:
        self.failed, self.died = sink.failed, sink.died
        self._sink, self._cached, self._cost, self._clock = sink, cached, cost, clock
        self._timed: tuple[str, int, float] | None = None  # request id, tokens, when it began

    @property
    def is_timing(self) -> bool:
        """Return whether a prompt is being measured."""
        return self._timed is not None

    def time_prompt(self, request_id: str, num_tokens: int) -> None:
        """Measure how long the engine, which is idle now, takes to compute so many tokens of this prompt."""
        self._timed = request_id, num_tokens, self._clock.now()

    def stop_timing(self) -> None:
        """Measure nothing, because another request shares the steps of the prompt."""
        self._timed = None

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        """Pass on the outputs of a step."""
        if self._timed is not None:
            request_id, num_tokens, began_at = self._timed
            if any(output.request_id == request_id for output in batch):
                self._cost.record_step(num_tokens, self._clock.now() - began_at)
                self._timed = None
        self._sink.outputs(batch)

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """Apply and pass on the events of a step."""
        self._cached.apply_events(events, dp_rank)
        self._sink.kv_events(events, dp_rank)


class PeerPrefixEngine(remote_prefill.FrontEngine):
    """An `api.Engine` in front of one that exports prefixes; it holds requests during the lease of a prefix."""

    def __init__(
        self,
        engine: api.Engine,
        open_client: Callable[[str], client.EndpointClient],
        counters: metrics.PeerPrefixMetrics,
        clock: clocks.Clock,
    ) -> None:
        """`open_client` returns a client of the endpoint with a path."""
        super().__init__(engine)
        self._open_client, self._counters, self._clock = open_client, counters, clock
        self._clients: dict[str, client.EndpointClient] = {}  # by path
        self._cached = remote_prefill.CachedPrefixes()
        self._cost = tier_policy.LoadCost()
        self._facts: api.EngineFacts | None = None
        self._token_bytes = 1.0
        self._sources: dict[str, kv_transfer.PrefixSource] = {}  # by id of a connected engine
        self._resting: dict[int, float] = {}  # instance id → until when it is not asked
        self._sink: PeerPrefixSink | None = None

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """Start the engine behind a sink of its own; return its facts."""
        self._transfer.on_import(self._handle_import)
        self._sink = PeerPrefixSink(sink, self._cached, self._cost, self._clock)
        self._facts = await self._engine.start(self._sink)
        assert self._transfer.transfer_metadata is not None
        layout = descriptors.decode(self._transfer.transfer_metadata).layout
        self._token_bytes = layout.block_bytes / layout.block_size
        return self._facts

    async def stop(self) -> None:
        """Disconnect from all peers, then stop the engine, which may go on in another role. Idempotent."""
        self._held.clear()
        await self._tasks.close()
        while self._sources:
            engine_id, _ = self._sources.popitem()
            await self._transfer.disconnect_peer(engine_id)
        await super().stop()

    def submit(self, request: generate.Request) -> None:
        """Submit to the engine, or ask another worker for a prefix first; then a refusal comes through the sink."""
        source = request.prefix_source
        num_cached = self._count_cached(request)
        if source is not None and self._is_worth_asking(request, source, num_cached):
            assert self._sink is not None
            fetch = remote_prefill.HeldRequest(request)
            work = self._fetch_and_submit(fetch, source, source.num_tokens - num_cached)
            self._hold(fetch, self._sink, "copy a prefix from a peer", work)
            return
        is_alone = not any(
            rank.worker_stats.request_active_slots or rank.worker_stats.num_requests_waiting
            for rank in self._engine.load()
        )
        self._engine.submit(request)
        if self._sink is None or kv_transfer.is_cached_only(request.kv_transfer_params):
            return  # the latter computes nothing
        if is_alone and not self._sink.is_timing and request.kv_transfer_params is None:
            self._sink.time_prompt(request.id, request.prompt_len - num_cached)
        else:
            self._sink.stop_timing()

    def _count_cached(self, request: generate.Request) -> int:
        assert self._facts is not None, "the engine is used before start() has returned"
        return self._cached.count_tokens(
            request.token_ids, self._facts.kv_block_size, request.hash_seed
        )

    def _is_worth_asking(
        self, request: generate.Request, source: kv_transfer.PrefixSource, num_cached: int
    ) -> bool:
        """Return whether copying the prefix is estimated to take clearly less time than computing it."""
        assert self._facts is not None
        num_new = min(source.num_tokens, request.prompt_len - 1) - num_cached
        params = request.kv_transfer_params
        if (
            num_new < MIN_BLOCKS * self._facts.kv_block_size
            or len(self._held) >= MAX_FETCHES
            or request.id in self._held
            or request.output_options.prompt_logprobs is not None
            or kv_transfer.is_prefilled(params)
            or kv_transfer.is_cached_only(params)
            or self._resting.get(source.instance_id, 0.0) > self._clock.now()
        ):
            return False
        copy_s = self._cost.copy_s(_PATH, int(num_new * self._token_bytes))
        if not self._cost.pays(copy_s, num_new):
            self._counters.declined.inc()
            self._cost.record_declined(_PATH)
            return False
        return True

    async def _fetch_and_submit(
        self, fetch: remote_prefill.HeldRequest, source: kv_transfer.PrefixSource, num_new: int
    ) -> None:
        request, limit_s = fetch.request, self._cost.max_wait_s(num_new)
        began_at = self._clock.now()
        params = request.kv_transfer_params
        try:
            async with self._clock.timeout(limit_s):
                remote = await self._lease(request, source, limit_s)
            elapsed_s = self._clock.now() - began_at
            remote = msgspec.structs.replace(
                remote,
                copy_limit_s=max(_MIN_COPY_S, limit_s - elapsed_s),
                remote_hold_s=remote.remote_hold_s - elapsed_s,  # it may have begun long ago
            )
            params = msgspec.structs.replace(
                params or kv_transfer.KvTransferParams(), do_remote_prefill=True, remote=remote
            )
        except (errors.DynamoError, TimeoutError) as error:
            self._rest(source.instance_id, error)
        # As in `remote_prefill`: a cancellation may be lost in the moment of its end.
        if self._held.get(request.id) is not fetch:
            self._transfer.release_remote(params)
            return
        del self._held[request.id]
        assert self._sink is not None
        self._sink.stop_timing()
        try:
            self._engine.submit(
                msgspec.structs.replace(request, kv_transfer_params=params, prefix_source=None)
            )
        except errors.DynamoError as error:
            self._transfer.release_remote(params)
            self._sink.failed(request.id, error)
            return
        for index in fetch.aborted:
            self._engine.abort_choice(request.id, index)

    async def _lease(
        self, request: generate.Request, source: kv_transfer.PrefixSource, limit_s: float
    ) -> kv_transfer.RemoteBlocks:
        """Return the blocks of the prompt that the source has, under a lease. Raises DynamoError."""
        workers = self._clients.get(source.endpoint)
        if workers is None:
            workers = self._clients[source.endpoint] = self._open_client(source.endpoint)
            workers.on_change(functools.partial(self._disconnect_departed, workers))
        await workers.wait_for_instances(limit_s)
        engine_id = await self._transfer.connect_peer(source.metadata, deadline_s=limit_s)
        if source.instance_id not in workers.instances:  # nothing else would unmap its memory
            await self._transfer.disconnect_peer(engine_id)
            raise errors.WorkerLost("it has left")
        self._sources[engine_id] = source
        question = generate.Request(
            id=f"{request.id}-prefix",
            model=request.model,
            token_ids=request.token_ids,
            lora_name=request.lora_name,
            cache_salt=request.cache_salt,
            data_parallel_rank=source.dp_rank,
            stop_conditions=generate.StopConditions(max_tokens=1),
            kv_transfer_params=kv_transfer.EXPORT_CACHED,
        )
        params = await prefill_queue.request_prefill(
            workers, source.instance_id, question, timeout_s=limit_s, headers=logs.current_headers()
        )
        if params.remote is None or params.remote.remote_engine_id != engine_id:
            raise errors.TransferError("its engine is not the one that was named")
        return params.remote

    def _disconnect_departed(self, workers: client.EndpointClient) -> None:
        """Disconnect from the workers that have left: their memory on this host would stay mapped."""
        for engine_id, source in list(self._sources.items()):
            is_theirs = self._clients[source.endpoint] is workers
            if is_theirs and source.instance_id not in workers.instances:
                del self._sources[engine_id]
                self._resting.pop(source.instance_id, None)
                disconnecting = self._transfer.disconnect_peer(engine_id)
                self._tasks.start("disconnect from a peer", disconnecting)

    def _handle_import(self, report: sharing.ImportReport) -> None:
        assert self._facts is not None
        if not report.is_prefix:
            return
        if report.error is not None:
            source = self._sources.get(report.engine_id)
            self._rest(0 if source is None else source.instance_id, report.error)
            return
        num_tokens = report.num_blocks * self._facts.kv_block_size
        self._counters.imported.inc()
        self._counters.tokens.inc(num_tokens)
        if report.num_blocks:
            self._cost.record_copy(_PATH, int(num_tokens * self._token_bytes), report.duration_s)

    def _rest(self, instance_id: int, error: Exception) -> None:
        """Ask a worker for nothing for a while, because a lease or a copy from it failed."""
        self._counters.failed.inc()
        now = self._clock.now()
        resting = {each: until for each, until in self._resting.items() if until > now}
        self._resting = resting | {instance_id: now + REST_S}
        _logger.warning(
            "no prefix came from worker %x, which is not asked for %g s: %s",
            instance_id, REST_S, str(error) or "it took too long",
        )  # fmt: skip
