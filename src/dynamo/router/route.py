"""A route: the seam between a process that has a request and the code that selects the worker for it.

Implementations: `PushRouter` (round-robin or random), `kv_router.KvRouter` (by cached prefixes and load), both made by
`route_factory`; `LoraRoute` (restricts another route to the workers of an adapter); and `disagg.prefill_route`, which
has the prompt computed by a prefill worker before it uses one of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from dynamo.protocols import generate, model_card
from dynamo.router import api, explanation
from dynamo.runtime import client, requests

AddDisconnectCallback = Callable[[Callable[[], None]], None]


class PrefillResult(NamedTuple):
    """A prompt that a prefill worker has computed; the duration runs from its dispatch to its response."""

    instance_id: int
    duration_s: float


class RoutingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request may go, and the callbacks that follow its way.

    `instance_id` names the only acceptable worker, `allowed_instances` limits the choice. A route that queues the
    request passes the function that cancels the wait to `add_disconnect_callback`, for the case that the client
    disconnects. `on_dispatched` is called with the instance that accepted the request, before any output of it;
    `on_prefilled` if another worker computed the prompt; `on_explained` with the explanation of each decision and the
    sequence hashes of the prompt, before the decision is made.
    """

    instance_id: int | None = None
    allowed_instances: Collection[int] | None = None
    is_restricted: bool = False  # no instance outside `allowed_instances` can ever serve it
    headers: Mapping[str, str] | None = None
    timeout_s: float | None = None
    policy_override: api.PolicyOverride | None = None  # heeded where the workers' caches count
    add_disconnect_callback: AddDisconnectCallback | None = None
    on_dispatched: Callable[[int], None] | None = None
    on_prefilled: Callable[[PrefillResult], None] | None = None
    on_explained: Callable[[explanation.RoutingExplanation, Sequence[int]], None] | None = None


DEFAULT_OPTIONS = RoutingOptions()


class Route(Protocol):
    """Sends the requests for one model to the instances of one endpoint."""

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Replace the instances that serve the model, by their model cards; called whenever they change."""
        ...

    async def open_stream(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        options: RoutingOptions = DEFAULT_OPTIONS,
    ) -> requests.Stream:
        """Select a worker, send it the request and return the stream of its response.

        Raises NoWorkers; Overloaded if all workers are too busy; WorkerLost if `options.instance_id` is set and that
        instance cannot be reached.
        """
        ...

    def preview_instance(
        self, request: generate.Request, options: RoutingOptions = DEFAULT_OPTIONS
    ) -> int:
        """Return the instance that `open_stream` would try first, without sending anything. Raises NoWorkers."""
        ...


def alternatives_of(options: RoutingOptions, instance_ids: Collection[int]) -> Collection[int]:
    """Return those of a model's instances that can take over a request; for a LoRA adapter, those that have it.

    None can take over a request for one instance, which therefore waits for a silent one as long as that is listed.
    """
    if options.instance_id is not None:
        return ()
    allowed = options.allowed_instances
    return allowed if options.is_restricted and allowed is not None else instance_ids


class PushRouter:
    """A `Route` that knows neither caches nor load: the endpoint's client takes instances in turn, or at random."""

    def __init__(self, endpoint_client: client.EndpointClient, mode: client.Mode) -> None:
        self._client = endpoint_client
        self._mode = mode
        self._instance_ids: frozenset[int] = frozenset()

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        self._instance_ids = frozenset(cards)

    async def open_stream(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        options: RoutingOptions = DEFAULT_OPTIONS,
    ) -> requests.Stream:
        if options.on_explained is not None:
            usable = self._client.usable(self._restrict(options.allowed_instances))
            options.on_explained(explanation.explain_turn(self._mode, usable), ())
        return await self._client.open(
            request,
            receiver,
            mode=self._mode,
            instance_id=options.instance_id,
            among=self._restrict(options.allowed_instances),
            headers=options.headers,
            timeout_s=options.timeout_s,
            on_asked=options.on_dispatched,
            alternatives=lambda: alternatives_of(options, self._instance_ids),
        )

    def preview_instance(
        self, request: generate.Request, options: RoutingOptions = DEFAULT_OPTIONS
    ) -> int:
        del request  # its content does not matter here
        return self._client.choose(
            mode=self._mode,
            instance_id=options.instance_id,
            among=self._restrict(options.allowed_instances),
        )

    def _restrict(self, allowed_instances: Collection[int] | None) -> Collection[int] | None:
        """Limit the choice to instances of this model, if the endpoint also has instances of another one."""
        if allowed_instances is None and not self._client.instances.keys() <= self._instance_ids:
            return self._instance_ids
        return allowed_instances


class LoraRoute:
    """The `Route` of one LoRA adapter: the route of its base model, limited to the workers that have the adapter.

    A model and all its adapters share one route, because each worker computes for all of them: the requests of one
    adapter are load to the others, and index, queue and prefill workers are the same. Only the KV blocks differ: an
    adapter's blocks have hashes of their own (`blocks.seed_of`).
    """

    def __init__(self, model_route: Route) -> None:
        self._model_route = model_route
        self._instance_ids: frozenset[int] = frozenset()

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Replace the instances that have the adapter; each of them serves the base model too."""
        self._instance_ids = frozenset(cards)

    async def open_stream(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        options: RoutingOptions = DEFAULT_OPTIONS,
    ) -> requests.Stream:
        return await self._model_route.open_stream(request, receiver, self._restrict(options))

    def preview_instance(
        self, request: generate.Request, options: RoutingOptions = DEFAULT_OPTIONS
    ) -> int:
        return self._model_route.preview_instance(request, self._restrict(options))

    def _restrict(self, options: RoutingOptions) -> RoutingOptions:
        allowed = self._instance_ids
        if options.allowed_instances is not None:
            allowed = allowed.intersection(options.allowed_instances)
        return msgspec.structs.replace(options, allowed_instances=allowed, is_restricted=True)
