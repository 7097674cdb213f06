"""Which inputs of which calls the next batch embeds.

Calls take turns, one input each, so that a call of one short text does not wait behind one of thousands. Within a call
the longest come first: those of like length then share a batch, and attend in one product.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_BATCH_INPUTS = 64  # also bounds a reply: 64 vectors of 8192 floats are 2 MiB


class Place(NamedTuple):
    """One input of one call."""

    call_id: int
    number: int


class EmbeddingQueue:
    """What waits, in inputs and in tokens."""

    def __init__(self, max_batch_tokens: int) -> None:
        self.num_tokens = 0
        self._max_batch_tokens = max_batch_tokens
        self._turns: deque[int] = deque()
        self._waiting: dict[int, list[tuple[int, int]]] = {}  # call → (tokens, number), next last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, call_id: int, lengths: Sequence[int]) -> None:
        """A call came, with inputs of so many tokens, at least one."""
        self._waiting[call_id] = sorted((length, i) for i, length in enumerate(lengths))
        self._turns.append(call_id)
        self.num_tokens += sum(lengths)

    def drop(self, call_id: int) -> None:
        """Nobody waits for it any more. An unknown call is no error."""
        waiting = self._waiting.pop(call_id, None)
        if waiting is not None:
            self._turns.remove(call_id)
            self.num_tokens -= sum(length for length, _ in waiting)

    def take(self) -> list[Place]:
        """The next batch: within its bounds, except that one input always is; empty if nothing waits."""
        batch: list[Place] = []
        left = self._max_batch_tokens
        while self._turns and len(batch) < MAX_BATCH_INPUTS:
            call_id = self._turns[0]
            length, number = self._waiting[call_id][-1]
            if batch and length > left:
                break
            batch.append(Place(call_id, number))
            left -= length
            self._advance(call_id, length)
        return batch

    def _advance(self, call_id: int, length: int) -> None:
        self.num_tokens -= length
        self._waiting[call_id].pop()
        self._turns.popleft()
        if self._waiting[call_id]:
            self._turns.append(call_id)
        else:
            del self._waiting[call_id]
