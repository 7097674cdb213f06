"""The seam between who has a request and whoever knows where it should go.

Implementations: `plain_route` (in turn, at random) and `kv_router` (by load and cache), which `routes` makes; and
`disagg.prefill_first`, which has the prompt computed elsewhere before it asks one of them.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import msgspec

from dynamo.protocols import generate, model_card
from dynamo.runtime import requests

OnGone = Callable[[Callable[[], None]], None]


class Prefilled(NamedTuple):
    """A prompt that another worker than the one that answers has computed, from asking it to its answer."""

    instance_id: int
    duration_s: float


class Terms(msgspec.Struct, frozen=True, kw_only=True):
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
    on_prefilled: Callable[[Prefilled], None] | None = None


ANYHOW = Terms()


class Route(Protocol):
    """Gets the requests for one model to the instances of one endpoint."""

    def serve_by(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """These instances serve it from now on, as their cards say; told whenever that changes."""
        ...

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        terms: Terms = ANYHOW,
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
