"""The seam between who has a request and whoever knows where it should go.

Implementations: `plain_route` (in turn, at random) and `kv_router` (by load and cache), which `routes` makes; and
`disagg.prefill_first`, which has the prompt computed elsewhere before it asks one of them.

The route that knows nothing of caches and load: instances in turn, or at random.

The route of a LoRA adapter: that of its model, kept to the workers that have it.

There is one route for a model and all its adapters, because one worker computes for all of them: what is in flight for
one is load to the others, and there is one index, one queue and one way by prefill workers. What belongs to an adapter
alone is its blocks, and these differ by name (`blocks.seed_of`).
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import msgspec

from dynamo.protocols import generate, model_card
from dynamo.runtime import client, requests

OnGone = Callable[[Callable[[], None]], None]


class PrefillResult(NamedTuple):
    """A prompt that another worker than the one that answers has computed, from asking it to its answer."""

    instance_id: int
    duration_s: float


class RoutingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is to be sent: to `instance_id`, or to one of `among`, if given.

    A route may let it wait; it calls `on_gone` with what ends that, if the caller goes (Cancelled). `on_asked` is told
    the instance that took it, before anything comes back; `on_prefilled` who computed its prompt, if that is another.
    """

    instance_id: int | None = None
    among: Collection[int] | None = None
    headers: Mapping[str, str] | None = None
    timeout_s: float | None = None
    on_gone: OnGone | None = None
    on_asked: Callable[[int], None] | None = None
    on_prefilled: Callable[[PrefillResult], None] | None = None


DEFAULT_OPTIONS = RoutingOptions()


class Route(Protocol):
    """Gets the requests for one model to the instances of one endpoint."""

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """These instances serve it from now on, as their cards say; told whenever that changes."""
        ...

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        terms: RoutingOptions = DEFAULT_OPTIONS,
    ) -> requests.Stream:
        """Begin an answer.

        Raises NoWorkers; Overloaded if all are too busy; WorkerLost if `instance_id` is given and cannot be reached.
        """
        ...

    def choose(
        self,
        request: generate.Request,
        *,
        instance_id: int | None = None,
        among: Collection[int] | None = None,
    ) -> int:
        """Whom `open` would ask first; nobody is asked. Raises NoWorkers."""
        ...


class PushRouter:
    """Passes requests to the client of the endpoint, which takes turns or draws lots."""

    def __init__(self, asked: client.EndpointClient, mode: client.Mode) -> None:
        self._client = asked
        self._mode = mode
        self._instance_ids: frozenset[int] = frozenset()

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        self._instance_ids = frozenset(cards)

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        terms: RoutingOptions = DEFAULT_OPTIONS,
    ) -> requests.Stream:
        return await self._client.open(
            request,
            receiver,
            mode=self._mode,
            instance_id=terms.instance_id,
            among=self._among(terms.among),
            headers=terms.headers,
            timeout_s=terms.timeout_s,
            on_asked=terms.on_asked,
        )

    def choose(
        self,
        request: generate.Request,
        *,
        instance_id: int | None = None,
        among: Collection[int] | None = None,
    ) -> int:
        del request  # it is the next one's turn, whatever it asks
        return self._client.choose(
            mode=self._mode, instance_id=instance_id, among=self._among(among)
        )

    def _among(self, among: Collection[int] | None) -> Collection[int] | None:
        """Keep to those who serve the model, where somebody serves another one at this endpoint."""
        if among is None and not self._client.instances.keys() <= self._instance_ids:
            return self._instance_ids
        return among


class LoraRoute:
    """A `Route`, for requests with a `lora_name`."""

    def __init__(self, whole: Route) -> None:
        self._whole = whole
        self._instance_ids: frozenset[int] = frozenset()

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Of those who serve the model, these have the adapter."""
        self._instance_ids = frozenset(cards)

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        terms: RoutingOptions = DEFAULT_OPTIONS,
    ) -> requests.Stream:
        """As `Route`."""
        kept = msgspec.structs.replace(terms, among=self._among(terms.among))
        return await self._whole.open(request, receiver, kept)

    def choose(
        self,
        request: generate.Request,
        *,
        instance_id: int | None = None,
        among: Collection[int] | None = None,
    ) -> int:
        """As `Route`."""
        return self._whole.choose(request, instance_id=instance_id, among=self._among(among))

    def _among(self, among: Collection[int] | None) -> Collection[int]:
        return self._instance_ids if among is None else self._instance_ids.intersection(among)
