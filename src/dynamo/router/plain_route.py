"""The route that knows nothing of caches and load: instances in turn, or at random."""

from collections.abc import Callable, Collection, Mapping

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
        *,
        instance_id: int | None = None,
        among: Collection[int] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_gone: route.OnGone | None = None,
        on_asked: Callable[[int], None] | None = None,
    ) -> requests.Stream:
        del on_gone  # nobody waits here
        return await self._client.open(
            request,
            receiver,
            mode=self._mode,
            instance_id=instance_id,
            among=self._among(among),
            headers=headers,
            timeout_s=timeout_s,
            on_asked=on_asked,
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
