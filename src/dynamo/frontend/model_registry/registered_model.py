"""A model of the registry: how requests for it are prepared, and which instances answer them.

A LoRA adapter is a registered model of its own to clients, and part of its base model to all else. A worker names its
adapters on its model card, so adapters follow from the base models alone: an adapter is served by those workers of its
base model that name it, appears and vanishes with them, and is refused where they are. It has the tokenizer and chat
template of its base model, and its requests go by the routes of the base model (`router.route.LoraRoute`).
"""

import itertools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend.delivery import sse
from dynamo.preprocess import preprocessor
from dynamo.protocols import encoders, generate, instances, model_card
from dynamo.router import route as routing
from dynamo.runtime import client, requests

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EndpointInstances:
    """The instances of one endpoint that serve a model, and the route to them."""

    client: client.EndpointClient
    route: routing.Route
    cards: dict[int, model_card.ModelCard] = field(default_factory=dict)  # by instance id

    @property
    def block_size(self) -> int:
        """Return the tokens of a KV block of the oldest worker, for which the route was made."""
        return next(iter(self.cards.values())).kv_cache_block_size

    @property
    def live_instances(self) -> list[instances.Instance]:
        """Return those that are registered in discovery now, by id."""
        registered = self.client.instances
        return [registered[number] for number in sorted(self.cards) if number in registered]

    def state_of(self, instance_id: int) -> Literal["ready", "down"]:
        """Return down for an instance that is registered and was lost: it is asked last."""
        return "down" if self.client.is_down(instance_id) else "ready"

    @property
    def has_live_instances(self) -> bool:
        """Return whether any of them is registered in discovery now."""
        return not self.cards.keys().isdisjoint(self.client.instances)

    def allowed_ids(self, avoid: Collection[int], weights: str = "") -> Collection[int] | None:
        """Return the instances that may be chosen: none of `avoid`, unless that leaves no instance. None: all.

        With `weights`, a fingerprint, none with others.
        """
        if not avoid and not weights:
            return None
        ids = {number for number, card in self.cards.items() if card.has_weights_of(weights)}
        return ids - {*avoid} or ids


class RegisteredModel:
    """One name in /v1/models. `problem` says why the model cannot be served, if its files could not be read."""

    def __init__(
        self,
        card: model_card.ModelCard,
        preparer: preprocessor.Preprocessor | None,
        problem: str | None,
        *,
        base: "RegisteredModel | None" = None,
    ) -> None:
        self.card = card
        self.name = card.display_name
        self.base = base  # the base model, if this is a LoRA adapter
        self.replicas: Mapping[instances.EndpointName, EndpointInstances] = {}
        self._preparer = preparer
        self.problem = problem
        self._num_picks = itertools.count()
        adapter_names = () if base is None else (card.display_name,)
        self.fingerprint = sse.fingerprint(card, *adapter_names)
        self.can_generate = card.model_type != (model_card.ModelType.EMBEDDINGS,)  # text

    def is_described_by(self, card: model_card.ModelCard) -> bool:
        """Return whether requests are checked and prepared by this card as by the one that the model was loaded by."""
        return _facts_of(card) == _facts_of(self.card)

    def make_adapter(self, name: str) -> "RegisteredModel":
        """Return a LoRA adapter of this model, without instances."""
        card = msgspec.structs.replace(self.card, display_name=name, lora_names=())
        preparer = None if self._preparer is None else self._preparer.for_adapter(name)
        return RegisteredModel(card, preparer, self.problem, base=self)

    @property
    def announced_name(self) -> str:
        """Return the name by which its workers announce their start."""
        return self.name if self.base is None else self.base.name

    @property
    def instances(self) -> list[instances.Instance]:
        """Return all instances that serve the model now."""
        return [
            instance for replicas in self.replicas.values() for instance in replicas.live_instances
        ]

    def count_down(self) -> int:
        """Count the instances that are registered and were lost."""
        return sum(
            replicas.state_of(instance.instance_id) == "down"
            for replicas in self.replicas.values()
            for instance in replicas.live_instances
        )

    def has_others(self, instance_ids: Collection[int | None]) -> bool:
        """Return whether the model is served by an instance beside these."""
        return any(each.instance_id not in instance_ids for each in self.instances)

    @property
    def is_ready(self) -> bool:
        """Return whether a request can be answered now."""
        return self.problem is None and bool(self.instances)

    @property
    def is_loaded(self) -> bool:
        """Return whether the model's files could be read; if not, the next worker may bring them."""
        return self._preparer is not None

    @property
    def preparer(self) -> preprocessor.Preprocessor:
        """Return what turns requests into tokens. Raises Unavailable if the model's files could not be read."""
        if self._preparer is None:
            raise errors.Unavailable(
                f"the model {self.name!r} cannot be served here: {self.problem}", retry_after_s=10
            )
        return self._preparer

    @property
    def capabilities(self) -> list[str]:
        """Return what the model can be asked for: `chat`, `completions`, `embeddings`, `tools`, `reasoning` …"""
        facts = self.card.runtime_config
        by_engine = {
            "structured_outputs": facts.supports_guided,
            "logprobs": facts.supports_logprobs,
            "infill": facts.infill_format is not None,
            "images": facts.max_images > 0,
        }
        named = [str(kind) for kind in self.card.model_type]
        if not self.can_generate:
            return named
        written = () if self._preparer is None else self._preparer.capabilities
        return [*named, *written, *(name for name, can in by_engine.items() if can)]

    def check_can_generate(self) -> None:
        """Raise InvalidRequest if the model only makes embeddings."""
        if not self.can_generate:
            raise errors.InvalidRequest.of_param(
                "model", f"{self.name!r} makes embeddings, not text; ask /v1/embeddings"
            )

    @property
    def embedding(self) -> model_card.EmbeddingFacts:
        """Return the facts of the model's vectors. Raises InvalidRequest if it makes none."""
        if self.card.embedding is None:
            raise errors.InvalidRequest.of_param(
                "model",
                f"{self.name!r} makes no embeddings; a worker that is started with "
                "--task embed does",
            )
        return self.card.embedding

    async def open_stream(
        self,
        request: generate.Request | encoders.EmbeddingRequest,
        receiver: requests.Receiver,
        options: routing.RoutingOptions,
        *,
        avoid: Collection[int] = (),
        weights: str = "",
    ) -> requests.Stream:
        """Send a request to an instance, if possible none of `avoid`, and return the stream of its answer.

        With `weights`, the fingerprint of those with which the answer began, it goes to no instance with others.
        Raises NoWorkers, Overloaded or WorkerLost.
        """
        replicas = self._pick_endpoint(options.instance_id, avoid, weights)
        if avoid or weights:
            options = msgspec.structs.replace(
                options,
                allowed_instances=replicas.allowed_ids(avoid, weights),
                is_restricted=bool(weights),
            )
        # the route of an embedding model reads nothing of the request
        generation: Any = request
        return await replicas.route.open_stream(generation, receiver, options)

    def choose_instance(
        self,
        request: generate.Request,
        *,
        instance_id: int | None,
        avoid: Collection[int] = (),
    ) -> int:
        """Return the id of the instance that would get the request. Raises NoWorkers."""
        replicas = self._pick_endpoint(instance_id, avoid)
        options = routing.RoutingOptions(
            instance_id=instance_id, allowed_instances=replicas.allowed_ids(avoid)
        )
        return replicas.route.preview_instance(request, options)

    def weights_of(self, instance_id: int) -> str:
        """Return the fingerprint of the weights of an instance, "" if it is unknown."""
        for replicas in self.replicas.values():
            if instance_id in replicas.cards:
                return replicas.cards[instance_id].weights
        return ""

    def _pick_endpoint(
        self, instance_id: int | None, avoid: Collection[int], weights: str = ""
    ) -> EndpointInstances:
        """Pick the next endpoint in turn, each as often as it has instances; most models have one. Raises NoWorkers.

        While new workers at an endpoint of their own replace others, the first of them would else get half of all.
        """
        usable = [
            replicas
            for replicas in self.replicas.values()
            if replicas.has_live_instances
            and (instance_id is None or instance_id in replicas.cards)
        ]
        if weights and usable:
            usable = [replicas for replicas in usable if replicas.allowed_ids((), weights)]
            if not usable:
                raise errors.NoWorkers(
                    f"no worker of {self.name!r} has the weights with which this answer began"
                )
        if len(usable) > 1:
            turns = [(each, live) for each in usable for live in each.live_instances]
            preferred = [each for each, live in turns if live.instance_id not in avoid]
            usable = preferred or [each for each, _ in turns]
        if usable:
            return usable[next(self._num_picks) % len(usable)]
        if instance_id is not None:
            raise errors.NoWorkers(f"{self.name!r} has no worker {instance_id}: choose another")
        raise errors.NoWorkers(f"the model {self.name!r} has no worker now: try again shortly")


def _facts_of(card: model_card.ModelCard) -> tuple[object, ...]:
    """Return what a card says of requests; the sizes of an engine may differ between workers."""
    sizes = {"total_kv_blocks": 0, "max_num_seqs": 0, "max_num_batched_tokens": 0}
    engine = msgspec.structs.replace(
        card.runtime_config, **sizes, data_parallel_size=1, runtime_data={}
    )
    kinds = card.model_type, card.embedding
    return card.context_length, card.migration_limit, card.user_data, engine, *kinds


def list_adapters(
    bases: Mapping[str, RegisteredModel], previous: Mapping[str, RegisteredModel]
) -> Mapping[str, RegisteredModel]:
    """Return all LoRA adapters of the base models, by name; adapters in `previous` stay the same objects.

    A base model has its name before an adapter, and an older model's adapter before a newer one's.
    """
    adapters: dict[str, RegisteredModel] = {}
    for base in bases.values():
        for name, replicas in _adapter_replicas(base).items():
            if name in bases or name in adapters:
                _logger.warning("refused the adapter %r of %r: the name is taken", name, base.name)
                continue
            model = previous.get(name)
            if model is None or model.base is not base:
                model = base.make_adapter(name)
            model.replicas = replicas
            adapters[name] = model
    return adapters


def _adapter_replicas(
    base: RegisteredModel,
) -> dict[str, dict[instances.EndpointName, EndpointInstances]]:
    """Return the instances and routes of each adapter of the base model, by its name."""
    replicas_by_name: dict[str, dict[instances.EndpointName, EndpointInstances]] = {}
    for endpoint, base_replicas in base.replicas.items():
        for instance_id, card in base_replicas.cards.items():
            for name in card.lora_names:
                by_endpoint = replicas_by_name.setdefault(name, {})
                if endpoint not in by_endpoint:
                    route = routing.LoraRoute(base_replicas.route)
                    by_endpoint[endpoint] = EndpointInstances(base_replicas.client, route)
                by_endpoint[endpoint].cards[instance_id] = card
    for by_endpoint in replicas_by_name.values():
        for replicas in by_endpoint.values():
            replicas.route.set_model_cards(replicas.cards)
    return replicas_by_name
