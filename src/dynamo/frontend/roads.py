"""The two roads from a request to workers: one for text, one for vectors."""

from dataclasses import dataclass

from dynamo.frontend import embeddings, pipeline
from dynamo.frontend.admission import controller


@dataclass(frozen=True, slots=True)
class Roads:
    """What the frontend's routes lead to."""

    text: pipeline.Pipeline
    vectors: embeddings.Embeddings

    def admit_by(self, admission: controller.Desk) -> None:
        """From now on requests go past this desk, on either road."""
        self.text.admit_by(admission)
        self.vectors.admit_by(admission)
