"""The object store: bytes that any process of a deployment may need and one of them has, such as large files.

An object's key is made of its content, so it never changes, many processes may store the same one, and a reader can
check it. No object stays for ever: a process that needs it stores it again in time, which costs nothing while it is
fresh.

Implementations: `backends.memory` (one process) and `backends.nats.jetstream`.
`tests/contract/test_object_store.py` runs one suite over both.
"""

from dataclasses import dataclass
from typing import Protocol

from dynamo.base import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreBounds:
    """The limits of a store."""

    max_age_s: float = 24 * 3600.0  # objects that were not stored again vanish
    max_bytes: int = 2**30  # of all objects; the server reserves this much disk
    max_object_bytes: int = 256 * 2**20

    @property
    def fresh_s(self) -> float:
        """The age in seconds up to which an object need not be stored again."""
        return self.max_age_s / 3


class ObjectStore(Protocol):
    """Objects by key, shared by all processes of the deployment."""

    async def put(self, key: str, body: bytes) -> str:
        """Store an object, unless a fresh one is there, and return its URL.

        Raises Overloaded (the store is full), Unavailable, LocalProtocolError (the object is too long).
        """
        ...

    async def get(self, url: str, *, timeout_s: float) -> bytes:
        """Return an object. Raises Unavailable if it is not there, is too long, or does not come within `timeout_s`."""
        ...


def check_length(body: bytes, bounds: ObjectStoreBounds) -> None:
    """Raise LocalProtocolError if the object is too long."""
    if len(body) > bounds.max_object_bytes:
        raise errors.LocalProtocolError(
            f"an object of {len(body)} bytes for a store, expected at most {bounds.max_object_bytes}"
        )
