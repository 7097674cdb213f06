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
from typing import Any

import msgspec

from dynamo.base import errors, tasks
from dynamo.disagg import (
    known_prefix,
    metrics,
    policy,
    prefill_queue,
    prefill_request,
    prefill_workers,
)
from dynamo.engine import api
from dynamo.protocols import generate, kv_events, kv_transfer, load
from dynamo.runtime import discovery

_logger = logging.getLogger(__name__)
_decode_change = msgspec.json.Decoder(policy.Change).decode


@dataclass(slots=True)
class _Away:
    """A request whose prompt is being computed elsewhere; these choices of it are not wanted any more."""

    request: generate.Request
    dropped: set[int] = field(default_factory=set)
    handing: "asyncio.Task[None] | None" = None


class Handoff:
    """An `api.Engine` around one that is also an `api.RemotePrefill`."""

    def __init__(
        self,
        engine: api.Engine,
        queue: prefill_queue.PrefillQueue,
        workers: prefill_workers.PrefillWorkers,
        counts: metrics.DisaggMetrics,
        *,
        registry: discovery.Discovery,
        model: str,
        limits: policy.Limits,
        prefill_timeout_s: float,
    ) -> None:
        """`limits` hold as long as discovery says nothing else of this model."""
        assert isinstance(engine, api.RemotePrefill)
        self._engine, self._lent = engine, engine
        self._queue = queue
        self._workers = workers
        self._counts = counts
        self._registry, self._limits_key = registry, policy.key_of(model)
        self._default_limits = self._limits = limits
        self._prefill_timeout_s = prefill_timeout_s
        self._known = known_prefix.KnownPrefix()
        self._block_size = 1
        self._away: dict[str, _Away] = {}
        self._sink: api.EngineSink | None = None
        self._tasks = tasks.Tasks()

    async def start(self, sink: api.EngineSink) -> api.EngineFacts:
        """The engine, then the search for prefill workers."""
        self._sink = sink
        self._lent.on_pull(self._pulled)
        facts = await self._engine.start(_Watching(sink, self._known))
        self._block_size = facts.kv_block_size
        self._workers.start()
        self._tasks.start("watch limits of local prefill", self._watch_limits())
        return facts

    def submit(self, request: generate.Request) -> None:
        """Here, or by way of a prefill worker; then a refusal comes through the sink."""
        _logger.debug("New Request ID: %s", request.id)
        if self._goes_away(request):
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

    def _pulled(self, report: api.PullReport) -> None:
        """From the engine: how a copy went."""
        if report.error is None:
            self._counts.remote.inc()
            self._counts.transfer_s.observe(report.duration_s)
        else:
            self._counts.fallback.inc()
            self._workers.distrust(report.engine_id)

    def _goes_away(self, request: generate.Request) -> bool:
        size = self._queue.size
        if not policy.goes_away(request.prompt_len, size, self._limits) or _must_stay(request):
            return False
        num_known = self._known.num_tokens(request.token_ids, self._block_size)
        return policy.goes_away(request.prompt_len - num_known, size, self._limits)

    async def _hand_over(self, away: _Away) -> None:
        params = await self._prefill(away.request)
        del self._away[away.request.id]
        request = msgspec.structs.replace(away.request, kv_transfer_params=params)
        try:
            self._submit_prefilled(request)
        except errors.DynamoError as error:
            assert self._sink is not None
            self._sink.failed(request.id, error)
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

    async def _prefill(self, request: generate.Request) -> dict[str, Any] | None:
        """Where its blocks are; None if nobody has computed them."""
        now = asyncio.get_running_loop().time
        asked_at = now()
        try:
            params = await self._queue.prefill(
                prefill_request.make(request), timeout_s=self._prefill_timeout_s
            )
        except errors.DynamoError as error:
            self._fall_back(request.id, error)
            return None
        took_s = now() - asked_at
        self._counts.prefill_s.observe(took_s)
        return kv_transfer.handed_on(params, took_s)

    async def _watch_limits(self) -> None:
        key = self._limits_key
        async for change in self._registry.watch(key):
            if change.key != key:
                continue  # of a model whose name begins like ours
            try:
                said = _decode_change(change.value) if isinstance(change, discovery.Put) else None
            except msgspec.DecodeError as error:
                _logger.warning("ignored %s in discovery: %s", key, error)
                continue
            self._limits = self._default_limits.changed(said or policy.Change())
            _logger.info("limits of local prefill: %s", self._limits)


class _Watching:
    """The engine's sink, with a look at its KV events; costs nothing per token."""

    def __init__(self, sink: api.EngineSink, known: known_prefix.KnownPrefix) -> None:
        self.outputs = sink.outputs
        self.failed = sink.failed
        self.died = sink.died
        self._sink, self._known = sink, known

    def kv_events(self, events: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        self._known.apply(events)
        self._sink.kv_events(events, dp_rank)


def _must_stay(request: generate.Request) -> bool:
    """Its prompt is to be scored, or somebody has decided already."""
    return (
        request.kv_transfer_params is not None or request.output_options.prompt_logprobs is not None
    )
