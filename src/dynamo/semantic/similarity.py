"""Signals by embedding: how similar the last user text is to the candidates of a rule.

A vector comes from the encoders' process; those of the candidates are computed once for a configuration and kept.
Vectors have the length 1, so that a dot product is the cosine. Without a vector no rule holds, and the result says why.
"""  # decider

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dynamo.semantic import config, encoder_scores

Vector: TypeAlias = npt.NDArray[np.float32]


class RuleMatch(NamedTuple):
    """The best rule that holds, or why none could."""

    rule: str | None = None
    score: float = 0.0
    missing: str = ""  # what was not there to compare


class ReferenceVectors:
    """The vectors of texts that requests are compared with."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = tuple(dict.fromkeys(texts))
        self._vectors: dict[str, Vector] = {}

    def missing(self) -> list[str]:
        """Return the texts whose vectors are not there yet."""
        return [text for text in self._texts if text not in self._vectors]

    def add(self, answers: encoder_scores.Answers) -> None:
        for text in self.missing():
            vector = encoder_scores.vector_in(answers, text)
            if vector is not None:
                self._vectors[text] = vector

    def similarities(self, vector: Vector, texts: Sequence[str]) -> list[float] | None:
        """Return the cosine of a vector with each text's; None if one is not there or of another length."""
        others = [self._vectors.get(text) for text in texts]
        if not all(other is not None and other.shape == vector.shape for other in others):
            return None
        return [float(vector @ other) for other in others if other is not None]


class SimilarityRules:
    """The rules of a configuration."""

    def __init__(self, rules: Sequence[config.EmbeddingRule], references: ReferenceVectors) -> None:
        self._rules = rules
        self._references = references

    def match(self, vector: Vector | None) -> RuleMatch:
        """Return the rule with the highest score of those that reach their thresholds."""
        if not self._rules:
            return RuleMatch()
        if vector is None:
            return RuleMatch(missing="no embedding of the text, because no encoder answered")
        best = RuleMatch()
        for rule in self._rules:
            similarities = self._references.similarities(vector, rule.candidates)
            if similarities is None:
                return RuleMatch(missing=f"no embeddings of the candidates of {rule.name}")
            score = _aggregate(similarities, rule.aggregation_method)
            if score >= rule.threshold and (best.rule is None or score > best.score):
                best = RuleMatch(rule.name, score)
        return best


def _aggregate(similarities: Sequence[float], method: str) -> float:
    """Return the score of a rule. A rule by `any` holds if one candidate is similar enough, so it is the highest."""
    return sum(similarities) / len(similarities) if method == "mean" else max(similarities)
