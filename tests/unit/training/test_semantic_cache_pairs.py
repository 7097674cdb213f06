"""The figures of the semantic cache over our own rephrasings."""

import numpy as np
import pytest
from training.semantic import evaluate_cache

from dynamo.protocols import classification


def test_the_cache_joins_as_many_rephrasings_as_the_documentation_says():
    pairs = evaluate_cache.read_rephrasings()

    assert (evaluate_cache.count_joined(pairs), len(pairs)) == (16, 60)


def test_cosines_are_those_of_neighbours():
    class Model:
        def embed(self, texts, max_batch_tokens):
            for text in texts:
                vector = np.array((1.0, 0.0) if text == "a" else (0.6, 0.8), "<f4")
                yield classification.TextLabels(vector=vector.tobytes())

    cosines = evaluate_cache.measure_cosines(Model(), [("a", "a"), ("a", "b")])

    assert cosines == pytest.approx([1.0, 0.6])
