"""The queue of inputs that wait to be embedded; it decides which inputs of which calls form the next batch.

Calls take turns, one input each, so that a call with one short text does not wait behind a call with thousands. Within
a call the longest inputs come first: inputs of similar length then share a batch, and attention is one product.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_BATCH_INPUTS = 64  # also bounds a reply: 64 vectors of 8192 floats are 2 MiB


class InputRef(NamedTuple):
    """One input of one call."""

    call_id: int
    number: int


class EmbeddingQueue:
    """Inputs of calls, counted in inputs and in tokens."""

    def __init__(self, max_batch_tokens: int) -> None:
        self.num_tokens = 0
        self._max_batch_tokens = max_batch_tokens
        self._turns: deque[int] = deque()  # call ids
        self._waiting_by_call: dict[int, list[tuple[int, int]]] = {}  # (tokens, number), next last

    def __len__(self) -> int:
        return sum(map(len, self._waiting_by_call.values()))

    def add(self, call_id: int, lengths: Sequence[int]) -> None:
        """Add a call with inputs of these lengths in tokens, at least one."""
        self._waiting_by_call[call_id] = sorted((length, i) for i, length in enumerate(lengths))
        self._turns.append(call_id)
        self.num_tokens += sum(lengths)

    def drop(self, call_id: int) -> None:
        """Remove the inputs of a call that still wait; an unknown call is no error."""
        waiting = self._waiting_by_call.pop(call_id, None)
        if waiting is not None:
            self._turns.remove(call_id)
            self.num_tokens -= sum(length for length, _ in waiting)

    def take_batch(self) -> list[InputRef]:
        """Remove and return the next batch, empty if nothing waits.

        A batch keeps to the bounds in inputs and tokens, except that a single longer input is a batch of its own.
        """
        batch: list[InputRef] = []
        tokens_left = self._max_batch_tokens
        while self._turns and len(batch) < MAX_BATCH_INPUTS:
            call_id = self._turns[0]
            waiting = self._waiting_by_call[call_id]
            length, number = waiting[-1]
            if batch and length > tokens_left:
                break
            batch.append(InputRef(call_id, number))
            tokens_left -= length
            self.num_tokens -= length
            waiting.pop()
            self._turns.popleft()
            if waiting:
                self._turns.append(call_id)
            else:
                del self._waiting_by_call[call_id]
        return batch
