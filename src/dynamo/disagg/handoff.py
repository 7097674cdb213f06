"""An engine that has its long prompts computed by others, if there are any: it stands before another engine.

    submit ── policy ──┬── here ─────────────────────────────────────────▶ engine.submit
                       └── elsewhere ── prefill queue ── where the blocks are ──▶ engine.submit (copies them, answers)

Whatever fails on the way (nobody there, too late, a worker that dies), the engine gets the request without a place
to copy from, and computes the prompt itself. So a request costs at most time, and is never lost.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo.base import errors, tasks
from dynamo.disagg import (
    estimated,
    known_prefix,
    metrics,
    policy,
    prefill_queue,
    prefill_request,
    prefill_workers,
    watching_sink,
)
from dynamo.disagg import limits as limits_watch
from dynamo.engine import api
from dynamo.kvbm import sharing
from dynamo.protocols import blocks, generate, kv_transfer, load
from dynamo.router import api as routing
from dynamo.router import worker_load as routed_load
from dynamo.runtime import discovery

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Away:
    """A request whose prompt is being computed elsewhere; these choices of it are not wanted any more."""

    request: generate.Request
    dropped: set[int] = field(default_factory=set)
    handing: "asyncio.Task[None] | None" = None


class Handoff:
    """An `api.Engine` around one that can move KV blocks (`api.KvTransferPeer`)."""

    def __init__(
        self,
        engine: api.Engine,
        queue: prefill_queue.PrefillQueue,
        workers: prefill_workers.PrefillWorkers,
        counts: metrics.DisaggMetrics,
        *,
        registry: discovery.Discovery,
        model: str,
        decider: policy.Policy,
        prefill_timeout_s: float,
    ) -> None:
        """Limits of lengths hold as long as discovery says nothing else of this model."""
        self.capabilities = engine.capabilities
        assert engine.capabilities.kv_transfer is not None
        self._engine, self._lent = engine, engine.capabilities.kv_transfer
        self._queue = queue
        self._workers = workers
        self._counts = counts
        self._registry, self._model = registry, model
        self._policy = decider
        self._prefills, self._copies = routed_load.PrefillSpeed(), routed_load.PrefillSpeed()
        self._prefill_timeout_s = prefill_timeout_s
        self._known = known_prefix.KnownPrefix()
        self._block_size = 1
        self._away: dict[str, _Away] = {}
        self._watching: watching_sink.WatchingSink | None = None
        self._tasks = tasks.Tasks()

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """The engine, then the search for prefill workers."""
        self._lent.on_import(self._pulled)
        self._watching = watching_sink.WatchingSink(sink, self._known)
        facts = await self._engine.start(self._watching)
        self._block_size = facts.kv_block_size
        self._workers.start()
        if isinstance(self._policy, policy.Lengths):
            following = limits_watch.follow(self._registry, self._model, self._policy)
            self._tasks.start("watch limits of local prefill", following)
        return facts

    def submit(self, request: generate.Request) -> None:
        """Here, or by way of a prefill worker; then a refusal comes through the sink."""
        _logger.debug("New Request ID: %s", request.id)
        if kv_transfer.is_prefilled(request.kv_transfer_params):  # its frontend saw to it
            self._submit_prefilled(request)
            if self._watching is not None:
                self._watching.expect(request, None)
        elif self._goes_away(request):
            _logger.debug(
                "Prefilling remotely for request %s with length %d", request.id, request.prompt_len
            )
            away = self._away[request.id] = _Away(request)
            away.handing = self._tasks.start("hand a prompt over", self._hand_over(away))
        else:
            _logger.debug(
                "Prefilling locally for request %s with length %d", request.id, request.prompt_len
            )
            self._engine.submit(request)
            self._counts.local.inc()

    def abort(self, request_id: str) -> None:
        """Wherever it is."""
        away = self._away.pop(request_id, None)
        if self._watching is not None:
            self._watching.forget(request_id)
        if away is None:
            self._engine.abort(request_id)
        elif away.handing is not None:
            away.handing.cancel()  # what was held for it by then is free when its time is over

    def abort_choice(self, request_id: str, index: int) -> None:
        """Wherever it is."""
        away = self._away.get(request_id)
        if away is None:
            self._engine.abort_choice(request_id, index)
            return
        away.dropped.add(index)
        if len(away.dropped) == away.request.sampling_options.n:
            self.abort(request_id)

    def load(self) -> Sequence[load.ForwardPassMetrics]:
        """The engine's."""
        return self._engine.load()

    async def clear_kv_blocks(self) -> None:
        """The engine's."""
        await self._engine.clear_kv_blocks()

    async def stop(self) -> None:
        """Idempotent."""
        self._away.clear()
        await self._tasks.close()
        await self._workers.close()
        await self._engine.stop()

    def _pulled(self, report: sharing.ImportReport) -> None:
        """From the engine: how a copy went."""
        if report.error is None:
            self._counts.remote.inc()
            self._counts.transfer_s.observe(report.duration_s)
            self._copies.observe(report.num_blocks * self._block_size, report.duration_s)
            if self._watching is not None:
                worker_id = self._workers.instance_of(report.engine_id)
                self._watching.pulled(report, worker_id)
        else:
            self._counts.fallback.inc()
            self._workers.distrust(report.engine_id)

    def _goes_away(self, request: generate.Request) -> bool:
        size, num_tokens = self._queue.size, request.prompt_len
        if size is None or not self._policy.may_go(num_tokens, size) or _must_stay(request):
            return False
        if request.lora_name is not None and not self._workers.all_have(request.lora_name):
            return False
        return self._policy.goes(
            num_tokens, size, lambda: self._here(request), lambda: self._there(num_tokens)
        )

    def _here(self, request: generate.Request) -> routing.LoadEstimate:
        stats = [one.worker_stats for one in self._engine.load()]
        seed = blocks.seed_of(request.lora_name)
        num_known = self._known.num_tokens(request.token_ids, self._block_size, seed)
        return routing.LoadEstimate(
            num_new=max(0, request.prompt_len - num_known),
            num_ahead=sum(one.active_prefill_tokens for one in stats),
            num_requests=sum(one.request_active_slots for one in stats),
            tokens_per_s=self._prefills.tokens_per_s,
            copies_per_s=self._copies.measured,
        )

    def _there(self, num_tokens: int) -> routing.LoadEstimate:
        """As far as we know: by what we ourselves have given away."""
        num_away = sum(away.request.prompt_len for away in self._away.values())
        return routing.LoadEstimate(
            num_new=num_tokens,
            num_ahead=num_away / max(1, len(self._workers.connected)),
            tokens_per_s=self._prefills.tokens_per_s,
        )

    async def _hand_over(self, away: _Away) -> None:
        params = await self._prefill(away.request)
        del self._away[away.request.id]
        request = msgspec.structs.replace(away.request, kv_transfer_params=params)
        try:
            self._submit_prefilled(request)
        except errors.DynamoError as error:
            assert self._watching is not None
            self._watching.failed(request.id, error)
            return
        for index in away.dropped:
            self._engine.abort_choice(request.id, index)

    def _submit_prefilled(self, request: generate.Request) -> None:
        try:
            self._engine.submit(request)
        except errors.RemoteProtocolError as error:  # parameters that mean nothing to our engine
            self._fall_back(request.id, error)
            self._engine.submit(msgspec.structs.replace(request, kv_transfer_params=None))

    def _fall_back(self, request_id: str, error: errors.DynamoError) -> None:
        _logger.warning("%s: its prompt is computed here: %s", request_id, error)
        self._counts.fallback.inc()

    async def _prefill(self, request: generate.Request) -> kv_transfer.KvTransferParams | None:
        """Where its blocks are; None if nobody has computed them."""
        now = asyncio.get_running_loop().time
        asked_at = now()
        is_alone = len(self._away) == 1
        try:
            params = await self._queue.prefill(
                prefill_request.make(request), timeout_s=self._prefill_timeout_s
            )
        except errors.DynamoError as error:
            self._fall_back(request.id, error)
            return None
        took_s = now() - asked_at
        self._counts.prefill_s.observe(took_s)
        if is_alone:  # nothing of ours was before it
            self._prefills.observe(request.prompt_len, max(0.0, took_s - estimated.HANDOFF_S))
        if self._watching is not None:
            self._watching.expect(request, took_s)
        return kv_transfer.pass_on(params, took_s)


def _must_stay(request: generate.Request) -> bool:
    """Its prompt is to be scored, or somebody has decided already."""
    return (
        request.kv_transfer_params is not None or request.output_options.prompt_logprobs is not None
    )
