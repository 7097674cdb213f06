"""The index of a simulation: told everything at once, and always right."""

from collections.abc import Sequence

from dynamo.router import api, closed_holders


class ExactIndex:
    """An `api.Index` over the workers' own blocks."""

    def __init__(self) -> None:
        self._holders = closed_holders.Holders()
        self._names: dict[api.Worker, set[int]] = {}

    def insert_worker(self, worker: api.Worker) -> None:
        """It holds nothing yet."""
        self._holders.insert(worker)
        self._names[worker] = set()

    def stored(self, worker: api.Worker, chain: Sequence[int]) -> None:
        """It holds this whole chain."""
        run = self._holders.run(worker, chain)
        self._holders.hold(worker, chain, run)
        self._names[worker].update(chain[run:])

    def removed(self, worker: api.Worker, names: Sequence[int]) -> None:
        """It holds these blocks no more."""
        held = self._names[worker].intersection(names)
        self._holders.let_go(worker, list(held))
        self._names[worker] -= held

    def find(self, sequence_hashes: Sequence[int]) -> api.Overlaps:
        """Who holds how many leading blocks."""
        return api.Overlaps(device=self._holders.runs(sequence_hashes))

    def remove_worker(self, worker: api.Worker) -> None:
        """It is gone."""
        self._holders.let_go(worker, list(self._names.pop(worker)))
        self._holders.remove(worker)
