"""The mock embedder: vectors without a meaning, but always the same ones for the same tokens.

A vector is drawn by a generator that is seeded with a hash of the token ids, so two different texts are nearly at right
angles and equal texts agree, across processes too. A request may ask for fewer dimensions.
"""

import asyncio
import math
import random
from collections.abc import Sequence

import xxhash

from dynamo.engine import api
from dynamo.protocols import embed, model_card

MAX_BATCHED_TOKENS = 8192


class MockEmbedder:
    """An `api.Embedder`."""

    def __init__(self, *, context_length: int, dimensions: int) -> None:
        self._facts = api.EmbedderFacts(
            context_length=context_length,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            vectors=model_card.EmbeddingFacts(dimensions=dimensions, can_shorten=True),
        )

    async def start(self) -> api.EmbedderFacts:
        """Return the facts of the embedder; there is nothing to load."""
        return self._facts

    async def embed(self, batch: Sequence[api.EmbedInput]) -> list[bytes]:
        """Return a vector for each input, after one turn of the event loop, so that other tasks run in between."""
        await asyncio.sleep(0)
        full = self._facts.vectors.dimensions
        return [_vector(text.token_ids, text.dimensions or full) for text in batch]

    async def stop(self) -> None:
        """Do nothing: there is nothing to stop."""


def _vector(token_ids: bytes, dimensions: int) -> bytes:
    seed = xxhash.xxh3_64_intdigest(token_ids)
    draw = random.Random(seed).gauss
    values = [draw(0, 1) for _ in range(dimensions)]
    length = math.hypot(*values)
    return embed.pack(value / length for value in values)
