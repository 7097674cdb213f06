"""The way of a request by two workers: a prefill worker that knows its prefix, then whoever has room to answer.

    open ── policy ──┬── here ──────────────────────────────────────────────────▶ decode worker
                     └── there ── prefill worker ── where the blocks are ──▶ decode worker (copies them, answers)

It stands before the route to the workers that answer, and is that route, call for call, as long as there is no prefill
worker, or nobody who could copy from one.

A request that has come this way says so to the worker that answers, which then asks no prefill worker by itself: it
brings the place of its blocks, or the word to compute it there (`kv_transfer.COMPUTE_LOCALLY`). Whatever fails on the
way, another prefill worker is asked once; then the prompt is computed by who answers it.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.disagg import metrics, policy, prefill_answer, prefill_queue, prefill_request
from dynamo.protocols import generate, kv_transfer, model_card
from dynamo.router import kv_router, route
from dynamo.runtime import requests

# Within this time the worker that answers must have the request; by so much less it believes that blocks are held.
DELIVERY_S = 5.0
_NOBODY = "no prefill worker serves this model, and it must not be computed elsewhere: start one, or try again shortly"
_logger = logging.getLogger(__name__)


class Open(Protocol):
    """`route.Route.open_stream`."""

    async def __call__(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        options: route.RoutingOptions = route.DEFAULT_OPTIONS,
    ) -> requests.Stream: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What becomes of prompts that no prefill worker computes in time."""

    prefill_timeout_s: float = 30.0
    is_enforced: bool = False  # they are refused


class PrefillFirst:
    """A `route.Route`."""

    def __init__(
        self,
        decode: kv_router.KvRouter,
        wanted: policy.Policy,
        rules: Rules,
        counts: metrics.ModelRoutedMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._decode = decode
        self._policy = wanted
        self._rules = rules
        self._counts = counts
        self._clock = clock
        self._prefill: kv_router.KvRouter | None = None
        self._decoders: frozenset[int] = frozenset()  # who can copy blocks from prefill workers
        self.preview_instance = decode.preview_instance
        self._bind()

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """As `route.Route`."""
        self._decode.set_model_cards(cards)
        kind = model_card.WorkerType.DECODE
        self._decoders = frozenset(one for one, card in cards.items() if card.worker_type is kind)
        self._bind()

    def prefill_by(self, prefill: kv_router.KvRouter | None) -> None:
        """From now on by this way, or not at all."""
        self._prefill = prefill
        self._bind()

    def _bind(self) -> None:
        self.open_stream: Open = self._decode.open_stream
        if self._prefill is not None and self._decoders:
            self.open_stream = self._open
        elif self._rules.is_enforced:
            self.open_stream = _refuse

    async def _open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        options: route.RoutingOptions = route.DEFAULT_OPTIONS,
    ) -> requests.Stream:
        prefill = self._prefill
        assert prefill is not None
        if not self._goes_away(prefill, request, options):
            _logger.debug(
                "Prefilling locally for request %s with length %d", request.id, request.prompt_len
            )
            self._counts.local.inc()
            return await self._decode.open_stream(_stay(request), receiver, options)
        began_at = self._clock.now()
        params = await self._compute(prefill, request, options)
        if params is not None:
            left = _minus(options, self._clock.now() - began_at)
            stream = await self._deliver(request, params, receiver, left)
            if stream is not None:
                return stream
        left = _minus(options, self._clock.now() - began_at)
        return await self._decode.open_stream(_stay(request), receiver, left)

    def _goes_away(
        self, prefill: kv_router.KvRouter, request: generate.Request, options: route.RoutingOptions
    ) -> bool:
        """Raises NoWorkers if it must, and cannot."""
        among = prefill.instances_with_lora(request.lora_name)
        num_there = prefill.min_active_requests(among)
        if num_there is None:
            if self._rules.is_enforced:
                raise errors.NoWorkers(_NOBODY)
            return False
        if request.output_options.prompt_logprobs is not None or not self._can_copy(options):
            return False
        queue_size = max(0, num_there - 1)  # one that is being computed does not wait
        return self._policy.may_go(request.prompt_len, queue_size) and self._policy.goes(
            request.prompt_len,
            queue_size,
            lambda: self._decode.estimate_load(request, options),
            lambda: prefill.estimate_load(request, route.RoutingOptions(allowed_instances=among)),
        )

    def _can_copy(self, options: route.RoutingOptions) -> bool:
        """Can whoever its caller wants take blocks from others?"""
        if options.instance_id is not None:
            return options.instance_id in self._decoders
        return options.allowed_instances is None or not self._decoders.isdisjoint(
            options.allowed_instances
        )

    async def _compute(
        self, prefill: kv_router.KvRouter, request: generate.Request, options: route.RoutingOptions
    ) -> kv_transfer.KvTransferParams | None:
        """Where its blocks are; None: nobody has computed them. Raises Cancelled, or why if that is the rule."""
        _logger.debug(
            "Prefilling remotely for request %s with length %d", request.id, request.prompt_len
        )
        limit_s = min(self._rules.prefill_timeout_s, options.timeout_s or math.inf)
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask(
                    prefill, request, msgspec.structs.replace(options, timeout_s=limit_s)
                )
        except TimeoutError:
            self._fall_back(request, prefill_queue.late(limit_s))
        except errors.Cancelled:
            raise
        except errors.DynamoError as error:
            self._fall_back(request, error)
        return None

    async def _ask(
        self, prefill: kv_router.KvRouter, request: generate.Request, options: route.RoutingOptions
    ) -> kv_transfer.KvTransferParams:
        """One prefill worker, and if that fails another. Raises what the last one failed with."""
        began_at = self._clock.now()
        asked: list[int] = []
        those = prefill.instances_with_lora(request.lora_name)
        to_prefill = msgspec.structs.replace(
            options,
            instance_id=None,
            allowed_instances=those,
            on_dispatched=asked.append,
            on_prefilled=None,
        )
        prompt = prefill_request.make(request)
        try:
            params = await _call(prefill, prompt, to_prefill)
        except prefill_queue.ANOTHER_MAY as error:
            others = (prefill.instance_ids if those is None else those) - set(asked)
            if not asked or not others:
                raise
            _logger.warning("%s: another prefill worker is asked: %s", request.id, error)
            self._counts.retries.inc()
            params = await _call(
                prefill, prompt, msgspec.structs.replace(to_prefill, allowed_instances=others)
            )
        took_s = self._clock.now() - began_at
        found = kv_transfer.pass_on(params, took_s + DELIVERY_S)
        if found is None:
            raise errors.RemoteProtocolError("the prefill worker does not hold its blocks")
        self._computed(route.PrefillResult(asked[-1], took_s), request, options)
        return found

    def _computed(
        self,
        prefilled: route.PrefillResult,
        request: generate.Request,
        options: route.RoutingOptions,
    ) -> None:
        instance_id, took_s = prefilled
        _logger.debug("%x prefilled %s in %.1f ms", instance_id, request.id, took_s * 1e3)
        self._counts.remote.inc()
        self._counts.prefill_s.observe(took_s)
        if options.on_prefilled is not None:
            options.on_prefilled(prefilled)

    async def _deliver(
        self,
        request: generate.Request,
        params: kv_transfer.KvTransferParams,
        receiver: requests.Receiver,
        options: route.RoutingOptions,
    ) -> requests.Stream | None:
        """Begin the answer; None: it took so long that the blocks may be held no more."""
        among = self._decoders.intersection(options.allowed_instances or self._decoders)
        if request.lora_name is None:  # else nobody but those has the adapter
            among = among or self._decoders
        try:
            async with asyncio.timeout(DELIVERY_S):
                return await self._decode.open_stream(
                    msgspec.structs.replace(request, kv_transfer_params=params),
                    receiver,
                    msgspec.structs.replace(options, allowed_instances=among),
                )
        except TimeoutError:
            late = errors.WorkerLost(f"nobody took it within {DELIVERY_S:g} s")
            self._fall_back(request, late, "undelivered")
            return None

    def _fall_back(
        self, request: generate.Request, error: errors.DynamoError, reason: str | None = None
    ) -> None:
        """Raises the error if there is to be no other way."""
        if self._rules.is_enforced:
            raise error
        _logger.warning("%s: its prompt is computed where it is answered: %s", request.id, error)
        self._counts.fell_back(reason or _reason(error))


async def _call(
    prefill: kv_router.KvRouter, prompt: generate.Request, options: route.RoutingOptions
) -> kv_transfer.KvTransferParams:
    """Have it computed by one worker; it stops if we are cancelled, or the caller goes."""
    answer = prefill_answer.PrefillAnswer()
    if options.add_disconnect_callback is not None:
        options.add_disconnect_callback(answer.give_up)
    stream = await prefill.open_stream(prompt, answer, options)
    try:
        return await answer.wait()
    finally:
        stream.cancel()


async def _refuse(
    request: generate.Request,
    receiver: requests.Receiver,
    options: route.RoutingOptions = route.DEFAULT_OPTIONS,
) -> requests.Stream:
    del request, receiver, options
    raise errors.NoWorkers(_NOBODY)


def _stay(request: generate.Request) -> generate.Request:
    return msgspec.structs.replace(request, kv_transfer_params=kv_transfer.COMPUTE_LOCALLY)


def _minus(options: route.RoutingOptions, spent_s: float) -> route.RoutingOptions:
    """With what is left of the time."""
    if options.timeout_s is None:
        return options
    return msgspec.structs.replace(options, timeout_s=max(0.0, options.timeout_s - spent_s))


def _reason(error: errors.DynamoError) -> str:
    match error:
        case errors.WorkerLost():
            return "lost"
        case errors.Unavailable():
            return "refused"
        case errors.DeadlineExceeded():
            return "late"
        case _:
            return "failed"
