"""The part of the classification API that is about embeddings: the vectors by which the router compares texts.

Fields are those of the original. The model is the one that the configuration names, so a request cannot choose one.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import encoders
from dynamo.runtime.http import exchange
from dynamo.semantic import encoder_labels, service

MOST_TEXT = 8 * 2**20  # characters
_MOST_TEXTS = 1000  # that are embedded for one request
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_TEXT)]


class TextsToEmbed(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a question for embeddings; `dimension` is checked against that of the model."""

    texts: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=_MOST_TEXTS)]
    dimension: int | None = None


class TextPair(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a comparison of two texts."""

    text1: Text
    text2: Text


class TextAndCandidates(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a search for the candidates that are most similar to a text; all of them for a `top_k` of 0."""

    query: Text
    candidates: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=_MOST_TEXTS)]
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0


_decode_texts_to_embed = msgspec.json.Decoder(TextsToEmbed).decode
_decode_pair = msgspec.json.Decoder(TextPair).decode
_decode_candidates = msgspec.json.Decoder(TextAndCandidates).decode


class SimilarityApi:
    """Answers with the embeddings by which the router compares texts, and with their similarity."""

    def __init__(self, routing: service.RoutingService, clock: clocks.Clock) -> None:
        self._routing = routing
        self._clock = clock

    @property
    def _model(self) -> str:
        """The name of the model: that of the server, else of its directory; "" if the configuration has none."""
        loaded = self._routing.router.loaded
        settings = loaded.settings.encoders
        if settings.embeddings_url:
            return settings.embeddings_model
        return loaded.embedder.name if loaded.embedder is not None else ""

    async def answer_embeddings(self, client: exchange.Exchange) -> dict[str, Any]:
        """Return the vector of each text."""
        request, start = _decode_texts_to_embed(client.request.body), self._clock.now()
        vectors = await self._embed(request.texts)
        num_values = len(vectors[0])
        if request.dimension not in (None, num_values):
            raise errors.InvalidRequest.of_param(
                "dimension",
                f"expected {num_values}, that of {self._model}, got {request.dimension}",
            )
        total_ms = (self._clock.now() - start) * 1000
        each_ms = total_ms / len(vectors)
        rows = [
            {
                "text": text,
                "embedding": vector.tolist(),
                "dimension": num_values,
                "model_used": self._model,
                "processing_time_ms": each_ms,
            }
            for text, vector in zip(request.texts, vectors, strict=True)
        ]
        return {
            "embeddings": rows,
            "total_count": len(rows),
            "total_processing_time_ms": total_ms,
            "avg_processing_time_ms": each_ms,
        }

    async def answer_similarity(self, client: exchange.Exchange) -> dict[str, Any]:
        """Return the cosine of two texts' vectors."""
        request, start = _decode_pair(client.request.body), self._clock.now()
        first, second = await self._embed([request.text1, request.text2])
        return {
            "model_used": self._model,
            "similarity": float(first @ second),
            "processing_time_ms": (self._clock.now() - start) * 1000,
        }

    async def answer_candidates(self, client: exchange.Exchange) -> dict[str, Any]:
        """Return the candidates that are most similar to a text, the most similar one first."""
        request, start = _decode_candidates(client.request.body), self._clock.now()
        query, *vectors = await self._embed([request.query, *request.candidates])
        scores = [float(query @ vector) for vector in vectors]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        return {
            "matches": [
                {"index": i, "text": request.candidates[i], "similarity": scores[i]}
                for i in best[: request.top_k or None]
            ],
            "total_candidates": len(scores),
            "model_used": self._model,
            "processing_time_ms": (self._clock.now() - start) * 1000,
        }

    def describe_models(self) -> dict[str, Any]:
        """Return the model of embeddings, as the original lists several."""
        settings, embedder = (
            self._routing.router.settings.encoders,
            self._routing.router.loaded.embedder,
        )
        model = {
            "model_name": self._model,
            "model_type": "server" if settings.embeddings_url else "encoder",
            "model_path": settings.embeddings_url or str(embedder),
            "is_loaded": True,
        }
        models = [model] if self._model else []
        return {"models": models, "summary": {"total_models": len(models)}}

    async def _embed(self, texts: Sequence[str]) -> list[npt.NDArray[np.float32]]:
        """Return vectors of length 1. Raises InvalidRequest without a model, Unavailable without its answer."""
        if not self._model:
            raise errors.InvalidRequest(
                "the configuration has no model of embeddings: encoders.embeddings_url, or rules or tools that are"
                " compared by one"
            )
        name = encoder_labels.EMBEDDING
        inputs = [encoders.ClassifierInput(name, text) for text in dict.fromkeys(texts)]
        classifiers = await self._routing.ask_encoders_for(inputs)
        vectors = [vector for text in texts if (vector := classifiers.embed(text)) is not None]
        if len(vectors) < len(texts):
            raise errors.Unavailable(f"the model of embeddings {self._model} does not answer")
        return vectors
