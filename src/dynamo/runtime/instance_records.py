"""The records that one instance has in discovery: they are published, withdrawn for a while, changed and removed.

Discovery may be away: a record that it cannot take now is published when it is back.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from dynamo.base import errors, ids
from dynamo.protocols import instances
from dynamo.runtime import discovery

_logger = logging.getLogger(__name__)


class InstanceRecords:
    """The records of one instance, by key, in the order in which they were published."""

    def __init__(self, registry: discovery.Discovery, instance_id: ids.InstanceId) -> None:
        self._discovery = registry
        self._instance_id = instance_id
        self._records: dict[str, bytes] = {}
        self._is_withdrawn = False
        self._hidden: set[str] = set()  # keys of endpoints that are withdrawn for themselves
        self._publishing = asyncio.Lock()  # a record that changes is not restored in its old state

    async def put(self, key: str, record: msgspec.Struct) -> None:
        """Publish a record of this instance, until `detach`; while it is withdrawn, `restore` does."""
        self._records[key] = msgspec.json.encode(record)
        await self._publish(key)

    async def detach(self, key: str) -> None:
        """Remove a record of this instance for good. Idempotent."""
        self._hidden.discard(key)
        if self._records.pop(key, None) is not None:
            await self._discovery.delete(key)

    async def change(self, key: str, change: Callable[[bytes], msgspec.Struct]) -> None:
        """Replace an attached record of a registered instance by what `change` makes of it; changes come in turn.

        While discovery is away the change is published later. Raises Conflict while the instance is withdrawn or this
        process is draining.
        """
        async with self._publishing:
            if not self._is_shown(key):
                raise errors.Conflict("not in discovery now: try again when this process serves")
            before = self._records[key]
            try:
                await self.put(key, change(before))
            except errors.Unavailable as error:
                _logger.warning("%s is published when discovery is back: %s", key, error)
            except BaseException:
                self._records[key] = before
                raise

    async def deregister(self) -> None:
        """Remove all records of this instance, the last first, for good; its handlers still answer."""
        await self.withdraw()
        self._records.clear()

    async def withdraw(self) -> None:
        """Remove all records of this instance until `restore`; its handlers still answer.

        This does not wait for a record that discovery takes long to publish.
        """
        self._is_withdrawn = True
        await self._discovery.delete(*reversed(list(self._records)))

    async def restore(self) -> None:
        """Publish the withdrawn records again; those that discovery cannot take now are published when it is back."""
        self._is_withdrawn = False
        await self._publish_again(self._records)

    async def withdraw_endpoint(self, name: instances.EndpointName) -> None:
        """Remove the records of one endpoint until `restore_endpoint`; its handler still answers."""
        keys = self._keys_of(name)
        self._hidden.update(keys)
        await self._discovery.delete(*reversed(keys))

    async def deregister_endpoint(self, name: instances.EndpointName) -> None:
        """Remove the records of one endpoint until they are put anew; its handler still answers."""
        try:
            await self.withdraw_endpoint(name)
        finally:
            for key in self._keys_of(name):
                self._hidden.discard(key)
                del self._records[key]

    async def restore_endpoint(self, name: instances.EndpointName) -> None:
        """Publish the withdrawn records of one endpoint again; while all are withdrawn, `restore` does."""
        keys = self._keys_of(name)
        self._hidden.difference_update(keys)
        await self._publish_again(keys)

    def _keys_of(self, name: instances.EndpointName) -> list[str]:
        """Return the keys of an endpoint's instance and card, in the order in which they were published."""
        end = f"/{name.path}/{self._instance_id:x}"
        return [key for key in self._records if key.endswith(end)]

    def _is_shown(self, key: str) -> bool:
        return key in self._records and not self._is_withdrawn and key not in self._hidden

    async def _publish(self, key: str) -> None:
        """Publish a record, unless it is withdrawn, and remove it again if it is withdrawn meanwhile."""
        if self._is_shown(key):
            try:
                await self._discovery.put(key, self._records[key])
            finally:
                if not self._is_shown(key):
                    await self._discovery.delete(key)

    async def _publish_again(self, keys: Iterable[str]) -> None:
        async with self._publishing:
            for key in list(keys):
                try:
                    await self._publish(key)
                except errors.Unavailable as error:
                    _logger.warning("%s is published when discovery is back: %s", key, error)
