"""The route of a request by two workers: a prefill worker that knows its prefix, then a worker that answers.

    open ── policy ──┬── local ─────────────────────────────────────────────────────▶ decode worker
                     └── remote ── prefill worker ── where the blocks are ──▶ decode worker (copies them, answers)

It stands in front of the route to the workers that answer, and its `open_stream` is that route's as long as there is no
prefill worker, or no decode worker that could copy from one.

The request tells the answering worker that a frontend has decided, so that it asks no prefill worker itself: it brings
the place of its blocks, or `kv_transfer.COMPUTE_LOCALLY`. Whatever fails on the way, another prefill worker is tried
once; then the answering worker computes the prompt.

A decode worker that cannot copy from a prefill worker, because their link is slow or broken, has that on its model card
(`prefill_workers`). No prompt goes to a prefill worker from which the decode worker that would answer now cannot copy,
and its answer goes to no decode worker that cannot copy from there. Likewise for workers with other weights, as there
are while a model is updated: blocks are never taken from those.

While a model has prefill workers, the limits of its local prefill are followed in discovery.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.disagg import config, decode_workers, metrics, policy, prefill_queue
from dynamo.observability import metrics as registries
from dynamo.protocols import generate, kv_transfer, model_card, model_errors
from dynamo.router import explanation, kv_router, route, route_factory
from dynamo.runtime import client, discovery, requests

# Within this time the answering worker must have the request; the lease that it sees is shorter by as much.
DELIVERY_S = 5.0
_NO_PREFILL = (
    "no prefill worker serves this model, and it must not be computed elsewhere: "
    "start one, or try again shortly"
)
_logger = logging.getLogger(__name__)


class OpenRoute(Protocol):
    """The type of `route.Route.open_stream`, with its errors."""

    async def __call__(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        options: route.RoutingOptions = route.DEFAULT_OPTIONS,
    ) -> requests.Stream: ...


class PrefillRoute:
    """A `route.Route` by prefill workers, in front of one to the answering workers."""

    def __init__(
        self,
        decode: kv_router.KvRouter,
        prefill_policy: policy.PrefillPolicy,
        settings: config.PrefillRoutingConfig,
        counters: metrics.ModelPrefillRouteMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._decode = decode
        self._policy = prefill_policy
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._prefill: kv_router.KvRouter | None = None
        self._hung = prefill_queue.HungWorkers(self._send_probe, self._is_prefill_worker, clock)
        self._decoders = decode_workers.DecodeWorkers()
        self._limits: policy.LocalPrefillLimits | None = None  # of the oldest answering worker
        self.preview_instance = decode.preview_instance
        self._bind_open()

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Set the model cards of the answering workers, by instance id."""
        self._decode.set_model_cards(cards)
        self._update_limits(cards)
        former = self._decoders.unreachable
        self._decoders.set_cards(cards)
        if (current := self._decoders.unreachable) != former:
            pairs = [f"{i:x} from {p:x}" for i, ids in current.items() for p in sorted(ids)]
            _logger.info("decode workers that cannot copy: %s", ", ".join(pairs) or "none")
        self._bind_open()

    def _update_limits(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Follow the limits of the oldest worker when it has been replaced by one with others."""
        oldest = next(iter(cards.values()), None)
        if oldest is None or not isinstance(self._policy, policy.LengthPolicy):
            return
        limits = self._settings.limits_for(oldest)
        if self._limits not in (None, limits):  # the policy began with the first ones
            self._policy.set_default(limits)
        self._limits = limits

    def set_prefill_router(self, prefill: kv_router.KvRouter | None) -> None:
        """Set the router to the prefill workers, anew whenever these change; None if there are none."""
        self._prefill = prefill
        self._decoders.set_prefill_cards({} if prefill is None else prefill.cards)
        self._bind_open()

    def _bind_open(self) -> None:
        """Bind `open_stream` to what it has to do now, so that a request without prefill workers pays nothing."""
        self.open_stream: OpenRoute = self._decode.open_stream
        if self._prefill is not None and self._decoders.ids:
            self.open_stream = self._open
        elif self._settings.is_enforced:
            self.open_stream = _refuse

    async def _open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        options: route.RoutingOptions = route.DEFAULT_OPTIONS,
    ) -> requests.Stream:
        prefill = self._prefill
        assert prefill is not None
        if not self._is_remote(prefill, request, options):
            _logger.info(
                "Prefilling locally for request %s with length %d", request.id, request.prompt_len
            )
            self._counters.local.inc()
            return await self._decode.open_stream(_with_local_prefill(request), receiver, options)
        began_at, cards = self._clock.now(), prefill.cards
        tried: list[int] = []
        params = await self._prefill_in_time(prefill, request, options, tried)
        if params is not None:
            remaining = _shorten_timeout(options, self._clock.now() - began_at)
            computed_by = tried[-1]
            card = cards.get(computed_by) or prefill.cards.get(computed_by)  # it may have left
            foreign = self._decoders.ids_without("" if card is None else card.weights)
            stream = await self._open_decode(
                request, params, computed_by, foreign, receiver, remaining
            )
            if stream is not None:
                self._counters.remote.inc()
                return stream
        if options.on_explained is not None:
            self._explain(request, options, False, "no prefill worker has computed it in time")
        remaining = _shorten_timeout(options, self._clock.now() - began_at)
        return await self._decode.open_stream(_with_local_prefill(request), receiver, remaining)

    def _is_remote(
        self, prefill: kv_router.KvRouter, request: generate.Request, options: route.RoutingOptions
    ) -> bool:
        """Return whether a prefill worker computes the prompt. Raises NoWorkers if it must, and none can."""
        candidates = self._prefill_candidates(prefill, request, options)
        num_requests = prefill.min_active_requests(candidates)
        if num_requests is None and self._settings.is_enforced:
            raise errors.NoWorkers(_NO_PREFILL)
        obstacle = "no prefill worker that the answering worker can copy from is usable"
        if num_requests is not None:
            obstacle = self._find_obstacle(request, options)
        if num_requests is None or obstacle:
            if options.on_explained is not None:
                self._explain(request, options, False, obstacle)
            return False
        num_waiting = max(0, num_requests - 1)  # a prompt that is being computed does not wait
        to_prefill = route.RoutingOptions(allowed_instances=candidates)
        facts = (
            request.prompt_len,
            num_waiting,
            lambda: self._decode.estimate_load(request, options),
            lambda: prefill.estimate_load(request, to_prefill),
        )
        is_remote = self._policy.may_be_remote(*facts[:2]) and self._policy.is_remote(*facts)
        if options.on_explained is not None:
            self._explain(request, options, is_remote, self._policy.explain(*facts))
        return is_remote

    def _find_obstacle(self, request: generate.Request, options: route.RoutingOptions) -> str:
        """Return why only the answering worker can compute this prompt; "" if a prefill worker can."""
        if request.output_options.prompt_logprobs is not None or request.images:
            return "log probabilities of a prompt, and images, are computed by the answering worker"
        if request.sampling_options.n > 1 and not self._decoders.imports_choices:
            return "the answering worker computes the prompt of several choices"
        if not self._decoders.can_answer(options.instance_id, options.allowed_instances):
            return "no worker that may answer can copy from a prefill worker"
        return ""

    def _explain(
        self, request: generate.Request, options: route.RoutingOptions, is_remote: bool, reason: str
    ) -> None:
        """Tell where the prompt is computed, and why."""
        assert options.on_explained is not None
        options.on_explained(
            explanation.RoutingExplanation(
                kind="prefill",
                policy=type(self._policy).__name__,
                outcome="remote" if is_remote else "local",
                reason=reason,
                num_tokens=request.prompt_len,
            ),
            (),
        )

    def _prefill_candidates(
        self, prefill: kv_router.KvRouter, request: generate.Request, options: route.RoutingOptions
    ) -> frozenset[int] | None:
        """Return the prefill workers to choose among, None for all.

        Those with other weights than the worker that would answer now are left out; and if the rules allow that, those
        that hang, and those from which it cannot copy.
        """
        candidates = prefill.instances_with_lora(request.lora_name)
        present = prefill.instance_ids if candidates is None else candidates
        unreachable, foreign = self._find_obstacles(request, options)
        if foreign:
            candidates = present = present - foreign
        usable = frozenset(self._hung.without(present)) - unreachable
        if len(usable) == len(present) or (self._settings.is_enforced and not usable):
            return candidates
        return usable

    def _find_obstacles(
        self, request: generate.Request, options: route.RoutingOptions
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Return the prefill workers that the worker that would answer now cannot copy from, and with other weights."""
        workers = self._decoders
        can_answer = workers.can_answer(options.instance_id, options.allowed_instances)
        if not workers.has_obstacles or not can_answer:
            return frozenset(), frozenset()
        answering = self._decode.preview_instance(
            request,
            msgspec.structs.replace(options, allowed_instances=self._accepted(request, options)),
        )
        return workers.unreachable_from(answering), workers.foreign_to(answering)

    def _accepted(self, request: generate.Request, options: route.RoutingOptions) -> frozenset[int]:
        """Return the decode workers that may answer the request."""
        is_restricted = options.is_restricted or request.lora_name is not None
        return self._decoders.accepted(options.allowed_instances, is_restricted=is_restricted)

    def _is_prefill_worker(self, instance_id: int) -> bool:
        return self._prefill is not None and instance_id in self._prefill.instance_ids

    async def _send_probe(self, instance_id: int, probe: generate.Request) -> None:
        if self._prefill is not None:
            options = route.RoutingOptions(instance_id=instance_id, timeout_s=prefill_queue.PROBE_S)
            await _request_prefill(self._prefill, probe, options)

    async def close(self) -> None:
        """Stop probing hung prefill workers."""
        await self._hung.close()

    async def _prefill_in_time(
        self,
        prefill: kv_router.KvRouter,
        request: generate.Request,
        options: route.RoutingOptions,
        tried: list[int],
    ) -> kv_transfer.KvTransferParams | None:
        """Return where the prompt's blocks are; None if no prefill worker has computed them.

        Each worker that has taken it is appended to `tried`.
        Raises Cancelled, SuspectRequest, or the reason if a local prefill is against the rules.
        """
        _logger.debug(
            "Prefilling remotely for request %s with length %d", request.id, request.prompt_len
        )
        timeout_s = min(self._settings.prefill_timeout_s, options.timeout_s or math.inf)
        try:
            async with self._clock.timeout(timeout_s):
                return await self._prefill_with_retry(
                    prefill, request, msgspec.structs.replace(options, timeout_s=timeout_s), tried
                )
        except (TimeoutError, errors.DeadlineExceeded):
            if tried and timeout_s == self._settings.prefill_timeout_s:
                self._hung.report(tried[-1], request)
            self._fall_back(request, prefill_queue.timeout_error(timeout_s))
        except (errors.Cancelled, model_errors.SuspectRequest):
            raise
        except errors.DynamoError as error:
            self._fall_back(request, error)
        return None

    async def _prefill_with_retry(
        self,
        prefill: kv_router.KvRouter,
        request: generate.Request,
        options: route.RoutingOptions,
        tried: list[int],
    ) -> kv_transfer.KvTransferParams:
        """Send the prompt to one prefill worker, and if that fails to another. Raises what the last one failed with.

        Each worker that has taken it is appended to `tried`.
        """
        began_at = self._clock.now()
        candidates = self._prefill_candidates(prefill, request, options)
        to_prefill = msgspec.structs.replace(
            options,
            instance_id=None,
            allowed_instances=candidates,
            on_dispatched=tried.append,
            on_prefilled=None,
        )
        prompt = prefill_queue.make_prefill_request(request)
        deaths = prefill_queue.PrefillDeaths(request)
        try:
            params = await _request_prefill(prefill, prompt, to_prefill)
        except prefill_queue.RETRIABLE as error:
            all_workers = prefill.instance_ids if candidates is None else candidates
            if tried:
                self._hung.report_loss(tried[-1], request, error)
            elif isinstance(error, errors.NoWorkers):  # none of them could be reached
                for instance_id in all_workers:
                    self._hung.report(instance_id, request)
            deaths.record(error)
            untried = all_workers - set(tried)
            if not tried or not untried:
                raise
            _logger.warning("%s: another prefill worker is asked: %s", request.id, error)
            self._counters.retries.inc()
            to_untried = msgspec.structs.replace(to_prefill, allowed_instances=untried)
            try:
                params = await _request_prefill(prefill, prompt, to_untried)
            except errors.WorkerLost as second:
                self._hung.report_loss(tried[-1], request, second)
                deaths.record(second)
                raise
        duration_s = self._clock.now() - began_at
        passed_on = kv_transfer.pass_on(
            params, duration_s, request.prompt_len, delivery_s=DELIVERY_S
        )
        if passed_on is None:
            raise errors.RemoteProtocolError("the prefill worker does not hold its blocks")
        _logger.debug("%x prefilled %s in %.1f ms", tried[-1], request.id, duration_s * 1e3)
        self._counters.prefill_s.observe(duration_s)
        if options.on_prefilled is not None:
            options.on_prefilled(route.PrefillResult(tried[-1], duration_s))
        return passed_on

    async def _open_decode(
        self,
        request: generate.Request,
        params: kv_transfer.KvTransferParams,
        prefill_id: int,
        foreign: frozenset[int],
        receiver: requests.Receiver,
        options: route.RoutingOptions,
    ) -> requests.Stream | None:
        """Begin the answer, at none of the `foreign` workers, which have other weights than the prefill worker.

        None if that took so long that the lease may have expired, or if no other worker is left.
        """
        workers = self._decoders
        candidates = self._accepted(request, options) - foreign
        if not candidates or options.instance_id in foreign:
            error = errors.WorkerLost(
                "no decode worker with the weights of its prefill worker is left"
            )
            self._fall_back(request, error)
            return None
        if options.instance_id is None:
            cut_off = {i for i in workers.ids if prefill_id in workers.unreachable_from(i)}
            candidates = candidates - cut_off or candidates
        try:
            async with self._clock.timeout(DELIVERY_S):
                return await self._decode.open_stream(
                    msgspec.structs.replace(request, kv_transfer_params=params),
                    receiver,
                    msgspec.structs.replace(options, allowed_instances=candidates),
                )
        except TimeoutError:
            error = errors.WorkerLost(f"no decode worker took the request within {DELIVERY_S:g} s")
            self._fall_back(request, error, "undelivered")
            return None

    def _fall_back(
        self, request: generate.Request, error: errors.DynamoError, reason: str | None = None
    ) -> None:
        """Count and log a failed remote prefill. Raises the error if a local prefill is against the rules."""
        if self._settings.is_enforced:
            raise error
        _logger.warning("%s: its prompt is computed where it is answered: %s", request.id, error)
        self._counters.count_fallback(reason or _reason(error))


class PrefillRouteFactory:
    """Makes the routes of a frontend in router mode kv, with a `PrefillRoute` in front of each."""

    def __init__(
        self,
        routes: route_factory.RouteFactory,
        options: config.PrefillRoutingConfig,
        registry: discovery.Discovery,
        metrics_registry: registries.Registry,
        clock: clocks.Clock,
        queue_threshold: float | None = None,
    ) -> None:
        """Raises ConfigError for options that do not fit."""
        self._routes = routes
        self._options = options
        self._conditional = options.conditional_policy(queue_threshold)
        self._registry = registry
        self._metrics = metrics.PrefillRouteMetrics(metrics_registry)
        self._clock = clock
        self._following: dict[str, asyncio.Task[None]] = {}  # by model
        self._lengths: dict[str, policy.LengthPolicy] = {}  # by model
        self._made: dict[kv_router.KvRouter, PrefillRoute] = {}  # by the route that it is before
        self._tasks = tasks.Tasks()

    def make(self, endpoint: client.EndpointClient, card: model_card.ModelCard) -> route.Route:
        """Make the route to the answering workers of an endpoint (`route_factory.RouteFactory.make_route`)."""
        plain = self._routes.make_route(endpoint, card)
        if not isinstance(plain, kv_router.KvRouter):
            return plain
        if (former := self._made.get(plain)) is not None:  # the model has come back
            return former
        prefill_policy = self._policy_of(card)
        if isinstance(prefill_policy, policy.LengthPolicy):  # it may be that of an earlier endpoint
            prefill_policy.set_default(self._options.limits_for(card))
        prefill_route = PrefillRoute(
            plain,
            prefill_policy,
            self._options,
            metrics.ModelPrefillRouteMetrics(self._metrics, card.display_name),
            self._clock,
        )
        self._made[plain] = prefill_route
        return prefill_route

    def make_prefill_router(
        self, endpoint: client.EndpointClient, card: model_card.ModelCard
    ) -> kv_router.KvRouter:
        """Make the router to the prefill workers of an endpoint, and follow the limits of their model."""
        model = card.display_name
        lengths = self._policy_of(card)
        if isinstance(lengths, policy.LengthPolicy) and model not in self._following:
            following = config.follow_limits(self._registry, model, lengths)
            self._following[model] = self._tasks.start("watch limits of local prefill", following)
        return self._routes.make_kv_router(endpoint, card)

    async def close(self) -> None:
        """Stop following the limits in discovery, and probing."""
        for prefill_route in self._made.values():
            await prefill_route.close()
        await self._tasks.close()

    def _policy_of(self, card: model_card.ModelCard) -> policy.PrefillPolicy:
        if self._conditional is not None:
            return self._conditional
        if self._options.disagg_policy == "estimated":
            return policy.EstimatePolicy()
        return self._lengths.setdefault(
            card.display_name, policy.LengthPolicy(self._options.limits_for(card))
        )


async def _request_prefill(
    prefill: kv_router.KvRouter, prompt: generate.Request, options: route.RoutingOptions
) -> kv_transfer.KvTransferParams:
    """Get a prompt computed by one worker; it stops if this task is cancelled, or the caller goes."""
    receiver = prefill_queue.PrefillReceiver()
    if options.add_disconnect_callback is not None:
        options.add_disconnect_callback(receiver.give_up)
    stream = await prefill.open_stream(prompt, receiver, options)
    try:
        return await receiver.wait()
    finally:
        stream.cancel()


async def _refuse(
    request: generate.Request,
    receiver: requests.Receiver,
    options: route.RoutingOptions = route.DEFAULT_OPTIONS,
) -> requests.Stream:
    del request, receiver, options
    raise errors.NoWorkers(_NO_PREFILL)


def _with_local_prefill(request: generate.Request) -> generate.Request:
    return msgspec.structs.replace(request, kv_transfer_params=kv_transfer.COMPUTE_LOCALLY)


def _shorten_timeout(options: route.RoutingOptions, elapsed_s: float) -> route.RoutingOptions:
    if options.timeout_s is None:
        return options
    return msgspec.structs.replace(options, timeout_s=max(0.0, options.timeout_s - elapsed_s))


def _reason(error: errors.DynamoError) -> str:
    """Return the label of an error in the metrics."""
    match error:
        case errors.WorkerLost():
            return "lost"
        case errors.Unavailable():
            return "refused"
        case errors.DeadlineExceeded():
            return "late"
        case _:
            return "failed"
