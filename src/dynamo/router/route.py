"""The seam between who has a request and whoever knows where it should go.

Implementations: `plain_route` (in turn, at random) and `kv_router` (by load and cache). `routes` makes them.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from dynamo.protocols import generate, model_card
from dynamo.runtime import requests

OnGone = Callable[[Callable[[], None]], None]


class Route(Protocol):
    """Gets the requests for one model to the instances of one endpoint."""

    def serve_by(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """These instances serve it from now on, as their cards say; told whenever that changes."""
        ...

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        *,
        instance_id: int | None = None,
        among: Collection[int] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_gone: OnGone | None = None,
        on_asked: Callable[[int], None] | None = None,
    ) -> requests.Stream:
        """Begin an answer at `instance_id`, or at one of our choice (`among` these, if given).

        A route may let the request wait; it calls `on_gone` with what ends that, if the caller goes (Cancelled).
        `on_asked` is told the instance that took it, before anything comes back.

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
