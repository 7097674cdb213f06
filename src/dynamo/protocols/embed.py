"""The internal request for embeddings, and a worker's replies: token ids in, vectors out, no text.

Vectors travel as the bytes of little-endian 32-bit floats. OpenAI's clients ask for the same bytes in base64, so most
answers never turn a number into text.
"""

import array
import sys
from collections.abc import Iterable
from typing import Annotated

import msgspec

from dynamo.protocols import blocks

FLOAT_BYTES = 4
_SWAP = sys.byteorder == "big"


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Texts to embed, each as packed token ids (`blocks.pack`)."""

    id: str
    model: str
    inputs: tuple[bytes, ...]
    dimensions: int | None = None  # truncate each vector to this length and normalize it again
    priority: int = 0  # in a frontend's queue; the highest leaves first

    @property
    def prompt_len(self) -> int:
        """The number of tokens in all inputs."""
        return sum(map(blocks.count, self.inputs))


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """The vectors of the inputs that one batch computed; a request is answered by one or more of these.

    `data` is a packed array of shape [len(numbers), dimensions].
    """

    # indices into `EmbeddingRequest.inputs`
    numbers: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data: bytes


def pack(vector: Iterable[float]) -> bytes:
    """Return a vector as the bytes of little-endian 32-bit floats."""
    floats = array.array("f", vector)
    if _SWAP:
        floats.byteswap()
    return floats.tobytes()


def unpack(packed: bytes) -> list[float]:
    """Return the floats of packed bytes. Raises ValueError if the length is no multiple of four."""
    floats = array.array("f")
    floats.frombytes(packed)
    if _SWAP:
        floats.byteswap()
    return floats.tolist()
