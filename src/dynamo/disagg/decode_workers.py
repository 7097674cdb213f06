"""The workers of a model that can answer prompts which a prefill worker has computed, as a frontend pairs them.

Their model cards say from which prefill workers each cannot copy (`prefill_workers`), and with which weights it
computes: while a model is updated there are workers with others, and none may go on with blocks of those.
"""  # decider

from collections.abc import Collection, Mapping

from dynamo.protocols import kv_transfer, model_card

_NONE: frozenset[int] = frozenset()


class DecodeWorkers:
    """Mutable; the route to the workers owns it."""

    def __init__(self) -> None:
        self.ids = _NONE
        self.imports_choices = True  # all of them copy the blocks of several choices, too
        self.unreachable: Mapping[int, frozenset[int]] = {}  # prefill workers, by decode worker
        self._foreign: Mapping[int, frozenset[int]] = {}  # those with other weights, likewise
        self._cards: Mapping[int, model_card.ModelCard] = {}
        self._prefill_cards: Mapping[int, model_card.ModelCard] = {}

    def set_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Replace the cards of all answering workers, by instance id."""
        self._cards = {i: card for i, card in cards.items() if _is_decode_worker(card)}
        self.ids = frozenset(self._cards)
        self.imports_choices = all(map(_imports_choices, self._cards.values()))
        unreachable = {i: _unreachable_from(card) for i, card in self._cards.items()}
        self.unreachable = {i: ids for i, ids in unreachable.items() if ids}
        self.set_prefill_cards(self._prefill_cards)

    def set_prefill_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Replace the cards of all prefill workers."""
        self._prefill_cards = cards
        foreign = {
            i: frozenset(p for p, other in cards.items() if not own.has_weights_of(other.weights))
            for i, own in self._cards.items()
        }
        self._foreign = {i: ids for i, ids in foreign.items() if ids}

    @property
    def has_obstacles(self) -> bool:
        """Return whether some of the workers cannot take the blocks of some prefill worker."""
        return bool(self.unreachable or self._foreign)

    def can_answer(self, instance_id: int | None, allowed: Collection[int] | None) -> bool:
        """Return whether a worker that a caller names, or allows (None: all), can copy blocks from others."""
        if instance_id is not None:
            return instance_id in self.ids
        return allowed is None or not self.ids.isdisjoint(allowed)

    def accepted(self, allowed: Collection[int] | None, *, is_restricted: bool) -> frozenset[int]:
        """Return those that a caller allows; all, if it allows none of them and is not restricted to what it allows."""
        accepted = self.ids if allowed is None else self.ids.intersection(allowed)
        return accepted if is_restricted else accepted or self.ids

    def unreachable_from(self, instance_id: int) -> frozenset[int]:
        """Return the prefill workers from which this worker cannot copy now."""
        return self.unreachable.get(instance_id, _NONE)

    def foreign_to(self, instance_id: int) -> frozenset[int]:
        """Return the prefill workers that compute with other weights than this worker."""
        return self._foreign.get(instance_id, _NONE)

    def ids_without(self, weights: str) -> frozenset[int]:
        """Return the workers that compute with other weights than those with this fingerprint."""
        return frozenset(i for i, own in self._cards.items() if not own.has_weights_of(weights))


def _unreachable_from(card: model_card.ModelCard) -> frozenset[int]:
    """Return the prefill workers from which a worker cannot copy; what another version wrote there is ignored."""
    ids = card.runtime_config.runtime_data.get(kv_transfer.UNREACHABLE_KEY)
    return frozenset(i for i in ids if isinstance(i, int)) if isinstance(ids, list) else _NONE


def _imports_choices(card: model_card.ModelCard) -> bool:
    return card.runtime_config.runtime_data.get(kv_transfer.CHOICES_KEY) is not False


def _is_decode_worker(card: model_card.ModelCard) -> bool:
    """Return whether a worker copies blocks from prefill workers: by its role, or because it has none and can."""
    return (
        card.worker_type is model_card.WorkerType.DECODE
        or card.runtime_config.runtime_data.get(kv_transfer.IMPORTS_KEY) is True
    )
