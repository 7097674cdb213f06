"""The messages to models that encode texts: the workers of an embedding model, and the semantic router's encoders.

The internal request for embeddings, and a worker's replies: token ids in, vectors out, no text.
Vectors travel as the bytes of little-endian 32-bit floats. OpenAI's clients ask for the same bytes in base64, so most
answers never turn a number into text.

The messages between the semantic router and the process of its encoders: texts in, labels or vectors out.
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


COMPONENT, ENDPOINT = "semantic_encoder", "classify"


class ClassifierInput(msgspec.Struct, frozen=True, array_like=True):
    """A text for one of the classifiers: domain, attack or pii; or for the embedding."""

    classifier: str
    text: str


class ClassificationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of one request; those for the same classifier are computed together."""

    inputs: tuple[ClassifierInput, ...]


class LabeledSpan(msgspec.Struct, frozen=True, array_like=True):
    """Characters of a text with a label, without the prefix that says where in a span a token is."""

    label: str
    start: int
    end: int
    confidence: float


class TextLabels(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one text."""

    labels: tuple[str, ...] = ()
    windows: tuple[tuple[float, ...], ...] = ()  # the probabilities of the labels in each window
    spans: tuple[LabeledSpan, ...] = ()  # of a token classifier, in the place of windows
    vector: bytes = b""  # of the embedding: little-endian 32-bit floats, of length 1 together
    is_complete: bool = True  # all of the text was read


class ClassificationReply(msgspec.Struct, frozen=True, kw_only=True):
    """The results in the order of the inputs."""

    results: tuple[TextLabels, ...]
