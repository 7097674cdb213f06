"""The stored responses of the Responses API, from which a conversation can be continued.

They are kept in memory, bounded by number and by bytes; the least recently used is dropped first. Each holds its whole
conversation, so nothing is lost when an earlier response is dropped.
"""  # decider

import contextlib
from collections import OrderedDict
from typing import NamedTuple

RESPONSE_ID, ITEM_REFERENCE = "resp_", "item_reference"
_NUM_DIGITS = 32  # of the id of a response, with which the ids of its items begin


def response_of(item_id: str) -> str:
    """Return the id of the response that has the item of this id, if it is one of ours."""
    return RESPONSE_ID + item_id.partition("_")[2][:_NUM_DIGITS]


class StoredResponse(NamedTuple):
    """One response, as JSON."""

    response: bytes  # the object that the client received
    conversation: bytes  # the messages up to and including the answer, without instructions
    # the key that asked for it, and the only one that may read, continue or delete it
    tenant: str = ""
    input_items: bytes = b""  # of this request alone, in the order in which they came

    @property
    def num_bytes(self) -> int:
        """Return the memory that the response takes."""
        return len(self.response) + len(self.conversation) + len(self.input_items)


class ResponseStore:
    """Stored responses by id."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response and drop others if need be; a response above the limit by itself is not stored."""
        if stored.num_bytes > self._max_bytes:
            return
        self.remove(response_id)
        self._responses[response_id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._responses) > self._max_items or self._num_bytes > self._max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        """Return a stored response of this tenant and mark it as used; None if there is none of this id.

        May be called in the thread that decodes large requests.
        """
        stored = self._responses.get(response_id)
        if stored is None or stored.tenant != tenant:
            return None
        with contextlib.suppress(KeyError):  # it was dropped in this moment
            self._responses.move_to_end(response_id)
        return stored

    def find_any(self, response_id: str) -> StoredResponse | None:
        """Return a stored response of any tenant, for other processes of this frontend."""
        return self._responses.get(response_id)

    def remove(self, response_id: str) -> bool:
        """Remove a response; return whether there was one."""
        stored = self._responses.pop(response_id, None)
        self._num_bytes -= stored.num_bytes if stored else 0
        return stored is not None
