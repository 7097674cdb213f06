"""Discovery: the records of all living processes, such as the endpoints that they serve.

A process holds one *lease*: the keys that it puts vanish when it closes, when it dies, or when its lease is lost for
longer than the time to live. Keys are `/`-separated paths (see `protocols.instances`), values are small bytes (JSON).

Implementations: `backends.memory` (one process), `backends.file` (one host, the default),
`backends.etcd` (several hosts).
`tests/contract/test_discovery.py` runs one suite over all of them.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A key is new or has a new value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """A key is gone."""

    key: str


Change = Put | Delete


class Discovery(Protocol):
    """Put under a lease, get a prefix, watch a prefix."""

    async def put(self, key: str, value: bytes) -> None:
        """Write a key under this process's lease; a second put replaces the value."""
        ...

    async def delete(self, key: str) -> None:
        """Remove a key of this process; a missing one is no error."""
        ...

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """Return all living keys that begin with `prefix`, with their values."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        """Iterate over a Put for each living key under `prefix`, then every change in order; ends only by cancellation.

        A dead owner's keys are deleted within the backend's time to live. Intermediate values may be skipped.
        """
        ...

    async def close(self) -> None:
        """Give up the lease: the keys of this process vanish at once."""
        ...
