"""The two roads from a request to workers: one for text, one for vectors."""

from dataclasses import dataclass

from dynamo.frontend import embeddings, pipeline


@dataclass(frozen=True, slots=True)
class Roads:
    """What the frontend's routes lead to."""

    text: pipeline.Pipeline
    vectors: embeddings.Embeddings
