"""A model as this frontend serves it: how to prepare requests for it, and who answers them."""

import itertools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast

import msgspec

from dynamo.base import errors
from dynamo.frontend import identity
from dynamo.preprocess import preprocessor
from dynamo.protocols import embed, generate, instances, model_card
from dynamo.router import route as routing
from dynamo.runtime import client, requests


@dataclass(slots=True)
class EndpointInstances:
    """The instances of one endpoint that serve the model, and the way to them."""

    client: client.EndpointClient
    route: routing.Route
    cards: dict[int, model_card.ModelCard] = field(default_factory=dict)

    @property
    def living(self) -> list[instances.Instance]:
        """Those that are registered now."""
        found = self.client.instances
        return [found[one] for one in sorted(self.cards) if one in found]

    @property
    def is_living(self) -> bool:
        """Is any of them registered now?"""
        return not self.cards.keys().isdisjoint(self.client.instances)

    def among(self, avoid: Collection[int]) -> Collection[int] | None:
        """Whom to ask; None: anybody. Where all are to be avoided, it is any of them."""
        return self.cards.keys() - avoid or self.cards.keys() if avoid else None


class RegisteredModel:
    """One name in /v1/models. `problem` says why it cannot be served, if its files could not be read."""

    def __init__(
        self,
        card: model_card.ModelCard,
        preparer: preprocessor.Preprocessor | None,
        problem: str | None,
        *,
        base: "RegisteredModel | None" = None,
    ) -> None:
        self.card = card
        self.base = base  # the model that it is a LoRA adapter of
        self.replicas: Mapping[instances.EndpointName, EndpointInstances] = {}
        self._preparer = preparer
        self._problem = problem
        self._turns = itertools.count()
        adapter = () if base is None else (card.display_name,)
        self.fingerprint = identity.fingerprint(card, *adapter)

    def adapter(self, name: str) -> "RegisteredModel":
        """A LoRA adapter of it. Its replicas are the caller's to find."""
        card = msgspec.structs.replace(self.card, display_name=name, lora_names=())
        preparer = None if self._preparer is None else self._preparer.for_adapter(name)
        return RegisteredModel(card, preparer, self._problem, base=self)

    @property
    def name(self) -> str:
        return self.card.display_name

    @property
    def instances(self) -> list[instances.Instance]:
        """Who serves it now."""
        return [one for replicas in self.replicas.values() for one in replicas.living]

    @property
    def is_ready(self) -> bool:
        """Can a request be answered now?"""
        return self._problem is None and bool(self.instances)

    @property
    def is_loaded(self) -> bool:
        """Could its files be read? Else a worker that comes may bring them."""
        return self._preparer is not None

    @property
    def preparer(self) -> preprocessor.Preprocessor:
        """Raises Unavailable, saying why there is none."""
        if self._preparer is None:
            raise errors.Unavailable(
                f"the model {self.name!r} cannot be served here: {self._problem}", retry_after_s=10
            )
        return self._preparer

    @property
    def can_generate(self) -> bool:
        """Does it make text?"""
        return self.card.model_type != (model_card.ModelType.EMBEDDINGS,)

    def check_can_generate(self) -> None:
        """Raises InvalidRequest if it only makes embeddings."""
        if not self.can_generate:
            raise errors.InvalidRequest(
                f"model: {self.name!r} makes embeddings, not text; ask /v1/embeddings",
                param="model",
            )

    @property
    def embedding(self) -> model_card.EmbeddingFacts:
        """Of the vectors that it makes. Raises InvalidRequest if it makes none."""
        if self.card.embedding is None:
            raise errors.InvalidRequest(
                f"model: {self.name!r} makes no embeddings; a worker that is started with "
                "--task embed does",
                param="model",
            )
        return self.card.embedding

    async def open(
        self,
        request: generate.Request | embed.EmbeddingRequest,
        receiver: requests.Receiver,
        terms: routing.RoutingOptions,
        *,
        avoid: Collection[int] = (),
    ) -> requests.Stream:
        """Begin an answer at one of its instances, if possible none of `avoid`.

        Raises NoWorkers, Overloaded or WorkerLost.
        """
        replicas = self._pick(terms.instance_id, avoid)
        if avoid:
            terms = msgspec.structs.replace(terms, among=replicas.among(avoid))
        # the route of a model that embeds looks into no request
        asked = cast("generate.Request", request)
        return await replicas.route.open(asked, receiver, terms)

    def choose(
        self,
        request: generate.Request,
        *,
        instance_id: int | None,
        avoid: Collection[int] = (),
    ) -> int:
        """The instance that would be asked. Raises NoWorkers."""
        replicas = self._pick(instance_id, avoid)
        return replicas.route.choose(request, instance_id=instance_id, among=replicas.among(avoid))

    def _pick(self, instance_id: int | None, avoid: Collection[int]) -> EndpointInstances:
        """The endpoints take turns; most models have one."""
        usable = [
            one
            for one in self.replicas.values()
            if one.is_living and (instance_id is None or instance_id in one.cards)
        ]
        if avoid:
            free = [one for one in usable if any(i.instance_id not in avoid for i in one.living)]
            usable = free or usable
        if usable:
            return usable[next(self._turns) % len(usable)]
        if instance_id is not None:
            raise errors.NoWorkers(f"no instance {instance_id} serves the model {self.name!r}")
        raise errors.NoWorkers(f"the model {self.name!r} has no worker now: try again shortly")


_logger = logging.getLogger(__name__)
_Found = dict[str, dict[instances.EndpointName, EndpointInstances]]


def list_adapters(
    bases: Mapping[str, RegisteredModel], known: Mapping[str, RegisteredModel]
) -> Mapping[str, RegisteredModel]:
    """All adapters of these models, by name; those that are `known` stay the same objects.

    A model has its name before an adapter, and an older model's adapter before a newer one's.
    """
    served: dict[str, RegisteredModel] = {}
    for base in bases.values():
        for name, replicas in _replicas(base).items():
            if name in bases or name in served:
                _logger.warning("refused the adapter %r of %r: the name is taken", name, base.name)
                continue
            model = known.get(name)
            if model is None or model.base is not base:
                model = base.adapter(name)
            model.replicas = replicas
            served[name] = model
    return served


def _replicas(base: RegisteredModel) -> _Found:
    """Who has each adapter of this model, and the way there."""
    found: _Found = {}
    for endpoint, whole in base.replicas.items():
        for instance_id, card in whole.cards.items():
            for name in card.lora_names:
                by_endpoint = found.setdefault(name, {})
                if endpoint not in by_endpoint:
                    route = routing.LoraRoute(whole.route)
                    by_endpoint[endpoint] = EndpointInstances(whole.client, route)
                by_endpoint[endpoint].cards[instance_id] = card
    for by_endpoint in found.values():
        for replicas in by_endpoint.values():
            replicas.route.set_model_cards(replicas.cards)
    return found
