"""A model as this frontend serves it: how to prepare requests for it, and who answers them."""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from dynamo.base import errors
from dynamo.frontend import identity
from dynamo.preprocess import preprocessor
from dynamo.protocols import embed, generate, instances, model_card
from dynamo.runtime import client, requests


@dataclass(slots=True)
class Replicas:
    """The instances of one endpoint that serve the model."""

    client: client.EndpointClient
    instance_ids: set[int] = field(default_factory=set)

    @property
    def living(self) -> list[instances.Instance]:
        """Those that are registered now."""
        found = self.client.instances
        return [found[one] for one in sorted(self.instance_ids) if one in found]

    def among(self, avoid: Collection[int]) -> Collection[int] | None:
        """Whom to ask; None: anybody at this endpoint. Where all are to be avoided, it is any of them."""
        if avoid:
            return self.instance_ids.difference(avoid) or self.instance_ids
        is_alone = self.client.instances.keys() <= self.instance_ids
        return None if is_alone else self.instance_ids


class ServedModel:
    """One name in /v1/models. `problem` says why it cannot be served, if its files could not be read."""

    def __init__(
        self,
        card: model_card.ModelCard,
        preparer: preprocessor.Preprocessor | None,
        problem: str | None,
    ) -> None:
        self.card = card
        self.replicas: Mapping[instances.EndpointName, Replicas] = {}
        self._preparer = preparer
        self._problem = problem
        self._turns = itertools.count()
        self.fingerprint = identity.fingerprint(card)

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
        request: generate.Request | embed.Request,
        receiver: requests.Receiver,
        *,
        mode: client.Mode,
        instance_id: int | None,
        avoid: Collection[int] = (),
        headers: Mapping[str, str],
        timeout_s: float | None,
        on_asked: Callable[[int], None] | None = None,
    ) -> requests.Stream:
        """Begin an answer at one of its instances, if possible none of `avoid`. Raises NoWorkers or WorkerLost."""
        replicas = self._pick(instance_id, avoid)
        among = replicas.among(avoid)
        return await replicas.client.open(
            request,
            receiver,
            mode=mode,
            instance_id=instance_id,
            among=among,
            headers=headers,
            timeout_s=timeout_s,
            on_asked=on_asked,
        )

    def choose(
        self, *, mode: client.Mode, instance_id: int | None, avoid: Collection[int] = ()
    ) -> int:
        """The instance that would be asked. Raises NoWorkers."""
        replicas = self._pick(instance_id, avoid)
        return replicas.client.choose(
            mode=mode, instance_id=instance_id, among=replicas.among(avoid)
        )

    def _pick(self, instance_id: int | None, avoid: Collection[int]) -> Replicas:
        """The endpoints take turns; most models have one."""
        usable = [
            one
            for one in self.replicas.values()
            if one.living and (instance_id is None or instance_id in one.instance_ids)
        ]
        if avoid:
            free = [one for one in usable if any(i.instance_id not in avoid for i in one.living)]
            usable = free or usable
        if usable:
            return usable[next(self._turns) % len(usable)]
        if instance_id is not None:
            raise errors.NoWorkers(f"no instance {instance_id} serves the model {self.name!r}")
        raise errors.NoWorkers(f"the model {self.name!r} has no worker now: try again shortly")
