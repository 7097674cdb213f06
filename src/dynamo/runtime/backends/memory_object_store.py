"""An object store for the parts of one process. It forgets nothing: the process ends first."""

from dynamo.base import errors
from dynamo.runtime import object_store

_SCHEME = "memory://"


class MemoryObjectStore:
    """Shared by whoever stores and whoever reads."""

    def __init__(self, bounds: object_store.Bounds = object_store.Bounds()) -> None:  # noqa: B008 (a frozen value)
        self._bounds = bounds
        self._bodies: dict[str, bytes] = {}

    async def put(self, key: str, body: bytes) -> str:
        """See `object_store.ObjectStore`."""
        object_store.check_length(body, self._bounds)
        kept = sum(len(one) for name, one in self._bodies.items() if name != key)
        if kept + len(body) > self._bounds.max_bytes:
            raise errors.Overloaded(f"the object store is full: {kept} bytes are in it")
        self._bodies[key] = body
        return f"{_SCHEME}{key}"

    async def get(self, url: str, *, timeout_s: float) -> bytes:
        """See `object_store.ObjectStore`."""
        try:
            return self._bodies[url.removeprefix(_SCHEME)]
        except KeyError:
            raise errors.Unavailable(f"{url} is not in the object store of this process") from None
