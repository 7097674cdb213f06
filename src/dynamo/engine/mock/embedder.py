"""An embedder without a model: vectors that mean nothing, but are always the same ones for the same tokens.

A vector is drawn by a generator that is seeded with a hash of the token ids, so two different texts are nearly at right
angles and equal texts agree, across processes too. Any beginning of it may be asked for.
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
        """Nothing to load."""
        return self._facts

    async def embed(self, batch: Sequence[api.EmbedInput]) -> list[bytes]:
        """At once, but for one turn of the event loop, so that others go on."""
        await asyncio.sleep(0)
        full = self._facts.vectors.dimensions
        return [_vector(one.token_ids, one.dimensions or full) for one in batch]

    async def stop(self) -> None:
        """Nothing to end."""


def _vector(token_ids: bytes, dimensions: int) -> bytes:
    seed = xxhash.xxh3_64_intdigest(token_ids)
    draw = random.Random(seed).gauss
    values = [draw(0, 1) for _ in range(dimensions)]
    length = math.hypot(*values)
    return embed.pack(value / length for value in values)
