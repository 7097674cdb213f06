"""Answers of the Responses API that are kept for a while, so that a conversation can go on from them.

In memory, and bounded by number and by bytes: what was longest not asked for goes first. Each holds its whole
conversation, so nothing is lost when an earlier one is forgotten.
"""

from collections import OrderedDict
from typing import NamedTuple


class StoredResponse(NamedTuple):
    """One answer, as JSON."""

    response: bytes  # the object that the client got
    conversation: bytes  # the messages that led to it, and its own; without instructions

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self.response) + len(self.conversation)


class ResponseStore:
    """By id."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response_id: str, kept: StoredResponse) -> None:
        """Remember it, and forget others if need be; one that is too large by itself is not kept."""
        if kept.num_bytes > self._max_bytes:
            return
        self.forget(response_id)
        self._kept[response_id] = kept
        self._num_bytes += kept.num_bytes
        while len(self._kept) > self._max_items or self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def find(self, response_id: str) -> StoredResponse | None:
        """None if it never was, or is forgotten."""
        if response_id in self._kept:
            self._kept.move_to_end(response_id)
        return self._kept.get(response_id)

    def forget(self, response_id: str) -> bool:
        """Says whether it was there."""
        kept = self._kept.pop(response_id, None)
        self._num_bytes -= kept.num_bytes if kept else 0
        return kept is not None
