"""The route of a LoRA adapter: that of its model, kept to the workers that have it.

There is one route for a model and all its adapters, because one worker computes for all of them: what is in flight for
one is load to the others, and there is one index, one queue and one way by prefill workers. What belongs to an adapter
alone is its blocks, and these differ by name (`blocks.seed_of`).
"""

from collections.abc import Collection, Mapping

import msgspec

from dynamo.protocols import generate, model_card
from dynamo.router import route
from dynamo.runtime import requests


class LoraRoute:
    """A `route.Route`, for requests with a `lora_name`."""

    def __init__(self, whole: route.Route) -> None:
        self._whole = whole
        self._instance_ids: frozenset[int] = frozenset()

    def serve_by(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Of those who serve the model, these have the adapter."""
        self._instance_ids = frozenset(cards)

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        terms: route.Terms = route.ANYHOW,
    ) -> requests.Stream:
        """As `route.Route`."""
        kept = msgspec.structs.replace(terms, among=self._among(terms.among))
        return await self._whole.open(request, receiver, kept)

    def choose(
        self,
        request: generate.Request,
        *,
        instance_id: int | None = None,
        among: Collection[int] | None = None,
    ) -> int:
        """As `route.Route`."""
        return self._whole.choose(request, instance_id=instance_id, among=self._among(among))

    def _among(self, among: Collection[int] | None) -> Collection[int]:
        return self._instance_ids if among is None else self._instance_ids.intersection(among)
