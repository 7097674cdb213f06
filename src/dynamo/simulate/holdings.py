"""The index of a simulation: told everything at once, and always right."""

from collections.abc import Sequence

from dynamo.router import api, chain_holders
from dynamo.simulate.worker import Change


class ExactIndex:
    """An `api.Index` over the workers' own blocks."""

    def __init__(self) -> None:
        self._holders = chain_holders.ChainHolders()
        self._names: dict[api.Worker, set[int]] = {}

    def insert_worker(self, worker: api.Worker) -> None:
        """It holds nothing yet."""
        self._holders.insert(worker)
        self._names[worker] = set()

    def apply(self, worker: api.Worker, changes: Sequence[Change]) -> None:
        """What its cache took in, and what it forgot."""
        held = self._names[worker]
        for is_stored, names in changes:
            if is_stored:
                self._holders.hold(worker, names, 0)
                held.update(names)
            else:
                self._holders.let_go(worker, names)
                held.difference_update(names)

    def find(self, sequence_hashes: Sequence[int]) -> api.Overlaps:
        """Who holds how many leading blocks."""
        return api.Overlaps(device=self._holders.runs(sequence_hashes))

    def remove_worker(self, worker: api.Worker) -> None:
        """It is gone."""
        self._holders.let_go(worker, list(self._names.pop(worker)))
        self._holders.remove(worker)
