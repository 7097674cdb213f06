"""The route that knows nothing of caches and load: instances in turn, or at random."""

from collections.abc import Collection, Mapping

from dynamo.protocols import generate, model_card
from dynamo.router import route
from dynamo.runtime import client, requests


class PlainRoute:
    """Passes requests to the client of the endpoint, which takes turns or draws lots."""

    def __init__(self, asked: client.EndpointClient, mode: client.Mode) -> None:
        self._client = asked
        self._mode = mode
        self._instance_ids: frozenset[int] = frozenset()

    def serve_by(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        self._instance_ids = frozenset(cards)

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        terms: route.Terms = route.ANYHOW,
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
