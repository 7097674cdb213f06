"""The seam for bytes that any process of a deployment may need and one of them has: the tokenizers of models.

What is stored is named by its content, so that it never changes, many may store the same, and whoever reads can check
it. Nothing is stored for ever: who wants it to stay stores it again in time, which costs nothing while it is fresh.

Implementations: `backends.memory_object_store` (one process) and `backends.nats.object_store` (JetStream).
`tests/contract/test_object_store.py` runs one suite over both.
"""

from dataclasses import dataclass
from typing import Protocol

from dynamo.base import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreBounds:
    """What a store may hold."""

    max_age_s: float = 24 * 3600.0  # objects vanish that nobody stored again
    max_bytes: int = 2**30  # of them all; a server sets so much of its disk aside
    max_object_bytes: int = 256 * 2**20

    @property
    def fresh_s(self) -> float:
        """What is younger need not be stored again."""
        return self.max_age_s / 3


class ObjectStore(Protocol):
    """Objects by key. The bucket is shared by all who store there."""

    async def put(self, key: str, body: bytes) -> str:
        """Have it there, and fresh; gives the URL by which others find it. Raises Overloaded (full), Unavailable,
        LocalProtocolError (too long).
        """
        ...

    async def get(self, url: str, *, timeout_s: float) -> bytes:
        """Raises Unavailable if it is not there, is too long, or does not come in time."""
        ...


def check_length(body: bytes, bounds: ObjectStoreBounds) -> None:
    """Raises LocalProtocolError if the object is too long."""
    if len(body) > bounds.max_object_bytes:
        raise errors.LocalProtocolError(
            f"an object of {len(body)} bytes for a store, expected at most {bounds.max_object_bytes}"
        )
