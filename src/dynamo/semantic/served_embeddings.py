"""Embeddings of an OpenAI-compatible server (`/v1/embeddings`), for rules and tools in place of the encoders' process.

Each question is one request on a connection of its own. A server that is away, slow, refuses or answers something else
gives no vectors: rules by embedding then do not hold, and tools follow `fallback_to_empty`.
"""

import logging
import os
from collections.abc import Sequence

import msgspec
import numpy as np

from dynamo.base import errors
from dynamo.protocols import encoders
from dynamo.runtime.http import client
from dynamo.semantic import config, encoder_labels, encoder_scores

_MOST_BYTES = 16 * 2**20  # of an answer
_logger = logging.getLogger(__name__)


class _Embedding(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


async def embed_texts(
    texts: Sequence[str], settings: config.EncoderSettings
) -> encoder_scores.Answers:
    """Return the vectors of texts, each of length 1; none if the server does not give all of them in time."""
    if not texts:
        return {}
    body = msgspec.json.encode({"model": settings.embeddings_model, "input": list(texts)})
    try:
        answer = await _post(f"{settings.embeddings_url.rstrip('/')}/embeddings", body, settings)
        vectors = _read_vectors(answer, len(texts))
    except (errors.DynamoError, ValueError, KeyError, msgspec.DecodeError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        return {
            (encoder_labels.EMBEDDING, text): encoders.TextLabels(vector=vector)
            for text, vector in zip(texts, vectors, strict=True)
        }
    _logger.warning("no embeddings of %s: %s", settings.embeddings_url, reason)
    return {}


def _read_vectors(answer: bytes, num_texts: int) -> list[bytes]:
    """Return the vectors in an answer, each of length 1. Raises ValueError and KeyError."""
    rows = {row.index: row.embedding for row in msgspec.json.decode(answer, type=_Embeddings).data}
    vectors = np.asarray([rows[number] for number in range(num_texts)], "<f4")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and lengths.all()):
        raise ValueError("expected vectors with a finite length above 0")
    return [vector.tobytes() for vector in (vectors / lengths).astype("<f4")]


async def _post(url: str, body: bytes, settings: config.EncoderSettings) -> bytes:
    """Return the body of the answer. Raises Unavailable."""
    key = os.environ.get(settings.embeddings_key_variable or "", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limit_s = settings.timeout_seconds
    status, content = await client.request(
        "POST", url, body, headers=headers, timeout_s=limit_s, max_bytes=_MOST_BYTES
    )
    if status != 200:
        raise errors.Unavailable(f"expected the status 200, got {status}")
    return content
