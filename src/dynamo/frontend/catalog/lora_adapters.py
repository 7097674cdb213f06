"""LoRA adapters as models: to clients each is one of its own, to everybody else it is its model with a word more.

A worker names its adapters on its model's card. So what they are follows from the models alone: an adapter is served by
those workers of its model that name it, appears and vanishes with them, and is refused where they are. It has the
model's tokenizer and template, and goes by the model's route (`router.lora_route`).
"""

import logging
from collections.abc import Mapping

from dynamo.frontend.catalog.served_model import Replicas, ServedModel
from dynamo.protocols import instances
from dynamo.router import lora_route

_logger = logging.getLogger(__name__)
_Found = dict[str, dict[instances.EndpointName, Replicas]]


def of(
    bases: Mapping[str, ServedModel], known: Mapping[str, ServedModel]
) -> Mapping[str, ServedModel]:
    """All adapters of these models, by name; those that are `known` stay the same objects.

    A model has its name before an adapter, and an older model's adapter before a newer one's.
    """
    served: dict[str, ServedModel] = {}
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


def _replicas(base: ServedModel) -> _Found:
    """Who has each adapter of this model, and the way there."""
    found: _Found = {}
    for endpoint, whole in base.replicas.items():
        for instance_id, card in whole.cards.items():
            for name in card.lora_names:
                by_endpoint = found.setdefault(name, {})
                if endpoint not in by_endpoint:
                    route = lora_route.LoraRoute(whole.route)
                    by_endpoint[endpoint] = Replicas(whole.client, route)
                by_endpoint[endpoint].cards[instance_id] = card
    for by_endpoint in found.values():
        for replicas in by_endpoint.values():
            replicas.route.serve_by(replicas.cards)
    return found
