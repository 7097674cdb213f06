"""The stored responses of the Responses API, from which a conversation can be continued.

They are kept in memory, bounded by number and by bytes. Of the tenant that has the most, the least recently used is
dropped first: no tenant displaces what another has within an equal share. Each holds its whole conversation, so nothing
is lost when an earlier response is dropped.
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
    input_items: bytes = b""  # of this request alone as they came: a text, or a list

    @property
    def num_bytes(self) -> int:
        """Return the memory that the response takes."""
        return len(self.response) + len(self.conversation) + len(self.input_items)


class _TenantResponses:
    """The responses of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0


class ResponseStore:
    """Stored responses by id."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._tenants: dict[str, _TenantResponses] = {}
        self._tenant_by_id: dict[str, str] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._tenant_by_id)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response and drop others if need be; a response above the limit by itself is not stored."""
        if stored.num_bytes > self._max_bytes:
            return
        self.remove(response_id)
        owned = self._tenants.setdefault(stored.tenant, _TenantResponses())
        owned.by_id[response_id] = stored
        self._tenant_by_id[response_id] = stored.tenant
        self._add_bytes(owned, stored.num_bytes)
        while len(self) > self._max_items:
            self._drop_oldest(max(self._tenants.values(), key=lambda owned: len(owned.by_id)))
        while self._num_bytes > self._max_bytes:
            self._drop_oldest(max(self._tenants.values(), key=lambda owned: owned.num_bytes))

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        """Return a stored response of this tenant and mark it as used; None if there is none of this id.

        May be called in the thread that decodes large requests.
        """
        owned = self._tenants.get(tenant)
        stored = None if owned is None else owned.by_id.get(response_id)
        if owned is not None and stored is not None:
            with contextlib.suppress(KeyError):  # it was dropped in this moment
                owned.by_id.move_to_end(response_id)
        return stored

    def find_any(self, response_id: str) -> StoredResponse | None:
        """Return a stored response of any tenant, for other processes of this frontend."""
        tenant = self._tenant_by_id.get(response_id)
        return None if tenant is None else self._tenants[tenant].by_id[response_id]

    def remove(self, response_id: str) -> bool:
        """Remove a response; return whether there was one."""
        tenant = self._tenant_by_id.get(response_id)
        if tenant is None:
            return False
        owned = self._tenants[tenant]
        self._forget(owned, response_id, owned.by_id.pop(response_id))
        return True

    def _drop_oldest(self, owned: _TenantResponses) -> None:
        self._forget(owned, *owned.by_id.popitem(last=False))

    def _forget(self, owned: _TenantResponses, response_id: str, removed: StoredResponse) -> None:
        del self._tenant_by_id[response_id]
        self._add_bytes(owned, -removed.num_bytes)
        if not owned.by_id:
            del self._tenants[removed.tenant]

    def _add_bytes(self, owned: _TenantResponses, num_bytes: int) -> None:
        owned.num_bytes += num_bytes
        self._num_bytes += num_bytes
