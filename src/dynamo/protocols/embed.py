"""The internal request for embeddings, and what a worker replies to it.

Beside `generate`, and as plain: token ids in, vectors out, no text. Vectors travel as the bytes of little-endian 32-bit
floats, which is also what OpenAI's clients ask for, so that on the common way no number is ever turned into text.
"""

import array
import sys
from collections.abc import Iterable
from typing import Annotated

import msgspec

from dynamo.protocols import blocks

FLOAT_BYTES = 4
_SWAP = sys.byteorder == "big"


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Texts to embed, each as packed token ids (`blocks.pack`)."""

    id: str
    model: str
    inputs: tuple[bytes, ...]
    dimensions: int | None = None  # cut each vector to so many, and make it a unit vector again
    priority: int = 0  # who waits for room in a frontend: the higher comes first

    @property
    def prompt_len(self) -> int:
        """Tokens in all inputs."""
        return sum(map(blocks.count, self.inputs))


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """The vectors of those inputs that one batch computed; a request is answered by any number of these.

    `data` is [numbers, dimensions], packed.
    """

    numbers: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]  # places in `Request.inputs`
    data: bytes


def pack(vector: Iterable[float]) -> bytes:
    """A vector as little-endian 32-bit floats."""
    floats = array.array("f", vector)
    if _SWAP:
        floats.byteswap()
    return floats.tobytes()


def unpack(packed: bytes) -> list[float]:
    """The inverse of `pack`. Raises ValueError if the length is no multiple of four."""
    floats = array.array("f")
    floats.frombytes(packed)
    if _SWAP:
        floats.byteswap()
    return floats.tolist()
